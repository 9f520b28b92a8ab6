"""Steps whose flag is still on its way to the host: fused optimizers skip on the device, and counters, messages and
errors come later.

On a CPU every flag is there at once. `late` makes the host see flags late, as with a GPU, and counts how often it waits
for one.
"""

import contextlib
import copy
import logging
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from devices import IS_SIM
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch_state import VERSION
from training import take_step

import amp_patch as amp
from amp_patch.apex.contrib import optimizers as contrib
from amp_patch.apex.optimizers import FusedAdam, FusedLAMB, FusedSGD
from amp_patch.training.step_log import Outcome

PACKAGE = str(Path(amp.__file__).parent)

OPTIMIZERS = {
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "AdamW-amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "SGD-momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
    "FusedAdam": lambda p: FusedAdam(p, lr=0.01, weight_decay=0.1),
    "FusedAdam-L2": lambda p: FusedAdam(p, lr=0.01, weight_decay=0.1, adam_w_mode=False, bias_correction=False),
    "FusedSGD": lambda p: FusedSGD(p, lr=0.1),
    "FusedSGD-momentum": lambda p: FusedSGD(p, lr=0.1, momentum=0.9, dampening=0.1),
}
OVERFLOWS = (2, 5, 6)


class Device:
    """What the host sees of the device's numbers."""

    def __init__(self):
        self.is_done = False
        self.waits = 0


@pytest.fixture
def late(monkeypatch):
    device, read = Device(), Outcome.read

    def read_waiting(self):
        device.waits += not (self.is_read or device.is_done)
        read(self)

    monkeypatch.setattr(Outcome, "is_known", lambda self: self.is_read or device.is_done)
    monkeypatch.setattr(Outcome, "read", read_waiting)
    return device


def make(build, level="O1", **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    optimizer = build(model.parameters())
    return amp.initialize(model, optimizer, opt_level=level, **{"loss_scale": "dynamic", "verbosity": 0, **options})


def step(model, optimizer, seed, factor=1.0):
    generator = torch.Generator().manual_seed(seed)
    loss = F.cross_entropy(
        model(torch.randn(6, 4, generator=generator)), torch.randint(0, 3, (6,), generator=generator)
    )
    take_step(loss * factor, optimizer)


def train(build, level, overflows=OVERFLOWS, steps=8):
    model, optimizer = make(build, level)
    for number in range(steps):
        step(model, optimizer, number, float("inf") if number in overflows else 1.0)
    return model, optimizer


def values(model, optimizer):
    """Every number that training goes on from.

    A state that was never made counts as zeros, which is what it starts from.
    """
    states = optimizer.state_dict()["state"].values()
    return [
        *model.state_dict().values(),
        *(value for state in states for value in state.values() if torch.is_tensor(value)),
        *(torch.tensor(group.get("step", 0)) for group in optimizer.state_dict()["param_groups"]),
    ]


@pytest.mark.parametrize(
    ("name", "level"), [*((name, "O2") for name in OPTIMIZERS), ("AdamW", "O1"), ("FusedSGD", "O1")]
)
def test_skipping_on_the_device_trains_as_skipping_on_the_host(name, level, late):
    late.is_done = True
    model, optimizer = train(OPTIMIZERS[name], level)
    expected = copy.deepcopy(values(model, optimizer))
    scales = amp.stats().loss_scales
    amp.reset()
    late.is_done = False
    model, optimizer = train(OPTIMIZERS[name], level)
    if (name, VERSION) != ("Adagrad", (2, 6)):  # which reads no flag, so that each step waits
        assert late.waits == ("momentum" in name)  # its first step makes the buffers
    found = values(model, optimizer)
    assert len(found) == len(expected) and all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    stats = amp.stats()
    assert (stats.steps, stats.steps_skipped, stats.loss_scales) == (5, 3, scales)


def test_an_overflow_in_the_very_first_step(late):
    for build in (OPTIMIZERS["AdamW"], OPTIMIZERS["SGD-momentum"], OPTIMIZERS["FusedSGD-momentum"]):
        model, optimizer = train(build, "O1", overflows=(0, 1), steps=4)
        amp.stats()
        found = [value.clone() for value in model.state_dict().values()]
        amp.reset()
        model, optimizer = make(build)
        for number in (2, 3):
            step(model, optimizer, number)
        assert all(torch.equal(a, b) for a, b in zip(found, model.state_dict().values(), strict=True))
        amp.reset()


def test_whether_a_step_was_skipped_is_known_when_it_is_asked(late):
    model, optimizer = make(OPTIMIZERS["AdamW"])
    for number, factor in enumerate((1.0, float("nan"), 1.0)):
        late.waits = 0
        step(model, optimizer, number, factor)
        assert late.waits == 0
        assert optimizer.step_was_skipped is (factor != 1.0)
        assert late.waits > 0


def test_messages_come_in_order_with_the_scales_of_their_steps(late, caplog):
    caplog.set_level(logging.INFO, logger="amp_patch")
    model, optimizer = make(OPTIMIZERS["AdamW"])
    for number in range(3):
        step(model, optimizer, number, float("inf"))
    assert not [record for record in caplog.records if "overflow" in record.message]
    late.is_done = True
    step(model, optimizer, 3)
    told = [record.message.rsplit(" ", 1)[1] for record in caplog.records if "overflow" in record.message]
    assert told == ["32768.0", "16384.0", "8192.0"] and late.waits == 0


def test_messages_come_at_the_latest_when_the_session_is_closed(late, caplog):
    caplog.set_level(logging.INFO, logger="amp_patch")
    model, optimizer = make(OPTIMIZERS["SGD"])
    step(model, optimizer, 0, float("inf"))
    amp.reset()
    assert [record.message for record in caplog.records if "overflow" in record.message] == [
        "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0"
    ]


def test_a_hundred_skips_end_in_an_error_once_they_are_known(late):
    model, optimizer = make(OPTIMIZERS["AdamW"])
    for number in range(100):
        step(model, optimizer, number, float("nan"))
    late.is_done = True
    with (
        pytest.warns(UserWarning, match="fallen to"),
        pytest.raises(amp.GradientOverflowError, match=r"101 steps in a row.*0\.weight"),
    ):
        step(model, optimizer, 100, float("nan"))


def test_a_static_scale_waits_for_nothing_and_warns_when_it_is_known(late):
    model, optimizer = make(lambda p: torch.optim.SGD(p, lr=0.1), loss_scale=128.0)
    step(model, optimizer, 0, float("inf"))
    assert late.waits == 0
    with pytest.warns(UserWarning, match="non-finite gradients under a static loss scale") as caught:
        amp.stats()
    assert caught[0].filename == __file__


class Counting:
    """Does more in a step than the class beside it."""

    steps_of_mine = 0

    def step(self, closure=None):
        self.steps_of_mine += 1
        return super().step(closure)


class CountingAdamW(Counting, torch.optim.AdamW): ...


class CountingFusedAdam(Counting, FusedAdam): ...


class Plain(torch.optim.AdamW):
    """An optimizer with torch's step."""


def hooked(parameters):
    optimizer = torch.optim.AdamW(parameters, lr=0.01, fused=True)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


def with_two_kinds_of_group(parameters):
    first, *rest = parameters
    return torch.optim.AdamW(
        [{"params": [first], "fused": False, "foreach": False}, {"params": rest}], lr=0.01, fused=True
    )


def with_own_step(parameters):
    optimizer = torch.optim.AdamW(parameters, lr=0.01, fused=True)
    optimizer.step = optimizer.step
    original = optimizer.step
    optimizer.step = lambda: original()
    return optimizer


def scheduled(parameters):
    optimizer = torch.optim.AdamW(parameters, lr=0.01, fused=True)
    torch.optim.lr_scheduler.StepLR(optimizer, 10)
    return optimizer


@pytest.mark.parametrize(
    ("build", "waits"),
    [
        (lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True), True),
        (lambda p: CountingAdamW(p, lr=0.01, fused=True), True),
        (lambda p: Plain(p, lr=0.01, fused=True), False),
        (hooked, True),
        (with_two_kinds_of_group, True),
        (with_own_step, True),
        (scheduled, False),
        (lambda p: CountingFusedAdam(p, lr=0.01), True),
        (lambda p: FusedLAMB(p, lr=0.01), True),
        (lambda p: contrib.FusedAdam(p, lr=0.01), True),
    ],
    ids=[
        *("foreach", "own step", "subclass", "hook", "one group not fused", "instance step", "LR scheduler"),
        *("own step around FusedAdam", "FusedLAMB", "FusedAdam of 2019"),
    ],
)
def test_only_fused_steps_that_are_known_are_trusted_to_skip(build, waits, late):
    model, optimizer = make(build)
    step(model, optimizer, 0)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    late.waits = 0
    step(model, optimizer, 1, float("inf"))
    assert bool(late.waits) is waits
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert optimizer.step_was_skipped is True and vars(optimizer).get("steps_of_mine", 1) == 1


def test_hooks_on_all_optimizers_see_no_skipped_step(late):
    calls = []
    model, optimizer = make(OPTIMIZERS["AdamW"])
    handle = register_optimizer_step_post_hook(lambda *_: calls.append(1))
    try:
        step(model, optimizer, 0)
        step(model, optimizer, 1, float("inf"))
    finally:
        handle.remove()
    assert len(calls) == 1 and optimizer.step_was_skipped is True
    late.waits = 0
    step(model, optimizer, 2)
    assert late.waits == 0


def test_a_failing_step_leaves_no_flag_behind(late, monkeypatch):
    model, optimizer = make(OPTIMIZERS["Adam"])
    flags = []

    def fail(*args, found_inf, **kwargs):
        flags.append(found_inf.item())
        raise RuntimeError("out of memory")

    monkeypatch.setattr(sys.modules["torch.optim.adam"], "_fused_adam", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        step(model, optimizer, 0)
    assert flags == [0.0] and not hasattr(optimizer, "found_inf")
    monkeypatch.undo()
    step(model, optimizer, 1)
    assert amp.stats().steps == 1


def test_a_step_in_the_middle_of_a_pass_is_judged_by_what_there_was(late):
    model, optimizer = make(OPTIMIZERS["AdamW"], max_loss_scale=1024.0)
    with amp.scale_loss(model(torch.ones(2, 4)).sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
        optimizer.step()
        (model(torch.ones(2, 4)).sum() * float("inf")).backward()
    assert optimizer.step_was_skipped is False
    optimizer.step()
    assert optimizer.step_was_skipped is True


def test_the_name_that_is_asked_is_no_longer_torchs_after_a_reset():
    other = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    _, optimizer = make(OPTIMIZERS["AdamW"])
    assert optimizer.step_was_skipped is False and not hasattr(other, "step_was_skipped")
    other.step_was_skipped = True
    assert other.step_was_skipped is True
    amp.reset()
    assert not hasattr(torch.optim.Optimizer, "step_was_skipped") and not hasattr(optimizer, "step_was_skipped")


# ---- what a step costs -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def counted_calls(counts, part):
    """Count the functions of the package that are entered in the block."""
    counts[part] = 0

    def see(frame, event, _):
        counts[part] += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    sys.setprofile(see)
    try:
        yield
    finally:
        sys.setprofile(None)


def count_calls(level, layers):
    """Of a step in the middle of a training, with an optimizer that calls no patched op."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    counts = {}
    for _ in range(5):
        loss = model(torch.ones(2, 4)).float().sum()
        block = amp.scale_loss(loss, optimizer)
        with counted_calls(counts, "enter"):
            scaled_loss = block.__enter__()
        scaled_loss.backward()
        with counted_calls(counts, "leave"):
            block.__exit__(None, None, None)
        with counted_calls(counts, "step"):
            optimizer.step()
        optimizer.zero_grad()
    amp.reset()
    return counts


@pytest.mark.parametrize(
    ("level", "most"),
    [
        ("O1", (20, 25, 40 if VERSION >= (2, 7) else 42)),  # torch 2.6: two show Dynamo what a region does
        ("O2", (25, 45, 55)),
        ("O4", (10, 8, 30)),
        ("O5", (15, 28 if IS_SIM else 25, 40)),  # a device widens gradients by kernels for many
    ],
)
def test_a_block_and_a_step_enter_few_functions_however_many_parameters_there_are(level, most):
    counts = count_calls(level, 2)
    assert counts == count_calls(level, 20)
    assert all(count <= limit for count, limit in zip(counts.values(), most, strict=True)), counts
