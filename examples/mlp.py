"""A small classifier for a table of measurements: float32 against mixed precision, over several seeds.

The data are those of the Wisconsin breast cancer study: 569 rows of 30 measurements, two classes. A seed determines
the test rows, the weights and the batches, which are the same at every level.
"""

import statistics
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

import common
import torch
from torch import Tensor, nn
from torch.nn import functional

import amp_patch as amp

LEVELS = ("O0", "O1", "O2", "O4")
BATCH_SIZE = 64


class Result(NamedTuple):
    """One training: percent of the test rows classified right, the mean loss on them, the median time of a step."""

    low_dtype: torch.dtype | None
    accuracy: float
    loss: float
    ms_per_step: float


def load_rows(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return rows `[n, 30]` and labels `[n]` to train on, then those to test on: a third of all.

    Every column has zero mean and unit variance over the rows to train on.
    """
    from sklearn.datasets import load_breast_cancer

    measured, classes = load_breast_cancer(return_X_y=True)
    rows, labels = torch.from_numpy(measured).float(), torch.from_numpy(classes).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    test, train = order[: len(order) // 3], order[len(order) // 3 :]
    rows = (rows - rows[train].mean(dim=0)) / rows[train].std(dim=0)
    return rows[train], labels[train], rows[test], labels[test]


def train(level: str, steps: int, seed: int, device: torch.device) -> Result:
    """Train a new network at one level, and test it."""
    rows, labels, test_rows, test_labels = (part.to(device) for part in load_rows(seed))
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(30, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)

    seconds = []
    for batch in common.draw_batches(len(labels), BATCH_SIZE, steps, seed, device):
        started = time.perf_counter()
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(rows[batch]), labels[batch])
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        common.synchronize(device)
        seconds.append(time.perf_counter() - started)

    with torch.no_grad():
        logits = model(test_rows).float()
    result = Result(
        low_dtype=amp.stats().low_dtype,
        accuracy=100 * (logits.argmax(dim=1) == test_labels).float().mean().item(),
        loss=functional.cross_entropy(logits, test_labels).item(),
        ms_per_step=1000 * statistics.median(seconds),
    )
    amp.reset()
    return result


def format_spread(values: Sequence[float], form: str) -> str:
    """Return mean and standard deviation, as `1.5 ± 0.2`; of one value there is no deviation."""
    mean = format(statistics.fmean(values), form)
    if len(values) == 1:
        return mean
    return f"{mean} ± {format(statistics.stdev(values), form.lstrip('+'))}"


def make_cells(level: str, results: Sequence[Result], plain: Sequence[Result]) -> list[str]:
    """Return a row of the table. Differences from O0 are taken within each seed."""
    differences = [result.loss - reference.loss for result, reference in zip(results, plain, strict=True)]
    return [
        level,
        str(results[0].low_dtype or "-").removeprefix("torch."),
        f"{format_spread([result.accuracy for result in results], '.2f')} %",
        format_spread([result.loss for result in results], ".4f"),
        format_spread(differences, "+.4f"),
        f"{statistics.median(result.ms_per_step for result in results):.2f}",
    ]


def main(argv: Sequence[str] | None = None) -> int:
    options = common.parse_options(__doc__, steps=200, seeds=5, argv=argv)
    torch.set_num_threads(1)  # more threads gain nothing on a network of this size
    common.shorten(options, lambda steps: [train(level, steps, 0, options.device) for level in LEVELS])

    table = common.Table("level", "low dtype", "accuracy", "test loss", "less that of O0", "ms/step")
    results: dict[str, list[Result]] = {}
    for level in LEVELS:
        results[level] = [train(level, options.steps, seed, options.device) for seed in range(options.seeds)]
        table.print_row(*make_cells(level, results[level], results["O0"]))

    print(f"\nMean ± standard deviation over {options.seeds} seeds; differences are taken within each seed.")
    if options.plot:
        losses = {
            f"seed {seed}": {level: runs[seed].loss for level, runs in results.items()} for seed in range(options.seeds)
        }
        figure, (axes,) = common.make_figure(1)
        common.draw_bars(axes, "Loss on the test rows", losses, "%.3f")
        figure.savefig(options.plot)
        print(f"Losses: {options.plot}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
