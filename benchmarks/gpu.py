"""All that needs a GPU, in one go: the tests of devices, then the time and memory benchmarks at the sizes of GPUs.

    python benchmarks/gpu.py --out results            # about 20 minutes on an H200
    python benchmarks/gpu.py --out results --only tests,host-bound,memory

Every stage is a process of its own, with a time limit; what it prints goes into the folder, and a stage that fails
stops no other.
"""

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Stage:
    """A command, its arguments, and the seconds it may take."""

    name: str
    arguments: tuple[str, ...]
    seconds: int


FLOAT16 = "--modes float32,autocast-float16,pure-float16,O1,O1+fast,O2,O3"
BFLOAT16 = "--modes autocast-bfloat16,pure-bfloat16,O4,O4+fast,O5"
SMALL = "--workload gpt2 --batch 1 --sequence 128"


def _benchmark(name: str, seconds: int, command: str) -> Stage:
    script, *options = command.split()
    return Stage(name, (f"benchmarks/{script}.py", *options, "--device", "cuda"), seconds)


STAGES = (
    Stage("tests", ("-m", "pytest", "tests/devices", "-p", "no:cacheprovider", "-rf"), 420),
    _benchmark("compute-bound", 240, f"step --fused --workload gpt2 --micro-batches 1 {FLOAT16} --steps 8"),
    _benchmark("host-bound", 240, f"step --fused {SMALL} --micro-batches 1 {FLOAT16} --rounds 7"),
    _benchmark(
        "micro-batches",
        240,
        f"step --fused --workload gpt2 --batch 8 --sequence 128 --micro-batches 8 {FLOAT16} --steps 8",
    ),
    _benchmark(
        "resnet50", 240, f"step --fused --workload resnet50 --channels-last --micro-batches 1 {FLOAT16} --steps 10"
    ),
    _benchmark("memory", 180, "memory --workload gpt2,resnet50,mlp"),
    _benchmark("compute-bound-bfloat16", 240, f"step --fused --workload gpt2 --micro-batches 1 {BFLOAT16} --steps 8"),
    _benchmark("host-bound-bfloat16", 240, f"step --fused {SMALL} --micro-batches 1 {BFLOAT16}"),
    _benchmark(
        "compiled",
        480,
        "step --fused --workload gpt2 --micro-batches 1 --modes autocast-float16,O1,O2 --rounds 3 --steps 10 --compile",
    ),
    Stage("list-errors", ("tools/list_errors.py", "--device", "cuda"), 240),
)


def run(stage: Stage, folder: Path) -> str:
    """Run one stage and return how it ended, in a word or two."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    log = folder / f"{stage.name}.txt"
    with log.open("w", encoding="utf-8") as file:
        try:
            done = subprocess.run(
                [sys.executable, *stage.arguments],
                cwd=ROOT,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=stage.seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"stopped after {stage.seconds} s"
    return "done" if done.returncode == 0 else f"failed with {done.returncode}"


def main() -> None:
    names = [stage.name for stage in STAGES]
    parser = argparse.ArgumentParser(description="Run everything that needs a GPU and keep the results.")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results; made if need be")
    parser.add_argument("--only", default=",".join(names), help=f"stages, with a comma between, of {', '.join(names)}")
    arguments = parser.parse_args()
    chosen = arguments.only.split(",")
    unknown = sorted(set(chosen) - set(names))
    if unknown:
        parser.error(f"--only: {', '.join(unknown)} is not one of {', '.join(names)}")
    if not torch.cuda.is_available():
        parser.error("torch sees no CUDA device here")
    arguments.out.mkdir(parents=True, exist_ok=True)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for stage in STAGES:
        if stage.name in chosen:
            started = time.perf_counter()
            end = run(stage, arguments.out)
            print(f"\n==== {stage.name}: {end}, {time.perf_counter() - started:.0f} s", flush=True)
            print(
                (arguments.out / f"{stage.name}.txt").read_text(encoding="utf-8", errors="replace")[-3000:], flush=True
            )


if __name__ == "__main__":
    main()
