"""Every public function works where tensors are made on the device by default.

Guards: api, functions, insight/comparing/probes, insight/repair, insight/recent.
"""

import contextlib
import functools
import math
import types

import pytest
import torch
from devices import DEVICE, IS_SIM, no_sync, requires_device, requires_sim
from torch import nn

import amp_patch as amp
from amp_patch import insight

if IS_SIM:
    import simdev

pytestmark = [requires_device, pytest.mark.usefixtures("on_device")]


class Net(nn.Module):
    """Draws random numbers, and has a parameter that is too large for a sketch of its gradient."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 300), nn.Linear(300, 5)

    def forward(self, inputs):
        return self.last(torch.dropout(torch.relu(self.first(inputs)), 0.3, self.training))


def make(level="O1", **options):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4, fused=True)
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)


def take_step(model, optimizer, factor=1.0):
    loss = model(torch.randn(8, 16)).float().square().mean() * factor
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
def test_the_functions_of_training(level):
    with simdev.lag(50) if IS_SIM else contextlib.nullcontext():
        call_all(level)


def call_all(level):
    model, optimizer = make(level, loss_scale="dynamic")
    before = amp.state_dict()
    take_step(model, optimizer)
    take_step(model, optimizer, factor=float("inf"))
    stats = amp.stats()
    assert (stats.steps, stats.steps_skipped, stats.opt_level) == (1, 1, level)
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 2.0**15
    scaled = amp.scale(torch.ones(2))
    assert torch.equal(scaled, torch.full((2,), 2.0**15)) and torch.equal(amp.unscale(scaled), torch.ones(2))
    amp.load_state_dict(before)
    assert amp.state_dict() == before
    amp.refresh()
    with amp.disable_casts():
        assert torch.isfinite(model(torch.randn(8, 16))).all()
    model.load_state_dict(model.state_dict())
    optimizer.load_state_dict(optimizer.state_dict())
    assert all(master.device.type == DEVICE for master in amp.master_params(optimizer))
    amp.reset()
    with amp.scope(Net(), opt_level=level, verbosity=0) as scoped:
        assert torch.isfinite(scoped(torch.randn(8, 16))).all()


def test_functions_that_are_registered_or_decorated():
    owner = types.SimpleNamespace(half=torch.add, whole=torch.add, widest=torch.add)
    amp.register_half_function(owner, "half")
    amp.register_float_function(owner, "whole")
    amp.register_promote_function(owner, "widest")
    low, full = torch.ones(2, dtype=torch.float16), torch.ones(2)
    with amp.session("O1", verbosity=0):
        assert owner.half(full, full).dtype is torch.float16
        assert owner.whole(low, low).dtype is torch.float32
        assert owner.widest(low, full).dtype is torch.float32
        assert amp.half_function(torch.sub)(full, full).dtype is torch.float16
    assert owner.half(full, full).dtype is torch.float32


def test_insight_of_a_step_waits_for_nothing():
    model, optimizer = make()
    take_step(model, optimizer)
    with no_sync():
        recording = insight.explain(lambda: take_step(model, optimizer))
    assert recording.run.device == DEVICE and "F.linear" in insight.format_recording(recording)


def test_a_trace_leaves_the_random_numbers_of_the_run():
    """The op that overflows, here the dropout, runs once more in float32."""
    drawn = []
    for is_traced in (False, True):
        model, optimizer = make()
        with torch.no_grad():
            model.first.bias.fill_(6e4)
        step = functools.partial(take_step, model, optimizer)
        if is_traced:
            assert insight.trace(step, on_fault="record").records
        else:
            step()
        drawn.append(torch.rand(4))
        amp.reset()
    assert torch.equal(*drawn)


def test_a_trace_runs_an_op_again_that_draws_from_a_generator_of_the_device():
    class Noisy(Net):
        def forward(self, inputs):
            return torch.normal(super().forward(inputs) + 6e4, 1e4, generator=generator)

    generator = torch.Generator(DEVICE).manual_seed(0)
    model = Noisy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    (fault,) = insight.trace(lambda: take_step(model, optimizer), on_fault="record").of(insight.FaultRecord)
    assert (fault.op, fault.cause) == ("aten.normal", "precision")


def test_compare_and_tune(tmp_path):
    def train():
        model, optimizer = make()
        for _ in range(3):
            take_step(model, optimizer)

    torch.empty(10**7)  # no peak of theirs
    found = insight.compare(train, runs=["O0", "O1", "O4"])
    assert not found.failed and all(0 < one.peak < 10**7 for one in found.runs) and found.noise
    assert insight.tune(train, log=lambda _: None).is_reached


@requires_sim
def test_insight_takes_no_float64_of_a_device():
    """MPS has none."""

    def train(lr=0.1):
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        model, optimizer = amp.initialize(model, optimizer, opt_level="O4", verbosity=0)
        for _ in range(2):
            take_step(model, optimizer)

    with simdev.count() as counts:
        (fault,) = insight.trace(lambda: train(lr=math.inf), on_fault="record").of(insight.FaultRecord)
        amp.reset()
        insight.compare(train, runs=["O0", "O4"])
    assert fault.cause == "step" and 0 < fault.share <= 1
    assert not [record.op for record in counts.records if "Double" in (record.dtype, record.result_dtype)]
