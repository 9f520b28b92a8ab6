"""`TroubleWatch`: says whether a step of a run has gone wrong, with few waits for the device."""

import math
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...session import Session
from ...training import HostCopy, unscaling

_SKIPS_IN_A_ROW = 3
"""This many skipped steps in a row are trouble. Fewer are normal: a dynamic loss scale searches for a value that fits.
A single skipped step is trouble at a scale below 1, and with a loss of inf or NaN.
"""


class Trouble(NamedTuple):
    """What is wrong in a step.

    Attributes:
        symptom: what is wrong, in words.
        loss: the loss that is not finite; None if none is known.
        is_skipped: whether a dynamic loss scale skips the step.
    """

    symptom: str
    loss: float | None
    is_skipped: bool


class _Skips:
    """The skipped steps of one optimizer under a dynamic loss scale."""

    def __init__(self) -> None:
        self.in_a_row = 0
        self._pending: deque[HostCopy] = deque()

    def add(self, flags: Iterable[Tensor]) -> bool | None:
        """Note the overflow flags of a step. Return whether the step is skipped; None if the host does not know yet."""
        self._pending.append(HostCopy(list(flags)))
        # count in the order of the steps, because `in_a_row` depends on it
        while self._pending and self._pending[0].is_known():
            is_skipped = self._count()
        return None if self._pending else is_skipped

    def wait(self) -> bool:
        """Return whether the last step is skipped. Waits for its flags."""
        is_skipped = False
        while self._pending:
            is_skipped = self._count()
        return is_skipped

    def _count(self) -> bool:
        is_skipped = any(self._pending.popleft().read())
        self.in_a_row = self.in_a_row + 1 if is_skipped else 0
        return is_skipped


@dataclass
class _Losses:
    """The losses of a step, and of the run.

    Attributes:
        bad: a loss of this step that is not finite; None if none is known.
        smallest: the smallest finite loss of the run that the host has read; inf before one.
        first: the first loss of the run on another device than a CPU.
    """

    bad: float | None = None
    smallest: float = math.inf
    first: Tensor | None = None


class TroubleWatch:
    """Judges the steps of a run.

    Args:
        every: without a dynamic loss scale, look at an optimizer's gradients, and at losses on other devices than a
            CPU, in one of `every` steps of the optimizer. This waits for the device.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._steps: Counter[int] = Counter()  # by id of the optimizer
        self._skips: dict[int, _Skips] = {}  # by id of the optimizer
        self._losses = _Losses()
        self._of_step: list[Tensor] = []  # losses on other devices than a CPU

    def note_loss(self, loss: Tensor) -> None:
        """Note a loss, if it has one element. On a CPU, read it now. On another device, keep it for `judge`, which does
        not look at it under a dynamic loss scale.
        """
        if loss.numel() != 1:
            return
        value = loss.detach()
        if not value.is_cpu:
            self._of_step.append(value)
            if self._losses.first is None:
                self._losses.first = value
            return
        self._read(float(value))

    def _read(self, value: float) -> None:
        if math.isfinite(value):
            self._losses.smallest = min(self._losses.smallest, value)
        else:
            self._losses.bad = value

    def smallest_loss(self) -> float:
        """Return the smallest finite loss that was read, or the first loss on a GPU if that is smaller. Return inf if
        there is none. Waits for the device.
        """
        first = self._losses.first
        return self._losses.smallest if first is None else min(self._losses.smallest, float(first))

    def end_step(self) -> None:
        """Forget the losses of the step."""
        self._losses.bad = None
        self._of_step.clear()

    @property
    def bad_loss(self) -> float | None:
        """A loss of this step that is known not to be finite; None if there is none."""
        return self._losses.bad

    def judge(self, session: Session, optimizer: Optimizer) -> Trouble | None:
        """Return the trouble of a step that is about to be taken or skipped; None without one."""
        flags, may_skip = session.overflow_flags(optimizer)
        if may_skip:
            return self._judge_skips(session, optimizer, flags)
        is_due = self._steps[id(optimizer)] % self._every == 0
        self._steps[id(optimizer)] += 1
        # the flags of a static scale do not skip the step, but they show inf and NaN, so no norm is needed
        if self.bad_loss is None and is_due:
            is_bad = any(map(bool, flags)) or _has_bad_values(optimizer, self._of_step, has_flags=bool(flags))
            for value in self._of_step if is_bad else ():
                self._read(float(value))
            if is_bad and self.bad_loss is None:
                return Trouble("the gradients are not finite", None, is_skipped=False)
        return self._judge_loss(is_skipped=False)

    def _judge_loss(self, *, is_skipped: bool) -> Trouble | None:
        bad = self.bad_loss
        return None if bad is None else Trouble(f"the loss is {bad:g}", bad, is_skipped)

    def _judge_skips(self, session: Session, optimizer: Optimizer, flags: list[Tensor]) -> Trouble | None:
        skips = self._skips.setdefault(id(optimizer), _Skips())
        is_skipped = skips.add(flags)
        if is_skipped is None and skips.in_a_row >= _SKIPS_IN_A_ROW - 1:
            is_skipped = skips.wait()
        if not is_skipped:
            return self._judge_loss(is_skipped=False)
        trouble = self._judge_loss(is_skipped=True)
        if trouble is not None:
            return trouble
        scale = min(session.stats(wait=False).loss_scales, default=1.0)
        if skips.in_a_row >= _SKIPS_IN_A_ROW:
            return Trouble(f"gradient overflow, for the {_ordinal(skips.in_a_row)} step in a row", None, True)
        if scale < 1:
            return Trouble(f"gradient overflow at a loss scale of {scale:g}", None, True)
        return None


def _ordinal(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{'th' if number % 100 in (11, 12, 13) else ending}"


def _has_bad_values(optimizer: Optimizer, losses: list[Tensor], *, has_flags: bool) -> bool:
    """Return whether a gradient of an optimizer or a loss is not finite.

    Waits once for each device, and more often if there may be such a value. With `has_flags`, looks only at losses,
    because the flags show whether a gradient is not finite.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [value.reshape(()).float() for value in losses]
    if not has_flags:
        numbers += unscaling.sum_norms(parameters)
    if not numbers:
        return False
    if len({number.device for number in numbers}) > 1:
        numbers = [number.cpu() for number in numbers]
    total = numbers[0] if len(numbers) == 1 else torch.stack(numbers).sum()
    if math.isfinite(float(total)):
        return False
    has_bad_loss = not all(bool(value.isfinite()) for value in losses)
    return has_bad_loss or (not has_flags and bool(unscaling.find_nonfinite(parameters)))
