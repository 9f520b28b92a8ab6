"""`Window`: the accumulation window of one optimizer, from one step (or zeroing) to the next."""

from collections.abc import Iterable

from .backward_pass import BackwardPass
from .decisions import Decisions
from .gradients import GradientSet


class Window:
    """The backward passes that the next step of an optimizer depends on, and the gradients that they leave.

    Args:
        gradients: those of the optimizer.
        decisions: judges passes that no step will.

    Attributes:
        has_begun: whether there ever was a pass, scaled or not.
    """

    def __init__(self, gradients: GradientSet, decisions: Decisions) -> None:
        self._gradients = gradients
        self._decisions = decisions
        self.has_begun = False
        self._passes: list[BackwardPass] = []

    def add(self, backward_pass: BackwardPass) -> None:
        """Let the next step depend on a pass that begins."""
        self._passes.append(backward_pass)
        backward_pass.awaited_by.append(self)
        self._gradients.join(backward_pass)

    def passes(self) -> list[BackwardPass]:
        """Return the passes that the next step depends on."""
        if self._passes:
            self._passes = [one for one in self._passes if self in one.awaited_by]
        return list(self._passes)

    def close_passes(self) -> None:
        """Say that no block runs any more."""
        for one in self._passes:
            one.close()

    def end(self, passes: Iterable[BackwardPass]) -> None:
        """Depend on these passes no longer: their gradients are stepped on, or zeroed."""
        for one in passes:
            one.awaited_by = [other for other in one.awaited_by if other is not self]
        self._gradients.forget_window()

    def abandon(self) -> None:
        """The gradients are zeroed: whether they overflowed matters to the loss scale, and no longer to the step."""
        closed = [one for one in self.passes() if not one.is_open]
        if any(self._gradients in one.scaled_in for one in closed):
            self._gradients.unscale()
            self._gradients.resume()
        self.end(closed)
        if closed:
            self._decisions.judge(closed)

    def begin(self) -> None:
        """Say that a pass begins: if there are no gradients (set to None one by one), what was is abandoned."""
        self.has_begun = True
        if self._passes and self._gradients.is_empty():
            self.abandon()

    def is_overflow(self) -> bool:
        """Tell whether the next step will be skipped. Waits for the device, once for each pass of a dynamic scale."""
        return any(one.scaler.is_dynamic and one.is_overflow() for one in self.passes())
