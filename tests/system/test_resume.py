"""Checkpoint and resume, bitwise: every level, optimizer and order of load calls; and the surface of optimizers."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from reference import make_batches, make_model
from torch import nn
from training import backward, take_step

import amp_patch as amp

LEVELS = ["O0", "O1", "O2", "O3", "O4", "O5"]
OPTIMIZERS = {  # an eps of 1e-8 is 0 in the float16 of O3
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=3e-3, eps=1e-4, amsgrad=True),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=3e-3, eps=1e-4, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=3e-3, eps=1e-4, fused=True),
}
ORDERS = {"all-after": "", "model-before": "m", "optimizer-before": "o", "both-before": "mo"}


def train(model, optimizer, scheduler, batches):
    losses = []
    for images, targets in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), targets)
        backward(loss, optimizer)
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
        optimizer.step()
        if not optimizer.step_was_skipped:
            scheduler.step()
        losses.append(loss.item())
    return losses


CASES = [  # with each level and with each optimizer, all orders
    pytest.param(level, OPTIMIZERS[name], ORDERS[order], id=f"{level}-{name}-{order}")
    for (level, order), name in zip(itertools.product(LEVELS, ORDERS), itertools.cycle(OPTIMIZERS), strict=False)
]


@pytest.mark.parametrize(("level", "make_optimizer", "order"), CASES)
def test_the_next_steps_are_those_of_the_uninterrupted_run(level, make_optimizer, order, tmp_path):
    batches = make_batches(10, size=8)

    def start(before_initialize=lambda *_: None):
        model = make_model(3, width=4)
        optimizer = make_optimizer(model.parameters())
        before_initialize(model, optimizer)
        amp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
        return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)

    model, optimizer, scheduler = start()
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 64.0, "unskipped": 1993}})
    train(model, optimizer, scheduler, batches[:3])
    names = ("model", "optimizer", "scheduler", "amp")
    for name, source in zip(names, (model, optimizer, scheduler, amp), strict=True):
        torch.save(source.state_dict(), tmp_path / name)
    expected = train(model, optimizer, scheduler, batches[3:]), amp.state_dict()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    amp.reset()

    saved = {name: torch.load(tmp_path / name, weights_only=True) for name in names}

    def load_before(model, optimizer):
        if "m" in order:
            model.load_state_dict(saved["model"])
        if "o" in order:
            optimizer.load_state_dict(saved["optimizer"])

    model, optimizer, scheduler = start(load_before)
    if "m" not in order:
        model.load_state_dict(saved["model"])
    if "o" not in order:
        optimizer.load_state_dict(saved["optimizer"])
    scheduler.load_state_dict(saved["scheduler"])
    amp.load_state_dict(saved["amp"])
    assert (train(model, optimizer, scheduler, batches[3:]), amp.state_dict()) == expected
    assert expected[1]["loss_scaler0"]["loss_scale"] == 128.0  # it grew on the way
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_the_choices_of_an_optimizer_are_kept(make_optimizer):
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    before = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    defaults = copy.deepcopy(optimizer.defaults)
    amp.initialize(model, optimizer, opt_level="O5", verbosity=0)
    after = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    assert after == before
    assert optimizer.defaults == defaults


def test_one_non_finite_gradient_among_a_thousand_parameters_is_found_and_named():
    model = nn.ParameterList([nn.Parameter(torch.ones(1)) for _ in range(1000)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O0", loss_scale=2.0, verbosity=0)
    factors = [1.0] * 1000
    factors[637] = float("nan")
    backward(sum(p.sum() * f for p, f in zip(model, factors, strict=True)), optimizer)
    with pytest.warns(UserWarning, match=r"non-finite gradients under a static loss scale \(637\)"):
        optimizer.step()


@pytest.mark.parametrize("level", ["O1", "O5"])
def test_an_optimizer_that_lost_its_parameters_steps_on_what_is_left(level):
    model = make_model()
    optimizer = torch.optim.SGD([{"params": model.conv1.parameters()}, {"params": model.fc.parameters()}], lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
    images, targets = make_batches(1)[0]
    optimizer.param_groups[0]["params"].clear()
    del optimizer.param_groups[1]["params"][0]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(2):
        model.zero_grad()
        take_step(F.cross_entropy(model(images), targets), optimizer)
    changed = {name for name, _ in model.named_parameters() if not torch.equal(model.state_dict()[name], before[name])}
    assert changed == {"fc.bias"}
