"""A comparison as a picture. matplotlib draws it, without pyplot, which would keep every figure."""

import importlib.util
import io
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import MissingExtraError
from ...files import write_file
from .summary import Summary, find_spread, pick_colours, sizes, smoothed_steps

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_comparison(summary: Summary, path: str | os.PathLike[str]) -> None:
    """Draw differences of the losses from the reference, with a band over seeds, and bars for time and memory.

    Raises MissingExtraError without matplotlib.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingExtraError(
            "the picture needs matplotlib, not installed here; run: pip install matplotlib, or write HTML"
        )
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(19.5, 5.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    differences, times, memory = (figure.add_subplot(1, 3, number) for number in (1, 2, 3))
    for panel in (differences, times, memory):
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(visible=True, which="major", alpha=0.25)
        panel.set_axisbelow(True)
    colours = pick_colours(run.run for run in summary.runs)
    _draw_differences(differences, summary, colours)
    rows = summary.rows()
    _draw_bars(times, {row.name: row.ms for row in rows}, colours)
    times.set_title("Time of a step, median (ms)", loc="left")
    _draw_bars(memory, {row.name: row.run.peak and row.run.peak / 1e6 for row in rows}, colours)
    memory.set_title("Memory at the peak of a step (MB)", loc="left")
    drawn = io.BytesIO()
    figure.savefig(drawn, format=Path(path).suffix[1:] or None)
    write_file(path, drawn.getvalue())


def _draw_differences(axes: "Axes", summary: Summary, colours: dict[str, str]) -> None:
    reference, seeds = summary.about.reference, len(summary.about.seeds)
    width = smoothed_steps(summary)
    ends = []
    for order, (name, colour) in enumerate(colours.items()):
        low, middle, high = find_spread(sizes(summary.differences(name)), width)
        if name != reference and middle:
            steps = range(1, len(middle) + 1)
            axes.plot(steps, middle, color=colour, linewidth=1.2 + 0.6 * (len(colours) - 1 - order), label=name)
            axes.fill_between(steps, low, high, color=colour, alpha=0.18, linewidth=0)
            ends += [value for value in middle if 0 < value < math.inf]
    noise = find_spread(sizes(summary.differences(reference, is_noise=True)), width).middle
    shown = [value for value in (*ends, max(noise, default=0.0)) if 0 < value < math.inf]
    axes.set_yscale("log")
    if shown:
        floor = max(min(shown), max(shown) * 1e-12) / 2
        axes.set_ylim(bottom=floor)
        axes.fill_between(
            range(1, len(noise) + 1),
            floor,
            noise,
            color="#000000",
            alpha=0.13,
            linewidth=0,
            label="noise: weights off by one unit",
        )
    title = f"Size of the loss's difference from {reference}"
    if seeds > 1:
        title += f", median and range of {seeds} seeds"
    axes.set_title(title, loc="left")
    axes.set_xlabel(f"step (mean of {width})")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, ncols=2)


def _draw_bars(axes: "Axes", values: dict[str, float | None], colours: dict[str, str]) -> None:
    there = {name: value for name, value in values.items() if value is not None and math.isfinite(value)}
    bars = axes.barh(range(len(there)), list(there.values()), color=[colours[name] for name in there], height=0.65)
    axes.bar_label(bars, fmt="%.3g", padding=4)
    axes.set_yticks(range(len(there)), list(there))
    axes.invert_yaxis()
    axes.margins(x=0.14)
    axes.grid(visible=False, axis="y")
