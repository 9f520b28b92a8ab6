"""`StepCounter`: which optimizer steps of a training count as its steps."""

import weakref
from typing import Any


class StepCounter:
    """Counts by one optimizer, the first that steps, since a GAN's two optimizers take one step together.

    Where that one is gone, or another takes two steps without it, the next training has begun: the other counts.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Count by whichever optimizer steps next."""
        self._counted: weakref.ref[Any] | None = None
        self._others: set[int] = set()  # ids of optimizers that have stepped since the counted one did

    def note(self, optimizer: Any) -> bool:
        """Take note of a step, and tell whether it counts."""
        counted = None if self._counted is None else self._counted()
        if optimizer is not counted and counted is not None and id(optimizer) not in self._others:
            self._others.add(id(optimizer))
            return False
        self._counted = weakref.ref(optimizer)
        self._others.clear()
        return True
