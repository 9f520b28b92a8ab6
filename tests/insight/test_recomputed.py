"""Ops that a checkpoint runs again are recorded with the module and rule of the forward pass, although no hook of the
module runs.

Guards: insight/naming, insight/sites, insight/rules.
"""

import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from amp_patch import insight, native


class OwnCheckpoint(torch.autograd.Function):
    """As scripts write it."""

    @staticmethod
    def forward(ctx, run, x, *weights):
        ctx.run, ctx.weights = run, weights
        ctx.save_for_backward(x)
        return run(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad(), torch.autocast("cpu", torch.bfloat16):
            output = ctx.run(x)
        return None, *torch.autograd.grad(output, (x, *ctx.weights), grad)


class Recomputed(nn.Module):
    """Has a checkpoint around a part of its own forward."""

    def __init__(self, how):
        super().__init__()
        self.weight, self.inner = nn.Parameter(torch.randn(4, 4)), nn.Linear(4, 4)
        self.how = how

    def forward(self, x):
        return self.how(self, x)

    def part(self, x):
        return self.inner(torch.tanh(x @ self.weight)).exp()


def _part(module, x):
    return torch.tanh(x @ module.weight).exp()


RECOMPUTED = {
    "method": lambda module, x: checkpoint(module.part, x, use_reentrant=False),
    "reentrant": lambda module, x: checkpoint(module.part, x, use_reentrant=True),
    "closure": lambda module, x: checkpoint(lambda y: torch.tanh(y @ module.weight).exp(), x, use_reentrant=False),
    "partial": lambda module, x: checkpoint(functools.partial(_part, module), x, use_reentrant=False),
}


@pytest.mark.parametrize("how", RECOMPUTED)
def test_what_a_checkpoint_recomputes_is_of_the_module_and_the_rule_of_the_forward(how, tmp_path):
    (tmp_path / "mine.yaml").write_text("blacklist: [tanh]\nmodules: [{match: '1', run: float32}]\n")
    net = nn.Sequential(nn.Linear(4, 4), Recomputed(RECOMPUTED[how]))
    with native.install(lists=tmp_path / "mine.yaml"), insight.recording() as found:
        with torch.autocast("cpu", torch.bfloat16):
            loss = net(torch.ones(2, 4)).float().sum()
        loss.backward()
    phases = {}
    for record in found.ops:
        is_cast = record.rule == "border of the cast"  # of the input, which is kept
        if record.module.startswith("1") and record.phase != "backward" and record.ran and not is_cast:
            phases.setdefault(record.phase, set()).add(
                (record.module, record.op, record.rule, record.entry, record.ran)
            )
    assert phases["recompute"] == phases["forward"]
    assert {rule for _, _, rule, _, _ in phases["forward"]} == {"run: float32"}


def test_a_module_rule_is_not_named_where_a_checkpoint_of_the_script_runs_without_it(tmp_path):
    (tmp_path / "mine.yaml").write_text("modules: [{match: '1', run: float32}]\n")
    net = nn.Sequential(
        nn.Linear(4, 4), Recomputed(lambda module, x: OwnCheckpoint.apply(module.part, x, module.weight))
    )
    with native.install(lists=tmp_path / "mine.yaml"), insight.recording() as found:
        with torch.autocast("cpu", torch.bfloat16):
            loss = net(torch.ones(2, 4)).float().sum()
        loss.backward()
    again = [record for record in found.ops if record.phase == "recompute"]
    assert {record.module for record in again} == {"1", "1.inner"}
    assert [record.rule for record in again if "matmul" in record.op] == ["whitelist"]
    assert all(record.rule != "run: float32" for record in again if record.module == "1")
