"""The time and the peak memory of a training step in every mode, as ratios to torch.autocast in the same low dtype,
with the same optimizer and batch.

    python benchmarks/step.py --workload gpt-256,mlp --micro-batches 1,4 --fused

Every mode is trained by a process of its own. The processes take turns, each round in another order, so that a slow
minute of the machine falls on all of them; a round's value is the median of a few steps. On a CPU the time is the CPU
time of the process, to which others that run on the machine add little; on an accelerator it is that of a clock.

On a CPU two processes of one mode differ by up to a tenth, by where their memory lies. `--processes 5` trains every
mode by five processes, one after the other: do so before you believe a few percent.
"""

import argparse
import math
import multiprocessing
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
from memory import measure
from timing import Samples, environment, format_table, interleave, synchronize
from torch import nn
from training import AUTOCAST, WORKLOADS, Size, add_options, parse_options, prepared

EPS = 1e-4  # AdamW's 1e-8 is 0 in float16, in which O3 keeps the optimizer's states: its steps would divide by 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """A mode's milliseconds per step for each round, its last loss, its low dtype, and a step's bytes at the peak."""

    samples: Samples
    loss: float
    low: torch.dtype | None
    peak: int


def train(mode: str, name: str, micro_batches: int, options: argparse.Namespace, pipe: Connection) -> None:
    """Warm up a mode of a workload, time a few steps whenever the pipe asks for them, and measure its memory at the
    end.
    """
    if options.threads:
        torch.set_num_threads(options.threads)
    read_clock = time.process_time if options.clock == "cpu" else time.perf_counter
    device = options.device

    def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=3e-4, eps=EPS, fused=options.fused)

    torch.manual_seed(0)
    workload = WORKLOADS[name](Size(options.batch, options.sequence, options.channels_last), device)
    losses = workload.micro_batches(micro_batches)
    with prepared(mode, workload.build, make_optimizer, device, options.compile) as trainer:
        for _ in range(options.warmup):
            trainer.step(losses)
        pipe.send(trainer.low)
        while pipe.recv():
            milliseconds = []
            for _ in range(options.steps):
                synchronize(device)
                started = read_clock()
                loss = trainer.step(losses)
                synchronize(device)
                milliseconds.append(1e3 * (read_clock() - started))
            pipe.send((statistics.median(milliseconds), float(loss.detach())))
    # not before: what malloc has kept from it would change the times
    pipe.send(measure(mode, workload, device, options.fused, micro_batches).peak)


class Worker:
    """The process of one mode."""

    def __init__(self, mode: str, name: str, micro_batches: int, options: argparse.Namespace) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=train, args=(mode, name, micro_batches, options, other), daemon=True)
        self._process.start()
        other.close()
        self.low = self._pipe.recv()
        self.loss = math.nan

    def take_turn(self) -> float:
        """Return the milliseconds of a step."""
        self._pipe.send(True)
        milliseconds: float
        milliseconds, self.loss = self._pipe.recv()
        return milliseconds

    def close(self) -> int:
        """End the process, and return the bytes of a step at its peak."""
        self._pipe.send(False)
        peak: int = self._pipe.recv()
        self._process.join()
        return peak


def compare(name: str, micro_batches: int, options: argparse.Namespace) -> dict[str, Outcome]:
    """Return every mode's outcome; the modes take turns, `options.rounds` of them with each of their processes."""
    values: dict[str, tuple[float, ...]] = dict.fromkeys(options.modes, ())
    outcomes = {}
    for seed in range(options.processes):
        workers = {mode: Worker(mode, name, micro_batches, options) for mode in options.modes}
        samples = interleave({mode: worker.take_turn for mode, worker in workers.items()}, options.rounds, seed)
        for mode, worker in workers.items():
            values[mode] += samples[mode].values
            outcomes[mode] = Outcome(Samples(values[mode]), worker.loss, worker.low, worker.close())
    return outcomes


def make_row(title: str, outcomes: Mapping[str, Outcome]) -> dict[str, str]:
    """Return the cells of one workload by column: the milliseconds of autocast, ratios of time, ratios of memory."""
    autocast = {dtype: mode for mode, dtype in AUTOCAST.items() if mode in outcomes}
    first = next(iter(autocast.values()), next(iter(outcomes)))
    samples = outcomes[first].samples
    row = {"workload": title, f"{first}, ms": f"{samples.median:.2f} ± {samples.spread:.1%}"}
    for mode, outcome in outcomes.items():
        reference = outcomes[autocast.get(outcome.low, first)] if outcome.low else outcomes[first]
        if outcome is reference:
            continue
        pairs = zip(outcome.samples.values, reference.samples.values, strict=True)
        ratios = Samples(tuple(mine / theirs for mine, theirs in pairs))
        row[mode] = f"{ratios.median:.3f} ± {ratios.spread * ratios.median:.2f}"
        row[f"peak {mode}"] = f"{outcome.peak / reference.peak:.3f}"
        if not math.isfinite(outcome.loss):
            row[mode] += " (diverged)"
    return row


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Time and peak memory of a training step, as ratios to torch.autocast: every opt_level, float32, a"
        " 16-bit model, and levels with compute='native'."
    )
    add_options(parser, workloads="gpt-64,gpt-256,mlp,resnet")
    parser.add_argument(
        "--micro-batches", default="1,4", help="into how many parts each batch is split (default: %(default)s)"
    )
    parser.add_argument("--compile", nargs="?", const="default", metavar="MODE", help="torch.compile every model")
    parser.add_argument("--clock", choices=("cpu", "wall"), help="default: cpu on the CPU, wall on an accelerator")
    parser.add_argument("--channels-last", action="store_true", help="images and convolutions in torch.channels_last")
    parser.add_argument("--processes", type=int, default=1, help="of each mode, one after the other (default: 1)")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each process (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=8, help="steps timed in a round (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=5, help="steps before the clock starts (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="torch threads (default: torch's)")
    arguments = parse_options(parser)
    arguments.clock = arguments.clock or ("cpu" if arguments.device.type == "cpu" else "wall")
    return arguments


def main() -> None:
    options = parse_arguments()
    rows = []
    for name in options.workload:
        for micro_batches in map(int, options.micro_batches.split(",")):
            outcomes = compare(name, micro_batches, options)
            rows.append(make_row(f"{name} x{micro_batches}", outcomes))
    if options.threads:
        torch.set_num_threads(options.threads)
    about = {
        "clock": options.clock,
        "optimizer": f"AdamW, eps {EPS:g}" + (", fused" if options.fused else ""),
        "compile": options.compile or "no",
        "channels_last": options.channels_last,
    }
    print(environment(options.device, **about), end="\n\n")
    times = [column for column in rows[0] if not column.startswith("peak ")]
    columns = [*times, *(column for column in rows[0] if column not in times)]
    print(format_table(columns, [[row.get(column, "-") for column in columns] for row in rows], left=1))


if __name__ == "__main__":
    main()
