"""Handwritten digits at every opt_level: a small convolutional network with BatchNorm, and a row for each level.

    model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()

These three lines are all that amp_patch adds to a training script; they are in `train`.
"""

import statistics
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

import common
import torch
from torch import nn
from torch.nn import functional

import amp_patch as amp

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
BATCH_SIZE = 96
LEARNING_RATE = 0.1


class Result(NamedTuple):
    """One training: the loss of each step, percent of the test images labelled right, and what amp says of itself."""

    losses: list[float]
    accuracy: float
    ms_per_step: float
    stats: amp.Stats

    @property
    def final_loss(self) -> float:
        return common.mean_of_last(self.losses)


def build_model() -> nn.Sequential:
    """Return the network: `[n, 1, 8, 8]` images to `[n, 10]` logits."""
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


def train(level: str, digits: common.Digits, steps: int, seed: int) -> Result:
    """Train a new model at one level, and test it."""
    device = digits.images.device
    torch.manual_seed(seed)
    model = build_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9, nesterov=True, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=LEARNING_RATE, total_steps=steps + 1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)

    losses, seconds = [], []
    for rows in common.draw_batches(len(digits.labels), BATCH_SIZE, steps, seed, device):
        started = time.perf_counter()
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(digits.images[rows]), digits.labels[rows])
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        scheduler.step()
        common.synchronize(device)
        seconds.append(time.perf_counter() - started)
        losses.append(loss.item())

    model.eval()
    with torch.no_grad():
        is_right = model(digits.test_images).argmax(dim=1) == digits.test_labels
    accuracy = 100 * is_right.float().mean().item()
    result = Result(losses, accuracy, 1000 * statistics.median(seconds), amp.stats())
    amp.reset()  # undoes all that initialize did: the next training is at another level
    return result


def find_noise(digits: common.Digits, steps: int, plain: Result) -> float:
    """Return how far the final loss moves in float32 when each pixel moves by one unit in the last place."""
    moved = digits._replace(images=torch.nextafter(digits.images, torch.tensor(torch.inf)))
    return abs(train("O0", moved, steps, seed=0).final_loss - plain.final_loss)


def make_cells(level: str, results: Sequence[Result], reference: Sequence[Result]) -> list[str]:
    """Return a row of the table: means over the seeds, and what amp says of the first run."""
    stats = results[0].stats
    differences = [result.final_loss - plain.final_loss for result, plain in zip(results, reference, strict=True)]
    return [
        level,
        str(stats.low_dtype or "-").removeprefix("torch."),
        f"{statistics.fmean(result.accuracy for result in results):.2f} %",
        f"{statistics.fmean(result.final_loss for result in results):.4f}",
        f"{statistics.fmean(differences):+.1e}",
        f"{statistics.median(result.ms_per_step for result in results):.2f}",
        str(sum(result.stats.steps_skipped for result in results)),
        f"{stats.loss_scales[0]:g}",
        str(stats.names_patched),
        f"{stats.parameters_low:,}",
        f"{stats.parameters_float32:,}",
    ]


def main(argv: Sequence[str] | None = None) -> int:
    options = common.parse_options(__doc__, steps=100, seeds=3, argv=argv)
    torch.set_num_threads(1)  # more threads gain nothing on a network of this size
    digits = common.load_digits(options.device)
    common.shorten(options, lambda steps: [train(level, digits, steps, seed=0) for level in LEVELS])

    table = common.Table(
        *("level", "low dtype", "accuracy", "final loss", "from O0", "ms/step", "skipped", "loss scale"),
        *("names patched", "params low", "params float32"),
    )
    results: dict[str, list[Result]] = {}
    for level in LEVELS:
        results[level] = [train(level, digits, options.steps, seed) for seed in range(options.seeds)]
        table.print_row(*make_cells(level, results[level], results["O0"]))

    noise = find_noise(digits, options.steps, results["O0"][0])
    print(f"\nLosses are means over {options.seeds} seeds. Differences up to {noise:.1e} are noise: the loss of O0")
    print("changes as much when every pixel grows by one unit in the last place.")
    if options.plot:
        rows = [*(LEVELS[place : place + 2] for place in range(0, len(LEVELS), 2)), ("time", "time")]
        figure, panels = common.make_mosaic(rows, 2.4)
        figure.suptitle("Training loss over the steps, seed 0")
        common.draw_differences(panels, {level: runs[0].losses for level, runs in results.items()})
        medians = {level: statistics.median(run.ms_per_step for run in runs) for level, runs in results.items()}
        common.draw_bars(panels["time"], "Time of a step, median (ms)", {"ms": medians})
        figure.savefig(options.plot)
        print(f"Losses and times: {options.plot}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
