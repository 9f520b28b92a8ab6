"""With `optimizer_state_type="bfloat16"`, the running averages of an optimizer are bfloat16 between steps, rounded
stochastically, and a step computes with their float32 values. Rounding is right on average, gives the same numbers in
each run, and touches no random numbers of the script.

Guards: training/bfloat16_states, training/stochastic_rounding.
"""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from interrupt_tracer import choose, count_lines, interrupted_at
from torch import nn
from training import backward

import amp_patch as amp
from amp_patch.training import StochasticRounding, bfloat16_states, step_parts, stochastic_rounding


def from_bits(bits):
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


def round_at(rounding, values, position=0):
    rounded = torch.empty_like(values, dtype=torch.bfloat16)
    rounding.round_([values], [rounded], [position])
    return rounded


# ---- rounding --------------------------------------------------------------------------------------------------------


def test_rounding_is_right_on_average():
    """Of each element, over many steps, and of the sum of a step."""
    steps, size = 1500, 512
    fractions = torch.linspace(0, 1, size + 1)[:-1]
    values = torch.cat([1 + fractions / 128, -(2**-20) * (1 + fractions / 128)])
    spacing = torch.cat([torch.full((size,), 1 / 128), torch.full((size,), 2**-27)])
    rounding = StochasticRounding()
    errors = []
    for _ in range(steps):
        rounding.begin_step()
        errors.append((round_at(rounding, values).double() - values.double()) / spacing)
    errors = torch.stack(errors)
    assert bool((errors.abs() < 1).all())
    variances = (fractions * (1 - fractions)).double().repeat(2)
    deviations = errors.mean(0)[variances > 0] / (variances[variances > 0] / steps).sqrt()
    assert deviations.abs().max() < 5
    assert 0.9 < deviations.std() < 1.1
    assert 0.85 < errors.sum(1).var() / variances.sum() < 1.15  # as of independent errors


def test_numbers_that_bfloat16_holds_stay_and_no_others_become_infinite():
    kept = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    nan = from_bits([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF])
    largest = from_bits([0x7F7F0001, 0x7F7F8000, 0x7F7FFFFF])
    rounding = StochasticRounding()
    for _ in range(3):
        rounding.begin_step()
        again = round_at(rounding, kept.float())
        assert torch.equal(again[~kept.isnan()].view(torch.int16), kept[~kept.isnan()].view(torch.int16))
        assert bool(again[kept.isnan()].isnan().all())
        assert bool(round_at(rounding, nan).isnan().all())
        limit = torch.full_like(largest, torch.finfo(torch.bfloat16).max, dtype=torch.bfloat16)
        assert torch.equal(round_at(rounding, largest), limit)
        assert torch.equal(round_at(rounding, -largest), -limit)


def test_random_numbers_depend_on_the_step_and_the_position_alone(monkeypatch):
    monkeypatch.setattr(stochastic_rounding, "_BLOCK_ON_CPU", 64)
    values = [torch.rand(size) for size in (5, 200, 1, 64, 90)]
    values.append(torch.rand(30, 7).t())
    starts = [10, 20, 250, 256, 400, 1000]
    rounding = StochasticRounding()
    rounding.begin_step()
    together = [torch.empty_like(value, dtype=torch.bfloat16) for value in values]
    rounding.round_(values, together, starts)
    again = StochasticRounding()
    again.load_state_dict(rounding.state_dict())
    for value, start, expected in reversed(list(zip(values, starts, together, strict=True))):
        assert torch.equal(round_at(again, value, start), expected)
    rounding.begin_step()
    assert not torch.equal(round_at(rounding, values[1], 20), together[1])


# ---- training --------------------------------------------------------------------------------------------------------


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4, bias=False), nn.Tanh(), nn.Linear(4, 2))


def start(make_optimizer, **options):
    model = make_model()
    options = {"opt_level": "O5", "split_masters": True, "optimizer_state_type": "bfloat16", "verbosity": 0, **options}
    return amp.initialize(model, make_optimizer(list(model.parameters())), **options)


def loss_of(model):
    inputs, targets = torch.linspace(-2, 2, 15).view(5, 3), torch.tensor([0, 1, 0, 1, 1])
    return F.cross_entropy(model(inputs).float(), targets)


def train(model, optimizer, steps):
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model)
        losses.append(loss.detach())
        backward(loss, optimizer)
        optimizer.step()
    return losses


def read(optimizer):
    """Masters and states."""
    values = [master.detach().clone() for master in amp.master_params(optimizer)]
    for _, state in sorted(optimizer.state_dict()["state"].items()):
        values += [value.clone() for name, value in sorted(state.items()) if isinstance(value, torch.Tensor)]
    return values


def assert_equal(found, expected):
    assert len(found) == len(expected)
    assert all(a.dtype is b.dtype and torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


AVERAGES = ("exp_avg", "exp_avg_sq", "exp_inf", "square_avg", "grad_avg", "acc_delta", "momentum_buffer", "sum")
AVERAGES += ("variance", "max_exp_avg_sq", "prev", "step_size")


def train_by_hand(make_optimizer, steps):
    """Losses, masters and states of a bfloat16 model with float32 masters, whose states are rounded after each step."""
    low, full = make_model().bfloat16(), make_model()
    masters = list(full.parameters())
    optimizer = make_optimizer(masters)
    rounding = StochasticRounding()
    by_size = sorted(masters, key=torch.Tensor.numel)
    sizes = [master.numel() for master in by_size]
    losses = []
    for _ in range(steps):
        rounding.begin_step()
        for parameter, master in zip(low.parameters(), masters, strict=True):
            bits = (master.detach().view(torch.int32) + 0x8000) & -0x10000
            parameter.data, parameter.grad = bits.view(torch.float32).bfloat16(), None
        loss = loss_of(lambda inputs: low(inputs.bfloat16()))
        losses.append(loss.detach())
        loss.backward()
        for parameter, master in zip(low.parameters(), masters, strict=True):
            master.grad = parameter.grad.float()
        optimizer.step()
        for number, master in enumerate(by_size):
            for slot, name in enumerate(AVERAGES):
                value = optimizer.state[master].get(name)
                if value is None or value.shape != master.shape:
                    continue
                if slot < 9:
                    rounded = round_at(rounding, value, slot * sum(sizes) + sum(sizes[:number]))
                else:
                    rounded = value.bfloat16()
                value.copy_(rounded)
    values = [master.detach() for master in masters]
    for master in masters:
        for name, value in sorted(optimizer.state[master].items()):
            if isinstance(value, torch.Tensor):
                is_rounded = name in AVERAGES and value.shape == master.shape
                values.append(value.bfloat16() if is_rounded else value)
    return losses, values


NAMES = ("SGD", "NAdam", "RAdam", "Adadelta", "Adamax", "ASGD", "Rprop", "Adagrad", "Adafactor")
CASES = [(name, {}) for name in NAMES]
CASES += [("AdamW", {"fused": True}), ("Adam", {"foreach": True, "amsgrad": True}), ("SGD", {"momentum": 0.9})]
CASES += [("RMSprop", {"momentum": 0.9, "centered": True})]


@pytest.mark.parametrize("part", [2**20, 20], ids=["whole", "parts"])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_training_equals_float32_states_that_are_rounded_by_hand(monkeypatch, name, options, part):
    monkeypatch.setattr(step_parts, "_PART_ON_CPU", part)

    def make_optimizer(parameters):
        return getattr(torch.optim, name)(parameters, lr=0.01, **options)

    model, optimizer = start(make_optimizer)
    losses = train(model, optimizer, 4)
    expected_losses, expected = train_by_hand(make_optimizer, 4)
    assert_equal(losses, expected_losses)
    assert_equal(read(optimizer), expected)
    amp.reset()
    restored = optimizer.state_dict()["state"].values()
    tensors = [value for state in restored for value in state.values() if isinstance(value, torch.Tensor)]
    assert {value.dtype for value in tensors} <= {torch.float32}
    optimizer.step()  # on float32 weights again


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
@pytest.mark.parametrize("options", [{"lr": 0.01}, {"lr": 0.01, "fused": True}])
def test_states_are_bfloat16_at_levels_with_float32_weights(monkeypatch, level, options):
    monkeypatch.setattr(step_parts, "_PART_ON_CPU", 20)
    results = []
    for registers_hook in (False, True):  # a hook of the script makes the step one part
        model, optimizer = start(lambda p: torch.optim.AdamW(p, **options), opt_level=level, split_masters=None)
        if registers_hook:
            optimizer.register_step_post_hook(lambda *_: None)
        losses = train(model, optimizer, 3)
        assert optimizer.state_dict()["state"][0]["exp_avg_sq"].dtype is torch.bfloat16
        results.append((losses, read(optimizer)))
        amp.reset()
    assert_equal(results[1][0], results[0][0])
    assert_equal(results[1][1], results[0][1])


def test_an_average_of_squares_keeps_moving():
    """With gradients of 0, it shrinks by a factor of 0.999 in each step."""
    model = nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
    amp.initialize(model, optimizer, opt_level="O4", optimizer_state_type="bfloat16", verbosity=0)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    (state,) = optimizer.state.values()
    first = state["exp_avg_sq"].double().mean().item()
    model.weight.grad = torch.zeros_like(model.weight)
    for _ in range(200):
        optimizer.step()
    assert state["exp_avg_sq"].double().mean().item() / first == pytest.approx(0.999**200, rel=0.005)


def test_random_numbers_of_the_script_stay():
    model, optimizer = start(adam)
    loss = loss_of(model)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    backward(loss, optimizer)
    optimizer.step()
    assert torch.equal(torch.get_rng_state(), before)
    amp.reset()
    results = []
    for seed in (1, 2):  # the seed of the script does not matter either
        model, optimizer = start(adam)
        torch.manual_seed(seed)
        results.append(train(model, optimizer, 3))
        results.append(read(optimizer))
        amp.reset()
    assert_equal(results[2], results[0])
    assert_equal(results[3], results[1])


@pytest.mark.parametrize("verbosity", [0, 2])  # at 2, the host decides whether to skip
@pytest.mark.parametrize("options", [{}, {"fused": True}])
def test_a_skipped_step_leaves_the_states(options, verbosity):
    model, optimizer = start(
        lambda parameters: torch.optim.AdamW(parameters, **options), loss_scale="dynamic", verbosity=verbosity
    )
    train(model, optimizer, 2)
    before = read(optimizer)
    optimizer.zero_grad()
    backward(loss_of(model) * float("inf"), optimizer)
    optimizer.step()
    assert optimizer.step_was_skipped
    assert_equal(read(optimizer), before)
    train(model, optimizer, 2)
    assert amp.state_dict()["stochastic_rounding"] == {"steps": 5}


KINDS = {
    "bfloat16": {},
    "bfloat16, float32 masters": {"split_masters": None},
    "float32": {"optimizer_state_type": None},
}


@pytest.mark.parametrize("saving", KINDS)
@pytest.mark.parametrize("loading", KINDS)
def test_a_checkpoint_of_any_kind_loads_in_any_other(saving, loading):
    model, optimizer = start(adam, **KINDS[saving])
    train(model, optimizer, 2)
    buffer = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), amp.state_dict()], buffer)
    expected = [train(model, optimizer, 3), read(optimizer)]
    amp.reset()
    model, optimizer = start(adam, **KINDS[loading])
    buffer.seek(0)
    saved = torch.load(buffer)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    amp.load_state_dict(saved[2])
    is_bfloat16 = "bfloat16" in loading
    dtype = torch.bfloat16 if is_bfloat16 else torch.float32
    assert optimizer.state_dict()["state"][0]["exp_avg"].dtype is dtype  # at once, not only after a step
    losses = train(model, optimizer, 3)
    torch.testing.assert_close(losses, expected[0], rtol=1e-2, atol=0)
    if ("bfloat16" in saving) is is_bfloat16:
        assert_equal(losses, expected[0])
        assert_equal(read(optimizer), expected[1])


def test_state_from_before_initialize_is_rounded_and_given_back():
    model = make_model()
    optimizer = adam(model.parameters())
    loss_of(model).backward()
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict()["state"])
    amp.initialize(model, optimizer, opt_level="O5", optimizer_state_type="bfloat16", verbosity=0)
    assert optimizer.state_dict()["state"][0]["exp_avg"].dtype is torch.bfloat16
    amp.reset()
    after = optimizer.state_dict()["state"]
    for number, state in before.items():
        assert torch.equal(after[number]["step"], state["step"])
        torch.testing.assert_close(after[number]["exp_avg"], state["exp_avg"], rtol=2**-7, atol=0)


def test_a_step_that_raises_can_be_repeated(monkeypatch):
    monkeypatch.setattr(step_parts, "_PART_ON_CPU", 20)
    model, optimizer = start(adam)
    train(model, optimizer, 2)
    optimizer.param_groups[0]["eps"] = "small"
    with pytest.raises(TypeError):
        train(model, optimizer, 1)
    optimizer.param_groups[0]["eps"] = 1e-8
    train(model, optimizer, 1)
    assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {torch.bfloat16}


class Sgd(torch.optim.SGD):
    """Its step is its own, and may do anything."""

    def step(self, closure=None):
        return super().step(closure)


def test_an_optimizer_with_a_step_of_its_own_keeps_float32_state(capsys):
    model = make_model()
    optimizer = Sgd(model.parameters(), lr=0.01, momentum=0.9)
    amp.initialize(model, optimizer, opt_level="O5", optimizer_state_type="bfloat16")
    assert "Sgd keeps float32 state" in capsys.readouterr().out
    train(model, optimizer, 2)
    assert optimizer.state_dict()["state"][0]["momentum_buffer"].dtype is torch.float32


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"opt_level": "O3", "optimizer_state_type": "bfloat16"}, "in 16 bits anyway"),
        ({"opt_level": "O5", "optimizer_state_type": torch.float16}, "squares of small gradients are 0"),
        ({"opt_level": "O5", "optimizer_state_type": "int8"}, "not a dtype"),
    ],
)
def test_other_dtypes_and_levels_are_refused(options, reason):
    model = make_model()
    with pytest.raises(amp.errors.PolicyError, match=reason):
        amp.initialize(model, adam(model.parameters()), **options)


@pytest.mark.parametrize("entry", [None, {}, {"steps": -1}, {"steps": True}, 3])
def test_a_damaged_state_is_refused(entry):
    start(adam)
    saved = amp.state_dict()
    with pytest.raises(amp.errors.CheckpointError, match="stochastic rounding"):
        amp.load_state_dict({**saved, "stochastic_rounding": entry})


def test_a_step_that_a_graph_captures_is_refused(monkeypatch):
    model, optimizer = start(adam)
    train(model, optimizer, 1)
    before = read(optimizer)
    monkeypatch.setattr(bfloat16_states, "is_capturing", lambda: True)
    with pytest.raises(amp.errors.OptimizerError, match="same random numbers"):
        train(model, optimizer, 1)
    assert_equal(read(optimizer), before)


def test_an_interrupted_step_leaves_states_to_go_on_with(monkeypatch):
    """Each state is that of before the step, or that of after it but for the rounding."""
    monkeypatch.setattr(step_parts, "_PART_ON_CPU", 60)

    def prepare():
        model, optimizer = start(adam)
        train(model, optimizer, 1)
        backward(loss_of(model), optimizer)
        return optimizer

    def read_float32(optimizer):
        states = sorted(optimizer.state_dict()["state"].items())
        return [state[name].float() for _, state in states for name in ("exp_avg", "exp_avg_sq")]

    optimizer = prepare()
    before = read_float32(optimizer)
    places = count_lines(optimizer.step)
    after = read_float32(optimizer)
    amp.reset()
    for at in choose(places, 12, "states"):
        optimizer = prepare()
        interrupted_at(at, optimizer.step)
        torch.set_grad_enabled(True)
        amp.reset()
        for value, old, new in zip(read_float32(optimizer), before, after, strict=True):
            assert value.dtype is torch.float32
            assert torch.equal(value, old) or torch.allclose(value, new, rtol=2**-6, atol=1e-12)
