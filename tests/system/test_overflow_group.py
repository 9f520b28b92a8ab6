"""All ranks skip the same steps, have the same scale and end with the same weights, whatever is sharded and whichever
rank overflows, before or after the reduction; and the reductions are counted.

Guards: training/scale_updates, session/sharding, session/arguments, torch_distributed.
"""

import warnings

import pytest
import torch
import torch.distributed as dist
from ranks import batch, full, needs_fsdp2, noting_reductions
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_state import VERSION
from training import backward

import amp_patch as amp
from amp_patch.session.sharding import find_groups

pytestmark = pytest.mark.xdist_group("ranks")  # one pair for all

STEPS = 12
SPIKES = {
    2: (0, "loss"),
    3: (1, "loss"),
    5: (1, "gradient"),
    7: (0, "gradient"),
    9: (1, "loss"),
    10: (1, "gradient"),
}
"""By step: the rank that overflows, and whether before its gradients are reduced or after."""

SCALE = {"init": 2.0**8, "growth_interval": 2}


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4), nn.Linear(4, 2))


def mesh_of(shape=(2,), **options):
    return dist.device_mesh.init_device_mesh("cpu", shape, **options)


def ddp(net, level):
    return net, DistributedDataParallel


def fsdp2(net, level):
    from torch.distributed.fsdp import fully_shard

    mesh = mesh_of()
    for module in net:
        if isinstance(module, nn.Linear):
            fully_shard(module, mesh=mesh, mp_policy=amp.fsdp_policy(level, module))
    return fully_shard(net, mesh=mesh, mp_policy=amp.fsdp_policy(level)), None


def fsdp1(net, level):
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=True), None


def parallel(plan):
    def shard(net, level):
        from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = mesh_of()
        parallelize_module(net, mesh, {"1": ColwiseParallel(), "3": RowwiseParallel()})
        if plan == "replicated first":
            for name, parameter in list(net[0].named_parameters()):
                net[0].register_parameter(name, nn.Parameter(distribute_tensor(parameter.data, mesh, [Replicate()])))
            net[0].register_forward_pre_hook(lambda _, args: (DTensor.from_local(args[0], mesh, [Replicate()]),))
            net[0].register_forward_hook(lambda _, __, output: output.to_local())
        return net, None

    return shard


def parameters_in_order(net, how):
    """Sharded ones first, where that is what is tried."""
    parameters = list(net.parameters())
    return parameters[2:] + parameters[:2] if how == "sharded first" else parameters


HOWS = {
    "ddp": ddp,
    "fsdp2": fsdp2,
    "fsdp1": fsdp1,
    "sharded first": parallel("sharded first"),
    "replicated first": parallel("replicated first"),
    "mixed": parallel("mixed"),
}


def train(rank, how, level, options, steps, has_spikes):
    net, wrap = HOWS[how](make_net(), level)
    optimizer = torch.optim.SGD(parameters_in_order(net, how), lr=0.0625, momentum=0.5)
    amp.initialize(net, optimizer, opt_level=level, verbosity=0, **options)
    wrapped = net if wrap is None else wrap(net)
    is_tensor_parallel = how in ("sharded first", "replicated first", "mixed")
    history, calls = [], []
    for step in range(steps):
        spiking, where = SPIKES.get(step, (None, None)) if has_spikes else (None, None)
        loss = wrapped(batch(0 if is_tensor_parallel else rank, step)).float().square().mean()
        if spiking == rank and where == "loss" and not is_tensor_parallel:
            loss = loss * float("inf")
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
            if spiking == rank and (where == "gradient" or is_tensor_parallel) and how != "ddp":
                gradients = [parameter.grad for parameter in parameters_in_order(net, how)]
                local = [getattr(one, "_local_tensor", one) for one in gradients if one is not None]
                next(one for one in local if one.numel()).view(-1)[0] = float("inf")
        with noting_reductions(calls):
            optimizer.step()
        history.append((optimizer.step_was_skipped, amp.stats().loss_scales[0]))
        optimizer.zero_grad()
    if how == "fsdp1":
        with type(net).summon_full_params(net):
            weights = [full(parameter) for parameter in net.parameters()]
    else:
        weights = [full(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    del wrapped
    amp.reset()
    return weights, history, calls


CASES = [
    *(("ddp", level) for level in ("O1", "O2")),
    *(pytest.param("fsdp2", level, marks=needs_fsdp2) for level in ("O1", "O2")),
    *((how, "O1") for how in ("fsdp1", "sharded first", "replicated first", "mixed")),
]


@pytest.mark.parametrize(("how", "level"), CASES)
def test_all_ranks_skip_and_scale_alike(ranks, how, level):
    (one, history, calls), (other, history_there, calls_there) = ranks(
        train, how, level, {"loss_scale": SCALE}, STEPS, True
    )
    assert history == history_there
    skipped = [step for step, (is_skipped, _) in enumerate(history) if is_skipped]
    # under DDP nothing is written after the reduction; a spike of the loss is in the gradients of both
    expected = [step for step, (_, where) in SPIKES.items() if how != "ddp" or where == "loss"]
    assert skipped == expected
    assert all(map(torch.equal, one, other)) and all(bool(weight.isfinite().all()) for weight in one)
    assert calls == calls_there == ([] if how == "ddp" else [3] * STEPS)


@pytest.mark.parametrize(
    ("how", "options"),
    [
        pytest.param("fsdp2", {"loss_scale": 64.0}, marks=needs_fsdp2),
        ("mixed", {"loss_scale": SCALE, "overflow_group": False}),
    ],
)
def test_without_a_common_decision_nothing_is_reduced(ranks, how, options):
    (one, _, calls), (other, _, _) = ranks(train, how, "O1", options, 3, False)
    assert calls == [] and all(map(torch.equal, one, other))


@needs_fsdp2
@pytest.mark.parametrize("level", ["O2", "O4"])
def test_fully_shard_gives_what_ddp_gives(ranks, level):
    options = {"loss_scale": SCALE} if level == "O2" else {}
    (sharded, *_), _ = ranks(train, "fsdp2", level, options, 6, False)
    (replicated, *_), _ = ranks(train, "ddp", level, options, 6, False)
    assert all(map(torch.equal, sharded, replicated))


def train_pipeline(rank, schedule, level):
    """A model in two stages under a schedule of torch, which sends scaled gradients from stage to stage."""
    from torch.distributed import pipelining

    net = make_net()
    stage = net[:3] if rank == 0 else net[3:]
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.0625)
    options = {"loss_scale": SCALE, "overflow_group": dist.group.WORLD}
    amp.initialize(stage, optimizer, opt_level=level, verbosity=0, **options)
    run = getattr(pipelining, schedule)(
        pipelining.PipelineStage(stage, rank, 2, torch.device("cpu")),
        4,
        loss_fn=lambda output, target: (output.float() - target).square().mean() * scale,
    )
    history = []
    for step in range(8):
        with amp.scale_loss(torch.ones(()), optimizer) as scale:
            run.step(*([batch(0, step)] if rank == 0 else []), target=batch(1, step)[:, :2] if rank == 1 else None)
            if step == 3 + rank:
                next(stage.parameters()).grad.fill_(float("inf"))
        optimizer.step()
        history.append((optimizer.step_was_skipped, amp.stats().loss_scales[0]))
        optimizer.zero_grad()
    weights = [full(parameter).float() for parameter in amp.master_params(optimizer)]
    amp.reset()
    return weights, history


def train_unsplit(level, steps):
    """The same in one process, in the same micro-batches, without overflows: a list of weights."""
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0625)
    amp.initialize(net, optimizer, opt_level=level, loss_scale=SCALE, verbosity=0)
    for step in steps:
        with amp.scale_loss(torch.ones(()), optimizer) as scale:
            for inputs, target in zip(batch(0, step).split(1), batch(1, step)[:, :2].split(1), strict=True):
                ((net(inputs).float() - target).square().mean() * scale / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = [full(parameter).float() for parameter in amp.master_params(optimizer)]
    amp.reset()
    return weights


@pytest.mark.skipif(VERSION < (2, 7), reason="plain torch 2.6, too, comes to other weights in stages than unsplit")
@pytest.mark.parametrize(("schedule", "level"), [("ScheduleGPipe", "O2"), ("Schedule1F1B", "O1")])
def test_schedules_of_torch_run_in_one_block(ranks, schedule, level):
    (first, history), (second, history_there) = ranks(train_pipeline, schedule, level)
    assert history == history_there
    assert [step for step, (is_skipped, _) in enumerate(history) if is_skipped] == [3, 4]
    expected = train_unsplit(level, (0, 1, 2, 5, 6, 7))
    for one, other in zip([*first, *second], expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-3)


def reduce_after_blocks(rank, level):
    """The stand-in's Reducer averages after each block."""
    from amp_patch.apex import amp as apex_amp
    from amp_patch.apex.parallel import Reducer

    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0625)
    apex_amp.initialize(net, optimizer, opt_level=level, verbosity=0)
    reducer, history = Reducer(net), []
    for step in range(8):
        loss = net(batch(rank, step)).float().square().mean() * (float("inf") if step == 3 + rank else 1.0)
        with apex_amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        reducer.reduce()
        optimizer.step()
        history.append((optimizer.step_was_skipped, apex_amp._amp_state.loss_scalers[0].loss_scale()))
        optimizer.zero_grad()
    weights = [full(parameter) for parameter in apex_amp.master_params(optimizer)]
    amp.reset()
    return weights, history


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_who_averages_by_hand_skips_on_all_ranks(ranks, level):
    (one, history), (other, history_there) = ranks(reduce_after_blocks, level)
    assert history == history_there
    assert [step for step, (is_skipped, _) in enumerate(history) if is_skipped] == [3, 4]
    assert all(map(torch.equal, one, other)) and all(bool(weight.isfinite().all()) for weight in one)


def train_without_shards(rank):
    """FSDP1 of a model so small that the second rank holds nothing, with two micro-batches a step."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    torch.manual_seed(0)
    net = FullyShardedDataParallel(nn.Linear(1, 1, bias=False), device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        amp.initialize(net, optimizer, opt_level="O1", loss_scale=SCALE, verbosity=0)
        for _ in range(3):
            for _ in range(2):
                backward(net(torch.ones(1, 1)).float().sum(), optimizer)
            optimizer.step()
            optimizer.zero_grad()
    found = amp.stats().steps, amp.stats().loss_scales
    amp.reset()
    return found


def test_a_rank_without_shards_takes_part(ranks):
    first, second = ranks(train_without_shards)
    assert first == second and first[0] == 3


def groups_of_separate_shards(rank):
    """The groups for two parameters, each sharded over a mesh of one rank, if the script names the group of both."""
    from torch.distributed.tensor import Shard, distribute_tensor

    meshes = [dist.device_mesh.DeviceMesh("cpu", [member]) for member in range(2)]
    parameters = [nn.Parameter(distribute_tensor(torch.ones(2), mesh, [Shard(0)])) for mesh in meshes]
    return [dist.get_process_group_ranks(group) for group in find_groups([], parameters, dist.group.WORLD)]


@needs_fsdp2
def test_a_given_group_joins_shards_of_separate_ranks(ranks):
    assert ranks(groups_of_separate_shards) == [[[0, 1]], [[0, 1]]]


# ---- what is refused -------------------------------------------------------------------------------------------------


def refusal(rank, how, level):
    """What `initialize` says, and whether it left everything as it was."""
    net = make_net()
    if how == "zero":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)
    else:
        if how == "plain fsdp2":
            net, _ = fsdp2(net, "O1")
        elif how == "batch norm":
            from torch.distributed.fsdp import fully_shard

            net = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
            fully_shard(net, mesh=mesh_of(), mp_policy=amp.fsdp_policy(level))
        else:
            net, _ = HOWS[how](net, level)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    before = [(id(parameter), parameter.dtype) for parameter in net.parameters()]
    try:
        amp.initialize(net, optimizer, opt_level=level, verbosity=0)
    except (amp.ModelError, amp.OptimizerError) as error:
        said = str(error)
    else:
        said = None
        amp.reset()
    hooks = sum(len(module._forward_pre_hooks) for module in net.modules()) if how in ("zero", "mixed") else 0
    return said, before == [(id(parameter), parameter.dtype) for parameter in net.parameters()] and hooks <= 2


REFUSED = {
    "zero": "use a plain optimizer",
    "fsdp1": "fully_shard with amp_patch.fsdp_policy",
    "mixed": "use O1 or O4 for tensor parallelism",
    "plain fsdp2": "mp_policy=amp_patch.fsdp_policy",
    "batch norm": "mp_policy=amp_patch.fsdp_policy",
}


@pytest.mark.parametrize("how", REFUSED)
def test_what_a_level_cannot_do_is_refused_before_anything_changes(ranks, how):
    for said, is_unchanged in ranks(refusal, how, "O2"):
        assert said is not None and REFUSED[how] in said and is_unchanged


@pytest.mark.parametrize("how", ["zero", "fsdp1", "mixed", "plain fsdp2"])
def test_the_same_is_taken_where_weights_stay_in_float32(ranks, how):
    assert [said for said, _ in ranks(refusal, how, "O4")] == [None, None]


def train_in_16_bits(rank, how):
    """One step at O3 of a model that was cast before it was sharded; or what is said if it was not."""
    said = []
    for is_cast in (False, True):
        net = make_net()
        net, _ = HOWS[how](net.to(torch.bfloat16) if is_cast else net, "O3")
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        try:
            amp.initialize(net, optimizer, opt_level="O3", cast_model_type="bfloat16", verbosity=0)
        except amp.ModelError as error:
            said.append(str(error))
            continue
        before = [full(parameter) for parameter in net.parameters()]
        backward(net(batch(0, 0)).float().square().mean(), optimizer)
        optimizer.step()
        after = [full(parameter) for parameter in net.parameters()]
        said.append(any(not torch.equal(one, other) for one, other in zip(before, after, strict=True)))
        said.append({parameter.dtype for parameter in net.parameters()})
        amp.reset()
    return said


@pytest.mark.parametrize("how", [pytest.param("fsdp2", marks=needs_fsdp2), "sharded first"])
def test_pure_16_bits_are_for_models_that_were_cast_before(ranks, how):
    for refused, is_changed, dtypes in ranks(train_in_16_bits, how):
        assert "cast the model to bfloat16 before it is sharded" in refused and is_changed
        assert dtypes == {torch.bfloat16}
