"""Ways in which training scripts once broke the package, or could have, each as the script would have it."""

import pytest
import torch
import torch.nn.functional as F
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


def gradient_by_hand(level):
    model, optimizer = make(level, loss_scale=1.0)
    backward(model, optimizer)
    expected = next(amp.master_params(optimizer)).grad.clone()
    amp.reset()
    return expected


# ---- windows that end without a step ---------------------------------------------------------------------------------


@pytest.mark.parametrize("zero", ["optimizer", "model", "one by one"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_loop_that_skips_steps_by_itself_gets_a_smaller_scale(level, zero):
    """`if torch.isfinite(norm): optimizer.step()`: the scale must fall although no step is ever skipped by the
    optimizer.
    """
    model, optimizer = make(level)
    for _ in range(14):
        if zero == "one by one":
            for parameter in (*model.parameters(), *amp.master_params(optimizer)):
                parameter.grad = None
        else:
            (optimizer if zero == "optimizer" else model).zero_grad()
        backward(model, optimizer, factor=50.0)
        if torch.isfinite(torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)):
            optimizer.step()
    assert amp.stats().steps > 0 and amp.stats().steps_skipped == 0
    assert amp.stats().loss_scales[0] < 65536


# ---- things done inside the block ------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_stepping_inside_the_block(level):
    results = []
    for inside in (False, True):
        model, optimizer = make(level, loss_scale="dynamic", max_loss_scale=1024.0)
        for factor in (1.0, float("inf"), 1.0):
            optimizer.zero_grad()
            with amp.scale_loss(loss_of(model, factor), optimizer) as scaled_loss:
                scaled_loss.backward()
                if inside:
                    optimizer.step()
            if not inside:
                optimizer.step()
            assert optimizer.step_was_skipped is (factor != 1.0)
        results.append((model.state_dict()["weight"].clone(), amp.state_dict()))
        amp.reset()
    assert torch.equal(results[0][0], results[1][0]) and results[0][1] == results[1][1]


def test_an_optimizer_for_each_parameter_that_steps_within_backward():
    results = []
    for within in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
        amp.initialize(model, list(optimizers.values()), opt_level="O1", loss_scale="dynamic", verbosity=0)

        def step(parameter, optimizers=optimizers):
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        if within:
            for p in model.parameters():
                p.register_post_accumulate_grad_hook(step)
        for factor in (1.0, float("inf"), 1.0):
            backward(model, list(optimizers.values()), factor)
            if not within:
                for p in optimizers:
                    step(p)
        results.append([p.detach().clone() for p in model.parameters()])
        amp.reset()
    assert all(torch.equal(a, b) and torch.isfinite(a).all() for a, b in zip(*results, strict=True))


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


@pytest.mark.parametrize(
    "base",
    [lambda g: torch.optim.SGD(g, lr=0.1), lambda g: torch.optim.AdamW(g, lr=0.1, fused=True)],
    ids=["sgd", "fused"],
)
@pytest.mark.parametrize("level", ["O1", "O5"])
def test_sam_learns(level, base):
    losses = []
    model, optimizer = make(level, make_optimizer=lambda p: Sam(p, base), loss_scale="dynamic")
    for _ in range(10):
        for half_step in (optimizer.first_step, optimizer.second_step):
            backward(model, optimizer)
            half_step()
        losses.append(loss_of(model).item())
    assert losses[-1] < losses[0] / 2
    backward(model, optimizer)
    optimizer.first_step()
    backward(model, optimizer, factor=float("inf"))
    before = [
        value.clone()
        for value in optimizer.state.values()
        for value in value.values()
        if isinstance(value, torch.Tensor)
    ]
    optimizer.second_step()
    assert all(torch.isfinite(p).all() for p in model.parameters()) and before
    amp.reset()
    assert "step" not in vars(optimizer.base)


@pytest.mark.parametrize("level", ["O1", "O5"])
def test_an_average_kept_in_the_state_dict_of_a_copy_arrives(level):
    import copy

    model, _optimizer = make(level)
    average = copy.deepcopy(model)
    for value in average.state_dict().values():
        value.mul_(0)
    assert torch.count_nonzero(average(X)) == 0


@pytest.mark.parametrize(
    "make_optimizer", [torch.optim.Adam, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)], ids=["adam", "sgd"]
)
@pytest.mark.parametrize("level", ["O1", "O3", "O5"])
def test_an_optimizer_that_has_stepped_before(level, make_optimizer):
    model = nn.Linear(4, 4)
    optimizer = make_optimizer(model.parameters())
    loss_of(model).backward()
    optimizer.step()
    optimizer.zero_grad()
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
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


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_reset_in_the_middle_of_an_accumulation_keeps_true_gradients(level):
    expected = gradient_by_hand(level)
    model, optimizer = make(level, loss_scale=128.0)
    backward(model, optimizer, delay_unscale=True)
    amp.reset()
    assert torch.equal(model.weight.grad, expected)


# ---- ops -------------------------------------------------------------------------------------------------------------


def test_augmented_operators_write_where_they_should():
    model, _optimizer = make("O4")
    with torch.no_grad():
        hidden = model(X)
        expected = hidden.clone()
        expected[0] = expected[0] * expected[0]
        row = hidden[0]
        row **= 2
        row += torch.zeros(4)
    assert torch.equal(hidden, expected) and hidden.dtype is torch.bfloat16


def test_a_listed_op_that_is_called_in_place_changes_its_argument(tmp_path):
    (tmp_path / "lists.yaml").write_text("extends: bfloat16\nblacklist: [silu, elu]\n")
    model, _optimizer = make("O4", lists=tmp_path / "lists.yaml")
    for activation in (F.silu, F.elu):
        hidden = model(X).detach()
        expected = activation(hidden.clone()).bfloat16()
        activation(hidden, inplace=True)
        torch.testing.assert_close(hidden, expected)
        assert activation(hidden).dtype is torch.float32


def test_script_works_during_a_session_also_where_torch_scripts_for_itself():
    _model, _optimizer = make("O4")
    x = torch.randn(3)
    _, tangent = torch.func.jvp(torch.exp, (x,), (torch.ones(3),))
    torch.testing.assert_close(tangent, x.exp())


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


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_steps_under_a_dynamic_scale_that_nobody_uses_are_told_of_once(level, recwarn):
    model, other = nn.Linear(4, 4), nn.Linear(4, 3)
    optimizers = [torch.optim.Adam(model.parameters()), torch.optim.SGD(other.parameters(), lr=0.1)]
    amp.initialize([model, other], optimizers, opt_level=level, num_losses=2, verbosity=0)
    for _ in range(3):
        plain_backward(model)
        other(X).float().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    assert count_unscaled(recwarn) == 1
    assert "step() of Adam under a dynamic loss scale" in str(recwarn[-1].message)
    assert recwarn[-1].filename == __file__


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_warm_up_step_without_gradients_is_not_told_of(level, recwarn):
    model, optimizer = make(level)
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


@pytest.mark.parametrize("level", ["O3", "O5"])
def test_nan_gradients_at_a_scale_of_one_are_told_of_once_by_name(level, recwarn):
    model, optimizer = make(level)
    for step in range(230):
        model.zero_grad()
        optimizer.zero_grad()
        backward(model, optimizer, float("nan") if step > 20 else 1.0)
        optimizer.step()
    told = [str(one.message) for one in recwarn if "non-finite gradients (weight, bias)" in str(one.message)]
    assert len(told) == 1 and "at a loss scale of 1" in told[0]


def test_good_gradients_at_a_scale_of_one_are_not(recwarn):
    model, optimizer = make("O5")
    for _ in range(205):
        backward(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    assert not [one for one in recwarn if "non-finite" in str(one.message)]


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


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize("is_wrapped_before", [True, False])
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


def test_a_scheduler_is_no_wrapper():
    model = nn.Linear(4, 4)
    scheduler = torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(amp.ArgumentTypeError, match="not ConstantLR"):
        amp.initialize(model, scheduler, opt_level="O1", verbosity=0)


# ---- a frozen 16-bit base --------------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A frozen 16-bit layer with float32 weights beside it, as LoRA adds them."""

    def __init__(self, dtype):
        super().__init__()
        self.base = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6)).to(dtype).requires_grad_(False)
        self.base.register_buffer("offset", torch.ones(6, dtype=dtype))
        self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 6, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x)) + self.base.offset


@pytest.mark.parametrize(("level", "dtype"), [("O1", torch.bfloat16), ("O4", torch.bfloat16)], ids=str)
def test_a_frozen_base_in_16_bits_is_left_alone_and_what_is_beside_it_learns(level, dtype):
    torch.manual_seed(5)
    model = Adapted(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    for _ in range(2):
        backward(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    amp.reset()
    after = model.state_dict()
    assert all(after[name].dtype is before[name].dtype for name in before)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"down.weight", "up.weight"}


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_trained_parameters_in_16_bits_are_refused(level):
    model = Adapted(torch.bfloat16)
    model.up.bfloat16()
    with pytest.raises(amp.ModelError, match=r"in 16 bits already \((up.weight\)|base.0.weight)"):
        amp.initialize(model, opt_level=level, verbosity=0)


@pytest.mark.parametrize("level", ["O1", "O5"])
def test_a_complex_weight_that_is_conjugated_gets_the_gradient_of_the_float32_run(level):
    torch.manual_seed(4)
    model = nn.Linear(3, 1)
    model.phase = nn.Parameter(torch.randn(5, dtype=torch.complex64))
    optimizer = torch.optim.SGD([model.phase], lr=0.5)
    signal = torch.linspace(1, 2, 5) + 1j

    def loss():
        return (signal * model.phase.conj()).real.sum()

    (gradient,) = torch.autograd.grad(loss(), model.phase)
    expected = (model.phase - 0.5 * gradient).detach()
    amp.initialize(model, optimizer, opt_level=level, loss_scale=128.0, verbosity=0)
    with amp.scale_loss(loss(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    torch.testing.assert_close(model.phase.detach(), expected)
