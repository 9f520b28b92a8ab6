"""A dynamic loss scale and torch.amp.GradScaler with the same options give bitwise the same scales, skips and weights.

Guards: training/loss_scaler, training/scale_updates.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from training import take_step

import amp_patch as amp

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.125, momentum=0.5),
    # without momentum: torch leaves its buffer uninitialised when it skips the first step
    "fused-sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.125, fused=True),
    "fused-adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.0625, fused=True),
}
KNOBS = st.fixed_dictionaries(
    {
        "init": st.floats(2.0**-10, 2.0**30, width=32),
        "growth_factor": st.floats(1.0, 8.0, exclude_min=True),
        "backoff_factor": st.floats(0.0625, 1.0, exclude_max=True),
        "growth_interval": st.integers(1, 5),
    }
)


def make_model():
    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-1.0, 1.0, parameter.numel()).view_as(parameter))
    return model


def loss_of(model, is_good):
    return (model(torch.full((4, 3), 0.375)) * (1.0 if is_good else math.inf)).sum()


def train_by_grad_scaler(knobs, steps, make_optimizer):
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    knobs = {"init_scale": knobs["init"], **{name: value for name, value in knobs.items() if name != "init"}}
    scaler = torch.amp.GradScaler("cpu", **knobs)
    scales = []
    for is_good in steps:
        optimizer.zero_grad()
        scaler.scale(loss_of(model, is_good)).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, [parameter.detach() for parameter in model.parameters()]


@pytest.mark.filterwarnings("ignore:the loss scale has fallen to")  # some start below 1
@pytest.mark.parametrize("name", OPTIMIZERS)
@settings(max_examples=20)
@given(knobs=KNOBS, steps=st.lists(st.booleans(), max_size=14))
def test_scales_skips_and_weights_are_those_of_grad_scaler(name, knobs, steps):
    make_optimizer = OPTIMIZERS[name]
    expected, weights = train_by_grad_scaler(knobs, steps, make_optimizer)
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    try:
        amp.initialize(model, optimizer, opt_level="O0", loss_scale=knobs, max_loss_scale=math.inf, verbosity=0)
        scales, skips = [], []
        for is_good in steps:
            take_step(loss_of(model, is_good), optimizer)
            scales.append(amp.state_dict()["loss_scaler0"]["loss_scale"])
            skips.append(optimizer.step_was_skipped)
    finally:
        amp.reset()
    assert scales == expected
    assert all(skipped for skipped, is_good in zip(skips, steps, strict=True) if not is_good)
    # under GradScaler fused optimizers divide by the scale themselves, and round otherwise than its `unscale_`
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if name.startswith("fused") else {"rtol": 0.0, "atol": 0.0}
    torch.testing.assert_close([parameter.detach() for parameter in model.parameters()], weights, **tolerance)
