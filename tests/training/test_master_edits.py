"""An edit of 16-bit parameters between steps reaches the masters of the elements that it changes, and no others; an
edit that is taken back, or changes nothing, costs a master none of its low bits. So it is with split masters.

Guards: training/masters, training/split_masters, training/model_hooks.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from training import backward

import amp_patch as amp

LEVELS = {
    "O2": {"opt_level": "O2"},
    "O5": {"opt_level": "O5"},
    "O5 split": {"opt_level": "O5", "split_masters": True},
}
LOWS = {"O2": torch.float16, "O5": torch.bfloat16, "O5 split": torch.bfloat16}
STEPS = 12
LR = 2.0**-14  # so small that a step moves a 16-bit weight by less than its spacing
BATCH = [[0, 1, 2], [3, 4, 0]]
TARGETS = [1, 2]


@pytest.fixture(params=LEVELS)
def level(request):
    return request.param


class Words(nn.Module):
    """A table of words, whose norms a forward pass may bound, and a linear layer."""

    def __init__(self, max_norm=None):
        super().__init__()
        self.table = nn.Embedding(6, 4, max_norm=max_norm)
        self.last = nn.Linear(4, 3)

    def forward(self, words):
        return self.last(self.table(words).mean(1))


def loss_of(model):
    return F.cross_entropy(model(torch.tensor(BATCH)).float(), torch.tensor(TARGETS))


def start(level, max_norm=None):
    torch.manual_seed(0)
    model = Words(max_norm)
    model.level = LEVELS[level]
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    return amp.initialize(model, optimizer, **LEVELS[level], loss_scale=1.0, verbosity=0)


def train(level, touch=lambda model: None, max_norm=None):
    """The masters after some steps; `touch(model)` is called before each."""
    model, optimizer = start(level, max_norm)
    for _ in range(STEPS):
        optimizer.zero_grad()
        backward(loss_of(model), optimizer)
        touch(model)
        optimizer.step()
    masters = list(amp.master_params(optimizer))
    amp.reset()
    return masters


def spacing(level):
    """The relative spacing of bfloat16 if the lower half of a master stays when a script edits the weight in a pass."""
    return 2.0**-7 if level.get("split_masters") else 0.0


@torch.no_grad()
def touch_in_place(model):
    for parameter in model.parameters():
        parameter.add_(0)


def attack(model):
    """As FGM and AWP do: train on weights that are moved for one pass, and put those of before back."""
    backups = [parameter.data.clone() for parameter in model.parameters()]
    gradients = [parameter.grad for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.data.add_(0.5)
    loss_of(model)
    for parameter, backup, gradient in zip(model.parameters(), backups, gradients, strict=True):
        parameter.data = backup
        parameter.grad = gradient


def attack_in_place(model):
    """The same by edits that torch sees, and with what a forward and a checkpoint make of them."""
    backups = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5)
    loss_of(model)
    moved = model.state_dict()["last.bias"]
    rtol = spacing(model.level) / 2  # a forward pass with gradients lies behind
    torch.testing.assert_close(moved, model.last.bias.float(), rtol=rtol, atol=0)
    with torch.no_grad():
        for parameter, backup in zip(model.parameters(), backups, strict=True):
            parameter.copy_(backup)


@pytest.mark.parametrize("touch", [touch_in_place, attack, attack_in_place], ids=lambda one: one.__name__)
def test_an_edit_that_leaves_the_values_leaves_the_masters(level, touch):
    assert_equal(train(level, touch), train(level))


def load(model, optimizer):
    model.load_state_dict(copy.deepcopy(model.state_dict()))


def load_twice(model, optimizer):
    load(model, optimizer)
    load(model, optimizer)


def train_a_step(model, optimizer):
    optimizer.zero_grad()
    backward(loss_of(model), optimizer)
    optimizer.step()


def adopt_another(model, optimizer):
    other = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(other.parameters(), lr=LR)
    amp.initialize(other, optimizer, **model.level, loss_scale=1.0, verbosity=0)


def refresh(model, optimizer):
    amp.refresh()


def load_scales(model, optimizer):
    amp.load_state_dict(amp.state_dict())


def save(model, optimizer):
    model.state_dict()


def evaluate(model, optimizer):
    with torch.no_grad():
        loss_of(model)


def copy_weights(parameters, values):
    with torch.no_grad():
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)


def exchange_data(parameters, values):
    for parameter, value in zip(parameters, values, strict=True):
        parameter.data = value.to(parameter.dtype, copy=True)


def copy_data(parameters, values):
    for parameter, value in zip(parameters, values, strict=True):
        parameter.data.copy_(value)


BEFORE = [load, load_twice, train_a_step, adopt_another, refresh]
WITHIN = [evaluate, save, refresh, load_scales, adopt_another]


@pytest.mark.parametrize("within", WITHIN, ids=lambda one: one.__name__)
@pytest.mark.parametrize("before", BEFORE, ids=lambda one: one.__name__)
def test_weights_that_are_swapped_out_and_back_keep_their_masters(level, before, within):
    for swap in (copy_weights, exchange_data, copy_data):
        model, optimizer = start(level)
        before(model, optimizer)
        expected = [master.detach().clone() for master in amp.master_params(optimizer)]
        stored = [parameter.detach().clone() for parameter in model.parameters()]
        average = [value * 0.5 + 1 for value in stored]
        swap(model.parameters(), average)
        if swap is not copy_data:  # which nothing shows
            within(model, optimizer)
            assert_equal(model.parameters(), average)
        evaluate(model, optimizer)
        assert_equal(model.parameters(), average)
        swap(model.parameters(), stored)
        evaluate(model, optimizer)
        assert_equal(model.state_dict().values(), expected)
        assert not torch.equal(expected[0], stored[0].float())
        amp.reset()


SWAPS = [copy_weights, exchange_data, copy_data]


@pytest.mark.parametrize("then", [refresh, evaluate, train_a_step], ids=lambda one: one.__name__)
@pytest.mark.parametrize("second", SWAPS, ids=lambda one: one.__name__)
@pytest.mark.parametrize("first", SWAPS, ids=lambda one: one.__name__)
def test_two_swaps_in_a_row_may_be_of_different_kinds(level, first, second, then):
    model, optimizer = start(level)
    train_a_step(model, optimizer)
    stored = [parameter.detach().clone() for parameter in model.parameters()]
    expected = [master.detach().clone() for master in amp.master_params(optimizer)]
    for swap in (first, second):
        swap(model.parameters(), [value * 0.5 + 1 for value in stored])
        evaluate(model, optimizer)
        swap(model.parameters(), stored)
    then(model, optimizer)
    moved = LR if then is train_a_step else 0.0
    torch.testing.assert_close(list(model.state_dict().values()), expected, rtol=0, atol=moved)
    assert_equal(amp.master_params(optimizer), model.state_dict().values())


def test_masters_that_were_edited_after_their_parameters_are_kept_over_a_swap(level):
    model, optimizer = start(level)
    copy_weights(model.parameters(), [parameter.detach().clamp(-0.2, 0.2) for parameter in model.parameters()])
    amp.refresh()
    for master in amp.master_params(optimizer):
        master.data.mul_(0.9375)
    amp.refresh()
    expected = [master.detach().clone() for master in amp.master_params(optimizer)]
    stored = [parameter.detach().clone() for parameter in model.parameters()]
    copy_weights(model.parameters(), [value * 0.5 for value in stored])
    evaluate(model, optimizer)
    copy_weights(model.parameters(), stored)
    evaluate(model, optimizer)
    assert_equal(amp.master_params(optimizer), expected)


def test_an_embedding_whose_norms_are_within_bounds_is_trained_as_one_without(level):
    assert_equal(train(level, max_norm=100.0), train(level))


def test_an_embedding_bounds_the_rows_that_are_too_long_and_trains_the_others(level):
    torch.manual_seed(0)
    is_long = Words().table.weight.detach().norm(dim=1) > 1.5
    assert 0 < is_long.sum() < 6
    tables = []
    for max_norm in (1.5, None):
        model, optimizer = start(level, max_norm)
        model(torch.tensor(BATCH))
        optimizer.step()
        tables.append(next(iter(amp.master_params(optimizer))).detach().clone())
        amp.reset()
    bounded, free = tables
    for row in range(5):
        if is_long[row]:
            assert float(bounded[row].norm()) <= 1.51 + spacing(LEVELS[level])
        else:
            assert torch.equal(bounded[row], free[row])


def test_an_edit_reaches_the_elements_that_it_changes_and_no_others(level):
    model, optimizer = start(level)
    before = [master.detach().clone() for master in amp.master_params(optimizer)]
    bound = 0.25
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-bound, bound)
    optimizer.zero_grad()
    optimizer.step()
    rounded = [master.to(LOWS[level]).float() for master in before]
    expected = [
        torch.where(low.abs() > bound, low.clamp(-bound, bound), master)
        for low, master in zip(rounded, before, strict=True)
    ]
    assert any((low.abs() > bound).any() and (low.abs() < bound).any() for low in rounded)
    assert_equal(amp.master_params(optimizer), expected)


def assert_equal(left, right):
    left, right = list(left), list(right)
    assert len(left) == len(right) > 0
    for a, b in zip(left, right, strict=True):
        assert torch.equal(a, b)


def test_weights_that_are_put_back_after_a_step_to_nan_stay(level):
    model, optimizer = start(level)
    saved = [parameter.detach().clone() for parameter in model.parameters()]
    backward(loss_of(model) * float("nan"), optimizer)
    optimizer.step()
    assert all(master.isnan().any() for master in amp.master_params(optimizer))
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), saved, strict=True):
            parameter.copy_(value)
    optimizer.zero_grad()
    optimizer.step()
    assert_equal(model.parameters(), saved)
    assert_equal([master.to(LOWS[level]) for master in amp.master_params(optimizer)], saved)


def test_an_edit_right_after_loading_stays(level):
    model, optimizer = start(level)
    saved = {name: value * 2 for name, value in model.state_dict().items()}
    model.load_state_dict(saved)
    with torch.no_grad():
        model.last.bias.fill_(3.0)
    loss_of(model)
    assert_equal(amp.master_params(optimizer), {**saved, "last.bias": torch.full((3,), 3.0)}.values())
    with torch.no_grad():
        model.last.bias.fill_(5.0)
    amp.reset()
    assert_equal(model.parameters(), {**saved, "last.bias": torch.full((3,), 5.0)}.values())


def test_where_both_sides_were_edited_right_after_loading_the_masters_count(level):
    model, optimizer = start(level)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(saved)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-0.1, 0.1)
        for master in amp.master_params(optimizer):
            master.mul_(0.9375)
    loss_of(model)
    for name, parameter in model.named_parameters():
        expected = saved[name] * 0.9375
        assert torch.equal(model.state_dict()[name], expected)
        assert torch.equal(parameter, expected.to(LOWS[level]))


def test_float32_gradients_from_before_initialize_stay_float32(level):
    model = nn.Linear(2, 2, bias=False)
    model.weight.grad = torch.full((2, 2), 1e6 + 1)  # more than float16 holds, and more digits than bfloat16
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    amp.initialize(model, optimizer, **LEVELS[level], verbosity=0)
    assert [master.grad.tolist() for master in amp.master_params(optimizer)] == [[[1e6 + 1] * 2] * 2]
    amp.reset()
    assert model.weight.grad.tolist() == [[1e6 + 1] * 2] * 2
