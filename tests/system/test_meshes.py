"""Meshes of two dimensions train as one process, also with shards on the host, and checkpoints can be loaded on another
number of ranks.

Guards: session/sharding, training/scale_updates, session/checkpoints.
"""

import pytest
import torch
import torch.distributed as dist
from ranks import batch, full, needs_fsdp2, noting_reductions, weights_of
from test_distributed_checkpoints import SCALE, load, make, save
from torch import nn
from training import backward

import amp_patch as amp

pytestmark = [pytest.mark.xdist_group("ranks"), needs_fsdp2]

STEPS = 6
SPIKES = {2: 1, 4: 3}
"""By step: the rank whose gradients overflow after they are reduced."""


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4), nn.Linear(4, 2))


def shard(net, how, level):
    """Shard a model, and return which of the batches this rank trains on."""
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    shape, names = ((4,), ("shard",)) if how == "offload" else ((2, 2), ("first", "second"))
    mesh = dist.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=names)
    part, options = mesh, {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if how == "offload" else {}
    if how == "FSDP and TP":
        part = mesh["first"]
        parallelize_module(net, mesh["second"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for module in (net[0], net[2], net[3], net):
        fully_shard(module, mesh=part, mp_policy=amp.fsdp_policy(level, module), **options)
    return part.get_local_rank() if how == "FSDP and TP" else dist.get_rank()


def train_on_mesh(rank, how, level):
    net = make_net()
    which = shard(net, how, level)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0625, momentum=0.5)
    amp.initialize(net, optimizer, opt_level=level, loss_scale=SCALE, verbosity=0)
    history, calls = [], []
    for step in range(STEPS):
        with amp.scale_loss(net(batch(which, step)).float().square().mean(), optimizer) as scaled:
            scaled.backward()
            if SPIKES.get(step) == rank:
                local = [parameter.grad._local_tensor for parameter in net.parameters()]
                next(one for one in local if one.numel()).view(-1)[0] = float("inf")
        with noting_reductions(calls):
            optimizer.step()
        history.append((optimizer.step_was_skipped, amp.stats().loss_scales[0]))
        optimizer.zero_grad()
    weights = [full(parameter) for parameter in net.parameters()]
    amp.reset()
    return weights, history, calls


def train_alone(level, batches):
    """One process on all the batches; steps that a spike would skip are left out."""
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0625, momentum=0.5)
    amp.initialize(net, optimizer, opt_level=level, loss_scale=SCALE, verbosity=0)
    for step in range(STEPS):
        if step in SPIKES:
            continue
        inputs = [batch(one, step) for one in range(batches)]
        backward(net(torch.cat(inputs)).float().square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    weights = [parameter.detach().clone() for parameter in amp.master_params(optimizer)]
    amp.reset()
    return weights


@pytest.mark.parametrize(("how", "level"), [("FSDP and TP", "O1"), ("replicas of shards", "O2"), ("offload", "O2")])
def test_ranks_of_a_mesh_train_as_one(four_ranks, how, level):
    (weights, history, calls), *others = four_ranks(train_on_mesh, how, level)
    for weights_there, history_there, calls_there in others:
        assert history_there == history and calls_there == calls
        assert all(map(torch.equal, weights_there, weights))
    assert [step for step, (is_skipped, _) in enumerate(history) if is_skipped] == list(SPIKES)
    assert len(calls) == STEPS
    for one, other in zip(weights, train_alone(level, 2 if how == "FSDP and TP" else 4), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-3)


# ---- another number of ranks -----------------------------------------------------------------------------------------


def train_on_same(net, optimizer, steps):
    """Every rank has the same batch, so that their mean is the same number however many they are."""
    for step in steps:
        inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
        backward(net(inputs).float().square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()


def go_on(rank, level, steps, read, written):
    """Train `steps` from a checkpoint, save in the middle, and return what there was then and at the end."""
    net, optimizer, _ = make(level, how="fsdp2", seed=read is not None, loss_scale=SCALE)
    if read is not None:
        load(net, optimizer, read)
    train_on_same(net, optimizer, steps[:2])
    if written is not None:
        save(net, optimizer, written)
    saved = weights_of(optimizer)
    train_on_same(net, optimizer, steps[2:])
    found = saved, weights_of(optimizer), amp.state_dict()
    amp.reset()
    return found


def test_a_checkpoint_goes_from_two_ranks_to_four_and_back(ranks, four_ranks, tmp_path):
    def of_all(found):
        for saved, end, state in found:
            assert all(map(torch.equal, saved, found[0][0])) and all(map(torch.equal, end, found[0][1]))
            assert state == found[0][2]
        return found[0]

    _, *straight = of_all(ranks(go_on, "O2", range(6), None, tmp_path / "two"))
    there, *resumed = of_all(four_ranks(go_on, "O2", range(2, 6), tmp_path / "two", tmp_path / "four"))
    back, *returned = of_all(ranks(go_on, "O2", range(4, 6), tmp_path / "four", None))
    for weights, state in (resumed, returned):
        assert all(map(torch.equal, weights, straight[0])) and state == straight[1]
    assert not all(map(torch.equal, there, back))
