"""Marks on the lines of a chart, which tell lines apart without their colours, also where lines coincide."""

import math
from collections.abc import Iterator, Sequence

from .markup import Markup, element

# SVG paths around the middle of a mark
SHAPES = (
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z",
    "M-3.6-3.6h7.2v7.2h-7.2z",
    "M0-4.8L4.6 3.4h-9.2z",
    "M0-5.2L5.2 0L0 5.2L-5.2 0z",
    "M0 4.8L4.6-3.4h-9.2z",
    "M-4 0h8M0-4v8",
    "M-3.4-3.4l6.8 6.8M-3.4 3.4l6.8-6.8",
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0zM-1.6 0a1.6 1.6 0 1 1 3.2 0a1.6 1.6 0 1 1-3.2 0z",
    "M-3.6-3.6h7.2v7.2h-7.2zM-1.6-1.6v3.2h3.2v-3.2z",
    "M-5 0h10M-2.5-4.3l5 8.6M2.5-4.3l-5 8.6",
)
ROOM = 16
"""The fewest pixels from one mark to the next on lines that coincide. If there are too many lines for that, each still
has one mark, and the marks are closer.
"""
MOST = 5
"""The most marks on a line."""
KEY_WIDTH, KEY_HEIGHT = 28, 12


def draw_mark(number: int, x: float, y: float) -> Markup:
    """Return a mark at (x, y) for the line whose colour has this number (`Series.colour`)."""
    place = f"translate({x:.1f} {y:.1f})"
    return element("path", d=SHAPES[number % len(SHAPES)], transform=place, class_="mark")


def draw_key(number: int) -> Markup:
    """Return a piece of the line whose colour has this number, with its mark, for a legend."""
    middle = KEY_HEIGHT / 2
    line = element("line", x1=1, x2=KEY_WIDTH - 1, y1=middle, y2=middle, class_="line")
    return element(
        "svg",
        line,
        draw_mark(number, KEY_WIDTH / 2, middle),
        viewBox=f"0 0 {KEY_WIDTH} {KEY_HEIGHT}",
        class_=f"key c{number}",
        aria_hidden="true",
    )


def place_marks(
    points: Sequence[tuple[float, float]], order: int, count: int, ends: tuple[float, float]
) -> Iterator[tuple[float, float]]:
    """Yield where the marks of a line lie: no two of `count` lines have marks at the same x.

    `points` are pixels, with NaN for gaps. `order` is the place of the line among the `count` lines of its chart, from
    0. `ends` are the x at which the chart begins and ends. A line with gaps at all places of its marks has one
    mark at its last point instead, where another line may have a mark, too.
    """
    start, stop = ends
    marks = max(1, min(MOST, int((stop - start) / (ROOM * count))))
    has_mark = False
    for turn in range(marks):
        x = start + (stop - start) * (turn + (order + 0.5) / count) / marks
        y = interpolate(points, x)
        if math.isfinite(y):
            has_mark = True
            yield x, y
    finite = [point for point in points if math.isfinite(point[1])]
    if finite and not has_mark:
        yield finite[-1]


def interpolate(points: Sequence[tuple[float, float]], x: float) -> float:
    """Return the height of a line at `x`, or NaN where it has none."""
    if len(points) == 1 and points[0][0] == x:
        return points[0][1]
    for (left, low), (right, high) in zip(points, points[1:], strict=False):
        if left <= x <= right:
            return low + (high - low) * (x - left) / (right - left)
    return math.nan
