"""Milliseconds of one training step: plain float32, torch.autocast, a 16-bit model, and every opt_level, with the same
optimizer and batch.

    python benchmarks/step.py --workload gpt-256,mlp --micro-batches 1,4 --fused

In each round every mode builds the model anew, warms up, and times its steps one by one; the round's value is their
median. Ratios are to the autocast of the mode's own low dtype.
"""

import argparse
import functools
import math
import statistics
import time
from dataclasses import dataclass

import torch
from timing import Samples, environment, format_table, get_allocator, interleave, synchronize
from torch import nn
from training import AUTOCAST, MODES, WORKLOADS, Size, Workload, default_modes, prepared

EPS = 1e-4  # AdamW's 1e-8 is 0 in float16, in which O3 keeps the optimizer's states: its steps would divide by 0
COLUMNS = ("workload", "mode", "ms/step", "spread", "ratio", "to", "loss", "peak MB")


@dataclass(frozen=True, slots=True)
class Plan:
    """One measurement: what to train, how to split the batch, and how often."""

    workload: Workload
    micro_batches: int
    fused: bool
    steps: int
    warmup: int
    device: torch.device
    compile_mode: str | None


@dataclass(frozen=True, slots=True)
class Round:
    """One mode in one round: the median milliseconds of a step, the last loss, the low dtype, and the most memory a
    timed step took.
    """

    milliseconds: float
    loss: float
    low: torch.dtype | None
    peak_bytes: int | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """A mode's milliseconds per step for each round, and its last round."""

    samples: Samples
    last: Round


def time_round(mode: str, plan: Plan) -> Round:
    """Build, warm up and time one mode; leaves no session open."""

    def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=3e-4, eps=EPS, fused=plan.fused)

    torch.manual_seed(0)
    losses = plan.workload.micro_batches(plan.micro_batches)
    milliseconds = []
    allocator = get_allocator(plan.device)
    with prepared(mode, plan.workload.build, make_optimizer, plan.device, plan.compile_mode) as trainer:
        for number in range(plan.warmup + plan.steps):
            if number == plan.warmup and allocator is not None:
                allocator.reset_peak_memory_stats(plan.device)
            synchronize(plan.device)
            started = time.perf_counter()
            loss = trainer.step(losses)
            synchronize(plan.device)
            if number >= plan.warmup:
                milliseconds.append(1e3 * (time.perf_counter() - started))
        peak = None if allocator is None else allocator.max_memory_allocated(plan.device)
        return Round(statistics.median(milliseconds), float(loss.detach()), trainer.low, peak)


def compare(plan: Plan, modes: list[str], rounds: int) -> dict[str, Outcome]:
    """Return every mode's outcome; the modes take turns."""
    last: dict[str, Round] = {}

    def measure(mode: str) -> float:
        last[mode] = time_round(mode, plan)
        return last[mode].milliseconds

    samples = interleave({mode: functools.partial(measure, mode) for mode in modes}, rounds)
    return {mode: Outcome(samples[mode], last[mode]) for mode in modes}


def table_rows(title: str, outcomes: dict[str, Outcome]) -> list[list[str]]:
    """Return one row for each mode, in the order given."""
    by_dtype = {dtype: name for name, dtype in AUTOCAST.items() if name in outcomes}
    first = next(iter(by_dtype.values()), None)
    rows = []
    for mode, outcome in outcomes.items():
        reference = by_dtype.get(outcome.last.low, first)
        ratio = "-" if reference is None else f"{outcome.samples.ratio(outcomes[reference].samples):.3f}"
        times = [f"{outcome.samples.median:.2f}", f"+-{outcome.samples.spread:.1%}", ratio, reference or "-"]
        peak = "-" if outcome.last.peak_bytes is None else f"{outcome.last.peak_bytes / 1e6:.0f}"
        loss = f"{outcome.last.loss:.4f}" if math.isfinite(outcome.last.loss) else "diverged"
        rows.append([title, mode, *times, loss, peak])
    return rows


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Milliseconds of a training step: float32, torch.autocast, a 16-bit model, every opt_level."
    )
    default = "gpt-64,gpt-256,mlp,resnet"
    parser.add_argument("--workload", default=default, help=f"of {', '.join(WORKLOADS)}; default: %(default)s")
    parser.add_argument(
        "--modes",
        help=f"of {', '.join(MODES)}; default: all, but no float16 by torch on the CPU, where it is slow",
    )
    parser.add_argument(
        "--micro-batches", default="1,4", help="into how many parts each batch is split (default: %(default)s)"
    )
    parser.add_argument("--compile", nargs="?", const="default", metavar="MODE", help="torch.compile every model")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    parser.add_argument("--batch", type=int, help="rows of a step; default: the workload's")
    parser.add_argument("--sequence", type=int, help="tokens of a row")
    parser.add_argument("--channels-last", action="store_true", help="images and convolutions in torch.channels_last")
    parser.add_argument("--fused", action="store_true", help="fused AdamW, in every mode")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved repeats (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="steps timed in a round (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=5, help="steps before the clock starts (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="torch threads (default: torch's)")
    arguments = parser.parse_args()
    arguments.workload = arguments.workload.split(",")
    arguments.device = torch.device(arguments.device)
    arguments.modes = arguments.modes.split(",") if arguments.modes else default_modes(arguments.device)
    for option, allowed in (("workload", WORKLOADS), ("modes", MODES)):
        unknown = sorted(set(getattr(arguments, option)) - set(allowed))
        if unknown:
            parser.error(f"--{option}: {', '.join(unknown)} is not one of {', '.join(allowed)}")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    device = arguments.device
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    size = Size(arguments.batch, arguments.sequence, arguments.channels_last)
    rows = []
    for name in arguments.workload:
        for micro_batches in map(int, arguments.micro_batches.split(",")):
            torch.manual_seed(0)
            workload = WORKLOADS[name](size, device)
            run = (arguments.fused, arguments.steps, arguments.warmup, device, arguments.compile)
            outcomes = compare(Plan(workload, micro_batches, *run), arguments.modes, arguments.rounds)
            rows += table_rows(f"{name} x{micro_batches}", outcomes)
    about = {
        "optimizer": f"AdamW, eps {EPS:g}" + (", fused" if arguments.fused else ""),
        "compile": arguments.compile or "no",
        "channels_last": arguments.channels_last,
    }
    columns = len(COLUMNS) if get_allocator(device) is not None else len(COLUMNS) - 1
    print(environment(device, **about), end="\n\n")
    print(format_table(COLUMNS[:columns], [row[:columns] for row in rows], left=2))


if __name__ == "__main__":
    main()
