"""Training that torch.distributed.checkpoint saves and loads, at every level, in one process and over ranks, goes on
bit by bit as without.

Guards: session/checkpoints, training/groups.
"""

import inspect

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import needs_fsdp2, weights_of
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel
from training import backward

import amp_patch as amp

pytestmark = pytest.mark.xdist_group("ranks")  # one pair for all

OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-4),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.5),
}
NO_DIST = {"no_dist": True} if "no_dist" in inspect.signature(dcp.save).parameters else {}  # torch 2.6 finds out itself
SCALE = {"init": 2.0**6, "growth_interval": 2}


def make(level, kind="AdamW", how=None, seed=0, **options):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    if how == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
        for module in (*net, net):
            fully_shard(module, mesh=mesh, mp_policy=amp.fsdp_policy(level, module))
    optimizer = OPTIMIZERS[kind](net.parameters())
    amp.initialize(net, optimizer, opt_level=level, verbosity=0, **options)
    return net, optimizer, DistributedDataParallel(net) if how == "ddp" else net


def train(run, optimizer, steps, first=0):
    rank = dist.get_rank() if dist.is_initialized() else 0
    for step in range(first, first + steps):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(2 * step + rank))
        backward(run(x).float().square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()


def save(net, optimizer, folder, **options):
    model, state = get_state_dict(net, optimizer)
    dcp.save({"model": model, "optimizer": state, "amp": amp.state_dict()}, checkpoint_id=folder, **options)
    return model, state


def load(net, optimizer, folder, **options):
    model, state = get_state_dict(net, optimizer)
    loaded = {"model": model, "optimizer": state, "amp": amp.state_dict()}
    dcp.load(loaded, checkpoint_id=folder, **options)
    set_state_dict(net, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    amp.load_state_dict(loaded["amp"])


# ---- in one process --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("level", "kind"), [("O1", "AdamW"), ("O2", "momentum"), ("O3", "AdamW"), ("O5", "AdamW"), ("O5", "SGD")]
)
def test_training_goes_on_as_without(level, kind, tmp_path):
    net, optimizer, run = make(level, kind, loss_scale=SCALE)
    train(run, optimizer, 3)
    steps = amp.stats().steps
    model, state = save(net, optimizer, tmp_path, **NO_DIST)
    assert amp.stats().steps == steps and all(id(p) != id(m) for p in net.parameters() for m in model.values())
    assert {value.dtype for value in model.values() if value.is_floating_point()} == {torch.float32}
    assert set(state["state"]) == ({name for name, _ in net.named_parameters()} if kind != "SGD" else set())
    train(run, optimizer, 3, first=3)
    expected, scales = weights_of(optimizer), amp.stats().loss_scales
    assert all(bool(weight.isfinite().all()) for weight in expected)
    amp.reset()
    net, optimizer, run = make(level, kind, seed=1, loss_scale=SCALE)
    load(net, optimizer, tmp_path, **NO_DIST)
    train(run, optimizer, 3, first=3)
    assert all(map(torch.equal, expected, weights_of(optimizer))) and amp.stats().loss_scales == scales


@pytest.mark.parametrize(
    "options", [{"full_state_dict": True}, {"flatten_optimizer_state_dict": True}, {"cpu_offload": True}], ids=str
)
def test_the_options_of_the_helpers(options):
    options = StateDictOptions(**options)
    net, optimizer, run = make("O5")
    train(run, optimizer, 2)
    model, state = get_state_dict(net, optimizer, options=options)
    held = {key: value.clone() for key, value in model.items()}
    train(run, optimizer, 1, first=2)
    expected = weights_of(optimizer)
    amp.reset()
    net, optimizer, run = make("O5", seed=1)
    set_state_dict(net, optimizer, model_state_dict=held, optim_state_dict=state, options=options)
    groups = [parameter.dtype for parameter in optimizer.param_groups[0]["params"]]
    assert groups == [torch.float32] * 6
    assert all(entry["exp_avg"].dtype is torch.float32 for entry in optimizer.state.values())
    train(run, optimizer, 1, first=2)
    found = weights_of(optimizer)
    assert [one.shape for one in found] == [one.shape for one in expected]


def test_an_error_in_the_helpers_leaves_masters_in_their_place():
    net, optimizer, run = make("O5")
    train(run, optimizer, 1)
    masters = list(amp.master_params(optimizer))
    with pytest.raises((KeyError, RuntimeError, AssertionError, ValueError)):
        set_state_dict(net, optimizer, model_state_dict={}, optim_state_dict={"state": {"x": {}}, "param_groups": []})
    assert all(one is other for one, other in zip(masters, amp.master_params(optimizer), strict=True))
    assert list(optimizer.state) == masters
    train(run, optimizer, 1)
    assert amp.stats().steps == 2


# ---- over ranks ------------------------------------------------------------------------------------------------------


def go_on(rank, level, how, folder, is_resumed):
    """Three steps after those that were saved here, or before by others; and the amp state then."""
    net, optimizer, run = make(level, how=how, seed=int(is_resumed), loss_scale=SCALE)
    if is_resumed:
        load(net, optimizer, folder)
    else:
        train(run, optimizer, 3)
        save(net, optimizer, folder)
    train(run, optimizer, 3, first=3)
    found = weights_of(optimizer), amp.state_dict()
    del run
    amp.reset()
    return found


@needs_fsdp2
@pytest.mark.parametrize(("saved", "loaded"), [("ddp", "fsdp2"), ("fsdp2", "ddp")])
def test_ddp_and_fully_shard_read_each_others_checkpoints(ranks, saved, loaded, tmp_path):
    wrote = ranks(go_on, "O5", saved, tmp_path, False)
    read = ranks(go_on, "O5", loaded, tmp_path, True)
    for weights, state in (*wrote, *read):
        assert all(map(torch.equal, weights, wrote[0][0])) and state == wrote[0][1]
