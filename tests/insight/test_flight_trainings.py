"""A flight recorder says nothing about trainings that learn, at any time, and tells what grows in those that diverge.

Guards: insight/flight/growth, insight/flight/describe, insight/flight/sampler.
"""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from amp_patch import insight

STEPS, EVERY = 500, 5
LOOKS = (100, 200, 300, 400)
"""Steps at which the summary is read, beside the end."""


def mlp(*widths):
    layers = [nn.Linear(width, wider) for width, wider in zip(widths, widths[1:], strict=False)]
    parts = [part for layer in layers for part in (layer, nn.ReLU())]
    return nn.Sequential(*parts[:-1])


def points(count=64, width=8):
    return torch.randn(count, width)


def adam(net, lr=2e-3):
    return torch.optim.Adam(net.parameters(), lr=lr)


# ---- trainings that learn: a function that returns models, optimizers, and the loss of a step ------------------------


def memorize():
    net, x, y = mlp(8, 64, 64, 4), points(128), torch.randint(4, (128,))
    return net, adam(net), lambda step: F.cross_entropy(net(x), y)


def regress_with_warmup():
    net, truth = mlp(8, 32, 1), torch.randn(8, 1)
    optimizer = adam(net)

    def compute(step):
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1, step / 300)
        x = points()
        return F.mse_loss(net(x), (x @ truth).sin() * 30)

    return net, optimizer, compute


def separate():
    net, x = nn.Linear(8, 1), points(256)
    y = (x.sum(1, keepdim=True) > 0).float()
    optimizer = torch.optim.SGD(net.parameters(), lr=2.0, momentum=0.9)
    return net, optimizer, lambda step: F.binary_cross_entropy_with_logits(net(x), y)


def learn_from_zero():
    """The last layer begins at zero, so its output grows without a bound to its factor."""
    net = mlp(8, 64, 64, 4)
    nn.init.zeros_(net[-1].weight)
    nn.init.zeros_(net[-1].bias)
    x, y = points(128), torch.randint(4, (128,))
    return net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), lambda step: F.cross_entropy(net(x), y)


def remember():
    """An LSTM that gives back what it was given a step ago."""
    net = nn.Sequential(nn.LSTM(4, 16, batch_first=True))
    head = nn.Linear(16, 4)
    nets = nn.ModuleList([net, head])

    def compute(step):
        x = torch.randn(8, 8, 4).tanh()
        return F.mse_loss(head(net(x)[0])[:, 1:], x[:, :-1])

    return nets, adam(nets, 1e-2), compute


def estimate_rare_values():
    net = mlp(8, 32, 1)

    def compute(step):
        x = points() * torch.rand(64, 1) ** -0.7
        return F.smooth_l1_loss(net(x), x.sum(1, keepdim=True).tanh())

    return net, adam(net), compute


# ---- trainings that diverge ------------------------------------------------------------------------------------------


def too_large_learning_rate():
    net, truth = nn.Linear(8, 1), torch.randn(8, 1)

    def compute(step):
        x = points(256)
        return F.mse_loss(net(x), x @ truth)

    return net, torch.optim.SGD(net.parameters(), lr=1.02), compute


def critic_without_bound():
    net = mlp(2, 64, 64, 1)
    return net, adam(net), lambda step: net(torch.randn(64, 2)).mean() - net(torch.randn(64, 2) + 2).mean()


def embedding_that_grows():
    net = nn.Embedding(50, 8)
    optimizer = torch.optim.SGD(net.parameters(), lr=2.0)
    return net, optimizer, lambda step: -net(torch.randint(50, (256,))).square().mean()


def recurrent_gain_above_one():
    net = nn.RNNCell(4, 16, nonlinearity="relu")
    nn.init.eye_(net.weight_hh)

    def compute(step):
        with torch.no_grad():
            net.weight_hh.mul_(1.001)
        hidden = torch.zeros(8, 16)
        for _ in range(12):
            hidden = net(torch.ones(8, 4), hidden)
        return hidden.mean()

    return net, torch.optim.SGD(net.parameters(), lr=1e-9), compute


def normalizer_of_a_vanishing_spread():
    net, scale = nn.Linear(8, 8), nn.Identity()
    whole = nn.ModuleDict({"net": net, "scale": scale})

    def compute(step):
        spread = net(points())
        scale((spread.var(0) + 1e-14).rsqrt())
        return spread.square().mean()

    return whole, torch.optim.SGD(net.parameters(), lr=0.08), compute


def targets_that_drift():
    net = mlp(8, 32, 1)

    def compute(step):
        x = points()
        return F.mse_loss(net(x), x.sum(1, keepdim=True) * 1.02**step)

    return net, adam(net, 2e-2), compute


def follow(make):
    """Train, and return the summaries at `LOOKS` and at the end."""
    torch.manual_seed(0)
    net, optimizer, compute = make()
    recorder = insight.FlightRecorder(every=EVERY).attach(net, optimizer)
    summaries = []
    for step in range(STEPS):
        loss = compute(step)
        recorder.observe("the loss", loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step in LOOKS:
            summaries.append(recorder.summary())
        if not math.isfinite(loss.item()):
            break
    recorder.close()
    return [*summaries, recorder.summary()]


HEALTHY = [memorize, regress_with_warmup, separate, learn_from_zero, remember, estimate_rare_values]
DIVERGING = {
    too_large_learning_rate: "the output of the model itself",
    critic_without_bound: "the output of 4",
    embedding_that_grows: "the output of the model itself",
    recurrent_gain_above_one: "the output of the model itself",
    normalizer_of_a_vanishing_spread: "the output of scale",
    targets_that_drift: "the output of 2",
}


@pytest.mark.parametrize("make", HEALTHY, ids=lambda make: make.__name__)
def test_nothing_is_said_about_a_training_that_learns(make):
    assert [text for text in follow(make) if not text.endswith(": nothing has grown")] == []


@pytest.mark.parametrize("make", DIVERGING, ids=lambda make: make.__name__)
def test_what_grows_is_told_at_the_end(make):
    assert f"{DIVERGING[make]} grew from " in follow(make)[-1]
