"""Processes joined by gloo, which run functions of the tests and give back what they return; and what those share."""

import contextlib
import pickle
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import amp_patch as amp

RUNS_FSDP2 = not torch.__version__.startswith("2.6.")
needs_fsdp2 = pytest.mark.skipif(not RUNS_FSDP2, reason="fully_shard of torch 2.6 does not run on a CPU")
PRELOADED = ["torch.distributed.optim", "torch.distributed.checkpoint.state_dict", "torch_state"]  # all slow to import
PATIENCE = 120  # seconds; a function takes milliseconds


def batch(rank: int, step: int) -> torch.Tensor:
    """Four rows of six numbers, for each rank and step others."""
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def full(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of all of a tensor, which may be in shards."""
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


def weights_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Copies of what an optimizer steps on."""
    return [full(parameter) for parameter in amp.master_params(optimizer)]


@contextlib.contextmanager
def noting_reductions(sizes: list[int]) -> Iterator[None]:
    """Enter the size of each tensor that the block has reduced, but by DDP's own reducer."""
    original = dist.all_reduce
    dist.all_reduce = lambda *args, **kwargs: sizes.append(args[0].numel()) or original(*args, **kwargs)
    try:
        yield
    finally:
        dist.all_reduce = original


def serve(rank: int, world_size: int, store: str, connection: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    while True:
        function, args = pickle.loads(connection.recv_bytes())
        try:
            torch.manual_seed(0)
            answer = (function(rank, *args), None)
        except BaseException:
            answer = (None, traceback.format_exc())
        connection.send_bytes(pickle.dumps(answer))


class Ranks:
    """Call it with a function of a test module, which gets the rank and the arguments; returns the list of results, by
    rank.
    """

    def __init__(self, folder: Path, world_size: int = 2) -> None:
        self._folder = folder
        self._world_size = world_size
        self._starts = 0
        self._connections: list[Connection] = []
        self._processes: list[Any] = []

    def _start(self) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._starts += 1
        for rank in range(self._world_size):
            own, other = context.Pipe()
            store = str(self._folder / f"store{self._starts}")
            process = context.Process(target=serve, args=(rank, self._world_size, store, other), daemon=True)
            process.start()
            self._connections.append(own)
            self._processes.append(process)

    def __call__(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        if not self._processes:
            self._start()
        try:
            for connection in self._connections:
                connection.send_bytes(pickle.dumps((function, args)))
            return self._receive()
        except BaseException:
            self.close()  # one may wait for the other for good
            raise

    def _receive(self) -> list[Any]:
        results: dict[int, Any] = {}
        while len(results) < self._world_size:
            waiting = {self._connections[rank]: rank for rank in range(self._world_size) if rank not in results}
            ready = wait(list(waiting), PATIENCE)
            assert ready, f"ranks {sorted(waiting.values())} do not answer"
            for connection in ready:
                results[waiting[connection]], error = pickle.loads(connection.recv_bytes())
                assert error is None, f"rank {waiting[connection]}:\n{error}"
        return [results[rank] for rank in range(self._world_size)]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join(PATIENCE)
        self._connections, self._processes = [], []
