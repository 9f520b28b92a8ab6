"""Lets pickle find replacements of closed sessions.

Copies of a model that were made during a session may hold some: the layer `GELUActivation` of transformers keeps
`F.gelu`, and a copy of it keeps the replacement.

Pickle stores a function as a module and a name. It finds an installed replacement where it is installed, and a removed
(*retired*) one in this module, under a name made of its place and a number. Another process does not have the
replacement, and gets the function that is in that place now. Saved files refer to this module by its name.
"""

import itertools
import pkgutil
import weakref
from collections.abc import Callable
from typing import Any

_functions: dict[str, weakref.ref[Callable[..., Any]]] = {}
"""The retired replacements, by name. A WeakValueDictionary would run Python code when one is freed, and lose a Ctrl-C
there.
"""

_numbers = itertools.count()


def retire(replacement: Any) -> None:
    """Let a replacement, or the one in a static or class method, be pickled by a name of this module."""
    replacement = getattr(replacement, "__func__", replacement)
    if replacement.__module__ != __name__:
        # a dot would be read as an attribute of an attribute
        place = f"{replacement.__module__}:{replacement.__qualname__}".replace(".", "/")
        replacement.__module__, replacement.__qualname__ = __name__, f"{place}:{next(_numbers)}"
        _functions[replacement.__qualname__] = weakref.ref(replacement)


def get_originals() -> dict[int, Callable[..., Any]]:
    """Return the original of each living retired replacement, by the id of the replacement. Forgets the others."""
    originals: dict[int, Callable[..., Any]] = {}
    for name, reference in list(_functions.items()):
        replacement: Any = reference()
        if replacement is None:
            _functions.pop(name, None)
        else:
            originals[id(replacement)] = replacement.__wrapped__
    return originals


def get_packages() -> set[str]:
    """Return the top-level packages of the retired replacements."""
    return {name.partition(":")[0].partition("/")[0] for name in list(_functions)}


def __getattr__(name: str) -> Any:
    place = name.rpartition(":")[0]
    if ":" not in place:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    reference = _functions.get(name)
    replacement = None if reference is None else reference()
    return pkgutil.resolve_name(place.replace("/", ".")) if replacement is None else replacement
