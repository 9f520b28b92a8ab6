"""Collectives, their bytes and the milliseconds of a training step on two ranks: plain torch, autocast with its
scalers, and every opt_level, under DistributedDataParallel, fully_shard, FullyShardedDataParallel and tensor
parallelism.

    python benchmarks/distributed.py --setting ddp,fsdp2 --rounds 5

Collectives are counted, where torch dispatches them, in one step after the warm-up: exact, and the same in every run.
Bytes are those of the whole tensor: what an all_gather gathers, what a reduce_scatter is given. Times are of rank 0,
from a barrier to the end of the step; ratios to autocast in the mode's own low dtype, with GradScaler for float16
(ShardedGradScaler under FullyShardedDataParallel).
"""

import argparse
import contextlib
import functools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from timing import Samples, environment, format_table, interleave
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from training import AUTOCAST, LEVELS, WORKLOADS, Size, Trainer, Workload, prepared

import amp_patch as amp

WORLD_SIZE = 2
CPU = torch.device("cpu")
SCALED = ("float32", "autocast-float16", "O1", "O2", "autocast-bfloat16", "O4", "O5")
UNSHARDED = tuple(mode for mode in SCALED if mode not in ("O2", "O5"))
SETTINGS = {"ddp": SCALED, "fsdp2": SCALED, "fsdp1": UNSHARDED, "tp": UNSHARDED}
COLUMNS = ("setting", "mode", "collectives", "KiB", "of flags", "ms/step", "spread", "ratio", "to")
REFERENCES = dict.fromkeys(("O1", "O2"), "autocast-float16") | dict.fromkeys(("O4", "O5"), "autocast-bfloat16")
FLAGS = 64  # bytes: whatever is smaller tells others of an overflow

Sent = list[tuple[str, int]]  # the collectives of one step, each with its bytes


class Counter(TorchDispatchMode):
    """Notes every collective and the bytes of the largest of its tensor arguments together."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Sent = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it does with its shards comes here next
        result = func(*args, **(kwargs or {}))
        namespace, _, name = func.name().partition("::")
        if namespace in ("c10d", "_c10d_functional") and not name.startswith(("wait", "barrier")):
            sides = [args[0], result] if namespace == "_c10d_functional" else list(args)
            sizes = [sum(one.nbytes for one in pytree.tree_leaves(side) if isinstance(one, Tensor)) for side in sides]
            self.seen.append((name.rstrip("_"), max(sizes)))
        return result


@contextlib.contextmanager
def distributed(setting: str, mode: str, workload: Workload) -> Iterator[Trainer]:
    """A trainer whose model is replicated or sharded as `setting` says."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        model = workload.build()
        if setting == "fsdp2":
            mesh = init_device_mesh("cpu", (WORLD_SIZE,))
            for module in (*(one for one in model.children() if list(one.parameters())), model):
                options = {"mp_policy": amp.fsdp_policy(mode, module)} if mode in LEVELS else {}
                fully_shard(module, mesh=mesh, **options)
        if setting == "fsdp1":
            return FullyShardedDataParallel(model, device_id=CPU, use_orig_params=True)
        if setting == "tp":
            layers = [name for name, module in model.named_children() if isinstance(module, nn.Linear)]
            plan = {name: ColwiseParallel() if i % 2 == 0 else RowwiseParallel() for i, name in enumerate(layers)}
            if len(layers) % 2:  # GradScaler cannot do with plain gradients beside sharded ones
                plan[layers[-1]] = ColwiseParallel(output_layouts=Replicate())
            parallelize_module(model, init_device_mesh("cpu", (WORLD_SIZE,)), plan)
        return model

    def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=3e-4, foreach=False if setting == "tp" else None)

    with prepared(mode, build, make_optimizer, CPU) as trainer:
        if setting == "ddp":
            trainer.run = DistributedDataParallel(trainer.model)
        if setting == "fsdp1" and mode == "autocast-float16":
            trainer._scaler = ShardedGradScaler(device="cpu")  # type: ignore[attr-defined]
        yield trainer


def run_round(setting: str, mode: str, workload: Workload, steps: int, warmup: int) -> tuple[float, Sent]:
    """Build, warm up, time and count one mode on this rank: the median milliseconds of a step, and what one sends."""
    losses, milliseconds = workload.micro_batches(1), []
    with distributed(setting, mode, workload) as trainer:
        for number in range(warmup + steps):
            dist.barrier()
            started = time.perf_counter()
            trainer.step(losses)
            if number >= warmup:
                milliseconds.append(1e3 * (time.perf_counter() - started))
        with Counter() as counter:
            trainer.step(losses)
    return statistics.median(milliseconds), counter.seen


def compare(
    setting: str, modes: list[str], workload: Workload, arguments: argparse.Namespace
) -> tuple[dict[str, Samples], dict[str, Sent]]:
    """Every mode's milliseconds by round, and what a step sends."""
    sent: dict[str, Sent] = {}

    def measure(mode: str) -> float:
        milliseconds, sent[mode] = run_round(setting, mode, workload, arguments.steps, arguments.warmup)
        return milliseconds

    candidates: dict[str, Callable[[], float]] = {mode: functools.partial(measure, mode) for mode in modes}
    return interleave(candidates, arguments.rounds), sent


def table_rows(setting: str, samples: dict[str, Samples], sent: dict[str, Sent]) -> list[list[str]]:
    rows = []
    for mode, sample in samples.items():
        sizes, reference = [size for _, size in sent[mode]], REFERENCES.get(mode)
        against = samples.get(reference or "")
        ratio = [f"{sample.ratio(against):.3f}", reference or ""] if against else ["-", "-"]
        flags = sum(size <= FLAGS for size in sizes)
        counts = [str(len(sizes)), f"{sum(sizes) / 1024:.1f}", str(flags)]
        rows.append([setting, mode, *counts, f"{sample.median:.2f}", f"+-{sample.spread:.1%}", *ratio])
    return rows


def serve(rank: int, store: str, arguments: argparse.Namespace) -> None:
    """Measure on one rank; rank 0 prints."""
    torch.set_num_threads(arguments.threads)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD_SIZE)
    torch.manual_seed(rank)
    rows = []
    for setting in arguments.setting.split(","):
        workload = WORKLOADS["mlp" if setting == "tp" else arguments.workload](Size(), CPU)
        modes = [mode for mode in SETTINGS[setting] if arguments.modes is None or mode in arguments.modes.split(",")]
        rows += table_rows(setting, *compare(setting, modes, workload, arguments))
    if rank == 0:
        print(environment(CPU, ranks=WORLD_SIZE), end="\n\n")
        print(format_table(COLUMNS, rows, left=2))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description="Collectives, bytes and time of a step on two ranks.")
    parser.add_argument("--setting", default=",".join(SETTINGS), help="of %(default)s")
    parser.add_argument("--modes", help=f"of {', '.join(('float32', *AUTOCAST, 'O1', 'O2', 'O4', 'O5'))}; default: all")
    parser.add_argument("--workload", default="mlp", help=f"of {', '.join(WORKLOADS)}; tp is always mlp")
    parser.add_argument("--steps", type=int, default=10, help="timed in each round (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of each rank (default: %(default)s)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(serve, (os.path.join(folder, "store"), arguments), nprocs=WORLD_SIZE)


if __name__ == "__main__":
    main()
