"""Op names: which attributes of torch, or of a package built on it, a name on a list stands for.

A bare name (`softmax`) means every spelling: `torch.softmax`, `torch.nn.functional.softmax`, `torch.Tensor.softmax`,
`torch.special.softmax`, and those of its aliases. A dotted name means that one spelling. Looking a name up imports
nothing and runs nothing: names are attributes of torch's op namespaces, and of other packages only where they are
imported already.
"""

import difflib
import inspect
import re
import sys
import types
from typing import Any

import torch

from .. import torch_private
from ..errors import OpListError, did_you_mean
from .packages import check_that_it_may_come, count_imported, is_being_imported

Key = tuple[str, str]  # owner name, attribute name

# The namespaces a name may be resolved in. A bare name is looked up in the first five. `torch.fft` is left to dotted
# names: its members are called `fft` or `rfft`, and `torch.fft` itself is a module, so a bare `fft` would be read two
# ways.
_OWNERS: dict[str, object] = {
    "torch": torch,
    "torch.nn.functional": torch.nn.functional,
    "torch.Tensor": torch.Tensor,
    "torch.special": torch.special,
    "torch.linalg": torch.linalg,
    "torch.fft": torch.fft,
    "torch.sparse": torch.sparse,
    "torch._VF": torch_private.VF,
}
_SEARCHED = ("torch", "torch.nn.functional", "torch.Tensor", "torch.special", "torch.linalg")
# nn.RNN and its relatives call the C functions through torch._VF, which torch.lstm and the others do not pass by.
_RNN = frozenset(f"{name}{cell}" for name in ("lstm", "gru", "rnn_tanh", "rnn_relu") for cell in ("", "_cell"))

# Names of one and the same op: naming one names them all. Two names belong together when they compute the same function
# of the same arguments, in any order and up to argument defaults, because a rule looks at nothing but the dtypes.
# Kept apart on purpose: float_power (always float64), fmod (rounds otherwise than remainder), equal (gives one bool for
# a whole tensor), inv_ex and the other _ex forms (they also return an error code), sum and nansum, var and var_mean
# (another function).
# The same name in torch and torch.linalg may differ (norm, cross, lu_solve, vander) and still means both: each reads
# the same data with the same range, so one rule fits. torch.cond and torch.solve are not ops (control flow; a function
# that only raises) and are never matched.
_ALIASES = (
    # arithmetic: the operators, their reflected and their augmented forms
    "add __add__ __radd__ __iadd__",
    "sub subtract rsub __sub__ __rsub__ __isub__",
    "mul multiply __mul__ __rmul__ __imul__",
    "div divide true_divide __truediv__ __rtruediv__ __itruediv__ __div__ __rdiv__ __idiv__",
    "floor_divide __floordiv__ __rfloordiv__ __ifloordiv__",
    "remainder __mod__ __rmod__ __imod__",
    "pow __pow__ __rpow__ __ipow__",
    "matmul __matmul__ __rmatmul__",
    "mm spmm dsmm",
    "hspmm hsmm",
    "sspaddmm saddmm",
    # comparison
    "eq __eq__",
    "ne not_equal __ne__",
    "gt greater __gt__",
    "ge greater_equal __ge__",
    "lt less __lt__",
    "le less_equal __le__",
    # numpy's names for trigonometry
    *(f"a{name} arc{name}" for name in ("cos", "cosh", "sin", "sinh", "tan", "tanh", "tan2")),
    # other second names that torch documents as such
    "abs absolute __abs__",
    "neg negative __neg__",
    "clamp clip",
    "trunc fix",
    "cat concat concatenate",
    "vstack row_stack",
    "outer ger",
    "trapezoid trapz",
    "inverse inv",
    "pinverse pinv",
    "orgqr householder_product",
    "sigmoid expit",
    "digamma psi",
    "lgamma gammaln",
    "mvlgamma multigammaln",
    "igamma gammainc",
    "igammac gammaincc",
)
_GROUPS = {name: tuple(group.split()) for group in _ALIASES for name in group.split()}
_OPERATORS = frozenset(name for name in _GROUPS if name.startswith("__"))

# The casts themselves call these, or they are no computation.
_REFUSED = frozenset(
    {
        "load",
        "save",
        "compile",
        "to",
        "type",
        "type_as",
        "float",
        "double",
        "half",
        "bfloat16",
        "backward",
        "detach",
        "copy_",
    }
)


# How code that imports torch as most does names the namespaces.
_SHORT = {"F": "torch.nn.functional", "nn": "torch.nn", "Tensor": "torch.Tensor"}


def find_spellings(op: str, may_be_missing: bool) -> dict[Key, object | None]:
    """Return the spellings of a name with their owners.

    There are none for a missing op; the owner is None for a package that is not imported yet.

    Raises OpListError, without a position, where no rule can apply to the name, or torch or an imported package lacks
    the op and it may not be missing.
    """
    first, dot, rest = op.partition(".")
    if dot and first in _SHORT:
        op = f"{_SHORT[first]}.{rest}"
    owner_name, _, name = op.rpartition(".")
    if owner_name in ("", "torch.nn") and isinstance(getattr(torch.nn, name, None), type) and not may_be_missing:
        raise OpListError(
            f"{op!r} is a class of modules, and a rule applies to functions. For these modules write"
            f" `modules: [{{type: torch.nn.{name}, run: float32}}]` (or low).{_suggestion('', name)}"
        )
    if name.startswith("__") and name not in _OPERATORS:
        raise OpListError(
            f"{name!r} is not an operator that a rule can apply to; allowed are {', '.join(sorted(_OPERATORS))}"
        )
    if name in _REFUSED and owner_name in ("", *_OWNERS):
        raise OpListError(f"{op!r} cannot be on a list: it is no computation, or the casts are made of it")
    if not owner_name:
        found, faults = _find_bare(name)
    elif owner_name in _OWNERS:
        value = getattr(_OWNERS[owner_name], name, None)
        fault = None if value is None else _fault(value, name)
        found, faults = (
            ({(owner_name, name): _OWNERS[owner_name]} if value is not None and fault is None else {}),
            [fault] if fault else [],
        )
    elif op.split(".")[0] == "torch":
        raise OpListError(f"{owner_name!r} is not a namespace of ops; allowed are {', '.join(_OWNERS)}")
    else:
        try:
            return {(owner_name, name): _find_elsewhere(op, owner_name.split("."), name)}
        except OpListError:
            if may_be_missing:
                return {}
            raise
    if faults and not found:
        raise OpListError(f"{op!r} is {faults[0]}, so no rule can apply to it; name a function")
    if not found and not may_be_missing:
        raise OpListError(f"torch {torch.__version__} has no op {op!r}.{_suggestion(owner_name, name)}")
    return dict(found)


def find_deferred(op: str, complete: str) -> object | None:
    """Return the owner of a name outside torch, or None while an import may yet bring the name.

    Raises OpListError, without a position, where the modules on the way are imported and lack it. `complete` is a
    module that has just run to its end, while its import goes on. Looks submodules up, and imports none.
    """
    owner_name, _, name = op.rpartition(".")
    path = owner_name.split(".")
    try:
        owner = _find_elsewhere(op, path, name)
        if owner is None:
            check_that_it_may_come(path)
    except OpListError:
        on_the_way = {".".join(path[:length]) for length in range(1, len(path) + 1)}
        if any(is_being_imported(module_name) for module_name in on_the_way - {complete}):
            return None
        raise
    return owner


def get_names(op: str) -> tuple[str, ...]:
    """Return all names of an op, of which `op` is one."""
    return _GROUPS.get(op, (op,))


def inplace_twin(key: Key) -> Key | None:
    """Return the spelling of an op's in-place twin (`exp_` of `exp`), or None; operators count as having none."""
    owner_name, name = key
    if owner_name not in _OWNERS or name.endswith("_"):
        return None
    twin = f"{name}_"
    value = getattr(_OWNERS[owner_name], twin, None)
    return None if value is None or _fault(value, twin) else (owner_name, twin)


def get_op(key: Key) -> str:
    """Return the name by which a list means a spelling and all others of its op: bare if that reaches it, else dotted.

    In-place twins have the name of their op.
    """
    owner_name, name = key
    for candidate in dict.fromkeys((name.removesuffix("_") if is_inplace(name) else name, name)):
        op = _GROUPS.get(candidate, (candidate,))[0]
        spellings = _find_bare(op)[0]
        if key in spellings or any(inplace_twin(spelling) == key for spelling in spellings):
            return op
    return f"{owner_name}.{name}"


_AUGMENTED = re.compile(r"__i(add|sub|mul|div|truediv|floordiv|mod|pow|matmul|and|or|xor|lshift|rshift)__")


def is_inplace(name: str) -> bool:
    """Whether an op of this name writes to its first argument.

    The augmented operators are asked for by `is_augmented`.
    """
    return name.endswith("_") and not name.endswith("__")


def is_augmented(name: str) -> bool:
    """Whether this is an augmented operator, such as `__iadd__`: in place if it can be, and its name is rebound."""
    return bool(_AUGMENTED.fullmatch(name))


def _find_bare(name: str) -> tuple[dict[Key, object], list[str]]:
    """Return every spelling of a bare name, and why the attributes of that name that are not ops are not."""
    found: dict[Key, object] = {}
    faults: list[str] = []
    for alias in _GROUPS.get(name, (name,)):
        for owner_name in (*_SEARCHED, "torch._VF") if alias in _RNN else _SEARCHED:
            owner = _OWNERS[owner_name]
            value = None if alias.startswith("__") and owner is not torch.Tensor else getattr(owner, alias, None)
            if value is None:
                continue
            if fault := _fault(value, alias):
                faults.append(fault)
            else:
                found[owner_name, alias] = owner
    return found, faults


_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)


def _fault(value: Any, name: str) -> str | None:
    """Return what keeps an attribute of a torch namespace from being an op, or None.

    Decides alike for an op and its patched replacement.
    """
    if isinstance(value, type):
        return "a class"
    if isinstance(value, types.ModuleType):
        return "a module"
    if not callable(value):
        return "not a function"
    if isinstance(value, types.FunctionType):
        # a replacement has the module of its original, and only the original tells a builtin from a function
        value = inspect.unwrap(value)
    module = getattr(value, "__module__", None) or ""
    if isinstance(value, _FUNCTIONS) and module.partition(".")[0] in sys.stdlib_module_names:
        return f"a function of {module}, not of torch"  # other callables, such as mocks, stand for what they replace
    if (
        isinstance(value, types.FunctionType)
        and (home := value.__globals__.get("__name__") or "").partition(".")[0] == "amp_patch"
    ):
        module = home  # a replacement says that it is the original
    # a method of C, or a replacement that amp_patch or another package put there
    is_foreign = module.partition(".")[0] != "torch"
    if (
        module == torch_private.C_MODULE
        or (isinstance(value, types.FunctionType) and not is_foreign and module not in torch_private.PYTHON_OP_MODULES)
        or name in _REFUSED
    ):
        return "not an op"
    return None


def _find_elsewhere(op: str, owner_path: list[str], name: str) -> object | None:
    """Return the owner of a name outside torch, or None where its package is not imported.

    Looks attributes up without running code.
    """
    top = owner_path[0]
    if top in sys.stdlib_module_names or top == "amp_patch" or any(part.startswith("__") for part in owner_path[1:]):
        raise OpListError(f"{op!r} is not an op; a rule applies to functions of torch, or of packages built on it")
    length = count_imported(owner_path)
    if not length:
        return None
    owner: object = sys.modules[".".join(owner_path[:length])]
    for part in (*owner_path[length:], name):
        value = inspect.getattr_static(owner, part, None)
        if value is None:
            if isinstance(owner, types.ModuleType) and (
                part != name or hasattr(type(owner), "__getattr__") or "__getattr__" in vars(owner)
            ):
                return None  # a submodule, or a lazily imported name, that may yet come
            raise OpListError(f"{'.'.join(owner_path)!r} has no {part!r}.{did_you_mean(part, dir(owner))}")
        if part is name:
            break
        home = (
            value.__name__
            if isinstance(value, types.ModuleType)
            else value.__module__
            if isinstance(value, type)
            else ""
        )
        if home.partition(".")[0] != top:
            raise OpListError(
                f"{op!r} leads through {part!r}, which is no module or class of {top!r}; name the function where it is"
                " defined"
            )
        owner = value
    is_stdlib = (getattr(value, "__module__", None) or "").partition(".")[0] in sys.stdlib_module_names
    if isinstance(value, (type, types.ModuleType)) or not callable(value) or is_stdlib:
        raise OpListError(
            f"{op!r} is a class, a module, a constant or of the standard library, so no rule can apply to it; name a"
            " function"
        )
    return owner


def _suggestion(owner_name: str, name: str) -> str:
    """Return a hint for an unknown torch op: the same name in another namespace, or a similar name."""
    for other, owner in _OWNERS.items():
        if other not in _SEARCHED and other != "torch._VF" and hasattr(owner, name):
            return f" Did you mean '{other}.{name}'?"
    owners = (owner_name,) if owner_name else _SEARCHED
    names = {
        n
        for other in owners
        for n in dir(_OWNERS[other])
        if not n.startswith("_") and _fault(getattr(_OWNERS[other], n), n) is None
    }
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f" Did you mean {'.'.join(filter(None, (owner_name, close[0])))!r}?" if close else ""
