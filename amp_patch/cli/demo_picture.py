"""The picture of the demo: the loss curves of all levels. matplotlib draws it."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..dtypes import dtype_name
from .demo_training import FINAL_LOSS_STEPS, TrainResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette without its yellow: distinct for colour-blind readers and dark enough on white.
COLOURS = {"O0": "#000000", "O1": "#0072B2", "O2": "#D55E00", "O3": "#CC79A7", "O4": "#009E73", "O5": "#E69F00"}


def save_plot(results: Sequence[TrainResult], path: Path) -> None:
    """Write the loss curves of all results into one PNG, each line with its own label instead of a legend."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    smoothed = [_smoothed(result.losses) for result in results]
    for order, (result, losses) in enumerate(zip(results, smoothed, strict=True)):
        # Later lines are thinner, so that a line which runs under another still shows on both sides of it.
        axes.plot(
            range(1, len(losses) + 1),
            losses,
            color=COLOURS[result.level],
            linewidth=1 + 0.9 * (len(results) - 1 - order),
        )
    axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.set_ylabel(f"training loss (mean of the last {FINAL_LOSS_STEPS} steps)")
    axes.set_title("Handwritten digits at each opt_level", loc="left")
    axes.grid(visible=True, which="major", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlim(1, max(len(losses) for losses in smoothed))
    _label_ends(axes, results, [losses[-1] for losses in smoothed])
    figure.savefig(path, dpi=150, format="png")


def _label_ends(axes: "Axes", results: Sequence[TrainResult], ends: Sequence[float]) -> None:
    """Name each line right of its end, moved apart where ends are close."""
    axes.set_ylim(axes.get_ylim())
    to_fraction = (axes.transData + axes.transAxes.inverted()).transform
    heights = _spread([to_fraction((1, end))[1] for end in ends], gap=0.055)
    for result, end, height in zip(results, ends, heights, strict=True):
        axes.annotate(
            f"{result.level} {dtype_name(result.low_dtype or torch.float32)}  {result.accuracy:.1f} %",
            xy=(len(result.losses), end),
            xytext=(1.05, height),
            textcoords="axes fraction",
            color=COLOURS[result.level],
            va="center",
            arrowprops={
                "arrowstyle": "-",
                "color": COLOURS[result.level],
                "linewidth": 0.8,
                "relpos": (0, 0.5),
                "shrinkA": 1,
                "shrinkB": 1,
            },
        )


def _smoothed(losses: Sequence[float]) -> list[float]:
    """The mean of each loss and those before it, `FINAL_LOSS_STEPS` in all: it ends at the final loss of the table."""
    return [statistics.fmean(losses[max(0, end - FINAL_LOSS_STEPS) : end]) for end in range(1, len(losses) + 1)]


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
