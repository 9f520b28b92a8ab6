"""The charts of the page as inline SVG: curves over steps, and a histogram of gradients with movable zones."""

import math
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..comparing.exponents import FORMATS, find_shares
from ..records import CLASSES, GradientRecord
from .marks import draw_key, draw_mark, interpolate, place_marks
from .markup import Markup, element, join, keep_words

WIDTH, HEIGHT = 440, 260
LEFT, RIGHT, TOP, BOTTOM = 46, 8, 8, 34
"""The pixels around the area of a chart. The left margin is wider if a label is long."""
LINE_WIDTH, DASH = 2, 14
DIGIT, LABEL_GAP = 9.6, 5
"""The width of a digit in the larger type of a narrow screen, and the pixels between a label and its axis."""


class Series(NamedTuple):
    """A line of a chart.

    Attributes:
        name: the name that the page shows.
        colour: the number of its colour.
        values: a value for each step.
        low, high: the ends of a range in each step, such as the range over all seeds; empty without a range.
        skipped: the indices of skipped steps, from 0.
    """

    name: str
    colour: int
    values: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    skipped: Sequence[int] = ()


def draw_figure(
    series: Sequence[Series],
    caption: str,
    *,
    label: str,
    noise: Sequence[float] = (),
    steps: Sequence[int] | None = None,
    has_keys: bool = False,
) -> Markup:
    """Return a chart of lines over steps on a logarithmic axis, and its caption, which names lines that coincide.

    `steps` has the number of the step of each value; by default, they count from 0. With `has_keys`, a legend stands
    above the chart.

    Values that are not positive lie at the bottom of the chart, and values that are not finite are left out. The area
    below `noise` is shaded. Skipped steps are marks on the step axis.
    """
    shown = [value for line in series for value in (*line.values, *line.high)] + [max(noise, default=0.0)]
    if steps is None:
        longest = max((len(line.values) for line in series), default=1)
        steps = range(max(1, longest))
    low, high, ticks = _find_axis(shown)
    axes = _Axes(steps, low, high, ticks)
    groups = _group([axes.track(line.values) for line in series])
    drawing = _draw(series, noise, axes, groups, label)
    if sum(map(_has_range, series)) > 1:
        caption += " Bars through marks: the range over the seeds."
    together = [_join_names([series[order].name for order in group]) for group in groups if len(group) > 1]
    if together:
        caption += f" Dashes alternate where lines coincide: {'; '.join(together)}."
    if any(0 < value < ticks[0][0] for value in shown) and len(ticks) > 12:
        caption += f" Values below {ticks[0][0]:.0e} lie at the lower edge."
    parts = [drawing, element("figcaption", keep_words(caption + _tell_gaps(series)))]
    if has_keys:
        keys = (element("span", draw_key(line.colour), " ", keep_words(line.name)) for line in series)
        parts.insert(0, element("p", *keys, class_="keys"))
    return element("figure", *parts)


def _draw(
    series: Sequence[Series], noise: Sequence[float], axes: "_Axes", groups: Sequence[Sequence[int]], label: str
) -> Markup:
    parts = [*axes.grid()]
    if noise:
        title = "noise: the difference if the weights move by one unit in the last place"
        parts.append(axes.area([0.0] * len(noise), noise, "noise", title))
    ranged = [line for line in series if _has_range(line)]
    if len(ranged) == 1:  # areas of several lines would mix their colours
        parts.append(axes.band(ranged[0]))
        series = [line if line not in ranged else line._replace(low=(), high=()) for line in series]
    lines: list[Markup] = []
    marks: list[Markup] = []
    for order, line in enumerate(series):
        (group,) = (group for group in groups if order in group)
        lines.append(axes.draw(line, _style_line(group.index(order), len(group))))
        if len(series) > 1:
            marks.append(axes.mark(line, order, len(series)))
    return element("svg", *parts, *lines, *marks, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=label)


def _has_range(series: Series) -> bool:
    return any(low < high for low, high in zip(series.low, series.high, strict=True))


def _group(tracks: Sequence[Sequence[float]]) -> list[list[int]]:
    """Return the numbers of the lines in groups. All lines of a group coincide with its first line."""
    groups: list[list[int]] = []
    for number, track in enumerate(tracks):
        group = next((group for group in groups if _run_together(track, tracks[group[0]])), None)
        if group is None:
            groups.append([number])
        else:
            group.append(number)
    return groups


def _join_names(names: Sequence[str]) -> str:
    if len(names) == 1:
        return names[0]
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _tell_gaps(series: Sequence[Series]) -> str:
    """Return the sentences on lines with gaps, and on lines that are gaps throughout; "" without such lines."""
    gaps = [[not math.isfinite(value) for value in line.values] for line in series]
    missing = [line.name for line, line_gaps in zip(series, gaps, strict=True) if all(line_gaps)]
    text = ""
    if any(any(line_gaps) and not all(line_gaps) for line_gaps in gaps):
        text += " Gaps: inf or NaN."
    if missing:
        text += f" Without a line, since no value is finite: {_join_names(missing)}."
    return text


def _run_together(left: Sequence[float], right: Sequence[float]) -> bool:
    """Return whether one of two lines hides the other everywhere, from their heights in pixels.

    A line that is a gap throughout hides nothing.
    """
    if len(left) != len(right) or not any(map(math.isfinite, left)):
        return False
    pairs = zip(left, right, strict=True)
    return all(
        abs(y - y_of_right) < LINE_WIDTH or (math.isnan(y) and math.isnan(y_of_right)) for y, y_of_right in pairs
    )


def _style_line(place: int, count: int) -> str:
    """Return the style of line number `place` of `count` lines that coincide: their dashes alternate."""
    style = f"stroke-width:{LINE_WIDTH}"
    if count > 1:
        style += f";stroke-linecap:butt;stroke-dasharray:{DASH} {DASH * (count - 1)};stroke-dashoffset:{-DASH * place}"
    return style


def _find_axis(values: Iterable[float]) -> tuple[float, float, list[tuple[float, Markup]]]:
    """Return the ends of an axis for the positive values, and its ticks with their labels.

    The ends are base-10 logarithms, at most 12 apart: smaller values lie at the lower end. The ticks are powers of ten,
    or round values if all values lie within a factor of ten.
    """
    positive = [value for value in values if 0 < value < math.inf] or [0.1, 1.0]
    low, high = math.log10(min(positive)), math.log10(max(positive))
    if high - low >= 1:
        top = math.ceil(high)
        bottom = max(math.floor(low), top - 12)
        return bottom, top, [(10.0**power, _power_of_ten(power)) for power in range(bottom, top + 1)]
    least, most = min(positive), max(positive)
    step = 10.0 ** math.floor(math.log10(max(most - least, most * 1e-3)))
    step *= next(size for size in (0.5, 1, 2, 5) if (most - least) / (step * size) <= 5)
    ticks = [number * step for number in range(max(1, math.floor(least / step)), math.ceil(most / step) + 1)]
    least, most = min(least, ticks[0]), max(most, ticks[-1])
    if least == most:
        least, most = least / 2, most * 2
    return math.log10(least), math.log10(most), [(tick, Markup(f"{tick:.5g}")) for tick in ticks]


class _Axes:
    """The axes of a chart: maps steps and values to pixels."""

    def __init__(self, numbers: Sequence[int], low: float, high: float, ticks: Sequence[tuple[float, Markup]]) -> None:
        if len(ticks) > 7:
            ticks = ticks[::2]
        self._steps, self._low, self._high, self._ticks = numbers, low, high, ticks
        self._left = max(LEFT, math.ceil(LABEL_GAP + DIGIT * max(_count_letters(label) for _, label in ticks)))

    def grid(self) -> Iterable[Markup]:
        """Return grid lines and labels."""
        for value, name in self._ticks:
            y = self._y(value)
            yield element("line", x1=self._left, x2=WIDTH - RIGHT, y1=y, y2=y, class_="grid")
            yield element("text", name, x=self._left - LABEL_GAP, y=y + 4, class_="end")
        for index in _find_labels(self._steps):
            label = str(self._steps[index])
            yield element("text", label, x=self._x(index), y=HEIGHT - BOTTOM + 16, class_="mid")
        yield element("text", "step", x=WIDTH - RIGHT, y=HEIGHT - 4, class_="end")

    def track(self, values: Sequence[float]) -> list[float]:
        """Return the heights of a line; NaN where it has a gap."""
        return [self._y(value) if math.isfinite(value) else math.nan for value in values]

    def draw(self, series: Series, style: str) -> Markup:
        """Return a group with a line, and a mark on the step axis for each skipped step."""
        parts = []
        runs: list[list[str]] = [[]]
        for step, value in enumerate(series.values):
            if math.isfinite(value):
                runs[-1].append(f"{self._x(step):.1f},{self._y(value):.1f}")
            elif runs[-1]:
                runs.append([])
        for points in runs:
            title = element("title", series.name)
            if len(points) == 1:  # a line without length is drawn as a dot
                parts.append(element("polyline", title, points=" ".join(points * 2), class_="line dot"))
            elif points:
                parts.append(element("polyline", title, points=" ".join(points), class_="line"))
        for step in series.skipped:
            x, y = self._x(step), HEIGHT - BOTTOM
            title = element("title", f"{series.name}: step {self._steps[0] + step} was skipped")
            parts.append(element("path", title, d=f"M{x:.1f} {y}v-8", class_="line tick"))
        return element("g", *parts, class_=f"c{series.colour}", data_series=series.name, style=style)

    def mark(self, series: Series, order: int, count: int) -> Markup:
        """Return a group with the marks of line number `order` of `count` lines, with bars for the range of values."""
        points = self._points(series.values)
        ends: list[Sequence[tuple[float, float]]] = []
        if _has_range(series):
            ends = [self._points(series.low), self._points(series.high)]
        parts: list[Markup] = []
        for x, y in place_marks(points, order, count, (self._left, WIDTH - RIGHT)):
            heights = [interpolate(end, x) for end in ends]
            if heights and all(map(math.isfinite, heights)):
                bottom, top = heights
                parts.append(element("path", d=f"M{x - 3:.1f} {top:.1f}h6m-3 0V{bottom:.1f}m-3 0h6", class_="range"))
            parts.append(draw_mark(series.colour, x, y))
        return element("g", *parts, class_=f"c{series.colour}", data_series=series.name)

    def band(self, series: Series) -> Markup:
        """Return a group with the area between the lowest and the highest values of a line."""
        area = self.area(series.low, series.high, "band", f"{series.name}: its range")
        return element("g", area, class_=f"c{series.colour}", data_series=series.name)

    def _points(self, values: Sequence[float]) -> list[tuple[float, float]]:
        return [(self._x(step), height) for step, height in enumerate(self.track(values))]

    def area(self, low: Sequence[float], high: Sequence[float], style: str, title: str) -> Markup:
        """Return the area between two lines."""
        finite = [step for step in range(len(high)) if math.isfinite(low[step]) and math.isfinite(high[step])]
        up = [f"{self._x(step):.1f},{self._y(high[step]):.1f}" for step in finite]
        down = [f"{self._x(step):.1f},{self._y(low[step]):.1f}" for step in reversed(finite)]
        return element("polygon", element("title", title), points=" ".join(up + down), class_=style)

    def _x(self, step: int) -> float:
        return self._left + (WIDTH - self._left - RIGHT) * step / max(1, len(self._steps) - 1)

    def _y(self, value: float) -> float:
        power = self._low
        if value > 0:
            power = math.log10(value)
        part = (min(max(power, self._low), self._high) - self._low) / (self._high - self._low)
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * part


def _count_letters(label: Markup) -> int:
    return len(re.sub("<[^>]*>", "", label))


def _power_of_ten(power: int) -> Markup:
    if -3 <= power <= 3:
        return Markup(f"{10.0**power:g}")
    return join(["10", element("tspan", str(power), dy="-5", class_="power")])


def _find_labels(steps: Sequence[int]) -> list[int]:
    """Return the indices of the steps that have labels: the first step, and steps with round numbers."""
    span = steps[-1] - steps[0]
    every = next(size * 10**power for power in range(10) for size in (1, 2, 5) if span / (size * 10**power) <= 6)
    return [0, *(index for index, step in enumerate(steps) if index and step % every == 0)]


# ---- the histogram ---------------------------------------------------------------------------------------------------

ZONES = ("zero", "subnormal", "infinite")


def draw_histogram(record: GradientRecord, dtype: str, power: int) -> Markup:
    """Return a histogram with a bar for each power of two, in front of three zones.

    In the zones, values times 2**`power` are zero, subnormal or infinite in `dtype`.

    The script of the page moves the zones when the user chooses another power. It reads the powers at both ends, and
    the width of a power, from the attributes of the drawing.
    """
    sums = [sum(record.counts[place : place + CLASSES]) for place in range(0, len(record.counts), CLASSES)]
    first, last = min(record.lowest, -30) - 2, max(record.lowest + len(sums), 0) + 2
    width = (WIDTH - LEFT - RIGHT) / (last - first)
    top, bottom = TOP, HEIGHT - BOTTOM
    parts = [
        element("rect", element("title", f"{zone} in the dtype"), x=x, y=top, width=w, height=bottom - top, class_=zone)
        for zone, (x, w) in zip(ZONES, _zones(dtype, power, first, last, width), strict=True)
    ]
    total, most = sum(sums), max(sums)
    for place, number in enumerate(sums):
        if number:
            height, x = (bottom - top - 4) * number / most, LEFT + (record.lowest + place - first) * width
            title = element("title", f"2^{record.lowest + place}: {number:,} gradients, {number / total:.2%}")
            bar = element(
                "rect", title, x=x, y=bottom - height, width=max(0.5, width - 0.6), height=height, class_="bar"
            )
            parts.append(bar)
    parts.append(element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=bottom, y2=bottom, class_="axis"))
    for value in range(-(-first // 10) * 10, last, 10):
        name = join(["2", element("tspan", str(value), dy="-5", class_="power")])
        parts.append(element("text", name, x=LEFT + (value - first) * width, y=bottom + 17, class_="mid"))
    parts.append(element("text", "magnitude", x=WIDTH - RIGHT, y=HEIGHT - 4, class_="end"))
    return element(
        "svg",
        *parts,
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_label="gradients of the reference by power of two",
        id="histogram",
        data_first=first,
        data_last=last,
        data_left=LEFT,
        data_width=f"{width:.4f}",
    )


def _zones(dtype: str, power: int, first: int, last: int, width: float) -> list[tuple[float, float]]:
    """Return the left end and the width of each of `ZONES`."""
    form = FORMATS[dtype]

    def place(exponent: int) -> float:
        return LEFT + (min(max(exponent - power, first), last) - first) * width

    edges = [place(-10_000), place(form.zero), place(form.normal), place(form.last + 1), place(10_000)]
    return [(edges[0], edges[1] - edges[0]), (edges[1], edges[2] - edges[1]), (edges[3], edges[4] - edges[3])]


def tell_shares(record: GradientRecord, dtype: str, power: int) -> str:
    """Return as text which shares of the gradients, times 2**`power`, are in each of `ZONES`.

    The script of the page replaces this text when the user chooses another power or dtype.
    """
    shares = find_shares(record, dtype, 2.0**power)
    return ", ".join(f"{100 * share:.2f} % {zone}" for zone, share in zip(ZONES, shares, strict=True))
