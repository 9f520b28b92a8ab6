"""Optimizers in a session: masters, the replaced methods, schedulers, closures, groups."""

import copy
import functools
import math
import pickle
import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from devices import requires_cpu
from reference import make_batches, make_model
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from training import backward, train

import amp_patch as amp
from amp_patch.apex.optimizers import FusedAdam
from amp_patch.training.masters import Masters

LEVELS = ["O1", "O2"]  # without and with masters


def compute_loss(model, batch, factor=1.0):
    return F.cross_entropy(model(batch[0]), batch[1]) * factor


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), **{"lr": 0.05, "momentum": 0.9, **options})


def initialize(level, make_optimizer=sgd, **options):
    model = make_model()
    return amp.initialize(model, make_optimizer(model), opt_level=level, verbosity=0, **options)


def test_optimizer_state_from_before_is_kept_and_stays_float32():
    batches = make_batches(4)
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-8)
    F.cross_entropy(model(batches[0][0]), batches[0][1] * 0).backward()
    for parameter in model.parameters():
        parameter.grad.mul_(1e-9)
    optimizer.step()
    second_moments = [optimizer.state[p]["exp_avg_sq"].clone() for p in model.parameters()]
    assert 0 < min(float(m.max()) for m in second_moments) < 1e-20
    amp.initialize(model, optimizer, opt_level="O2", cast_model_type=torch.float16, verbosity=0)
    for master, expected in zip(amp.master_params(optimizer), second_moments, strict=True):
        assert torch.equal(optimizer.state[master]["exp_avg_sq"], expected)
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    for master, expected in zip(amp.master_params(optimizer), second_moments, strict=True):
        assert optimizer.state[master]["exp_avg_sq"].dtype is torch.float32
        assert torch.equal(optimizer.state[master]["exp_avg_sq"], expected)


@pytest.mark.parametrize(("level", "is_early"), [("O1", True), ("O2", False)])
def test_a_scheduler_may_be_built_before_or_after_and_a_skip_is_no_reason_to_warn(level, is_early):
    batches = make_batches(4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = make_model()
        optimizer = sgd(model)
        if is_early:
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        amp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
        if not is_early:
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        backward(compute_loss(model, batches[0], math.inf), optimizer)
        optimizer.step()
        assert optimizer.step_was_skipped
        scheduler.step()
        train(model, optimizer, batches, scheduler)
    assert optimizer.param_groups[0]["lr"] == 0.05 * 0.5**5
    amp.reset()
    optimizer.step()


class Twice(torch.optim.SGD):
    """An optimizer that evaluates its closure where it likes, as SAM does."""

    def step(self, closure=None):
        super().step()
        return closure() if closure else None


class Disguised(torch.optim.SGD):
    """The same, under the name of torch's step."""

    @functools.wraps(torch.optim.SGD.step)
    def step(self, closure=None):
        super().step()
        return closure() if closure else None


def scheduled(parameters):
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 100)
    return optimizer


def scheduled_in_a_session_before(parameters):
    """The schedule has wrapped what a session put in the place of `step`; that stays when the session is closed."""
    parameters = list(parameters)
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    holder = nn.Module()
    holder.weights = nn.ParameterList(parameters)
    amp.initialize(holder, optimizer, opt_level="O1", verbosity=0)
    torch.optim.lr_scheduler.StepLR(optimizer, 100)
    amp.reset()
    return optimizer


EVALUATING_FIRST = {
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "under a schedule": scheduled,
    "under a schedule of an earlier session": scheduled_in_a_session_before,
    "FusedAdam": lambda p: FusedAdam(p, lr=0.01),
}


@pytest.mark.parametrize(
    ("name", "level", "loss_scale"),
    [*((name, "O1", "dynamic") for name in EVALUATING_FIRST), ("fused AdamW", "O2", "dynamic")]
    + [("fused AdamW", level, 8.0) for level in LEVELS],
)
def test_a_step_with_a_closure_is_the_step_after_it(name, level, loss_scale):
    batch = make_batches(1)[0]
    results = []
    for with_closure in (False, True):
        model, optimizer = initialize(level, lambda m: EVALUATING_FIRST[name](m.parameters()), loss_scale=loss_scale)
        bad = math.inf if loss_scale == "dynamic" else 2.0
        losses, factors = [], iter((1.0, bad, 1.0, 1.0))

        def evaluate(model=model, optimizer=optimizer, factors=factors):
            optimizer.zero_grad()
            loss = compute_loss(model, batch, next(factors))
            backward(loss, optimizer)
            return loss

        for number in range(4):
            if with_closure:
                with torch.no_grad():
                    losses.append(optimizer.step(evaluate) if number else optimizer.step(closure=evaluate))
            else:
                losses.append(evaluate())
                optimizer.step()
            assert optimizer.step_was_skipped is (number == 1 and loss_scale == "dynamic")
        results.append([*copy.deepcopy(model.state_dict()).values(), torch.stack(losses)])
        assert next(factors, None) is None
        amp.reset()
    assert all(torch.equal(*both) for both in zip(*results, strict=True))


@pytest.mark.parametrize("kind", [Twice, Disguised])
def test_a_closure_that_may_be_called_at_any_time_is_refused_where_a_step_may_be_skipped(kind):
    model = nn.Linear(2, 2)
    optimizer = kind(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O1", loss_scale="dynamic", verbosity=0)
    with pytest.raises(amp.OptimizerError, match=r"step\(closure\) of .* does not work with a dynamic loss scale"):
        optimizer.step(lambda: 1 / 0)


def test_lbfgs_trains_where_it_can():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.LBFGS(model.parameters())
    amp.initialize(model, optimizer, opt_level="O4", verbosity=0)
    x, y = torch.tensor([[1.0, 2.0], [3.0, 5.0]]), torch.tensor([[1.0], [2.0]])

    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    first = closure().item()
    optimizer.step(closure)
    assert closure().item() < first / 10


def test_a_closure_that_raises_takes_no_step():
    model, optimizer = initialize("O1", loss_scale="dynamic")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    train(model, optimizer, make_batches(2))
    assert amp.stats().steps == 2


def test_zeroing_the_model_zeroes_the_gradients_of_its_masters():
    model, optimizer = initialize("O2")
    backward(compute_loss(model, make_batches(1)[0]), optimizer)
    model.zero_grad()
    assert all(master.grad is None for master in amp.master_params(optimizer))


@requires_cpu("the simulated device has no sparse tensors")
def test_sparse_gradients():
    for level, options in (("O1", {}), ("O2", {"max_loss_scale": 1024.0}), ("O5", {})):
        torch.manual_seed(0)
        table = nn.Embedding(6, 3, sparse=True)
        optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.1)
        amp.initialize(table, optimizer, opt_level=level, verbosity=0, **options)
        before = table.state_dict()["weight"].clone()
        for _ in range(2):
            optimizer.zero_grad()
            for _ in range(2):
                backward(table(torch.tensor([1, 1, 4])).float().pow(2).sum(), optimizer)
            optimizer.step()
        changed = (table.state_dict()["weight"] != before).any(1)
        assert changed.tolist() == [False, True, False, False, True, False]
        amp.reset()


@requires_cpu("the simulated device has no sparse tensors")
@pytest.mark.parametrize("scale", [1.0, 8.0])
@pytest.mark.parametrize("is_sparse_first", [True, False], ids=["sparse first", "dense first"])
def test_sparse_and_dense_gradients_of_one_parameter_add_up(scale, is_sparse_first):
    table = nn.Embedding(5, 3, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    amp.initialize(table, optimizer, opt_level="O5", loss_scale=scale, verbosity=0)
    losses = [lambda: table(torch.tensor([1, 1])).sum(), lambda: table.weight.float().sum()]
    for compute in losses if is_sparse_first else reversed(losses):
        backward(compute(), optimizer)
    gradient = next(iter(amp.master_params(optimizer))).grad.to_dense()
    assert torch.equal(gradient, torch.tensor([1.0, 3.0, 1.0, 1.0, 1.0])[:, None].expand(5, 3))


@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_the_gradients_of_masters_hold_no_graph(scale):
    model, optimizer = initialize("O5", loss_scale=scale)
    for batch in make_batches(2):
        with amp.scale_loss(compute_loss(model, batch), optimizer) as scaled_loss:
            scaled_loss.backward(create_graph=True)
        own = {id(parameter) for parameter in model.parameters()}
        masters = [master for master in amp.master_params(optimizer) if id(master) not in own]
        assert masters and not any(master.grad.requires_grad for master in masters)
    optimizer.step()


def test_parameters_that_are_replaced_several_times_are_seen():
    for edits in (1, 2, 3, 4):
        model = nn.Linear(64, 64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        expected = model.weight.detach().clone()
        with amp.scope(model, optimizer, opt_level="O5", verbosity=0):
            expected = expected.bfloat16()
            for _ in range(edits):
                expected = expected * 0.5
                model.weight.data = model.weight.data * 0.5  # every second time where it was before, if that is free
            model(torch.ones(1, 64)).sum().backward()
            optimizer.step()
            assert torch.equal(model.weight.detach(), expected)


def test_optimizers_can_be_copied_and_pickled():
    model, optimizer = initialize("O2")
    train(model, optimizer, make_batches(2))
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert not hasattr(twin, "_amp_stash") and "step" not in vars(twin)
        assert all(
            torch.equal(a, b)
            for a, b in zip(twin.param_groups[0]["params"], optimizer.param_groups[0]["params"], strict=True)
        )
    assert hasattr(optimizer, "_amp_stash")


def test_a_binding_tells_of_a_skip_before_it_happens_and_takes_its_attributes_back():
    model, optimizer = initialize("O1", loss_scale="dynamic")
    binding = optimizer._amp_stash
    binding.attach("mine", 1)
    binding.attach("mine", 2)
    batch = make_batches(1)[0]
    for factor, skipped in ((1.0, False), (float("inf"), True)):
        backward(compute_loss(model, batch, factor), optimizer)
        assert binding.flags.will_skip() is skipped
        optimizer.step()
        assert optimizer.step_was_skipped is skipped and binding.flags.will_skip() is False
    assert optimizer.mine == 2
    amp.reset()
    assert not hasattr(optimizer, "mine")


# ---- hooks on steps, groups made anew, copies ------------------------------------------------------------------------

MAKERS = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.5),
    "fused": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1, fused=True),
}


@pytest.mark.parametrize("is_global", [False, True])
@pytest.mark.parametrize("is_early", [False, True])
@pytest.mark.parametrize(("level", "name"), [("O5", "sgd"), ("O2", "fused")])
def test_hooks_on_a_step_see_the_weights_of_that_step(level, name, is_early, is_global):
    model = make_model()
    optimizer = MAKERS[name](model)
    seen = []

    def look(*_):
        seen.append([parameter.detach().clone() for parameter in model.parameters()])

    register = register_optimizer_step_post_hook if is_global else optimizer.register_step_post_hook
    hook = register(look) if is_early else None
    amp.initialize(model, optimizer, opt_level=level, loss_scale=8.0, verbosity=0)
    hook = hook or register(look)
    for batch in make_batches(3):
        seen.clear()
        optimizer.zero_grad()
        backward(compute_loss(model, batch), optimizer)
        optimizer.step()
        assert all(map(torch.equal, seen[-1], model.parameters()))
    hook.remove()
    amp.reset()
    assert not optimizer._optimizer_step_post_hooks


class Wrapper(torch.optim.Optimizer):
    """Steps another optimizer in its stead, as SAM does."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.05})
        self.base = torch.optim.SGD(self.param_groups, lr=0.05, momentum=0.9)
        self.param_groups = self.base.param_groups

    def step(self, closure=None):
        self.base.step(closure)


@pytest.mark.parametrize("level", LEVELS)
def test_the_state_of_an_optimizer_inside_of_another_outlives_the_session(level):
    model = make_model()
    optimizer = Wrapper(model.parameters())
    amp.initialize(model, optimizer, opt_level=level, loss_scale=1.0, verbosity=0)
    train(model, optimizer, make_batches(2))
    momentum = [optimizer.base.state[p]["momentum_buffer"] for p in optimizer.param_groups[0]["params"]]
    amp.reset()
    assert [optimizer.base.state[p]["momentum_buffer"] for p in model.parameters()] == momentum
    assert len(optimizer.base.state) == len(momentum)


def test_masters_are_copied_to_parameters_once_in_a_step(monkeypatch):
    model, optimizer = initialize("O2", MAKERS["fused"])
    copies = []
    copy = Masters.copy_to_parameters
    monkeypatch.setattr(Masters, "copy_to_parameters", lambda self, pairs=None: (copies.append(1), copy(self, pairs)))
    batches = make_batches(4)
    train(model, optimizer, batches[:3])
    model(batches[3][0])
    assert len(copies) == 3 - amp.stats().steps_skipped


def test_a_hook_that_edits_weights_is_not_overwritten():
    """Weight clipping in a hook, as Wasserstein critics do it."""
    model, optimizer = initialize("O5")

    @torch.no_grad()
    def clip(*_):
        for parameter in model.parameters():
            parameter.clamp_(-0.125, 0.125)

    optimizer.register_step_post_hook(clip)
    train(model, optimizer, make_batches(2))
    model(make_batches(1)[0][0])
    for parameter, master in zip(model.parameters(), amp.master_params(optimizer), strict=True):
        assert parameter.abs().max() <= 0.125 and torch.equal(parameter.float(), master.to(parameter.dtype).float())


def test_groups_made_anew_from_the_parameters_have_their_masters():
    """Progressive unfreezing: first the last layer, then all."""
    model, optimizer = initialize("O2", loss_scale=1.0)
    train(model, optimizer, make_batches(1))
    masters = dict(zip(model.parameters(), amp.master_params(optimizer), strict=True))
    optimizer.param_groups.clear()
    optimizer.state.clear()
    *others, last = model.parameters()
    optimizer.add_param_group({"params": [last], "lr": 0.25})
    assert list(amp.master_params(optimizer)) == [masters[last]]
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [last]})
    before = [parameter.detach().clone() for parameter in model.parameters()]
    train(model, optimizer, make_batches(1))
    is_same = [torch.equal(*both) for both in zip(before, model.parameters(), strict=True)]
    assert all(is_same[:-1]) and not is_same[-1]
    optimizer.add_param_group({"params": others})
    assert set(amp.master_params(optimizer)) == set(masters.values())


@pytest.mark.parametrize("is_early", [False, True])
def test_a_hook_that_renames_entries_leaves_them_float32(is_early):
    model = make_model()

    def rename(module, state, prefix, metadata):
        for key in [key for key in state if key.endswith("weight")]:
            state[key.removesuffix("weight") + "kernel"] = state.pop(key)

    if is_early:
        model.register_state_dict_post_hook(rename)
        next(model.children()).register_state_dict_post_hook(rename)
    optimizer = sgd(model)
    originals = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    amp.initialize(model, optimizer, opt_level="O5", verbosity=0)
    if not is_early:
        model.register_state_dict_post_hook(rename)
    state = model.state_dict()
    assert any(key.endswith("kernel") for key in state)
    for name, original in originals.items():
        assert torch.equal(state[name.replace("weight", "kernel")], original)


def test_the_first_copy_of_a_model_with_masters_is_warned_of_and_what_that_says_is_so():
    early, way = make_model(), "before initialize or after amp.reset()"
    model, _optimizer = initialize("O2")
    with pytest.warns(UserWarning, match=re.escape(way)) as caught:
        copied = copy.deepcopy(model)
        copy.deepcopy((model, copied))
    assert len(caught) == 1
    with pytest.raises(amp.ModelError, match=f"in 16 bits already.*{re.escape(way)}"):
        amp.initialize(copied, sgd(copied), opt_level="O2", verbosity=0)
    amp.initialize(early, sgd(early), opt_level="O2", verbosity=0)
    amp.reset()
    late = copy.deepcopy(model)
    optimizer = sgd(late)
    amp.initialize(late, optimizer, opt_level="O2", verbosity=0)
    for master, parameter in zip(amp.master_params(optimizer), model.parameters(), strict=True):
        assert master.dtype is torch.float32 and torch.equal(master, parameter)


@pytest.mark.parametrize("level", ["O1", "O3"])
def test_copies_of_models_without_masters_are_not(level):
    model, _optimizer = initialize(level)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copy.deepcopy(model)
