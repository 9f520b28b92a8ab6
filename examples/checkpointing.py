"""Gradient checkpointing at several levels: the same losses and gradients, bit by bit, in less memory and more time.

A small transformer reads handwritten digits, one row of pixels per token. With `torch.utils.checkpoint`, a block saves
only its input, and runs again in backward, including dropout and casts. The example fails if a bit differs.
"""

import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import common
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import amp_patch as amp

LEVELS = ("O0", "O1", "O2", "O4", "O5")
WIDTH, DEPTH, BATCH_SIZE = 96, 6, 64


class RowReader(nn.Module):
    """A transformer encoder: images `[n, 1, 8, 8]` to logits `[n, 10]`, with its blocks checkpointed or not."""

    def __init__(self, is_checkpointed: bool) -> None:
        super().__init__()
        self.is_checkpointed = is_checkpointed
        self.embedding = nn.Linear(8, WIDTH)
        self.positions = nn.Parameter(0.1 * torch.randn(8, WIDTH))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, activation="gelu", batch_first=True, norm_first=True)
            for _ in range(DEPTH)
        )
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embedding(images.flatten(0, 1)) + self.positions
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
        return self.head(x.mean(dim=1))


class Result(NamedTuple):
    """One training: the loss of each step, the gradients of all steps, the bytes that a step adds at its peak."""

    low_dtype: torch.dtype | None
    losses: list[float]
    gradients: Tensor
    peak: int
    ms_per_step: float


def train(level: str, is_checkpointed: bool, digits: common.Digits, steps: int) -> Result:
    """Train a new model at one level, and take one more step, whose memory is measured."""
    device = digits.images.device
    torch.manual_seed(0)
    model = RowReader(is_checkpointed).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)

    losses, gradients, seconds = [], [], []

    def note_gradients(*_: object) -> None:
        # in the step, where float32 masters have their gradients
        weights = amp.master_params(optimizer)
        gradients.append(torch.cat([weight.grad.flatten() for weight in weights if weight.grad is not None]))

    def step(rows: Tensor) -> None:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(digits.images[rows]), digits.labels[rows])
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        losses.append(loss.item())

    hook = optimizer.register_step_pre_hook(note_gradients)
    *batches, last = common.draw_batches(len(digits.labels), BATCH_SIZE, steps + 1, 0, device)
    for rows in batches:
        started = time.perf_counter()
        step(rows)
        common.synchronize(device)
        seconds.append(time.perf_counter() - started)
    hook.remove()
    peak = measure_peak(lambda: step(last), device)
    low_dtype = amp.stats().low_dtype
    amp.reset()
    return Result(low_dtype, losses, torch.stack(gradients), peak, 1000 * statistics.median(seconds))


def measure_peak(step: Callable[[], object], device: torch.device) -> int:
    """Return by how many bytes the memory in use rises at most while `step` runs.

    On CUDA the allocator tells; on a CPU it is what torch's profiler sees between ops.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler is silent
    with torch.autograd.profiler.profile(profile_memory=True, use_kineto=False) as profile:
        step()
    in_use = itertools.accumulate(event.self_cpu_memory_usage for event in profile.function_events or ())
    return max(in_use, default=0)


def main(argv: Sequence[str] | None = None) -> int:
    options = common.parse_options(__doc__, steps=10, argv=argv)
    torch.set_num_threads(1)  # more threads gain nothing on a network of this size
    digits = common.load_digits(options.device)
    runs = list(itertools.product(LEVELS, ("no", "yes")))
    common.shorten(options, lambda steps: [train(level, answer == "yes", digits, steps) for level, answer in runs])

    table = common.Table("level", "low dtype", "checkpointing", "peak MiB", "ms/step", "final loss")
    results = {}
    for level, answer in runs:
        result = train(level, answer == "yes", digits, options.steps)
        results[level, answer] = result
        low = str(result.low_dtype or "-").removeprefix("torch.")
        figures = (f"{result.peak / 2**20:.1f}", f"{result.ms_per_step:.1f}", f"{result.losses[-1]:.4f}")
        table.print_row(level, low, answer, *figures)

    if options.plot:
        figure, (memory, times) = common.make_figure(2)
        for axes, title, name, unit in (
            (memory, "Memory that a step adds (MiB)", "peak", 2**20),
            (times, "Time of a step (ms)", "ms_per_step", 1),
        ):
            bars = {a: {level: getattr(results[level, a], name) / unit for level in LEVELS} for a in ("no", "yes")}
            common.draw_bars(axes, title, {f"checkpointing: {answer}": values for answer, values in bars.items()})
        figure.savefig(options.plot)
        print(f"\nMemory and time: {options.plot}")

    print(f"\nThe same bits with checkpointing and without, over {options.steps} steps:")
    checks = {}
    for level in LEVELS:
        kept, again = results[level, "no"], results[level, "yes"]
        checks[f"{level}: losses"] = kept.losses == again.losses
        checks[f"{level}: gradients"] = torch.equal(kept.gradients, again.gradients)
    return common.report_checks(checks)


if __name__ == "__main__":
    sys.exit(main())
