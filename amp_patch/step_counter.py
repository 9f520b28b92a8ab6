"""`StepCounter`: decides which steps of optimizers count as steps of the training, if there are several optimizers."""

import weakref
from typing import Any


class StepCounter:
    """Counts the steps of the optimizer that steps first, and of no other. In a GAN, a step of the discriminator and a
    step of the generator together count as one.

    If the counted optimizer has been freed, the steps of the next optimizer that steps count. If another optimizer
    takes two steps while the counted one takes none, the steps of this other one count from the second on.
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
