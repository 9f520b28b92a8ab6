"""`trace` finds faults in scripts that do more than a step: several losses, gradients of gradients, functions of the
user, numbers that torch refuses, and losses that are left out.

Guards: insight/tracer, insight/step_faults, insight/recent, insight/written, insight/causes.
"""

import gc
import weakref
from pathlib import Path

import pytest
import torch
from seeded_faults import Layer
from torch import nn
from training import take_step

import amp_patch as amp
from amp_patch import insight
from amp_patch.insight.causes import find_remedy
from amp_patch.insight.recorder import in_block
from amp_patch.insight.remedies import format_entries
from amp_patch.insight.tracer import Tracer

pytestmark = pytest.mark.filterwarnings("ignore:non-finite gradients", "ignore:the loss scale has fallen")


def score(_, x):
    """Return products of an input with itself, of which the upper half is masked by a number beyond float16."""
    scores = x @ x.T
    return scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -1e9).softmax(-1)


class Steep(torch.autograd.Function):
    """The identity, with a gradient that overflows."""

    @staticmethod
    def forward(ctx, x):
        return x > 0, x * 2

    @staticmethod
    def backward(ctx, _, gradient):
        return (gradient * 0 + 300.0) * 300.0  # HERE


def make(*layers, **options):
    torch.manual_seed(0)
    model = nn.Sequential(*layers)
    options = {"opt_level": "O1", "verbosity": 0, **options}
    return amp.initialize(model, torch.optim.SGD(model.parameters(), lr=1e-4), **options)


def trace(step, *, steps=1):
    return insight.trace(step, steps=steps, on_fault="record")


def find_faults(recording):
    return [fault for fault in recording.of(insight.FaultRecord) if not fault.is_search]


def test_a_number_that_torch_refuses_in_float16_is_a_fault_with_a_list(tmp_path):
    x = torch.randn(4, 8)

    def find(**options):
        scores = Layer(score), Layer(score)
        model, optimizer = make(nn.Linear(8, 8), scores[0], nn.Linear(4, 8), scores[1], nn.Linear(4, 1), **options)
        return find_faults(trace(lambda: take_step(model(x).float().mean(), optimizer)))

    (fault,) = find()
    assert (fault.aten, fault.module, fault.cause, fault.in_float32) == ("masked_fill", "1", "precision", 1e9)
    amp.reset()
    path = tmp_path / "list.yaml"
    entries = "\n".join(format_entries(find_remedy(fault, None)))
    assert 'match: "1"' in entries and 'match: "3"' in entries
    path.write_text(f"extends: float16\n{entries}\n")
    assert find(lists=path) == []


def test_a_function_of_the_user_is_told_at_the_line_of_its_backward():
    model, optimizer = make(nn.Linear(8, 8), loss_scale=1.0)
    x = torch.randn(4, 8)
    (fault,) = find_faults(trace(lambda: take_step(Steep.apply(model(x))[1].float().mean(), optimizer)))
    lines = Path(__file__).read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if "# HERE" in text)
    assert (fault.phase, fault.op, fault.node) == ("backward", "aten.mul", "SteepBackward")
    assert fault.site == f"test_trace_scripts.py:{line}"
    assert any("SteepBackward" in label for label, _ in fault.trail)


def test_the_scale_of_one_loss_that_falls_for_ever_is_a_fault_beside_another_that_stays():
    model, optimizer = make(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1), num_losses=2)
    x = torch.randn(16, 8) * 1e-4

    def step():
        optimizer.zero_grad()
        with amp.scale_loss(model(x).float().mean(), optimizer, loss_id=0) as scaled_loss:
            scaled_loss.backward()
        given = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(given).sum(), given, create_graph=True)
        with amp.scale_loss(gradient.float().square().mean(), optimizer, loss_id=1) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()

    fault = find_faults(trace(step, steps=40))[0]
    assert fault.phase == "backward" and fault.module == "1" and fault.regions == ('match: "1"',)
    assert amp.stats().loss_scales[0] > 2.0**10


class EnoughError(BaseException):
    """Leaves a script."""


def test_a_loss_that_is_left_out_again_and_again_does_not_hide_the_fault():
    def leave():
        raise EnoughError

    model, optimizer = make(nn.Linear(8, 8), nn.Linear(8, 1))
    tracer = Tracer(on_end=leave)
    with pytest.raises(EnoughError), in_block(tracer):
        for _ in range(1000):
            hidden = model[0](torch.full((4, 8), 1e3))
            loss = (hidden * hidden).mean()
            if loss.isfinite():
                take_step(loss, optimizer)
    first, *others = tracer.recording.of(insight.FaultRecord)
    assert first.aten == "mul" and 0 < len(others) < 999
    assert insight.describe_further([first, *others]) == []  # the same again is not told


def test_the_error_about_a_fault_holds_no_model():
    objects = dict(zip(("model", "optimizer"), make(nn.Linear(8, 8), nn.Linear(8, 1), loss_scale=1.0), strict=True))

    def step():
        take_step(objects["model"](torch.full((4, 8), 1e5)).float().mean() * 1e5, objects["optimizer"])

    with pytest.raises(amp.NonFiniteError) as raised:
        insight.trace(step)
    model = weakref.ref(objects["model"])
    objects.clear()
    gc.collect()
    assert raised.value.__traceback__ is not None and model() is None


def test_a_forward_pass_alone_has_no_fault_and_no_step():
    model, _ = make(nn.Linear(8, 8))
    assert "no fault, and no step was recorded" in str(insight.trace(lambda: model(torch.ones(2, 8))))


@pytest.mark.parametrize("is_scaled", [False, True])
def test_a_gradient_that_the_forward_pass_takes_has_no_scale_unless_it_was_scaled(is_scaled):
    model, optimizer = make(nn.Linear(4, 4), loss_scale="dynamic")
    with torch.no_grad():
        model[0].weight.fill_(3.0 if is_scaled else 300.0)

    def step():
        x = torch.full((2, 4), 0.01, requires_grad=True)
        y = model(x)
        if is_scaled:
            y = amp.scale(y)
        (gradient,) = torch.autograd.grad(y, x, torch.full_like(y, 100.0), create_graph=True)
        if is_scaled:
            gradient = amp.unscale(gradient)
        take_step((gradient * 1e-6).float().square().mean(), optimizer)

    faults = trace(step, steps=20).of(insight.FaultRecord)
    assert all(fault.is_search for fault in faults) == is_scaled  # else the loss is inf from the first step
    assert faults


def masked_log(_, x):
    """Take a logarithm of zeros, too, and leave it out there."""
    return torch.where(x > 0, x.log(), torch.zeros_like(x))


def test_nan_that_reaches_no_gradient_in_float32_is_no_mathematics():
    model, optimizer = make(nn.Linear(10, 30), nn.ReLU(), Layer(masked_log), nn.Linear(30, 1), lists="autocast-cpu")
    x = torch.randn(64, 10)
    found = trace(lambda: take_step(model(x).float().square().mean(), optimizer), steps=20)
    assert find_faults(found) == [] and found.of(insight.FaultRecord)  # the scale comes down, and it trains
    assert amp.stats().steps > 0


class Inverse(torch.autograd.Function):
    """One over an input, with a gradient in which the input's square is rounded to zero."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.float().reciprocal().to(x.dtype)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return -(gradient * 1e-6) / (x * x)


def test_rounding_in_a_backward_of_the_user_is_no_mathematics():
    model, optimizer = make(nn.Linear(8, 8), loss_scale=1.0)
    with torch.no_grad():
        model[0].weight.fill_(1e-5)
        model[0].bias.zero_()
    x = torch.ones(4, 8)
    (fault,) = find_faults(trace(lambda: take_step(Inverse.apply(model(x)).float().mean(), optimizer)))
    assert (fault.phase, fault.cause, fault.op) == ("backward", "precision", "aten.div")


@pytest.mark.parametrize(("times", "to_be_in_float32"), [(15, "reciprocal"), (30, "cumprod")])
def test_a_long_product_that_is_rounded_to_zero_is_no_mathematics(times, to_be_in_float32):
    model, optimizer = make(nn.Linear(8, 8), lists="autocast-cpu", loss_scale=1.0)
    x = torch.randn(4, times, 8)

    def step():
        take_step((1e-12 * (1 / torch.sigmoid(model(x)).cumprod(1)).float()).mean(), optimizer)

    fault = find_faults(trace(step))[0]
    assert (fault.aten, fault.cause, fault.ops) == ("reciprocal", "precision", (to_be_in_float32,))


def test_nan_of_one_optimizer_is_judged_beside_the_finite_gradients_of_another():
    torch.manual_seed(0)
    with_nan = nn.Sequential(nn.Linear(10, 30), nn.ReLU(), Layer(masked_log), nn.Linear(30, 1))
    models = nn.Sequential(nn.Linear(10, 1)), with_nan
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-9) for model in models]
    amp.initialize(models, optimizers, opt_level="O1", lists="autocast-cpu", loss_scale=2.0**16, verbosity=0)
    x = torch.randn(64, 10)

    def step():
        take_step(models[0](x).float().square().mean() * 1e-6, optimizers[0])
        take_step(models[1](x).float().square().mean(), optimizers[1])

    faults = find_faults(trace(step, steps=3))
    assert [fault.cause for fault in faults if fault.aten == "div"] == ["precision"]
