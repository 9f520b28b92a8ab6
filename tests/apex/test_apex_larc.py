"""LARC follows its formula, around any optimizer, under schedulers, and under amp.

Guards: apex/parallel/LARC.
"""

import copy
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from reference import make_batches, make_model
from torch import nn
from training import backward, train

import amp_patch as amp
from amp_patch.apex.parallel.LARC import LARC


def make_params(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    params = [
        torch.randn(shape, generator=generator).mul(2.0**index)
        for index, shape in enumerate([(3, 2), (4,), (), (2,), (2,)])
    ]
    params[3].zero_()
    return [nn.Parameter(p.to(dtype)) for p in params]


def set_gradients(params, seed):
    generator = torch.Generator().manual_seed(seed)
    for index, p in enumerate(params):
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype) if index != 4 else torch.zeros_like(p)


def larc_by_hand(w, g, lr, decay, trust, clip, eps):
    if w.norm() == 0 or g.norm() == 0:
        return g
    local = trust * w.norm() / (g.norm() + decay * w.norm() + eps)
    if clip:
        local = min(local / lr, 1.0)
    return (g + decay * w) * local


@pytest.mark.parametrize(
    ("clip", "lr", "decay", "dtype"),
    [
        (True, 0.5, 0.0, torch.float32),
        (True, 0.001, 0.1, torch.float64),
        (False, 0.5, 0.1, torch.float64),
        (False, 0.5, 0.1, torch.float16),
    ],
)
def test_gradients_are_adapted_as_the_formula_says(clip, lr, decay, dtype):
    params = make_params(dtype)
    set_gradients(params, 1)
    start = [(p.detach().double().clone(), p.grad.double().clone()) for p in params]
    optimizer = LARC(torch.optim.SGD(params, lr=lr, weight_decay=decay), trust_coefficient=0.01, clip=clip, eps=1e-3)
    optimizer.step()
    assert optimizer.param_groups[0]["weight_decay"] == decay
    tolerance = {torch.float16: 2e-3, torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    for p, (w, g) in zip(params, start, strict=True):
        expected = larc_by_hand(w, g, lr, decay, 0.01, clip, 1e-3)
        torch.testing.assert_close(p.grad.double(), expected, rtol=tolerance, atol=1e-6)
        torch.testing.assert_close(p.detach().double(), w - lr * expected, rtol=tolerance, atol=tolerance)


def test_groups_keep_their_own_rates_and_parameters_without_gradients_stay():
    params = make_params()
    inner = torch.optim.SGD([{"params": params[:1], "lr": 0.1, "weight_decay": 0.5}, {"params": params[1:]}], lr=0.2)
    optimizer = LARC(inner)
    set_gradients(params, 1)
    params[1].grad = None
    expected = [
        larc_by_hand(p.detach(), p.grad, lr, wd, 0.02, True, 1e-8)
        for p, lr, wd in ((params[0], 0.1, 0.5), (params[2], 0.2, 0.0))
    ]
    before = params[1].detach().clone()
    optimizer.step()
    torch.testing.assert_close([params[0].grad, params[2].grad], expected)
    assert torch.equal(params[1], before)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "weight_decay": 0.25})
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0, 0.25]
    assert optimizer.param_groups is inner.param_groups


def test_weight_decay_comes_back_when_the_step_fails():
    class Failing(torch.optim.SGD):
        def step(self, closure=None):
            assert self.param_groups[0]["weight_decay"] == 0.0
            raise KeyError("no step")

    params = make_params()
    set_gradients(params, 1)
    optimizer = LARC(Failing(params, lr=0.1, weight_decay=0.5))
    with pytest.raises(KeyError):
        optimizer.step()
    assert optimizer.param_groups[0]["weight_decay"] == 0.5


def test_a_closure_is_evaluated_before_its_gradients_are_adapted():
    parameter = nn.Parameter(torch.full((2,), 3.0))
    optimizer = LARC(torch.optim.SGD([parameter], lr=1.0), trust_coefficient=0.1, clip=False, eps=0.0)

    def closure():
        optimizer.zero_grad()
        loss = parameter.pow(2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 18.0
    torch.testing.assert_close(parameter.detach(), torch.full((2,), 2.7))  # trust_coefficient times its own size


def test_it_shares_state_and_files_with_the_optimizer_inside():
    params = make_params()
    optimizer = LARC(torch.optim.SGD(params, lr=0.1, momentum=0.9))
    set_gradients(params, 1)
    optimizer.step()
    assert optimizer.state is optimizer.optim.state and len(optimizer.state) == len(params)
    twin = LARC(torch.optim.SGD(make_params(), lr=3.0))
    twin.load_state_dict(optimizer.state_dict())
    assert twin.param_groups[0]["lr"] == 0.1 and len(twin.state) == len(params)
    optimizer.zero_grad(set_to_none=True)
    assert all(p.grad is None for p in params)
    assert optimizer.defaults is optimizer.optim.defaults
    with pytest.raises(AttributeError):
        optimizer.no_such_thing  # noqa: B018


@pytest.mark.parametrize(("way", "is_bound"), [("deepcopy", True), ("pickle", False)])
def test_copies_go_on_alone(way, is_bound):
    model = make_model()
    optimizer = LARC(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), trust_coefficient=0.5, clip=False, eps=0.125
    )
    if is_bound:
        amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    twin = copy.deepcopy(optimizer) if way == "deepcopy" else pickle.loads(pickle.dumps(optimizer))
    assert (twin.trust_coefficient, twin.clip, twin.eps) == (0.5, False, 0.125) and not hasattr(twin, "_amp_stash")
    parameter = twin.param_groups[0]["params"][0]
    before = [p.detach().clone() for p in (parameter, optimizer.param_groups[0]["params"][0])]
    parameter.grad = torch.ones_like(parameter)
    twin.step()
    assert not torch.equal(parameter, before[0]) and torch.equal(optimizer.param_groups[0]["params"][0], before[1])


@pytest.mark.parametrize("when", ["before", "after"])
def test_schedulers_take_it_before_and_after_initialize(when):
    model = make_model()
    optimizer = LARC(torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=0.01), trust_coefficient=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if when == "before":
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.99)
        returned = amp.initialize(model, optimizer, opt_level="O2", loss_scale=8.0, verbosity=0)
        if when == "after":
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.99)
        losses = train(model, optimizer, make_batches(1) * 6, scheduler)
    assert returned[1] is optimizer and losses[-1] < 0.9 * losses[0]
    group = optimizer.param_groups[0]
    assert group["lr"] == pytest.approx(0.05 * 0.99**6) and group["weight_decay"] == 0.01
    assert torch.equal(model.fc.weight, group["params"][-2].half())
    amp.reset()
    assert not hasattr(optimizer, "_amp_stash")
    optimizer.step()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_under_amp_steps_are_those_of_float32_gradients_and_an_overflow_skips(level):
    batches = make_batches(4)
    results = []
    for opt_level, loss_scale in ((level, "dynamic"), ("O0", None)):
        model = make_model()
        optimizer = LARC(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1))
        amp.initialize(model, optimizer, opt_level=opt_level, loss_scale=loss_scale, verbosity=0)
        results.append(train(model, optimizer, batches))
        if opt_level == level:
            before = [p.detach().clone() for p in amp.master_params(optimizer)]
            backward(F.cross_entropy(model(batches[0][0]), batches[0][1]) * float("inf"), optimizer)
            optimizer.step()
            assert optimizer.step_was_skipped and optimizer.param_groups[0]["weight_decay"] == 0.1
            assert all(torch.equal(a, b) for a, b in zip(before, amp.master_params(optimizer), strict=True))
        amp.reset()
    torch.testing.assert_close(torch.tensor(results[0]), torch.tensor(results[1]), rtol=3e-2, atol=3e-2)


def test_an_optimizer_that_amp_has_may_be_wrapped_later():
    model = make_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, inner, opt_level="O2", loss_scale="dynamic", verbosity=0)
    optimizer = LARC(inner)
    batch = make_batches(1)[0]
    for factor, is_skipped in ((1.0, False), (float("inf"), True)):
        before = [p.detach().clone() for p in amp.master_params(optimizer)]
        backward(F.cross_entropy(model(batch[0]), batch[1]) * factor, inner)
        optimizer.step()
        assert optimizer.step_was_skipped is is_skipped
        assert all(torch.equal(a, b) for a, b in zip(before, amp.master_params(optimizer), strict=True)) is is_skipped
    with pytest.raises(amp.OptimizerError, match="initialized before"):
        amp.initialize(make_model(), optimizer, opt_level="O2", loss_scale="dynamic", verbosity=0)


def test_gradscaler_unscales_and_skips_also_around_a_fused_optimizer():
    results = []
    for fused in (False, True):
        params = make_params()
        optimizer = LARC(torch.optim.SGD(params, lr=0.1, weight_decay=0.1, fused=fused))
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for factor in (1.0, float("inf"), 1.0):
            optimizer.zero_grad()
            scaler.scale(sum(p.square().sum() for p in params) * factor).backward()
            scaler.step(optimizer)
            scaler.update()
        results.append([p.detach() for p in params])
    torch.testing.assert_close(*results)
