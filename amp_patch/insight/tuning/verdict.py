"""Whether a run computes what the float32 run does, within a tolerance for each parameter."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ..recordings import Recording
from ..records import CheckedStepRecord, SketchRecord
from .sketches import distance

SMALL = 1e-5
"""A gradient whose norm is below this share of the largest of its step is not compared."""

LOSS_SHARE = 0.2
"""The share of the tolerance that a loss may be off by, relative to itself."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a run came to.

    Attributes:
        passed: whether all is within the tolerance.
        worst: the largest relative error (L2) of a gradient; inf where one, or a loss, is not finite.
        parameter: whose it is, "" where that is nobody's.
        loss_error: the largest relative error of a loss.
        fault: why it did not pass, in words; "" if it did.
        is_skipped: whether that is a step that was skipped for an overflow.
    """

    passed: bool
    worst: float
    parameter: str
    loss_error: float
    fault: str
    is_skipped: bool = False


def judge(reference: Recording, run: Recording, tolerance: float) -> Verdict:
    """Compare a run with the float32 run, step by step."""
    wanted, found = _steps(reference), _steps(run)
    missing = [key for key in wanted if key not in found]
    if missing:
        return Verdict(False, math.inf, "", math.inf, f"it took {len(found)} of {len(wanted)} steps")
    for key, step in wanted.items():
        if found[key].skipped and not step.skipped:
            fault = f"step {step.step} was skipped for an overflow at loss scale {found[key].loss_scale:g}"
            return Verdict(False, math.inf, _find_non_finite(run, step), math.inf, fault, is_skipped=True)
    loss_error = max((_compare_losses(step, found[key]) for key, step in wanted.items()), default=0.0)
    worst, parameter = max(_errors(reference, run), default=(0.0, ""))
    fault = ""
    if loss_error > tolerance * LOSS_SHARE:
        fault = f"a loss is off by {loss_error:.2g}, more than {tolerance * LOSS_SHARE:.2g}"
    if worst > tolerance:
        fault = f"the gradient of {parameter} is off by {worst:.2g}"
    return Verdict(not fault, worst, parameter, loss_error, fault)


def find_non_finite(run: Recording) -> str:
    """Return in words what of a run is not finite, or an empty string."""
    for step in run.of(CheckedStepRecord):
        for loss in step.losses:
            if not math.isfinite(loss):
                return f"a loss of step {step.step} is {loss}"
    for one in run.of(SketchRecord):
        if not math.isfinite(one.norm):
            return f"the gradient of {one.parameter} in step {one.step} has the norm {one.norm}"
    return ""


def _steps(run: Recording) -> dict[tuple[int, int], CheckedStepRecord]:
    return {(record.optimizer, record.step): record for record in run.of(CheckedStepRecord)}


def _find_non_finite(run: Recording, step: CheckedStepRecord) -> str:
    here = (one for one in run.of(SketchRecord) if (one.step, one.optimizer) == (step.step, step.optimizer))
    return next((one.parameter for one in here if not math.isfinite(one.norm)), "")


def _compare_losses(wanted: CheckedStepRecord, found: CheckedStepRecord) -> float:
    if len(wanted.losses) != len(found.losses):
        return math.inf
    largest = 0.0
    for one, other in zip(wanted.losses, found.losses, strict=True):
        if not math.isfinite(other):
            return math.inf
        largest = max(largest, abs(one - other) / max(abs(one), 1e-30))
    return largest


def _errors(reference: Recording, run: Recording) -> Iterator[tuple[float, str]]:
    """Yield the relative error of each gradient that is large enough, and the name of its parameter."""
    found = {(one.optimizer, one.step, one.parameter): one for one in run.of(SketchRecord)}
    wanted = reference.of(SketchRecord)
    largest: dict[tuple[int, int], float] = {}
    for one in wanted:
        key = one.optimizer, one.step
        largest[key] = max(largest.get(key, 0.0), one.norm)
    for one in wanted:
        if one.norm == 0.0 or one.norm <= SMALL * largest[one.optimizer, one.step]:
            continue
        error = math.inf
        other = found.get((one.optimizer, one.step, one.parameter))
        if other is not None:
            error = distance(one.sketch, other.sketch) / one.norm
        if math.isnan(error):  # of values that are not finite
            error = math.inf
        yield error, one.parameter
