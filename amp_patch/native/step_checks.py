"""`StepChecks`: whether a script can be changed as it was told to, judged by the steps for which that matters."""

import sys
from collections.abc import Callable

import torch

from ..errors import PolicyError
from ..reporting import say_loudly
from ..script_settings import NoRegionError, UnsuitedLevelError
from ..step_counter import StepCounter
from .roots import find_line


class StepChecks:
    """What is known of the steps of a script, and of the regions of `torch.autocast` before each.

    A step that follows no region is left alone, since the script may enter one later: a warm-up, a model that is
    trained in float32 first. So whether a script has mixed precision is known when it ends.

    Args:
        needs_region: there is nothing to do outside of regions.
        is_everywhere: the region is not the script's own, but one that the first call of a model begins.
        on_plain_step: called with a line of text at the first step of a script that has entered no region yet.
    """

    def __init__(
        self, *, needs_region: bool, is_everywhere: bool = False, on_plain_step: Callable[[str], None] = say_loudly
    ) -> None:
        self._needs_region = needs_region
        self._is_everywhere = is_everywhere
        self._on_plain_step = on_plain_step
        self.called_at = ""  # the line that called a model first
        self._stepped_at = ""  # the line of the first step before any region
        self._has_amp = False  # a region was entered, or amp.initialize called
        self._is_compiled = False  # since the last step, a region was entered in compiled code that cannot be changed
        self._loses_range = False  # since the last step, what may train entered one with the range of float32
        self._steps = StepCounter()
        self._count = 0

    @property
    def is_waiting(self) -> bool:
        """Whether the script has still to enter the first of the regions that are to be changed."""
        return self._needs_region and not self._has_amp

    def note_region(self, low: torch.dtype) -> None:
        """Take note of a region, with the dtype that the script gives it."""
        self._has_amp = True
        if low is not torch.float16 and torch.is_grad_enabled():
            self._loses_range = True

    def note_compiled_region(self) -> None:
        """Take note of a region in compiled code, where no session can be opened."""
        self._is_compiled = torch.is_grad_enabled()

    def note_amp(self) -> None:
        """Take note that the script calls `amp.initialize`."""
        self._has_amp = True

    def needs_scaler(self, *, is_scaling: bool) -> bool:
        """Tell whether the step that begins would need a loss scale in float16, and has none."""
        return self._loses_range and not is_scaling

    def check(self, level: str | None, low: torch.dtype | None, *, is_changing: bool, is_scaling: bool) -> None:
        """Raise PolicyError before a step that follows a region which cannot be as it was told to be.

        `low` is the dtype of the level; `is_changing`: anything is to run otherwise than the script has it.
        """
        if self.is_waiting and not self._stepped_at:
            self._stepped_at = find_line()
            self._on_plain_step(
                f"amp_patch: {self._stepped_at} steps without mixed precision: nothing changes until the script enters"
                " torch.autocast for the first time"
            )
        if self._is_compiled and is_changing:
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
        """Take note that a step has ended: what counts for the next is what comes from now on."""
        self._is_compiled = self._loses_range = False
        if not is_open and self._steps.note(optimizer):
            self._count += 1

    def take_count(self) -> int:
        """Return how many steps have ended before the session that is opened now."""
        count, self._count = self._count, 0
        return count

    def check_end(self) -> None:
        """Raise NoRegionError for a script that has trained, and has had no mixed precision at all."""
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
            hint = " FP16_Optimizer has no levels."
        raise NoRegionError(
            f"this training has no mixed precision to change: {where}, without torch.autocast, and without the"
            " initialize of amp_patch or apex. Call amp_patch.initialize and scale_loss; or write `with"
            " torch.autocast(device_type, dtype=torch.bfloat16):` around the call of the model and the loss; or run"
            " the whole script in one bfloat16 region: amp-patch run --everywhere --opt-level O4, or amp-patch"
            " compare --everywhere. If the script has mixed precision with certain arguments only, pass them."
            f"{hint}"
        )
