"""Each level trains exactly as a hand-written loop does.

Guards: training/optimizer, training/masters, training/model, training/unscaling.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from reference import make_batches, make_model, train_plainly, train_with_casts, train_with_masters
from training import train

import amp_patch as amp

F16, BF16 = torch.float16, torch.bfloat16
# The dtype of a level and its scale. That of O1 and O2 is dynamic, and kept where no gradient overflows.
LOWS = {"O1": (F16, 1024.0), "O2": (F16, 1024.0), "O4": (BF16, 1.0), "O5": (BF16, 1.0)}

OPTIMIZERS = {
    "sgd-momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
    "adamw-fused": lambda parameters: torch.optim.AdamW(parameters, lr=3e-3, fused=True),
}


def initialize_and_train(model, optimizer, batches, **options):
    model, optimizer = amp.initialize(model, optimizer, verbosity=0, **options)
    return train(model, optimizer, batches)


def assert_same_weights(left, right):
    for (name, a), (_, b) in zip(left.named_parameters(), right.named_parameters(), strict=True):
        assert torch.equal(a.float(), b.float()), name


@pytest.fixture(params=OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def make_optimizer(request):
    return request.param


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_casting_ops_equals_casts_written_by_hand(level, make_optimizer):
    batches, (low, scale) = make_batches(20), LOWS[level]
    ours, theirs = make_model(), make_model()
    losses = initialize_and_train(
        ours, make_optimizer(ours.parameters()), batches, opt_level=level, max_loss_scale=scale, compute="native"
    )
    assert amp.stats().loss_scales == (scale,)
    assert losses == train_with_casts(theirs, make_optimizer(theirs.parameters()), batches, low, scale)
    assert_same_weights(ours, theirs)
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_master_weights_equal_masters_written_by_hand(level, make_optimizer):
    batches, (low, scale) = make_batches(20), LOWS[level]
    ours, theirs = make_model(), make_model()
    optimizer = make_optimizer(ours.parameters())
    losses = initialize_and_train(ours, optimizer, batches, opt_level=level, max_loss_scale=scale, compute="native")
    assert amp.stats().loss_scales == (scale,)
    expected, masters = train_with_masters(theirs, make_optimizer, batches, low, scale)
    assert losses == pytest.approx(expected, abs=1e-6)
    for master, reference in zip(amp.master_params(optimizer), masters, strict=True):
        assert master.dtype is torch.float32
        torch.testing.assert_close(master, reference, rtol=0, atol=1e-6)
    assert_same_weights(ours, theirs)
    assert losses[-1] < losses[0] / 2


def test_o0_is_plain_float32():
    batches, make_optimizer = make_batches(10), OPTIMIZERS["adamw"]
    ours, theirs = make_model(), make_model()
    assert initialize_and_train(ours, make_optimizer(ours.parameters()), batches, opt_level="O0") == train_plainly(
        theirs, make_optimizer(theirs.parameters()), batches
    )
    assert_same_weights(ours, theirs)


def test_o3_is_the_model_in_the_low_dtype():
    def make_optimizer(parameters):
        return torch.optim.AdamW(parameters, lr=3e-3, eps=1e-4)  # 1e-8 is 0 in float16

    batches = make_batches(20)
    ours, theirs = make_model(), make_model()
    losses = initialize_and_train(ours, make_optimizer(ours.parameters()), batches, opt_level="O3", compute="native")
    assert losses == train_plainly(theirs.half(), make_optimizer(theirs.parameters()), batches, torch.float16)
    assert losses[-1] < losses[0] / 2
    assert_same_weights(ours, theirs)


@pytest.mark.parametrize("level", ["O1", "O5"])
def test_no_level_needs_scale_loss_when_the_scale_is_one(level):
    batches = make_batches(10)
    with_scale_loss, without = make_model(), make_model()
    options = {"opt_level": level, "loss_scale": 1.0}
    losses = initialize_and_train(
        with_scale_loss, torch.optim.SGD(with_scale_loss.parameters(), lr=0.05), batches, **options
    )
    weights = copy.deepcopy(with_scale_loss.state_dict())
    amp.reset()
    model, optimizer = amp.initialize(without, torch.optim.SGD(without.parameters(), lr=0.05), verbosity=0, **options)
    for (images, targets), expected in zip(batches, losses, strict=True):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), targets)
        loss.backward()
        optimizer.step()
        assert loss.item() == expected
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
