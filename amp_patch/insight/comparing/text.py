"""A comparison as text: a row for each run, and what there is to know of all."""

from collections.abc import Iterator

from ...tables import format_table
from .summary import Row, Summary, last
from .verdicts import judge

COLUMNS = (
    *("run", "low", "final loss", "difference", "ms/step", "factor", "peak MB", "skipped", "scale"),
    *("zero unscaled", "zero scaled", "worst layer"),
)


def format_comparison(comparison: Summary) -> str:
    """Return the table and its footnotes."""
    table = format_table(COLUMNS, [tuple(cells(row)) for row in comparison.rows()], left=2)
    return "\n".join([heading(comparison), "", table, "", *footnotes(comparison)])


def heading(comparison: Summary) -> str:
    """Return what was run, where."""
    run, about = comparison.recording.run, comparison.about
    seeds = f"seed {about.seeds[0]}" if len(about.seeds) == 1 else f"seeds {about.seeds[0]} to {about.seeds[-1]}"
    return f"{about.steps} steps, {seeds}; torch {run.torch}, {run.device} ({about.machine})"


def cells(row: Row) -> Iterator[str]:
    """Yield the cells of a run, in the order of `COLUMNS`."""
    spread = "" if row.spread is None else f" ± {row.spread:.1e}"
    worst = row.worst
    yield row.name
    yield row.run.low or "-"
    yield show(row.loss, ".5g")
    yield show(row.difference, "+.2e") + spread
    yield show(row.ms, ".2f")
    yield show(row.factor, ".2f")
    yield "-" if row.run.peak is None else f"{row.run.peak / 1e6:.3g}"
    yield str(row.skipped)
    yield show(row.scale, "g")
    yield show(row.zero, ".2%")
    yield show(row.zero_scaled, ".2%")
    yield "-" if worst is None else f"{worst.module} {show(worst.output, '.1e')}"


def show(value: float | None, form: str) -> str:
    """Return a number, or a dash for none."""
    return "-" if value is None else format(value, form)


def footnotes(comparison: Summary) -> Iterator[str]:
    """Yield a line for each thing to know."""
    about, rows = comparison.about, comparison.rows()
    yield from (f"{row.name}: {verdict}" for row in rows if (verdict := judge(comparison, row)))
    tail = len(last(range(max((row.steps for row in rows), default=0))))
    steps = f"means of the last {tail} steps" if tail > 1 else "of the last step"
    yield f"final loss and difference from {about.reference}: {steps}" + (
        f", ± standard deviation over {len(about.seeds)} seeds" if len(about.seeds) > 1 else ""
    )
    if comparison.noise is not None:
        yield f"noise: {comparison.noise:.1e}, the difference when the weights move by one unit in the last place"
    else:
        yield "noise: not known, moving the weights by one unit in the last place made no difference"
    if comparison.are_seeds_equal:
        yield "all seeds gave the same losses: the training sets a seed of its own"
    yield ("zero: gradients in the first step that become zero in the low dtype, without and with the loss scale")
    yield ("worst layer: the layer that adds the most error in the first step from equal weights, and how much")
    for row in rows:
        yield from _of(row, about.steps)


def _of(row: Row, steps: int) -> Iterator[str]:
    if row.run.failed:
        yield f"{row.name}: {row.run.failed}"
    elif row.steps < steps:
        yield f"{row.name}: took {row.steps} of {steps} steps, and ended"
    if not row.run.has_equal_weights:
        yield f"{row.name}: began with other weights than the reference, so its layers are not compared"
