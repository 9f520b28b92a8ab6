"""Training on the simulated device, whose kernels are those of the CPU, gives bit by bit what training on the CPU
gives, at every level, with every kind of optimizer, and however far the device is behind the host.

Guards: training/gradient_sums, training/unscaling, training/step_log, multi_tensor.
"""

import types

import pytest
import torch
import torch.nn.functional as F
from devices import IS_SIM, requires_sim
from torch import nn

import amp_patch as amp
from amp_patch.apex import amp as apex_amp
from amp_patch.apex import amp_C
from amp_patch.apex import optimizers as apex
from amp_patch.apex.normalization import FusedLayerNorm, FusedRMSNorm
from amp_patch.integrations.trackers import Tracker
from amp_patch.training.unscaling import change_scale_

if IS_SIM:
    import run_programs
    import simdev
    from training_programs import draw

pytestmark = requires_sim

OPTIMIZERS = {  # an eps of 1e-8 is 0 in the float16 of O3
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, foreach=False),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=3e-3, eps=1e-4, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=3e-3, eps=1e-4, fused=True),
}
APEX = {
    "apex-adam": lambda p: apex.FusedAdam(p, lr=3e-3, max_grad_norm=1.0),
    "apex-lamb": lambda p: apex.FusedLAMB(p, lr=3e-3),
    "apex-novograd": lambda p: apex.FusedNovoGrad(p, lr=3e-3),
    "apex-sgd": lambda p: apex.FusedSGD(p, lr=0.05, momentum=0.9),
}
NORMS = {
    "apex-adam": FusedLayerNorm,
    "apex-lamb": FusedRMSNorm,
    "apex-novograd": FusedLayerNorm,
    "apex-sgd": FusedRMSNorm,
}


class Net(nn.Module):
    """Two branches, so that each of two losses reaches parameters that the other does not."""

    def __init__(self, make_norm=nn.LayerNorm):
        super().__init__()
        self.convolution, self.batch_norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.norm, self.left, self.right = make_norm(64), nn.Linear(64, 5), nn.Linear(64, 3)

    def forward(self, images):
        hidden = self.norm(F.gelu(self.batch_norm(self.convolution(images))).flatten(1))
        return self.left(hidden), self.right(hidden)


def start(device, level, kind, **options):
    """A model and its optimizer, whose first numbers are drawn on the CPU. Products are those of the device."""
    torch.manual_seed(0)
    model = Net(NORMS.get(kind, nn.LayerNorm)).to(device)
    optimizer = {**OPTIMIZERS, **APEX}[kind](model.parameters())
    amp.initialize(model, optimizer, opt_level=level, num_losses=2, compute="native", verbosity=0, **options)
    return model, optimizer


def losses_of(model, number):
    """Two losses of a batch that is drawn on the CPU."""
    images = torch.randn(6, 1, 4, 4, generator=torch.Generator().manual_seed(number))
    left, right = model(images.to(model.left.weight.device))
    return left.float().square().mean(), right.float().exp().mean()


def backward(loss, optimizer, loss_id=0, **options):
    with amp.scale_loss(loss, optimizer, loss_id=loss_id, **options) as scaled_loss:
        scaled_loss.backward(retain_graph=True)


def sum_of_losses(model, number):
    """Where the first one is: they may be on two devices."""
    left, right = losses_of(model, number)
    return left + right.to(left.device)


def plain(model, optimizer, number):
    backward(sum_of_losses(model, number), optimizer)


def overflowing(model, optimizer, number):
    backward(losses_of(model, number)[0] * float("inf"), optimizer)


def two_losses(model, optimizer, number):
    left, right = losses_of(model, number)
    backward(left, optimizer)
    backward(right, optimizer, loss_id=1)


def two_losses_of_one_scale(model, optimizer, number):
    for loss in losses_of(model, number):
        backward(loss, optimizer)


def accumulated(model, optimizer, number):
    backward(sum_of_losses(model, number), optimizer, delay_unscale=True)
    backward(sum_of_losses(model, number + 100), optimizer)


def clipped(model, optimizer, number):
    plain(model, optimizer, number)
    torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.5)


def zeroed(model, optimizer, number):
    """What the first loss has left in one layer is zeroed in the block of the second."""
    left, right = losses_of(model, number)
    backward(left + right.to(left.device), optimizer)
    with amp.scale_loss(right, optimizer, loss_id=1) as scaled_loss:
        for parameter in model.right.parameters():
            if parameter.grad is not None:  # at O2 and O5 it is in the masters
                parameter.grad.zero_()
        scaled_loss.backward()


STEPS = (plain, overflowing, two_losses, accumulated, clipped, zeroed, two_losses_of_one_scale)


def train(model, optimizer, numbers):
    """One step of each kind after the other."""
    for number in numbers:
        STEPS[number % len(STEPS)](model, optimizer, number)
        optimizer.step()
        optimizer.zero_grad()


def everything(model, optimizer):
    """All that training has made, on the CPU."""
    tensors = [*model.state_dict().values(), *amp.master_params(optimizer)]
    for state in optimizer.state_dict()["state"].values():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    stats = amp.stats()
    return [tensor.detach().cpu().clone() for tensor in tensors], amp.state_dict(), stats.steps, stats.steps_skipped


def assert_same(found, expected):
    assert found[1:] == expected[1:] and len(found[0]) == len(expected[0])
    for ours, theirs in zip(found[0], expected[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


CASES = [(level, kind) for level in ("O1", "O2", "O5") for kind in OPTIMIZERS]
CASES += [("O0", "sgd"), ("O3", "adamw-foreach"), ("O4", "adamw-fused")]
CASES += zip(("O1", "O2", "O5", "O2"), APEX, strict=True)


@pytest.mark.parametrize(("level", "kind"), CASES)
def test_a_device_trains_as_the_cpu(level, kind):
    def run(device):
        model, optimizer = start(device, level, kind, loss_scale="dynamic")
        train(model, optimizer, range(12))
        found = everything(model, optimizer)
        amp.reset()
        return found

    expected = run("cpu")
    assert expected[3] >= 2
    for lag in (0, 50):
        with simdev.lag(lag):
            assert_same(run("sim"), expected)


@pytest.mark.parametrize(
    ("first", "second", "level"),
    [("cpu", "sim", "O1"), ("cpu", "sim", "O2"), ("sim", "cpu", "O1"), ("sim", "cpu", "O5"), ("sim", "sim:1", "O2")],
)
def test_a_run_goes_on_on_another_device(first, second, level, tmp_path):
    model, optimizer = start("cpu", level, "adamw-fused", loss_scale="dynamic")
    train(model, optimizer, range(12))
    expected = everything(model, optimizer)
    amp.reset()

    model, optimizer = start(first, level, "adamw-fused", loss_scale="dynamic")
    train(model, optimizer, range(5))
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()}
    torch.save(state, tmp_path / "state")
    before = amp.stats()
    amp.reset()
    state = torch.load(tmp_path / "state", map_location=second, weights_only=True)
    model, optimizer = start(second, level, "adamw-fused", loss_scale="dynamic")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    amp.load_state_dict(state["amp"])
    train(model, optimizer, range(5, 12))
    found = everything(model, optimizer)
    total = before.steps + found[2], before.steps_skipped + found[3]
    assert_same((*found[:2], *total), expected)


class Split(Net):
    """Most of it on one device, a branch and its loss on another."""

    def to(self, device):
        super().to("sim:0" if device == "split" else device)
        if device == "split":
            self.left.to("sim:1")
        return self

    def forward(self, images):
        hidden = F.gelu(self.batch_norm(self.convolution(images.to(self.convolution.weight.device)))).flatten(1)
        hidden = self.norm(hidden)
        return self.left(hidden.to(self.left.weight.device)), self.right(hidden)


@pytest.mark.parametrize("kind", ["adamw-foreach", "adamw-fused", "apex-adam"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_model_on_two_devices_trains_as_on_one(level, kind, monkeypatch):
    monkeypatch.setitem(globals(), "Net", Split)
    found = {}
    for device in ("cpu", "split"):
        model, optimizer = start(device, level, kind, loss_scale="dynamic")
        train(model, optimizer, (0, 1, 2, 3, 5, 6))  # clipped, a sum of norms has another order
        found[device] = everything(model, optimizer)
        amp.reset()
    assert_same(found["split"], found["cpu"])


def test_gradients_of_two_devices_have_one_norm_and_names_where_they_overflow(monkeypatch):
    monkeypatch.setitem(globals(), "Net", Split)
    found = {}
    for device in ("cpu", "split"):
        model, optimizer = start(device, "O1", "adamw-foreach", loss_scale=128.0)
        logged = {}
        tracker = Tracker(types.SimpleNamespace(log=lambda values, step, logged=logged: logged.update(values)), every=1)
        plain(model, optimizer, 0)
        assert all(
            scaled.item() == 128.0 for scaled in amp.scale([torch.ones_like(loss) for loss in losses_of(model, 0)])
        )
        tracker(optimizer)
        tracker.flush()
        with amp.scale_loss(losses_of(model, 0)[0], optimizer) as scaled_loss:
            scaled_loss.backward()
            model.left.weight.grad[0, 0] = float("inf")
        with pytest.warns(UserWarning, match=r"\(left\.weight\)"):
            optimizer.step()
            amp.stats()
        found[device] = logged["amp/grad_norm"]
        amp.reset()
    assert found["split"] == pytest.approx(found["cpu"], rel=1e-6)


@pytest.mark.parametrize(("before", "after"), [(2.0, 8.0), (None, 8.0), (2.0, None)])
def test_gradients_and_their_scales_may_be_on_two_devices(before, after):
    gradients = [torch.ones(3, device="sim:0"), torch.ones(3, device="sim:1")]
    scales = [
        value and torch.tensor(value, device="sim:0" if value == before else "sim:1") for value in (before, after)
    ]
    change_scale_(gradients, *scales)
    expected = torch.full((3,), (after or 1.0) / (before or 1.0))
    assert all(torch.equal(gradient.cpu(), expected) for gradient in gradients)


def test_a_loss_scale_may_be_set_while_a_pass_is_under_way():
    found = {}
    for device in ("cpu", "sim"):
        model, optimizer = start(device, "O1", "adamw-fused", loss_scale="dynamic")
        plain(model, optimizer, 0)
        with amp.scale_loss(losses_of(model, 1)[0], optimizer) as scaled_loss:
            scaled_loss.backward()
            apex_amp._amp_state.loss_scalers[0]._loss_scale = 256.0
        optimizer.step()
        found[device] = everything(model, optimizer)
        amp.reset()
    assert_same(found["sim"], found["cpu"])


def test_a_buffer_that_was_cast_is_loaded_from_the_cpu_and_moves_to_another_device():
    model = nn.Linear(2, 2).to("sim")
    model.register_buffer("offset", torch.tensor(0.1, device="sim"))
    amp.initialize(model, torch.optim.SGD(model.parameters(), 0.1), opt_level="O2", verbosity=0)
    third = torch.tensor(1 / 3)
    model.load_state_dict({"offset": third}, strict=False)
    assert model.state_dict()["offset"].item() == third.item()
    model.offset.data = model.offset.to("sim:1")
    assert model.state_dict()["offset"].item() == third.half().item()


def call_amp_C(*devices):
    """What those kernels of the stand-in give that do not read the flag, of lists with a tensor on each device."""
    drawn = torch.randn(5, len(devices), 5, generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    gradients, params, averages, squares, outputs = (
        [values.to(device) for values, device in zip(rows, devices, strict=True)] for rows in drawn.unbind()
    )
    squares = [values.square() for values in squares]
    flag = torch.zeros(1, dtype=torch.int32, device=devices[0])
    scale, good_steps, left = torch.ones(1, device=devices[0]), flag.clone(), flag.clone()
    with simdev.lag(10**6), simdev.no_sync():
        norm, each = amp_C.multi_tensor_l2norm(0, flag, [gradients], True)
        amp_C.multi_tensor_scale(0, flag, [gradients, outputs], 0.5)
        amp_C.multi_tensor_axpby(0, flag, [outputs, gradients, outputs], 2.0, 3.0, -1)
        amp_C.multi_tensor_adam(0, flag, [gradients, params, averages, squares], 0.1, 0.9, 0.99, 1e-8, 1, 1, 1, 0.01)
        amp_C.multi_tensor_lamb(
            0, flag, [gradients, params, averages, squares], 0.1, 0.9, 0.99, 1e-8, 2, 1, 0.01, 1, 1, norm, 1.0
        )
        amp_C.update_scale_hysteresis(scale, good_steps, left, flag.float(), 2.0, 0.5, 1, 2)
    found = [norm, each, *outputs, *params, *averages, *squares, scale, good_steps, left, flag]
    return [tensor.cpu() for tensor in found]


def test_the_kernels_of_the_stand_in_take_lists_of_two_devices_and_wait_for_nothing():
    expected = call_amp_C("cpu", "cpu")
    for devices in (("sim", "sim"), ("sim:0", "sim:1")):
        assert all(map(torch.equal, call_amp_C(*devices), expected))


@pytest.mark.parametrize("seed", range(8))
def test_a_program_trains_as_by_hand(seed, on_device):
    """Scripts drawn at random, as in test_training_programs.py."""
    run_programs.check(draw(seed))
