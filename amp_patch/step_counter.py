"""`StepCounter`: decides which steps of optimizers count as steps of the training, if there are several optimizers."""

import weakref
from typing import Any


class StepCounter:
    """Counts the steps of one optimizer: the first that steps. So in a GAN, one step of each optimizer counts as one.

    If that optimizer has been freed, or if another one takes two steps while it takes none, another training has begun.
    From then on, the steps of the other optimizer count.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Start again: the steps of the optimizer that steps next will count."""
        self._counted: weakref.ref[Any] | None = None
        self._others: set[int] = set()  # ids of optimizers that have stepped since the counted one did

    def note(self, optimizer: Any) -> bool:
        """Record a step of an optimizer. Return whether it counts."""
        counted = None if self._counted is None else self._counted()
        if optimizer is not counted and counted is not None and id(optimizer) not in self._others:
            self._others.add(id(optimizer))
            return False
        self._counted = weakref.ref(optimizer)
        self._others.clear()
        return True
