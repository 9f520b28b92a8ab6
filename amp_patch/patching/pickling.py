"""Where pickle finds replacements that are no longer in place: copies of a model that was patched may still hold some.
The layer `GELUActivation` of transformers keeps `F.gelu`, and a copy of a model made during a session keeps its
replacement.

Pickle stores a function as the module and the name that lead to it. A replacement in place is found where it is
installed. One that was taken out is found here, under a name made of where it was; another process, which has no such
replacement, gets what stands there now. Files refer to this module by its name.
"""

import itertools
import pkgutil
import weakref
from collections.abc import Callable
from typing import Any

_functions: dict[str, weakref.ref[Callable[..., Any]]] = {}
"""Those taken out. A WeakValueDictionary would run code of Python's as each is freed: Ctrl-C in there is lost."""

_numbers = itertools.count()


def retire(replacement: Any) -> None:
    """Have a replacement that was taken out be pickled by a name of this module.

    A static or class method stands for its function.
    """
    replacement = getattr(replacement, "__func__", replacement)
    if replacement.__module__ != __name__:
        # a dot would be read as an attribute of an attribute
        place = f"{replacement.__module__}:{replacement.__qualname__}".replace(".", "/")
        replacement.__module__, replacement.__qualname__ = __name__, f"{place}:{next(_numbers)}"
        _functions[replacement.__qualname__] = weakref.ref(replacement)


def get_originals() -> dict[int, Callable[..., Any]]:
    """Return the original of each retired replacement that somebody still holds, by the replacement's id; forget the
    others.
    """
    originals: dict[int, Callable[..., Any]] = {}
    for name, reference in list(_functions.items()):
        replacement: Any = reference()
        if replacement is None:
            _functions.pop(name, None)
        else:
            originals[id(replacement)] = replacement.__wrapped__
    return originals


def get_packages() -> set[str]:
    """Return the top-level packages that the retired replacements were in."""
    return {name.partition(":")[0].partition("/")[0] for name in list(_functions)}


def __getattr__(name: str) -> Any:
    place = name.rpartition(":")[0]
    if ":" not in place:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    reference = _functions.get(name)
    replacement = None if reference is None else reference()
    return pkgutil.resolve_name(place.replace("/", ".")) if replacement is None else replacement
