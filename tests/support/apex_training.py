"""A small network trained through `apex.amp`, for the tests of the stand-in."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from amp_patch.apex import amp
from amp_patch.apex.amp._amp_state import _amp_state

LEVELS = ["O0", "O1", "O2", "O3"]
OVERFLOWING = 1e30  # times the loss: finite in float32, and no activation overflows, so BatchNorm keeps its statistics


@pytest.fixture(autouse=True)
def state_of_a_new_process():
    """Each test starts as a script does; what it leaves in `_amp_state` goes away."""
    before = dict(vars(_amp_state))
    yield
    vars(_amp_state).clear()
    vars(_amp_state).update(before)


def make_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


def make_batches(count, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(5, 4, generator=generator), torch.randint(3, (5,), generator=generator)) for _ in range(count)]


def make_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def start(level="O2", **options):
    model = make_model()
    return amp.initialize(model, make_optimizer(model), opt_level=level, verbosity=0, **options)


def backward(model, optimizer, batch, api=amp, factor=1.0, **options):
    images, targets = batch
    loss = F.cross_entropy(model(images), targets) * factor
    with api.scale_loss(loss, optimizer, **options) as scaled_loss:
        scaled_loss.backward()
    return loss.item()


def train(model, optimizer, batches, api=amp):
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        losses.append(backward(model, optimizer, batch, api))
        optimizer.step()
    return losses


def overflow(model, optimizer):
    optimizer.zero_grad()
    backward(model, optimizer, make_batches(1)[0], factor=OVERFLOWING)


def weights(model):
    return [value.clone() for value in model.state_dict().values()]


def assert_equal(left, right):
    assert len(left) == len(right) > 0
    for a, b in zip(left, right, strict=True):
        assert torch.equal(a, b)
