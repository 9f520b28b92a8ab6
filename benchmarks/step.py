"""Milliseconds of one training step: plain float32, torch.autocast, and every opt_level, with the same optimizer and batch.

    python benchmarks/step.py --workload gpt-256,mlp --micro-batches 1,4 --fused --json step.json

In each round every mode builds the model anew, warms up, and times its steps one by one; the round's value is their median. Ratios
are to the autocast of the mode's own low dtype.
"""

import argparse
import contextlib
import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from timing import Samples, environment, format_table, interleave, synchronize, write_json
from torch import nn
from workloads import WORKLOADS, Workload

import amp_patch as amp

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
AUTOCAST = {"autocast-float16": torch.float16, "autocast-bfloat16": torch.bfloat16}
MODES = ("float32", *AUTOCAST, *LEVELS)


@dataclass(frozen=True, slots=True)
class Plan:
    """One measurement: what to train, how to split the batch, and how often."""

    workload: Workload
    micro_batches: int
    fused: bool
    steps: int
    warmup: int
    device: torch.device

    def rows(self) -> list[slice]:
        """The rows of each micro-batch."""
        size = len(self.workload.inputs) // self.micro_batches
        return [slice(start, start + size) for start in range(0, size * self.micro_batches, size)]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A mode's milliseconds per step for each round, and its loss after the last step of the last round."""

    samples: Samples
    loss: float


def plain_step(plan: Plan, model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], torch.Tensor]:
    """A float32 step without any mixed precision."""

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        for rows in plan.rows():
            loss = plan.workload.loss(model, rows)
            (loss / plan.micro_batches).backward()
        optimizer.step()
        return loss

    return step


def autocast_step(dtype: torch.dtype, plan: Plan, model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], torch.Tensor]:
    """A step under torch.autocast, with a GradScaler for float16 and without one for bfloat16."""
    scaler = torch.amp.GradScaler(plan.device.type, enabled=dtype == torch.float16)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        for rows in plan.rows():
            with torch.autocast(plan.device.type, dtype=dtype):
                loss = plan.workload.loss(model, rows)
            scaler.scale(loss / plan.micro_batches).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    return step


def amp_step(level: str, plan: Plan, model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], torch.Tensor]:
    """A step under an opt_level; only the last micro-batch unscales."""
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        for number, rows in enumerate(plan.rows(), start=1):
            loss = plan.workload.loss(model, rows)
            with amp.scale_loss(loss / plan.micro_batches, optimizer, delay_unscale=number < plan.micro_batches) as scaled_loss:
                scaled_loss.backward()
        optimizer.step()
        return loss

    return step


def step_maker(mode: str) -> Callable[[Plan, nn.Module, torch.optim.Optimizer], Callable[[], torch.Tensor]]:
    """The function that prepares a step of this mode."""
    if mode == "float32":
        return plain_step
    return functools.partial(autocast_step, AUTOCAST[mode]) if mode in AUTOCAST else functools.partial(amp_step, mode)


def time_round(mode: str, plan: Plan) -> tuple[float, float, torch.dtype | None]:
    """Build, warm up and time one mode: the median milliseconds of a step, the last loss, the level's low dtype; leaves no session open."""
    torch.manual_seed(0)
    model = plan.workload.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=plan.fused)
    with contextlib.ExitStack() as stack:
        if mode in LEVELS:
            stack.callback(amp.reset)
        step = step_maker(mode)(plan, model, optimizer)
        milliseconds = []
        for number in range(plan.warmup + plan.steps):
            synchronize(plan.device)
            started = time.perf_counter()
            loss = step()
            synchronize(plan.device)
            if number >= plan.warmup:
                milliseconds.append(1e3 * (time.perf_counter() - started))
        low = amp.stats().low_dtype if mode in LEVELS else AUTOCAST.get(mode)
    return statistics.median(milliseconds), float(loss.detach()), low


def compare(plan: Plan, modes: list[str], rounds: int) -> tuple[dict[str, Outcome], dict[str, str]]:
    """Every mode's outcome, and for each mode the autocast mode to compare it with."""
    last_loss: dict[str, float] = {}
    low_dtypes: dict[str, torch.dtype | None] = {}

    def measure(mode: str) -> float:
        milliseconds, last_loss[mode], low_dtypes[mode] = time_round(mode, plan)
        return milliseconds

    samples = interleave({mode: functools.partial(measure, mode) for mode in modes}, rounds)
    names = {dtype: name for name, dtype in AUTOCAST.items() if name in modes}
    references = {mode: names.get(low_dtypes[mode], next(iter(names.values()), "")) for mode in modes}
    return {mode: Outcome(samples[mode], last_loss[mode]) for mode in modes}, references


def table_rows(title: str, outcomes: dict[str, Outcome], references: dict[str, str]) -> list[list[str]]:
    """One row for each mode, in the order given."""
    rows = []
    for mode, outcome in outcomes.items():
        against = outcomes.get(references[mode])
        ratio = f"{outcome.samples.ratio(against.samples):.3f}" if against else "-"
        spread = f"+-{outcome.samples.spread:.1%}"
        rows.append([title, mode, f"{outcome.samples.median:.2f}", spread, ratio, references[mode] if against else "-", f"{outcome.loss:.4f}"])
    return rows


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Milliseconds of a training step: float32, torch.autocast, every opt_level.")
    parser.add_argument("--workload", default="gpt-64,gpt-256,mlp,resnet", help=f"of {', '.join(WORKLOADS)}; default: %(default)s")
    parser.add_argument("--modes", help=f"of {', '.join(MODES)}; default: all, but no float16 on the CPU, where it is some 50 times slower")
    parser.add_argument("--micro-batches", default="1,4", help="into how many parts each batch is split (default: %(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    parser.add_argument("--batch", type=int, help="rows of a step (default: 8 on the CPU, 32 elsewhere; the mlp takes 16 times as many)")
    parser.add_argument("--sequence", type=int, help="tokens of a row (default: 64 on the CPU, 256 elsewhere)")
    parser.add_argument("--fused", action="store_true", help="fused AdamW, in every mode")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved repeats (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="steps timed in a round (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=5, help="steps before the clock starts (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="torch threads (default: torch's)")
    parser.add_argument("--json", type=Path, help="write every sample into this file")
    arguments = parser.parse_args()
    for option, allowed in (("workload", tuple(WORKLOADS)), ("modes", MODES)):
        unknown = sorted(set((getattr(arguments, option) or "").split(",")) - {"", *allowed})
        if unknown:
            parser.error(f"--{option}: {', '.join(unknown)} is not one of {', '.join(allowed)}")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    device = torch.device(arguments.device)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    on_cpu = device.type == "cpu"
    modes = arguments.modes.split(",") if arguments.modes else [mode for mode in MODES if not (on_cpu and mode == "autocast-float16")]
    rows, report = [], {}
    for name in arguments.workload.split(","):
        for micro_batches in map(int, arguments.micro_batches.split(",")):
            torch.manual_seed(0)
            batch, sequence = arguments.batch or (8 if on_cpu else 32), arguments.sequence or (64 if on_cpu else 256)
            workload = WORKLOADS[name](batch, sequence, device)
            plan = Plan(workload, micro_batches, arguments.fused, arguments.steps, arguments.warmup, device)
            outcomes, references = compare(plan, modes, arguments.rounds)
            title = f"{name} x{micro_batches}"
            rows += table_rows(title, outcomes, references)
            report[title] = {mode: {"ms": outcome.samples.values, "loss": outcome.loss} for mode, outcome in outcomes.items()}
    machine = {**environment(device), "optimizer": "AdamW, fused" if arguments.fused else "AdamW"}
    print(", ".join(f"{key} {value}" for key, value in machine.items()), end="\n\n")
    print(format_table(("workload", "mode", "ms/step", "spread", "ratio", "to", "loss"), rows, left=2))
    write_json(arguments.json, {"environment": machine, "workloads": report})


if __name__ == "__main__":
    main()
