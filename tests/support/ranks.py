"""Processes joined by gloo, which run functions of the tests and give back what they return."""

import pickle
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RUNS_FSDP2 = not torch.__version__.startswith("2.6.")
needs_fsdp2 = pytest.mark.skipif(not RUNS_FSDP2, reason="fully_shard of torch 2.6 does not run on a CPU")
PATIENCE = 120  # seconds; a function takes milliseconds


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
        context.set_forkserver_preload(["torch", "torch._dynamo"])
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
