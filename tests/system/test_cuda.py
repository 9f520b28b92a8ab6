"""What only a CUDA device shows: syncs, kernel counts, float16 against torch.autocast with its GradScaler, memory, CUDA
graphs.

Needs nothing beyond the repository and the packages of requirements-dev.txt. `benchmarks/gpu.py` runs these with the
benchmarks in one go.
"""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch_state import requires_cuda

import amp_patch as amp
from amp_patch.session import current

pytestmark = [pytest.mark.cuda, requires_cuda]

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
    model = Net().cuda()
    return model, build(model.parameters())


def batch(seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(16, 3, 8, 8, device="cuda", generator=generator), torch.randint(
        10, (16,), device="cuda", generator=generator
    )


def take_step(model, optimizer, data, factor=1.0):
    images, labels = data
    loss = F.cross_entropy(model(images), labels)
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
    bad = torch.tensor(float("inf"), device="cuda")
    for seed in range(10):  # copies of weights, cuDNN's choices, and momentum, which only a good step makes
        take_step(model, optimizer, data[seed])
    assert amp.stats().steps > 0
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number, images_and_labels in enumerate(data):
            take_step(model, optimizer, images_and_labels, factor=bad if number == 7 and level in ("O1", "O2") else 1.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stats = amp.stats()
    assert stats.steps + stats.steps_skipped == 30 and (stats.steps_skipped > 0 or level in ("O4", "O5"))
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


def test_other_optimizers_wait_once_in_a_step():
    model, optimizer = make(KINDS["AdamW-foreach"])
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    for seed in range(10):
        take_step(model, optimizer, batch(seed))
    data = [batch(seed) for seed in range(5)]
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for images_and_labels in data:
                take_step(model, optimizer, images_and_labels)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len([warning for warning in caught if "synchroniz" in str(warning.message)]) <= len(data)


def test_a_skip_is_known_one_step_later_without_being_asked_for(caplog):
    caplog.set_level("INFO", logger="amp_patch")
    model, optimizer = make()
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    take_step(model, optimizer, batch(), factor=float("inf"))
    torch.cuda.synchronize()
    take_step(model, optimizer, batch(1))
    assert "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0" in caplog.text
    assert optimizer.step_was_skipped is False


# ---- the same numbers ------------------------------------------------------------------------------------------------


def test_o1_by_autocasts_lists_is_autocast_with_its_scaler_to_the_bit(deterministic):
    losses = []
    for is_ours in (False, True):
        model, optimizer = make(KINDS["AdamW-foreach"])
        found = []
        if is_ours:
            amp.initialize(model, optimizer, opt_level="O1", lists="autocast-cuda", verbosity=0)
            found = [take_step(model, optimizer, batch(seed)) for seed in range(12)]
        else:
            scaler = torch.amp.GradScaler("cuda")
            for seed in range(12):
                images, labels = batch(seed)
                with torch.autocast("cuda", torch.float16):
                    loss = F.cross_entropy(model(images), labels)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                found.append(loss.detach())
        losses.append(torch.stack(found))
        amp.reset()
    assert torch.equal(*losses)


@pytest.mark.parametrize(("name", "level"), [*((name, "O4") for name in KINDS), ("AdamW", "O1")])
def test_kept_copies_train_as_fresh_casts(name, level, deterministic):
    losses = []
    for is_cached in (True, False):
        model, optimizer = make(KINDS[name])
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        cache = current.require()._cache
        if not is_cached:
            cache.disown_all()
        losses.append(torch.stack([take_step(model, optimizer, batch(seed)) for seed in range(10)]))
        assert bool(cache._entries) is is_cached
        amp.reset()
    assert torch.equal(*losses)


def test_weights_are_refreshed_in_one_call_a_step():
    model, optimizer = make()
    amp.initialize(model, optimizer, opt_level="O4", verbosity=0)
    for seed in range(3):
        take_step(model, optimizer, batch(seed))
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        take_step(model, optimizer, batch(3))
    counts = {event.key: event.count for event in profiled.key_averages()}
    assert counts["aten::_foreach_copy_"] == 1


# ---- compiled --------------------------------------------------------------------------------------------------------


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
