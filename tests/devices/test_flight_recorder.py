"""A flight recorder launches a fixed number of ops in the steps that it samples and none in others, and waits for
nothing.

Guards: insight/flight/sheet, insight/flight/sampler, insight/flight/steps, insight/flight/flight_recorder.
"""

import pytest
import torch
from devices import IS_SIM, requires_sim
from torch import nn

import amp_patch as amp
from amp_patch import insight

if IS_SIM:
    import simdev

pytestmark = requires_sim

OUTPUTS, GRADIENTS = 4, 6
A_STEP = 6  # a fill, and two counts
SCALE = 1


def count(mode, recorder=None, steps=4):
    """Launches, waits and copies to the host of each step, once four steps have warmed up."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 4)).to("sim")
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    scaler = torch.amp.GradScaler("sim", enabled=mode == "scaler")
    if mode.startswith("O"):
        amp.initialize(net, optimizer, opt_level=mode, verbosity=0)
    inputs = torch.randn(32, 8, device="sim")

    def step():
        optimizer.zero_grad()
        with torch.autocast("sim", torch.float16, enabled=mode == "scaler"):
            loss = net(inputs).float().sum()
        if mode.startswith("O"):
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    for _ in range(4):
        step()
    if recorder is not None:
        recorder.attach(net, optimizer, scaler if scaler.is_enabled() else None)
    found = []
    for _ in range(steps):
        with simdev.lag(10**6), simdev.no_sync(), simdev.count() as counts:
            step()
        found.append((counts.launches, counts.syncs, counts.copies["d2h"]))
    if recorder is not None:
        recorder.close()
    amp.reset()
    return found


@pytest.mark.parametrize(
    ("mode", "more"),
    [
        ("float32", 0),
        ("scaler", SCALE + GRADIENTS),  # a fused optimizer unscales in its kernel, so the recorder divides
        ("O1", SCALE),
        ("O2", SCALE + 2),  # the model casts its output, which is one more
        ("O4", 0),
    ],
)
def test_a_sampled_step_has_two_launches_for_each_tensor_and_others_have_none(mode, more):
    steps = []
    recorder = insight.FlightRecorder(every=2, on_sample=lambda step, numbers: steps.append(step))
    plain, recorded = count(mode), count(mode, recorder)
    added = [tuple(b - a for a, b in zip(*both, strict=True)) for both in zip(plain, recorded, strict=True)]
    sampled = (2 * (OUTPUTS + GRADIENTS) + A_STEP + more, 0, 1)
    assert added == [sampled, (0, 0, 0)] * 2 and steps == [0, 2]
    assert all(record.largest[-1] > 0 for record in recorder.records)
