"""Finds the functions that a name on a list means, in torch or in a package built on it.

A *spelling* of an op is one function that computes it. A bare name (`softmax`) means every spelling of the op:
`torch.softmax`, `torch.nn.functional.softmax`, `torch.Tensor.softmax`, `torch.special.softmax`, and the spellings of
its aliases. A dotted name (`torch.softmax`) means one spelling. The module or class before the last dot is the *owner*.
Names are looked up as attributes of torch's namespaces, of its other modules (`torch_modules`), and of packages that
are imported already. A look-up in a package imports nothing and runs no code of it.
"""

import contextlib
import functools
import importlib.util
import inspect
import re
import sys
import types

import torch

from ..errors import OpListError, did_you_mean
from . import torch_modules
from .op_namespaces import (
    ACCESSORS,
    ALIASES_OF,
    BARE_NAME_NAMESPACES,
    NAMESPACES,
    NEVER_LISTED,
    OPERATORS,
    RNN_OPS,
    SET_ITEM,
    explain_non_op,
    get_op_names,
)

SpellingKey = tuple[str, str]
"""The name of the owner, and of the function in it: ("torch.Tensor", "exp")."""

# The short names that scripts use for namespaces.
SHORT = {"F": "torch.nn.functional", "nn": "torch.nn", "Tensor": "torch.Tensor"}

_AUGMENTED = re.compile(r"__i(add|sub|mul|div|truediv|floordiv|mod|pow|matmul|and|or|xor|lshift|rshift)__")


def find_spellings(op: str, may_be_missing: bool) -> dict[SpellingKey, object | None]:
    """Return the spellings of a name, each with its owner: the module or class that has it as an attribute.

    The owner is None if its package is not imported yet. For `torch.exp`, the result is {("torch", "exp"): torch}.

    Args:
        op: a name as in a list file, such as "exp", "torch.fft.rfft" or "F.softmax".
        may_be_missing: return an empty dict, and raise no error, if torch or an imported package lacks the op.

    Raises OpListError, without a location, if the op is missing and may not be, and for a name to which no rule can
    apply. With `may_be_missing`, two kinds of names to which no rule can apply give an empty dict instead: names of
    other packages, and bare names of module classes, such as `LayerNorm`.
    """
    first, dot, rest = op.partition(".")
    refuse_kernel(op)
    if dot and first in SHORT:
        op = f"{SHORT[first]}.{rest}"
    owner_name, _, name = op.rpartition(".")
    _check_that_it_may_be_listed(op, owner_name, name, may_be_missing)
    if owner_name == "torch.functional":  # the module that defines some functions of `torch`
        owner_name = "torch"
    if owner_name and owner_name not in NAMESPACES:
        return _find_elsewhere(op, owner_name, name, may_be_missing)
    owners: dict[SpellingKey, object | None] = {}
    reasons: list[str] = []
    for key, owner in _candidates(owner_name, name):
        value = getattr(owner, key[1], None)
        if value is None:
            continue
        reason = explain_non_op(value, key[1])
        if reason:
            reasons.append(reason)
        else:
            owners[key] = owner
    if reasons and not owners:
        raise OpListError(f"{op!r} is {reasons[0]}, so no rule can apply to it; name a function")
    if not owners and not owner_name and not name.startswith("__"):
        owners = torch_modules.find_short_name(name)
    if not owners and not may_be_missing:
        raise OpListError(f"torch {torch.__version__} has no op {op!r}.{_suggest_op(op, name)}")
    return owners


@functools.lru_cache(maxsize=4096)
def _candidates(owner_name: str, name: str) -> tuple[tuple[SpellingKey, object], ...]:
    """Return every spelling that a name could have, each with its owner. The owner may lack the function."""
    if owner_name:
        return (((owner_name, name), NAMESPACES[owner_name]),)
    keys: list[SpellingKey] = []
    for alias in get_names(name):
        if alias.startswith("__"):  # operators are methods of tensors
            keys.append(("torch.Tensor", alias))
            continue
        for namespace in BARE_NAME_NAMESPACES:
            keys.append((namespace, alias))
        if alias in RNN_OPS:
            keys.append(("torch._VF", alias))
    return tuple((key, NAMESPACES[key[0]]) for key in keys)


def _check_that_it_may_be_listed(op: str, owner_name: str, name: str, may_be_missing: bool) -> None:
    """Raise OpListError for a name that no list may contain, before it is looked up."""
    if not may_be_missing and _is_module_class(owner_name, name):
        meant = did_you_mean(name, get_op_names(), cutoff=0.8)
        raise OpListError(
            f"{op!r} is a class of modules, and a rule applies to functions. Name an op, or choose these modules by"
            f" `modules: [{{type: torch.nn.{name}, run: float32}}]` (or low).{meant}"
        )
    if name.startswith("__") and name not in OPERATORS:
        allowed = ", ".join(sorted(OPERATORS))
        raise OpListError(f"{name!r} is not an operator that a rule can apply to; allowed are {allowed}")
    if owner_name and owner_name not in NAMESPACES:
        return  # another package may have a function named `load` that computes with tensors
    if name in NEVER_LISTED:
        raise OpListError(f"{op!r} cannot be on a list: casts are made of it, or it is not an op; leave it out")
    if name in ACCESSORS:
        raise OpListError(f"{op!r} cannot be on a list, since it returns no tensor; leave it out")


_KERNEL = re.compile(r"(?:torch\.ops\.)?(aten|prims|torch\._C)(?:\.|::)(?:_nn\.)?(\w+)(?:\.\w+)?")


def refuse_kernel(op: str) -> None:
    """Raise OpListError for the name of a kernel, such as `aten::mm`. It suggests the function that runs it, if known.

    Recordings and profilers name kernels, and users may copy these names into lists.
    """
    kernel = _KERNEL.fullmatch(op)
    if kernel is None:
        return
    name = kernel[2].removeprefix("_")
    # aten::fft_rfft belongs to torch.fft.rfft, aten::linalg_det to det
    candidates = (f"torch.fft.{name.removeprefix('fft_')}", name, re.sub("^(native|linalg|special)_", "", name))
    functions = [candidate for candidate in candidates if find_known_spellings(candidate)]
    hint = did_you_mean(name, get_op_names(), cutoff=0.8)
    if functions:
        hint = f" Did you mean {functions[-1]!r}?"
    elif name == "to_copy":
        hint = " This kernel is a cast."
    raise OpListError(f"{op!r} is a kernel, and lists name the functions that scripts call.{hint}")


def _is_module_class(owner_name: str, name: str) -> bool:
    """Return whether a name, such as `LayerNorm` or `torch.nn.LayerNorm`, means one of torch's module classes."""
    may_be_module = owner_name in ("", "torch.nn") or owner_name.startswith("torch.nn.modules.")
    value = getattr(torch.nn, name, None)
    # `torch.nn.Parameter` is a class, but not of modules
    return may_be_module and isinstance(value, type) and issubclass(value, torch.nn.Module)


def _suggest_op(op: str, name: str) -> str:
    """Return a hint for an unknown torch op: its name in another namespace, or a similar name in this one."""
    elsewhere = [known for known in get_op_names() if known.endswith(f".{name}")]
    prefix = op.removesuffix(name)
    alike = [known.removeprefix(prefix) for known in get_op_names() if known.startswith(prefix)]
    return did_you_mean(op, elsewhere, cutoff=0.0) or did_you_mean(name, alike, prefix=prefix)


# ---- spellings that belong together ----------------------------------------------------------------------------------


def get_names(op: str) -> tuple[str, ...]:
    """Return a bare name with its aliases: ("clamp", "clip") for either of them."""
    return ALIASES_OF.get(op, (op,))


def inplace_twins(key: SpellingKey) -> tuple[SpellingKey, ...]:
    """Return the spellings of an op's in-place twins: `exp_` for `exp`, `index_put_` and `__setitem__` for `index_put`.

    Operators, in-place ops and functions of other packages have none. Modules of torch outside `NAMESPACES` may also
    have a twin such as `exp_out`, whose additional first argument is the tensor that it writes to.
    """
    owner_name, name = key
    if name.endswith("_") or owner_name.partition(".")[0] != "torch":
        return ()
    if owner_name not in NAMESPACES:
        return tuple(
            (owner_name, twin) for twin in (f"{name}_", f"{name}_out") if torch_modules.has_op(owner_name, twin)
        )
    twins: list[SpellingKey] = []
    for twin in get_names(f"{name}_"):
        value = getattr(NAMESPACES[owner_name], twin, None)
        if value is not None and not explain_non_op(value, twin):
            twins.append((owner_name, twin))
    return tuple(twins)


def get_name_of_op(name: str) -> str:
    """Return the name of the op for the name of its in-place twin (see `is_inplace`): `exp` for `exp_` or `exp_out`."""
    if name == SET_ITEM:
        name = "index_put_"
    return name.removesuffix("_").removesuffix("_out")


def get_op(key: SpellingKey) -> str:
    """Return the name under which reports show the op of a spelling: "exp" for ("torch", "exp") and ("torch", "exp_").

    It is a bare name, or a dotted name if no bare name means the spelling. An in-place twin is shown under the name of
    its op, and an alias under the first name of its group in `ALIASES_OF`.
    """
    owner_name, name = key
    candidates = [name]
    if is_inplace(key):
        candidates = [get_name_of_op(name), name]
    for candidate in candidates:
        op = get_names(candidate)[0]
        spellings = find_known_spellings(op)
        if key in spellings or any(key in inplace_twins(spelling) for spelling in spellings):
            return op
    return f"{owner_name}.{name}"


def find_known_spellings(op: str) -> dict[SpellingKey, object | None]:
    """Return the result of `find_spellings`, or an empty dict if torch lacks the op or no rule can apply to it."""
    try:
        return find_spellings(op, may_be_missing=True)
    except OpListError:
        return {}


def is_inplace(key: SpellingKey) -> bool:
    """Return whether a spelling is taken to write to its first argument, by its name: `exp_`, `__setitem__`, and in
    torch also `varlen_attn_out`.

    False for augmented operators such as `__iadd__`, which may return a new tensor.
    """
    owner_name, name = key
    if name.endswith("_out"):
        return owner_name.partition(".")[0] == "torch"
    return name == SET_ITEM or (name.endswith("_") and not name.endswith("__"))


def is_augmented(name: str) -> bool:
    """Return whether a name is an augmented operator, such as `__iadd__`, which may write in place."""
    return bool(_AUGMENTED.fullmatch(name))


# ---- other packages --------------------------------------------------------------------------------------------------


def _find_elsewhere(op: str, owner_name: str, name: str, may_be_missing: bool) -> dict[SpellingKey, object | None]:
    """Return the result of `find_spellings` for a name of another package, or of a torch module not in `NAMESPACES`."""
    try:
        if owner_name.partition(".")[0] == "torch":
            return {(owner_name, name): torch_modules.find_in_module(op, owner_name, name)}
        return {(owner_name, name): _find_owner(op, owner_name.split("."), name)}
    except LookupError as error:
        if may_be_missing:
            return {}
        hint = did_you_mean(owner_name, NAMESPACES, cutoff=0.8)
        raise OpListError(f"{op!r} is not an op: {error}{hint}") from None
    except OpListError:
        if may_be_missing and owner_name.partition(".")[0] != "torch":
            return {}
        raise


def find_deferred(owner_name: str, name: str) -> object | None:
    """Look again for the owner of a function whose package was not imported yet when its list was read. Import nothing.

    Return None if only a later import may define the function. Raise OpListError, without a location, if none can.
    """
    op = f"{owner_name}.{name}"
    path = owner_name.split(".")
    if path[0] == "torch":
        return _find_elsewhere(op, owner_name, name, may_be_missing=False)[owner_name, name]
    owner = _find_owner(op, path, name)
    if owner is None:
        check_import_may_define(path)
    return owner


def _find_owner(op: str, path: list[str], name: str) -> object | None:
    """Return the owner of `op`, a name outside torch, or None if a later import may define it.

    For the op "flash_attn.flash_attn_func", `path` is ["flash_attn"] and `name` is "flash_attn_func". Raises
    OpListError if the name does not exist, or means something else than a function of the package. Runs no code of the
    package: `getattr_static` calls no `__getattr__` and no descriptor.
    """
    package = path[0]
    is_foreign = package in sys.stdlib_module_names or package == "amp_patch"
    if is_foreign or any(part.startswith("__") for part in path[1:]):
        raise OpListError(f"{op!r} is not an op; name a function of torch, or of a package built on it")
    owner = _follow_path(op, path)
    if owner is None:
        return None
    value = inspect.getattr_static(owner, name, None)
    if value is None:
        # the running script may define the function in a later line
        if isinstance(owner, types.ModuleType) and (_imports_names_lazily(owner) or path == ["__main__"]):
            return None
        raise OpListError(f"{'.'.join(path)!r} has no {name!r}.{did_you_mean(name, vars(owner))}")
    is_stdlib = (getattr(value, "__module__", None) or "").partition(".")[0] in sys.stdlib_module_names
    if isinstance(value, (type, types.ModuleType)) or not callable(value) or is_stdlib:
        raise OpListError(
            f"{op!r} is a class, a module, a constant or part of the standard library, so no rule can apply to it; name"
            " a function"
        )
    return owner


def _follow_path(op: str, path: list[str]) -> object | None:
    """Return the module or class at a dotted path, or None if a later import may define it.

    Raises OpListError if a part does not exist, or is something else than a module or class of the package.
    """
    length = count_imported(path)
    if not length:
        return None
    owner: object = sys.modules[".".join(path[:length])]
    for part in path[length:]:
        value = inspect.getattr_static(owner, part, None)
        if value is None and isinstance(owner, types.ModuleType):
            return None  # a submodule that is not imported, or a name that the package imports at its first use
        if value is None:
            raise OpListError(f"{'.'.join(path)!r} has no {part!r}.{did_you_mean(part, vars(owner))}")
        if _get_module_name(value).partition(".")[0] != path[0]:
            problem = f"{op!r} leads through {part!r}, which is not a module or class of {path[0]!r}"
            raise OpListError(f"{problem}; name the function where it is defined")
        owner = value
    return owner


def _get_module_name(value: object) -> str:
    """Return the name of a module, or of the module that defines a class; empty for anything else."""
    if isinstance(value, types.ModuleType):
        return value.__name__
    return value.__module__ if isinstance(value, type) else ""


def _imports_names_lazily(module: types.ModuleType) -> bool:
    """Return whether a module may import names at their first use."""
    return hasattr(type(module), "__getattr__") or "__getattr__" in vars(module)


def count_imported(path: list[str]) -> int:
    """Return how many of the first parts of a dotted path name an imported module; 0 for none.

    For example, 2 for `["numpy", "linalg", "norm"]` if `numpy.linalg` is imported.
    """
    for length in range(len(path), 0, -1):
        # sys.modules maps a module that must not be imported to None
        if sys.modules.get(".".join(path[:length])) is not None:
            return length
    return 0


def check_import_may_define(path: list[str]) -> None:
    """Raise OpListError if no import can define a dotted name, because an imported module lacks the next part of it.

    For example, for ["numpy", "linag", "norm"], if `numpy` is imported and has no submodule `linag`.
    """
    imported = count_imported(path)
    if imported in (0, len(path)):
        return  # nothing is imported yet, or the whole path is a module that may define names later
    parent, part = sys.modules[".".join(path[:imported])], path[imported]
    if _imports_names_lazily(parent) or part in vars(parent):
        return
    if "__path__" in vars(parent) and importlib.util.find_spec(".".join(path[: imported + 1])) is not None:
        return
    raise OpListError(f"{'.'.join(path[:imported])!r} has no {part!r}.{did_you_mean(part, vars(parent))}")


def find_warning(op: str) -> str | None:
    """Return the text of a warning if the package of an op is not installed, or None. Imports nothing."""
    root, dot, _ = op.partition(".")
    if not dot or root in SHORT or sys.modules.get(root) is not None or is_installed(root):
        return None
    hint = did_you_mean(op, get_op_names(), cutoff=0.7)  # `linalg.norm` lacks the `torch.` in front
    return f"there is no package {root!r} installed.{hint}"


def is_installed(root: str) -> bool:
    """Return whether a package is installed, without importing it."""
    with contextlib.suppress(ImportError, ValueError):  # find_spec raises ValueError for a module without a spec
        return importlib.util.find_spec(root) is not None
    return False
