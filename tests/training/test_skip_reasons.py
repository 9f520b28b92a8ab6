"""Each reason in the list of `amp_patch.training` skips the step, and the same program without its overflow takes it.

Reason 9, other ranks, is in `tests/system/test_ranks_agree.py`.

Guards: training/overflow_flags, training/gradient_sums, training/optimizer, training/scale_updates.
"""

import math
import re

import pytest
import torch
from torch import nn
from training import backward

import amp_patch as amp
from amp_patch import training
from amp_patch.session import bindings


def make(level, count=2):
    torch.manual_seed(0)
    models = [nn.Linear(2, 2, bias=False) for _ in range(count)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in models]
    return models, optimizers


def initialize(models, optimizers, level):
    amp.initialize(models, optimizers, opt_level=level, loss_scale="dynamic", max_loss_scale=1024.0, verbosity=0)


def prepare(level):
    models, optimizers = make(level)
    initialize(models, optimizers, level)
    return models, optimizers


def loss_of(model, factor=1.0):
    return model.weight.float().sum() * factor


def own_gradient(level, factor):
    (model, _), (optimizer, _) = prepare(level)
    backward(loss_of(model, factor), optimizer)
    optimizer.step()
    return optimizer


def other_optimizer_of_the_block(level, factor):
    (model, other), (optimizer, second) = prepare(level)
    backward(loss_of(model) + loss_of(other, factor), [optimizer, second])
    optimizer.step()
    return optimizer


def prepare_sharing(level):
    """Two models, and two optimizers that share a parameter of the second: the first optimizer has one of each."""
    (model, other), _ = make(level)
    both = torch.optim.SGD([model.weight, other.weight], lr=0.5)
    of_other = torch.optim.SGD(other.parameters(), lr=0.5)
    initialize([model, other], [both, of_other], level)
    return (model, other), (both, of_other)


def shared_parameter(level, factor):
    (_, other), (optimizer, second) = prepare_sharing(level)
    backward(loss_of(other, factor), second)
    optimizer.step()
    return optimizer


def delayed_block(level, factor):
    (model, _), (optimizer, _) = prepare(level)
    backward(loss_of(model, factor), optimizer, delay_unscale=True)
    optimizer.step()
    return optimizer


def step_inside_the_block(level, factor):
    (model, _), (optimizer, _) = prepare(level)
    with amp.scale_loss(loss_of(model, factor), optimizer) as scaled:
        scaled.backward()
        optimizer.step()
    return optimizer


def block_that_raised(level, factor):
    (model, _), (optimizer, _) = prepare(level)
    with pytest.raises(ZeroDivisionError), amp.scale_loss(loss_of(model, factor), optimizer) as scaled:
        scaled.backward()
        1 / 0  # noqa: B018
    optimizer.step()
    return optimizer


def block_never_left(level, factor):
    (model, _), (optimizer, _) = prepare(level)
    block = amp.scale_loss(loss_of(model, factor), optimizer)
    block.__enter__().backward()
    del block
    optimizer.step()
    return optimizer


def backward_outside(level, factor):
    (model, _), (optimizer, _) = prepare(level)
    loss_of(model, factor).backward()
    optimizer.step()
    return optimizer


def block_of_another_optimizer(level, factor):
    (model, other), (optimizer, second) = prepare(level)
    backward(loss_of(model, factor) + loss_of(other), second)
    optimizer.step()
    return optimizer


def parameter_moved_by_hand(level, factor):
    (model, other), (optimizer, second) = prepare(level)
    optimizer.param_groups[0]["params"] = list(other.parameters())
    backward(loss_of(other, factor), second)
    optimizer.step()
    return optimizer


def gradient_from_before(level, factor):
    models, optimizers = make(level)
    loss_of(models[0], factor).backward()
    initialize(models, optimizers, level)
    optimizers[0].step()
    return optimizers[0]


def gradients_put_back(level, factor):
    (model, _), (optimizer, _) = prepare(level)
    backward(loss_of(model, factor), optimizer)
    kept = [stepped.grad.clone() for stepped in amp.master_params(optimizer)]
    optimizer.zero_grad()
    model.zero_grad()
    for stepped, gradient in zip(amp.master_params(optimizer), kept, strict=True):
        stepped.grad = gradient
    optimizer.step()
    return optimizer


def backward_outside_into_a_shared_parameter(level, factor):
    (_, other), (first, optimizer) = prepare_sharing(level)
    loss_of(other, factor).backward()
    optimizer.step()
    return optimizer


def zeroed_inside_before_the_backward_pass(level, factor):
    (model, other), (optimizer, second) = prepare(level)
    with amp.scale_loss(loss_of(model) + loss_of(other, factor), [optimizer, second]) as scaled:
        optimizer.zero_grad()
        scaled.backward()
    optimizer.step()
    return optimizer


BOTH = [
    own_gradient,
    other_optimizer_of_the_block,
    shared_parameter,
    delayed_block,
    step_inside_the_block,
    block_that_raised,
    block_never_left,
    parameter_moved_by_hand,
    gradient_from_before,
    gradients_put_back,
    zeroed_inside_before_the_backward_pass,
]
WITH_MASTERS = [backward_outside, backward_outside_into_a_shared_parameter, block_of_another_optimizer]


@pytest.mark.filterwarnings("ignore:step\\(\\) of SGD")
@pytest.mark.parametrize(("factor", "is_skip"), [(math.inf, True), (math.nan, True), (1.0, False)])
@pytest.mark.parametrize(
    ("reason", "level"),
    [(reason, level) for level in ("O1", "O2") for reason in BOTH] + [(reason, "O2") for reason in WITH_MASTERS],
)
def test_each_reason_skips_the_step(reason, level, factor, is_skip):
    optimizer = reason(level, factor)
    assert optimizer.step_was_skipped is is_skip
    assert all(bool(torch.isfinite(stepped).all()) for stepped in amp.master_params(optimizer))


def test_unchecked_gradients_count_for_the_next_block_and_lower_the_scale():
    (model, other), (optimizer, second) = prepare("O2")
    backward(loss_of(model, math.inf) + loss_of(other), second)
    second.step()
    backward(loss_of(model), optimizer)
    optimizer.step()
    assert (second.step_was_skipped, optimizer.step_was_skipped) == (False, True)
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 512.0


# ---- steps inside a block --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_second_step_in_a_block_does_not_skip_for_the_first(level):
    (model, _), (optimizer, _) = prepare(level)
    skips = []
    with amp.scale_loss(loss_of(model), optimizer) as scaled:
        for factor in (math.inf, 1.0):
            (scaled * factor).backward(retain_graph=True)
            optimizer.step()
            skips.append(optimizer.step_was_skipped)
            optimizer.zero_grad()
    assert skips == [True, False]


@pytest.mark.parametrize("zeroes", [True, False], ids=["zeroed inside", "not zeroed"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_step_inside_a_delayed_block_uses_its_overflow(level, zeroes):
    (model, _), (optimizer, _) = prepare(level)
    with amp.scale_loss(loss_of(model, math.inf), optimizer, delay_unscale=True) as scaled:
        scaled.backward()
        optimizer.step()
        if zeroes:
            optimizer.zero_grad()
    assert optimizer.step_was_skipped
    if not zeroes:
        for parameter in model.parameters():
            parameter.grad = None
    backward(loss_of(model), optimizer)
    optimizer.step()
    assert not optimizer.step_was_skipped


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_step_inside_a_block_is_not_repeated_for_the_rest_of_the_block(level):
    """What overflows for another optimizer, once this one has stepped, skips no later step of this one."""
    (model, other), (optimizer, second) = prepare(level)
    with amp.scale_loss(loss_of(model) + loss_of(other, math.inf), [optimizer, second]) as scaled:
        scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
    backward(loss_of(model), optimizer)
    optimizer.step()
    assert optimizer.step_was_skipped is False
    second.step()
    assert second.step_was_skipped is True


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_block_after_one_with_all_steps_inside_has_the_next_scale(level):
    (model, _), (optimizer, _) = prepare(level)
    scales = []
    for _ in range(3):
        loss = loss_of(model)
        with amp.scale_loss(loss, optimizer) as scaled:
            scales.append(float(scaled / loss))
            (scaled * math.inf).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.step_was_skipped
    assert scales == [1024.0, 512.0, 256.0]


def test_the_list_of_reasons_names_functions_that_exist():
    named = set(re.findall(r"`((?:[A-Z]\w+\.)?_?\w+)`", training.__doc__.partition("A step is skipped if")[2]))
    places = [vars(module) for name, module in vars(training).items() if type(module) is type(re)]
    places.append(vars(bindings))
    known = {name for place in places for name in place}
    for place in places:
        for name, value in place.items():
            if isinstance(value, type):
                known.update(f"{name}.{member}" for member in vars(value))
    attributes = {"OverflowFlags.was_zeroed", "found_inf", "initialize", "scale_loss"}
    methods = {name.rpartition(".")[2] for name in known}
    assert {name for name in named - attributes if name not in known and name not in methods} == set()
    assert len(named) > 10
