"""Faults as scripts have them that do more than a step: several losses, gradients of gradients, functions of the user,
numbers that torch refuses, and losses that are left out.
"""

from pathlib import Path

import pytest
import torch
from torch import nn
from training import take_step

import amp_patch as amp
from amp_patch import insight
from amp_patch.insight.recorder import in_block
from amp_patch.insight.remedies import find_remedy
from amp_patch.insight.tracer import Tracer

pytestmark = pytest.mark.filterwarnings("ignore:non-finite gradients", "ignore:the loss scale has fallen")


class Scores(nn.Module):
    """Products of an input with itself, of which the upper half is masked by a number beyond float16."""

    def forward(self, x):
        scores = x @ x.T
        return scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -1e9).softmax(-1)


class Steep(torch.autograd.Function):
    """The identity, with a gradient that overflows."""

    @staticmethod
    def forward(ctx, x):
        return x > 0, x * 2

    @staticmethod
    def backward(ctx, _, gradient):
        return (gradient * 0 + 300.0) * 300.0  # HERE


def make(*layers, **options):
    torch.manual_seed(0)
    model = nn.Sequential(*layers)
    options = {"opt_level": "O1", "verbosity": 0, **options}
    return amp.initialize(model, torch.optim.SGD(model.parameters(), lr=1e-4), **options)


def find_faults(recording):
    return [fault for fault in recording.of(insight.FaultRecord) if not fault.is_search]


def test_a_number_that_torch_refuses_in_float16_is_a_fault_with_a_list(tmp_path):
    x = torch.randn(4, 8)

    def trace(**options):
        model, optimizer = make(nn.Linear(8, 8), Scores(), nn.Linear(4, 1), **options)
        return insight.trace(lambda: take_step(model(x).float().mean(), optimizer), on_fault="record")

    (fault,) = find_faults(trace())
    assert (fault.aten, fault.module, fault.cause, fault.in_float32) == ("masked_fill", "1", "precision", 1e9)
    amp.reset()
    path = tmp_path / "list.yaml"
    path.write_text(f"extends: float16\nmodules: [{{{find_remedy(fault, None).regions[0]}, run: float32}}]\n")
    assert find_faults(trace(lists=path)) == []


def test_a_function_of_the_user_is_told_at_the_line_of_its_backward():
    model, optimizer = make(nn.Linear(8, 8), loss_scale=1.0)
    x = torch.randn(4, 8)
    recording = insight.trace(lambda: take_step(Steep.apply(model(x))[1].float().mean(), optimizer), on_fault="record")
    (fault,) = find_faults(recording)
    lines = Path(__file__).read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if "# HERE" in text)
    assert (fault.phase, fault.op, fault.site) == ("backward", "aten.mul", f"test_trace_scripts.py:{line}")


def test_the_scale_of_one_loss_that_falls_for_ever_is_a_fault_beside_another_that_stays():
    model, optimizer = make(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1), num_losses=2)
    x = torch.randn(16, 8) * 1e-4

    def step():
        optimizer.zero_grad()
        with amp.scale_loss(model(x).float().mean(), optimizer, loss_id=0) as scaled_loss:
            scaled_loss.backward()
        given = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(given).sum(), given, create_graph=True)
        with amp.scale_loss(gradient.float().square().mean(), optimizer, loss_id=1) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()

    recording = insight.trace(step, steps=40, on_fault="record")
    fault = find_faults(recording)[0]
    assert fault.phase == "backward" and fault.module == "1" and fault.regions == ('match: "1"',)
    assert amp.stats().loss_scales[0] > 2.0**10


class EnoughError(BaseException):
    """Leaves a script."""


def test_a_loss_that_is_left_out_again_and_again_does_not_hide_the_fault():
    def leave():
        raise EnoughError

    model, optimizer = make(nn.Linear(8, 8), nn.Linear(8, 1))
    tracer = Tracer(on_end=leave)
    with pytest.raises(EnoughError), in_block(tracer):
        for _ in range(1000):
            hidden = model[0](torch.full((4, 8), 1e3))
            loss = (hidden * hidden).mean()
            if loss.isfinite():
                take_step(loss, optimizer)
    first, *others = tracer.recording.of(insight.FaultRecord)
    assert first.aten == "mul" and 0 < len(others) < 999
    assert insight.describe_further([first, *others]) == []  # the same again is not told


def test_a_forward_pass_alone_has_no_fault_and_no_step():
    model, _ = make(nn.Linear(8, 8))
    assert "no step of an optimizer" in str(insight.trace(lambda: model(torch.ones(2, 8))))
