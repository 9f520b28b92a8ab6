"""DistributedDataParallel on two ranks broadcasts the masters of the first rank, bit by bit; split masters, too.

Guards: training/gradient_patches, training/split_masters, torch_distributed, session/torch_patches.
"""

import pytest
import torch
from ranks import noting_reductions
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import backward

import amp_patch as amp
from amp_patch.apex.parallel import Reducer

pytestmark = pytest.mark.xdist_group("ranks")  # one pair for all


def make(level, seed, split_masters=False):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, split_masters=split_masters)
    return model, optimizer


def states_of(model, optimizer):
    """The float32 weights; and what the parameters hold, which are copies of the masters."""
    masters = [master.detach().clone() for master in amp.master_params(optimizer)]
    for parameter, master in zip(model.parameters(), masters, strict=True):
        assert torch.equal(parameter.detach(), master.to(parameter.dtype))
    return masters


def train(wrapped, optimizer, steps, seed):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        loss = wrapped(torch.randn(4, 5, generator=generator)).float().square().mean()
        backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()


def wrap_ones_own(rank, level, how, split_masters):
    """Float32 weights before and after DDP was made (or the like), of models that differ between the ranks."""
    model, optimizer = make(level, rank if how != "second DDP" else 0, split_masters)
    if how == "loaded":
        checkpoint = {key: value + 1e-4 for key, value in model.state_dict().items()}
        if rank == 0:
            model.load_state_dict(checkpoint)
    elif how == "loaded and evaluated":
        model.load_state_dict({key: value * 1.001 for key, value in model.state_dict().items()})
        with torch.no_grad():
            model.eval()(torch.ones(2, 5))
    elif how == "edited":
        with torch.no_grad():
            model[0].weight.fill_(0.5)  # in 16 bits, and not yet in the master
    elif how == "second DDP":
        train(DistributedDataParallel(model), optimizer, 2, seed=rank)
    expected = states_of(model, optimizer) if how != "edited" else None
    if how == "Reducer":
        Reducer(model)
    else:
        DistributedDataParallel(model)
    found = states_of(model, optimizer)
    amp.reset()
    return expected, found


HOWS = ["as made", "loaded", "loaded and evaluated", "edited", "second DDP", "Reducer"]


@pytest.mark.parametrize("split_masters", [False, True], ids=["float32", "split"])
@pytest.mark.parametrize("how", HOWS)
def test_all_ranks_get_the_masters_of_the_first(ranks, how, split_masters):
    (expected, first), (_, second) = ranks(wrap_ones_own, "O5", how, split_masters)
    if expected is None:
        expected = [torch.full_like(first[0], 0.5), *first[1:]]
    for want, one, other in zip(expected, first, second, strict=True):
        assert torch.equal(want, one) and torch.equal(one, other)
    assert how == "edited" or not torch.equal(first[0], first[0].bfloat16().float())  # not rounded on the way


def count_reductions(rank, level):
    """How often DDP's all ranks talk outside of DDP's own reducer."""
    calls = []
    with noting_reductions(calls):
        model, optimizer = make(level, seed=0)
        train(DistributedDataParallel(model), optimizer, 3, seed=rank)
        amp.reset()
    return len(calls)


def test_ddp_needs_no_reduction_beside_its_own(ranks):
    assert ranks(count_reductions, "O5") == [0, 0]
