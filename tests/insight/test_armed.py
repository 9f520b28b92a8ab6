"""An armed run repeats the step that goes wrong, and changes no number of the training.

Guards: insight/arming/probe, insight/arming/replay, insight/arming/tape, insight/arming/call_watch.
Guards: insight/arming/surroundings, insight/arming/troubles, insight/arming/obstacles, insight/trouble_record.
"""

import contextlib
import io
import math
import threading
import weakref

import pytest
import torch
from moved_faults import ONLY_QUIET, find_moved, is_right
from seeded_faults import CASES
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from training import backward

import amp_patch as amp
from amp_patch import NonFiniteError, insight
from amp_patch.errors import ArgumentTypeError, ArgumentValueError, SessionError
from amp_patch.insight.recorder import in_block
from amp_patch.insight.tracer import Tracer

pytestmark = pytest.mark.filterwarnings("ignore:non-finite gradients", "ignore:the loss scale has fallen")

MOVED = (
    *("attention_scores", "gan_losses_far_apart", "vae_likelihood", "softmax_by_hand", "contrastive_loss"),
    *("adam_without_masters", "divergence_in_bfloat16", "scale_too_large", "nan_in_the_data", "infinite_weight"),
    *("in_a_thread", "teacher_and_student"),
)


@pytest.mark.parametrize("name", MOVED)
def test_a_seeded_fault_that_comes_later_is_told_as_if_it_were_there_at_first(name):
    fault, recording = find_moved(CASES[name], 4)
    assert is_right(CASES[name], fault), recording.records
    assert fault.step >= 3
    (trouble,) = recording.troubles
    assert not trouble.obstacle
    assert trouble.is_repeated == (fault.phase != "step")
    assert ("the step was not repeated" in str(recording)) != trouble.is_repeated


def test_the_cases_that_are_not_found_are_those_that_stay_finite():
    assert set(CASES) >= set(ONLY_QUIET)
    fault, recording = find_moved(CASES["batch_norm"], 2)
    assert fault is None and not recording.records


class Net(nn.Module):
    """Dropout, a batch norm, a checkpoint, and state in a buffer, in an attribute and in a list."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.inner, self.last = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 16), None
        self.last = nn.Linear(16, 4)
        self.register_buffer("mean", torch.zeros(16))
        self.calls = 0
        self.is_bad = False

    def forward(self, x):
        self.calls += 1
        h = F.dropout(F.relu(self.norm(self.first(x))), 0.1, self.training)
        self.mean.mul_(0.9).add_(h.detach().float().mean(0), alpha=0.1)
        h = checkpoint(lambda h: torch.tanh(self.inner(h)), h, use_reentrant=False)
        h = h + self.mean + 0.01 * self.calls
        return self.last(h / (h - h) if self.is_bad else h)


def train(way, *, bad_at=5, steps=9):
    """Train by a level, GradScaler, plainly in float32, float64 or bfloat16. Return every number that may differ."""
    torch.manual_seed(0)
    model = Net()
    dtype = getattr(torch, way) if way in ("float64", "bfloat16") else torch.float32
    model.to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=way == "GradScaler")
    is_amp = way.startswith("O")
    if is_amp:
        amp.initialize(model, optimizer, opt_level=way, loss_scale="dynamic", verbosity=0)
    scaler = torch.amp.GradScaler("cpu", enabled=way == "GradScaler", init_scale=16.0)
    numbers = []
    for step in range(steps):
        model.is_bad = step == bad_at
        optimizer.zero_grad()
        for _ in range(2):
            x = torch.randn(6, 8).to(dtype)
            with torch.autocast("cpu", torch.float16, enabled=way == "GradScaler"):
                loss = F.cross_entropy(model(x).float(), torch.arange(6) % 4) / 2
            if is_amp:
                backward(loss, optimizer)
            else:
                scaler.scale(loss).backward()
            numbers.append(float(loss.detach()))
        if is_amp:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
    weights = [value.double().sum().item() for value in model.state_dict().values()]
    amp.reset()
    return [repr(number) for number in (*numbers, *weights, model.calls, *torch.rand(3).tolist())]


@pytest.mark.parametrize("way", ["O1", "O2", "GradScaler", "float32", "float64", "bfloat16"])
def test_losses_weights_and_random_numbers_are_those_of_a_run_that_is_not_armed(way):
    with insight.armed(then="go", record=5) as recording:  # which samples the bad step
        armed = train(way)
    assert armed == train(way)
    trouble = recording.troubles[0]
    assert (trouble.step, trouble.obstacle, trouble.differences) == (5, "", ())
    assert recording.faults[0].origin.site.startswith("test_armed.py:")


def make_trainer(compute_loss, model, *, lr=0.01):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)

    def step(*given):
        optimizer.zero_grad()
        compute_loss(*given).backward()
        optimizer.step()

    return step


def arm(step, *, bad):
    """Run a step a few times, the last time with `bad` as its argument. Return the recording."""
    with insight.armed(record=0) as recording, pytest.raises(NonFiniteError):
        for _ in range(4):
            step(1.0)
        step(bad)
    return recording


def test_the_micro_batch_at_fault_is_told(capsys):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with pytest.raises(NonFiniteError, match="micro-batch 3 of 4"), insight.armed(record=0) as recording:
        for number in range(4):
            loss = (model(torch.ones(2, 4)).sum() * (1e30 if number == 2 else 1.0)).square()
            loss.backward()
        optimizer.step()
    assert recording.troubles[0].micro_batch == 2
    assert "micro-batch 3 of 4" in capsys.readouterr().out


def test_a_step_is_skipped_or_taken_as_it_was_asked_for():
    model = nn.Linear(4, 1)
    step = make_trainer(lambda factor: (model(torch.ones(2, 4)) * factor).square().mean(), model)
    before = None
    with insight.armed(then="skip", record=0) as recording:
        step(1.0)
        before = model.weight.detach().clone()
        step(math.nan)
        assert torch.equal(model.weight, before)
        step(1.0)
        assert not torch.equal(model.weight, before)
    assert [trouble.step for trouble in recording.troubles] == [1]


def test_bad_steps_are_skipped_also_when_no_more_of_them_are_repeated():
    model = nn.Linear(4, 1)
    step = make_trainer(lambda factor: (model(torch.ones(2, 4)) * factor).square().mean(), model)
    before = model.weight.detach().clone()
    with insight.armed(then="skip", record=0):
        for _ in range(66):
            step(math.nan)
    assert torch.equal(model.weight, before)


def test_weights_are_those_before_the_step_that_stops_the_run():
    model = nn.Linear(4, 1)
    step = make_trainer(lambda factor: (model(torch.ones(2, 4)) * factor).square().mean(), model)
    with insight.armed(record=0):
        step(1.0)
        before = model.weight.detach().clone()
        with pytest.raises(NonFiniteError):
            step(math.inf)
    assert torch.equal(model.weight, before)


class Summing(nn.Module):
    """Sums what it is given, scaled by a weight. Remembers each call in a list, which changes its result."""

    def __init__(self, *, remembers=False):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.seen = [] if remembers else None

    def forward(self, parts, *, factor=1.0):
        if self.seen is not None:
            self.seen.append(1)
        return sum(part + self.weight for part in parts) * factor + len(self.seen or ())


def test_a_generator_as_an_input_is_told():
    model = Summing()
    step = make_trainer(lambda factor: model(part * factor for part in torch.ones(3)), model)
    assert "generator" in arm(step, bad=math.nan).troubles[0].obstacle


def test_an_input_that_is_changed_in_place_is_told():
    model = Summing()

    def compute_loss(factor):
        batch = torch.ones(3)
        loss = model([batch], factor=factor).sum()
        batch.zero_()
        return loss

    recording = arm(make_trainer(compute_loss, model), bad=math.nan)
    assert any("in place" in text for text in recording.troubles[0].differences)


def test_state_that_cannot_be_put_back_is_told():
    model = Summing(remembers=True)

    def compute_loss(factor):
        loss = model(torch.ones(2))
        compute_loss.first = loss  # alive, to be compared
        return loss * factor

    step = make_trainer(compute_loss, model)
    assert "Summing returned other values than the first time" in arm(step, bad=math.nan).troubles[0].differences


class Doubled(torch.autograd.Function):
    """A function of the script, whose gradient is not that of its forward."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class Rooted(nn.Module):
    """Has an infinite gradient if it is bad, and finite values."""

    def __init__(self):
        super().__init__()
        self.linear, self.is_bad = nn.Linear(4, 4), False

    def forward(self, x):
        h = self.linear(x)
        return torch.sqrt((h - h.detach()).abs() if self.is_bad else h.abs() + 1)


def in_thread(model, x):
    results = []
    thread = threading.Thread(target=lambda: results.append(model(x)))
    thread.start()
    thread.join()
    return results[0]


@pytest.mark.parametrize(
    "run", [lambda model, x: Doubled.apply(model(x)), in_thread], ids=["a function of the script", "another thread"]
)
def test_a_gradient_from_code_that_is_not_followed_goes_back_through_the_model(run):
    model = Rooted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with pytest.raises(NonFiniteError) as raised, insight.armed(record=0) as recording:
        for step in range(4):
            model.is_bad = step == 3
            optimizer.zero_grad()
            run(model, torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
    fault = raised.value.fault
    assert (fault.phase, fault.effect.reach) == ("backward", "gradients")
    assert recording.troubles[0].differences


def test_a_validation_holds_no_batches():
    model = nn.Linear(4, 1)
    step = make_trainer(lambda factor: (model(torch.ones(2, 4)) * factor).square().mean(), model)
    batches = []
    with insight.armed(record=0), torch.no_grad():
        with torch.enable_grad():
            step(1.0)
        for _ in range(200):
            batch = torch.ones(2, 4)
            batches.append(weakref.ref(batch))
            model(batch).sum()
            del batch
        assert sum(batch() is not None for batch in batches) <= 64


def test_skips_on_the_way_down_of_a_loss_scale_are_no_trouble(capsys):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    with insight.armed(record=0) as recording:
        for _ in range(12):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = model(torch.ones(2, 4)).float().square().mean()
            scaler.scale(loss * 1e-3).backward()
            scaler.step(optimizer)
            scaler.update()
    assert not recording.troubles


def test_a_step_with_a_closure_is_told_and_not_repeated():
    model = nn.Linear(4, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)

    def closure():
        optimizer.zero_grad()
        loss = torch.log(model(torch.ones(2, 4)).square().mean() * 0)
        loss.backward()
        return loss

    with insight.armed(then="go", record=0) as recording:
        optimizer.step(closure)
    (trouble,) = recording.troubles
    assert trouble.has_stepped and "closure" in trouble.obstacle
    assert "not repeated to its end" in str(recording)


def test_a_fault_in_the_gradients_of_the_second_optimizer_is_found_after_the_first_has_stepped():
    torch.manual_seed(0)
    first, last = nn.Linear(4, 4), nn.Linear(4, 1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in (last, first)]
    with pytest.raises(NonFiniteError, match="another optimizer has stepped") as error, insight.armed() as recording:
        for step in range(4):
            for optimizer in optimizers:
                optimizer.zero_grad()
            hidden = first(torch.ones(2, 4))
            if step == 2:
                hidden = (hidden - hidden.detach()).abs().sqrt()
            last(hidden).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
    trouble, fault = recording.troubles[0], recording.faults[0]
    assert (trouble.step, fault.step, trouble.obstacle) == (2, 2, "")
    assert "sqrt" in str(error.value) and "weights are as they were" not in str(error.value)


def test_a_step_that_never_comes_is_repeated_when_the_run_ends():
    model = nn.Linear(4, 1)
    with insight.armed(record=0) as recording:
        torch.log(model(torch.ones(2, 4)).square().mean() * 0).backward()
    assert "no step followed" in recording.troubles[0].symptom
    assert recording.faults[0].origin.aten == "log"


def test_a_recording_of_trouble_is_written_and_read_and_told(tmp_path):
    model = nn.Linear(4, 1)
    step = make_trainer(lambda factor: torch.log(model(torch.ones(2, 4)).square().mean() * factor), model)
    recording = arm(step, bad=0.0)
    recording.to_jsonl(tmp_path / "trouble.jsonl")
    again = insight.Recording.read(tmp_path / "trouble.jsonl")
    assert again.troubles == recording.troubles
    assert str(again) == str(recording)


def test_wrong_arguments_and_two_blocks_are_refused():
    for options in ({"then": "halt"}, {"every": 0}, {"record": -1}):
        with pytest.raises(ArgumentValueError), insight.armed(**options):
            pass
    with pytest.raises(ArgumentTypeError), insight.armed(ignore="exp"):
        pass
    with insight.armed(), pytest.raises(SessionError), insight.armed():
        pass


@pytest.mark.parametrize("watch", [insight.recording, insight.armed, lambda: in_block(Tracer())])
def test_a_script_may_swap_its_weights_and_draw_new_ones_while_it_is_watched(watch):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(net.parameters())
    with watch():
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                loss = net(torch.ones(2, 8)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        torch.utils.swap_tensors(net[0].weight, net[1].weight)
        net(torch.ones(2, 8))
        nn.init.orthogonal_(net[0].weight)
        assert torch.allclose(net[0].weight @ net[0].weight.T, torch.eye(8), atol=1e-5)


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize("passes", [1, 2])
def test_a_forward_pass_that_writes_weights_is_repeated_without_writing_them_again(level, passes):
    def train(is_armed):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Embedding(64, 4, max_norm=0.75), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        amp.initialize(net, optimizer, opt_level=level, loss_scale={"init": 4.0}, verbosity=0)
        weights = []
        with insight.armed(then="go") if is_armed else contextlib.nullcontext():
            for step in range(3):
                for number in range(passes):
                    loss = net(torch.arange(64)).float().square().mean() * (math.nan if step == 1 else 1)
                    if number in (0, passes - 2):
                        with torch.no_grad():
                            net[0].weight.mul_(4.1)  # beyond the norm again
                    backward(loss, optimizer)
                optimizer.step()
                optimizer.zero_grad()
                weights += [weight.detach().clone() for weight in (*net.parameters(), *amp.master_params(optimizer))]
        amp.reset()
        return weights

    for ours, theirs in zip(train(True), train(False), strict=True):
        assert ours.isfinite().all() and torch.equal(ours, theirs)


class Stop(BaseException):
    """Not an Exception, so torch calls no hook after it."""


class Halves(nn.Module):
    """Two layers with dropout. May raise an error between them."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.error = nn.Linear(8, 8), nn.Linear(8, 8), None

    def forward(self, x):
        h = F.dropout(self.first(x), 0.5, self.training)
        if self.error is not None:
            raise self.error
        return self.last(h)


def spoil(values, bad):
    """Return values whose gradient is inf if `bad`."""
    return (values * 0 if bad else values.square() + 1).sqrt()


def gan(models, optimizers, x, bad):
    fake = models[0](x)
    models[1](fake.detach()).mean().backward()
    optimizers[1].step()
    optimizers[0].zero_grad()
    spoil(models[1](fake), bad).mean().backward()
    optimizers[0].step()


def running_loss(models, optimizers, x, bad):
    loss = spoil(models[0](x), bad).mean()
    models[0].total = getattr(models[0], "total", 0) + loss
    loss.backward()
    optimizers[0].step()


def caught(error):
    def step(models, optimizers, x, bad):
        models[0].error = error
        with contextlib.suppress(Stop, ValueError):
            models[0](x)
        models[0].error = None
        spoil(models[0](x), bad).mean().backward()
        optimizers[0].step()

    return step


def step_in_eval_mode(models, optimizers, x, bad):
    spoil(models[0].train()(x), bad).mean().backward()
    models[0].eval()
    optimizers[0].step()


def own_gradients(models, optimizers, x, bad):
    weights = list(models[0].parameters())
    for weight, gradient in zip(weights, torch.autograd.grad(spoil(models[0](x), bad).mean(), weights), strict=True):
        weight.grad = gradient
    optimizers[0].step()


@pytest.mark.parametrize(
    "step",
    [gan, running_loss, caught(ValueError()), caught(Stop()), step_in_eval_mode, own_gradients],
    ids=["gan", "running loss", "caught error", "caught interrupt", "step in eval mode", "own gradients"],
)
def test_a_bad_step_is_repeated_bit_by_bit_in_scripts_of_many_shapes(step):
    models = [Halves(), Halves()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
    with insight.armed(then="skip", record=0) as recording:
        for number in range(6):
            step(models, optimizers, torch.randn(4, 8), number == 5)
    trouble, fault, *_ = recording.records
    assert (trouble.obstacle, trouble.differences) == ("", ())
    assert fault.phase == "backward" and fault.origin.op == "aten.sqrt"


@pytest.mark.filterwarnings("error")
def test_results_of_a_model_are_saved_without_a_warning():
    model = nn.Linear(2, 2)
    with insight.armed():
        for _ in range(2):
            result = model(torch.ones(1, 2))
            torch.save(result, io.BytesIO())
            result.sum().backward()


@pytest.mark.parametrize("watch", [insight.recording, lambda: insight.armed(record=0)])
def test_losses_may_come_from_a_generator(watch):
    weight = nn.Parameter(torch.ones(()))
    with watch():
        torch.autograd.backward(weight * factor for factor in (1.0, 2.0, 4.0))
        assert weight.grad == 7
        torch.autograd.backward([weight * 1.0, weight * 2.0], (gradient for gradient in torch.ones(2)))
    assert weight.grad == 10


def test_every_second_step_of_each_optimizer_is_looked_at():
    weights = [nn.Parameter(torch.ones(())) for _ in range(2)]
    optimizers = [torch.optim.SGD([weight], lr=0.1) for weight in weights]
    with pytest.raises(NonFiniteError), insight.armed(record=0, every=2):
        for step in range(3):
            for weight, optimizer in zip(weights, optimizers, strict=True):
                is_bad = step == 2 and weight is weights[1]
                (weight * 1.0).backward(torch.tensor(math.nan if is_bad else 1.0))
                optimizer.step()
    assert weights[1].isfinite()
