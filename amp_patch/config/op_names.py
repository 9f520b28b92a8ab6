"""Op names: which attributes of torch, or of a package built on it, a name on a list stands for.

A bare name (`softmax`) means every spelling: `torch.softmax`, `torch.nn.functional.softmax`, `torch.Tensor.softmax`,
`torch.special.softmax`, and those of its aliases. A dotted name means that one spelling. Looking a name up imports
nothing and runs nothing: names are attributes of torch's op namespaces, and of other packages only where they are
imported already.
"""

import inspect
import re
import sys
import types
from collections.abc import Iterator

import torch

from ..errors import OpListError, did_you_mean
from .op_namespaces import GROUPS, OPERATORS, OWNERS, READS, REFUSED, RNN, SEARCHED, find_fault, get_op_names
from .packages import check_that_it_may_come, count_imported, is_being_imported

Key = tuple[str, str]  # owner name, attribute name

# How code that imports torch as most does names the namespaces.
SHORT = {"F": "torch.nn.functional", "nn": "torch.nn", "Tensor": "torch.Tensor"}


def find_spellings(op: str, may_be_missing: bool) -> dict[Key, object | None]:
    """Return the spellings of a name with their owners.

    There are none for a missing op; the owner is None for a package that is not imported yet.

    Raises OpListError, without a position, where no rule can apply to the name, or torch or an imported package lacks
    the op and it may not be missing.
    """
    first, dot, rest = op.partition(".")
    if dot and first in SHORT:
        op = f"{SHORT[first]}.{rest}"
    owner_name, _, name = op.rpartition(".")
    if problem := _find_refusal(op, owner_name, name, may_be_missing):
        raise OpListError(problem)
    if not owner_name:
        found, faults = _find_bare(name)
    elif owner_name in OWNERS:
        value = getattr(OWNERS[owner_name], name, None)
        fault = None if value is None else find_fault(value, name)
        found, faults = (
            ({(owner_name, name): OWNERS[owner_name]} if value is not None and fault is None else {}),
            [fault] if fault else [],
        )
    elif op.split(".")[0] == "torch":
        hint = did_you_mean(owner_name, OWNERS, cutoff=0.8)
        raise OpListError(f"{owner_name!r} is not a namespace of ops; allowed are {', '.join(OWNERS)}.{hint}")
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


def _find_refusal(op: str, owner_name: str, name: str, may_be_missing: bool) -> str | None:
    """Return why no list may have a name, whatever torch has by it, and what to do."""
    if not may_be_missing and _is_module_class(owner_name, name):
        meant = did_you_mean(name, _bare_names(), cutoff=0.8)
        return (
            f"{op!r} is a class of modules, and a rule applies to functions. Name an op, or choose these modules by"
            f" `modules: [{{type: torch.nn.{name}, run: float32}}]` (or low).{meant}"
        )
    if name.startswith("__") and name not in OPERATORS:
        return f"{name!r} is not an operator that a rule can apply to; allowed are {', '.join(sorted(OPERATORS))}"
    if owner_name not in ("", *OWNERS) or name not in REFUSED | READS:
        return None
    reason = "the casts are made of it, or it is no op" if name in REFUSED else "it returns no tensor"
    return f"{op!r} cannot be on a list, since {reason}; leave it out"


def find_deferred(op: str, complete: str) -> object | None:
    """Return the owner of a name outside torch, or None while an import may yet bring the name.

    Raises OpListError, without a position, where the modules on the way are imported and lack it. `complete` is a
    module that has just run to its end, while its import goes on. Looks submodules up, and imports none.
    """
    owner_name, _, name = op.rpartition(".")
    path = owner_name.split(".")
    try:
        owner = _find_elsewhere(op, path, name, complete)
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
    return GROUPS.get(op, (op,))


def inplace_twin(key: Key) -> Key | None:
    """Return the spelling of an op's in-place twin (`exp_` of `exp`), or None; operators count as having none."""
    owner_name, name = key
    if owner_name not in OWNERS or name.endswith("_"):
        return None
    twin = f"{name}_"
    value = getattr(OWNERS[owner_name], twin, None)
    return None if value is None or find_fault(value, twin) else (owner_name, twin)


def get_op(key: Key) -> str:
    """Return the name by which a list means a spelling and all others of its op: bare if that reaches it, else dotted.

    In-place twins have the name of their op.
    """
    owner_name, name = key
    for candidate in dict.fromkeys((name.removesuffix("_") if is_inplace(name) else name, name)):
        op = GROUPS.get(candidate, (candidate,))[0]
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
    for alias in GROUPS.get(name, (name,)):
        for owner_name in (*SEARCHED, "torch._VF") if alias in RNN else SEARCHED:
            owner = OWNERS[owner_name]
            value = None if alias.startswith("__") and owner is not torch.Tensor else getattr(owner, alias, None)
            if value is None:
                continue
            if fault := find_fault(value, alias):
                faults.append(fault)
            else:
                found[owner_name, alias] = owner
    return found, faults


def _find_elsewhere(op: str, owner_path: list[str], name: str, complete: str = "") -> object | None:
    """Return the owner of a name outside torch, or None where its package is not imported, or not to its end.

    Looks attributes up without running code. `complete` is as in `find_deferred`.
    """
    top = owner_path[0]
    if top in sys.stdlib_module_names or top == "amp_patch" or any(part.startswith("__") for part in owner_path[1:]):
        raise OpListError(f"{op!r} is not an op; name a function of torch, or of a package built on it")
    length = count_imported(owner_path)
    if not length:
        return None
    owner: object = sys.modules[".".join(owner_path[:length])]
    for part in (*owner_path[length:], name):
        value = inspect.getattr_static(owner, part, None)
        if value is None:
            if isinstance(owner, types.ModuleType) and (
                part != name
                or hasattr(type(owner), "__getattr__")
                or "__getattr__" in vars(owner)
                or (owner.__name__ != complete and is_being_imported(owner.__name__))
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


def _is_module_class(owner_name: str, name: str) -> bool:
    """Whether a name on a list is that of one of torch's module classes, with the namespace or without."""
    is_there = owner_name in ("", "torch.nn") or owner_name.startswith("torch.nn.modules.")
    return is_there and isinstance(getattr(torch.nn, name, None), type)


def _bare_names() -> Iterator[str]:
    return (name for name in get_op_names() if "." not in name)


def _suggestion(owner_name: str, name: str) -> str:
    """Return a hint for an unknown torch op: the same name in another namespace, or a similar name."""
    for other, owner in OWNERS.items():
        if other not in SEARCHED and other != "torch._VF" and hasattr(owner, name):
            return did_you_mean(name, [name], prefix=f"{other}.")
    prefix = f"{owner_name}."
    own = (one.removeprefix(prefix) for one in get_op_names() if one.startswith(prefix))
    return (did_you_mean(name, own, prefix=prefix) if owner_name else "") or did_you_mean(name, _bare_names())
