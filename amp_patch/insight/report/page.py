"""The HTML page of a recording, with its style, script and data inside."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from ...files import write_file
from ..comparing.summary import Summary, pick_colours
from ..fault_text import format_traced
from ..flight.describe import is_flight
from ..recordings import Recording
from ..records import ComparisonRecord
from ..text import OP_COLUMNS, choose_ops, op_cells
from .compared import make_comparison
from .flown import FLIGHT_STYLE, make_flight
from .markup import Markup, element, join, keep_words
from .tables import Cell, make_table

_FOLDER = Path(__file__).parent
# The page holds text of scripts that may come from anybody, so it may load nothing.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def write_report(recording: Recording, path: str | os.PathLike[str], *, command: str = "") -> None:
    """Write `make_report`'s page to a file."""
    write_file(path, make_report(recording, command=command))


def make_report(recording: Recording, *, command: str = "") -> str:
    """Return the page of a recording, with a button that downloads all records.

    It shows the comparison, the ops and the samples of a flight recorder, as far as the recording has them. A recording
    with neither a comparison nor ops is shown as `trace` prints it, unless all its records are such samples. `command`
    is shown, unless the recording has its own.
    """
    title, style = "What ran in which precision", ""
    is_compared = bool(recording.of(ComparisonRecord))
    is_traced = not (is_compared or recording.ops or is_flight(recording))
    if is_compared:
        summary = Summary(recording)
        title = "Runs compared"
        style = _style_of([run.run for run in summary.runs])
        sections = [_comparison_header(summary, command), *make_comparison(summary)]
    else:
        sections = [_header(recording, command)]
    if is_flight(recording):
        title = "Magnitudes over the steps"
    if is_traced:
        title = "What trace found"
        sections.append(_traced(recording))
    if recording.flight:
        style += FLIGHT_STYLE
    return _frame(title, [*sections, *make_flight(recording), *_ops(recording), _data(recording)], style)


def make_page(
    title: str, terms: list[tuple[str, str]], sections: Sequence[Markup], *, colours: Sequence[str] = ()
) -> str:
    """Return a page: a title, below it a list of terms with their texts, and sections.

    `colours`: the names of runs. The index of a name is the number of the series that has its colour.
    """
    return _frame(title, [_describe(terms), *sections], _style_of(colours))


def _frame(title: str, sections: Sequence[Markup], style: str) -> str:
    """Return the HTML of a page."""
    body = element("main", element("h1", title), *sections)
    head = join(
        [
            element("meta", charset="utf-8"),
            element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
            element("meta", name="viewport", content="width=device-width, initial-scale=1"),
            element("link", rel="icon", href="data:,"),
            element("title", f"amp_patch: {title}"),
            element("style", Markup(_read("report.css") + style)),
        ]
    )
    script = element("script", Markup(_read("report.js")))
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>{body}\n{script}</body></html>\n'


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _style_of(names: Sequence[str]) -> str:
    """Return CSS classes for the colours of the named runs, on a light and on a dark page."""
    light, dark = "", ""
    for number, colours in enumerate(pick_colours(names).values()):
        light += f".c{number}{{--c:{colours.light}}}\n"
        dark += f".c{number}{{--c:{colours.dark}}}\n"
    return f"{light}@media (prefers-color-scheme: dark) {{\n{dark}}}\n"


def _header(recording: Recording, command: str) -> Markup:
    run = recording.run
    terms = [("torch", run.torch), ("device", run.device), ("level", run.opt_level), ("low dtype", run.low)]
    if recording.steps:
        terms.append(("steps", str(len(recording.steps))))
    terms += [*_lists(run.lists, run.digest), ("command", command)]
    return _describe(terms)


def _comparison_header(summary: Summary, command: str) -> Markup:
    run, about = summary.recording.run, summary.about
    terms = [("torch", run.torch), ("device", run.device), ("machine", about.machine), ("steps", str(about.steps))]
    terms.append(("seeds", ", ".join(map(str, about.seeds))))
    for run_of_plan in summary.runs:
        lists = _lists(run_of_plan.lists, run_of_plan.digest)
        terms += [(f"{run_of_plan.run}, {name}", text) for name, text in lists]
    terms.append(("command", about.command or command))
    return _describe(terms)


def _describe(terms: list[tuple[str, str]]) -> Markup:
    pairs = [(element("dt", keep_words(term)), element("dd", keep_words(text))) for term, text in terms if text]
    return element("dl", *(element("div", *pair) for pair in pairs))


def _lists(lists: tuple[str, ...], digest: str) -> Iterator[tuple[str, str]]:
    if lists:
        yield "lists", f"{', '.join(lists)} ({digest[:12]})"


def _traced(recording: Recording) -> Markup:
    """Return the section with the text that `trace` prints."""
    text = element("pre", format_traced(recording))
    box = element("div", text, class_="box", role="region", aria_label="faults", tabindex="0")
    return element("section", element("h2", "Faults"), box)


def _ops(recording: Recording) -> Iterator[Markup]:
    """Yield the section of ops, if the recording has ops."""
    ops = choose_ops(recording)
    if not ops:
        return
    heading = ("phase", *OP_COLUMNS)
    calls = heading.index("calls")
    rows = []
    for op in ops:
        row = list(map(Cell, (op.phase, *op_cells(op))))
        row[calls : calls + 3] = [Cell(str(number), number) for number in (op.calls, op.casts, op.avoided)]
        rows.append(row)
    yield element(
        "section",
        element("h2", "Ops"),
        element("p", "Equal layers are one row, with * for their numbers; steps are added up."),
        make_table("ops", heading, rows, label="ops", left=8, filter_by="Filter ops"),
        *_undone(recording),
    )


def _undone(recording: Recording) -> Iterator[Markup]:
    if not recording.undone:
        return
    heading = ("step", "module", "producer", "consumer", "outside", "between", "calls")
    rows = []
    for cast in recording.undone:
        texts = (cast.module, cast.producer, cast.consumer, cast.outside, cast.between)
        rows.append([Cell(str(cast.step), cast.step), *map(Cell, texts), Cell(str(cast.calls), cast.calls)])
    yield element("h3", "Casts that undo each other")
    yield make_table("undone", heading, rows, label="casts that undo each other", left=len(heading))


def _data(recording: Recording) -> Markup:
    """Return the section with the records, as `Recording.read` reads them.

    `</script>` in a string would end the script element, so each `<` is escaped, which JSON allows in strings.
    """
    text = recording.format()
    return element(
        "section",
        element("h2", "Data"),
        element("p", f"All {len(recording.records) + 1} records of this page, a line of JSON each."),
        element("p", element("button", "Download records.jsonl", type="button", id="download")),
        element("script", Markup("\n" + text.replace("<", "\\u003c")), type="application/x-ndjson", id="records"),
    )
