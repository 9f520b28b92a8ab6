"""`Window`: the accumulation window of one optimizer, from one step (or zeroing) to the next."""

from collections.abc import Callable, Iterable

from .backward_pass import BackwardPass, PassState, combine_found_inf
from .decisions import Decisions
from .gradients import GradientSet
from .loss_scaler import LossScaler

MANY = 32
"""Passes that an optimizer may await before they are condensed."""


class Window:
    """The backward passes that the next step of an optimizer depends on, and the gradients that they leave.

    Args:
        get_gradients: those of the optimizer.
        decisions: judges passes that no step will.

    Attributes:
        has_begun: whether there ever was a pass, scaled or not.
    """

    def __init__(self, get_gradients: Callable[[], GradientSet], decisions: Decisions) -> None:
        self._get_gradients = get_gradients
        self._decisions = decisions
        self.has_begun = False
        self._passes: list[BackwardPass] = []

    @property
    def _gradients(self) -> GradientSet:
        return self._get_gradients()

    def add(self, backward_pass: BackwardPass) -> None:
        """Let the next step depend on a pass that begins."""
        if len(self._passes) >= MANY:
            self._condense()
        self._passes.append(backward_pass)
        backward_pass.awaited_by.append(self)
        self._gradients.join(backward_pass)

    def _condense(self) -> None:
        """Have one pass stand for all of its scaler that are judged: an optimizer may never step."""
        judged: dict[LossScaler, list[BackwardPass]] = {}
        for one in self.passes():
            if one.state is PassState.JUDGED and not one.scaled_in:
                judged.setdefault(one.scaler, []).append(one)
        for first, *others in judged.values():
            if others:
                first.overrule(combine_found_inf([first, *others]))
            for one in others:
                one.awaited_by = [other for other in one.awaited_by if other is not self]
                self._gradients.drop_pass(one)
        self._passes = self.passes()

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
        if self._gradients.is_unreduced:
            self._gradients.withdraw_passes()
        closed = [one for one in self.passes() if not one.is_open]
        if any(self._gradients in one.scaled_in for one in closed):
            self._gradients.unscale()
            self._gradients.resume()
        self.end(closed)
        if closed:
            self._decisions.judge_outside_of_steps(closed)

    def begin(self) -> None:
        """Say that a pass begins: if there are no gradients (set to None one by one), what was is abandoned.

        Not where ranks decide together: one may hold no shard, and the others would wait for it.
        """
        self.has_begun = True
        if self._passes and not self._decisions.groups and self._gradients.is_empty():
            self.abandon()

    def is_overflow(self) -> bool:
        """Tell whether the next step will be skipped. Waits for the device, once for each pass of a dynamic scale."""
        return any(one.scaler.is_dynamic and one.is_overflow() for one in self.passes())
