"""Trainings under torch.autocast can be compared and tuned.

Guards: native/takeover, native/changes, native/script_steps.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_patch as amp
from amp_patch import insight
from amp_patch.script_settings import NoRegionError


class Net(nn.Module):
    def __init__(self, factor):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.large, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.factor = factor

    def forward(self, x):
        x = self.large(self.first(x)) * self.factor
        return self.last(torch.softmax(x @ x.T, -1) @ x / self.factor)


def train(dtype=torch.float16, factor=1.0, *, fused=False):
    net = Net(factor)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3, fused=fused)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16, init_scale=256.0)
    for seed in range(4):
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(seed))
        with torch.autocast("cpu", dtype):
            loss = F.cross_entropy(net(x), torch.arange(6) % 2)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def test_levels_lists_and_what_is_are_compared():
    found = insight.compare(train, steps=3)
    assert [run.run for run in found.runs] == ["as-is", "O0", "O1", "O4"]
    assert [run.low for run in found.runs] == ["f16", "", "f16", "bf16"] and not found.failed
    errors = [record for record in found.recording.records if record.kind == "layer"]
    assert errors and all(record.gradient < 0.1 for record in errors if record.gradient is not None)


def test_gradients_are_counted_without_the_scale_that_a_fused_step_takes_off():
    plain = insight.compare(train, ["O0"], steps=1)
    fused = insight.compare(lambda: train(fused=True), ["O0"], steps=1)
    assert [one for one in plain.recording.records if one.kind == "gradients"] == [
        one for one in fused.recording.records if one.kind == "gradients"
    ]


def test_tuning_finds_the_module_that_needs_float32(tmp_path):
    result = insight.tune(lambda: train(factor=300.0), opt_level=None, units="ops", log=lambda line: None)
    assert result.is_reached and [entry.name for entry in result.entries] == ["matmul"]


def test_a_training_without_amp_is_not_trained_twice():
    trained = []

    def plain():
        trained.append(1)
        net = nn.Linear(2, 2)
        net(torch.ones(1, 2)).sum().backward()
        torch.optim.SGD(net.parameters(), 0.1).step()

    with pytest.raises(NoRegionError, match=r"test_compared\.py:\d+ calls the model"):
        insight.compare(plain, steps=2)
    assert len(trained) == 1


def test_a_scaled_loss_without_initialize_is_told_to_initialize():
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def step():
        with amp.scale_loss(net(torch.ones(1, 2)).sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()

    with pytest.raises(amp.SessionError, match="amp.initialize has not been called yet"):
        insight.compare(step, ["O0", "O4"], steps=2)
