"""The sections of the page of a comparison: verdict, runs, losses, time and memory, gradients, layers."""

import math
from collections.abc import Iterable, Iterator, Sequence

from ..comparing.summary import Row, Summary, find_spread, sizes, smoothed_steps
from ..comparing.text import footnotes, judge_runs, tabulate
from ..records import LayerRecord
from .charts import Series, draw_figure, draw_histogram, tell_shares
from .marks import draw_key
from .markup import Markup, break_names, element, join, keep_words
from .tables import Cell, make_table

POWERS = 24
"""The largest loss scale of the slider is 2 to this power: the default upper bound of a dynamic scale."""


def make_comparison(summary: Summary) -> Iterator[Markup]:
    """Yield the sections."""
    rows = summary.rows()
    colours = {row.name: number for number, row in enumerate(rows)}
    verdicts = judge_runs(summary)
    if verdicts:
        yield element("section", element("h2", "Verdict"), _list(verdict.text for verdict in verdicts))
    notes = _list(footnotes(summary))
    yield element("section", element("h2", "Runs"), _runs(rows), notes)
    yield _losses(summary, rows, colours)
    yield _costs(rows, colours)
    yield from _gradients(summary, rows)
    yield from _layers(summary, rows)


def _list(lines: Iterable[str]) -> Markup:
    return element("ul", *(element("li", break_names(line)) for line in lines), class_="notes")


def _runs(rows: Sequence[Row]) -> Markup:
    columns, cells = tabulate(rows)
    body = [[Cell(cell.text, cell.value) for cell in row] for row in cells]
    return make_table("runs", columns, body, label="runs", left=2)


# ---- losses ----------------------------------------------------------------------------------------------------------


def _losses(summary: Summary, rows: Sequence[Row], colours: dict[str, int]) -> Markup:
    reference = summary.about.reference
    width = smoothed_steps(summary)
    losses, differences = [], []
    for row in rows:
        curves = list(summary.curves(row.name).values())
        if curves:
            name, colour, skipped = row.name, colours[row.name], curves[0].skipped
            losses.append(_series(name, colour, [curve.losses for curve in curves], width, skipped))
            if name != reference:
                differences.append(_series(name, colour, sizes(summary.differences(name)), width, skipped))
    noise = find_spread(sizes(summary.differences(reference, is_noise=True)), width).middle
    smoothed = ""
    if width > 1:
        smoothed = f", mean of {width} steps"
    ticks = ""
    if any(line.skipped for line in losses):
        ticks = " Ticks: skipped steps"
        ticks += " of the first seed." if len(summary.about.seeds) > 1 else "."
    of_difference = f"Size of the difference from {reference}{smoothed}."
    if any(map(math.isfinite, noise)):
        of_difference += " Grey: the noise, the difference if the weights move by one unit in the last place."
    return element(
        "section",
        element("h2", "Losses"),
        _legend([row for row in rows if summary.curves(row.name)], colours),
        element(
            "div",
            draw_figure(
                differences,
                of_difference + ticks,
                label=f"difference of the loss from {reference}",
                noise=noise,
            ),
            draw_figure(losses, f"Training loss{smoothed}.{ticks}", label="training loss"),
            class_="pair",
        ),
    )


def _series(name: str, colour: int, curves: Sequence[Sequence[float]], width: int, skipped: Sequence[int]) -> Series:
    low, middle, high = find_spread(curves, width)
    return Series(name, colour, middle, low, high, skipped)


def _figure(drawing: Markup, caption: str) -> Markup:
    return element("figure", drawing, element("figcaption", caption))


def _legend(rows: Sequence[Row], colours: dict[str, int]) -> Markup:
    buttons = [
        element(
            "button",
            draw_key(colours[row.name]),
            keep_words(row.name),
            type="button",
            aria_pressed="true",
            data_run=row.name,
        )
        for row in rows
    ]
    return element("p", *buttons, class_="legend", role="group", aria_label="runs shown in the charts")


# ---- time and memory -------------------------------------------------------------------------------------------------


def _costs(rows: Sequence[Row], colours: dict[str, int]) -> Markup:
    times = {row.name: row.ms for row in rows if row.ms is not None}
    memory = {row.name: row.run.peak / 1e6 for row in rows if row.run.peak is not None}
    return element(
        "section",
        element("h2", "Time and memory"),
        element(
            "div",
            _bars(times, colours, "Time of a step, median (ms)"),
            _bars(memory, colours, "Memory at the peak of a step (MB)"),
            class_="pair",
        ),
    )


def _bars(values: dict[str, float], colours: dict[str, int], title: str) -> Markup:
    finite = {name: value for name, value in values.items() if math.isfinite(value)}
    most = max(finite.values(), default=0) or 1
    lines = []
    for name, value in finite.items():
        fill = element("span", class_=f"fill c{colours[name]}", style=f"width:{100 * value / most:.1f}%")
        text = f"{value:.3g}"
        if value >= 1000:
            text = f"{value:,.0f}"
        lines.append(
            element(
                "div", element("span", keep_words(name)), element("span", fill, class_="track"), element("span", text)
            )
        )
    if not lines:
        lines.append(element("p", "not measured"))
    return element("figure", element("h3", title), *lines, class_="bars")


# ---- gradients -------------------------------------------------------------------------------------------------------


def _gradients(summary: Summary, rows: Sequence[Row]) -> Iterator[Markup]:
    record = summary.gradients
    if record is None or not record.counts:
        return
    scales = [row.scale for row in rows if row.run.low == "f16" and row.scale and 1 <= row.scale < math.inf]
    power = min(POWERS, round(math.log2(max(scales, default=1.0))))
    low = "f16"
    yield element(
        "section",
        element("h2", "Gradients"),
        element(
            "p",
            keep_words(
                f"Gradients of the weights in {record.run}, unscaled, in the first step: {sum(record.counts):,} finite"
                f" and not zero, {record.zeros:,} zero, {record.nonfinite:,} inf or NaN. Shaded: the gradients that the"
                " chosen loss scale makes zero, subnormal or infinite in the chosen dtype."
            ),
        ),
        element("div", *_controls(power), class_="controls"),
        element("output", tell_shares(record, low, power), id="shares", for_="scale low", aria_live="polite"),
        _figure(
            draw_histogram(record, low, power),
            join(
                [
                    element("span", class_="swatch zero"),
                    "zero ",
                    element("span", class_="swatch subnormal"),
                    "subnormal, with fewer bits ",
                    element("span", class_="swatch infinite"),
                    "inf",
                ]
            ),
        ),
    )


def _controls(power: int) -> Iterator[Markup]:
    yield element("label", "Loss scale", for_="scale")
    yield element(
        "input",
        type="range",
        id="scale",
        min="0",
        max=POWERS,
        step="1",
        value=power,
        aria_valuetext=f"2 to the {power}",
    )
    yield element("output", f"2^{power} = {2**power:,}", id="scale-text", for_="scale")
    yield element("label", "Dtype", for_="low")
    options = (element("option", "float16", value="f16"), element("option", "bfloat16", value="bf16"))
    yield element("select", *options, id="low", autocomplete="off")


# ---- layers ----------------------------------------------------------------------------------------------------------


def _layers(summary: Summary, rows: Sequence[Row]) -> Iterator[Markup]:
    names = [row.name for row in rows if summary.layers(row.name)]
    if not names:
        return
    layers: dict[str, dict[str, LayerRecord]] = {}  # by module, then by run
    for record in summary.recording.of(LayerRecord):
        layers.setdefault(record.module, {})[record.run] = record
    order = list(layers)
    heading = ["layer", "order"]
    for name in names:
        heading += [f"{name} out", f"{name} grad"]
    body = []
    ranks = {name: [layer.module for layer in summary.layers(name)] for name in names}
    for module in sorted(order, key=lambda module: min(_find_rank(module, ranked) for ranked in ranks.values())):
        line = [Cell(module), Cell(str(order.index(module) + 1), order.index(module))]
        for name in names:
            if name in layers[module]:
                layer = layers[module][name]
                line += [_make_heat_cell(layer.output), _make_heat_cell(layer.gradient)]
            else:
                line += [Cell("-"), Cell("-")]
        body.append(line)
    yield element(
        "section",
        element("h2", "Layers"),
        element(
            "p",
            keep_words(
                f"Relative error of the output of a layer (out), and of the gradient of its weights (grad), against"
                f" {summary.about.reference}, in the first step. Layers with an op that adds much error come first."
            ),
        ),
        make_table("layers", heading, body, label="layers", filter_by="Filter layers"),
    )


def _find_rank(module: str, ranked: Sequence[str]) -> int:
    return ranked.index(module) if module in ranked else len(ranked)


def _make_heat_cell(error: float | None) -> Cell:
    if error is None:
        return Cell("-")
    text = f"{error:.1e}"
    if error == 0 or not math.isfinite(error):
        text = f"{error:g}"
    return Cell(text, error, _heat_of(error))


def _heat_of(error: float) -> float:
    """Return the heat of an error: from 0 at 1e-6 to 1 at 0.1, by its logarithm."""
    if error <= 0:
        return 0.0
    if not error < 0.1:  # also NaN
        return 1.0
    return max(0.0, (math.log10(error) + 6) / 5)
