"""Faults in scripts with torch.autocast, or without amp: each is found at its line, and what is advised, done
literally, repairs it.
"""

import re
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from seeded_faults import CASES, Given, Layer, draw
from torch import nn

from amp_patch import insight, native
from amp_patch.insight.fault_record import FaultRecord

SEEDED = (
    *("attention_scores", "rms_norm_in_every_block", "gan_loss", "gates_without_sum", "contrastive_loss"),
    *("root_of_small_numbers", "compiled"),
)


@dataclass(frozen=True)
class Native(Given):
    """As a script with torch.autocast runs a case."""

    def start(self, models, compute_loss, *, lr=1e-9):
        optimizer = torch.optim.SGD(models.parameters(), lr=lr)
        scaler = torch.amp.GradScaler("cpu", init_scale=self.loss_scale, growth_interval=10**6, backoff_factor=0.999)

        def step():
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = compute_loss()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

        return step


def make_net(function):
    """Two linear layers with something in between."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), Layer(lambda self, x: function(x)), nn.Linear(16, 1))


def regress(net, scale=128.0):
    return Native("O1", scale).regress(net, draw(8, 16))


def trace(step):
    return insight.trace(step, steps=2, on_fault="record")


def faults_of(step):
    return trace(step).of(FaultRecord)


def attend(x):
    return (x * 300 @ (x * 300).T).softmax(-1) @ x


@pytest.mark.parametrize("name", SEEDED)
def test_a_seeded_fault_is_named_and_what_is_advised_repairs_it(name, tmp_path):
    case = CASES[name]
    given = Native("O1", case.loss_scale)
    recording = trace(case.make(given))
    fault = recording.of(FaultRecord)[0]
    assert fault.cause == case.cause and fault.site in case.lines
    text = insight.format_fault(fault, recording.run)
    assert "amp-patch run --lists fix.yaml" in text
    lists = re.findall(r"(?:blacklist|modules): \[.*?\](?= |$)", text, re.MULTILINE)
    assert lists
    for one in lists:
        (tmp_path / "fix.yaml").write_text(one)
        with native.install(lists=tmp_path / "fix.yaml"):
            assert faults_of(case.make(given)) == []


def test_a_module_without_autocast_on_float32_inputs_repairs_as_it_is_advised():
    def attend_in_float32(x):
        with torch.autocast("cpu", enabled=False):
            return attend(x.float())

    recording = trace(regress(make_net(attend)))
    text = insight.format_fault(recording.of(FaultRecord)[0], recording.run)
    assert re.search(r"around the forward of\s+module 1, on .float", text)
    assert faults_of(regress(make_net(attend_in_float32))) == []


def test_a_loss_scale_that_is_too_large_is_told_by_the_one_that_fits():
    scale = 2.0**30
    for _ in range(3):  # the value that was the first to overflow fits then; another may not
        recording = trace(regress(make_net(torch.relu), scale))
        faults = recording.of(FaultRecord)
        if not faults:
            break
        assert (faults[0].phase, faults[0].skipped, faults[0].loss_scale) == ("backward", True, scale)
        advised = re.search(r"GradScaler\(init_scale=2\*\*(\d+)\)", insight.format_fault(faults[0], recording.run))
        scale = 2.0 ** int(advised[1])
    assert faults == []


def make_low_step(between):
    net = make_net(between).half()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
    x = draw(8, 16).half()

    def step():
        optimizer.zero_grad()
        net(x).float().square().mean().backward()
        optimizer.step()

    return step


def test_a_model_of_16_bits_without_autocast_is_advised_to_compute_in_float32():
    recording = trace(make_low_step(attend))
    fault = recording.of(FaultRecord)[0]
    assert (fault.aten, fault.module, fault.rule, recording.run.low) == ("mm", "1", "", "")
    assert ".float() on every tensor read there" in insight.format_fault(fault, recording.run)
    assert faults_of(make_low_step(lambda x: attend(x.float()).half())) == []


def step_by_hand(net):
    net.zero_grad()
    net(draw(8, 16)).square().mean().backward()
    with torch.no_grad():
        for weight in net.parameters():
            weight -= 0.1 * weight.grad


def test_where_no_optimizer_steps_the_loss_and_gradients_tell_what_is_harmless():
    def attend_to_the_past(x):
        mask = torch.log(torch.tril(torch.ones(len(x), len(x))))
        return torch.softmax(x @ x.T + mask, -1) @ x

    assert faults_of(lambda: step_by_hand(make_net(attend_to_the_past))) == []
    root = make_net(lambda x: x * x.detach().relu().sum().mul(0.0).add(x.sum() * 0.0).sqrt())
    fault = faults_of(lambda: step_by_hand(root))[0]
    assert (fault.phase, fault.reach, fault.cause) == ("backward", "gradients", "mathematics")
    fault = faults_of(lambda: step_by_hand(make_net(lambda x: F.relu(x).log())))[0]
    assert (fault.aten, fault.cause, fault.module) == ("log", "mathematics", "1")


def test_a_forward_value_that_does_not_fit_is_no_search_for_a_loss_scale():
    """Even where the gradients, once the value fits, need a smaller scale."""
    fault = faults_of(regress(make_net(lambda x: x * 3e5), 2.0**10))[0]
    assert (fault.phase, fault.skipped, fault.is_search) == ("forward", True, False)
    assert fault.scale is not None and 1 <= fault.scale < 2.0**10


def test_a_gradient_taken_inside_of_autocast_is_told_to_be_beyond_lists():
    model = nn.Linear(4, 4)
    with torch.no_grad():
        model.weight.fill_(300.0)

    def compute_penalty():
        x = torch.full((2, 4), 0.01, requires_grad=True)
        y = model(x)
        (gradient,) = torch.autograd.grad(y, x, torch.full_like(y, 100.0), create_graph=True)
        return (gradient * 1e-6).square().mean()

    recording = trace(Native("O1", 2.0**16).start(model, compute_penalty))
    fault = recording.of(FaultRecord)[0]
    assert not fault.is_search and fault.step == 0 and "whatever a list says" in str(recording)
