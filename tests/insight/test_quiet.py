"""What `trace` tells of a quiet loss, and that it changes nothing by looking. See test_quiet_cases.py for the causes.

Guards: insight/quiet_record, insight/quiet_text, insight/watching, insight/quiet/tally, insight/quiet/updates.
"""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from training import take_step

import amp_patch as amp
from amp_patch import insight
from amp_patch.insight.quiet import tally, updates
from amp_patch.insight.recorder import in_block
from amp_patch.insight.tracer import Tracer
from amp_patch.insight.trouble_record import TroubleRecord


def network(dtype=torch.bfloat16):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 2)).to(dtype)


def training(model, optimizer):
    x, y = torch.randn(32, 8, generator=torch.Generator().manual_seed(1)), torch.arange(32) % 2
    dtype = next(model.parameters()).dtype

    def step():
        loss = F.cross_entropy(model(x.to(dtype)).float(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


def lost_by(make, *, steps=3, model=None):
    model = model or network()
    optimizer = make(model.parameters())
    recording = insight.trace(training(model, optimizer), steps=steps)
    return [lost for lost in recording.quiet if lost.role == "weights"]


def test_a_report_says_how_much_is_lost_of_what_and_what_keeps_it():
    model = network()
    recording = insight.trace(training(model, torch.optim.Adam(model.parameters(), lr=1e-6)), steps=3)
    (lost,) = [each for each in recording.quiet if each.role == "weights"]
    assert (lost.cause, lost.op, lost.dtype, lost.steps, lost.looked) == ("lost update", "Adam", "bf16", 3, 3)
    assert lost.kept < 0.1 and lost.error > 0.9 and lost.tensors > 1
    text = str(recording)
    assert "every value fits, in 3 steps" in text and "lost quietly in bfloat16" in text
    for told in ("Adam.step()", "lost update", lost.tensor, 'opt_level="O5"'):
        assert told in text


@pytest.mark.parametrize("room", [128 + 16 + 16, 128, 32])
def test_weights_beyond_the_budget_of_a_step_have_their_turn_again_and_again(room, monkeypatch):
    # the largest weight has 128 elements, all together have 210
    monkeypatch.setattr(updates, "BUDGET", room)
    (lost,) = lost_by(lambda weights: torch.optim.SGD(weights, lr=1e-7), steps=8)
    assert lost.looked >= 3


def test_a_weight_is_counted_once_although_its_name_changes_with_a_second_model():
    model = network()
    average, optimizer = copy.deepcopy(model), torch.optim.Adam(model.parameters(), lr=1e-6)
    step_model, x = training(model, optimizer), torch.randn(4, 8).bfloat16()

    def step():
        step_model()
        with torch.no_grad():
            average(x)
            for old, new in zip(average.parameters(), model.parameters(), strict=True):
                old.mul_(0.999).add_(0.001 * new)

    recording = insight.trace(step, steps=4)
    (weights,) = [lost for lost in recording.quiet if lost.role == "weights"]
    assert (weights.steps, weights.looked, weights.of) == (4, 4, len([*model.parameters()]))
    (of_average,) = [lost for lost in recording.quiet if not lost.role]
    assert of_average.tensor and "the call in torch.autocast" in insight.format_quiet(of_average, recording.run)


def test_a_recording_with_quiet_losses_is_read_as_it_was_written(tmp_path):
    model = network()
    recording = insight.trace(training(model, torch.optim.Adam(model.parameters(), lr=1e-6)))
    recording.to_jsonl(tmp_path / "quiet.jsonl")
    assert recording.quiet and insight.Recording.read(tmp_path / "quiet.jsonl").quiet == recording.quiet


def test_quiet_losses_are_told_beside_a_step_that_went_wrong():
    model = network()
    recording = insight.trace(training(model, torch.optim.Adam(model.parameters(), lr=1e-6)))
    text = str(insight.Recording(recording.run, [*recording.quiet, TroubleRecord(step=3, symptom="loss is NaN")]))
    assert "step 3: loss is NaN" in text and "lost quietly in bfloat16" in text


OPTIMIZERS = {
    "SGD": lambda weights, **how: torch.optim.SGD(weights, lr=1e-7, **how),
    "momentum": lambda weights, **how: torch.optim.SGD(weights, lr=1e-7, momentum=0.9, **how),
    "Adam": lambda weights, **how: torch.optim.Adam(weights, lr=1e-7, **how),
    "amsgrad": lambda weights, **how: torch.optim.AdamW(weights, lr=1e-7, amsgrad=True, **how),
    "NAdam": lambda weights, **how: torch.optim.NAdam(weights, lr=1e-7, **how),
    "RAdam": lambda weights, **how: torch.optim.RAdam(weights, lr=1e-7, **how),
    "Adagrad": lambda weights, **how: torch.optim.Adagrad(weights, lr=1e-7, **how),
    "RMSprop": lambda weights, **how: torch.optim.RMSprop(weights, lr=1e-8, **how),
    "Adamax": lambda weights, **how: torch.optim.Adamax(weights, lr=1e-7, **how),
    "ASGD": lambda weights, **how: torch.optim.ASGD(weights, lr=1e-7, **how),
    "Adadelta": lambda weights, **how: torch.optim.Adadelta(weights, lr=1e-4, **how),
    "Adafactor": lambda weights, **how: torch.optim.Adafactor(weights, lr=1e-8, **how),
}


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_of_each_optimizer_are_followed_in_either_implementation(name, foreach):
    (lost,) = lost_by(lambda weights: OPTIMIZERS[name](list(weights), foreach=foreach))
    assert lost.kept < 0.5 and lost.error > 0.7


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
def test_fused_steps_are_followed(kind):
    (lost,) = lost_by(lambda weights: kind(weights, lr=1e-7, fused=True))
    assert lost.kept < 0.5


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_same_steps_on_float32_weights_lose_nothing(name):
    assert lost_by(OPTIMIZERS[name], model=network(torch.float32)) == []


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_levels_with_float32_weights_or_masters_lose_nothing(level):
    model = network(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=128.0 if level in ("O1", "O2") else None)
    x, y = torch.randn(32, 8), torch.arange(32) % 2
    recording = insight.trace(lambda: take_step(F.cross_entropy(model(x).float(), y), optimizer), steps=4)
    assert recording.quiet == []


@pytest.mark.parametrize("foreach", [False, True])
def test_a_traced_training_is_bitwise_the_plain_one(foreach):
    plain, traced = network(), network()
    first = training(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3, foreach=foreach))
    second = training(traced, torch.optim.AdamW(traced.parameters(), lr=1e-3, foreach=foreach))
    averages = copy.deepcopy(traced)

    def step():
        second()
        with torch.no_grad():
            for average, weight in zip(averages.parameters(), traced.parameters(), strict=True):
                average.lerp_(weight, 0.001)

    for _ in range(4):
        first()
    insight.trace(step, steps=4)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), traced.parameters(), strict=True))


def test_tensors_of_other_dtypes_are_passed_over():
    model = network(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train = training(model, optimizer)
    waves, wide = torch.zeros(4, dtype=torch.complex64), torch.zeros(4, dtype=torch.float64)
    sparse = torch.eye(4).to_sparse()

    def step():
        waves.add_(1e-9j)
        wide.mul_(0.999).add_(1e-12)
        torch.sparse.mm(sparse, torch.ones(4, 1))
        return train()

    assert insight.trace(step, steps=3).quiet == []


def test_a_step_that_raises_leaves_no_mode_behind():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train = training(model, optimizer)

    class StoppedError(Exception):
        pass

    def stop(*_):
        raise StoppedError

    handle = optimizer.register_step_pre_hook(stop)
    with pytest.raises(StoppedError):
        insight.trace(train)
    handle.remove()
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert insight.trace(train).faults == []


def test_a_training_without_modules_and_optimizers_is_looked_at():
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(8, 16, generator=generator).bfloat16().requires_grad_()
    last = torch.randn(16, 1, generator=generator).bfloat16().requires_grad_()
    x = torch.randn(32, 8, generator=generator).bfloat16()

    def step():
        (torch.tanh(x @ first) @ last).float().square().mean().backward()
        with torch.no_grad():
            for weight in (first, last):
                weight -= 1e-6 * weight.grad
                weight.grad = None

    recording = insight.trace(step, steps=4)
    assert [lost.cause for lost in recording.quiet] == ["lost update"]
    assert recording.quiet[0].site.startswith("test_quiet.py")


def test_a_state_that_an_optimizer_keeps_in_16_bits_is_named():
    class Averaging(torch.optim.Optimizer):
        def __init__(self, weights):
            super().__init__(weights, {})

        @torch.no_grad()
        def step(self):
            for group in self.param_groups:
                for weight in group["params"]:
                    state = self.state[weight]
                    if not state:
                        state["seen"] = weight.grad.square().bfloat16()
                    state["seen"].mul_(0.9999).addcmul_(weight.grad, weight.grad, value=1e-4)
                    weight.sub_(1e-3 * weight.grad)

    model = network(torch.float32)
    recording = insight.trace(training(model, Averaging(model.parameters())), steps=4)
    (lost,) = recording.quiet
    assert (lost.cause, lost.op, lost.role) == ("lost update", "Averaging", "seen")
    assert lost.tensor.startswith("seen of")


def test_a_weight_that_is_nan_is_no_old_copy_of_itself():
    model = network(torch.float32)
    with torch.no_grad():
        model[3].bias.fill_(float("nan"))

    def step():
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(torch.ones(4, 8)), torch.arange(4) % 2)
        loss.backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()

    recording = insight.trace(step, steps=1, on_fault="record")
    assert not [lost for lost in recording.quiet if lost.cause == "stale copy"]


def count_neighbours():
    """Return a step that makes a tensor at one line twice, and adds 300 ones to one element of it in bfloat16."""
    model, values, index = nn.Linear(1, 1), torch.ones(300, dtype=torch.bfloat16), torch.zeros(300, dtype=torch.long)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        degrees = [values.new_zeros(4).index_add_(0, index, values) for _ in range(2)]
        model(torch.stack(degrees)[:, :1].float()).sum().backward()
        optimizer.step()

    return step


def test_a_sum_of_a_step_is_counted_by_step_from_the_first_that_is_looked_at():
    tracer, step = Tracer(2, 5), count_neighbours()
    with in_block(tracer):
        for _ in range(5):
            step()
    (lost,) = tracer.recording.quiet
    assert (lost.step, lost.steps, lost.looked, lost.is_temporary) == (2, 3, 3, True)
    text = insight.format_quiet(lost, tracer.recording.run)
    assert "in each of 3 steps" in text and "outlives" not in text and "dtype=torch.float32 for" in text


def test_a_change_whose_squares_exceed_float32_does_not_count():
    before, huge = torch.zeros(4, dtype=torch.bfloat16), torch.full((4,), 1e30)
    assert tally.compare_change(before, huge.bfloat16(), huge) is None
    # one element that is inf is left out, and the others count
    mixed = torch.tensor([torch.inf, 1.0, 0.0, 2.0])
    change = tally.compare_change(before, mixed.bfloat16(), mixed)
    assert (change.true, change.changed, change.error) == (5.0, 2, 0.0)
