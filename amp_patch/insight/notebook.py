"""Recordings, faults and comparisons as notebooks show them: plain tables, without style or script."""

from collections.abc import Iterable, Sequence

from .comparing.summary import Summary
from .comparing.text import COLUMNS, cells, footnotes, heading
from .fault_text import describe_fault, entitle_fault
from .records import ComparisonRecord, FaultRecord, Recording, RunRecord
from .report.markup import Markup, element, join
from .text import OP_COLUMNS, choose_ops, describe_recording, op_cells

ROWS = 200
"""So many rows of ops are shown, and so many faults at most."""


def show_recording(recording: Recording) -> Markup:
    """Return the faults of a recording; of one without, its runs if it compares some, else its ops."""
    if recording.of(ComparisonRecord):
        return show_comparison(Summary(recording))
    faults = recording.of(FaultRecord)
    if faults:
        return join([show_fault(fault, recording.run) for fault in faults[:ROWS]])
    ops = choose_ops(recording)
    heading, *notes = describe_recording(recording)
    left_out = [f"{len(ops) - ROWS} more rows: format_recording has them"] if len(ops) > ROWS else []
    return join(
        [element("p", heading), _table(OP_COLUMNS, map(op_cells, ops[:ROWS])), _list([*left_out, *filter(None, notes)])]
    )


def show_fault(fault: FaultRecord, run: RunRecord | None = None) -> Markup:
    """Return a fault as a table of two columns, lists as they are to be written."""
    named: dict[str, list[str]] = {}
    for name, line in describe_fault(fault, run):
        named.setdefault(name or list(named)[-1], []).append(line)
    rows = [
        element("tr", element("th", name), element("td", element("pre", "\n".join(lines))))
        for name, lines in named.items()
    ]
    return join([element("p", entitle_fault(fault)), element("table", *rows)])


def show_comparison(summary: Summary) -> Markup:
    """Return a row for each run, and what there is to know of all."""
    rows = (tuple(cells(row)) for row in summary.rows())
    return join([element("p", heading(summary)), _table(COLUMNS, rows), _list(list(footnotes(summary)))])


def _table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> Markup:
    head = element("tr", *(element("th", name) for name in heading))
    body = [element("tr", *(element("td", cell) for cell in row)) for row in rows]
    return element("table", element("thead", head), element("tbody", *body))


def _list(lines: Sequence[str]) -> Markup:
    return element("ul", *(element("li", line) for line in lines))
