"""Pictures of the benchmarks' tables. matplotlib is needed only where one is asked for; it comes with
`amp_patch[demo]`.
"""

import argparse
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, as far as it is dark enough on white; what is not amp_patch is grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F")
OURS, OTHERS = COLOURS[0], "#A0A0A0"


@dataclass(frozen=True, slots=True)
class Bar:
    """One horizontal bar: its name, its length and half the width of its error bar in the plot's unit, and what is
    written at its end.
    """

    name: str
    value: float
    error: float = 0.0
    note: str = ""
    is_ours: bool = True


def add_option(parser: argparse.ArgumentParser) -> None:
    """Declare `--plot FILE.png`."""
    parser.add_argument("--plot", type=_png, metavar="FILE.png", help="draw the table as a picture (needs matplotlib)")


def _png(text: str) -> Path:
    path = Path(text)
    if path.suffix.lower() != ".png" or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} must be a .png file in a folder that exists")
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError('matplotlib is not installed; run: pip install "amp_patch[demo]"')
    return path


def save_bars(path: Path | None, title: str, unit: str, panels: Mapping[str, Sequence[Bar]]) -> None:
    """One panel for each key, with a bar for each entry, the first on top. Without a path nothing is drawn."""
    if path is None:
        return
    figure, axes = _make_panels(panels, [len(bars) for bars in panels.values()])
    for axis, (name, bars) in zip(axes, panels.items(), strict=True):
        _draw_names(axis, name, [bar.name for bar in bars])
        colours = [OURS if bar.is_ours else OTHERS for bar in bars]
        axis.barh(
            range(len(bars)),
            [bar.value for bar in bars],
            xerr=[bar.error for bar in bars],
            color=colours,
            ecolor="#404040",
        )
        for position, bar in enumerate(bars):
            axis.annotate(
                bar.note,
                (bar.value + bar.error, position),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
            )
        axis.set_xlim(right=1.2 * max(bar.value + bar.error for bar in bars))
    _finish(figure, axes, title, unit, path)


def save_stacks(
    path: Path | None, title: str, unit: str, panels: Mapping[str, Mapping[str, Mapping[str, float]]]
) -> None:
    """One panel for each key; in it, a bar for each key, cut into parts that are named in the legend.

    Without a path nothing is drawn.
    """
    if path is None:
        return
    figure, axes = _make_panels(panels, [len(bars) for bars in panels.values()])
    for axis, (name, bars) in zip(axes, panels.items(), strict=True):
        _draw_names(axis, name, list(bars))
        for position, parts in enumerate(bars.values()):
            start = 0.0
            for colour, (part, value) in zip(COLOURS, parts.items(), strict=False):
                axis.barh(position, value, left=start, color=colour, label=part if position == 0 else None)
                start += value
    axes[0].legend(loc="lower center", bbox_to_anchor=(0.5, 1.12), ncols=4, frameon=False, fontsize=8)
    _finish(figure, axes, title, unit, path)


def save_lines(path: Path | None, title: str, unit: str, panels: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    """One panel for each key; in it, a line over the steps for each key, on a logarithmic scale.

    Without a path nothing is drawn.
    """
    if path is None:
        return
    figure, axes = _make_panels(panels, [9] * len(panels))
    for axis, (name, lines) in zip(axes, panels.items(), strict=True):
        for order, (label, values) in enumerate(lines.items()):
            # Later lines are thinner, so that a line which runs under another still shows on both sides of it.
            width = 1 + 0.8 * (len(lines) - 1 - order)
            axis.plot(
                range(1, len(values) + 1), values, label=label, linewidth=width, color=COLOURS[order % len(COLOURS)]
            )
        axis.set_yscale("log")
        axis.set_title(name, loc="left", fontsize=10)
        axis.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=8)
    _finish(figure, axes, title, unit, path)


def _make_panels(panels: Mapping[str, object], rows: Sequence[int]) -> "tuple[Figure, list[Axes]]":
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.2 + 0.32 * sum(rows) + 0.6 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(panels), 1, squeeze=False, height_ratios=[count + 1 for count in rows])
    return figure, [row[0] for row in grid]


def _draw_names(axis: "Axes", title: str, names: Sequence[str]) -> None:
    axis.set_title(title, loc="left", fontsize=10)
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()


def _finish(figure: "Figure", axes: "Sequence[Axes]", title: str, unit: str, path: Path) -> None:
    figure.suptitle(title, x=0.01, ha="left")
    axes[-1].set_xlabel(unit)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(visible=True, axis="x", alpha=0.25)
        axis.set_axisbelow(True)
    figure.savefig(path, dpi=130, format="png")
