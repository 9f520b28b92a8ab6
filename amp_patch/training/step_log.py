"""`StepLog`: counts and reports the taken and skipped steps of an optimizer, with few waits for the device."""

import math
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..errors import GradientOverflowError
from ..reporting import log_warning, reports_parameters, say, warn
from .host_copy import HostCopy
from .loss_scaler import LossScaler
from .step_was_skipped import set_step_was_skipped

TRACE = "`amp-patch trace SCRIPT` (in a notebook `insight.trace(step)`)"
"""The command that finds where inf or NaN comes from."""

CHECK_EVERY = 100
"""At a static loss scale of 1, no block checks gradients. Those of every 100th step are checked, until a warning."""

WARN_AGAIN = 2.0**-24
"""After a warning that the scale has fallen, the next warning comes once the scale is smaller by this factor."""


class Outcome:
    """The overflow flags of one step, a 0-dim float32 tensor for each scaler. Their copy to the host begins at once.

    Attributes:
        may_skip: whether one of the scalers is dynamic.
        is_read: whether `read` was called, which sets the next three attributes.
        overflowed: the scalers whose flags are set, because a gradient was inf or NaN.
        is_skip: whether one of these scalers is dynamic, so that the step is skipped.
        scales: the scale of each scaler right after this step.
    """

    def __init__(self, found_inf: dict[LossScaler, Tensor]) -> None:
        self.may_skip = False
        self.is_read = False
        self.overflowed: list[LossScaler] = []
        self.is_skip = False
        self.scales: dict[LossScaler, float] = {}
        self._scalers = list(found_inf)
        numbers = list(found_inf.values())  # the flags, then the scales
        for scaler in found_inf:
            numbers.append(scaler.scale)
            self.may_skip = self.may_skip or scaler.is_dynamic
        self._numbers = HostCopy(numbers)

    def is_known(self) -> bool:
        """Return whether the flags have reached the host, so that `read` does not wait."""
        return self.is_read or self._numbers.is_known()

    def read(self) -> None:
        """Set the attributes that depend on the flags. Waits for their copy, but not for work queued after it."""
        if self.is_read:
            return
        values = self._numbers.read()
        flags, scales = values[: len(self._scalers)], values[len(self._scalers) :]
        for scaler, flag in zip(self._scalers, flags, strict=True):
            if flag:
                self.overflowed.append(scaler)
                self.is_skip = self.is_skip or scaler.is_dynamic
        self.scales = dict(zip(self._scalers, scales, strict=True))
        self.is_read = True


def is_capturing() -> bool:
    """Return whether a CUDA graph is being captured: nothing may wait for the device then."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def waits_for_each() -> bool:
    """Return whether each step waits for its flags, so that messages can name the parameters."""
    return reports_parameters() and not is_capturing()


class StepLog:
    """Counts and reports the steps of one optimizer, in order.

    A step whose flags have not reached the host is reported at a later step, or when a script reads its result.
    Until then, the stored answer of `step_was_skipped` does not change.

    Args:
        optimizer: held by a weak reference.
        scalers: all scalers of the session. Messages name a scaler by its index.
        find_culprits: returns the names of parameters whose gradients are non-finite now. Waits for the device.
    """

    def __init__(
        self,
        optimizer: "weakref.ref[Optimizer]",
        scalers: Sequence[LossScaler],
        find_culprits: Callable[[], list[str]],
    ) -> None:
        self._optimizer = optimizer
        self._scalers = scalers
        self._find_culprits = find_culprits
        self._pending: deque[Outcome] = deque()
        self._taken = 0
        self._skipped = 0
        self._skips_in_a_row = 0
        self._has_warned = False

    def count(self, *, wait: bool) -> tuple[int, int]:
        """Return how many steps were taken, and how many were skipped.

        With `wait`, wait for all flags. Otherwise, leave out steps whose flags have not reached the host.
        """
        if wait:
            self.resolve()
        return self._taken, self._skipped

    def add(self, outcome: Outcome | None) -> None:
        """Record a step. Report the oldest steps, up to the first whose flags are not known yet.

        `outcome` is None if no block has checked gradients for the step, so that it was taken. After every
        `CHECK_EVERY` taken steps, the gradients of such a step are checked here, which waits for the device. Raises
        GradientOverflowError if a smaller scale would not help: after too many skips in a row, or if a scale has fallen
        too far.
        """
        if outcome is None and not self._pending:
            self._count(is_skip=False)
            if self._taken % CHECK_EVERY == 0 and not self._has_warned and not is_capturing():
                self._check_gradients()
            return
        # steps are reported in order, so a step without flags waits for the steps before it
        self._pending.append(Outcome({}) if outcome is None else outcome)
        while self._pending and (self._pending[0].is_known() or waits_for_each()):
            self._report_first(is_latest=len(self._pending) == 1)
        if self._skips_in_a_row and self._skips_in_a_row >= max(scaler.hopeless_after for scaler in self._scalers):
            raise GradientOverflowError(
                f"{self._skips_in_a_row} steps in a row were skipped, so the cause is not the loss scale. Parameters"
                f" with non-finite gradients: {', '.join(self._find_culprits()) or 'none by now'}. Look for NaN in the"
                f" data or the weights, or an op that needs float32: {TRACE} finds it."
            )
        if self._skips_in_a_row:
            stop_if_hopeless(self._scalers)

    def _check_gradients(self) -> None:
        culprits = self._find_culprits()
        if culprits:
            self._warn(
                f"non-finite gradients ({', '.join(culprits[:5])}) at a loss scale of 1, where only one step in"
                f" {CHECK_EVERY} is checked: other steps may have had them too, and none is skipped. Look for NaN in"
                f" the data or the weights, or an op that needs float32: {TRACE} finds it. In float16 try"
                ' loss_scale="dynamic".'
            )

    def resolve(self) -> None:
        """Report all steps so far. Waits for flags that are not known yet."""
        while self._pending:
            self._report_first()

    def _report_first(self, *, is_latest: bool = False) -> None:
        outcome = self._pending.popleft()
        outcome.read()
        self._count(is_skip=outcome.is_skip)
        for scaler, scale in outcome.scales.items():
            scaler.known_scale = scale
        for scaler in outcome.overflowed:
            if scaler.is_dynamic:
                self._report_overflow(scaler, is_latest=is_latest)
            elif not outcome.is_skip and not self._has_warned:
                self._warn_of_static_scale()

    def _warn_of_static_scale(self) -> None:
        names = ", ".join(self._find_culprits()[:5]) or "in no parameter by now"
        self._warn(
            f"non-finite gradients under a static loss scale ({names}): the step is taken, because a static scale never"
            f' skips. Use a smaller loss_scale, or loss_scale="dynamic"; {TRACE} finds the op that overflowed.',
        )

    def _count(self, *, is_skip: bool) -> None:
        optimizer = self._optimizer()
        if optimizer is not None:
            set_step_was_skipped(optimizer, is_skip)
        if is_skip:
            self._skipped += 1
            self._skips_in_a_row += 1
        else:
            self._taken += 1
            self._skips_in_a_row = 0

    def _report_overflow(self, scaler: LossScaler, *, is_latest: bool) -> None:
        scale = scaler.known_scale
        message = "Gradient overflow.  Skipping step, loss scaler {} {} {}".format(
            list(self._scalers).index(scaler),
            "reducing loss scale to" if scaler.hysteresis == 1 else "goes on with loss scale",
            scale,
        )
        if is_latest and waits_for_each():  # otherwise, later backward passes may have changed the gradients
            names = self._find_culprits()
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            where = f"in {', '.join(names[:5])}{more}" if names else "in no parameter of this process"
            log_warning("%s (step %d, %s)", message, self._taken + self._skipped, where)
        else:
            say("%s", message)
        warn_of_small_scale(scaler)

    def _warn(self, message: str) -> None:
        self._has_warned = True
        warn(message)


def warn_of_small_scale(scaler: LossScaler) -> None:
    """Warn if a scale has fallen to its minimum (1 without one), and again each time it is smaller by `WARN_AGAIN`."""
    scale = scaler.known_scale
    if scale > min(scaler.min_loss_scale or 1.0, scaler.warned_scale * WARN_AGAIN):
        return
    is_first = scaler.warned_scale == math.inf
    scaler.warned_scale = scale
    if is_first:
        problem = "gradients overflow although the loss is hardly scaled any more"
        if scale > 1:
            problem = "gradients overflow at the least scale that min_loss_scale allows"
        warn(
            f"the loss scale has fallen to {scale}: {problem}."
            " Look for NaN in the data, a learning rate that is too high, or an op that needs float32:"
            f" {TRACE} finds it."
        )
    else:
        warn(
            f"the loss scale has fallen to {scale:.3g}, where small gradients of good batches become 0. Find the NaN by"
            f" {TRACE}, or leave bad batches out. If they are to be skipped, pass min_loss_scale=1.0 to initialize."
        )


def stop_if_hopeless(scalers: Iterable[LossScaler]) -> None:
    """Raise GradientOverflowError if a dynamic scale has fallen so far that a smaller one does not help
    (`LossScaler.is_hopeless`).
    """
    for scaler in scalers:
        if scaler.is_hopeless:
            raise GradientOverflowError(
                f"the loss scale has fallen to {scaler.known_scale:.3g}: by 2**100, so the cause is not the loss scale."
                f" Look for NaN in the data or the weights, or an op that needs float32: {TRACE} finds it. If bad"
                " batches are to be skipped, pass min_loss_scale=1.0 to initialize."
            )
