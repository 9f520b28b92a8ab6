"""Apex's optimizers step as torch's do and as their formulas in float64, also if they are copied, resumed or under amp.

Guards: apex/optimizers/*, apex/updates, apex/amp_C.
"""

import copy
import inspect
import io
import math
import pickle
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from reference import make_batches, make_model
from training import train

import amp_patch as amp
from amp_patch.apex import updates
from amp_patch.apex.optimizers import (
    FusedAdagrad,
    FusedAdam,
    FusedLAMB,
    FusedMixedPrecisionLamb,
    FusedNovoGrad,
    FusedSGD,
)

SHAPES = [(5, 3), (7,), (2, 2, 2), ()]
ALL = [FusedAdagrad, FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD]


FAST = {FusedSGD: {"lr": 0.05, "momentum": 0.9}, FusedNovoGrad: {"lr": 0.5}}


def build(cls, params, **options):
    return cls(params, **{**FAST.get(cls, {"lr": 0.01}), **options})


def make_params(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def make_gradients(steps, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return [
        [
            torch.randn(shape, generator=generator).mul(2.0 ** (index - 1)).to(dtype)
            for index, shape in enumerate(SHAPES)
        ]
        for _ in range(steps)
    ]


def run(optimizer, gradients):
    """Step with given gradients; None in the place of a gradient means that the parameter has none."""
    params = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for step in gradients:
        for parameter, gradient in zip(params, step, strict=True):
            parameter.grad = None if gradient is None else gradient.clone()
        optimizer.step()
    return params


def assert_same(found, expected, rtol=2e-5, atol=2e-6):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.detach().double(), b.detach().double(), rtol=rtol, atol=atol)


def assert_equal(found, expected):
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


# ---- against torch, or the formulas, in float64 ----------------------------------------------------------------------


def torchs(cls):
    """An optimizer of torch as a function of parameters, gradients and options."""

    def train(params, gradients, **options):
        return run(cls([torch.nn.Parameter(p) for p in params], **options), gradients)

    return train


ADAMW, ADAM, SGD = map(torchs, (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD))


NOVOGRAD = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "bias_correction": True, "norm_type": 2}
NOVOGRAD |= {"reg_inside_moment": False, "grad_averaging": True, "init_zero": False}


def novograd_by_hand(p, gradients, lr, **options):
    o = SimpleNamespace(**(NOVOGRAD | options))
    (beta1, beta2), m, n = o.betas, torch.zeros_like(p), None
    for t, g in enumerate(gradients, 1):
        size = g.pow(2).sum().sqrt() if o.norm_type == 2 else g.abs().max()
        if n is None:
            n = torch.zeros_like(size) if o.init_zero else size
        blended = beta2 * n**2 + (1 - beta2) * size**2
        n = blended.sqrt() if o.norm_type == 2 else beta2 * n + (1 - beta2) * size
        c1, c2 = (1 - beta1**t, math.sqrt(1 - beta2**t)) if o.bias_correction else (1.0, 1.0)
        share = 1 - beta1 if o.grad_averaging else 1.0
        if o.reg_inside_moment:
            m = beta1 * m + share * (g / (n / c2 + o.eps) + o.weight_decay * p)
            p = p - lr * m / c1
        else:
            m = beta1 * m + share * g
            p = p - lr * (m / c1 / (n / c2 + o.eps) + o.weight_decay * p)
    return p


LAMB = {"betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01, "bias_correction": True, "adam_w_mode": True}
LAMB |= {"grad_averaging": True, "max_grad_norm": 1.0, "use_nvlamb": False}


def lamb_by_hand(params, gradients, lr=0.01, **options):
    o = SimpleNamespace(**(LAMB | options))
    beta1, beta2 = o.betas
    moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in params]
    for t, step in enumerate(gradients, 1):
        total = math.sqrt(sum(g.pow(2).sum().item() for g in step))
        clip = max(1.0, total / o.max_grad_norm) if o.max_grad_norm else 1.0
        c1, c2 = (1 - beta1**t, 1 - beta2**t) if o.bias_correction else (1.0, 1.0)
        for index, (p, g, (m, v)) in enumerate(zip(params, step, moments, strict=True)):
            g = g / clip + (0.0 if o.adam_w_mode else o.weight_decay * p)
            m = beta1 * m + (1 - beta1 if o.grad_averaging else 1.0) * g
            v = beta2 * v + (1 - beta2) * g * g
            u = m / c1 / ((v / c2).sqrt() + o.eps) + (o.weight_decay * p if o.adam_w_mode else 0.0)
            ratio = 1.0
            if (o.weight_decay or o.use_nvlamb) and p.norm() > 0 and u.norm() > 0:
                ratio = p.norm() / u.norm()
            params[index], moments[index] = p - lr * ratio * u, (m, v)
    return params


def adagrad_by_hand(p, gradients, lr=0.01, eps=1e-10, weight_decay=0.0, adagrad_w_mode=False):
    h = torch.zeros_like(p)
    for g in gradients:
        g = g + (0.0 if adagrad_w_mode else weight_decay * p)
        h = h + g * g
        p = p - lr * (g / (h.sqrt() + eps) + (weight_decay * p if adagrad_w_mode else 0.0))
    return p


def each(by_hand):
    """A formula for one tensor, as one for many."""
    return lambda params, gradients, **options: [
        by_hand(p, list(g), **options) for p, g in zip(params, zip(*gradients, strict=True), strict=True)
    ]


CASES = [
    (FusedAdam, ADAMW, {"weight_decay": 0.0}),
    (FusedAdam, ADAMW, {"weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-3}),
    (FusedAdam, ADAM, {"weight_decay": 0.1}),
    (FusedSGD, SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    (FusedSGD, SGD, {"weight_decay": 0.1}),
    (FusedSGD, SGD, {"momentum": 0.9, "dampening": 0.3}),
    (FusedSGD, SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (FusedNovoGrad, each(novograd_by_hand), {}),
    (FusedNovoGrad, each(novograd_by_hand), {"weight_decay": 0.1, "reg_inside_moment": True, "init_zero": True}),
    (FusedNovoGrad, each(novograd_by_hand), {"weight_decay": 0.1, "norm_type": 0, "init_zero": True}),
    (FusedNovoGrad, each(novograd_by_hand), {"norm_type": 0, "reg_inside_moment": True, "grad_averaging": False}),
    (FusedNovoGrad, each(novograd_by_hand), {"bias_correction": False, "betas": (0.95, 0.98), "eps": 0.1}),
    (FusedAdagrad, each(adagrad_by_hand), {"weight_decay": 0.1}),
    (FusedAdagrad, each(adagrad_by_hand), {"weight_decay": 0.1, "adagrad_w_mode": True, "eps": 1e-3}),
    (FusedLAMB, lamb_by_hand, {}),
    (FusedLAMB, lamb_by_hand, {"adam_w_mode": False, "weight_decay": 0.1}),
    (FusedLAMB, lamb_by_hand, {"weight_decay": 0.0}),
    (FusedLAMB, lamb_by_hand, {"weight_decay": 0.0, "use_nvlamb": True}),
    (FusedLAMB, lamb_by_hand, {"max_grad_norm": 0.0}),
    (FusedLAMB, lamb_by_hand, {"max_grad_norm": 1e3, "bias_correction": False}),
    (FusedLAMB, lamb_by_hand, {"grad_averaging": False, "betas": (0.5, 0.6), "eps": 0.1}),
]


FIRST = list({case[0]: case for case in reversed(CASES)}.values())


@pytest.mark.parametrize(
    ("cls", "by_hand", "options", "dtype"),
    [
        *((*case, torch.float64) for case in CASES),
        *((*case, dtype) for case in FIRST for dtype in (torch.float32, torch.bfloat16)),
    ],
    ids=lambda value: getattr(value, "__name__", None) or str(value),
)
def test_steps_follow_the_formula(cls, by_hand, options, dtype):
    """From any dtype: float32 arithmetic, rounded once a step (16 bits: one step); float64 stays float64."""
    steps = 1 if dtype is torch.bfloat16 else 20
    gradients = make_gradients(steps, dtype)
    if cls is FusedSGD and steps > 1:
        gradients[0][1] = None  # comes later, with its own first momentum
    start = [p.detach().double() for p in make_params(dtype)]
    wide = [[g if g is None else g.double() for g in step] for step in gradients]
    expected = by_hand(start, wide, lr=0.01, **options)
    mode = {"adam_w_mode": False} if by_hand is ADAM else {}
    params = make_params(dtype)
    found = run(cls([{"params": params[:2]}, {"params": params[2:]}], lr=0.01, **options, **mode), gradients)
    assert all(p.dtype is dtype for p in found)
    if dtype is torch.bfloat16:
        assert_equal(found, [value.float().bfloat16() for value in expected])
    else:
        assert_same(found, expected, **({"rtol": 1e-10, "atol": 1e-12} if dtype is torch.float64 else {}))
    assert_equal([p.grad for p in found], gradients[-1])  # only read


class Subclass(torch.Tensor):
    pass


def channels_last(t):
    return t.reshape(3, 4, 2, 2).contiguous(memory_format=torch.channels_last)


LAYOUTS = {
    "transposed gradient": lambda p, g: (p, g.t().contiguous().t()),
    "transposed parameter": lambda p, g: (p.t().contiguous().t(), g),
    "transposed both": lambda p, g: (p.t().contiguous().t(), g.t().contiguous().t()),
    "every other column": lambda p, g: (p, g.repeat_interleave(2, dim=1)[:, ::2]),
    "expanded gradient": lambda p, g: (p, g[:1].expand_as(g)),
    "negative view": lambda p, g: (p, torch._neg_view(-g)),
    "subclass": lambda p, g: (p.as_subclass(Subclass), g),
    "channels last": lambda p, g: (channels_last(p), channels_last(g)),
    "channels last gradient": lambda p, g: (p.reshape(3, 4, 2, 2), channels_last(g)),
}


@pytest.mark.parametrize(
    ("cls", "layout"),
    [
        *((FusedAdam, layout) for layout in LAYOUTS),
        (FusedSGD, "transposed both"),
        (FusedSGD, "channels last gradient"),
        (FusedLAMB, "transposed gradient"),
        (FusedNovoGrad, "expanded gradient"),
    ],
)
def test_how_tensors_lie_in_memory_changes_no_number(cls, layout):
    """The kernels behind `fused=True` go through memory as it lies: a transposed gradient would be read crosswise."""
    generator = torch.Generator().manual_seed(0)
    start, gradient = torch.randn(12, 4, generator=generator), torch.randn(12, 4, generator=generator)
    lying, its_gradient = LAYOUTS[layout](start.clone(), gradient.clone())
    found = torch.nn.Parameter(lying)
    expected = torch.nn.Parameter(lying.as_subclass(torch.Tensor).double().contiguous())
    for parameter, dtype in ((found, torch.float32), (expected, torch.float64)):
        optimizer = build(cls, [parameter], weight_decay=0.1)
        for _ in range(3):
            parameter.grad = its_gradient if dtype is torch.float32 else its_gradient.double().contiguous()
            optimizer.step()
    assert_same([found.as_subclass(torch.Tensor)], [expected])


@pytest.mark.parametrize("cls", [FusedAdam, FusedSGD])
def test_without_a_kernel_for_the_device_the_formula_steps_and_skips(cls, monkeypatch):
    """Training with `found_inf`, as amp sets it, by the kernels and by the formulas."""

    def no_kernel(*args, **options):
        raise NotImplementedError("Could not run 'aten::_fused_' with arguments from this backend")

    def train():
        optimizer = build(cls, make_params(), weight_decay=0.1)
        for number, gradients in enumerate(make_gradients(4)):
            optimizer.found_inf = torch.tensor(float(number == 2)) if number else None
            run(optimizer, [gradients])
        return [p.detach() for group in optimizer.param_groups for p in group["params"]], optimizer.state_dict()

    by_kernel, state = train()
    for name in ("fused_adam_", "fused_adamw_", "fused_sgd_"):
        monkeypatch.setattr(updates, name, no_kernel)
    by_formula, its_state = train()
    assert_same(by_kernel, by_formula)
    steps = [group.get("step") for each in (state, its_state) for group in each["param_groups"]]
    assert steps == ([3, 3] if cls is FusedAdam else [None, None])
    optimizer = build(cls, make_params(), weight_decay=0.1)
    run(optimizer, [g for n, g in enumerate(make_gradients(4)) if n != 2])
    assert_same(by_kernel, [p for group in optimizer.param_groups for p in group["params"]])


def test_a_step_that_is_skipped_gives_no_first_momentum():
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = FusedSGD([weight], lr=1.0, momentum=0.9, dampening=0.5)
    for found_inf in (1.0, 0.0):
        weight.grad, optimizer.found_inf = torch.ones(2), torch.tensor(found_inf)
        optimizer.step()
    assert weight.tolist() == [-1.0, -1.0]  # the whole first gradient, and not half of it


def test_steps_that_were_counted_on_the_device_go_on_and_are_saved_as_a_number():
    found, expected = (FusedAdam(make_params(), lr=0.01) for _ in range(2))
    run(found, make_gradients(2))
    found.param_groups[0]["step"] = torch.tensor(2.0)
    saved = found.state_dict()["param_groups"][0]["step"]
    assert (saved, type(saved)) == (2, int)
    assert_equal(run(found, make_gradients(5)[2:]), run(expected, make_gradients(5)))


@pytest.mark.parametrize("cls", [FusedAdam, FusedLAMB])
def test_weights_that_a_step_edits_have_a_new_version(cls):
    """By which autograd refuses a backward through edited weights, and amp knows its copies of weights as outdated."""
    parameter = torch.nn.Parameter(torch.randn(4, 4))
    output = (torch.randn(2, 4, requires_grad=True) @ parameter).sum()
    run(build(cls, [parameter]), [[torch.ones(4, 4)]])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.backward()


@pytest.mark.parametrize("cls", ALL)
def test_parameters_of_several_dtypes_and_without_gradients_in_one_group(cls):
    """Each steps as it does alone."""
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
    gradients = [[g.to(dtype) for g, dtype in zip(step, dtypes, strict=True)] for step in make_gradients(3)]
    for step in gradients:
        step[2] = None

    def make():
        return [torch.nn.Parameter(p.detach().to(dtype)) for p, dtype in zip(make_params(), dtypes, strict=True)]

    options = {"max_grad_norm": 0.0} if cls is FusedLAMB else {}
    together = run(build(cls, make(), **options), gradients)
    for index, parameter in enumerate(make()):
        run(build(cls, [parameter], **options), [[step[index]] for step in gradients])
        assert torch.equal(together[index], parameter)


@pytest.mark.parametrize(("cls", "options"), [*((cls, {}) for cls in ALL), (FusedNovoGrad, {"norm_type": 0})], ids=str)
def test_empty_and_zero_tensors_do_no_harm(cls, options):
    params = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((0,), (3,))]
    optimizer = build(cls, params, weight_decay=0.1, **options)
    run(optimizer, [[torch.zeros(0), torch.ones(3)]] * 2)
    assert params[1].isfinite().all() and params[1].count_nonzero() == 3
    run(optimizer, [[None, None]])


# ---- as optimizers ---------------------------------------------------------------------------------------------------

OPTIONS = {
    FusedAdagrad: {"weight_decay": 0.1},
    FusedAdam: {"adam_w_mode": False, "weight_decay": 0.1},
    FusedLAMB: {"use_nvlamb": True, "adam_w_mode": False},
    FusedNovoGrad: {"reg_inside_moment": True, "weight_decay": 0.1},
    FusedSGD: {"weight_decay": 0.1},
}
KEYS = {
    FusedAdagrad: ({"sum"}, set()),
    FusedAdam: ({"exp_avg", "exp_avg_sq"}, {"step"}),
    FusedLAMB: ({"exp_avg", "exp_avg_sq"}, {"step"}),
    FusedNovoGrad: ({"exp_avg"}, {"step", "exp_avg_sq"}),
    FusedSGD: ({"momentum_buffer"}, set()),
}


@pytest.mark.parametrize("cls", ALL)
def test_state_dicts_have_the_keys_of_apex(cls):
    optimizer, (per_parameter, per_group) = build(cls, make_params()), KEYS[cls]
    run(optimizer, make_gradients(3))
    saved = optimizer.state_dict()
    assert [set(entry) for entry in saved["state"].values()] == [per_parameter] * len(SHAPES)
    group = saved["param_groups"][0]
    assert per_group <= set(group) and group.get("step", 3) == 3
    if cls is FusedNovoGrad:
        assert [tensor.shape for tensor in group["exp_avg_sq"]] == [(0,), (len(SHAPES),)]


@pytest.mark.parametrize(
    ("cls", "way", "dtype"),
    [
        *((cls, "file", torch.bfloat16) for cls in ALL),
        (FusedNovoGrad, "deepcopy", torch.float32),
        (FusedAdam, "pickle", torch.bfloat16),
    ],
)
def test_training_goes_on_bitwise_from_a_copy(cls, way, dtype):
    gradients = make_gradients(8, dtype)
    for step in gradients[:4]:
        step[3] = None  # steps for the first time after the copy
    for step in gradients[2:6]:
        step[0] = None  # pauses over the copy
    uninterrupted = build(cls, make_params(dtype), **OPTIONS[cls])
    expected = run(uninterrupted, gradients)
    optimizer = build(cls, make_params(dtype), **OPTIONS[cls])
    params = run(optimizer, gradients[:4])
    if way == "file":
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        before = repr(saved)
        twin = build(cls, [torch.nn.Parameter(p.detach().clone()) for p in params], **OPTIONS[cls])
        twin.load_state_dict(saved)
        assert repr(saved) == before  # loading changes nothing in what is loaded
    else:
        twin = pickle.loads(pickle.dumps(optimizer)) if way == "pickle" else copy.deepcopy(optimizer)
    assert_equal(run(optimizer, gradients[4:]), expected)  # the first goes on, and so must not disturb its twin
    found = run(twin, gradients[4:])
    assert_equal(found, expected)
    for own, other in zip(found, expected, strict=True):  # state, whose last bits 16-bit parameters hide
        assert_equal(twin.state[own].values(), uninterrupted.state[other].values())


@pytest.mark.parametrize(
    ("option", "arguments", "becomes_none"),
    [(True, [], True), (False, [], False), (False, [True], True), (True, [False], False)],
)
def test_zero_grad_takes_the_argument_of_today_and_the_option_of_apex(option, arguments, becomes_none):
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    FusedAdam([parameter], set_grad_none=option).zero_grad(*arguments)
    assert parameter.grad is None if becomes_none else parameter.grad.count_nonzero() == 0


@pytest.mark.parametrize("cls", ALL)
def test_closures_run_with_gradients_and_schedulers_are_obeyed(cls):
    params = [torch.nn.Parameter(torch.ones(3))]
    optimizer = build(cls, params)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.0)

    def closure():
        optimizer.zero_grad()
        loss = params[0].pow(2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3.0
    moved = params[0].detach().clone()
    assert (moved < 1).all()
    scheduler.step()
    optimizer.step(closure)
    assert torch.equal(params[0], moved)


def test_sparse_and_complex_parameters_are_refused_before_anything_moves():
    table = torch.nn.Parameter(torch.ones(4, 2))
    table.grad = torch.ones(4, 2).to_sparse(1)
    with pytest.raises(RuntimeError, match="FusedAdam takes no sparse gradients.*SparseAdam"):
        build(FusedAdam, [table]).step()
    wave = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    wave.grad = torch.ones_like(wave)
    with pytest.raises(RuntimeError, match="real floating parameters, not torch.complex64"):
        build(FusedAdam, [wave]).step()
    assert torch.equal(table.detach(), torch.ones(4, 2))


BAD = {
    "amsgrad of Adam": (FusedAdam, {"amsgrad": True}, "no AMSGrad"),
    "amsgrad of LAMB": (FusedLAMB, {"amsgrad": True}, "no AMSGrad"),
    "late decay": (FusedSGD, {"wd_after_momentum": True}, "not offered"),
    "betas in the place of bias_correction": (FusedAdam, {"bias_correction": (0.9, 0.999)}, "third argument"),
    "betas": (FusedAdam, {"betas": (0.9, 1.0)}, "below 1"),
    "momentum": (FusedSGD, {"momentum": -1.0}, "momentum=-1.0 must not be negative"),
    "Nesterov with dampening": (FusedSGD, {"momentum": 0.9, "dampening": 0.1, "nesterov": True}, "Nesterov"),
    "norm type": (FusedNovoGrad, {"norm_type": 1}, "norm_type=1 must be 2"),
}


@pytest.mark.parametrize(("cls", "options", "message"), BAD.values(), ids=BAD)
def test_arguments_that_cannot_be_honoured_are_refused(cls, options, message):
    with pytest.raises(RuntimeError, match=message) as raised:
        cls(make_params(), **{"lr": 0.1, **options})
    assert isinstance(raised.value, ValueError)


def test_what_the_calls_of_old_and_of_new_differ_in_is_refused():
    for name in ("grads", "grad_scaler"):
        with pytest.raises(RuntimeError, match="FusedAdam.step takes no"):
            FusedAdam(make_params()).step(**{name: 1.0})


ORDER = {
    FusedAdagrad: "lr eps weight_decay set_grad_none adagrad_w_mode",
    FusedAdam: "lr bias_correction betas eps adam_w_mode weight_decay amsgrad set_grad_none",
    FusedLAMB: "lr bias_correction betas eps weight_decay amsgrad adam_w_mode grad_averaging set_grad_none"
    " max_grad_norm use_nvlamb",
    FusedNovoGrad: "lr bias_correction betas eps weight_decay amsgrad reg_inside_moment grad_averaging norm_type"
    " init_zero set_grad_none",
    FusedSGD: "lr momentum dampening weight_decay nesterov wd_after_momentum materialize_master_grads set_grad_none",
}


@pytest.mark.parametrize("cls", ALL)
def test_positional_arguments_are_in_the_order_of_apex(cls):
    assert list(inspect.signature(cls).parameters)[1 : 1 + len(ORDER[cls].split())] == ORDER[cls].split()


# ---- files of other optimizers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cls", "mode", "torch_cls", "options"),
    [
        (FusedAdam, {}, torch.optim.AdamW, {"weight_decay": 0.1, "eps": 1e-3}),
        (FusedAdam, {"adam_w_mode": False}, torch.optim.Adam, {"weight_decay": 0.1}),
        (FusedSGD, {}, torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    ],
)
def test_a_state_dict_of_torch_can_be_resumed(cls, mode, torch_cls, options):
    gradients = make_gradients(20)
    original = torch_cls(make_params(), lr=0.02, **options)
    params = run(original, gradients[:10])
    twin = cls([torch.nn.Parameter(p.detach().clone()) for p in params], lr=123.0, **mode)
    twin.load_state_dict(copy.deepcopy(original.state_dict()))
    assert_same(run(twin, gradients[10:]), run(original, gradients[10:]))
    assert twin.param_groups[0]["lr"] == 0.02 and twin.param_groups[0].get("step", 20) == 20


def test_a_novograd_file_of_apex_without_sixteen_bit_parameters_is_read():
    optimizer = FusedNovoGrad(make_params())
    run(optimizer, make_gradients(2))
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["exp_avg_sq"][0] = None  # Apex's beginning, which it never replaces then
    twin = FusedNovoGrad([torch.nn.Parameter(p.detach().clone()) for p in optimizer.param_groups[0]["params"]])
    twin.load_state_dict(saved)
    gradients = make_gradients(4)[2:]
    assert_equal(run(twin, gradients), run(optimizer, gradients))


def test_steps_counted_in_python_are_refused_in_a_cuda_graph(monkeypatch):
    optimizer = FusedAdam(make_params(), capturable=True)
    run(optimizer, make_gradients(1))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(amp.OptimizerError, match="CUDA graph"):
        optimizer.step()
    assert optimizer.param_groups[0]["step"] == 1


def test_a_state_dict_that_cannot_be_honoured_is_refused():
    def saved(cls, **options):
        optimizer = cls(make_params(), lr=0.1, **options)
        run(optimizer, make_gradients(1))
        return optimizer.state_dict()

    with pytest.raises(amp.CheckpointError, match="amsgrad=True"):
        FusedAdam(make_params()).load_state_dict(saved(torch.optim.Adam, amsgrad=True))
    with pytest.raises(amp.CheckpointError, match="maximize=True"):
        FusedSGD(make_params(), lr=0.1).load_state_dict(saved(torch.optim.SGD, maximize=True))
    if "decoupled_weight_decay" in torch.optim.AdamW(make_params()).defaults:  # torch 2.6 saves nothing of it
        with pytest.raises(amp.CheckpointError, match="adam_w_mode=True"):
            FusedAdam(make_params(), adam_w_mode=False).load_state_dict(saved(torch.optim.AdamW))
    uneven = saved(torch.optim.Adam)
    uneven["state"][0]["step"] += 1
    with pytest.raises(amp.CheckpointError, match=r"at different steps \(1, 2\)"):
        FusedAdam(make_params()).load_state_dict(uneven)
    with pytest.raises(ValueError, match="group"):
        FusedAdam(make_params()[:2]).load_state_dict(saved(FusedAdam))
    with pytest.raises(amp.CheckpointError, match="0 16-bit and 4 other parameters"):
        FusedNovoGrad(make_params(torch.float16)).load_state_dict(saved(FusedNovoGrad))


# ---- under amp -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cls", "level"), [(FusedAdam, "O3"), (FusedLAMB, "O2")])
def test_state_from_before_initialize_is_carried_on_in_float32(cls, level):
    model = make_model()
    optimizer = build(cls, model.parameters())
    batches = make_batches(4)
    for images, targets in batches[:2]:
        F.cross_entropy(model(images), targets).backward()
        optimizer.step()
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    train(model, optimizer, batches[2:])
    for state in optimizer.state.values():
        assert all(value.dtype is torch.float32 for value in state.values())
    assert optimizer.param_groups[0]["step"] == 4
    amp.reset()
    assert all(value.dtype is torch.float32 for state in optimizer.state.values() for value in state.values())
    optimizer.step()


OWN_MASTERS = {
    "adam": (FusedAdam, FusedAdam, {"master_weights": True}),
    "lamb": (FusedMixedPrecisionLamb, FusedLAMB, {"reduced_precision_dtype": torch.bfloat16}),
}


@pytest.mark.parametrize(("cls", "plain", "options"), OWN_MASTERS.values(), ids=OWN_MASTERS)
def test_an_optimizer_with_masters_of_its_own_steps_as_on_float32(cls, plain, options):
    """16-bit parameters are float32 ones, rounded; also after a resume, and after a parameter was written."""
    low, gradients = make_params(torch.bfloat16), make_gradients(9, torch.bfloat16)
    full = [torch.nn.Parameter(p.detach().float()) for p in low]
    wide = [[g.float() for g in step] for step in gradients]
    common = {"lr": 1e-3} if cls is FusedAdam else {"lr": 1e-3, "max_grad_norm": 0.0}
    ours, theirs = build(cls, low, **common, **options), build(plain, full, **common)
    for part in range(3):
        run(ours, gradients[3 * part : 3 * part + 3])
        run(theirs, wide[3 * part : 3 * part + 3])
        assert all(torch.equal(a, b.bfloat16()) for a, b in zip(low, full, strict=True))
        saved = ours.state_dict()
        ours = build(cls, low, **common, **options)
        ours.load_state_dict(saved)
        with torch.no_grad():
            for params in (low, full):
                params[0][0, 0] = 2.0 + part


def test_gradscaler_drives_the_lamb_of_16_bit_parameters():
    low, gradients = make_params(torch.float16), make_gradients(3)
    full = [torch.nn.Parameter(p.detach().float()) for p in low]
    ours = build(FusedMixedPrecisionLamb, low, reduced_precision_dtype=torch.float16)
    run(build(FusedLAMB, full), [[g.half().float() for g in step] for step in gradients])
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for number, step in enumerate([gradients[0], gradients[0], *gradients[1:]]):
        scaler.scale(torch.zeros(()))
        factor = math.inf if number == 1 else scaler.get_scale()
        for parameter, gradient in zip(low, step, strict=True):
            parameter.grad = gradient.half() * factor
        scaler.step(ours)
        scaler.update()
    assert scaler.get_scale() == 4.0
    assert_same(low, [p.half() for p in full], rtol=1e-3, atol=1e-3)
