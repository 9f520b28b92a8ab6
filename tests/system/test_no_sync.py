"""Accumulation under `no_sync` on two ranks gives at every level what the float32 run gives, bit by bit the same on
both.

Gradients that no rank has reduced yet are kept: neither added to masters nor dropped.

Guards: training/reduction, training/gradient_sums.
"""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import backward, take_step

import amp_patch as amp
from amp_patch.apex.parallel import DistributedDataParallel as ApexDDP

pytestmark = pytest.mark.xdist_group("ranks")  # one pair for all


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)


def data(rank, step, micro):
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))


def unsynced(wrapped, how, is_last):
    """What keeps a pass from being reduced: torch's context, its flag, or the switch of the stand-in."""
    if how == "no_sync":
        return contextlib.nullcontext() if is_last else wrapped.no_sync()
    if how == "flag":
        wrapped.require_backward_grad_sync = is_last
    else:
        (wrapped.enable_allreduce if is_last else wrapped.disable_allreduce)()
    return contextlib.nullcontext()


def wrap(model, how):
    if how in ("no_sync", "flag"):
        return DistributedDataParallel(model, broadcast_buffers=False)
    return ApexDDP(model, delay_allreduce=how == "delayed switch")


def train(rank, level, options, how, delay, micro_batches=3, steps=2):
    """Weights after some steps, and whether both ranks agree on every bit of the masters."""
    model, optimizer = make()
    if level is not None:
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    wrapped = wrap(model, how)
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(micro_batches):
            is_last = micro == micro_batches - 1
            with unsynced(wrapped, how, is_last):
                loss = wrapped(data(rank, step, micro)).float().pow(2).mean() / micro_batches
                if level is None:
                    loss.backward()
                else:
                    backward(loss, optimizer, delay_unscale=delay and not is_last)
        optimizer.step()
    stepped = [parameter.detach().clone() for group in optimizer.param_groups for parameter in group["params"]]
    del wrapped
    amp.reset()
    flat = torch.cat([tensor.flatten() for tensor in stepped])
    others = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(others, flat)
    return flat, all(torch.equal(other, flat) for other in others)


LEVELS = [("O1", {}), ("O2", {}), ("O5", {"loss_scale": "dynamic"})]


@pytest.mark.parametrize(
    ("how", "delay"), [("no_sync", False), ("flag", True), ("switch", False), ("delayed switch", True)]
)
def test_every_level_gives_what_float32_gives(ranks, how, delay):
    expected, are_equal = ranks(train, None, {}, how, False)[0]
    assert are_equal
    start = torch.cat([parameter.detach().flatten() for parameter in make()[0].parameters()])
    moved = float((expected - start).norm())
    for level, options in LEVELS:
        found = ranks(train, level, options, how, delay)
        assert all(are_equal for _, are_equal in found), level
        # a step by the last micro-batch alone is off by some 90 %
        assert float((found[0][0] - expected).norm()) <= 0.03 * moved, level


def backward_outside(rank):
    """The forward decides: a backward pass after the context is still not reduced."""
    model, optimizer = make()
    model, optimizer = amp.initialize(model, optimizer, opt_level="O5", verbosity=0)
    wrapped = wrap(model, "no_sync")
    with wrapped.no_sync():
        loss = wrapped(data(rank, 0, 0)).pow(2).mean()
    backward(loss, optimizer)
    low = [parameter for parameter in model.parameters() if parameter.dtype is torch.bfloat16]
    held = any(parameter.grad is not None for parameter in low)  # not added to those of the masters yet
    backward(wrapped(data(rank, 0, 1)).pow(2).mean(), optimizer)
    return held, any(parameter.grad is not None for parameter in low)


def test_the_forward_decides(ranks):
    assert ranks(backward_outside) == [(True, False)] * 2


def step_too_early(rank):
    model, optimizer = make()
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    wrapped = wrap(model, "no_sync")
    with wrapped.no_sync(), amp.scale_loss(wrapped(data(rank, 0, 0)).pow(2).mean(), optimizer) as scaled:
        scaled.backward()
    before = amp.state_dict()
    said = ""
    try:
        optimizer.step()
    except amp.OptimizerError as error:
        said = str(error)
    take_step(wrapped(data(rank, 0, 1)).pow(2).mean(), optimizer)
    return said, before, amp.stats().steps


def test_a_step_before_the_gradients_are_reduced_is_refused(ranks):
    for said, before, steps in ranks(step_too_early):
        assert "never reduced over the ranks" in said and steps == 1
        assert before["loss_scaler0"]["unskipped"] == 0  # a pass that nobody can judge yet counts for nothing


def overflow(rank, bad_rank, bad_micro):
    """An overflow in a pass that is not reduced is found where it is reduced, by all ranks."""
    model, optimizer = make()
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    wrapped = wrap(model, "no_sync")
    for micro in range(2):
        with unsynced(wrapped, "no_sync", micro == 1):
            factor = float("inf") if (rank, micro) == (bad_rank, bad_micro) else 1.0
            loss = wrapped(data(rank, 0, micro)).float().pow(2).mean() * factor
            backward(loss, optimizer)
    optimizer.step()
    return optimizer.step_was_skipped, amp.state_dict()["loss_scaler0"]


@pytest.mark.parametrize(("bad_rank", "bad_micro"), [(0, 0), (1, 1)])
def test_an_overflow_of_one_rank_skips_the_step_of_all(ranks, bad_rank, bad_micro):
    assert ranks(overflow, bad_rank, bad_micro) == [(True, {"loss_scale": 32768.0, "unskipped": 0})] * 2


def train_two_wrappers(rank, level):
    """A loss through two wrapped models, and a third wrapper that runs a forward beside them."""
    torch.manual_seed(0)
    encoder, decoder, teacher = nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(4, 3)
    optimizer = torch.optim.SGD([*encoder.parameters(), *decoder.parameters()], lr=0.1)
    amp.initialize([encoder, decoder, teacher], optimizer, opt_level=level, loss_scale=128.0, verbosity=0)
    wrapped = [DistributedDataParallel(one) for one in (encoder, decoder, teacher)]
    found = []
    for step in range(2):
        optimizer.zero_grad()
        for micro in range(2):
            inputs = data(rank, step, micro)
            wrapped[2](inputs)
            with contextlib.ExitStack() as unsynced_all:
                for one in wrapped[:2] if micro == 0 else ():
                    unsynced_all.enter_context(one.no_sync())
                loss = wrapped[1](torch.tanh(wrapped[0](inputs))).float().pow(2).mean()
                backward(loss, optimizer)
        own = torch.cat([master.grad.flatten() for master in amp.master_params(optimizer)])
        of_all = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(of_all, own)
        found.append(all(torch.equal(other, own) for other in of_all))
        optimizer.step()
    del wrapped
    amp.reset()
    return found


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_each_of_several_wrappers_is_asked_anew_in_each_pass(ranks, level):
    assert ranks(train_two_wrappers, level) == [[True, True]] * 2
