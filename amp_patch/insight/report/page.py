"""The page: what is known of a recording from the top down, with style, script and data inside."""

import os
from collections.abc import Iterator
from pathlib import Path

from ...files import write_file
from ..colours import pick_colours
from ..comparing.summary import Summary
from ..records import (
    ComparedRecord,
    ComparisonRecord,
    CurveRecord,
    GradientRecord,
    LayerRecord,
    OpRecord,
    Recording,
    StepRecord,
    UndoneCastRecord,
)
from .compared import make_comparison
from .markup import Markup, element, join
from .ops import make_ops, make_others

_FOLDER = Path(__file__).parent
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
_SHOWN = (ComparisonRecord, ComparedRecord, CurveRecord, GradientRecord, LayerRecord, OpRecord)
_SMALL = (StepRecord, UndoneCastRecord)


def write_report(recording: Recording, path: str | os.PathLike[str], *, command: str = "") -> None:
    """Write `make_report`'s page to a file."""
    write_file(path, make_report(recording, command=command))


def make_report(recording: Recording, *, command: str = "") -> str:
    """Return the page of a recording: sections for the records that it has, and all of them to be downloaded.

    `command` is shown, unless the recording has its own.
    """
    summary = Summary(recording) if recording.of(ComparisonRecord) else None
    title = "Runs compared" if summary else "What ran in which precision"
    sections = [] if summary is None else list(make_comparison(summary))
    sections += [*make_ops(recording), *make_others(recording, (*_SHOWN, *_SMALL))]
    body = element("main", element("h1", title), _header(recording, summary, command), *sections, _data(recording))
    names = [] if summary is None else [run.run for run in summary.runs]
    head = join(
        [
            element("meta", charset="utf-8"),
            element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
            element("meta", name="viewport", content="width=device-width, initial-scale=1"),
            element("link", rel="icon", href="data:,"),
            element("title", f"amp_patch: {title}"),
            element("style", Markup(_read("report.css") + _style_of(names))),
        ]
    )
    script = element("script", Markup(_read("report.js")))
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>{body}\n{script}</body></html>\n'


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _style_of(names: list[str]) -> str:
    """A class for the colour of each run; black is white on dark."""
    picked = pick_colours(names).values()
    return "".join(
        f".c{number}{{--c:{'var(--ink)' if colour == '#000000' else colour}}}\n" for number, colour in enumerate(picked)
    )


def _header(recording: Recording, summary: Summary | None, command: str) -> Markup:
    run = recording.run
    terms: list[tuple[str, str]] = [("torch", run.torch), ("device", run.device)]
    if summary is None:
        terms += [("level", run.opt_level), ("low dtype", run.low), ("steps", str(len(recording.steps)))]
        terms += _lists(run.lists, run.digest)
    else:
        about = summary.about
        terms += [("machine", about.machine), ("steps", str(about.steps)), ("seeds", ", ".join(map(str, about.seeds)))]
        for one in summary.runs:
            terms += [(f"{one.run}, {name}", text) for name, text in _lists(one.lists, one.digest)]
        command = about.command or command
    terms += [("command", command)]
    pairs = [element("div", element("dt", term), element("dd", text)) for term, text in terms if text]
    return element("dl", *pairs)


def _lists(lists: tuple[str, ...], digest: str) -> Iterator[tuple[str, str]]:
    if lists:
        yield "lists", f"{', '.join(lists)} ({digest[:12]})"


def _data(recording: Recording) -> Markup:
    """The records, as `Recording.read` reads them. `<` is in strings only, where JSON has another way to write it."""
    text = recording.format()
    return element(
        "section",
        element("h2", "Data"),
        element("p", f"All {len(recording.records) + 1} records of this page, a line of JSON each."),
        element("p", element("button", "Download records.jsonl", type="button", id="download")),
        element("script", Markup("\n" + text.replace("<", "\\u003c")), type="application/x-ndjson", id="records"),
    )
