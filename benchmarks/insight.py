"""What looking costs: CPU seconds of a training step that is recorded, or looked through for faults, over those of a
plain one.

    python benchmarks/insight.py --workload gpt-64,gpt-512 --level O4 --rounds 7 --json insight.json

A plain step, one of `insight.recording()`, one of `insight.trace` and one of `insight.trace(underflow=...)` take turns
within one session.
"""

import argparse
import contextlib
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from modes import prepared
from timing import environment, format_table, interleave, write_json
from workloads import WORKLOADS, Size, Workload

from amp_patch import insight
from amp_patch.insight.tracer import tracing

COLUMNS = ("workload", "level", "plain ms", "explain", "trace", "trace --underflow")


def measure(workload: Workload, level: str, rounds: int, steps: int) -> dict[str, Any]:
    """Return for each way the samples of CPU milliseconds of a step."""

    def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-4)

    with prepared(level, workload.build, make_optimizer, torch.device("cpu")) as trainer:

        def step() -> None:
            trainer.step(workload.micro_batches(1))

        def timed(block: Callable[[], contextlib.AbstractContextManager[Any]]) -> float:
            with block():
                started = time.process_time()
                for _ in range(steps):
                    step()
                return 1e3 * (time.process_time() - started) / steps

        ways: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
            "plain": contextlib.nullcontext,
            "explain": insight.recording,
            "trace": tracing,
            "underflow": lambda: tracing(underflow=0.999999),
        }
        for block in ways.values():
            timed(block)
        return interleave({name: functools.partial(timed, block) for name, block in ways.items()}, rounds)


def main() -> None:
    """Print a row for each workload."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--workload", default="gpt-64,gpt-512", help=f"of {', '.join(WORKLOADS)}; default: %(default)s")
    parser.add_argument("--level", default="O4", help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=7, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=3, help="in each round; default: %(default)s")
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows, report = [], {}
    for name in arguments.workload.split(","):
        torch.manual_seed(0)
        workload = WORKLOADS[name](Size(), torch.device("cpu"))
        samples = measure(workload, arguments.level, arguments.rounds, arguments.steps)
        plain = samples["plain"]
        ratios = {way: taken.ratio(plain) for way, taken in samples.items() if way != "plain"}
        rows.append((name, arguments.level, f"{plain.median:.1f}", *(f"x{ratio:.2f}" for ratio in ratios.values())))
        report[name] = {way: taken.values for way, taken in samples.items()}
    print(format_table(COLUMNS, rows))
    write_json(arguments.json, {**environment(torch.device("cpu")), "milliseconds": report})


if __name__ == "__main__":
    main()
