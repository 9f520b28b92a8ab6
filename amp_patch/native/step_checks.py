"""`StepChecks`: raises an error if a script cannot be trained with the changes that a `Takeover` makes.

A `Takeover` changes the regions of a script whose code stays as it is. A region is a block `with torch.autocast(...)`.
"""

import sys
from collections.abc import Callable

import torch

from ..errors import PolicyError
from ..reporting import log_warning
from ..script_settings import NoRegionError, UnsuitedLevelError
from ..step_counter import StepCounter
from .roots import find_line


class StepChecks:
    """Follows the regions of `torch.autocast` and the optimizer steps of a script.

    A step before the first region is no error, because the script may enter a region later: after a warm-up, or after
    it has trained another model in float32. `check_end` raises the error if the script ends without mixed precision.

    Args:
        needs_region: whether the takeover waits until the script uses mixed precision, usually because the changes act
            in regions only.
        is_everywhere: whether `WholeScript` makes the region, which begins with the first call of a model.
        on_plain_step: called with a line of text at the first step that the script takes without mixed precision, if
            `needs_region` is set.

    Attributes:
        called_at: the line that first called a model, such as `train.py:12`; "" if no call was seen.
    """

    def __init__(
        self, *, needs_region: bool, is_everywhere: bool = False, on_plain_step: Callable[[str], None] = log_warning
    ) -> None:
        self._needs_region = needs_region
        self._is_everywhere = is_everywhere
        self._on_plain_step = on_plain_step
        self.called_at = ""
        self._stepped_at = ""  # the line of the first step without mixed precision
        self._has_mixed_precision = False  # whether the script has used mixed precision in any way so far
        self._step_counter = StepCounter()
        self._steps_before_session = 0
        # The next two are about regions since the last step. Regions under torch.no_grad do not count.
        self._has_compiled_region = False  # a region began in compiled code, where no session can be opened
        self._has_bfloat16_region = False  # a region began in bfloat16, or any dtype other than float16

    @property
    def is_waiting(self) -> bool:
        """Whether `needs_region` is set, and the script has not used mixed precision yet."""
        return self._needs_region and not self._has_mixed_precision

    def note_region(self, low: torch.dtype) -> None:
        """Record a region that begins, with the dtype that the script gives it."""
        self._has_mixed_precision = True
        # a region of an evaluation, without gradients, needs no loss scale in any dtype
        if low is not torch.float16 and torch.is_grad_enabled():
            self._has_bfloat16_region = True

    def note_compiled_region(self) -> None:
        """Record a region in compiled code, where no session can be opened."""
        if torch.is_grad_enabled():
            self._has_compiled_region = True

    def note_mixed_precision(self) -> None:
        """Record that the script uses mixed precision without a region: `amp.initialize`, or weights in 16 bits."""
        self._has_mixed_precision = True

    def needs_scaler(self, *, is_scaling: bool) -> bool:
        """Return whether the step that begins follows a bfloat16 region without a loss scale.

        Such a step would need a loss scale if the region ran in float16 instead.
        """
        return self._has_bfloat16_region and not is_scaling

    def check(self, level: str | None, low: torch.dtype | None, *, is_changing: bool, is_scaling: bool) -> None:
        """Raise PolicyError before a step whose region cannot run with the changes.

        With `needs_region`, call `on_plain_step` at the first step without mixed precision.

        Args:
            level: the opt_level, or None without one.
            low: the 16-bit dtype of the opt_level, or None without a session or an opt_level.
            is_changing: whether the takeover changes anything.
            is_scaling: whether an enabled GradScaler takes the step.
        """
        if self.is_waiting and not self._stepped_at:  # only at the first of these steps
            self._stepped_at = find_line()
            begin = "calls a torch.nn.Module with parameters" if self._is_everywhere else "enters torch.autocast"
            self._on_plain_step(
                f"amp_patch: {self._stepped_at} steps without mixed precision: nothing changes until the script {begin}"
                " for the first time"
            )
        if self._has_compiled_region and is_changing:
            raise PolicyError(
                "the first region of torch.autocast is in compiled code, where lists cannot change it: enter"
                " torch.autocast around the call of the compiled model instead"
            )
        if low is torch.float16 and self.needs_scaler(is_scaling=is_scaling):
            raise UnsuitedLevelError(
                f"{level} is float16, whose gradients need a loss scale, and this script steps without a"
                " GradScaler: use O4, or add a torch.amp.GradScaler to the script"
            )

    def end_step(self, optimizer: torch.optim.Optimizer, *, is_open: bool) -> None:
        """Record the end of a step. If `is_open` is False, no session is open: count the step for the next session."""
        self._has_compiled_region = self._has_bfloat16_region = False
        if not is_open and self._step_counter.note(optimizer):
            self._steps_before_session += 1

    def take_steps_before_session(self) -> int:
        """Return the number of steps without a session, for the session that is being opened, and set it to 0."""
        count, self._steps_before_session = self._steps_before_session, 0
        return count

    def check_end(self) -> None:
        """Raise NoRegionError if `needs_region` is set, and the script has taken steps without any mixed precision."""
        if not self.is_waiting or not self._stepped_at:
            return
        where = f"{self._stepped_at} steps"
        if self.called_at:
            where = f"{self.called_at} calls the model and {where}"
        if self._is_everywhere:
            raise NoRegionError(
                f"--everywhere changed nothing: {where}. The region begins when the script calls a torch.nn.Module with"
                " parameters outside of torch.autocast(enabled=False) and of compiled code"
            )
        hint = ""
        if "apex" in sys.modules:
            hint = " No opt_level can be applied to FP16_Optimizer of apex."
        raise NoRegionError(
            f"this training has no mixed precision to change: {where}, without torch.autocast, and without the"
            " initialize of amp_patch or apex. Call amp_patch.initialize and scale_loss; or write `with"
            " torch.autocast(device_type, dtype=torch.bfloat16):` around the call of the model and the loss; or run"
            " the whole script in one bfloat16 region: amp-patch run --everywhere --opt-level O4, or amp-patch"
            " compare --everywhere. If the script has mixed precision with certain arguments only, pass them."
            f"{hint}"
        )
