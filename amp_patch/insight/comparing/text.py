"""A comparison as text: a row for each run, whether it is as good and as fast, and what there is to know of all."""

import math
from collections.abc import Iterator

from ...tables import format_table
from .summary import Row, Summary, last

WITHIN = 2.0
"""A difference of so many times the noise is within it: the noise is that of one run."""

ALIKE = 1e-3
"""A run is as good if its loss is off by no more than this part, however small the noise is."""

TIMED_STEPS = 10
"""Times of fewer steps tell nothing."""

SEEDS = 3
"""From so many seeds on, their spread tells whether a difference means something."""

_SAME_TIME = 0.05


COLUMNS = (
    *("run", "low", "final loss", "difference", "ms/step", "factor", "peak MB", "skipped", "scale"),
    *("zero unscaled", "zero scaled", "worst layer"),
)


def format_comparison(comparison: Summary) -> str:
    """Return the table and its footnotes."""
    table = format_table(COLUMNS, [cells(row) for row in comparison.rows()], left=2)
    return "\n".join([heading(comparison), "", table, "", *footnotes(comparison)])


def heading(comparison: Summary) -> str:
    """Return what was run, where."""
    run, about = comparison.recording.run, comparison.about
    seeds = f"seed {about.seeds[0]}"
    if len(about.seeds) > 1:
        seeds = f"seeds {about.seeds[0]} to {about.seeds[-1]}"
    return f"{about.steps} steps, {seeds}; torch {run.torch}, {run.device} ({about.machine})"


def cells(row: Row) -> tuple[str, ...]:
    """Return the cells of a run, in the order of `COLUMNS`."""
    difference = _show(row.difference, "+.2e")
    if row.spread is not None:
        difference += f" ± {row.spread:.1e}"
    peak = worst = "-"
    if row.run.peak is not None:
        peak = f"{row.run.peak / 1e6:.3g}"
    if row.worst is not None:
        worst = f"{row.worst.module} {_show(row.worst.output, '.1e')}"
    return (
        row.name,
        row.run.low or "-",
        _show(row.loss, ".5g"),
        difference,
        _show(row.ms, ".2f"),
        _show(row.factor, ".2f"),
        peak,
        str(row.skipped),
        _show(row.scale, "g"),
        _show(row.zero, ".2%"),
        _show(row.zero_scaled, ".2%"),
        worst,
    )


def _show(value: float | None, form: str) -> str:
    """Return a number, or a dash for none."""
    if value is None:
        return "-"
    return format(value, form)


def footnotes(comparison: Summary) -> Iterator[str]:
    """Yield a line for each thing to know."""
    about, rows = comparison.about, comparison.rows()
    for row in rows:
        verdict = judge(comparison, row)
        if verdict:
            yield f"{row.name}: {verdict}"
    tail = len(last(range(max((row.steps for row in rows), default=0))))
    final = f"final loss and difference from {about.reference}: means of the last {tail} steps"
    if tail <= 1:
        final = f"final loss and difference from {about.reference}: of the last step"
    if len(about.seeds) > 1:
        final += f", ± standard deviation over {len(about.seeds)} seeds"
    yield final
    if comparison.noise is not None:
        yield f"noise: {comparison.noise:.1e}, the difference when the weights move by one unit in the last place"
    else:
        yield "noise: not known, because it was not measured"
    if comparison.are_seeds_equal:
        yield "all seeds gave the same losses: the training sets a seed of its own"
    yield "zero: gradients in the first step that become zero in the low dtype, without and with the loss scale"
    yield "worst layer: the layer that adds the most error in the first step from equal weights, and how much"
    for row in rows:
        if row.run.failed:
            yield f"{row.name}: {row.run.failed}"
        elif row.steps < about.steps:
            yield f"{row.name}: the script ended after {row.steps} of {about.steps} steps"
        if not row.run.has_equal_weights:
            yield f"{row.name}: began with other weights than the reference, so its layers are not compared"


# ---- verdicts --------------------------------------------------------------------------------------------------------


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
    part = math.inf
    if reference_loss:
        part = size / abs(reference_loss)
    shown = f"{size:.1e}"
    if 1e-4 < part < 100:
        shown = f"{part:.2%}"
    verdict, off = "better", f"loss {shown} lower"
    if row.difference > 0:
        verdict, off = "worse", f"loss {shown} higher"
    beyond = "the noise is not known"
    if summary.noise is not None:
        beyond = "beyond noise"
        if size <= WITHIN * summary.noise:
            return f"as good as {reference} ({off}, within noise)"
    if _is_within_seeds(summary, row):
        return f"as good as {reference} ({off}, within the spread of the seeds)"
    if part <= ALIKE:
        return f"as good as {reference} ({off}, {beyond}, but below {ALIKE:.1%})"
    seeds = len(summary.about.seeds)
    if seeds < SEEDS and not summary.are_seeds_equal:
        beyond += f"; run {SEEDS} seeds to be surer"
    return f"{verdict} than {reference} ({off}, {beyond})"


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
    verdict = "slower"
    if row.factor < 1:
        verdict = "faster"
    return f"{verdict} (a step takes {row.factor:.2f} times as long)"
