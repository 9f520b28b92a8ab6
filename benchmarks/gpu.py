"""Time and memory of each level on a GPU, as ratios to torch.autocast; with --all everything else that needs a GPU.

    python benchmarks/gpu.py                 # a small GPT in float16 and bfloat16: at most five minutes
    python benchmarks/gpu.py --all           # also the tests of devices, GPT-2 and ResNet-50: at most an hour
    python benchmarks/gpu.py --only tests,host-bound,memory
    python benchmarks/gpu.py --rehearse      # on the simulated device of the tests, without a GPU

Every stage is a process of its own, with a time limit; what it prints goes into the folder of --out, and a stage that
fails stops no other.
"""

import argparse
import contextlib
import importlib
import multiprocessing
import os
import runpy
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


QUICK = (
    _benchmark(
        "quick-float16",
        150,
        "step --fused --workload gpt-512 --micro-batches 1 --modes autocast-float16,O1,O2 --rounds 5",
    ),
    _benchmark(
        "quick-bfloat16",
        150,
        "step --fused --workload gpt-512 --micro-batches 1 --modes autocast-bfloat16,O4,O5 --rounds 5",
    ),
)
STAGES = (
    *QUICK,
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


SMALLEST = {
    "step": "--sequence 8 --rounds 1 --steps 1 --warmup 1 --modes autocast-bfloat16,O4",  # each is a process
    "memory": "--sequence 8 --modes float32,autocast-bfloat16,O2,O4",
    "list_errors": "--sizes 16 --dtypes bfloat16",
}
SMALLER = {"gpt2": "gpt-64", "resnet50": "resnet-8", "mlp": "mlp-64"}
UNREHEARSED = (
    *("tests", "compiled"),  # `make sim` runs the tests, and nothing compiles for the simulated device
    *("compute-bound-bfloat16", "host-bound-bfloat16"),  # so small, they are what those of float16 are
)


def shrink(stage: Stage) -> Stage:
    """Return a stage as it is rehearsed: on the simulated device, on a small model, for one step."""
    words = [word for argument in stage.arguments for word in argument.split(" ")]
    words = [",".join(SMALLER.get(part, part) for part in word.split(",")) for word in words]
    words = ["sim" if word == "cuda" else word for word in words]
    kind = Path(words[0]).stem
    words += SMALLEST[kind].split()
    if kind != "list_errors":
        micro_batches = words[words.index("--micro-batches") + 1] if "--micro-batches" in words else "1"
        words += ["--batch", micro_batches]
    return Stage(stage.name, tuple(words), stage.seconds)


def rehearse(stage: Stage, folder: Path) -> str:
    """Run one stage in a fork of this process, which has imported torch, and return how it ended, in a word or two."""
    process = multiprocessing.get_context("fork").Process(target=_run_here, args=(shrink(stage), folder))
    process.start()
    process.join()
    return "done" if process.exitcode == 0 else f"failed with {process.exitcode}"


def _run_here(stage: Stage, folder: Path) -> None:
    """Run the script of a stage in this process. Those that it starts are forks, which know the simulated device."""
    script, *options = stage.arguments
    sys.argv, sys.path[0] = [script, *options], str((ROOT / script).parent)
    fork = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda method=None: fork
    with (folder / f"{stage.name}.txt").open("w", encoding="utf-8") as file, contextlib.redirect_stdout(file):
        runpy.run_path(str(ROOT / script), run_name="__main__")


def main() -> None:
    names = [stage.name for stage in STAGES]
    parser = argparse.ArgumentParser(
        description="Compare the levels with torch.autocast on a GPU, and keep the results.",
        epilog="examples: python benchmarks/gpu.py; python benchmarks/gpu.py --all --out results/h100",
    )
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder to write to (default: %(default)s)")
    stages = parser.add_mutually_exclusive_group()
    stages.add_argument(
        "--only",
        default=",".join(stage.name for stage in QUICK),
        help=f"stages, with a comma between, of {', '.join(names)} (default: %(default)s)",
    )
    stages.add_argument("--all", action="store_true", help="run every stage: up to an hour")
    parser.add_argument(
        "--rehearse", action="store_true", help="see that all of it runs: on a simulated device, as small as can be"
    )
    arguments = parser.parse_args()
    chosen = names if arguments.all else arguments.only.split(",")
    unknown = sorted(set(chosen) - set(names))
    if unknown:
        parser.error(f"--only: {', '.join(unknown)} is not one of {', '.join(names)}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.rehearse:
        sys.path.append(str(ROOT / "tests" / "support"))
        for name in ("simdev", "amp_patch.api", "torch._dynamo"):
            importlib.import_module(name)
        chosen = [name for name in chosen if name not in UNREHEARSED]
    elif not torch.cuda.is_available():
        parser.error("torch sees no CUDA device here; --rehearse runs the stages on a simulated device")
    name = "simulated device" if arguments.rehearse else torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}")
    for stage in STAGES:
        if stage.name in chosen:
            started = time.perf_counter()
            end = rehearse(stage, arguments.out) if arguments.rehearse else run(stage, arguments.out)
            print(f"\n==== {stage.name}: {end}, {time.perf_counter() - started:.0f} s", flush=True)
            print(
                (arguments.out / f"{stage.name}.txt").read_text(encoding="utf-8", errors="replace")[-3000:], flush=True
            )
    if not arguments.rehearse:
        print(f'Please send what {arguments.out} holds: see CONTRIBUTING.md, "Send the figures of your GPU".')


if __name__ == "__main__":
    main()
