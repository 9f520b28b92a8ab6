"""Lets pickle find replacements of functions after the session that made them has closed.

A copy of a model may hold such a replacement: the layer `GELUActivation` of transformers keeps `F.gelu` as an
attribute, so a copy that is made during a session keeps the replacement after the session has closed.

Pickle stores a function as the name of a module and a name in it. It finds an installed replacement under the name that
is patched: `gelu` in `torch.nn.functional`. It finds a removed (*retired*) replacement in this module, under a name
made of the patched name and a number: `torch/nn/functional:gelu:3`. A process that loads this name and does not have
the replacement gets its own `torch.nn.functional.gelu`. Saved files contain the name of this module, so the module must
not be renamed.
"""

import itertools
import pkgutil
import weakref
from collections.abc import Callable
from typing import Any

_functions: dict[str, weakref.ref[Callable[..., Any]]] = {}
"""The retired replacements, by their names in this module. Names of freed replacements stay until `get_originals`.

A WeakValueDictionary would remove them at once, by Python code that runs when a replacement is freed. A Ctrl-C during
that code would be lost.
"""

_numbers = itertools.count()


def retire(replacement: Any) -> None:
    """Make pickle look a removed replacement up in this module.

    `replacement` may also be a static or class method around the function.
    """
    replacement = getattr(replacement, "__func__", replacement)
    if replacement.__module__ != __name__:
        # without dots, because pickle looks up the parts of a dotted name one by one
        patched_name = f"{replacement.__module__}:{replacement.__qualname__}".replace(".", "/")
        replacement.__module__, replacement.__qualname__ = __name__, f"{patched_name}:{next(_numbers)}"
        _functions[replacement.__qualname__] = weakref.ref(replacement)


def get_originals() -> dict[int, Callable[..., Any]]:
    """Return the original of each retired replacement that is still alive, by the id of the replacement.

    Forgets the names of replacements that were freed.
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
    """Return the top-level packages whose functions the retired replacements replaced."""
    return {name.partition(":")[0].partition("/")[0] for name in list(_functions)}


def __getattr__(name: str) -> Any:
    """Return the retired replacement of a name, or else the function that the patched name holds now.

    Raises AttributeError for a name without a patched name in it.
    """
    patched_name = name.rpartition(":")[0]
    if ":" not in patched_name:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    reference = _functions.get(name)
    replacement = None if reference is None else reference()
    return pkgutil.resolve_name(patched_name.replace("/", ".")) if replacement is None else replacement
