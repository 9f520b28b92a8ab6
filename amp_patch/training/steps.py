"""`Steps`: which steps of an optimizer were skipped, counted and told to the user, without waiting for the device where
that can be helped.
"""

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..errors import GradientOverflowError
from ..reporting import say, say_loudly, tells_parameters, warn
from .loss_scaler import LossScaler

TRACE = "`amp-patch trace SCRIPT`"
"""What to run to see where values come from that are not finite."""

LOOK_EVERY = 100
"""Of steps whose gradients no pass has judged, those at a loss scale of 1 among them, one in so many is looked at."""


class EarlyReading:
    """A number on its way from a 0-dim tensor to the host. From an accelerator it arrives with the work queued before
    it; on a CPU it is there.
    """

    __slots__ = ("_event", "_tensor")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._event: torch.Event | None = None
        if tensor.device.type not in ("cpu", "mps", "meta"):
            self._tensor = torch.empty((), dtype=tensor.dtype, device="cpu", pin_memory=True)
            self._tensor.copy_(tensor, non_blocking=True)
            self._event = torch.Event(tensor.device)
            self._event.record(torch.accelerator.current_stream(tensor.device))

    def is_here(self) -> bool:
        """Tell whether reading it waits for nothing."""
        return self._event is None or bool(self._event.query())

    def value(self) -> float:
        """Return the number. Waits for it, but for no work queued after it."""
        if self._event is not None:
            self._event.synchronize()
        return float(self._tensor.item())


class StepResult:
    """What the backward passes before one `step` have found, on its way to the host from the moment this is made.

    Args:
        found_inf: for each scaler of theirs whether there was an overflow: 0-dim float32.
    """

    def __init__(self, found_inf: dict[LossScaler, Tensor]) -> None:
        self._flags = {scaler: EarlyReading(flag) for scaler, flag in found_inf.items()}
        # the scales after this step's update: by the time somebody asks, there may have been others
        self._scales = {scaler: EarlyReading(scaler.scale) for scaler in found_inf if scaler.is_dynamic}
        self._is_skip: bool | None = None

    def is_known(self) -> bool:
        """Tell whether the host has everything: nothing else here waits for the device then."""
        return all(reading.is_here() for reading in (*self._flags.values(), *self._scales.values()))

    def find_overflowed(self) -> list[LossScaler]:
        """Return the scalers whose passes overflowed. Waits for the device."""
        return [scaler for scaler, flag in self._flags.items() if flag.value()]

    def is_skip(self) -> bool:
        """Tell whether the step is skipped: after an overflow under a dynamic scale. Waits for the device, once."""
        if self._is_skip is None:
            self._is_skip = any(flag.value() for scaler, flag in self._flags.items() if scaler.is_dynamic)
        return self._is_skip

    def note_scales(self) -> None:
        """Have the scalers know on the host what they came to."""
        for scaler, reading in self._scales.items():
            scaler.known_scale = reading.value()


def _is_capturing() -> bool:
    """Tell whether a CUDA graph is being recorded, when nothing may wait for the device."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def waits_for_each() -> bool:
    """Tell whether each step is to wait for what its passes have found, while the gradients are there."""
    return tells_parameters() and not _is_capturing()


class Steps:
    """The steps of one optimizer, in their order.

    A result that is still on its way is left until the next step, or until somebody asks.

    Args:
        scalers: those of the session: messages name them by number.
        find_culprits: names of parameters whose gradients are not finite. Called where gradients may be gone; waits for
            the device.
        tell_skipped: called for each step with whether it was skipped.
    """

    def __init__(
        self,
        scalers: Sequence[LossScaler],
        find_culprits: Callable[[], list[str]],
        tell_skipped: Callable[[bool], None],
    ) -> None:
        self._scalers = scalers
        self._find_culprits = find_culprits
        self._tell_skipped = tell_skipped
        self._pending: deque[StepResult] = deque()
        self._taken = 0
        self._skipped = 0
        self._skips_in_a_row = 0
        self._has_warned = False

    def count(self, *, wait: bool) -> tuple[int, int]:
        """Return how many steps were taken and skipped: of all so far, or of those that are known without waiting."""
        if wait:
            self.resolve()
        return self._taken, self._skipped

    def add(self, result: StepResult) -> None:
        """Take in the result of a step, and tell of all that is known by now.

        Raises GradientOverflowError after so many skips in a row that a smaller scale would not help.
        """
        self._pending.append(result)
        while self._pending and (self._pending[0].is_known() or waits_for_each()):
            self._resolve_first(is_latest=len(self._pending) == 1)
        if self._skips_in_a_row and self._skips_in_a_row >= max(one.hopeless_after for one in self._scalers):
            raise GradientOverflowError(
                f"{self._skips_in_a_row} steps in a row were skipped, so the cause is not the loss scale. Parameters"
                f" with non-finite gradients: {', '.join(self._find_culprits()) or 'none by now'}. Look for NaN in the"
                f" data or the weights, or an op that needs float32: {TRACE} finds it."
            )

    def add_taken(self) -> None:
        """Take in a step that no pass could skip. Waits for the device, once in a hundred steps."""
        if self._pending:
            self.add(StepResult({}))
            return
        self._count(is_skip=False)
        if self._taken % LOOK_EVERY == 0 and not self._has_warned and not _is_capturing():
            self._look_at_gradients()

    def _look_at_gradients(self) -> None:
        culprits = self._find_culprits()
        if culprits:
            self._warn(
                f"non-finite gradients ({', '.join(culprits[:5])}) at a loss scale of 1, under which nobody looks at"
                f" each of them: this is one step in {LOOK_EVERY}. The steps are taken. Look for NaN in the data or the"
                f' weights, or an op that needs float32, which {TRACE} finds; in float16 try loss_scale="dynamic".'
            )

    def resolve(self) -> None:
        """Tell of every step so far. Waits for the device if one is not known."""
        while self._pending:
            self._resolve_first()

    def _resolve_first(self, *, is_latest: bool = False) -> None:
        result = self._pending.popleft()
        is_skip = result.is_skip()
        self._count(is_skip=is_skip)
        result.note_scales()
        for scaler in result.find_overflowed():
            if scaler.is_dynamic:
                self._tell_of_overflow(scaler, is_latest=is_latest)
            elif not is_skip and not self._has_warned:
                self._warn_of_static()

    def _warn_of_static(self) -> None:
        names = ", ".join(self._find_culprits()[:5]) or "in no parameter by now"
        self._warn(
            f"non-finite gradients under a static loss scale ({names}): the step is taken, because a static scale never"
            f' skips. Use a smaller loss_scale, or loss_scale="dynamic"; {TRACE} finds what overflowed.',
        )

    def _count(self, *, is_skip: bool) -> None:
        self._tell_skipped(is_skip)
        if is_skip:
            self._skipped += 1
            self._skips_in_a_row += 1
        else:
            self._taken += 1
            self._skips_in_a_row = 0

    def _tell_of_overflow(self, scaler: LossScaler, *, is_latest: bool) -> None:
        scale = scaler.known_scale
        told = "Gradient overflow.  Skipping step, loss scaler {} {} {}".format(
            list(self._scalers).index(scaler),
            "reducing loss scale to" if scaler.hysteresis == 1 else "goes on with loss scale",
            scale,
        )
        if is_latest and waits_for_each():
            names = self._find_culprits()
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            where = f"in {', '.join(names[:5])}{more}" if names else "in no parameter of this process"
            say_loudly("%s (step %d, %s)", told, self._taken + self._skipped, where)
        else:
            say("%s", told)
        if scale <= (scaler.min_loss_scale or 1.0) and not self._has_warned:
            self._warn(
                f"the loss scale has fallen to {scale}: gradients overflow although the loss is hardly scaled up any"
                " more. Look for NaN in the data, a learning rate that is too high, or an op that needs float32:"
                f" {TRACE} finds it.",
            )

    def _warn(self, message: str) -> None:
        self._has_warned = True
        warn(message)
