"""Scripts with torch.autocast on two ranks: DistributedDataParallel, as they are and under lists."""

import contextlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import batch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from amp_patch import insight, native
from amp_patch.insight.fault_record import FaultRecord
from amp_patch.insight.tracer import tracing


class Net(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.factor = factor
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = torch.softmax(x * self.factor @ x.T, -1) @ x
        return self.last(x)


def train(factor: float = 1.0) -> list[Tensor]:
    """Return losses and weights of a training in float16, whose second micro-batch is reduced."""
    net = DistributedDataParallel(Net(factor))
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    losses = []
    for step in range(3):
        for number in range(2):
            with net.no_sync() if number == 0 else contextlib.nullcontext():
                with torch.autocast("cpu", torch.float16):
                    loss = net(batch(dist.get_rank(), 2 * step + number)).float().square().mean()
                scaler.scale(loss).backward()
                losses.append(loss.detach())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return [*losses, *(weight.detach() for weight in net.parameters())]


def train_both(_rank: int, lists: str) -> tuple[list[Tensor], list[Tensor]]:
    plain = train()
    with native.install(lists=lists):
        return plain, train()


def record(_rank: int, path: str) -> list[Any]:
    with native.install(lists=path), insight.recording() as recording:
        train()
    rows = [op for op in recording.ops if op.op == "F.linear" and op.phase == "forward"]
    return sorted({(op.module, op.ran, recording.run.rank) for op in rows})


def find_fault(_rank: int) -> list[tuple[int, str, str]]:
    with tracing() as tracer:
        train(1e6 if dist.get_rank() == 1 else 1.0)
    return [(fault.rank, fault.cause, fault.site) for fault in tracer.recording.of(FaultRecord)]


def is_alike(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(map(torch.equal, left, right))


def test_with_the_rules_of_autocast_each_rank_trains_bitwise_as_without(ranks: Any) -> None:
    for plain, taken in ranks(train_both, "autocast-cpu"):
        assert is_alike(plain, taken)


def test_a_line_of_a_list_changes_all_ranks_alike(ranks: Any, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("blacklist: [linear]")
    (plain, first), (_, second) = ranks(train_both, str(path))
    weights = slice(6, None)
    assert is_alike(first[weights], second[weights]) and not is_alike(plain[weights], first[weights])
    for rank, rows in enumerate(ranks(record, str(path))):
        assert rows == [("first", ("f32",), rank), ("last", ("f32",), rank)]


def test_a_fault_of_one_rank_is_found_there(ranks: Any) -> None:
    first, second = ranks(find_fault)
    line = next(number for number, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "softmax(" in text)
    assert second[0] == (1, "precision", f"{Path(__file__).name}:{line}")
    assert {(rank, cause) for rank, cause, _ in first} == {(0, "came in")}  # in the gradients that were reduced
