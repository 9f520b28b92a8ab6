"""A recording as text: a table of its calls. Equal calls share a row, and so do equal layers."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Literal, get_args

from ..config import OpRule, list_names
from ..errors import ArgumentValueError, did_you_mean
from ..tables import Table, count_of, shorten, star_numbers
from .list_notes import note_lists
from .raised_text import format_raised
from .recordings import Recording
from .records import OpRecord
from .short_dtypes import count_equal

Key = Callable[[OpRecord], tuple[str, ...]]
"""Returns the first cells of a record's row. Records with the same cells are added up in one row."""

By = Literal["module", "op", "entry"]
_SHOW_ALL = "to see them, use --all or format_recording(with_all=True)"
_FORWARD = ("forward", "recompute")
# Whole parts of a dotted name, or an index in brackets: "blocks.3.norm", "Net[0]", and not "conv1".
_NUMBER = re.compile(r"(?<![^.\[])\d+(?![^.\]])")


def format_recording(
    recording: Recording, by: By = "module", *, with_all: bool = False, width: int | None = None
) -> str:
    """Return the ops of the forward pass as text, with a summary.

    Args:
        by: "module" has a row for each module and op, "op" for each op, and "entry" for each entry of a list.
        with_all: give each layer its own row, and also show ops that run as in plain torch.
        width: the number of characters of a line; None for any number. To fit, the table shortens texts, leaves out
            columns, and puts names of modules on lines of their own.

    Raises ArgumentValueError for another `by`.
    """
    if by not in get_args(By):
        raise ArgumentValueError(f"by={by!r} is not one of {', '.join(get_args(By))}.{did_you_mean(by, get_args(By))}")
    forward = choose_forward(recording, with_all=with_all)
    table = {"module": _by_module, "op": _by_op, "entry": _by_entry}[by](forward, width)
    if not forward:
        table = "no op of the forward pass was recorded"
        if any(op.phase in _FORWARD for op in recording.ops):
            table = f"every op of the forward pass ran as in plain torch; {_SHOW_ALL}"
    lines = [entitle_recording(recording), "", table]
    if by == "module":
        lines += _legend(recording, forward)
    lines += _describe_hidden(recording, forward)
    raised = [f"\n{format_raised(raised, recording.run)}" for raised in recording.raised]
    notes = [*_sums(recording), *_undone(recording), *note_lists(recording)]
    return "\n".join([*lines, "", *notes, *raised])


def describe_recording(recording: Recording) -> list[str]:
    """Return the lines about the whole recording: first its settings, then notes and sums."""
    forward = choose_forward(recording)
    notes = [*_legend(recording, forward), *_describe_hidden(recording, forward), *_sums(recording)]
    return [
        entitle_recording(recording),
        *notes,
        *(line.strip() for line in _undone(recording)),
        *note_lists(recording),
    ]


def _describe_hidden(recording: Recording, forward: Iterable[OpRecord]) -> Iterator[str]:
    """Yield a line with the number of calls of the forward pass that have no row."""
    shown = sum(op.calls for op in forward)
    hidden = sum(op.calls for op in recording.ops if op.phase in _FORWARD) - shown
    if hidden and shown:
        yield f"not shown: {count_of(hidden, 'call')} that ran as in plain torch; {_SHOW_ALL}"


def _legend(recording: Recording, ops: list[OpRecord]) -> Iterator[str]:
    """Yield a line for each mark, and for the names of several models, if the rows have them."""
    if any(map(_is_computed_in_float32, ops)):
        yield "* products computed in float32 from rounded operands, then rounded: see `compute` in the presets"
    if recording.run.prefixes and any(op.module for op in ops):
        classes = ", ".join(recording.run.prefixes)
        yield f"several models: names begin with the class of the model ({classes}); leave it out in module rules"


def merge_steps(ops: Iterable[OpRecord]) -> Iterator[OpRecord]:
    """Merge records that differ only in their steps, counts and constants. The counts are added up.

    Yield the results, which have no constants.
    """
    return _merge(replace(op, step=0) for op in ops)


def star_layers(module: str) -> str:
    """Return the name of a module with `*` for its numbers, so that equal layers have one name."""
    return _NUMBER.sub("*", module)


def fold_layers(ops: Iterable[OpRecord]) -> Iterator[OpRecord]:
    """Merge records that differ only in counts, constants and the numbers in the names of their modules.

    Yield the results, which have no constants, and `*` for the numbers in names. The counts are added up.
    """
    alike: dict[OpRecord, list[OpRecord]] = {}
    for op in ops:
        starred = replace(op, module=star_layers(op.module))
        alike.setdefault(_as_row(starred), []).append(op)
    for layers in alike.values():
        module = star_numbers(op.module for op in layers)
        yield from _merge(replace(op, module=module) for op in layers)


def _as_row(op: OpRecord) -> OpRecord:
    """Return a record without its counts and constants. Records share a row if these results are equal."""
    return replace(op, calls=0, casts=0, avoided=0, constants=())


def _merge(ops: Iterable[OpRecord]) -> Iterator[OpRecord]:
    merged: dict[OpRecord, OpRecord] = {}
    for op in ops:
        key = _as_row(op)
        known = merged.get(key, key)
        merged[key] = replace(
            key, calls=known.calls + op.calls, casts=known.casts + op.casts, avoided=known.avoided + op.avoided
        )
    yield from merged.values()


def _is_of_interest(op: OpRecord) -> bool:
    """Return whether an op on floating tensors is listed, casts, mixes dtypes or runs in 16 bits. Any other op runs as
    in plain torch.
    """
    floating = {dtype for dtype in (*op.ran, *op.out) if "f" in dtype}
    if not floating:  # lists do not act on whole numbers
        return False
    # MATCH_SELF is the rule of writes such as `x[0] = 1`. A write without a cast runs as in plain torch.
    is_listed = bool(op.entry or op.rule) and op.rule != OpRule.MATCH_SELF
    return bool(is_listed or op.casts or len(floating) > 1 or floating & {"f16", "bf16"})


def _is_computed_in_float32(op: OpRecord) -> bool:
    return op.ran == ("f32",) and any(dtype in ("f16", "bf16") for dtype in op.out) and not op.op.startswith("aten.")


def entitle_recording(recording: Recording) -> str:
    """Return the settings of a recording, and its number of steps, as a title."""
    run = recording.run
    title = run.opt_level or "session"
    if run.is_native and run.low:
        title = "torch.autocast"
        if run.opt_level != "autocast":  # the opt_level given to amp_patch, or "as-is" without one
            title += f", {run.opt_level}"
    dtype = run.low or "no casts"
    if run.script_low:
        dtype = f"{run.script_low} weights"
    title += f", {dtype}"
    if run.device:  # "" if nothing ran
        title += f" on {run.device}"
    title += f", torch {run.torch}"
    if recording.steps or not recording.flight:
        title += f", {count_of(len(recording.steps), 'step')}"
    if run.lists:
        title += f", lists {', '.join(run.lists)}"
    return title


OP_COLUMNS = ("module", "op", "rule", "line", "given", "ran", "out", "calls", "casts", "avoided", "site")
"""The columns of the table of ops: fields of `OpRecord`. "line" is `entry`, the place of the rule in a list."""

_LEFT = OP_COLUMNS[:7]  # aligned to the left
_COUNTS = ("casts", "avoided")
_SPARE = ("avoided", "casts", "calls", "out", "given", "line")
"""Columns to leave out of a table that is too wide, the least important first."""

_LEAST = {"op": 18, "rule": 18, "line": 14, "given": 20, "ran": 14, "out": 14, "site": 20}
"""Columns of text, each with the width to which it may be shortened."""

_LEAST_NAME = 30
"""The width to which names of modules may be shortened. If that is not enough, they get lines of their own."""


def _by_module(ops: list[OpRecord], width: int | None) -> str:
    """Return the table of ops in its most detailed form that fits. If none fits, names of modules stand above rows."""
    rows = list(map(op_cells, ops))
    if width is None:
        return "\n".join(Table(OP_COLUMNS, rows, len(_LEFT), {}).lines())
    briefer = [_change(row, dict.fromkeys(("given", "ran", "out"), _count_equal)) for row in rows]
    lists = {row[_ENTRY].rpartition(":")[0] for row in rows} - {""}
    has_one_list = len(lists) == 1
    briefest = [_change(row, {"line": _get_number if has_one_list else _shorten_entry}) for row in briefer]
    notes: list[str] = []
    for cells, least in ((rows, {}), (briefer, {}), (briefest, {"module": _LEAST_NAME, "op": 22})):
        notes = [f"line: of {lists.pop()}"] if cells is briefest and has_one_list else []
        table = Table(OP_COLUMNS, cells, len(_LEFT), least)
        table.drop_empty(_COUNTS)
        if table.least_width() <= width:
            table.shorten(width)
            return "\n".join([*table.lines(), *notes])
    heading, *lines = _by_module_in_groups(briefest, width)
    if "line" not in heading.split():  # left out, so it needs no note
        notes = []
    return "\n".join([heading, *lines, *notes])


def _by_module_in_groups(rows: list[tuple[str, ...]], width: int) -> Iterator[str]:
    """Yield the lines of a table in which the name of a module stands above its rows."""
    margin = "  "
    table = Table(OP_COLUMNS[1:], [row[1:] for row in rows], len(_LEFT) - 1, _LEAST)
    table.drop_empty(_COUNTS)
    left_out = table.leave_out(_SPARE, width - len(margin))
    table.shorten(width - len(margin))
    heading, dashes, *lines = (margin + line for line in table.lines())
    yield from (heading, dashes)
    above = ""
    for row, line in zip(rows, lines, strict=True):
        if row[0] != above:
            above = row[0]
            yield shorten(above, width)
        yield line
    if left_out:
        yield f"columns left out, to fit {width} characters: {', '.join(left_out)}; to see them, use --wide"


def _change(row: tuple[str, ...], changes: Mapping[str, Callable[[str], str]]) -> tuple[str, ...]:
    """Return a row with other texts in some columns."""
    return tuple(changes.get(name, str)(cell) for name, cell in zip(OP_COLUMNS, row, strict=True))


def _count_equal(dtypes: str) -> str:
    """Return dtypes with a number for three or more equal ones in a row: `f16,f32 x 4`."""
    return ",".join(count_equal(dtypes.split(",")))


_ENTRY = OP_COLUMNS.index("line")


def _get_number(entry: str) -> str:
    """Return the number of a line, without its list."""
    return entry.rpartition(":")[2]


def _shorten_entry(entry: str) -> str:
    """Return an entry of a shipped list without the suffix of its file."""
    name, _, line = entry.partition(".yaml:")
    return f"{name}:{line}" if line and list_names.is_shipped(name) else entry


def op_cells(op: OpRecord) -> tuple[str, ...]:
    """Return the cells of a record, in the order of `OP_COLUMNS`."""
    name, rule, ran = op.op, op.rule, _dtypes(op.ran)
    if op.phase == "recompute":
        name += " (again)"
    if op.region and not rule.startswith(f"run: {op.region}"):  # a module rule names its region
        rule += f" ({op.region})"
    if _is_computed_in_float32(op):
        ran += "*"
    return (
        op.module or "(no module)",
        name,
        rule or "-",
        op.entry or "-",
        _dtypes(op.given),
        ran,
        _dtypes(op.out),
        *map(str, (op.calls, op.casts, op.avoided)),
        op.site or "-",
    )


def choose_forward(recording: Recording, *, with_all: bool = False) -> list[OpRecord]:
    """Return the rows of the forward pass, and of its recomputation by checkpoints."""
    return [op for op in choose_ops(recording, with_all=with_all) if op.phase in _FORWARD]


def choose_ops(recording: Recording, *, with_all: bool = False) -> list[OpRecord]:
    """Return the rows of a recording. Calls that differ only in their step and constants share a row.

    Without `with_all`, equal layers share a row, too, and ops that run as in plain torch have none.
    """
    ops = merge_steps(recording.ops)
    if with_all:
        return list(ops)
    return list(fold_layers(filter(_is_of_interest, ops)))


def _by_op(ops: list[OpRecord], width: int | None) -> str:
    return _grouped(ops, ("op", "rule", "ran"), lambda op: (op.op, op.rule or "-", _dtypes(op.ran)), width)


def _by_entry(ops: list[OpRecord], width: int | None) -> str:
    return _grouped(ops, ("line", "rule", "op"), lambda op: (op.entry or "-", op.rule or "-", op.op), width)


def _grouped(ops: list[OpRecord], heading: tuple[str, ...], key: Key, width: int | None) -> str:
    sums: dict[tuple[str, ...], list[int]] = {}
    for op in ops:
        total = sums.setdefault(key(op), [0, 0, 0])
        for index, value in enumerate((op.calls, op.casts, op.avoided)):
            total[index] += value
    rows = sorted(sums.items(), key=lambda item: -item[1][0])
    cells = [(*names, *map(str, total)) for names, total in rows]
    table = Table((*heading, "calls", *_COUNTS), cells, len(heading), {"op": 24, "line": 24, "ran": 16})
    if width is not None:
        table.drop_empty(_COUNTS)
        table.shorten(width)
    return "\n".join(table.lines())


def _dtypes(names: tuple[str, ...]) -> str:
    """Return dtypes as text: `f32 x 8` for more than four equal ones, else at most the first six: `f32,f32,i64`."""
    if len(names) > 4 and len(set(names)) == 1:
        return f"{names[0]} x {len(names)}"
    shown = list(names[:6])
    if len(names) > 6:
        shown.append("...")
    return ",".join(shown) or "-"


def _sums(recording: Recording) -> Iterator[str]:
    ops = list(recording.ops)
    for phase in ("forward", "recompute", "backward", "step"):
        of_phase = [op for op in ops if op.phase == phase]
        if not of_phase:
            continue
        calls = sum(op.calls for op in of_phase)
        casts = sum(op.casts for op in of_phase)
        line = f"{phase}: {count_of(calls, 'call')}, {count_of(casts, 'cast')}"
        avoided = sum(op.avoided for op in of_phase)
        if avoided:
            line += f", {avoided} avoided by reusing copies"
        yield line


def _undone(recording: Recording) -> Iterator[str]:
    sums: dict[tuple[str, ...], int] = {}
    for cast in recording.undone:
        module = star_layers(cast.module) or "(no module)"
        key = (module, cast.producer, cast.consumer, cast.outside, cast.between)
        sums[key] = sums.get(key, 0) + cast.calls
    if sums:
        yield "\ncasts that undo each other:"
        for (module, producer, consumer, outside, between), calls in sums.items():
            yield f"  {module}: {outside} -> {between} for {producer}, back to {outside} for {consumer}, {calls} x"
