"""Gradient checkpointing at several levels: the same losses and gradients, bit by bit, in less memory and more time.

A small transformer reads handwritten digits, a row of pixels a token. With checkpointing
(`torch.utils.checkpoint`), a block keeps its input only, and is computed again in backward, dropout and casts included.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import amp_patch as amp

from ..dtypes import dtype_name
from ..tables import RowPrinter
from .catalogue import Options
from .digits_training import Digits, load_digits_tensors
from .picture import make_figure
from .training import (
    OnStep,
    Part,
    draw_batches,
    make_bar,
    measure_peak,
    one_thread,
    prepare,
    record_gradients,
    report_checks,
    synchronize,
    take_step,
)
from .transformer import Block

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, DEPTH, BATCH_SIZE = 96, 6, 64
COLUMNS = ("level", "low dtype", "checkpointing", "peak MiB", "ms/step", "final loss")
COLOURS = ("#0072B2", "#E69F00")
NAMES = ("activations kept", "blocks checkpointed")


class RowReader(nn.Module):
    """A transformer encoder: images `[n, 1, 8, 8]` to logits `[n, 10]`, with its blocks checkpointed or not."""

    def __init__(self, is_checkpointed: bool) -> None:
        super().__init__()
        self.is_checkpointed = is_checkpointed
        self.embedding = nn.Linear(8, WIDTH)
        self.positions = nn.Parameter(0.1 * torch.randn(8, WIDTH))
        self.blocks = nn.ModuleList(Block(WIDTH, heads=4, dropout=0.1, is_causal=False) for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embedding(images.flatten(0, 1)) + self.positions
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
        return self.head(x.mean(dim=1))  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Result:
    """One run: the loss of each step, the gradients of all steps, the bytes that the last step needed at its peak."""

    low_dtype: torch.dtype | None
    losses: Tensor
    gradients: Tensor
    peak: int
    ms_per_step: float


def run(options: Options) -> None:
    """Train every level without and with checkpointing; print what each takes, and check that they agree.

    Raises DemoError if a loss or a gradient differs in a bit.
    """
    digits = load_digits_tensors(options.device)
    runs: dict[str, tuple[Result, Result]] = {}
    table = RowPrinter(COLUMNS, (5, 9), left=3)
    with one_thread():
        parts = [Part(_rehearse(level, which, digits, options)) for level in options.levels for which in (False, True)]
        options = prepare(options, parts)
        with make_bar(2 * len(options.levels) * (options.steps + 1)) as bar:
            for level in options.levels:
                bar.set_description(level)
                kept, again = (
                    train(level, is_checkpointed, digits, options.steps, options.seed, bar.update)
                    for is_checkpointed in (False, True)
                )
                runs[level] = kept, again
                bar.clear()
                table.print_row(_cells(level, False, kept))
                table.print_row(_cells(level, True, again))
    if options.plot:
        _draw(runs, options)
    print("\nwith checkpointing and without, bit by bit the same")
    report_checks(
        {
            f"{level}: {what} of {options.steps} steps": torch.equal(getattr(kept, what), getattr(again, what))
            for level, (kept, again) in runs.items()
            for what in ("losses", "gradients")
        }
    )


def _rehearse(level: str, is_checkpointed: bool, digits: Digits, options: Options) -> Callable[[int, OnStep], Result]:
    return lambda steps, on_step: train(level, is_checkpointed, digits, steps, options.seed, on_step)


def train(
    level: str,
    is_checkpointed: bool,
    digits: Digits,
    steps: int,
    seed: int,
    on_step: Callable[[], object] = lambda: None,
) -> Result:
    """Train anew for so many steps, and take one more, whose memory is measured."""
    device = digits.train_images.device
    torch.manual_seed(seed)
    model: nn.Module = RowReader(is_checkpointed).to(device)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    losses: list[Tensor] = []
    gradients: list[Tensor] = []
    seconds = []

    def step(rows: Tensor) -> None:
        loss = functional.cross_entropy(model(digits.train_images[rows]), digits.train_labels[rows])
        take_step(loss, optimizer)
        losses.append(loss.detach())

    recording = record_gradients(optimizer, gradients)
    *batches, last = draw_batches(len(digits.train_labels), BATCH_SIZE, steps + 1, seed, device)
    for rows in batches:
        started = time.perf_counter()
        step(rows)
        synchronize(device)
        seconds.append(time.perf_counter() - started)
        on_step()
    recording.remove()
    peak = measure_peak(lambda: step(last), device)
    on_step()
    return Result(
        low_dtype=amp.stats().low_dtype,
        losses=torch.stack(losses[:steps]).float(),
        gradients=torch.stack(gradients),
        peak=peak,
        ms_per_step=1e3 * statistics.median(seconds),
    )


def _cells(level: str, is_checkpointed: bool, result: Result) -> tuple[str, ...]:
    """The cells of one run, in the order of `COLUMNS`."""
    return (
        level,
        dtype_name(result.low_dtype),
        "yes" if is_checkpointed else "no",
        f"{result.peak / 2**20:.1f}",
        f"{result.ms_per_step:.1f}",
        f"{float(result.losses[-1]):.4f}",
    )


def _draw(runs: dict[str, tuple[Result, Result]], options: Options) -> None:
    """Memory and time of each level, a pair of bars each."""
    figure, (memory, times) = make_figure(2)
    _draw_pairs(memory, {level: tuple(each.peak / 2**20 for each in pair) for level, pair in runs.items()})
    _draw_pairs(times, {level: tuple(each.ms_per_step for each in pair) for level, pair in runs.items()})
    memory.set_title("Memory that a step adds at its peak (MiB)", loc="left")
    times.set_title(f"Time of a step (ms, median of {options.steps})", loc="left")
    memory.legend(loc="upper center", ncols=2, frameon=False)
    assert options.plot
    figure.savefig(options.plot)
    print(f"\nmemory and time: {options.plot}")


def _draw_pairs(axes: "Axes", pairs: dict[str, tuple[float, ...]]) -> None:
    """Two bars for each level, each with its value on top, from zero on."""
    for side, (name, colour) in enumerate(zip(NAMES, COLOURS, strict=True)):
        places = [column + 0.4 * (side - 0.5) for column in range(len(pairs))]
        bars = axes.bar(places, [pair[side] for pair in pairs.values()], 0.38, color=colour, label=name)
        axes.bar_label(bars, fmt="%.0f" if max(map(max, pairs.values())) > 100 else "%.1f", fontsize=8, padding=2)
    axes.set_xticks(range(len(pairs)), list(pairs))
    axes.grid(visible=False, axis="x")
    axes.set_ylim(0, 1.15 * axes.get_ylim()[1])  # room for the legend
