"""What a comparison comes to, in a line for each run: whether its losses are as good, and whether it is faster."""

import math

from .summary import Row, Summary

WITHIN = 2.0
"""A difference of so many times the noise is within it: the noise is that of one run."""

ALIKE = 1e-3
"""A run is as good if its loss is off by no more than this part, however small the noise is."""

TIMED_STEPS = 10
"""Times of fewer steps tell nothing."""

SEEDS = 3
"""From so many seeds on, their spread tells whether a difference means something."""

_SAME_TIME = 0.05


def judge(summary: Summary, row: Row) -> str:
    """Return what there is to say of a run beside the reference; "" of the reference itself, and of a failed run."""
    if row.name == summary.about.reference or row.loss is None or row.run.failed:
        return ""
    return f"{_judge_loss(summary, row, row.loss)}; {_judge_time(summary, row)}"


def _judge_loss(summary: Summary, row: Row, loss: float) -> str:
    reference = summary.about.reference
    reference_loss = next((one.loss for one in summary.rows() if one.name == reference), None)
    if reference_loss is None or row.difference is None:
        return f"not judged, {reference} has no losses"
    if not math.isfinite(reference_loss):
        return f"not judged, the loss of {reference} is not finite"
    if not math.isfinite(loss) or not math.isfinite(row.difference):
        return f"worse than {reference} (the loss is not finite)"
    if row.difference == 0:
        return f"as good as {reference} (the same loss)"
    size = abs(row.difference)
    part = size / abs(reference_loss) if reference_loss else math.inf
    shown = f"{part:.2%}" if 1e-4 < part < 100 else f"{size:.1e}"
    off = f"loss {shown} {'higher' if row.difference > 0 else 'lower'}"
    if summary.noise is not None and size <= WITHIN * summary.noise:
        return f"as good as {reference} ({off}, within noise)"
    if _is_within_seeds(summary, row):
        return f"as good as {reference} ({off}, within the spread of the seeds)"
    beyond = "beyond noise" if summary.noise is not None else "the noise is not known"
    if part <= ALIKE:
        return f"as good as {reference} ({off}, {beyond}, but below {ALIKE:.1%})"
    seeds = len(summary.about.seeds)
    hint = f"; {SEEDS} seeds tell more than {seeds}" if seeds < SEEDS and not summary.are_seeds_equal else ""
    return f"{'worse' if row.difference > 0 else 'better'} than {reference} ({off}, {beyond}{hint})"


def _is_within_seeds(summary: Summary, row: Row) -> bool:
    """Tell whether the mean difference over the seeds is below two standard errors."""
    seeds = len(summary.differences(row.name))
    if row.spread is None or row.difference is None or seeds < SEEDS or summary.are_seeds_equal:
        return False
    return abs(row.difference) <= 2 * row.spread / math.sqrt(seeds)


def _judge_time(summary: Summary, row: Row) -> str:
    if row.factor is None or row.steps < TIMED_STEPS:
        return f"time not judged, {row.steps} steps are too few ({TIMED_STEPS} are enough)"
    noise = max(summary.time_noise, 1 + _SAME_TIME)
    if 1 / noise <= row.factor <= noise:
        return f"time within noise (two runs of {summary.about.reference}: a factor of {summary.time_noise:.2f})"
    return f"{'faster' if row.factor < 1 else 'slower'} (a step takes {row.factor:.2f} times as long)"
