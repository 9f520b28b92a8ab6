"""What the demos' pictures share. matplotlib draws them, without pyplot, which would keep every figure."""

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..insight.comparing import COLOURS as COLOURS
from ..insight.comparing import make_figure as make_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SMOOTHED_STEPS = 20
"""A final loss, and each point of a curve, is the mean of so many."""


class Curve(NamedTuple):
    """A line to draw: what stands at its end, a loss for each step, its colour."""

    label: str
    losses: Sequence[float]
    colour: str


def mean_of_last(losses: Sequence[float]) -> float:
    """Return the mean of the last `SMOOTHED_STEPS` losses, or of all where there are fewer."""
    return statistics.fmean(losses[-SMOOTHED_STEPS:])


def draw_losses(axes: "Axes", curves: Sequence[Curve]) -> None:
    """Draw each curve's running mean, on a logarithmic axis, with its own label at its end instead of a legend."""
    # Each point is the mean of a loss and those before it, so that a line ends at the final loss of the table.
    smoothed = [[mean_of_last(curve.losses[:end]) for end in range(1, len(curve.losses) + 1)] for curve in curves]
    for order, (curve, losses) in enumerate(zip(curves, smoothed, strict=True)):
        # Later lines are thinner, so that a line which runs under another still shows on both sides of it.
        width = 1 + 0.9 * (len(curves) - 1 - order)
        axes.plot(range(1, len(losses) + 1), losses, color=curve.colour, linewidth=width)
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    if high < 10 * low:  # too short for powers of ten alone, which matplotlib would write as 2.3 x 10^0
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
    axes.set_xlabel("step")
    axes.set_ylabel(f"training loss (mean of the last {SMOOTHED_STEPS} steps)")
    axes.set_xlim(1, max(map(len, smoothed)))
    _label_ends(axes, curves, [losses[-1] for losses in smoothed])


def _label_ends(axes: "Axes", curves: Sequence[Curve], ends: Sequence[float]) -> None:
    """Name each line right of its end, moved apart where ends are close."""
    axes.set_ylim(axes.get_ylim())
    to_fraction = (axes.transData + axes.transAxes.inverted()).transform
    heights = _spread([to_fraction((1, end))[1] for end in ends], gap=0.055)
    for curve, end, height in zip(curves, ends, heights, strict=True):
        axes.annotate(
            curve.label,
            xy=(len(curve.losses), end),
            xytext=(1.05, height),
            textcoords="axes fraction",
            color=curve.colour,
            va="center",
            arrowprops={
                "arrowstyle": "-",
                "color": curve.colour,
                "linewidth": 0.8,
                "relpos": (0, 0.5),
                "shrinkA": 1,
                "shrinkB": 1,
            },
        )


def _spread(heights: Sequence[float], gap: float) -> list[float]:
    """Move label heights (fractions of the axis) apart to `gap`, around where they were and inside 0..1."""
    order = sorted(range(len(heights)), key=lambda index: heights[index])
    placed: list[float] = []
    for index in order:
        placed.append(max(heights[index], placed[-1] + gap if placed else 0.0))
    drift = sum(placed) / len(placed) - sum(heights) / len(heights)
    shift = min(max(-drift, -placed[0]), 1.0 - placed[-1])
    by_index = dict(zip(order, placed, strict=True))
    return [by_index[index] + shift for index in range(len(heights))]
