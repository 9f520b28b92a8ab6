"""A small classifier of a table of measurements, float32 against mixed precision, over several seeds.

The data are those of the Wisconsin breast cancer study, which scikit-learn brings: 569 rows of 30 measurements, two
classes. A seed decides the rows that are kept for testing, the weights and the batches, at every level alike.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

import amp_patch as amp

from ..dtypes import dtype_name
from ..tables import RowPrinter
from .catalogue import Options
from .picture import COLOURS, make_figure
from .training import OnStep, Part, draw_batches, make_bar, one_thread, prepare, synchronize, take_step

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BATCH_SIZE = 64
COLUMNS = ("level", "low dtype", "accuracy", "test loss", "less that of O0", "ms/step")

WIDTHS = (5, 9, 14, 15, 16, 7)


@dataclass(frozen=True, slots=True)
class Result:
    """One run: accuracy in percent and mean loss on the test rows, and the median time of a step."""

    low_dtype: torch.dtype | None
    accuracy: float
    loss: float
    ms_per_step: float


def run(options: Options) -> None:
    """Train every level from every seed; print means and standard deviations, and draw each run as a dot.

    Ctrl-C leaves the levels that are done.
    """
    runs: dict[str, list[Result]] = {}
    table = RowPrinter(COLUMNS, WIDTHS, left=2)
    with one_thread():
        options = prepare(options, [Part(_rehearse(level, options)) for level in options.levels])
        seeds = range(options.seed, options.seed + options.seeds)
        with make_bar(len(options.levels) * len(seeds) * options.steps) as bar:
            for level in options.levels:
                bar.set_description(level)
                runs[level] = [train(level, seed, options.steps, options.device, bar.update) for seed in seeds]
                bar.clear()
                table.print_row(_cells(level, runs))
    print(f"\nmean ± standard deviation of {len(seeds)} seeds; differences from O0 are taken within each seed")
    if options.plot:
        figure, (accuracies, losses) = make_figure(2)
        _draw_dots(accuracies, {level: [each.accuracy for each in results] for level, results in runs.items()})
        _draw_dots(losses, {level: [each.loss for each in results] for level, results in runs.items()})
        accuracies.set_title(f"Accuracy on the test rows, {len(seeds)} seeds (%)", loc="left")
        losses.set_title("Loss on the test rows, same seeds", loc="left")
        figure.savefig(options.plot)
        print(f"accuracy and loss of every run: {options.plot}")


def _rehearse(level: str, options: Options) -> Callable[[int, OnStep], Result]:
    return lambda steps, on_step: train(level, options.seed, steps, options.device, on_step)


def train(
    level: str, seed: int, steps: int, device: torch.device, on_step: Callable[[], object] = lambda: None
) -> Result:
    """Train a new network at a level for so many batches, and test it. `on_step` is called after each."""
    train_rows, train_labels, test_rows, test_labels = (part.to(device) for part in load_rows(seed))
    torch.manual_seed(seed)
    model: nn.Module = nn.Sequential(nn.Linear(30, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)).to(
        device
    )
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    seconds = []
    for batch in draw_batches(len(train_labels), BATCH_SIZE, steps, seed, device):
        started = time.perf_counter()
        take_step(functional.cross_entropy(model(train_rows[batch]), train_labels[batch]), optimizer)
        synchronize(device)
        seconds.append(time.perf_counter() - started)
        on_step()
    with torch.no_grad():
        logits = model(test_rows)
    return Result(
        low_dtype=amp.stats().low_dtype,
        accuracy=100.0 * float((logits.argmax(dim=1) == test_labels).float().mean()),
        loss=float(functional.cross_entropy(logits.float(), test_labels)),
        ms_per_step=1e3 * statistics.median(seconds),
    )


def load_rows(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return rows `[n, 30]` float32 and labels `[n]` to train on, then those to test on: a third of all, by seed.

    Every column has zero mean and unit variance over the rows to train on.
    """
    from sklearn.datasets import load_breast_cancer

    measured, classes = load_breast_cancer(return_X_y=True)
    rows, labels = torch.from_numpy(measured).float(), torch.from_numpy(classes).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    test, train = order[: len(order) // 3], order[len(order) // 3 :]
    rows = (rows - rows[train].mean(dim=0)) / rows[train].std(dim=0)
    return rows[train], labels[train], rows[test], labels[test]


def _cells(level: str, runs: dict[str, list[Result]]) -> tuple[str, ...]:
    """The cells of one level, in the order of `COLUMNS`."""
    results = runs[level]
    differences = [each.loss - plain.loss for each, plain in zip(results, runs.get("O0", ()), strict=False)]
    return (
        level,
        dtype_name(results[0].low_dtype),
        f"{_spread([each.accuracy for each in results], '.2f')} %",
        _spread([each.loss for each in results], ".4f"),
        _spread(differences, "+.4f") if differences and level != "O0" else "-",
        f"{statistics.median(each.ms_per_step for each in results):.2f}",
    )


def _spread(values: Sequence[float], form: str) -> str:
    """Mean and standard deviation, as `1.5 ± 0.2`; of one value there is no deviation."""
    mean = format(statistics.fmean(values), form)
    return f"{mean} ± {format(statistics.stdev(values), form.lstrip('+'))}" if len(values) > 1 else mean


def _draw_dots(axes: "Axes", values: dict[str, list[float]]) -> None:
    """One column of dots for each level, a dot for each seed at the same offset in all, and a line at their mean."""
    for column, (level, each) in enumerate(values.items()):
        offsets = [column + 0.3 * (number / max(1, len(each) - 1) - 0.5) for number in range(len(each))]
        axes.plot(offsets, each, "o", color=COLOURS[level], markersize=7, alpha=0.75)
        axes.hlines(statistics.fmean(each), column - 0.3, column + 0.3, color=COLOURS[level], linewidth=2)
    axes.set_xticks(range(len(values)), list(values))
    axes.set_xlim(-0.6, len(values) - 0.4)
    axes.grid(visible=False, axis="x")
