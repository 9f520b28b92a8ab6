"""`OwnedHook`: a hook on a module that does not follow the module into copies and checkpoints."""

import contextlib
import weakref
from collections.abc import Callable
from typing import Any


class OwnedHook:
    """Base class of such hooks. `self.owner()` is the owner, or None if it is gone.

    A copy of the hook is a function of the standard library that does nothing: a checkpoint of a whole model, which has
    its hooks, loads without this package.
    """

    def __init__(self, owner: Any = None) -> None:
        self.owner = (lambda: None) if owner is None else weakref.ref(owner)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return getattr, (contextlib.nullcontext(), "__exit__")  # takes any arguments, and returns None
