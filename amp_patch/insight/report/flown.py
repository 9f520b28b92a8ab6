"""The section of a flight recorder: charts of modules, gradients and values that have grown, and of loss scales."""

import math
from collections.abc import Iterator, Sequence

from ..flight.describe import Grown, find_grown, find_limit, name_subject, summarize
from ..flight_record import FlightKind, FlightRecord
from ..recordings import Recording
from ..short_dtypes import spell_out
from .charts import Series, draw_figure
from .markup import Markup, break_names, element, keep_words

MOST_CHARTS = 12
"""The most charts of values that have grown. Samples without a chart are in the data of the page."""

_LARGEST_SHOWN = 1e6  # the end of float16 fits on the axis of a chart; the ends of bfloat16 and float32 do not

FLIGHT_STYLE = ".c0{--c:var(--accent)}\n.c1{--c:var(--limit)}\n"


def make_flight(recording: Recording) -> Iterator[Markup]:
    """Yield the section, if the recording has samples of a flight recorder."""
    if not recording.flight:
        return
    title, *lines = summarize(recording.flight, next(iter(recording.faults), None)).splitlines()
    grown = find_grown(recording.flight)
    charts = [_draw_grown(item) for item in grown[:MOST_CHARTS]]
    charts += [_draw_scale(record) for record in recording.flight if _is_scale_curve(record)]
    yield element(
        "section",
        element("h2", "Flight recorder"),
        element("p", keep_words(title[:1].upper() + title[1:])),
        element("ul", *(element("li", break_names(line.strip())) for line in lines)) if lines else Markup(""),
        element("div", *charts, class_="pair"),
    )


def _is_scale_curve(record: FlightRecord) -> bool:
    """Return whether a record is a loss scale with more than one sample."""
    return record.subject is FlightKind.SCALE and len(record.steps) > 1


def _draw_grown(grown: Grown) -> Markup:
    record, name = grown.record, name_subject(grown.record)
    limit = find_limit(record)
    drawn = [_make_series(0, "largest magnitude", record.largest)]
    caption = f"Largest magnitude of {name}."
    if limit < _LARGEST_SHOWN:
        drawn.append(_make_series(1, f"largest {spell_out(record.low)}", [limit] * len(record.steps)))
    return _figure(drawn, record, caption)


def _draw_scale(record: FlightRecord) -> Markup:
    name = name_subject(record)
    return _figure([_make_series(0, name, record.largest)], record, f"{name[:1].upper()}{name[1:]}.")


def _figure(drawn: Sequence[Series], record: FlightRecord, caption: str) -> Markup:
    return draw_figure(drawn, caption, label=caption, steps=record.steps, has_keys=len(drawn) > 1)


def _make_series(colour: int, name: str, values: Sequence[float]) -> Series:
    # samples that are inf or NaN are gaps
    finite = [value if math.isfinite(value) else math.nan for value in values]
    return Series(name, colour, finite, (), ())
