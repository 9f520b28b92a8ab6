"""An armed step that is healthy launches little more than a plain one. It waits only if no scale may skip it.

Guards: insight/arming/troubles, training/host_copy.
"""

import contextlib

import pytest
import torch
from devices import IS_SIM, requires_sim
from torch import nn
from torch.nn import functional as F

import amp_patch as amp
from amp_patch import insight

if IS_SIM:
    import simdev

pytestmark = [requires_sim, pytest.mark.xdist_group("launches")]


def make_step(way):
    """Return a function that trains for a step: under amp, under GradScaler, or with no scaler at all."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).to("sim")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    x, labels = torch.randn(4, 8, device="sim"), torch.arange(4, device="sim")
    if way == "amp":
        amp.initialize(model, optimizer, opt_level="O1", loss_scale="dynamic", verbosity=0)
    scaler = torch.amp.GradScaler("sim", enabled=way == "GradScaler", init_scale=4.0)

    def step():
        optimizer.zero_grad()
        if way == "amp":
            with amp.scale_loss(F.cross_entropy(model(x), labels), optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
            return
        with torch.autocast("sim", torch.float16, enabled=way == "GradScaler"):
            loss = F.cross_entropy(model(x), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def count(way, *, is_armed):
    """Return the launches and waits of a step."""
    step = make_step(way)
    with simdev.lag(10**6), insight.armed(record=0) if is_armed else contextlib.nullcontext():
        for _ in range(4):
            step()
        with simdev.count() as counts:
            step()
    amp.reset()
    return counts.launches, counts.syncs


@pytest.mark.parametrize(("way", "more", "waits"), [("amp", 0, 0), ("GradScaler", 0, 0), ("none", 12, 1)])
def test_a_healthy_step_waits_only_where_no_scale_may_skip_it(way, more, waits):
    launches, syncs = count(way, is_armed=True)
    plain_launches, plain_syncs = count(way, is_armed=False)
    assert launches - plain_launches <= more
    assert syncs - plain_syncs == waits
