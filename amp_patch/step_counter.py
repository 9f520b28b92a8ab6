"""`StepCounter`: which optimizer steps of a training count as its steps."""

import weakref
from typing import Any


class StepCounter:
    """Counts the steps of one optimizer, the first that steps: the two optimizers of a GAN take one step together.

    If that optimizer is gone, or another takes two steps without it, another training has begun. Then the steps of the
    other optimizer count.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Count the steps of the optimizer that steps next."""
        self._counted: weakref.ref[Any] | None = None
        self._others: set[int] = set()  # ids of optimizers that have stepped since the counted one did

    def note(self, optimizer: Any) -> bool:
        """Record a step. Return whether it counts."""
        counted = None if self._counted is None else self._counted()
        if optimizer is not counted and counted is not None and id(optimizer) not in self._others:
            self._others.add(id(optimizer))
            return False
        self._counted = weakref.ref(optimizer)
        self._others.clear()
        return True
