"""Compares the losses of a training that was repaired, as by an op list, with the losses of a training in float32.
Finite values alone are not enough: the loss may stay where it is.
"""

import math
from statistics import median

from .recordings import Recording
from .records import CurveRecord

_FIRST = 0.1  # from equal weights, low precision changes a loss by less than this share of the loss
_SHARE = 0.2  # the last losses may differ by `_FIRST` of the loss, plus this share of the range of losses in float32


def find_curves(recording: Recording) -> list[CurveRecord]:
    """Return the loss curves in a recording that have a loss."""
    return [curve for curve in recording.of(CurveRecord) if curve.losses]


def describe_losses(curve: CurveRecord) -> str:
    """Return the first and the last loss of a run as text."""
    return f"{curve.losses[0]:.4g} to {curve.losses[-1]:.4g}"


def find_disagreement(repaired: CurveRecord, plain: CurveRecord) -> str:
    """Return how the losses of `repaired` and of `plain`, the run in float32, disagree; "" if they agree.

    They disagree if they differ by more than rounding explains. The more steps `repaired` skips while the loss scale
    comes down, the more its last losses may differ. They also disagree if there are no losses, if a loss is inf or NaN,
    if the loss changes in float32 only, or if `repaired` skips all steps.
    """
    steps = min(len(repaired.losses), len(plain.losses))
    if not steps:
        return "there is no loss to compare with float32"
    losses, wanted = repaired.losses[:steps], plain.losses[:steps]
    for run, values in (("in float32,", wanted), ("in 16 bits,", losses)):
        bad = next((number for number, loss in enumerate(values) if not math.isfinite(loss)), None)
        if bad is not None:
            return f"{run} the loss of step {bad} is {values[bad]}"
    skipped = sum(number < steps for number in repaired.skipped)
    if skipped == steps:
        return f"all of the {steps} steps are skipped"
    if abs(losses[0] - wanted[0]) > _FIRST * abs(wanted[0]):
        return f"the first loss is {losses[0]:.4g}, and {wanted[0]:.4g} in float32"
    moved = max(wanted) - min(wanted)
    last = max(steps // 4, 1)
    allowed = _FIRST * abs(median(wanted[-last:])) + (_SHARE + skipped / steps) * moved
    if moved and max(losses) == min(losses):  # no step has changed the weights
        return f"the loss stays {losses[0]:.4g}, and in float32 it moves to {wanted[-1]:.4g}"
    if abs(median(losses[-last:]) - median(wanted[-last:])) > allowed:
        return f"the last losses are about {median(losses[-last:]):.4g}, and {median(wanted[-last:]):.4g} in float32"
    return ""
