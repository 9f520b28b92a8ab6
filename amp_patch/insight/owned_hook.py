"""`OwnedHook`: a hook on a module that does not follow the module into copies and checkpoints."""

import contextlib
import weakref
from collections.abc import Callable
from typing import Any


class OwnedHook:
    """Base class of hooks that act for an owner, which they hold weakly. `owner()` returns it, or None if it is gone.

    Copying or pickling a hook gives a function of the standard library that does nothing. So a file with a whole model,
    which includes the hooks of the model, loads without this package.
    """

    def __init__(self, owner: Any = None) -> None:
        self.owner = (lambda: None) if owner is None else weakref.ref(owner)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return getattr, (contextlib.nullcontext(), "__exit__")  # takes any arguments, and returns None
