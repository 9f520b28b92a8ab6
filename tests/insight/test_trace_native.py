"""Faults seeded into scripts with torch.autocast: each is found at its line, and what is advised, done literally,
repairs it.
"""

import linecache
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_patch import insight, native
from amp_patch.insight.records import FaultRecord, Recording

WIDTH = 16


class Between(nn.Module):
    """A module in the middle of a net that runs a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Weighted(nn.Module):
    """A layer whose weights are too large for float16 sums, and what makes the result small again."""

    def __init__(self, layer: nn.Module, factor: float) -> None:
        super().__init__()
        self.layer = layer
        self.factor = factor
        with torch.no_grad():
            for weight in layer.parameters():
                weight.fill_(factor)

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x.abs().unsqueeze(1)) / self.factor).flatten(1)[:, :WIDTH] / WIDTH


def rms_norm(x: Tensor) -> Tensor:
    return x * 1000 * torch.rsqrt((x * 1000).square().mean(-1, keepdim=True))


def hand_softmax(x: Tensor) -> Tensor:
    weights = torch.exp(x + 14)
    return weights / weights.sum(-1, keepdim=True)


def log_of_zero(x: Tensor) -> Tensor:
    return torch.log(torch.relu(x) + 1e-8) / 20


def variance(x: Tensor) -> Tensor:
    large = x * 500
    return x / ((large - large.mean(-1, keepdim=True)) ** 2).mean(-1, keepdim=True).sqrt() * 500


class Seeded(NamedTuple):
    """What is put between two layers, the op that makes the first value that does not fit, and what its line says."""

    make: Callable[[], nn.Module]
    aten: str
    written: str


def calling(function: Callable[[Tensor], Tensor], aten: str, written: str) -> Seeded:
    return Seeded(lambda: Between(function), aten, written)


SEEDED = {
    "matmul": calling(lambda x: (x * 300 @ (x * 300).T).softmax(-1) @ x, "mm", "(x * 300 @ (x * 300).T)"),
    "einsum": calling(lambda x: torch.einsum("ij,kj->ik", x * 300, x * 300).softmax(-1) @ x, "bmm", "torch.einsum"),
    "addmm": calling(lambda x: torch.addmm(x, x * 300, (x.T @ x) * 300).tanh(), "addmm", "torch.addmm"),
    "rms norm, swallowed": calling(rms_norm, "pow", "torch.rsqrt((x * 1000).square()"),
    "softmax by hand": calling(hand_softmax, "exp", "torch.exp(x + 14)"),
    "sum": calling(lambda x: x * 1e-4 * (x.abs() * 30000).sum(-1, keepdim=True).log(), "sum", "sum(-1"),
    "cumsum": calling(lambda x: torch.cumsum(x.abs() * 30000, -1).log(), "cumsum", "torch.cumsum"),
    "eps too small": calling(log_of_zero, "log", "torch.log"),
    "variance": calling(variance, "pow", "** 2"),
    "product": calling(lambda x: (x.abs() * 60000 * 4).log(), "mul", "60000 * 4"),
    "linear layer": Seeded(lambda: Weighted(nn.Linear(WIDTH, WIDTH), 30000.0), "addmm", "self.layer("),
    "convolution": Seeded(lambda: Weighted(nn.Conv1d(1, 2, 3, padding=1), 30000.0), "convolution", "self.layer("),
}


class Net(nn.Module):
    def __init__(self, between: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.between, self.last = nn.Linear(WIDTH, WIDTH), between, nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self.first(x)))


def with_autocast_off(module: nn.Module) -> None:
    """Change a module as the advice has it: its forward in float32, whatever it is given."""
    forward = module.forward

    def in_float32(*inputs: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return forward(*(each.float() for each in inputs))

    module.forward = in_float32  # type: ignore[method-assign]


def make_step(net: nn.Module, scale: float = 128.0, *, enabled: bool = True) -> Callable[[], None]:
    """What a script does for a step."""
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=10**6, backoff_factor=0.999)
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16, enabled=enabled):
            loss = net(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def trace(step: Callable[[], Any]) -> Recording:
    return insight.trace(step, steps=2, on_fault="record")


def faults_of(step: Callable[[], Any]) -> list[FaultRecord]:
    return trace(step).of(FaultRecord)


def advise(recording: Recording) -> list[str]:
    """The lists that are advised: each is one way."""
    text = insight.format_fault(recording.of(FaultRecord)[0], recording.run)
    assert "amp-patch run --lists fix.yaml" in text
    return re.findall(r"(?:blacklist|modules): \[.*?\](?= |$)", text, re.MULTILINE)


@pytest.mark.parametrize("name", SEEDED)
def test_a_seeded_fault_is_named_and_what_is_advised_repairs_it(name: str, tmp_path: Path) -> None:
    seeded = SEEDED[name]
    recording = trace(make_step(Net(seeded.make())))
    fault = recording.of(FaultRecord)[0]
    assert (fault.aten, fault.cause, fault.phase) == (seeded.aten, "precision", "forward")
    assert fault.module.startswith("between")
    file, line = fault.site.split(":")
    assert file == Path(__file__).name
    assert seeded.written in linecache.getline(__file__, int(line))
    lists = advise(recording)
    assert lists
    for text in lists:
        (tmp_path / "fix.yaml").write_text(text)
        with native.install(lists=tmp_path / "fix.yaml"):
            assert faults_of(make_step(Net(seeded.make()))) == []
    repaired = Net(seeded.make())
    named = re.search(r"around the forward of\s+module (\S+), on .float", insight.format_fault(fault, recording.run))
    if named is not None:
        with_autocast_off(repaired.get_submodule(named[1]))
        assert faults_of(make_step(repaired)) == []
    assert faults_of(make_step(Net(seeded.make()), enabled=False)) == []


def test_a_region_without_casts_and_float32_repairs_as_it_is_advised() -> None:
    def repaired(x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return (x.float() * 300 @ (x.float() * 300).T).softmax(-1) @ x.float()

    assert faults_of(make_step(Net(Between(repaired)))) == []


def test_a_loss_scale_that_is_too_large_is_told_by_the_one_that_fits() -> None:
    scale = 2.0**30
    for _ in range(3):  # the value that was the first to overflow fits then; another may not
        recording = trace(make_step(Net(nn.Identity()), scale))
        faults = recording.of(FaultRecord)
        if not faults:
            break
        assert (faults[0].phase, faults[0].skipped, faults[0].loss_scale) == ("backward", True, scale)
        advised = re.search(r"GradScaler\(init_scale=2\*\*(\d+)\)", insight.format_fault(faults[0], recording.run))
        assert advised is not None
        scale = 2.0 ** int(advised[1])
    assert faults == []


def make_low_step(between: nn.Module) -> Callable[[], None]:
    net = Net(between).half()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1)).half()

    def step() -> None:
        optimizer.zero_grad()
        net(x).float().square().mean().backward()
        optimizer.step()

    return step


def test_a_model_of_16_bits_without_autocast_is_advised_to_compute_in_float32() -> None:
    recording = trace(make_low_step(Between(lambda x: (x * 300 @ (x * 300).T).softmax(-1) @ x)))
    fault = recording.of(FaultRecord)[0]
    assert (fault.aten, fault.module, fault.rule, recording.run.low) == ("mm", "between", "", "")
    assert ".float() on every tensor read there" in insight.format_fault(fault, recording.run)
    repaired = Between(lambda x: (x.float() * 300 @ (x.float() * 300).T).softmax(-1).half() @ x)
    assert faults_of(make_low_step(repaired)) == []


def test_not_a_number_in_float32_is_told_without_any_amp() -> None:
    net = Net(Between(lambda x: F.relu(x).log()))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step() -> None:
        net(torch.randn(8, WIDTH)).mean().backward()
        optimizer.step()

    (fault,) = insight.trace(step, on_fault="record").of(FaultRecord)[:1]
    assert (fault.aten, fault.cause, fault.module) == ("log", "mathematics", "between")


def step_by_hand(net: nn.Module) -> None:
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))
    net.zero_grad()
    net(x).square().mean().backward()
    with torch.no_grad():
        for weight in net.parameters():
            weight -= 0.1 * weight.grad


def test_where_no_optimizer_steps_the_loss_and_gradients_tell_what_is_harmless() -> None:
    def attend(x: Tensor) -> Tensor:
        mask = torch.log(torch.tril(torch.ones(len(x), len(x))))
        return torch.softmax(x @ x.T + mask, -1) @ x

    assert faults_of(lambda: step_by_hand(Net(Between(attend)))) == []
    root = Net(Between(lambda x: x * x.detach().relu().sum().mul(0.0).add(x.sum() * 0.0).sqrt()))
    fault = faults_of(lambda: step_by_hand(root))[0]
    assert (fault.phase, fault.reach, fault.cause) == ("backward", "gradients", "mathematics")


def test_a_forward_value_that_does_not_fit_is_no_search_for_a_loss_scale() -> None:
    """Even where the gradients, once the value fits, need a smaller scale."""
    fault = faults_of(make_step(Net(Between(lambda x: x * 3e5)), 2.0**10))[0]
    assert (fault.phase, fault.skipped, fault.is_search) == ("forward", True, False)
    assert fault.scale is not None and 1 <= fault.scale < 2.0**10
