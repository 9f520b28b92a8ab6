"""`apex.parallel` on two processes: what ranks compute together is what one process computes from the joined batch."""

import copy
import gc
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from reference import make_batches, make_model
from torch import nn
from training import backward

import amp_patch as amp
from amp_patch.apex import apex_C, parallel
from amp_patch.apex.parallel import (
    DistributedDataParallel,
    Reducer,
    SyncBatchNorm,
    convert_syncbn_model,
    create_syncbn_process_group,
    distributed,
)

pytestmark = pytest.mark.xdist_group("ranks")  # one pair for all


class Plain(nn.Module):
    """Two layers, the second of which may be left unused."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)
        self.register_buffer("seen", torch.zeros(1))
        self.to(dtype)

    def forward(self, x, uses_second=True):
        hidden = self.first(x).tanh()
        return self.second(hidden) if uses_second else hidden


def make_plain(dtype=torch.float32):
    torch.manual_seed(0)
    return Plain(dtype)


def batch_of(rank, size=4, dtype=torch.float32):
    return torch.randn(size, 3, generator=torch.Generator().manual_seed(rank + 1)).to(dtype)


def gradients_of(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def local_gradients(rank, **options):
    model = make_plain(options.pop("dtype", torch.float32))
    model(batch_of(rank, dtype=next(model.parameters()).dtype), **options).pow(2).mean().backward()
    return gradients_of(model)


def assert_same(found, expected, **tolerance):
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, **tolerance)


# ---- DistributedDataParallel -----------------------------------------------------------------------------------------

MODES = {
    "default": {},
    "delayed": {"delay_allreduce": True},
    "predivided": {"gradient_predivide_factor": 2.0},
    "predivided, delayed": {"gradient_predivide_factor": 2.0, "delay_allreduce": True},
    "float32": {"allreduce_always_fp32": True},
    "float32, delayed": {"allreduce_always_fp32": True, "delay_allreduce": True},
    "everything that only tunes": {
        "message_size": 1,
        "retain_allreduce_buffers": True,
        "num_allreduce_streams": 2,
        "allreduce_trigger_params": [],
        "prof": True,
        "gradient_average_split_factor": 1.0,
    },
}
both_modes = pytest.mark.parametrize("is_delayed", [False, True], ids=["overlapping", "delayed"])


def backward_together(rank, options, dtype=torch.float32):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = DistributedDataParallel(make_plain(dtype), **options)
    found = []
    for _ in range(3):
        model.zero_grad()
        model(batch_of(rank, dtype=dtype)).pow(2).mean().backward()
        found.append(gradients_of(model))
    assert all(torch.equal(a, b) for later in found[1:] for a, b in zip(later, found[0], strict=True))
    return found[0]


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        *((options, torch.float64) for options in MODES.values()),
        *((MODES[mode], torch.bfloat16) for mode in ("default", "float32", "float32, delayed")),
    ],
)
def test_gradients_are_the_mean_over_the_ranks(ranks, options, dtype):
    found = ranks(backward_together, options, dtype)
    expected = [
        (a.double() + b.double()).div(2).to(dtype)
        for a, b in zip(*(local_gradients(rank, dtype=dtype) for rank in range(2)), strict=True)
    ]
    for each in found:
        assert_same(each, expected)
    if dtype is torch.bfloat16 and options.get("allreduce_always_fp32"):  # rounded once
        assert all(torch.equal(a, b) for a, b in zip(found[0], expected, strict=True))


@pytest.mark.parametrize(("factor", "is_delayed"), [(1.0, True), (4.0, False)])
def test_without_averaging_gradients_are_the_sum_over_the_factor(ranks, factor, is_delayed):
    found = ranks(
        backward_together,
        {"gradient_average": False, "gradient_predivide_factor": factor, "delay_allreduce": is_delayed},
    )
    expected = [(a + b) / factor for a, b in zip(local_gradients(0), local_gradients(1), strict=True)]
    for each in found:
        assert_same(each, expected)


@pytest.mark.parametrize("dtype", [torch.float16], ids=["float16"])
@both_modes
def test_float32_sums_do_not_overflow_where_sixteen_bits_would(ranks, dtype, is_delayed):
    for in_float32 in (True, False):
        found = ranks(
            reduce_large,
            {"allreduce_always_fp32": in_float32, "delay_allreduce": is_delayed, "gradient_predivide_factor": 0.5},
        )
        assert [each.isfinite().all().item() for each in found] == [in_float32] * 2


def reduce_large(rank, options):
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False).half(), **options)
    (model(torch.full((1, 1), 30000.0).half()).float()).sum().backward()
    return gradients_of(model)[0]


def train_together(rank, options, steps):
    model = make_plain()
    if rank == 1:
        nn.init.ones_(model.first.weight)  # the constructor takes rank 0's
    model.seen.fill_(rank)
    wrapped = DistributedDataParallel(model, **options)
    assert wrapped.module is model and all(name.startswith("module.") for name in wrapped.state_dict())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        wrapped(batch_of(10 * step + rank)).pow(2).mean().backward()
        optimizer.step()
    assert model.seen.item() == rank  # buffers are nobody's business but this rank's
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("options", [MODES["default"], MODES["predivided, delayed"]])
def test_training_is_that_of_one_process_on_the_joined_batch(ranks, options):
    model = make_plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(5):
        optimizer.zero_grad()
        model(torch.cat([batch_of(10 * step), batch_of(10 * step + 1)])).pow(2).mean().backward()
        optimizer.step()
    first, second = ranks(train_together, options, 5)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert_same(first, [p.detach() for p in model.parameters()])


def accumulate(rank, is_delayed, way):
    model = DistributedDataParallel(make_plain(), delay_allreduce=is_delayed)
    found = []
    for off in (True, False):
        if way == "no_sync" and off:
            with model.no_sync():
                with model.no_sync():
                    pass
                model(batch_of(rank)).pow(2).mean().backward()
        else:
            if off:
                model.disable_allreduce()
            model(batch_of(rank)).pow(2).mean().backward()
            model.enable_allreduce()
        found.append(gradients_of(model))
    return found


@pytest.mark.parametrize(("is_delayed", "way"), [(False, "no_sync"), (True, "disable_allreduce")])
def test_without_allreduce_gradients_stay_local_and_the_next_reduction_takes_them_along(ranks, is_delayed, way):
    both = [local_gradients(rank) for rank in range(2)]
    for rank, (alone, together) in enumerate(ranks(accumulate, is_delayed, way)):
        assert_same(alone, both[rank])
        assert_same(together, [a + b for a, b in zip(*both, strict=True)])


def disable_and_raise(rank):
    model = DistributedDataParallel(make_plain(), delay_allreduce=True)
    for _ in range(2):
        try:
            with model.no_sync():
                raise KeyError
        except KeyError:
            pass
    output = model(batch_of(rank))
    try:
        (output.pow(2).mean() + Broken.apply(output.sum())).backward()
    except ZeroDivisionError:
        model.zero_grad()
    model(batch_of(rank)).pow(2).mean().backward()
    return gradients_of(model)


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        raise ZeroDivisionError


def test_an_exception_on_the_way_leaves_later_passes_reduced(ranks):
    expected = [(a + b) / 2 for a, b in zip(local_gradients(0), local_gradients(1), strict=True)]
    for found in ranks(disable_and_raise):
        assert_same(found, expected)


def use_some(rank, used_by):
    model = DistributedDataParallel(make_plain(), delay_allreduce=True)
    for _ in range(2):
        model.zero_grad()
        model(batch_of(rank), uses_second=rank in used_by).pow(2).mean().backward()
    return gradients_of(model)


@pytest.mark.parametrize("used_by", [(), (0,), (1,)], ids=["no rank", "rank 0", "rank 1"])
def test_delayed_a_parameter_may_go_unused(ranks, used_by):
    """On all ranks: no gradient. On some: as if it were zero there."""
    both = [local_gradients(rank, uses_second=rank in used_by) for rank in range(2)]
    expected = []
    for a, b in zip(*both, strict=True):
        present = [g for g in (a, b) if g is not None]
        expected.append(sum(present) / 2 if present else None)
    for found in ranks(use_some, used_by):
        assert_same(found, expected)


def backward_twice(rank):
    model = DistributedDataParallel(make_plain(), delay_allreduce=True)
    output = model(batch_of(rank))
    output[:, 0].pow(2).mean().backward(retain_graph=True)
    output[:, 1].pow(2).mean().backward()
    return gradients_of(model)


def test_delayed_there_may_be_several_backward_passes_after_one_forward(ranks):
    expected = [
        a + b for a, b in zip(local_gradients(0), local_gradients(1), strict=True)
    ]  # twice the mean over both columns
    for found in ranks(backward_twice):
        assert_same(found, expected)


def wrap_again(rank):
    model = make_plain()
    wrapped = DistributedDataParallel(model, delay_allreduce=True)
    wrapped(batch_of(rank)).sum().backward()
    del wrapped
    gc.collect()
    model.zero_grad()
    model(batch_of(rank)).pow(2).mean().backward()
    alone = gradients_of(model)
    wrapped = DistributedDataParallel(model, delay_allreduce=True, gradient_average=False)
    model.zero_grad()
    wrapped(batch_of(rank)).pow(2).mean().backward()
    copied = copy.deepcopy(model)
    copied.zero_grad()
    copied(batch_of(rank)).pow(2).mean().backward()
    return alone, gradients_of(model)


def test_a_wrapper_that_is_gone_reduces_nothing_and_one_model_can_be_wrapped_again(ranks):
    both = [local_gradients(rank) for rank in range(2)]
    for rank, (alone, together) in enumerate(ranks(wrap_again)):
        assert_same(alone, both[rank])
        assert_same(together, [a + b for a, b in zip(*both, strict=True)])


BAD = {
    "shared_param": ({"shared_param": False}, "shared_param"),
    "streams": ({"num_allreduce_streams": 2, "delay_allreduce": True}, "num_allreduce_streams=2"),
    "triggers": ({"allreduce_trigger_params": [], "delay_allreduce": True}, "allreduce_trigger_params"),
}


@pytest.mark.parametrize(("options", "message"), BAD.values(), ids=BAD)
def test_arguments_that_contradict_each_other_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        DistributedDataParallel(make_plain(), **options)


def train_with_amp(rank, level, options, accumulates):
    results = []
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=8.0, verbosity=0)
    wrapped = DistributedDataParallel(model, **options)
    parts = make_batches(8, size=16)
    for step in range(2):
        optimizer.zero_grad()
        for part in range(2):
            images, targets = parts[4 * step + 2 * part + rank]
            if accumulates and part == 0:
                wrapped.disable_allreduce()
            loss = F.cross_entropy(wrapped(images), targets) / 2
            backward(loss, optimizer, delay_unscale=accumulates and part == 0)
            wrapped.enable_allreduce()
        results.append([p.grad.clone() for p in amp.master_params(optimizer)])
        optimizer.step()
    parameters = [p.detach().clone() for p in amp.master_params(optimizer)]
    amp.reset()
    return results, parameters


@pytest.mark.parametrize(
    ("level", "is_delayed", "accumulates"),
    [("O0", False, False), ("O2", False, True), ("O2", True, False)],
)
def test_under_amp_all_ranks_take_the_same_steps(ranks, level, is_delayed, accumulates):
    (first, first_parameters), (second, second_parameters) = ranks(
        train_with_amp, level, {"delay_allreduce": is_delayed}, accumulates
    )
    for a, b in zip((*first, first_parameters), (*second, second_parameters), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    reference = make_model()
    parts = make_batches(8, size=16)
    for part in range(4):
        reference_loss = F.cross_entropy(reference(parts[part][0]), parts[part][1]) / 4
        reference_loss.backward()
    for found, parameter in zip(first[0], reference.parameters(), strict=True):
        assert (found - parameter.grad).norm() < 0.1 * parameter.grad.norm() + 1e-3  # 16 bits


# ---- Reducer and flattened calls -------------------------------------------------------------------------------------


def reduce_by_hand(rank):
    model = make_plain()
    if rank == 1:
        nn.init.ones_(model.second.weight)
    reducer = Reducer(model)
    model(batch_of(rank), uses_second=False).pow(2).mean().backward()
    reducer.reduce()
    tensors = {
        "a": [torch.full((2,), float(rank)), torch.full((1, 3), rank + 1.0).double()],
        "b": (torch.full((), rank).bfloat16(),),
        "c": 7,
    }
    Reducer(tensors).reduce()
    return gradients_of(model), model.second.weight.detach(), tensors


def test_a_reducer_averages_when_told_to(ranks):
    expected = local_gradients(0, uses_second=False), local_gradients(1, uses_second=False)
    for gradients, weight, tensors in ranks(reduce_by_hand):
        assert_same(gradients, [None if a is None else (a + b) / 2 for a, b in zip(*expected, strict=True)])
        assert torch.equal(weight, make_plain().second.weight)
        assert (
            tensors["a"][0].tolist() == [0.5, 0.5]
            and tensors["a"][1].tolist() == [[1.5, 1.5, 1.5]]
            and tensors["b"][0].item() == 0.5
        )


def broadcast_flat(rank):
    tensors = [torch.full((2, 2), float(rank)), torch.full((3,), rank + 5), torch.full((1,), rank + 0.5)]
    distributed.flat_dist_call(tensors, dist.broadcast, (1,))
    bucket = [torch.full((2,), rank + 1.0), torch.full((2, 1), rank + 2.0)]
    distributed.apply_flat_dist_call(bucket, dist.all_reduce)
    return tensors, bucket


def test_calls_on_flattened_tensors(ranks):
    for tensors, bucket in ranks(broadcast_flat):
        assert [tensor.flatten().tolist() for tensor in tensors] == [[1.0] * 4, [6] * 3, [1.5]]
        assert [tensor.flatten().tolist() for tensor in bucket] == [[1.5] * 2, [2.5] * 2]


def test_splitting_by_type():
    tensors = [
        torch.ones(2, 2),
        torch.zeros(3).double(),
        torch.ones(1).half(),
        torch.ones(2).bfloat16(),
        torch.full((1,), 2.0),
    ]
    by_type = distributed.split_by_type(tensors)
    assert list(by_type) == ["torch.FloatTensor", "torch.DoubleTensor", "torch.HalfTensor", "torch.BFloat16Tensor"]
    assert by_type["torch.FloatTensor"] == [tensors[0], tensors[4]]
    assert parallel.ReduceOp is dist.ReduceOp and distributed.flatten is apex_C.flatten
    assert distributed.unflatten is apex_C.unflatten


def test_the_launcher_is_torchrun(monkeypatch):
    from amp_patch.apex.parallel import multiproc

    seen = []
    monkeypatch.setattr(multiproc.run, "main", seen.append)
    multiproc.main(["script.py", "--epochs", "3"])
    assert seen == [
        ["--standalone", f"--nproc-per-node={max(torch.cuda.device_count(), 1)}", "script.py", "--epochs", "3"]
    ]


# ---- SyncBatchNorm ---------------------------------------------------------------------------------------------------

INNER = {2: (), 3: (5,), 4: (3, 2), 5: (2, 1, 3)}


def make_inputs(dims, sizes, dtype=torch.float32, channel_last=False):
    """For each rank an input of 4 channels, off centre, and weights that make a scalar of the output."""
    generator = torch.Generator().manual_seed(dims)
    inputs = [torch.randn(size, 4, *INNER[dims], generator=generator) * 3 + 100 for size in sizes]
    factors = [torch.randn(x.shape, generator=generator) for x in inputs]
    result = [(x.to(dtype), y.to(dtype)) for x, y in zip(inputs, factors, strict=True)]
    return (
        [(x.movedim(1, -1).contiguous(), y.movedim(1, -1).contiguous()) for x, y in result]
        if channel_last and dims > 2
        else result
    )


def run_layer(layer, x, factors, z=None):
    if layer.affine:
        with torch.no_grad():
            layer.weight.copy_(torch.tensor([1.0, -2.0, 0.5, 3.0]))
            layer.bias.copy_(torch.tensor([0.0, 1.0, -1.0, 0.5]))
    x = x.detach().requires_grad_()
    output = layer(x) if z is None else layer(x, z)
    (output * factors).sum().backward()
    moved = [buffer for _, buffer in sorted(layer.named_buffers())]
    return output.detach(), x.grad, [p.grad for p in layer.parameters()], moved


def normalize_together(rank, dims, sizes, options, passes=1):
    x, factors = make_inputs(dims, sizes, torch.float64, options.get("channel_last", False))[rank]
    layer = SyncBatchNorm(4, **options).double()
    for _ in range(passes):
        layer.zero_grad()
        result = run_layer(layer, x, factors)
    layer.eval()
    return *result, layer(x).detach()


CASES = {
    "2 dimensions": (2, (3, 3), {}),
    "3 dimensions": (3, (2, 2), {}),
    "4 dimensions": (4, (2, 2), {}),
    "5 dimensions": (5, (2, 2), {}),
    "unequal batches": (4, (1, 5), {}),
    "one value on a rank": (2, (1, 3), {}),
    "an empty batch": (4, (0, 3), {}),
    "channel last": (4, (1, 3), {"channel_last": True}),
    "channel last, 2 dimensions": (2, (1, 3), {"channel_last": True}),
    "cumulative average": (4, (1, 3), {"momentum": None}),
    "no running statistics": (4, (1, 3), {"track_running_stats": False}),
    "not affine": (4, (1, 3), {"affine": False}),
    "large eps": (4, (1, 3), {"eps": 10.0, "momentum": 0.4}),
}


@pytest.mark.parametrize(("dims", "sizes", "options"), CASES.values(), ids=CASES)
def test_ranks_normalize_as_one_process_does_the_joined_batch(ranks, dims, sizes, options):
    options = dict(options)
    results = ranks(normalize_together, dims, sizes, options, 2)
    channel_last = options.pop("channel_last", False)
    inputs = make_inputs(dims, sizes, torch.float64)
    layer = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[dims](4, **options).double()
    for _ in range(2):
        layer.zero_grad()
        expected = run_layer(layer, torch.cat([x for x, _ in inputs]), torch.cat([y for _, y in inputs]))
    layer.eval()
    in_eval = layer(torch.cat([x for x, _ in inputs]))
    if not options.get("track_running_stats", True):  # then eval uses the statistics of this rank's batch
        in_eval = torch.cat([layer(x) if x.numel() else x for x, _ in inputs])
    tolerance = {"rtol": 1e-9, "atol": 1e-9}
    outputs, gradients = (
        zip(*(expected[index].split(list(sizes)) for index in (0, 1)), strict=True),
        in_eval.split(list(sizes)),
    )
    for rank, (found, (output, gradient), evaluated) in enumerate(zip(results, outputs, gradients, strict=True)):
        assert found[0].dtype is torch.float64 is found[1].dtype
        ways = (lambda t: t.movedim(1, -1)) if channel_last and dims > 2 else (lambda t: t)
        for got, wanted in ((found[0], output), (found[1], gradient), (found[4], evaluated)):
            torch.testing.assert_close(
                got, ways(wanted).detach(), **tolerance, msg=lambda text, rank=rank: f"rank {rank}: {text}"
            )
        assert_same(found[3], expected[3], **tolerance)
    for index, wanted in enumerate(expected[2]):  # each rank has its own share, which data parallelism averages
        torch.testing.assert_close(sum(found[2][index] for found in results), wanted, **tolerance)


def activate_together(rank, channel_last, fuse_relu, with_z):
    x, factors = make_inputs(4, (1, 3), torch.float32, channel_last)[rank]
    z = torch.full_like(x, -0.25).requires_grad_() if with_z else None
    layer = SyncBatchNorm(4, channel_last=channel_last, fuse_relu=fuse_relu)
    output, gradient, *_ = run_layer(layer, x, factors, z)
    return output, gradient, None if z is None else z.grad


@pytest.mark.parametrize(
    ("channel_last", "fuse_relu", "with_z"),
    [(False, False, True), (False, True, False), (True, True, True), (True, False, False)],
)
def test_z_is_added_and_then_comes_relu(ranks, channel_last, fuse_relu, with_z):
    inputs = make_inputs(4, (1, 3))
    x = torch.cat([x for x, _ in inputs]).requires_grad_()
    z = torch.full_like(x, -0.25).requires_grad_()
    layer = nn.BatchNorm2d(4)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([1.0, -2.0, 0.5, 3.0]))
        layer.bias.copy_(torch.tensor([0.0, 1.0, -1.0, 0.5]))
    expected = layer(x) + z if with_z else layer(x)
    expected = F.relu(expected) if fuse_relu else expected
    (expected * torch.cat([y for _, y in inputs])).sum().backward()
    back = (lambda t: t.movedim(-1, 1)) if channel_last else (lambda t: t)
    results = ranks(activate_together, channel_last, fuse_relu, with_z)
    torch.testing.assert_close(
        torch.cat([back(found[0]) for found in results]), expected.detach(), rtol=1e-4, atol=3e-4
    )
    torch.testing.assert_close(torch.cat([back(found[1]) for found in results]), x.grad, rtol=1e-3, atol=1e-3)
    if with_z:
        torch.testing.assert_close(torch.cat([back(found[2]) for found in results]), z.grad, rtol=1e-4, atol=3e-4)


def normalize_low(rank, dtype):
    layer = SyncBatchNorm(4)
    output = layer(make_inputs(4, (2, 2))[rank][0].to(dtype))
    return output.detach(), layer.running_mean.dtype


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_sixteen_bit_inputs_give_sixteen_bit_outputs_of_float32_statistics(ranks, dtype):
    inputs = torch.cat([x for x, _ in make_inputs(4, (2, 2))]).to(dtype)
    expected = nn.BatchNorm2d(4)(inputs.float())
    results = ranks(normalize_low, dtype)
    assert all(found.dtype is dtype and running is torch.float32 for found, running in results)
    torch.testing.assert_close(
        torch.cat([found for found, _ in results]).float(), expected.detach(), rtol=1e-2, atol=1e-2
    )


def penalize_together(rank):
    x = make_inputs(4, (1, 3), torch.float64)[rank][0].requires_grad_()
    layer = SyncBatchNorm(4).double()
    (gradient,) = torch.autograd.grad(layer(x).pow(3).sum(), x, create_graph=True)
    gradient.pow(2).sum().backward()
    return x.grad


def test_second_derivatives_are_those_of_the_joined_batch(ranks):
    x = torch.cat([x for x, _ in make_inputs(4, (1, 3), torch.float64)]).requires_grad_()
    (gradient,) = torch.autograd.grad(nn.BatchNorm2d(4).double()(x).pow(3).sum(), x, create_graph=True)
    gradient.pow(2).sum().backward()
    torch.testing.assert_close(torch.cat(ranks(penalize_together)), x.grad, rtol=1e-6, atol=1e-6)


def raise_together(rank):
    messages = []
    for x in (torch.ones(1 - rank, 4), torch.ones(2, 3), torch.ones(4)):
        try:
            SyncBatchNorm(4)(x)
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_inputs_that_cannot_be_normalized_are_refused_on_every_rank(ranks):
    for messages in ranks(raise_together):
        assert len(messages) == 3
        assert "more than 1 value per channel" in messages[0] and "not 1 on all ranks" in messages[0]
        assert "4 channels, not 3" in messages[1] and "at least 2D" in messages[2]


def group_together(rank):
    found = {}
    for size in (0, 1, 2):
        group = create_syncbn_process_group(size)
        layer = SyncBatchNorm(4, process_group=group)
        layer(make_inputs(2, (3, 3))[rank][0])
        found[size] = (None if group is None else dist.get_world_size(group), layer.running_mean)
    for size in (3, -1):
        try:
            create_syncbn_process_group(size)
        except ValueError as error:
            found[size] = str(error)
    return found


def test_process_groups(ranks):
    inputs = [x for x, _ in make_inputs(2, (3, 3))]
    for rank, found in enumerate(ranks(group_together)):
        assert [found[size][0] for size in (0, 1, 2)] == [None, 1, 2]
        for size, batch in ((0, torch.cat(inputs)), (1, inputs[rank]), (2, torch.cat(inputs))):
            torch.testing.assert_close(found[size][1], 0.1 * batch.mean(0))
        assert "group_size=3 must divide the number of ranks, 2" in found[3] and "group_size=-1" in found[-1]


def train_digits_together(rank, level):
    model = convert_syncbn_model(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if level is not None:
        amp.initialize(model, optimizer, opt_level=level, loss_scale=128.0, verbosity=0)  # no step is skipped
        assert model.bn1.weight.dtype is torch.float32
    wrapped = DistributedDataParallel(model)
    losses = []
    for images, targets in make_batches(3, size=16):
        mine = slice(0, 5) if rank == 0 else slice(5, 16)  # not the same number of images
        optimizer.zero_grad()
        loss = F.cross_entropy(wrapped(images[mine]), targets[mine], reduction="sum") * 2 / 16
        if level is None:
            loss.backward()
        else:
            backward(loss, optimizer)
        optimizer.step()
        losses.append(loss.detach() / 2)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    amp.reset()
    return torch.stack(losses), state


@pytest.mark.parametrize("level", [None, "O2"])
def test_a_converted_model_trains_as_one_process_on_the_joined_batch(ranks, level):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for images, targets in make_batches(3, size=16):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    (first, first_state), (second, second_state) = ranks(train_digits_together, level)
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if level is None else {"rtol": 5e-2, "atol": 5e-2}
    torch.testing.assert_close(first + second, torch.stack(losses), **tolerance)
    assert all(torch.equal(value, second_state[name]) for name, value in first_state.items())
    assert set(first_state) == set(model.state_dict())


# ---- converting ------------------------------------------------------------------------------------------------------


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        shared = nn.BatchNorm1d(4)
        self.layers = nn.Sequential(
            nn.Linear(4, 4), shared, nn.ModuleList([nn.BatchNorm1d(4, affine=False), nn.InstanceNorm1d(4)])
        )
        self.again = shared
        self.nothing = None
        self.register_module("empty", None)
        self.other = nn.SyncBatchNorm(4, momentum=None, track_running_stats=False)

    def forward(self, x):
        return self.again(self.layers[2][0](self.layers[1](self.layers[0](x))))


def test_converting_keeps_everything_but_the_class():
    model = Nested()
    model.again.eval()
    model.again.weight.requires_grad_(False)
    model.layers[0].eval()
    expected = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    result = convert_syncbn_model(model, process_group="a group", channel_last=True)
    assert result is model
    converted = [model.layers[1], model.layers[2][0], model.other]
    assert all(
        type(layer) is SyncBatchNorm and layer.process_group == "a group" and layer.channel_last for layer in converted
    )
    assert model.again is model.layers[1] and isinstance(model.layers[2][1], nn.InstanceNorm1d)
    assert (
        [layer.training for layer in converted] == [False, True, True]
        and not model.layers[0].training
        and model.training
    )
    assert not model.again.weight.requires_grad
    assert (model.other.momentum, model.other.track_running_stats, model.layers[2][0].affine) == (None, False, False)
    assert [p is q for p, q in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True)] == [
        True
    ] * len(list(model.parameters()))
    assert model.state_dict().keys() == expected.state_dict().keys()
    x = torch.randn(6, 4)
    torch.testing.assert_close(model(x), expected(x))  # without a process group: BatchNorm


def test_a_layer_itself_is_returned_as_a_new_one_and_a_lazy_one_is_refused():
    layer = nn.BatchNorm2d(3)
    result = convert_syncbn_model(layer)
    assert type(result) is SyncBatchNorm and result.weight is layer.weight and result.running_mean is layer.running_mean
    with pytest.raises(amp.ModelError, match="run one forward pass"):
        convert_syncbn_model(nn.Sequential(nn.LazyBatchNorm1d()))


def test_layers_can_be_copied_and_work_without_a_process_group():
    x = torch.randn(3, 2, 5)
    layer = SyncBatchNorm(5, channel_last=True, fuse_relu=True)
    expected = F.relu(nn.BatchNorm1d(5)(x.movedim(-1, 1)).movedim(1, -1))
    torch.testing.assert_close(copy.deepcopy(layer)(x), expected)
    assert layer(x.bfloat16()).dtype is torch.bfloat16
