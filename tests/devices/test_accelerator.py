"""A device that works on its own waits as little as promised, and gives bit by bit the numbers of torch.autocast with
its GradScaler; on CUDA, compiled models train as eager ones.

Guards: training/step_log, training/fused_skip, training/optimizer.
"""

import pytest
import torch
import torch.nn.functional as F
from devices import DEVICE, no_sync, requires_device, syncs
from torch import nn

import amp_patch as amp

pytestmark = requires_device

FUSED = {
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-3, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, fused=True),
    "SGD-momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True),
}
KINDS = {
    **FUSED,
    "AdamW-foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
    "AdamW-loop": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=False, fused=False),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
}
LEVELS = ("O1", "O2", "O4", "O5")


class Net(nn.Module):
    """A convolution, a BatchNorm, two linear layers and a LayerNorm."""

    def __init__(self):
        super().__init__()
        self.convolution, self.batch_norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.hidden, self.norm, self.last = nn.Linear(16 * 8 * 8, 64), nn.LayerNorm(64), nn.Linear(64, 10)

    def forward(self, images):
        features = F.relu(self.batch_norm(self.convolution(images))).flatten(1)
        return self.last(self.norm(F.gelu(self.hidden(features))))


def make(build=FUSED["AdamW"]):
    torch.manual_seed(0)
    model = Net().to(DEVICE)
    return model, build(model.parameters())


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(16, 3, 8, 8, generator=generator)
    return images.to(DEVICE), torch.randint(10, (16,), generator=generator).to(DEVICE)


def loss_of(model, data):
    images, labels = data
    return F.cross_entropy(model(images).float(), labels)


def take_step(model, optimizer, data, factor=1.0):
    loss = loss_of(model, data)
    with amp.scale_loss(loss * factor, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@pytest.fixture
def deterministic():
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.deterministic = True
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.backends.cudnn.deterministic = before[1]


# ---- syncs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "level"), [*zip(FUSED, LEVELS, strict=True), ("SGD-momentum", "O1")])
def test_twenty_steps_of_a_fused_optimizer_wait_for_nothing(name, level):
    model, optimizer = make(FUSED[name])
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    data = [batch(seed) for seed in range(20)]
    bad = torch.tensor(float("inf"), device=DEVICE)
    for seed in range(10):  # copies of weights, cuDNN's choices, and momentum, which only a good step makes
        take_step(model, optimizer, data[seed])
    assert amp.stats().steps > 0
    with no_sync():
        for number, images_and_labels in enumerate(data):
            take_step(model, optimizer, images_and_labels, factor=bad if number == 7 and level in ("O1", "O2") else 1.0)
    stats = amp.stats()
    assert stats.steps + stats.steps_skipped == 30 and (stats.steps_skipped > 0 or level in ("O4", "O5"))
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


@pytest.mark.parametrize(("loss_scale", "most"), [("dynamic", 5), (1024.0, 0)], ids=["dynamic", "static"])
def test_other_optimizers_wait_once_in_a_step_if_it_may_be_skipped(loss_scale, most):
    model, optimizer = make(KINDS["AdamW-foreach"])
    amp.initialize(model, optimizer, opt_level="O1", loss_scale=loss_scale, verbosity=0)
    for seed in range(10):
        take_step(model, optimizer, batch(seed))
    data = [batch(seed) for seed in range(5)]
    with syncs() as waits:
        for images_and_labels in data:
            take_step(model, optimizer, images_and_labels)
    assert len(waits) <= most


def test_a_skip_is_known_one_step_later_without_being_asked_for(caplog):
    caplog.set_level("INFO", logger="amp_patch")
    model, optimizer = make()
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    take_step(model, optimizer, batch(), factor=float("inf"))
    torch.accelerator.synchronize()
    take_step(model, optimizer, batch(1))
    assert "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0" in caplog.text
    assert optimizer.step_was_skipped is False


@pytest.mark.parametrize("level", ["O0", *LEVELS])
def test_optimizers_may_step_in_the_backward_pass(level):
    """Hooks on gradients run in a thread of torch's there, and find the block of the thread that waits for it."""
    weights = []
    for is_in_hook in (False, True):
        model, _ = make()
        parameters = list(model.parameters())
        optimizers = [torch.optim.SGD([parameter], lr=0.1) for parameter in parameters]
        amp.initialize(model, optimizers, opt_level=level, loss_scale=128.0, verbosity=0)
        if is_in_hook:
            for parameter, optimizer in zip(parameters, optimizers, strict=True):
                parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
        with amp.scale_loss(loss_of(model, batch()), optimizers) as scaled_loss:
            scaled_loss.backward()
        if not is_in_hook:
            for optimizer in optimizers:
                optimizer.step()
        weights.append([value.clone() for value in model.state_dict().values()])
        amp.reset()
    assert all(map(torch.equal, *weights))


# ---- the same numbers ------------------------------------------------------------------------------------------------


def train_by_autocast(model, optimizer, data, low):
    scaler = torch.amp.GradScaler(DEVICE, enabled=low is torch.float16)
    losses = []
    for images_and_labels in data:
        with torch.autocast(DEVICE, low):
            loss = loss_of(model, images_and_labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize(("name", "level"), [*((name, "O4") for name in KINDS), ("AdamW-foreach", "O1")])
def test_autocasts_lists_train_as_autocast_to_the_bit(name, level, deterministic):
    """Weights are cast once a step, not in each forward: kept copies are as good as fresh ones. The loss takes float32:
    of 16-bit logits autocast rounds the logarithms, which the list cannot say.
    """
    data = [batch(seed) for seed in range(10)]
    model, optimizer = make(KINDS[name])
    expected = train_by_autocast(model, optimizer, data, torch.float16 if level == "O1" else torch.bfloat16)
    model, optimizer = make(KINDS[name])
    amp.initialize(model, optimizer, opt_level=level, lists="autocast-cuda", verbosity=0)
    found = [take_step(model, optimizer, images_and_labels) for images_and_labels in data]
    assert torch.equal(torch.stack(found), torch.stack(expected))


# ---- compiled --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(DEVICE != "cuda", reason="compiles for a CUDA device")
@pytest.mark.parametrize("level", ["O1", "O5"])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_model_trains_as_an_eager_one(mode, level):
    losses = []
    for is_compiled in (False, True):
        torch.compiler.reset()
        model, optimizer = make()
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        run = torch.compile(model, mode=None if mode == "default" else mode) if is_compiled else model
        losses.append(torch.stack([take_step(run, optimizer, batch(seed)) for seed in range(8)]))
        amp.reset()
    torch.compiler.reset()
    torch.testing.assert_close(*losses, rtol=2e-2, atol=2e-2)
    assert losses[1][-1] != losses[1][0]
