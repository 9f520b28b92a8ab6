"""A split master is the float32 master, bit for bit: its bfloat16 parameter is its upper half, and the session keeps
the other 16 bits. Training with split masters gives the numbers of float32 masters that are rounded half away from
zero, and whoever uses a master sees float32.

Guards: training/halves, training/split_masters, training/step_parts.
"""

import copy
import io
import sys

import pytest
import torch
import torch.nn.functional as F
from devices import IS_SIM
from interrupt_tracer import choose, count_lines, interrupted_at
from torch import nn
from training import backward

import amp_patch as amp
from amp_patch.training import halves, step_parts

SPECIAL = [
    *(0, 1, 0x7FFF, 0x8000, 0x8001, 0x17FFF, 0x18000, 0x28000, 0x007FFFFF, 0x00800000),  # zero, subnormal, ties
    *(0x3F808000, 0x3F818000, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0x7F800000),  # ties, the largest, infinity
]


def from_bits(bits):
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


def round_away(values):
    """bfloat16, half away from zero; of finite values."""
    return ((values.detach().view(torch.int32) + 0x8000) & -0x10000).view(torch.float32).bfloat16()


def split(values):
    weight, low = torch.empty_like(values, dtype=torch.bfloat16), torch.empty_like(values, dtype=torch.int16)
    halves.split_([values], [weight], [low])
    return weight, low


def test_every_value_comes_back_bit_for_bit():
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(-(2**31), 2**31, (8_000_000,), generator=generator).to(torch.int32).view(torch.float32)
    values = torch.cat([from_bits(SPECIAL), from_bits(SPECIAL).neg(), drawn[~drawn.isnan()]])
    weight, low = split(values)
    (joined,) = halves.join([weight], [low])
    assert torch.equal(joined.view(torch.int32), values.view(torch.int32))
    assert torch.equal(weight[values.isfinite()], round_away(values[values.isfinite()]))


def test_nan_stays_nan():
    values = from_bits([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF808000, 0x7FFFFFFF, 0xFFFFFFFF])
    weight, low = split(values)
    assert bool(weight.isnan().all())
    assert bool(halves.join([weight], [low])[0].isnan().all())


@pytest.mark.parametrize("low", [-0x8000, -0x7FFF, -1, 0, 1, 0x7FFF])
def test_any_low_half_fits_any_weight(low):
    """After an edit of a weight, the master is finite and rounds to that weight."""
    weights = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    weights = weights[weights.isfinite()]
    (values,) = halves.join([weights], [torch.full(weights.shape, low, dtype=torch.int16)])
    assert torch.equal(split(values)[0], weights)


def test_halves_keep_the_layout_of_each_tensor():
    values = [torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last), torch.randn(400, 500).t(), torch.randn(())]
    weights, lows = map(list, zip(*map(split, values), strict=True))
    for joined, value in zip(halves.join(weights, lows), values, strict=True):
        assert torch.equal(joined, value)
        assert joined.stride() == value.stride()


# ---- training --------------------------------------------------------------------------------------------------------


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4, bias=False), nn.Tanh(), nn.Linear(4, 2))


def start(make_optimizer, **options):
    model = make_model()
    optimizer = make_optimizer(list(model.parameters()))
    return amp.initialize(model, optimizer, opt_level="O5", verbosity=0, **{"split_masters": True, **options})


def batch():
    """Inputs and targets, on the default device."""
    return torch.linspace(-2, 2, 15).view(5, 3), torch.tensor([0, 1, 0, 1, 1])


def loss_of(model):
    inputs, targets = batch()
    return F.cross_entropy(model(inputs).float(), targets)


def train(model, optimizer, steps, touch=lambda model, optimizer: None):
    """The losses of some steps. `touch(model, optimizer)` is called after each backward pass."""
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model)
        losses.append(loss.detach())
        backward(loss, optimizer)
        touch(model, optimizer)
        optimizer.step()
    return losses


def read(optimizer):
    return [master.detach().clone() for master in amp.master_params(optimizer)]


def train_by_hand(make_optimizer, steps):
    """Losses and masters of a bfloat16 model with float32 masters that are rounded half away from zero."""
    low, full = make_model().bfloat16(), make_model()
    masters = list(full.parameters())
    optimizer = make_optimizer(masters)
    losses = []
    for _ in range(steps):
        for parameter, master in zip(low.parameters(), masters, strict=True):
            parameter.data, parameter.grad = round_away(master), None
        inputs, targets = batch()
        loss = F.cross_entropy(low(inputs.bfloat16()).float(), targets)
        losses.append(loss.detach())
        loss.backward()
        for parameter, master in zip(low.parameters(), masters, strict=True):
            master.grad = parameter.grad.float()
        optimizer.step()
    return losses, [master.detach() for master in masters]


def assert_equal(found, expected):
    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


SEPARATE = ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "NAdam", "RAdam", "Adadelta", "Adamax", "ASGD", "Rprop")
CASES = [(name, {}) for name in (*SEPARATE, "Adafactor")]
CASES += [("AdamW", {"fused": True}), ("AdamW", {"foreach": True, "amsgrad": True}), ("SGD", {"momentum": 0.9})]


@pytest.mark.parametrize("part", [2**20, 20], ids=["whole", "parts"])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_losses_and_masters_equal_float32_masters_written_by_hand(monkeypatch, name, options, part):
    monkeypatch.setattr(step_parts, "_PART_ON_CPU", part)

    def make_optimizer(parameters):
        groups = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.02}]
        return getattr(torch.optim, name)(groups, lr=0.01, **options)

    model, optimizer = start(make_optimizer)
    lists = [group["params"] for group in optimizer.param_groups]
    losses = train(model, optimizer, 5)
    expected_losses, expected_masters = train_by_hand(make_optimizer, 5)
    assert_equal(losses, expected_losses)
    assert all(group["params"] is kept for group, kept in zip(optimizer.param_groups, lists, strict=True))
    assert_equal(read(optimizer), expected_masters)
    assert_equal([value.detach() for value in model.parameters()], [round_away(value) for value in expected_masters])
    amp.reset()
    assert_equal([value.detach() for value in model.parameters()], expected_masters)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


def use_masters(model, optimizer):
    norms = torch.stack([master.norm() for master in amp.master_params(optimizer)])
    assert bool(norms.isfinite().all())
    numbers = [master.detach().cpu().numpy() for master in amp.master_params(optimizer)]
    assert_equal([torch.from_numpy(array) for array in numbers], [master.cpu() for master in read(optimizer)])


def clip(model, optimizer):
    torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.1)


def edit_masters(model, optimizer):
    with torch.no_grad():
        for master in amp.master_params(optimizer):
            master.mul_(0.75)


def edit_data_of_masters(model, optimizer):
    for group in optimizer.param_groups:
        for master in group["params"]:
            master.data.mul_(0.75)
    amp.refresh()


def swap_averages(model, optimizer):
    """As an evaluation with averaged weights: they come in, and the weights go back."""
    kept = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
        loss_of(model)
        for parameter, value in zip(model.parameters(), kept, strict=True):
            parameter.copy_(value)


def save(model, optimizer):
    assert all(value.dtype is torch.float32 for value in model.state_dict().values())
    buffer = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), list(amp.master_params(optimizer))], buffer)
    buffer.seek(0)
    saved = torch.load(buffer)
    assert_equal(saved[2], read(optimizer))
    model.load_state_dict(saved[0])


def copy_optimizer(model, optimizer):
    assert_equal(list(copy.deepcopy(optimizer).param_groups[0]["params"]), read(optimizer))


def clear_gradients(model, optimizer):
    optimizer.zero_grad()
    backward(loss_of(model), optimizer)
    model.zero_grad()
    backward(loss_of(model) * 2, optimizer)


def accumulate(model, optimizer):
    """Several passes before the step, one of them outside of a block, and gradients that are read in between."""
    backward(loss_of(model) * 3, optimizer)
    masters = list(amp.master_params(optimizer))
    assert all(master.grad.dtype is torch.float32 for master in masters)
    (loss_of(model) * 0.3).backward()
    backward(loss_of(model) * 0.7, optimizer)
    masters[0].grad = masters[0].grad * 0.5
    masters[1].grad.mul_(0.5)


def clear_gradients_to_zero(model, optimizer):
    optimizer.zero_grad(set_to_none=False)
    backward(loss_of(model) * 2, optimizer)


USES = [
    accumulate,
    clear_gradients_to_zero,
    use_masters,
    clip,
    edit_masters,
    edit_data_of_masters,
    swap_averages,
    save,
    copy_optimizer,
    clear_gradients,
]


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_a_script_sees_what_it_sees_with_float32_masters(use):
    results = []
    for split_masters in (False, True):
        model, optimizer = start(adam, split_masters=split_masters)
        losses = train(model, optimizer, 4, use)
        dtypes = {(master.dtype, tuple(master.shape), master.stride()) for master in amp.master_params(optimizer)}
        results.append((losses, read(optimizer), dtypes))
        amp.reset()
    assert_equal(results[1][0], results[0][0])
    assert_equal(results[1][1], results[0][1])
    assert results[1][2] == results[0][2]


def test_a_gradient_whose_memory_is_used_again_is_copied():
    """As DistributedDataParallel does with `gradient_as_bucket_view`."""
    model, optimizer = start(adam)
    buckets = {parameter: torch.zeros_like(parameter) for parameter in model.parameters()}
    with amp.scale_loss(loss_of(model), optimizer) as scaled_loss:
        scaled_loss.backward()
        expected = [parameter.grad.float() for parameter in model.parameters()]
        for parameter, bucket in buckets.items():
            parameter.grad = bucket.copy_(parameter.grad).view_as(bucket)
    for bucket in buckets.values():
        bucket.fill_(torch.nan)
    assert_equal([master.grad for master in amp.master_params(optimizer)], expected)


@pytest.mark.skipif(IS_SIM, reason="the profiler counts the memory of the CPU")
def test_gradients_are_in_16_bits_until_somebody_reads_them():
    sizes = {}
    for split_masters in (False, True):
        model, optimizer = start(adam, split_masters=split_masters)
        train(model, optimizer, 1)
        with torch.profiler.profile(profile_memory=True) as profile:
            backward(loss_of(model), optimizer)
        events = profile.profiler.kineto_results.events()
        sizes[split_masters] = sum(event.nbytes() for event in events if event.name() == "[memory]")
        masters = list(amp.master_params(optimizer))
        assert {master.grad.dtype for master in masters} == {torch.float32}
        amp.reset()
    assert sizes[False] - sizes[True] == 2 * sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("saving", "loading"), [(False, True), (True, False), (True, True)])
def test_a_checkpoint_of_either_kind_loads_in_the_other(saving, loading):
    model, optimizer = start(adam, split_masters=saving)
    train(model, optimizer, 2)
    saved = copy.deepcopy([model.state_dict(), optimizer.state_dict(), amp.state_dict()])
    expected = [train(model, optimizer, 3), read(optimizer)]
    amp.reset()
    model, optimizer = start(adam, split_masters=loading)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    amp.load_state_dict(saved[2])
    assert_equal(train(model, optimizer, 3), expected[0])
    assert_equal(read(optimizer), expected[1])


@pytest.mark.parametrize("options", [{}, {"fused": True}])
def test_a_step_that_is_skipped_leaves_the_masters(monkeypatch, options):
    monkeypatch.setattr(step_parts, "_PART_ON_CPU", 20)
    model, optimizer = start(lambda parameters: torch.optim.AdamW(parameters, **options), loss_scale="dynamic")
    train(model, optimizer, 2)
    before = read(optimizer)
    optimizer.zero_grad()
    backward(loss_of(model) * float("inf"), optimizer)
    optimizer.step()
    assert optimizer.step_was_skipped
    assert_equal(read(optimizer), before)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.Adafactor])
@pytest.mark.parametrize("loss_scale", [1.0, "dynamic"])
def test_a_step_with_a_closure_calls_it_once(monkeypatch, kind, loss_scale):
    monkeypatch.setattr(step_parts, "_PART_ON_CPU", 20)

    def make_optimizer(parameters):
        return kind(parameters, lr=0.01)

    model, optimizer = start(make_optimizer, loss_scale=loss_scale)
    calls = []

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model)
        calls.append(loss.detach())
        backward(loss, optimizer)
        return loss

    for _ in range(3):
        optimizer.step(closure)
    losses, masters = train_by_hand(make_optimizer, 3)
    assert_equal(calls, losses)
    assert_equal(read(optimizer), masters)


def test_hooks_of_the_script_run_once_and_see_the_step(monkeypatch):
    monkeypatch.setattr(step_parts, "_PART_ON_CPU", 20)
    model, optimizer = start(adam)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(read(optimizer)))
    optimizer.register_step_post_hook(lambda *_: seen.append(read(optimizer)))
    before = read(optimizer)
    train(model, optimizer, 1)
    assert len(seen) == 2
    assert_equal(seen[0], before)
    assert_equal(seen[1], read(optimizer))


class Sgd(torch.optim.SGD):
    """Its step is its own, and may do anything."""

    def step(self, closure=None):
        return super().step(closure)


def test_an_optimizer_with_a_step_of_its_own_keeps_float32_masters(capsys):
    model = make_model()
    optimizer = Sgd(model.parameters(), lr=0.01)
    amp.initialize(model, optimizer, opt_level="O5", split_masters=True)
    assert "Sgd keeps float32 masters" in capsys.readouterr().out
    losses = train(model, optimizer, 3)
    masters = read(optimizer)
    amp.reset()
    model, optimizer = start(lambda parameters: torch.optim.SGD(parameters, lr=0.01))
    assert_equal(train(model, optimizer, 3), losses)
    assert_equal(read(optimizer), masters)


@torch.no_grad()
def edit(weight):
    weight[0].clamp_(-0.1, 0.1)
    weight[1].zero_()


def test_an_edit_in_a_pass_leaves_the_low_half():
    """Between a forward pass and the step, the master rounds to the edited weight, and the others keep all bits. What
    is put back is the old master.
    """
    model, optimizer = start(adam)
    train(model, optimizer, 2)
    weight, before = model[0].weight, read(optimizer)
    amp.refresh()  # the masters are in use no longer
    kept = weight.detach().clone()
    loss_of(model)
    edit(weight)
    master = read(optimizer)[0]
    assert torch.equal(round_away(master), weight)
    assert torch.equal(master[2:], before[0][2:])
    assert bool((master[1].abs() < 1e-40).all())
    with torch.no_grad():
        weight.copy_(kept)
    loss_of(model)
    assert_equal(read(optimizer), before)


def skip(model, optimizer):
    backward(loss_of(model) * float("inf"), optimizer)
    optimizer.step()
    assert optimizer.step_was_skipped


def step_without_gradients(model, optimizer):
    loss_of(model)
    optimizer.zero_grad()
    optimizer.step()


def step_another(model, optimizer):
    another = nn.Linear(2, 2)
    its_optimizer = adam(another.parameters())
    amp.initialize(another, its_optimizer, opt_level="O5", split_masters=True, loss_scale="dynamic", verbosity=0)
    its_optimizer.step()


def evaluate(model, optimizer):
    with torch.no_grad():
        loss_of(model)


@pytest.mark.parametrize("then", [skip, step_without_gradients, step_another, evaluate], ids=lambda then: then.__name__)
def test_edits_after_a_step_reach_single_elements(then):
    model, optimizer = start(adam, loss_scale="dynamic")
    train(model, optimizer, 2)
    then(model, optimizer)
    expected = read(optimizer)
    amp.refresh()
    rounded = model[0].weight.detach().clone()
    edit(model[0].weight)
    is_edited = model[0].weight != rounded
    expected[0][is_edited] = model[0].weight.detach().float()[is_edited]
    loss_of(model)
    assert_equal(read(optimizer), expected)


OWN_FILES = tuple(f"training/{name}.py" for name in ("split_masters", "halves", "step_parts"))


def test_after_an_interrupt_at_any_line_of_a_step_each_weight_is_that_before_or_after(monkeypatch):
    for limit in ("_PART_ON_CPU", "_PART"):
        monkeypatch.setattr(step_parts, limit, 20)

    def get_weights(act):
        model, optimizer = start(adam)
        train(model, optimizer, 1)
        backward(loss_of(model), optimizer)
        answer = act(optimizer.step)
        amp.reset()
        return answer, [parameter.detach() for parameter in model.parameters()]

    count, after = get_weights(lambda step: count_lines(step, places=OWN_FILES))
    _, before = get_weights(lambda step: None)
    for position in choose(count, 12, seed="split"):
        _, found = get_weights(lambda step, position=position: interrupted_at(position, step, places=OWN_FILES))
        for weight, old, new in zip(found, before, after, strict=True):
            assert torch.equal(weight, old) or torch.equal(weight, new), position


def test_an_interrupted_step_leaves_whole_groups_after_reset(monkeypatch):
    for limit in ("_PART_ON_CPU", "_PART"):
        monkeypatch.setattr(step_parts, limit, 20)
    model, optimizer = start(adam)
    train(model, optimizer, 2)
    calls = []

    def interrupt(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["torch.optim.adam"], "adam", interrupt)
    before = read(optimizer)
    amp.refresh()  # the masters are in use no longer
    with pytest.raises(KeyboardInterrupt):
        train(model, optimizer, 1)
    amp.reset()
    assert optimizer.param_groups[0]["params"] == list(model.parameters())
    assert_equal([parameter.detach() for parameter in model.parameters()], before)


def test_two_optimizers_and_a_group_added_later():
    def train_all(split_masters):
        model = make_model()
        parameters = list(model.parameters())
        optimizers = [torch.optim.SGD(parameters[:1], lr=0.1), adam(parameters[1:3])]
        amp.initialize(model, optimizers, opt_level="O5", split_masters=split_masters, verbosity=0)
        optimizers[1].add_param_group({"params": parameters[3:], "lr": 0.05})
        for _ in range(3):
            with amp.scale_loss(loss_of(model), optimizers) as scaled_loss:
                scaled_loss.backward()
            for optimizer in optimizers:
                optimizer.step()
        masters = [master for optimizer in optimizers for master in read(optimizer)]
        amp.reset()
        return masters

    assert_equal(train_all(True), train_all(False))


@pytest.mark.parametrize(("level", "reason"), [("O2", "5 exponent bits"), ("O3", "no masters"), ("O4", "no masters")])
def test_levels_without_bfloat16_masters_refuse(level, reason):
    model = make_model()
    with pytest.raises(amp.errors.PolicyError, match=reason):
        amp.initialize(model, adam(model.parameters()), opt_level=level, split_masters=True)
