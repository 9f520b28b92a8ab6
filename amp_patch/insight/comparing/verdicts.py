"""What a comparison comes to, in a line for each run: whether its losses are as good, and whether it is faster."""

import math

from .summary import Row, Summary

WITHIN = 2.0
"""A difference of so many times the noise is within it: the noise is that of one run."""

ALIKE = 1e-3
"""A difference of this part of the loss is called none, however small the noise is."""

TIMED_STEPS = 10
"""Times of fewer steps tell nothing."""

_SAME_TIME = 0.05


def judge(summary: Summary, row: Row) -> str:
    """Return what there is to say of a run beside the reference; "" of the reference itself, and of a failed run."""
    if row.name == summary.about.reference or row.loss is None or row.run.failed:
        return ""
    return "; ".join([_judge_loss(summary, row), _judge_time(summary, row)])


def _judge_loss(summary: Summary, row: Row) -> str:
    reference, difference, noise = summary.about.reference, row.difference, summary.noise
    if difference is None:
        return f"no losses of {reference} to compare with"
    if not math.isfinite(difference):
        return f"worse than {reference}: the loss is not finite"
    assert row.loss is not None
    part = abs(difference) / max(abs(row.loss - difference), 1e-30)
    times = "" if noise is None else f", {_show(abs(difference) / noise)} times the noise"
    if difference == 0:
        return f"the losses of {reference}"
    if noise is not None and abs(difference) <= WITHIN * noise:
        return f"as good as {reference} within noise"
    if part <= ALIKE:
        return f"as good as {reference} but for {part:.1g} of the loss{times}"
    unknown = " (the noise is not known)" if noise is None else ""
    return f"{'worse' if difference > 0 else 'better'} than {reference} by {part:.1%} of the loss{times}{unknown}"


def _judge_time(summary: Summary, row: Row) -> str:
    if row.factor is None or row.steps < TIMED_STEPS:
        return f"no time: {row.steps} steps tell nothing of it, {TIMED_STEPS} or more do"
    noise = max(summary.time_noise, 1 + _SAME_TIME)
    if 1 / noise <= row.factor <= noise:
        return f"no difference in time (two runs of {summary.about.reference}: {summary.time_noise:.2f})"
    faster = row.factor < 1
    return f"{'faster' if faster else 'slower'} by a factor of {1 / row.factor if faster else row.factor:.2f}"


def _show(times: float) -> str:
    return f"{times:.0f}" if 10 <= times < 1e4 else f"{times:.2g}"
