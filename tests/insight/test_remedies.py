"""The advice against a fault helps: a list where lists act, an edit elsewhere, and nothing under which the loss stays
the same.

Guards: insight/remedies, insight/placing, insight/advice, insight/agreement, insight/causes.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from seeded_faults import Layer, draw
from torch import nn

from amp_patch import insight, native
from amp_patch.insight import agreement
from amp_patch.insight.causes import find_remedy
from amp_patch.insight.fault_record import FaultRecord
from amp_patch.insight.records import CurveRecord
from amp_patch.insight.remedies import format_entries

pytestmark = pytest.mark.filterwarnings("ignore:the step that has the fault ended")


def make_net(function):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), Layer(lambda _, x: function(x)), nn.Linear(16, 1))


def make_step(net, compute_loss, *, scale=2.0**16, dtype=torch.float16, is_dynamic=True):
    """A script with torch.autocast; `compute_loss` is given the network, and called inside of the region."""
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
    factor = 0.5 if is_dynamic else 1.0 - 1e-9
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, backoff_factor=factor)

    def step():
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype):
            loss = compute_loss(net)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def trace(step, steps=3):
    return insight.trace(step, steps=steps, on_fault="record")


def find_first(recording):
    return next(fault for fault in recording.of(FaultRecord) if not fault.is_search)


def regress(net, x):
    return net(x).float().square().mean()


# ---- where lists act -------------------------------------------------------------------------------------------------


def square_in_an_island(x):
    with torch.autocast("cpu", enabled=False):
        return x / (x * x).mean(-1, keepdim=True).sqrt()


def square(x):
    return x / (x * x).mean(-1, keepdim=True).sqrt()


def regress_outside(net, x):
    y = net(x)
    with torch.autocast("cpu", enabled=False):
        return (y.float() / (y * y).sum().float()).square().mean()


@pytest.mark.parametrize(
    ("function", "compute_loss", "is_reached"),
    [
        (square, regress, True),
        (square_in_an_island, regress, False),
        (torch.relu, regress_outside, False),
    ],
    ids=["in the region", "island", "loss outside"],
)
def test_a_list_is_offered_only_where_lists_act(function, compute_loss, is_reached):
    x = draw(64, 16, factor=3e3)
    recording = trace(make_step(make_net(function), lambda net: compute_loss(net, x)))
    fault = find_first(recording)
    remedy = find_remedy(fault, recording.run)
    assert fault.aten == "mul" and remedy.has_list == is_reached and bool(remedy.sites) != is_reached
    assert ("fix.yaml" in insight.format_fault(fault, recording.run)) == is_reached


def log_of_softmax(net, x):
    return -F.softmax(net[0](x), -1)[:, 0].log().mean()


def test_a_list_names_what_the_script_calls_and_no_kernel_of_torch():
    x = draw(64, 16, factor=2e1)
    recording = trace(make_step(make_net(torch.relu), lambda net: log_of_softmax(net, x)))
    remedy = find_remedy(find_first(recording), recording.run)
    assert "softmax" in remedy.ops and not any(op.startswith("_") for op in remedy.ops)


CASTS = {
    "half": lambda net, x: -F.softmax(net[0](x), -1).half().log().mean(),
    "to": lambda net, x: -F.softmax(net[0](x), -1)[:, 0].to(torch.float16).log().mean(),
}


def cast_input(net, x):
    return -F.softmax(net[0](x.half()), -1).log().mean()


@pytest.mark.parametrize(
    ("compute", "has_edit"),
    [(CASTS["half"], True), (CASTS["to"], True), (cast_input, False)],
    ids=["half", "to", "of an input"],
)
def test_a_list_needs_an_edit_where_the_line_casts_what_the_op_returns(compute, has_edit):
    x = draw(64, 16, factor=2e1)
    recording = trace(make_step(make_net(torch.relu), lambda net: compute(net, x)))
    fault = find_first(recording)
    remedy = find_remedy(fault, recording.run)
    assert "softmax" in remedy.ops and bool(remedy.sites) == has_edit
    text = insight.format_fault(fault, recording.run)
    assert text.count("no cast to 16 bits") == 2 * has_edit and ("together with an edit" in text) == has_edit


MASK = torch.full((8, 8), -1e9)


def mask_like_scores(x):
    scores = x @ x.T
    return (scores + MASK.to(scores.dtype)).softmax(-1) @ x


def mask_in_half(x):
    scores = x @ x.T
    return (scores + MASK.half()).softmax(-1) @ x


@pytest.mark.parametrize(
    ("function", "has_list"), [(mask_like_scores, True), (mask_in_half, False)], ids=["dtype of a tensor", "half"]
)
def test_a_cast_goes_with_its_module_unless_it_names_the_dtype(function, has_list, tmp_path):
    x = draw(8, 16)

    def find():
        return trace(make_step(make_net(function), lambda net: regress(net, x)))

    recording = find()
    remedy = find_remedy(find_first(recording), recording.run)
    assert (remedy.has_list, bool(remedy.sites)) == (has_list, not has_list)
    if has_list:
        (tmp_path / "fix.yaml").write_text("\n".join(format_entries(remedy)))
        with native.install(lists=tmp_path / "fix.yaml"):
            assert all(fault.is_search for fault in find().of(FaultRecord))


# ---- what came in ----------------------------------------------------------------------------------------------------

MEETS = {
    "layer norm": lambda net, x: regress(net, F.layer_norm(x, (16,))),
    "batch norm": lambda net, x: regress(net, F.batch_norm(x, None, None, training=True)),
    "scaled, then norm": lambda net, x: regress(net, F.layer_norm(x * 0.5, (16,))),
    "mean": lambda net, x: regress(net, x - x.mean(-1, keepdim=True)),
    "linear": regress,
    "target": lambda net, x: F.smooth_l1_loss(net(torch.ones(8, 16)).float(), x[:, :1]),
    "log target": lambda net, x: F.kl_div(net[0](torch.ones(8, 16)).log_softmax(-1), x, log_target=True),
}


@pytest.mark.parametrize("meets", MEETS.values(), ids=MEETS)
@pytest.mark.parametrize("value", [-math.inf, math.inf], ids=["-inf", "inf"])
def test_what_is_infinite_in_the_data_came_in(meets, value):
    x = draw(8, 16)
    x[2, 0] = value
    fault = find_first(trace(make_step(make_net(torch.tanh), lambda net: meets(net, x)), steps=1))
    assert (fault.cause, fault.parameter, fault.phase) == ("came in", "", "forward")


# ---- loss scales -----------------------------------------------------------------------------------------------------


def test_a_sum_that_no_scale_above_one_fits_is_told_with_the_scale_that_does():
    x = draw(512, 16, factor=200.0)

    def run(scale):
        step = make_step(make_net(torch.relu), lambda net: (net(x) - x).float().square().sum(), scale=scale)
        return trace(step, steps=1)

    recording = run(2.0**16)
    fault = find_first(recording)
    remedy = find_remedy(fault, recording.run)
    assert remedy.kind == "sum" and fault.summed == 512 * 16 and remedy.scale < 1
    assert f"init_scale=2**{math.log2(remedy.scale):.0f}" in insight.format_fault(fault, recording.run)
    assert run(remedy.scale).of(FaultRecord) == []


def compute_aspects(net, x):
    sides = net[0](x).exp()
    return (torch.atan(sides[:, 0] / (sides[:, 1] + 1e-9))).mean()  # HERE


def test_a_division_that_no_scale_mends_comes_before_the_cast_of_the_scaled_loss():
    net = make_net(torch.relu)
    with torch.no_grad():
        net[0].weight.mul_(0.01)
        net[0].bias.fill_(-17.0)
    x = draw(8, 16)
    fault = find_first(trace(make_step(net, lambda net: compute_aspects(net, x))))
    assert (fault.phase, fault.aten, fault.node, fault.loss_scale) == ("backward", "div", "DivBackward0", 1.0)


def test_no_list_is_offered_where_a_gradient_is_beyond_float32_too():
    def compute_loss(net):
        y = net(draw(8, 16, factor=3e3)).float()
        return (y - y.detach()).square().sum(-1).sqrt().mean() + y.square().mean()

    recording = trace(make_step(make_net(square), compute_loss))
    fault = find_first(recording)
    assert (fault.aten, fault.cause) == ("mul", "precision")
    assert not find_remedy(fault, recording.run).has_list and "sqrt" in fault.beyond


def test_the_least_number_of_float32_in_bfloat16_is_no_divergence():
    def mask(x):
        least = torch.full((8, 8), torch.finfo(torch.float32).min)
        return (x @ x.T + least.to(x.dtype)).softmax(-1) @ x

    step = make_step(make_net(mask), lambda net: regress(net, draw(8, 16)), dtype=torch.bfloat16, scale=1.0)
    assert find_first(trace(step)).cause == "precision"


def test_weights_in_half_are_the_remedy_for_an_eps_that_is_zero_and_no_larger_eps():
    net = make_net(torch.relu).half()
    optimizer = torch.optim.Adam(net.parameters())

    def step():
        optimizer.zero_grad()
        regress(net, draw(8, 16).half()).backward()
        optimizer.step()

    text = str(trace(step))
    assert "float32 weights" in text and "torch.autocast" in text and "eps=1e-4" not in text


def test_a_batch_with_huge_values_is_no_divergence():
    torch.manual_seed(0)
    net = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    batches = [torch.randn(4, 8) for _ in range(5)]
    batches[3][1] = 1e30

    def step():
        optimizer.zero_grad()
        net(batches.pop(0)).square().mean().backward()
        optimizer.step()

    fault = find_first(trace(step, steps=5))
    assert (fault.step, fault.cause) == (3, "mathematics")


# ---- whether a repaired training trains ------------------------------------------------------------------------------

PLAIN = (2.0, 1.8, 1.6, 1.4, 1.2, 1.0)


@pytest.mark.parametrize(
    ("losses", "skipped", "agrees"),
    [
        (PLAIN, (), True),
        ((2.0, 2.0, 1.8, 1.6, 1.4, 1.2), (0,), True),
        ((2.0,) * 6, (), False),
        ((2.0,) * 6, tuple(range(6)), False),
        ((3.0, 1.8, 1.6, 1.4, 1.2, 1.0), (), False),
        ((2.0, 1.9, 1.9, 1.9, 1.85, 1.8), (), False),
        ((2.0, 1.8, math.nan, 1.4, 1.2, 1.0), (), False),
    ],
    ids=["as float32", "one step behind", "still", "all skipped", "another first loss", "slow", "nan"],
)
def test_a_repaired_training_moves_and_agrees_with_float32(losses, skipped, agrees):
    repaired, plain = (
        CurveRecord("", 0, values, (), left_out, 0.0) for values, left_out in ((losses, skipped), (PLAIN, ()))
    )
    assert (agreement.find_disagreement(repaired, plain) == "") == agrees
