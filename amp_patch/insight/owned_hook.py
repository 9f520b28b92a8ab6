"""`OwnedHook`: a hook on a module that does not follow the module into copies and checkpoints."""

import weakref
from typing import Any, Self


class OwnedHook:
    """Base class of such hooks. `self.owner()` is the owner, or None if it is gone.

    A copied or unpickled hook has no owner, and has to do nothing.
    """

    def __init__(self, owner: Any = None) -> None:
        self.owner = (lambda: None) if owner is None else weakref.ref(owner)

    def __deepcopy__(self, memo: Any) -> Self:
        return type(self)()

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()
