"""Shows recordings, faults, exceptions and comparisons: as text in `print`, and as plain HTML tables in notebooks."""

from collections.abc import Iterable, Sequence

from . import display
from .comparing.summary import Summary
from .comparing.text import footnotes, format_comparison, heading, tabulate
from .fault_record import FaultRecord
from .fault_text import describe_fault, describe_further, entitle_fault, format_fault, format_traced
from .flight.describe import is_flight, summarize
from .raised_record import RaisedRecord
from .raised_text import describe_raised, entitle_raised, format_raised
from .recordings import Recording
from .records import ComparisonRecord, RunRecord
from .report.markup import Markup, element, join
from .text import OP_COLUMNS, choose_forward, describe_recording, entitle_recording, format_recording, op_cells

ROWS = 200
"""The most rows of ops that a notebook shows."""


@display.as_text.register
def _format_recording(recording: Recording) -> str:
    """Return a recording as text, in the form in which `amp-patch compare`, `explain` or `trace` prints it."""
    if recording.of(ComparisonRecord):
        return format_comparison(Summary(recording))
    if recording.ops:
        return format_recording(recording)
    if is_flight(recording):
        return f"{entitle_recording(recording)}\n{summarize(recording.flight)}"
    text = f"{entitle_recording(recording)}\n{format_traced(recording)}"
    if recording.flight:
        fault = next(iter(recording.faults), None)
        has_trouble = bool(recording.faults or recording.troubles)
        text += f"\n{'what led to it' if has_trouble else 'magnitudes'}: {summarize(recording.flight, fault)}"
    return text


@display.as_text.register
def _format_fault(fault: FaultRecord) -> str:
    """Return a fault in the form in which `amp-patch trace` prints it."""
    return format_fault(fault, None)


@display.as_text.register
def _format_raised(raised: RaisedRecord) -> str:
    """Return an exception in the form in which `amp-patch trace` prints it."""
    return format_raised(raised, None)


@display.as_line.register
def _name_recording(recording: Recording) -> str:
    """Return the title of a recording and a summary of its records in one line."""
    if recording.of(ComparisonRecord):
        return f"Comparison: {heading(Summary(recording))}"
    contents = f"{sum(op.calls for op in recording.ops)} calls of ops"
    if is_flight(recording):
        contents = summarize(recording.flight).partition("\n")[0].rstrip(":")
    elif not recording.ops:
        contents = format_traced(recording).partition("\n")[0]
    return f"Recording: {entitle_recording(recording)}; {contents}"


@display.as_html.register
def _show_recording(recording: Recording) -> Markup:
    """Return the part of a recording that a notebook shows.

    This is the comparison if it has one; else its faults; else its ops and exceptions; else the samples of a flight
    recorder; else the text of `format_traced`, such as steps that went wrong, and misuses of GradScaler or autocast.
    """
    if recording.of(ComparisonRecord):
        return show_comparison(Summary(recording))
    faults = recording.faults
    if faults:
        further = [element("p", line) for line in describe_further(faults)]
        return join([show_fault(faults[0], recording.run), *further])
    raised = [show_raised(record, recording.run) for record in recording.raised]
    if not recording.ops and raised:
        return join([element("p", entitle_recording(recording)), *raised])
    if is_flight(recording):
        title, *lines = summarize(recording.flight).splitlines()
        return join([element("p", entitle_recording(recording)), element("p", title), _list(lines)])
    if not recording.ops:
        return join([element("p", entitle_recording(recording)), element("p", format_traced(recording))])
    ops = choose_forward(recording)
    heading, *notes = describe_recording(recording)
    if len(ops) > ROWS:  # a notebook keeps its output in the file
        notes.insert(0, f"{len(ops) - ROWS} more rows: format_recording has them")
    return join([element("p", heading), _table(OP_COLUMNS, map(op_cells, ops[:ROWS])), _list(notes), *raised])


@display.as_html.register
def show_fault(fault: FaultRecord, run: RunRecord | None = None) -> Markup:
    """Return a fault as a table of two columns: the names and the texts of `describe_fault`."""
    return _show_named(entitle_fault(fault), describe_fault(fault, run))


@display.as_html.register
def show_raised(raised: RaisedRecord, run: RunRecord | None = None) -> Markup:
    """Return an exception as a table of two columns."""
    return _show_named(entitle_raised(raised), describe_raised(raised, run))


def _show_named(title: str, lines: Iterable[tuple[str, str]]) -> Markup:
    named: dict[str, list[str]] = {}
    for name, line in lines:
        named.setdefault(name or list(named)[-1], []).append(line)
    rows = [
        element("tr", element("th", name), element("td", element("pre", "\n".join(lines))))
        for name, lines in named.items()
    ]
    return join([element("p", title), element("table", *rows)])


@display.as_html.register
def show_comparison(summary: Summary) -> Markup:
    """Return a comparison as a table with a row for each run, and its footnotes."""
    columns, rows = tabulate(summary.rows())
    table = _table(columns, [[cell.text for cell in row] for row in rows])
    return join([element("p", heading(summary)), table, _list(list(footnotes(summary)))])


def _table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> Markup:
    return element("table", element("thead", _row("th", heading)), element("tbody", *(_row("td", row) for row in rows)))


def _row(kind: str, cells: Sequence[str]) -> Markup:
    return element("tr", *(element(kind, cell) for cell in cells))


def _list(lines: Sequence[str]) -> Markup:
    return element("ul", *(element("li", line) for line in lines))
