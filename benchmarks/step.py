"""Milliseconds of one training step: plain float32, torch.autocast, a 16-bit model, and every opt_level, with the same
optimizer and batch.

    python benchmarks/step.py --workload gpt-256,mlp --micro-batches 1,4 --fused --json step.json --plot step.png

In each round every mode builds the model anew, warms up, and times its steps one by one; the round's value is their
median. Ratios
are to the autocast of the mode's own low dtype.
"""

import argparse
import functools
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from modes import AUTOCAST, MODES, default_modes, get_level, prepared
from plots import Bar, add_option, save_bars
from timing import Samples, environment, format_table, interleave, synchronize, write_json
from torch import nn
from workloads import WORKLOADS, Size, Workload

from amp_patch.config.op_lists import load_oplists
from amp_patch.errors import AmpError

BYTES_PER_PARAMETER = 38
"""What a step with float32 weights cannot but move for each parameter: AdamW reads weight, gradient and two moments and
writes three of them (28), backward writes the gradient (4), and 16-bit copies are written once and read by forward and
backward (6). Activations come on top.
"""

COLUMNS = ("workload", "mode", "ms/step", "spread", "ratio", "to", "loss", "peak MB")
OVERLAID = ("O1", "O4")


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
    overlays: dict[str, list[str]]


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
        return torch.optim.AdamW(model.parameters(), lr=3e-4, fused=plan.fused)

    torch.manual_seed(0)
    losses = plan.workload.micro_batches(plan.micro_batches)
    milliseconds = []
    build = plan.workload.build
    with prepared(
        mode, build, make_optimizer, plan.device, compile_mode=plan.compile_mode, overlays=plan.overlays
    ) as trainer:
        for number in range(plan.warmup + plan.steps):
            if number == plan.warmup and plan.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(plan.device)
            synchronize(plan.device)
            started = time.perf_counter()
            loss = trainer.step(losses)
            synchronize(plan.device)
            if number >= plan.warmup:
                milliseconds.append(1e3 * (time.perf_counter() - started))
        peak = torch.cuda.max_memory_allocated(plan.device) if plan.device.type == "cuda" else None
        return Round(statistics.median(milliseconds), float(loss.detach()), trainer.low, peak)


def compare(plan: Plan, modes: list[str], rounds: int) -> tuple[dict[str, Outcome], dict[str, str]]:
    """Every mode's outcome, and for each mode the autocast mode to compare it with."""
    last: dict[str, Round] = {}

    def measure(mode: str) -> float:
        last[mode] = time_round(mode, plan)
        return last[mode].milliseconds

    samples = interleave({mode: functools.partial(measure, mode) for mode in modes}, rounds)
    names = {dtype: name for name, dtype in AUTOCAST.items() if name in modes}
    references = {mode: names.get(last[mode].low, next(iter(names.values()), "")) for mode in modes}
    return {mode: Outcome(samples[mode], last[mode]) for mode in modes}, references


def measure_bandwidth(device: torch.device, rounds: int = 7) -> float:
    """Bytes a second, read and written together, of a copy that fits no cache."""
    source = torch.empty(2**28 if device.type == "cuda" else 2**25)
    source = source.to(device)
    target = torch.zeros_like(source)
    seconds = []
    for _ in range(rounds):
        synchronize(device)
        started = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    return 2 * source.numel() * source.element_size() / statistics.median(seconds)


def floor_row(title: str, workload: Workload, bandwidth: float, outcomes: dict[str, Outcome]) -> list[str]:
    """The time of the bytes that every step must move, against the first autocast mode."""
    parameters = sum(parameter.numel() for parameter in workload.build().parameters())
    milliseconds = 1e3 * BYTES_PER_PARAMETER * parameters / bandwidth
    name = next((mode for mode in AUTOCAST if mode in outcomes), None)
    ratio = "-" if name is None else f"{milliseconds / outcomes[name].samples.median:.3f}"
    return [title, "floor: bytes", f"{milliseconds:.2f}", "", ratio, name or "-", "", ""]


def table_rows(title: str, outcomes: dict[str, Outcome], references: dict[str, str]) -> list[list[str]]:
    """One row for each mode, in the order given."""
    rows = []
    for mode, outcome in outcomes.items():
        against = outcomes.get(references[mode])
        ratio = f"{outcome.samples.ratio(against.samples):.3f}" if against else "-"
        spread = f"+-{outcome.samples.spread:.1%}"
        peak = "-" if outcome.last.peak_bytes is None else f"{outcome.last.peak_bytes / 1e6:.0f}"
        to = references[mode] if against else "-"
        rows.append([title, mode, f"{outcome.samples.median:.2f}", spread, ratio, to, f"{outcome.last.loss:.4f}", peak])
    return rows


def bars(outcomes: dict[str, Outcome], references: dict[str, str]) -> list[Bar]:
    """The same as a picture's bars."""
    made = []
    for mode, outcome in outcomes.items():
        samples, against = outcome.samples, outcomes.get(references[mode])
        note = f"{samples.median:.2f} ms" + (
            f", x{samples.ratio(against.samples):.2f}" if against and against is not outcome else ""
        )
        made.append(
            Bar(mode, samples.median, samples.spread * samples.median, note, is_ours=get_level(mode) is not None)
        )
    return made


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Milliseconds of a training step: float32, torch.autocast, a 16-bit model, every opt_level."
    )
    parser.add_argument(
        "--workload", default="gpt-64,gpt-256,mlp,resnet", help=f"of {', '.join(WORKLOADS)}; default: %(default)s"
    )
    parser.add_argument(
        "--modes",
        help=f"of {', '.join(MODES)}; default: all, but no float16 by torch on the CPU, where it is slow",
    )
    parser.add_argument(
        "--lists",
        action="append",
        default=[],
        metavar="LIST[,LIST]",
        help="op lists: adds modes O1+LIST and O4+LIST (the last)",
    )
    parser.add_argument(
        "--micro-batches", default="1,4", help="into how many parts each batch is split (default: %(default)s)"
    )
    parser.add_argument(
        "--compile",
        nargs="?",
        const="default",
        metavar="MODE",
        help="torch.compile every model, in this mode of it (default)",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    parser.add_argument(
        "--batch", type=int, help="rows of a step; default: the workload's, which README.md lists with its other sizes"
    )
    parser.add_argument("--sequence", type=int, help="tokens of a row")
    parser.add_argument("--image", type=int, help="pixels of a side")
    parser.add_argument("--channels-last", action="store_true", help="images and convolutions in torch.channels_last")
    parser.add_argument("--fused", action="store_true", help="fused AdamW, in every mode")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved repeats (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="steps timed in a round (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=5, help="steps before the clock starts (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="torch threads (default: torch's)")
    parser.add_argument("--json", type=Path, help="write every sample into this file")
    add_option(parser)
    arguments = parser.parse_args()
    arguments.overlays = {lists.split(",")[-1]: lists.split(",") for lists in arguments.lists}
    for lists in arguments.overlays.values():
        try:
            load_oplists(lists)
        except AmpError as error:
            parser.error(f"--lists: {error}")
    overlaid = tuple(f"{level}+{overlay}" for overlay in arguments.overlays for level in OVERLAID)
    device = torch.device(arguments.device)
    arguments.modes = arguments.modes.split(",") if arguments.modes else [*default_modes(device), *overlaid]
    for option, given, allowed in (
        ("workload", arguments.workload.split(","), tuple(WORKLOADS)),
        ("modes", arguments.modes, (*MODES, *overlaid)),
    ):
        unknown = sorted(set(given) - set(allowed))
        if unknown:
            parser.error(f"--{option}: {', '.join(unknown)} is not one of {', '.join(allowed)}")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    device = torch.device(arguments.device)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    size = Size(arguments.batch, arguments.sequence, arguments.image, arguments.channels_last)
    rows, report, panels = [], {}, {}
    bandwidth = measure_bandwidth(device)
    for name in arguments.workload.split(","):
        for micro_batches in map(int, arguments.micro_batches.split(",")):
            torch.manual_seed(0)
            workload = WORKLOADS[name](size, device)
            run = (arguments.fused, arguments.steps, arguments.warmup, device, arguments.compile, arguments.overlays)
            outcomes, references = compare(Plan(workload, micro_batches, *run), arguments.modes, arguments.rounds)
            title = f"{name} x{micro_batches}"
            rows += [*table_rows(title, outcomes, references), floor_row(title, workload, bandwidth, outcomes)]
            panels[f"{title}, batch {tuple(workload.inputs.shape)}"] = bars(outcomes, references)
            report[title] = {
                "batch": list(workload.inputs.shape),
                "modes": {
                    m: {"ms": o.samples.values, "loss": o.last.loss, "peak_bytes": o.last.peak_bytes}
                    for m, o in outcomes.items()
                },
            }
    machine = {**environment(device), "optimizer": "AdamW, fused" if arguments.fused else "AdamW"}
    machine |= {
        "compile": arguments.compile or "no",
        "channels_last": arguments.channels_last,
        "GB/s": round(bandwidth / 1e9),
    }
    columns = len(COLUMNS) if device.type == "cuda" else len(COLUMNS) - 1
    print(", ".join(f"{key} {value}" for key, value in machine.items()), end="\n\n")
    print(format_table(COLUMNS[:columns], [row[:columns] for row in rows], left=2))
    write_json(arguments.json, {"environment": machine, "workloads": report})
    save_bars(arguments.plot, "One training step; x: times the autocast of the same low dtype", "milliseconds", panels)


if __name__ == "__main__":
    main()
