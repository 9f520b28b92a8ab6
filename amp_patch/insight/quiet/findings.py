"""`Findings`: collects the quiet losses in forward and backward passes, by line of the script, over all steps.

A *loss* here is a loss of values by rounding to 16 bits, not the loss of the training.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from ..folding import OpCall
from ..placing import find_submodule_rules
from ..quiet_record import QuietCause, QuietRecord
from ..rules import short
from ..written import Culprit


class Place(NamedTuple):
    """A line of the script, the module that runs, and the op."""

    site: str
    module: str
    op: str


def place_of(call: OpCall) -> Place:
    """Return the place of a call."""
    return Place(call.site.place, call.module, call.op.removeprefix("aten."))


def place_of_culprit(culprit: Culprit) -> Place:
    """Return the place of an op of the forward pass."""
    return Place(culprit.site, culprit.module, culprit.op.removeprefix("aten."))


@dataclass
class _Finding:
    """The losses of one cause at one line.

    Attributes:
        place: the place of the first loss, or, until there is one, of the first check.
        dtype: the 16-bit dtype; None until a loss was found.
        steps: the steps with a loss.
        passed: the steps in which a call at the line was checked and had no loss. Another call may have had one.
        kept, error, used, tensor, regions: as in `QuietRecord`.
    """

    place: Place
    dtype: torch.dtype | None = None
    steps: set[int] = field(default_factory=set)
    passed: set[int] = field(default_factory=set)
    kept: float | None = None
    error: float | None = None
    used: str = ""
    tensor: str = ""
    regions: tuple[str, ...] = ()


class Findings:
    """Collects losses by their cause and line.

    Attributes:
        step: the number of the step that runs.
        get_models: returns the models whose modules a module rule can name.
    """

    def __init__(self) -> None:
        self.step = 0
        self.get_models: Callable[[], Sequence[nn.Module]] = list
        self._known: dict[tuple[QuietCause, str], _Finding] = {}  # by the cause and the line

    def add(
        self,
        cause: QuietCause,
        place: Place,
        dtype: torch.dtype,
        *,
        kept: float | None = None,
        error: float | None = None,
        used: str = "",
        tensor: str = "",
        culprit: Culprit | None = None,
    ) -> None:
        """Note a loss in this step. If a line has several, the record gets the smallest `kept`, the largest `error` and
        the first `used` and `tensor`.

        `culprit`: the op that rounded the values, if a module rule may make it run in float32.
        """
        finding = self._known.setdefault((cause, place.site), _Finding(place))
        if not finding.steps:
            finding.place, finding.dtype = place, dtype
        finding.steps.add(self.step)
        if kept is not None:
            finding.kept = kept if finding.kept is None else min(kept, finding.kept)
        if error is not None:
            finding.error = error if finding.error is None else max(error, finding.error)
        if used != place.site:
            finding.used = finding.used or used
        finding.tensor = finding.tensor or tensor
        if culprit is not None and not finding.regions:
            # at once, because the models may be gone at the end of the script
            finding.regions = find_submodule_rules(culprit, self.get_models())

    def pass_over(self, cause: QuietCause, place: Place) -> None:
        """Note that a call at a line was checked in this step, and had no loss of this cause."""
        self._known.setdefault((cause, place.site), _Finding(place)).passed.add(self.step)

    def records(self) -> list[QuietRecord]:
        """Return a record for each cause and line with a loss. These are left out:

        1. a line that was checked without a loss in most steps;
        2. a cancelled difference at a line whose differences were sound in an earlier step. Once a training has
           converged, the values that it subtracts are nearly equal;
        3. a line that another finding of the same cause names in `used`.
        """
        return list(self._records())

    def _records(self) -> Iterator[QuietRecord]:
        used = {(cause, finding.used) for (cause, _), finding in self._known.items() if finding.used}
        for (cause, site), finding in self._known.items():
            place = finding.place
            if (cause, site) in used:
                continue
            only_passed = finding.passed - finding.steps
            if not finding.steps or len(finding.steps) < len(only_passed):
                continue
            if cause is QuietCause.CANCELLED and only_passed and min(only_passed) < min(finding.steps):
                continue
            yield QuietRecord(
                cause,
                step=min(finding.steps),
                steps=len(finding.steps),
                looked=len(finding.steps | finding.passed),
                tensor=finding.tensor or None,
                module=place.module or None,
                op=place.op or None,
                site=place.site or None,
                dtype=None if finding.dtype is None else short(finding.dtype),
                kept=finding.kept,
                error=finding.error,
                used=finding.used or None,
                regions=finding.regions,
            )
