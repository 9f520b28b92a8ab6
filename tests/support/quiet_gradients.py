"""Scripts whose gradients are zero in float16, and scripts in which autocast goes on with a copy of an older weight."""

import torch
from gpt import make_gpt
from quiet_cases import STALE, ZERO, case, copy_of, draw, gradients_of, labels, linear, mlp, moved
from torch import nn
from torch.nn import functional as F

import amp_patch as amp

WEIGHTS = ("weight", "bias")


def scaled(given, model, optimizer, compute_loss, scaler):
    """Train with a GradScaler; the mended script leaves the scale to its default."""
    if given.is_mended:
        scaler = torch.amp.GradScaler("cpu")
    scaler = torch.amp.GradScaler("cpu", enabled=False) if given.is_float32 else scaler

    def step():
        optimizer.zero_grad()
        with given.autocast():
            loss = compute_loss()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    # Gradients are unscaled in place by the step of an enabled scaler, unless the optimizer does it itself.
    return step, gradients_of(model)


# ---- zero gradients --------------------------------------------------------------------------------------------------


@case(
    "a loss with a weight of 1e-5 under float16 autocast without a GradScaler",
    ZERO,
    WEIGHTS,
    low=torch.float16,
    lost=0.5,
)
def no_scaler(given):
    model = make_gpt(width=16, tokens=40)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    tokens = labels(8 * 33, 40).view(8, 33)

    def loss():
        return 1e-5 * F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    return scaled(given, model, optimizer, loss, torch.amp.GradScaler("cpu", enabled=False))


@case("a GradScaler whose scale a script pins at one", ZERO, WEIGHTS, low=torch.float16, lost=0.5)
def scaler_pinned_at_one(given):
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 3, padding=1))
    optimizer, x = torch.optim.Adam(model.parameters(), lr=1e-4), draw(4, 3, 16, 16)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=10**9)
    return scaled(given, model, optimizer, lambda: 1e-5 * F.mse_loss(model(x).float(), 0.1 * x), scaler)


@case("a GradScaler that was loaded with a scale that had fallen to 2**-18", ZERO, WEIGHTS, low=torch.float16, lost=0.5)
def scaler_that_has_fallen(given):
    model, x, y = mlp(), draw(256, 16), labels(256, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu")
    scaler.load_state_dict({**scaler.state_dict(), "scale": 2.0**-18})
    return scaled(given, model, optimizer, lambda: F.cross_entropy(model(x), y), scaler)


@case("an auxiliary loss with a weight of 1e-7 at O1 with a loss scale of 1", ZERO, "aux", low=torch.float16, lost=0.5)
def loss_with_a_tiny_weight(given):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head, self.aux = linear(16, 32), linear(32, 4), linear(32, 8)

        def forward(self, x):
            h = torch.relu(self.body(x))
            return self.head(h), self.aux(h)

    model, x, y = Net(), draw(64, 16), labels(64, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    measure = gradients_of(model.aux)

    def loss():
        logits, rest = model(x)
        return F.cross_entropy(logits.float(), y) + 1e-7 * rest.float().square().mean()

    if given.is_float32:
        return lambda: given.descend(loss(), optimizer), measure
    scale = 2.0**16 if given.is_mended else 1.0
    amp.initialize(model, optimizer, opt_level="O1", loss_scale=scale, verbosity=0)
    return lambda: given.take(loss(), optimizer), measure


def at_o2(given, model, compute_loss):
    """Train at O2 with a loss scale of 1; the mended script has a larger one. Measures how far the weights move."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    if given.is_float32:
        return lambda: given.descend(compute_loss(), optimizer), list(model.parameters())
    amp.initialize(model, optimizer, opt_level="O2", loss_scale=2.0**14 if given.is_mended else 1.0, verbosity=0)
    return lambda: given.take(compute_loss(), optimizer), list(amp.master_params(optimizer))


@case("a deep network at O2 whose gradients fade on their way back", ZERO, WEIGHTS, low=torch.float16, lost=0.5)
def deep_network(given):
    layers = [layer for seed in range(12) for layer in (linear(16, 16, 0.3, seed=seed), nn.Tanh())]
    model, x = nn.Sequential(*layers, linear(16, 1)), draw(32, 16)
    step, weights = at_o2(given, model, lambda: (model(x).float() + 0.1).square().mean() * 1e-2)
    return step, moved(weights[:8])  # of the first layers


@case("the mean of a squared error over 200,000 dark pixels at O2", ZERO, WEIGHTS, low=torch.float16, lost=0.5)
def mean_over_pixels(given):
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 3, 1))
    images = torch.rand(4, 3, 128, 128, generator=torch.Generator().manual_seed(1)) * 0.005
    with torch.no_grad():
        model[0].bias.zero_()
        model[2].bias.zero_()
    step, weights = at_o2(given, model, lambda: F.mse_loss(model(images).float(), 0.5 * images))
    return step, moved(weights)


# ---- stale copies ----------------------------------------------------------------------------------------------------


@case("an epoch of training inside one region of autocast", STALE, WEIGHTS, steps=2, rounding=0.05, lost=0.1)
def epoch_in_a_region(given):
    model = nn.Sequential(linear(8, 16), nn.Tanh(), linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    x = draw(32, 8)
    y = x[:, :1] * x[:, 1:2]

    def step():
        with given.autocast(enabled=not given.is_mended):
            for _ in range(4):
                with given.autocast(enabled=given.is_mended):
                    loss = F.mse_loss(model(x).float(), y)
                given.descend(loss, optimizer)
        return loss

    return step, moved(model)


@case("weights edited through p.data while a region of autocast is open", STALE, WEIGHTS, steps=2, rounding=0.05)
def edits_in_a_region(given):
    model, x = nn.Sequential(linear(8, 16), nn.GELU(), linear(16, 1)), draw(32, 8)

    def step():
        with given.autocast(enabled=not given.is_mended):
            for _ in range(2):
                with given.autocast(enabled=given.is_mended):
                    loss = (model(x).float() - x[:, :1]).square().mean()
                model.zero_grad()
                loss.backward()
                for p in model.parameters():
                    p.data = p.data - 0.3 * p.grad
        return loss

    return step


@case("averaged weights swapped in for a validation within one region", STALE, WEIGHTS, rounding=0.05, lost=0.1)
def averages_swapped_in(given):
    model, x, y = mlp(), draw(64, 16), labels(64, 4)
    average = copy_of(model)
    with torch.no_grad():
        for e in average.parameters():
            e.mul_(0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    validated = []

    def step():
        with given.autocast(enabled=not given.is_mended):
            with given.autocast(enabled=given.is_mended):
                loss = F.cross_entropy(model(x).float(), y)
            stored = [p.detach().clone() for p in model.parameters()]
            with torch.no_grad():
                for p, e in zip(model.parameters(), average.parameters(), strict=True):
                    p.data.copy_(e)
                with given.autocast(enabled=given.is_mended):
                    validated[:] = [F.cross_entropy(model(x).float(), y)]
                for p, back in zip(model.parameters(), stored, strict=True):
                    p.data.copy_(back)
        return given.descend(loss, optimizer)

    return step, lambda: validated[0]


@case("a validation in the region in which the step before it was taken", STALE, WEIGHTS, rounding=0.05, lost=0.1)
def validation_in_the_region(given):
    model, x, y = mlp(), draw(64, 16), labels(64, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=3.0)
    validated = []

    def step():
        with given.autocast(enabled=not given.is_mended):
            with given.autocast(enabled=given.is_mended):
                loss = F.cross_entropy(model(x).float(), y)
            given.descend(loss, optimizer)
            with torch.no_grad(), given.autocast(enabled=given.is_mended):
                validated[:] = [F.cross_entropy(model(x).float(), y)]
        return loss

    return step, lambda: validated[0]


@case(
    "a GAN whose generator is judged by the discriminator of before its step, in one region", STALE, WEIGHTS, lost=0.1
)
def discriminator_in_a_region(given):
    generator, judge = linear(8, 16), nn.Sequential(linear(16, 16), nn.Tanh(), linear(16, 1))
    of_generator = torch.optim.SGD(generator.parameters(), lr=0.5)
    of_judge = torch.optim.SGD(judge.parameters(), lr=1.0)
    real, z = draw(32, 16) + 1, draw(32, 8)

    def step():
        with given.autocast(enabled=not given.is_mended):
            with given.autocast(enabled=given.is_mended):
                made = generator(z)
                judged = F.softplus(-judge(real)).float().mean() + F.softplus(judge(made.detach())).float().mean()
            given.descend(judged, of_judge)
            with given.autocast(enabled=given.is_mended):
                loss = F.softplus(-judge(made)).float().mean()
            return given.descend(loss, of_generator)

    return step
