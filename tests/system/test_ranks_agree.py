"""Ranks end alike, or are told: when windows are given up, gradients stay on a rank, wrappers are out of date, or
groups exist beside shards.

Guards: training/scale_updates, training/reduction, session/sharding, session/bindings.
"""

import contextlib
import io
import warnings

import pytest
import torch
import torch.distributed as dist
from ranks import batch, needs_fsdp2, weights_of
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from training import backward

import amp_patch as amp

pytestmark = pytest.mark.xdist_group("ranks")  # one pair for all

SCALE = {"init": 2.0**8, "growth_interval": 5}


def make(level, loss_scale=SCALE, wrap=True, **options):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.125)
    amp.initialize(net, optimizer, opt_level=level, loss_scale=loss_scale, verbosity=0, **options)
    return net, optimizer, DistributedDataParallel(net) if wrap else net


def go_back(run, optimizer, inputs, factor=1.0, **options):
    backward(run(inputs).float().square().mean() * factor, optimizer, **options)


def assert_alike(results):
    (weights, *others), (weights_there, *others_there) = results
    assert others == others_there and all(map(torch.equal, weights, weights_there))
    return others


def scales():
    return amp.stats().loss_scales


# ---- what one rank alone has found -----------------------------------------------------------------------------------


def give_up(rank, level, how):
    """A micro-batch overflows on one rank, and the window is given up; then a step."""
    net, optimizer, run = make(level)
    with run.no_sync():
        go_back(run, optimizer, batch(rank, 0), float("inf") if rank == 0 else 1.0)
    if how == "by hand":
        for parameter in (*net.parameters(), *amp.master_params(optimizer)):
            parameter.grad = None
    else:
        (optimizer if how == "optimizer" else net).zero_grad()
    go_back(run, optimizer, batch(rank, 1))
    optimizer.step()
    found = weights_of(optimizer), scales(), amp.stats().steps
    del run
    amp.reset()
    return found


@pytest.mark.parametrize(("how", "level"), [("optimizer", "O1"), ("model", "O2"), ("by hand", "O2")])
def test_a_window_that_is_given_up_moves_no_scale(ranks, how, level):
    assert assert_alike(ranks(give_up, level, how)) == [(2.0**8,), 1]


def use_two_losses(rank, level):
    """The pass that stays on the rank has another scaler than the one that is reduced."""
    _, optimizer, run = make(level, num_losses=2)
    history = []
    for step in range(3):
        with run.no_sync():
            go_back(run, optimizer, batch(rank, step), float("inf") if (rank, step) == (0, 1) else 1.0, loss_id=0)
        go_back(run, optimizer, batch(rank, 10 + step), loss_id=1)
        optimizer.step()
        history.append((optimizer.step_was_skipped, scales()))
        optimizer.zero_grad()
    found = weights_of(optimizer), history
    del run
    amp.reset()
    return found


def test_two_losses_of_which_one_stays_on_the_rank(ranks):
    (history,) = assert_alike(ranks(use_two_losses, "O2"))
    assert [is_skipped for is_skipped, _ in history] == [False, True, False]


def train_both(rank, level):
    """One accumulates without reducing, the other steps in between."""
    net, optimizer, run = make(level)
    torch.manual_seed(1)
    other = nn.Linear(6, 1)
    other_optimizer = torch.optim.SGD(other.parameters(), lr=0.125)
    amp.initialize(other, other_optimizer, opt_level=level, loss_scale=SCALE, verbosity=0)
    other_run, history = DistributedDataParallel(other), []
    for step in range(3):
        with run.no_sync():
            go_back(run, optimizer, batch(rank, step), float("inf") if (rank, step) == (0, 1) else 1.0)
        go_back(other_run, other_optimizer, batch(rank, 20 + step))
        other_optimizer.step()
        other_optimizer.zero_grad()
        go_back(run, optimizer, batch(rank, 10 + step))
        optimizer.step()
        history.append((optimizer.step_was_skipped, other_optimizer.step_was_skipped, scales()))
        optimizer.zero_grad()
    found = [*weights_of(optimizer), *weights_of(other_optimizer)], history
    del run, other_run
    amp.reset()
    return found


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_step_in_between_judges_nothing_of_the_other_window(ranks, level):
    (history,) = assert_alike(ranks(train_both, level))
    assert [entry[:2] for entry in history] == [(False, False), (True, False), (False, False)]


def accumulate_alone(rank, level):
    """Local SGD: every pass under no_sync, each rank steps by itself."""
    _, optimizer, run = make(level)
    before = weights_of(optimizer)
    with run.no_sync():
        go_back(run, optimizer, batch(rank, 0))
    gradients = [one.grad.clone() for one in amp.master_params(optimizer)]
    optimizer.step()
    after = weights_of(optimizer)
    del run
    amp.reset()
    return all(
        torch.allclose(new, old - 0.125 * gradient / 2.0**8, rtol=1e-5, atol=1e-7)
        for new, old, gradient in zip(after, before, gradients, strict=True)
    )


def test_a_rank_may_step_by_itself_where_there_are_no_masters(ranks):
    assert ranks(accumulate_alone, "O1") == [True, True]


def join(rank, level):
    _, optimizer, run = make(level, loss_scale={"init": 2.0**8, "growth_interval": 2})
    with Join([run]):
        for step in range(3 + 2 * rank):
            go_back(run, optimizer, batch(rank, step))
            optimizer.step()
            optimizer.zero_grad()
    for step in range(2):
        go_back(run, optimizer, batch(rank, 20 + step))
        optimizer.step()
        optimizer.zero_grad()
    found = weights_of(optimizer), scales(), amp.state_dict()
    del run
    amp.reset()
    return found


def test_uneven_inputs_end_with_one_scale(ranks):
    assert_alike(ranks(join, "O2"))


def give_up_before_reducing(rank):
    from amp_patch.apex.parallel import Reducer

    net, optimizer, _ = make("O1", wrap=False)
    reducer = Reducer(net)
    go_back(net, optimizer, batch(rank, 0), float("inf") if rank == 1 else 1.0)
    optimizer.zero_grad()
    for step in range(2):
        go_back(net, optimizer, batch(rank, 1 + step))
        reducer.reduce()
        optimizer.step()
        optimizer.zero_grad()
    found = weights_of(optimizer), scales()
    amp.reset()
    return found


def test_the_first_reduction_brings_scales_together(ranks):
    assert_alike(ranks(give_up_before_reducing))


def tell(rank):
    """What a rank prints, and warns of, in training that overflows, at levels with and without a skip."""
    with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(io.StringIO()) as printed:
        warnings.simplefilter("always")
        for scale in ("dynamic", 8.0):
            net = nn.Linear(4, 2)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            amp.initialize(net, optimizer, opt_level="O2", loss_scale=scale)
            backward(net(torch.full((2, 4), float("inf"))).float().sum(), optimizer)
            optimizer.step()
            amp.reset()
    return printed.getvalue(), [str(one.message) for one in caught]


def test_rank_0_speaks_and_each_rank_names_its_faults(ranks):
    (printed, warned), (printed_there, warned_there) = ranks(tell)
    assert printed.count("Gradient overflow") == 1 and "O2" in printed and printed_there == ""
    assert len(warned) == len(warned_there) == 1
    assert warned[0].startswith("rank 0: non-finite gradients under a static")
    assert warned_there[0] == warned[0].replace("rank 0", "rank 1")


# ---- in a group, step() is all that communicates ---------------------------------------------------------------------


def train_in_group(rank, how):
    _, optimizer, run = make("O1", wrap=False, overflow_group=dist.group.WORLD)
    history = []
    for step in range(3):
        if step != 1 or rank == 0 or how == "fails":
            loss = run(batch(0, step)).float().square().mean()
            with contextlib.suppress(ZeroDivisionError), amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
                if step == 1 and rank == 0 and how == "fails":
                    raise ZeroDivisionError
        if step == 1:
            optimizer.zero_grad()
            continue
        optimizer.step()
        history.append(scales())
        optimizer.zero_grad()
    found = weights_of(optimizer), history
    amp.reset()
    return found


@pytest.mark.parametrize("how", ["no block", "fails"])
def test_zero_grad_waits_for_nobody(ranks, how):
    assert_alike(ranks(train_in_group, how))


def group_beside_shards(rank):
    from torch.distributed.fsdp import fully_shard

    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6))
    fully_shard(net, mesh=mesh["shard"], mp_policy=amp.fsdp_policy("O2"))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.125)
    group = mesh["stage"].get_group()
    amp.initialize(net, optimizer, opt_level="O2", loss_scale=SCALE, overflow_group=group, verbosity=0)
    history = []
    for step in range(3):
        with amp.scale_loss(net(batch(rank, step)).float().square().mean(), optimizer) as scaled:
            scaled.backward()
            if (rank, step) == (1, 1):
                net[0].weight.grad._local_tensor[0] = float("inf")
        optimizer.step()
        history.append((optimizer.step_was_skipped, scales()))
        optimizer.zero_grad()
    amp.reset()
    return history


@needs_fsdp2
def test_ranks_that_hold_shards_are_in_the_group(four_ranks):
    first, *others = four_ranks(group_beside_shards)
    assert all(other == first for other in others) and [is_skipped for is_skipped, _ in first] == [False, True, False]


def refuse_group(rank):
    net, _, run = make("O1", wrap=False)
    other, said = nn.Linear(2, 2), []
    for group in ("bad", None):
        try:
            amp.initialize(other, opt_level="O1", loss_scale=SCALE, overflow_group=group, verbosity=0)
        except amp.ArgumentTypeError as error:
            said.append(str(error))
    amp.reset()
    return said


def test_a_group_that_is_refused_is_forgotten(ranks):
    for said in ranks(refuse_group):
        assert len(said) == 1 and "'bad'" in said[0]


# ---- sums that fully_shard holds -------------------------------------------------------------------------------------


def accumulate_whole(rank, level):
    """Two micro-batches of two scalers under FSDP2, of which the first is not reduced; and their true sum."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
    reference = [parameter.detach().clone() for parameter in net.parameters()]
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    for module in (net[0], net[2], net):
        fully_shard(module, mesh=mesh, mp_policy=amp.fsdp_policy(level, module))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.125)
    amp.initialize(net, optimizer, opt_level=level, loss_scale=SCALE, num_losses=2, verbosity=0)
    go_back(net, optimizer, batch(rank, 9), float("inf"), loss_id=1)
    optimizer.step()
    optimizer.zero_grad()
    found_scales = scales()
    for micro in range(2):
        net.set_requires_gradient_sync(micro == 1)
        go_back(net, optimizer, batch(rank, micro), loss_id=micro)
    found = [parameter.grad.full_tensor() for parameter in net.parameters()]
    amp.reset()
    plain = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
    for parameter, value in zip(plain.parameters(), reference, strict=True):
        parameter.data.copy_(value)
    for micro in range(2):
        for who in range(2):
            (plain(batch(who, micro)).square().mean() / 2).backward()
    true = [parameter.grad for parameter in plain.parameters()]
    return found_scales, [((one - other).norm() / other.norm()).item() for one, other in zip(found, true, strict=True)]


@needs_fsdp2
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_sums_that_are_not_sharded_yet_follow_the_scale(ranks, level):
    for found_scales, errors in ranks(accumulate_whole, level):
        assert found_scales == (2.0**8, 2.0**7) and max(errors) < 0.01


# ---- wrappers, forwards, checkpoints, optimizers ---------------------------------------------------------------------


def wrap_first(rank, level, is_apex):
    from amp_patch.apex.parallel import DistributedDataParallel as ApexDDP

    net = nn.Linear(6, 2)
    run = ApexDDP(net) if is_apex else DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.125)
    amp.initialize(net, optimizer, opt_level=level, verbosity=0)
    try:
        go_back(run, optimizer, batch(rank, 0))
    except amp.ModelError as error:
        return str(error)
    finally:
        del run
        amp.reset()
    return None


@pytest.mark.parametrize(("level", "is_apex"), [("O1", False), ("O2", False), ("O2", True)])
def test_a_wrapper_made_before_the_cast_is_refused(ranks, level, is_apex):
    for said in ranks(wrap_first, level, is_apex):
        assert said is None if level == "O1" else "call initialize first" in said


def reset_under(rank, level):
    _, optimizer, run = make(level)
    go_back(run, optimizer, batch(rank, 0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        amp.reset()
    del run
    return [str(one.message) for one in caught]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_wrapper_that_outlives_the_cast_is_told_of(ranks, level):
    for rank, said in enumerate(ranks(reset_under, level)):
        assert len(said) == (level == "O2") and all(f"rank {rank}: " in one and "wrap" in one for one in said)


def go_forward_twice(rank, level):
    _, optimizer, run = make(level, loss_scale=64.0)
    loss = run(batch(rank, 0)).float().square().mean()
    with run.no_sync():
        loss = loss + run(batch(rank, 1)).float().square().mean()
    backward(loss, optimizer)
    optimizer.step()
    found = (weights_of(optimizer),)
    del run
    amp.reset()
    return found


def test_a_forward_without_reduction_beside_one_with(ranks):
    assert_alike(ranks(go_forward_twice, "O5"))


@pytest.mark.parametrize("options", [{}, {"full_state_dict": True}], ids=str)
def test_masters_that_a_checkpoint_lacks_stay_as_they_are(options):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    net, optimizer, _ = make("O2", wrap=False)
    before, given = weights_of(optimizer), torch.full((8, 6), 0.1234567)
    set_model_state_dict(net, {"0.weight": given}, options=StateDictOptions(strict=False, **options))
    after = weights_of(optimizer)
    assert torch.equal(after[0], given) and all(map(torch.equal, after[1:], before[1:]))


def use_post_local_sgd(rank, level):
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    net = nn.Linear(6, 2)
    averager = PeriodicModelAverager(period=1)
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(net.parameters(), lr=0.125), averager)
    try:
        amp.initialize(net, optimizer, opt_level=level, verbosity=0)
    except amp.OptimizerError as error:
        return str(error), {parameter.dtype for parameter in net.parameters()}
    amp.reset()
    return None, {parameter.dtype for parameter in net.parameters()}


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_optimizer_that_averages_parameters_is_refused_with_masters(ranks, level):
    for message, dtypes in ranks(use_post_local_sgd, level):
        assert (message is None if level == "O1" else "O1 or O4" in message) and dtypes == {torch.float32}
