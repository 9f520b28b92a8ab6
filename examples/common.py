"""Code that the examples share: options, digits, the length of training, tables and pictures."""

import argparse
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

MOST_SECONDS = 80.0
"""Without --steps and --seeds, an example takes no longer than about this."""
FEW_STEPS = 20
"""A slow machine trains from fewer seeds before it takes fewer steps than this."""
COLOURS = ("#000000", "#0072B2", "#D55E00", "#C2649A", "#009E73", "#B88000")
STYLES = ("-", "--", "-.", ":")


class Digits(NamedTuple):
    """Images `[n, 1, 8, 8]` float32 with zero mean and unit variance; labels `[n]` int64 in 0..9."""

    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def parse_options(
    doc: str, steps: int, seeds: int = 1, argv: Sequence[str] | None = None, unit: str = "optimizer steps"
) -> argparse.Namespace:
    """Read the command line. `options.may_shorten` tells whether steps and seeds are the defaults.

    `unit` says what --steps counts.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help=f"{unit} of each training (default: {steps})")
    if seeds > 1:
        parser.add_argument("--seeds", type=int, help=f"how many seeds to train from (default: {seeds})")
    parser.add_argument("--device", type=torch.device, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw a picture of the results")
    parser.set_defaults(seeds=None)
    options = parser.parse_args(argv)
    options.may_shorten = options.steps is None and options.seeds is None
    options.steps = options.steps or steps
    options.seeds = options.seeds or seeds
    return options


def load_digits(device: torch.device) -> Digits:
    """Return the 1,797 digits of scikit-learn: every third image is for testing."""
    from sklearn.datasets import load_digits as load

    pixels, classes = load(return_X_y=True)
    images = torch.from_numpy(pixels).float().reshape(-1, 1, 8, 8).to(device)
    images = (images - images.mean()) / images.std()
    labels = torch.from_numpy(classes).long().to(device)
    is_test = torch.arange(len(labels), device=device) % 3 == 0
    return Digits(images[~is_test], labels[~is_test], images[is_test], labels[is_test])


def draw_batches(rows: int, size: int, steps: int, seed: int, device: torch.device) -> list[Tensor]:
    """Return the row indices `[size]` of each step's batch: the same on every device for one seed."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randperm(rows, generator=generator)[:size].to(device) for _ in range(steps)]


def synchronize(device: torch.device) -> None:
    """Wait for a GPU, so that a clock sees its work; a CPU has none waiting."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def shorten(options: argparse.Namespace, train_all: Callable[[int], object]) -> None:
    """Reduce the seeds and steps of `options` where the machine is slow, unless they were given, and say so.

    `train_all(steps)` does all that the example does for one seed.
    """
    if not options.may_shorten:
        return
    once = _time(train_all, 1)
    if once < MOST_SECONDS / 8:
        once = _time(train_all, 1)  # without what a process does once
    step = max(_time(train_all, 3) - once, 0.0) / 2
    setup = max(once - step, 0.0)
    asked_steps, asked_seeds = options.steps, options.seeds
    seconds = asked_seeds * (setup + asked_steps * step)
    if seconds <= MOST_SECONDS:
        return
    for seeds in range(asked_seeds, 0, -1):
        options.seeds = seeds
        options.steps = min(int((MOST_SECONDS / seeds - setup) / max(step, 1e-9)), asked_steps)
        if options.steps >= min(FEW_STEPS, asked_steps):
            break
    options.steps = max(options.steps, 2)
    full = f"--steps {asked_steps}"
    done, asked = f"{options.steps} steps", str(asked_steps)
    if asked_seeds > 1:
        full += f" --seeds {asked_seeds}"
        done, asked = f"{done} from {options.seeds} of {asked_seeds} seeds", f"{asked} from each"
    print(f"Slow machine: {done} instead of {asked}. For the full run: {full} (about {seconds / 60:.0f} min)\n")


def _time(train_all: Callable[[int], object], steps: int) -> float:
    started = time.perf_counter()
    train_all(steps)
    return time.perf_counter() - started


class Table:
    """A table printed row by row; a column is as wide as its heading, or as the first row needs."""

    def __init__(self, *headings: str) -> None:
        self._headings = headings
        self._widths: list[int] = []

    def print_row(self, *cells: str) -> None:
        if not self._widths:
            self._widths = [max(map(len, pair)) for pair in zip(self._headings, cells, strict=True)]
            self._print(self._headings)
            self._print(["-" * width for width in self._widths])
        self._print(cells)

    def _print(self, cells: Sequence[str]) -> None:
        first, *others = [cell.rjust(width) for cell, width in zip(cells, self._widths, strict=True)]
        print("  ".join([first.strip().ljust(self._widths[0]), *others]), flush=True)


def report_checks(checks: Mapping[str, bool]) -> int:
    """Print a line for each check; return the exit code: 1 if one of them does not hold."""
    for check, holds in checks.items():
        print("yes" if holds else "NO ", check)
    return 0 if all(checks.values()) else 1


def make_figure(panels: int) -> tuple[Any, list[Any]]:
    """Return matplotlib's figure and its panels, below each other; `figure.savefig(path)` writes it."""
    figure, drawn = make_mosaic([[str(panel)] for panel in range(panels)], 4.5)
    return figure, list(drawn.values())


def make_mosaic(rows: Sequence[Sequence[str]], height: float) -> tuple[Any, dict[str, Any]]:
    """Return matplotlib's figure and its panels by name, in rows of `height` inches.

    It is six inches wide, so that a telephone shows its text large enough.
    """
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    rcParams["font.size"] = 12
    rcParams["axes.titlesize"] = 12
    figure = Figure(figsize=(6, height * len(rows)), dpi=120, layout="constrained")
    return figure, figure.subplot_mosaic([list(row) for row in rows])


def mean_of_last(losses: Sequence[float]) -> float:
    """Return the mean of the last 20 losses."""
    return statistics.fmean(losses[-20:])


def draw_lines(axes: Any, title: str, lines: Mapping[str, Sequence[float]]) -> None:
    """Draw losses over the steps, each the mean of the last 20.

    Later lines are thinner, so that none hides another, and the dashes of each are its own.
    """
    for order, (name, losses) in enumerate(lines.items()):
        means = _smooth(losses)
        width = 1 + 0.9 * (len(lines) - 1 - order)
        style = STYLES[order % len(STYLES)]
        axes.plot(range(1, len(means) + 1), means, color=COLOURS[order], linewidth=width, linestyle=style, label=name)
    axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.set_title(title)
    axes.legend()


def draw_differences(panels: Mapping[str, Any], lines: Mapping[str, Sequence[float]]) -> None:
    """Draw the losses of the first line, and in a panel for each other its difference from the first, in percent.

    Losses are means of the last 20. All differences have the same axis.
    """
    (first, losses), *rest = lines.items()
    reference = _smooth(losses)
    steps = range(1, len(reference) + 1)
    panels[first].plot(steps, reference, color=COLOURS[0])
    panels[first].set_yscale("log")
    panels[first].set_title(f"{first}: training loss")
    differences: dict[str, list[float]] = {}
    for name, losses_of_line in rest:
        pairs = zip(_smooth(losses_of_line), reference, strict=True)
        differences[name] = [100 * (loss / loss_of_first - 1) for loss, loss_of_first in pairs]
    sizes = [abs(value) for values in differences.values() for value in values if math.isfinite(value)]
    most = 1.1 * max(sizes, default=0) or 1.0
    for order, (name, values) in enumerate(differences.items()):
        panels[name].axhline(0, color=COLOURS[0], linewidth=0.8)
        panels[name].plot(steps, values, color=COLOURS[1 + order], linewidth=2)
        panels[name].set_ylim(-most, most)
        panels[name].set_title(f"{name} minus {first}, %")


def _smooth(losses: Sequence[float]) -> list[float]:
    return [mean_of_last(losses[:end]) for end in range(1, len(losses) + 1)]


def draw_bars(axes: Any, title: str, bars: Mapping[str, Mapping[str, float]], form: str = "%.1f") -> None:
    """Draw a group of bars for each place on the axis; `bars` has a series by name, and in it values by place."""
    width = 0.8 / len(bars)
    size = 10
    if len(bars) > 2:
        size = 8  # or numbers would touch
    for order, (name, values) in enumerate(bars.items()):
        places = [place + width * (order - (len(bars) - 1) / 2) for place in range(len(values))]
        drawn = axes.bar(places, list(values.values()), width, color=COLOURS[1 + order], label=name)
        axes.bar_label(drawn, fmt=form, fontsize=size)
        axes.set_xticks(range(len(values)), list(values))
    axes.set_title(title)
    axes.margins(y=0.15)  # room for the numbers on the bars
    if len(bars) > 1:
        axes.margins(y=0.3)  # and for the legend above them
        axes.legend(loc="upper center", ncols=3)
