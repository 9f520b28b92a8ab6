"""Handwritten digits at every opt_level: one small convolutional network with BatchNorm, trained by the three lines
that a user writes.

    model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()

scikit-learn brings the data (1,797 images of 8x8), tqdm the progress bar, matplotlib the picture: the extra
`amp_patch[demo]`.
"""

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

import amp_patch as amp

from ..errors import AmpError, did_you_mean

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUMMARY = "Train a small network on handwritten digits at each opt_level and compare."
LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
BATCH_SIZE = 96
LEARNING_RATE = 0.1
FINAL_LOSS_STEPS = 20
COLUMNS = (
    "level",
    "low dtype",
    "accuracy",
    "final loss",
    "ms/step",
    "skipped",
    "loss scale",
    "names patched",
    "params low",
    "params float32",
)
# Okabe and Ito's palette without its yellow: distinct for colour-blind readers and dark enough on white.
COLOURS = {"O0": "#000000", "O1": "#0072B2", "O2": "#D55E00", "O3": "#CC79A7", "O4": "#009E73", "O5": "#E69F00"}


class MissingExtraError(AmpError, ModuleNotFoundError):
    """A package that only the demo needs is not installed."""


class Digits(NamedTuple):
    """Images `[n, 1, 8, 8]` float32 with zero mean and unit variance; labels `[n]` int64 in 0..9."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


@dataclass(frozen=True, slots=True)
class TrainResult:
    """One level's outcome: accuracy in percent on the test images, the median time of a step, and a training loss for
    each step.
    """

    level: str
    low_dtype: torch.dtype | None
    accuracy: float
    final_loss: float
    ms_per_step: float
    steps_skipped: int
    loss_scale: float
    names_patched: int
    parameters_low: int
    parameters_float32: int
    losses: tuple[float, ...]


def require_extras(names: Sequence[str]) -> None:
    """Raise `MissingExtraError` naming every module of `names` that is not installed."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtraError(
            f'the demo needs {", ".join(missing)}, not installed here; run: pip install "amp_patch[demo]"'
        )


def build_model() -> nn.Sequential:
    """Return the network, float32 on the CPU: `[n, 1, 8, 8]` images to `[n, 10]` logits."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


def load_digits_tensors(device: torch.device | str = "cpu") -> Digits:
    """Return the digits on `device`: every third image is for testing (599 of 1,797), so the split does not depend on
    the seed.
    """
    require_extras(["sklearn"])
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    images = torch.from_numpy(pixels).float().reshape(-1, 1, 8, 8)
    images = (images - images.mean()) / images.std()
    targets = torch.from_numpy(labels).long()
    is_test = torch.arange(len(targets)) % 3 == 0
    return Digits(
        *(part.to(device) for part in (images[~is_test], targets[~is_test], images[is_test], targets[is_test]))
    )


def train(
    level: str,
    digits: Digits,
    *,
    steps: int,
    seed: int = 0,
    on_step: Callable[[], object] = lambda: None,
) -> TrainResult:
    """Train a new model on the device of `digits` for `steps` batches and leave amp's session open, as a script would.

    `on_step` is called after every step, outside the time that is measured. The device is synchronised once a step, for
    the clock.
    """
    device = digits.train_images.device
    torch.manual_seed(seed)
    model: nn.Module = build_model().to(device)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(
        model.parameters(), lr=LEARNING_RATE, momentum=0.9, nesterov=True, weight_decay=1e-4
    )
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=LEARNING_RATE, total_steps=steps + 1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)

    losses, seconds = [], []
    model.train()
    for rows in _batches(len(digits.train_labels), steps, seed, device):
        started = time.perf_counter()
        loss = functional.cross_entropy(model(digits.train_images[rows]), digits.train_labels[rows])
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        scheduler.step()
        _synchronize(device)
        seconds.append(time.perf_counter() - started)
        losses.append(loss.detach())
        on_step()

    return _report(level, _accuracy(model, digits), torch.stack(losses).float().tolist(), seconds)


def _batches(rows: int, steps: int, seed: int, device: torch.device) -> list[Tensor]:
    """Row indices of each step's batch, drawn without replacement; the same for every level and device of one seed."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randperm(rows, generator=generator)[:BATCH_SIZE].to(device) for _ in range(steps)]


def _synchronize(device: torch.device) -> None:
    """Wait for the work of an accelerator; the CPU has none waiting."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _accuracy(model: nn.Module, digits: Digits) -> float:
    """Percent of the test images that the model labels right, in eval mode and without gradients."""
    model.eval()
    with torch.no_grad():
        predicted = model(digits.test_images).argmax(dim=1)
    return 100.0 * float((predicted == digits.test_labels).float().mean())


def _report(level: str, accuracy: float, losses: list[float], seconds: list[float]) -> TrainResult:
    """Join the measurements with what the open session says of itself; the first tenth of the steps is warm-up and not
    timed.
    """
    stats = amp.stats()
    return TrainResult(
        level=level,
        low_dtype=stats.low_dtype,
        accuracy=accuracy,
        final_loss=statistics.fmean(losses[-FINAL_LOSS_STEPS:]),
        ms_per_step=1e3 * statistics.median(seconds[len(seconds) // 10 :]),
        steps_skipped=stats.steps_skipped,
        loss_scale=stats.loss_scales[0],
        names_patched=stats.names_patched,
        parameters_low=stats.parameters_low,
        parameters_float32=stats.parameters_float32,
        losses=tuple(losses),
    )


def format_table(results: Sequence[TrainResult]) -> str:
    """Return the results as one table, a line for each level under a line of column names."""
    rows = [COLUMNS, *(_row(result) for result in results)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells))
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(line.rstrip() for line in lines)


def _row(result: TrainResult) -> tuple[str, ...]:
    """The cells of one level, in the order of `COLUMNS`."""
    return (
        result.level,
        dtype_name(result.low_dtype),
        f"{result.accuracy:.2f} %",
        f"{result.final_loss:.4f}",
        f"{result.ms_per_step:.2f}",
        str(result.steps_skipped),
        f"{result.loss_scale:g}",
        str(result.names_patched),
        f"{result.parameters_low:,}",
        f"{result.parameters_float32:,}",
    )


def dtype_name(dtype: torch.dtype | None) -> str:
    """`bfloat16` for `torch.bfloat16`, a dash for none."""
    return "-" if dtype is None else str(dtype).removeprefix("torch.")


def save_plot(results: Sequence[TrainResult], path: Path) -> None:
    """Write the loss curves of all results into one PNG; each line carries its own label, so there is no legend to look
    up.
    """
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
    """The mean of each loss and those before it, `FINAL_LOSS_STEPS` at most: the last value is the table's
    final loss.
    """
    return [statistics.fmean(losses[max(0, end - FINAL_LOSS_STEPS) : end]) for end in range(1, len(losses) + 1)]


def _spread(heights: Sequence[float], gap: float) -> list[float]:
    """Move label heights (fractions of the axis) apart until neighbours differ by `gap`, around where they were and
    inside 0..1.
    """
    order = sorted(range(len(heights)), key=lambda index: heights[index])
    placed: list[float] = []
    for index in order:
        placed.append(max(heights[index], placed[-1] + gap if placed else 0.0))
    drift = sum(placed) / len(placed) - sum(heights) / len(heights)
    shift = min(max(-drift, -placed[0]), 1.0 - placed[-1])
    by_index = dict(zip(order, placed, strict=True))
    return [by_index[index] + shift for index in range(len(heights))]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the demo's options on `parser`."""
    parser.add_argument(
        "--opt-level", dest="levels", action="extend", type=_levels, metavar="LEVEL[,LEVEL]", help="default: all six"
    )
    parser.add_argument("--device", type=_device, default=None, help="default: cuda where there is one, else cpu")
    parser.add_argument("--steps", type=_positive, default=300, help="optimizer steps per level (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (default: %(default)s)")
    parser.add_argument(
        "--plot", type=_png, metavar="FILE.png", help="write the loss curves of all levels into one picture"
    )


def run(arguments: argparse.Namespace) -> None:
    """Train at each level asked for, in order, in this process; print the table, write the picture, close amp's
    session.
    """
    require_extras(["sklearn", "tqdm", *(["matplotlib"] if arguments.plot else [])])
    from tqdm import tqdm

    device = arguments.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    levels = list(dict.fromkeys(arguments.levels or LEVELS))
    digits = load_digits_tensors(device)
    results = []
    try:
        with tqdm(total=len(levels) * arguments.steps, unit="step", leave=False, disable=None) as bar:
            for level in levels:
                bar.set_description(level)
                results.append(train(level, digits, steps=arguments.steps, seed=arguments.seed, on_step=bar.update))
    finally:
        amp.reset()
    print(format_table(results))
    if arguments.plot:
        save_plot(results, arguments.plot)
        print(f"\nloss curves: {arguments.plot}")


def _levels(text: str) -> list[str]:
    """`O1` or `O1,O4` as a list of known levels."""
    levels = [level.strip() for level in text.split(",")]
    for level in levels:
        if level not in LEVELS:
            raise argparse.ArgumentTypeError(
                f"{level!r} is not an opt_level ({', '.join(LEVELS)}).{did_you_mean(level, LEVELS)}"
            )
    return levels


def _positive(text: str) -> int:
    """A whole number of 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def _device(text: str) -> torch.device:
    """A device that this machine can put a tensor on."""
    try:
        device = torch.device(text)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise argparse.ArgumentTypeError(f"device {text!r} cannot be used here: {reason}") from error
    return device


def _png(text: str) -> Path:
    """A path that ends in .png, in a folder that exists."""
    path = Path(text)
    if path.suffix.lower() != ".png" or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} must be a .png file in a folder that exists")
    return path
