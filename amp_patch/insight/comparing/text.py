"""Formats a comparison as text: a verdict for each run, the table of all runs, and notes."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ...config import levels
from ...tables import Table
from ..records import ComparedRecord, OpErrorRecord
from .assessment import SEEDS, Assessment
from .summary import Row, Summary, is_off, last

_LEAST = {"run": 12, "updates kept": 18, "worst op": 26}
"""Columns of text, each with the width to which it may be shortened."""

_SPARE = ("factor", "zero unscaled", "worst op", "zero scaled", "updates kept", "low")
"""Columns to leave out of a table that is too wide, the least important first."""

_COUNTS = ("skipped", "zero unscaled", "zero scaled")
"""Columns that are left out of a table of limited width if all their numbers are zero."""

_OF_LOSS_SCALES = ("skipped", "scale", "zero scaled")


class Shown(NamedTuple):
    """A cell of the table: its text, and the number to sort it by; None to sort it by its text."""

    text: str
    value: float | None = None


class Judged(NamedTuple):
    """A verdict in words, whether it is good (None: neither good nor bad), the names of the runs it is about, and
    whether they are faster than the reference (None: not judged).
    """

    text: str
    is_good: bool | None
    runs: tuple[str, ...]
    is_faster: bool | None = None


def format_comparison(comparison: Summary, width: int | None = None) -> str:
    """Return the verdicts, the table and the notes. With `width`, make the table fit, if possible."""
    verdicts = [verdict.text for verdict in judge_runs(comparison)]
    if verdicts:
        verdicts.append("")
    columns, rows = tabulate(comparison.rows())
    table = Table(columns, [[cell.text for cell in row] for row in rows], 2, _LEAST)
    left_out: list[str] = []
    if width is not None:
        table.drop_empty(_COUNTS)
        left_out = table.leave_out(_SPARE, width)
        table.shorten(width)
    notes = [*footnotes(comparison, has_zeros=table.has("zero unscaled"))]
    if left_out:
        notes.append(f"columns left out, to fit {width} characters: {', '.join(left_out)}; to see them, use --wide")
    return "\n".join([*verdicts, heading(comparison), "", *table.lines(), "", *notes])


def tabulate(rows: Sequence[Row]) -> tuple[list[str], list[list[Shown]]]:
    """Return the headings of the columns, and the cells of each run.

    Leaves out the columns about loss scales if no run scales its loss, and "updates kept" if no run loses updates.
    """
    cells = [_cells(row) for row in rows]  # all rows have the same columns
    columns = list(cells[0])
    if not _have_scales(rows):
        columns = [column for column in columns if column not in _OF_LOSS_SCALES]
    if all(row.run.kept is None for row in rows):
        columns.remove("updates kept")
    return columns, [[row[column] for column in columns] for row in cells]


def _have_scales(rows: Sequence[Row]) -> bool:
    return any(row.skipped or row.scale not in (None, 1.0) for row in rows)


def heading(comparison: Summary) -> str:
    """Return the title: steps, seeds, the version of torch, and the machine."""
    run, about = comparison.recording.run, comparison.about
    seeds = f"seed {about.seeds[0]}"
    if len(about.seeds) > 1:
        seeds = f"seeds {about.seeds[0]} to {about.seeds[-1]}"
    steps_taken = max((row.steps for row in comparison.rows()), default=0)
    steps = f"first {about.steps} steps"
    if steps_taken < about.steps:
        steps = f"{steps_taken} of {about.steps} steps, since the script ended"
    if run.steps_before:
        steps += f", after {run.steps_before} without mixed precision"
    return f"{steps}, {seeds}; torch {run.torch}, {run.device} ({about.machine})"


def _cells(row: Row) -> dict[str, Shown]:
    """Return the cells of a run, by the heading of the column."""
    difference = _show(row.difference, "+.2e")
    if row.spread is not None:
        difference += f" ± {row.spread:.1e}"
    peak = None
    if row.run.peak is not None:
        peak = row.run.peak / 1e6
    worst = Shown("-")
    if row.worst is not None:
        worst = Shown(f"{_name_op(row.worst)} {_show(row.worst.error, '.1e')}", row.worst.error)
    kept = Shown(_show_kept(row.run), row.run.kept)
    return {
        "run": Shown(row.name),
        "low": Shown(row.run.low or "-"),
        "final loss": Shown(_show(row.loss, ".5g"), row.loss),
        "difference": Shown(difference, row.difference),
        "ms/step": Shown(_show(row.ms, ".2f"), row.ms),
        "factor": Shown(_show(row.factor, ".2f"), row.factor),
        "peak MB": Shown(_show(peak, ".3g"), peak),
        "skipped": Shown(str(row.skipped), row.skipped),
        "scale": Shown(_show(row.scale, "g"), row.scale),
        "zero unscaled": Shown(_show(row.zero, ".2%"), row.zero),
        "zero scaled": Shown(_show(row.zero_scaled, ".2%"), row.zero_scaled),
        "updates kept": kept,
        "worst op": worst,
    }


def _show(value: float | None, form: str) -> str:
    """Return a number as text, or a dash for None."""
    if value is None:
        return "-"
    if math.isnan(value):  # which has no sign
        return "nan"
    return format(value, form)


def _show_kept(run: ComparedRecord) -> str:
    """Return the share of updates that is kept or wrong, such as "7% (fc.weight)" or "66% off (gnn.py:20)"."""
    kept = _show(run.kept, ".0%")
    if is_off(run):
        kept = f"{_show(run.update_error, '.0%')} off"
    if run.kept_worst:
        kept = f"{kept} ({run.kept_worst})"
    return kept


def _assess(comparison: Summary) -> list[Assessment]:
    """Return the assessments of the runs that did not fail, without the reference."""
    reference = comparison.about.reference
    return [Assessment(comparison, row) for row in comparison.rows() if row.name != reference and not row.run.failed]


def judge_runs(comparison: Summary) -> list[Judged]:
    """Return a verdict on each run that has a loss and did not fail, except the reference, and one for each error of
    failed runs.
    """
    verdicts = []
    for run in _assess(comparison):
        if run.row.loss is not None:
            of_loss = run.of_loss()
            is_good = None
            if of_loss.startswith(("worse", "perhaps worse")):
                is_good = False
            elif of_loss.startswith(("as good", "no worse", "better")):
                is_good = True
            text = f"{run.row.name}: {of_loss}; {run.of_time()}{run.of_memory()}"
            if of_loss.startswith("worse"):
                text += f"; {_name_trace(run.row.name, comparison.about.command)} finds lost values"
            verdicts.append(Judged(text, is_good, (run.row.name,), run.is_faster()))
    for failed, names in _group_failures(comparison).items():
        verdicts.append(Judged(f"{', '.join(names)}: {failed.splitlines()[0]}", False, tuple(names)))
    return verdicts


def _name_trace(run: str, command_of_compare: str) -> str:
    """Return the command that traces a run, without the script: "amp-patch trace --opt-level O4" for O4.

    The name of a run has the names of its lists without their folders, so the command cannot spell out `--lists`.
    """
    level, *lists = run.partition(" (")[0].split("+")  # runs at the same level are "O4", "O4 (2)", ...
    command = "amp-patch trace"
    if level not in ("as-is", "script"):
        command += f" --opt-level {level}"
    if "--everywhere" in command_of_compare.partition(" -- ")[0].split():
        command += " --everywhere"
    return f"{command} with the --lists of this run" if lists else command


def _group_failures(comparison: Summary) -> dict[str, list[str]]:
    """Return the names of the runs that failed, by their error."""
    names: dict[str, list[str]] = {}
    for run in comparison.failed:
        names.setdefault(run.failed, []).append(run.run)
    return names


def footnotes(comparison: Summary, *, has_zeros: bool = True) -> Iterator[str]:
    """Yield the notes. Each is one line, except for the error of a script.

    `has_zeros`: whether the table shows how many gradients become zero.
    """
    about, rows = comparison.about, comparison.rows()
    assessed = _assess(comparison)
    if about.not_float32:
        plain = levels.find_plain_level().name
        yield f"{about.reference}: there is no {plain}, since the script cannot run in float32: {about.not_float32}"
    if about.left_out:
        yield about.left_out
    if comparison.are_seeds_equal:
        yield "a second seed gave the same losses, so no more were run: perhaps the script sets a seed of its own"
    if any(run.may_be_chance for run in assessed):
        yield f"perhaps: to see whether a difference is chance, {_advise_on_seeds(comparison)}"
    tail = len(last(range(max((row.steps for row in rows), default=0))))
    final = f"final loss and difference from {about.reference}: means of the last {tail} steps"
    if tail <= 1:
        final = f"final loss and difference from {about.reference}: of the last step"
    if any(row.spread is not None for row in rows):
        final += f", ± standard deviation over {len(about.seeds)} seeds"
    yield final
    yield "the loss: the tensor that the script calls backward on; of several in a step, the mean"
    if comparison.recording.run.device == "cpu":
        yield "ms/step: CPU time, added up over all threads"
    if comparison.noise is not None:
        yield f"noise: {comparison.noise:.1e}, the difference when the weights move by one unit in the last place"
    else:
        yield "noise: not known, since the run that measures it has no result"
    if has_zeros:
        zero = "zero: gradients in the first step that become zero in the low dtype"
        if _have_scales(rows):
            zero += "; unscaled: without a loss scale; scaled: with the scale of the last step"
        yield zero
    yield "worst op: the op that adds the most error in 16 bits, from the inputs that it has in the first step"
    for worst, names in _group_worst(rows).items():
        yield f"  {', '.join(names)}: {worst}"
    if any(row.run.kept is not None for row in rows):
        yield (
            "updates kept: the share of changed elements of 16-bit tensors whose change is stored; N% off: most are"
            " stored, with this relative error"
        )
    for row in rows:
        if row.run.kept_worst:
            yield f"  {row.name}: {_show_kept(row.run)}"
    for failed, names in _group_failures(comparison).items():
        if "\n" in failed:
            yield f"{', '.join(names)}: {failed}"
    for row in rows:
        if not row.run.failed and row.steps < max(known.steps for known in rows):
            yield f"{row.name}: the script ended after {row.steps} of {about.steps} steps"
        if not row.run.has_equal_weights:
            yield (
                f"{row.name}: began with other weights than the reference, or none were read, so its layers are not"
                " compared"
            )


def _group_worst(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Return the names of the runs by their worst op, with its module and its line."""
    names: dict[str, list[str]] = {}
    for row in rows:
        if row.worst is not None:
            place = f" at {row.worst.site}" if row.worst.site else ""
            names.setdefault(f"{_name_op(row.worst)}{place}", []).append(row.name)
    return names


def _name_op(worst: OpErrorRecord) -> str:
    """Return the name of an op, after the name of its module."""
    name = f"{worst.module}: {worst.op}" if worst.module else worst.op
    return f"{name} (backward)" if worst.is_backward else name


def _advise_on_seeds(comparison: Summary) -> str:
    if comparison.are_seeds_equal:
        return "compare again with another seed in the script"
    return f"add --seeds {SEEDS}, or change the seed in the script if it sets one"
