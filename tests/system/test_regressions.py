"""Training scripts that once broke the package, or could have, train as their author expects.

Guards: training/first_step, training/groups, training/optimizer, training/step_was_skipped, training/model_hooks.
Guards: functions.
"""

import copy
import functools

import pytest
import torch
from torch import nn

import amp_patch as amp


def make(level, *, make_optimizer=lambda p: torch.optim.SGD(p, lr=0.1), **options):
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = make_optimizer(model.parameters())
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)


X = torch.ones(2, 4)


def loss_of(model, factor=1.0):
    return (model(X).float() - 1).pow(2).mean() * factor


def backward(model, optimizer, factor=1.0, **options):
    with amp.scale_loss(loss_of(model, factor), optimizer, **options) as scaled_loss:
        scaled_loss.backward()


# ---- masters and parameters changed by others ------------------------------------------------------------------------


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimization: climbs first, comes back, and has another optimizer take the step."""

    def __init__(self, params, make_base):
        super().__init__(params, {})
        self.base = make_base(self.param_groups)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old"] = p.data.clone()
                p.add_(p.grad, alpha=0.05)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old"]
        self.base.step()
        self.zero_grad()


@pytest.mark.parametrize("level", ["O1", "O5"])
def test_sam_learns(level):
    losses = []
    make_base = functools.partial(torch.optim.AdamW, lr=0.1, fused=True)
    model, optimizer = make(level, make_optimizer=lambda p: Sam(p, make_base), loss_scale="dynamic")
    for _ in range(10):
        for half_step in (optimizer.first_step, optimizer.second_step):
            backward(model, optimizer)
            half_step()
        losses.append(loss_of(model).item())
    assert losses[-1] < losses[0] / 2
    backward(model, optimizer)
    optimizer.first_step()
    backward(model, optimizer, factor=float("inf"))
    optimizer.second_step()
    assert all(torch.isfinite(p).all() for p in model.parameters())
    amp.reset()
    assert "step" not in vars(optimizer.base)


def test_an_average_kept_in_the_state_dict_of_a_copy_arrives():
    model, _optimizer = make("O5")
    average = copy.deepcopy(model)
    for value in average.state_dict().values():
        value.mul_(0)
    assert torch.count_nonzero(average(X)) == 0


def test_an_optimizer_that_has_stepped_before():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters(), eps=1e-4)
    loss_of(model).backward()
    optimizer.step()
    optimizer.zero_grad()
    amp.initialize(model, optimizer, opt_level="O3", verbosity=0)
    backward(model, optimizer)
    optimizer.step()
    amp.reset()
    loss_of(model).backward()
    optimizer.step()
    assert all(
        value.dtype is torch.float32
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )


def test_reset_in_the_middle_of_an_accumulation_keeps_true_gradients():
    model, optimizer = make("O2", loss_scale=1.0)
    backward(model, optimizer)
    expected = next(amp.master_params(optimizer)).grad.clone()
    amp.reset()
    model, optimizer = make("O2", loss_scale=128.0)
    backward(model, optimizer, delay_unscale=True)
    amp.reset()
    assert torch.equal(model.weight.grad, expected)


# ---- registered functions --------------------------------------------------------------------------------------------


def test_registered_static_and_class_methods():
    class Owner:
        @staticmethod
        def static(x):
            return x.dtype

        @classmethod
        def of_class(cls, x):
            return cls, x.dtype

    originals = [vars(Owner)[name] for name in ("static", "of_class")]
    for name in ("static", "of_class"):
        amp.register_half_function(Owner, name)
    _model, _optimizer = make("O4")
    assert Owner.static(X) is torch.bfloat16 and Owner.of_class(X) == (Owner, torch.bfloat16)
    amp.reset()
    assert [vars(Owner)[name] for name in ("static", "of_class")] == originals


# ---- a dynamic scale, and no scale_loss ------------------------------------------------------------------------------


def plain_backward(model):
    loss_of(model).backward()


def count_unscaled(caught):
    return sum("no loss has been scaled" in str(one.message) for one in caught)


def test_steps_under_a_dynamic_scale_that_nobody_uses_are_told_of_once(recwarn):
    model, other = nn.Linear(4, 4), nn.Linear(4, 3)
    optimizers = [torch.optim.Adam(model.parameters()), torch.optim.SGD(other.parameters(), lr=0.1)]
    amp.initialize([model, other], optimizers, opt_level="O2", num_losses=2, verbosity=0)
    for _ in range(3):
        plain_backward(model)
        other(X).float().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    assert count_unscaled(recwarn) == 1
    assert "step() of Adam under a dynamic loss scale" in str(recwarn[-1].message)
    assert recwarn[-1].filename == __file__


def test_a_warm_up_step_without_gradients_is_not_told_of(recwarn):
    model, optimizer = make("O1")
    optimizer.step()  # before schedulers, some scripts
    backward(model, optimizer)
    optimizer.step()
    plain_backward(model)
    optimizer.step()  # a loss that is left unscaled on purpose: the script knows scale_loss
    assert count_unscaled(recwarn) == 0


@pytest.mark.parametrize(("level", "options"), [("O1", {"loss_scale": 8.0}), ("O5", {})], ids=str)
def test_a_static_scale_that_nobody_uses_is_no_fault(level, options, recwarn):
    model, optimizer = make(level, **options)
    plain_backward(model)
    optimizer.step()
    assert count_unscaled(recwarn) == 0


def test_gradients_scaled_by_hand_are_scaled(recwarn):
    model, optimizer = make("O1", loss_scale={"init": 64})
    gradients = amp.unscale(torch.autograd.grad(amp.scale(loss_of(model)), list(model.parameters())))
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()
    assert count_unscaled(recwarn) == 0


# ---- a run of NaN at a scale of 1 ------------------------------------------------------------------------------------


def test_nan_gradients_at_a_scale_of_one_are_told_of_once_by_name(recwarn):
    model, optimizer = make("O5")
    for step in range(415):
        optimizer.zero_grad()
        backward(model, optimizer, float("nan") if step > 205 else 1.0)
        optimizer.step()
        assert step > 205 or not [one for one in recwarn if "non-finite" in str(one.message)]
    told = [str(one.message) for one in recwarn if "non-finite gradients (weight, bias)" in str(one.message)]
    assert len(told) == 1 and "at a loss scale of 1" in told[0]


# ---- Accelerate ------------------------------------------------------------------------------------------------------


class Delegating(torch.optim.Optimizer):
    """An optimizer as Accelerate wraps it: everything is the wrapped one's, and nothing can be set."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)
    defaults = property(lambda self: self.optimizer.defaults)
    step_was_skipped = property(lambda self: False)

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure=None):
        self.optimizer.step(closure)


@pytest.mark.parametrize(("level", "is_wrapped_before"), [("O1", True), ("O2", False), ("O5", True)])
def test_an_optimizer_that_delegates_to_another_trains_as_that(level, is_wrapped_before):
    options = {"loss_scale": {"init": 128}} if level in ("O1", "O2") else {}
    factors = (1.0, float("inf"), 2.0) if options else (1.0, 0.5, 2.0)
    expected, optimizer = make(level, **options)
    for factor in factors:
        backward(expected, optimizer, factor)
        optimizer.step()
        optimizer.zero_grad()
    amp.reset()
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = Delegating(inner)
    given = wrapped if is_wrapped_before else inner
    assert amp.initialize(model, given, opt_level=level, verbosity=0, **options)[1] is given
    skips = []
    for factor in factors:
        backward(model, wrapped, factor)
        wrapped.step()
        wrapped.zero_grad()
        skips.append(inner.step_was_skipped)
    assert skips == [False, bool(options), False]
    amp.reset()
    assert torch.equal(model.weight, expected.weight) and "step_was_skipped" not in vars(inner)


def test_an_optimizer_whose_skips_are_a_property_is_bound_all_the_same():
    class Counting(torch.optim.SGD):
        step_was_skipped = property(lambda self: None)

    model, optimizer = make("O2", make_optimizer=lambda p: Counting(p, lr=0.5), loss_scale={"init": 64})
    for factor in (1.0, float("nan")):
        backward(model, optimizer, factor)
        optimizer.step()
    assert (amp.stats().steps, amp.stats().steps_skipped) == (1, 1)
    amp.reset()
    amp.initialize(model, Delegating(optimizer), enabled=False)


# ---- a frozen 16-bit base --------------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A frozen 16-bit layer with float32 weights beside it, as LoRA adds them."""

    def __init__(self):
        super().__init__()
        self.base = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6)).bfloat16().requires_grad_(False)
        self.base.register_buffer("offset", torch.ones(6, dtype=torch.bfloat16))
        self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 6, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x)) + self.base.offset


def test_a_frozen_base_in_16_bits_is_left_alone_and_what_is_beside_it_learns():
    torch.manual_seed(5)
    model = Adapted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    for _ in range(2):
        backward(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    amp.reset()
    after = model.state_dict()
    assert all(after[name].dtype is before[name].dtype for name in before)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"down.weight", "up.weight"}
