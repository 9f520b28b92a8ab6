"""`apex.parallel` on two processes computes what one process computes from the joined batch.

Guards: apex/parallel/*, apex/apex_C.
"""

import contextlib
import copy
import gc
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from reference import make_batches, make_model
from torch import nn

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
    "predivided, delayed": {"gradient_predivide_factor": 2.0, "delay_allreduce": True},
    "float32": {"allreduce_always_fp32": True},
    "float32, delayed": {"allreduce_always_fp32": True, "delay_allreduce": True},
    "no average": {"gradient_average": False, "gradient_predivide_factor": 4.0},
    "what only tunes": {"message_size": 1, "num_allreduce_streams": 2, "shared_param": True, "prof": True},
}


def backward_together(rank, options, dtype):
    model = make_plain(dtype)
    if rank == 1:
        nn.init.ones_(model.first.weight)  # the constructor takes rank 0's
    model.seen.fill_(rank)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrapped = DistributedDataParallel(model, **options)
    assert wrapped.module is model and all(name.startswith("module.") for name in wrapped.state_dict())
    found = []
    for _ in range(3):
        wrapped.zero_grad()
        wrapped(batch_of(rank, dtype=dtype)).pow(2).mean().backward()
        found.append(gradients_of(model))
    assert all(torch.equal(a, b) for later in found[1:] for a, b in zip(later, found[0], strict=True))
    assert model.seen.item() == rank  # buffers are nobody's business but this rank's
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
    divisor = 2 if options.get("gradient_average", True) else options["gradient_predivide_factor"]
    expected = [
        (a.double() + b.double()).div(divisor).to(dtype)
        for a, b in zip(*(local_gradients(rank, dtype=dtype) for rank in range(2)), strict=True)
    ]
    for each in found:
        assert_same(each, expected)
    if dtype is torch.bfloat16 and options.get("allreduce_always_fp32"):  # rounded once
        assert all(torch.equal(a, b) for a, b in zip(found[0], expected, strict=True))


def accumulate(rank, is_delayed, way):
    model = DistributedDataParallel(make_plain(), delay_allreduce=is_delayed)
    if way == "no_sync":
        with model.no_sync():
            with model.no_sync():
                pass
            model(batch_of(rank)).pow(2).mean().backward()
    else:
        model.disable_allreduce()
        model(batch_of(rank)).pow(2).mean().backward()
        model.enable_allreduce()
    alone = gradients_of(model)
    model(batch_of(rank)).pow(2).mean().backward()
    return alone, gradients_of(model)


@pytest.mark.parametrize(("is_delayed", "way"), [(False, "no_sync"), (True, "disable_allreduce")])
def test_without_allreduce_gradients_stay_local_and_the_next_reduction_takes_them_along(ranks, is_delayed, way):
    both = [local_gradients(rank) for rank in range(2)]
    for rank, (alone, together) in enumerate(ranks(accumulate, is_delayed, way)):
        assert_same(alone, both[rank])
        assert_same(together, [a + b for a, b in zip(*both, strict=True)])


def disable_and_raise(rank):
    model = DistributedDataParallel(make_plain(), delay_allreduce=True)
    with contextlib.suppress(KeyError), model.no_sync():
        raise KeyError
    output = model(batch_of(rank))
    with contextlib.suppress(ZeroDivisionError):
        (output.pow(2).mean() + Broken.apply(output.sum())).backward()
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
    expected = [a + b for a, b in zip(local_gradients(0), local_gradients(1), strict=True)]  # of two columns
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
    copy.deepcopy(model)(batch_of(rank)).pow(2).mean().backward()
    return alone, gradients_of(model)


def test_a_wrapper_that_is_gone_reduces_nothing_and_one_model_can_be_wrapped_again(ranks):
    both = [local_gradients(rank) for rank in range(2)]
    for rank, (alone, together) in enumerate(ranks(wrap_again)):
        assert_same(alone, both[rank])
        assert_same(together, [a + b for a, b in zip(*both, strict=True)])


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
        assert [tensor.flatten().tolist() for tensor in tensors["a"]] == [[0.5] * 2, [1.5] * 3]
        assert tensors["b"][0].item() == 0.5


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
    tensors = [torch.ones(2, 2), torch.ones(2).bfloat16(), torch.full((1,), 2.0)]
    by_type = distributed.split_by_type(tensors)
    assert by_type == {"torch.FloatTensor": [tensors[0], tensors[2]], "torch.BFloat16Tensor": [tensors[1]]}
    assert parallel.ReduceOp is dist.ReduceOp and distributed.flatten is apex_C.flatten
    assert distributed.unflatten is apex_C.unflatten


def test_the_launcher_is_torchrun(monkeypatch):
    from amp_patch.apex.parallel import multiproc

    seen = []
    monkeypatch.setattr(multiproc.run, "main", seen.append)
    multiproc.main(["script.py", "--epochs", "3"])
    count = max(torch.cuda.device_count(), 1)
    assert seen == [["--standalone", f"--nproc-per-node={count}", "script.py", "--epochs", "3"]]


# ---- SyncBatchNorm ---------------------------------------------------------------------------------------------------

INNER = {2: (), 3: (5,), 4: (3, 2)}


def make_inputs(dims, sizes, dtype=torch.float32, channel_last=False):
    """For each rank an input of 4 channels, off centre, and weights that make a scalar of the output."""
    generator = torch.Generator().manual_seed(dims)
    inputs = [torch.randn(size, 4, *INNER[dims], generator=generator) * 3 + 100 for size in sizes]
    factors = [torch.randn(x.shape, generator=generator) for x in inputs]
    result = [(x.to(dtype), y.to(dtype)) for x, y in zip(inputs, factors, strict=True)]
    return [(x.movedim(1, -1), y.movedim(1, -1)) for x, y in result] if channel_last else result


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


def normalize_together(rank, dims, sizes, options):
    x, factors = make_inputs(dims, sizes, torch.float64, options.get("channel_last", False))[rank]
    layer = SyncBatchNorm(4, **options).double()
    for _ in range(2):
        layer.zero_grad()
        result = run_layer(layer, x, factors)
    layer.eval()
    return *result, layer(x).detach()


CASES = {
    "3 dimensions": (3, (2, 2), {}),
    "unequal batches": (4, (1, 5), {}),
    "one value on a rank": (2, (1, 3), {}),
    "an empty batch": (4, (0, 3), {}),
    "channel last": (4, (1, 3), {"channel_last": True}),
    "cumulative average": (4, (1, 3), {"momentum": None}),
    "no running statistics": (4, (1, 3), {"track_running_stats": False}),
    "not affine": (4, (1, 3), {"affine": False}),
    "large eps": (4, (1, 3), {"eps": 10.0, "momentum": 0.4}),
}


@pytest.mark.parametrize(("dims", "sizes", "options"), CASES.values(), ids=CASES)
def test_ranks_normalize_as_one_process_does_the_joined_batch(ranks, dims, sizes, options):
    results = ranks(normalize_together, dims, sizes, options)
    channel_last = "channel_last" in options
    options = {} if channel_last else options
    inputs = make_inputs(dims, sizes, torch.float64)
    layer = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[dims](4, **options).double()
    for _ in range(2):
        layer.zero_grad()
        expected = run_layer(layer, torch.cat([x for x, _ in inputs]), torch.cat([y for _, y in inputs]))
    layer.eval()
    in_eval = layer(torch.cat([x for x, _ in inputs]))
    if not options.get("track_running_stats", True):  # then eval uses the statistics of this rank's batch
        in_eval = torch.cat([layer(x) if x.numel() else x for x, _ in inputs])
    tolerance = {"rtol": 1e-9, "atol": 1e-9}
    for index, wanted in ((0, expected[0]), (1, expected[1]), (4, in_eval)):
        joined = torch.cat([found[index].movedim(-1, 1) if channel_last else found[index] for found in results])
        torch.testing.assert_close(joined, wanted.detach(), **tolerance)
    for found in results:
        assert_same(found[3], expected[3], **tolerance)
    for index, wanted in enumerate(expected[2]):  # each rank has its own share, which data parallelism averages
        torch.testing.assert_close(sum(found[2][index] for found in results), wanted, **tolerance)


def activate_together(rank):
    x, factors = make_inputs(4, (1, 3), torch.float64, channel_last=True)[rank]
    z = torch.full_like(x, -0.25).requires_grad_()
    layer = SyncBatchNorm(4, channel_last=True, fuse_relu=True).double()
    output, gradient, *_ = run_layer(layer, x, factors, z)
    return output, gradient, z.grad


def test_z_is_added_and_then_comes_relu(ranks):
    inputs = make_inputs(4, (1, 3), torch.float64)
    x = torch.cat([x for x, _ in inputs])
    z = torch.full_like(x, -0.25).requires_grad_()
    layer = nn.BatchNorm2d(4).double()
    layer.forward = lambda x: F.relu(nn.BatchNorm2d.forward(layer, x) + z)
    output, gradient, *_ = run_layer(layer, x, torch.cat([y for _, y in inputs]))
    results = ranks(activate_together)
    for index, wanted in enumerate((output, gradient, z.grad)):
        torch.testing.assert_close(torch.cat([found[index].movedim(-1, 1) for found in results]), wanted)


def normalize_low(rank):
    layer = SyncBatchNorm(4)
    return layer(make_inputs(4, (2, 2))[rank][0].bfloat16()).detach(), layer.running_mean


def test_sixteen_bit_inputs_give_sixteen_bit_outputs_of_float32_statistics(ranks):
    layer = nn.BatchNorm2d(4)
    expected = layer(torch.cat([x for x, _ in make_inputs(4, (2, 2))]).bfloat16().float()).detach()
    results = ranks(normalize_low)
    torch.testing.assert_close(torch.cat([found for found, _ in results]), expected.bfloat16(), rtol=1e-2, atol=1e-2)
    for _, running_mean in results:
        torch.testing.assert_close(running_mean, layer.running_mean)


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


def train_digits_together(rank):
    model = convert_syncbn_model(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    wrapped = DistributedDataParallel(model)
    for images, targets in make_batches(3, size=16):
        mine = slice(0, 5) if rank == 0 else slice(5, 16)  # not the same number of images
        optimizer.zero_grad()
        (F.cross_entropy(wrapped(images[mine]), targets[mine], reduction="sum") * 2 / 16).backward()
        optimizer.step()
    return model.state_dict()


def test_a_converted_model_trains_as_one_process_on_the_joined_batch(ranks):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for images, targets in make_batches(3, size=16):
        optimizer.zero_grad()
        F.cross_entropy(model(images), targets).backward()
        optimizer.step()
    first, second = ranks(train_digits_together)
    torch.testing.assert_close(first, dict(model.state_dict()), rtol=1e-4, atol=1e-5)
    assert all(torch.equal(value, second[name]) for name, value in first.items())


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
    assert convert_syncbn_model(model, process_group="a group", channel_last=True) is model
    converted = [model.layers[1], model.layers[2][0], model.other]
    for layer in converted:
        assert type(layer) is SyncBatchNorm and layer.process_group == "a group" and layer.channel_last
    assert model.again is model.layers[1] and isinstance(model.layers[2][1], nn.InstanceNorm1d)
    assert [layer.training for layer in (*converted, model.layers[0], model)] == [False, True, True, False, True]
    assert not model.again.weight.requires_grad
    assert (model.other.momentum, model.other.track_running_stats, model.layers[2][0].affine) == (None, False, False)
    assert all(p is q for p, q in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True))
    assert model.state_dict().keys() == expected.state_dict().keys()
    x = torch.randn(6, 4)
    torch.testing.assert_close(model(x), expected(x))  # without a process group: BatchNorm
    amp.initialize(model, opt_level="O2", verbosity=0)
    assert (model.again.weight.dtype, model.layers[0].weight.dtype) == (torch.float32, torch.float16)


def test_a_layer_itself_is_returned_as_a_new_one_and_a_lazy_one_is_refused():
    layer = nn.BatchNorm2d(3)
    result = convert_syncbn_model(layer)
    assert type(result) is SyncBatchNorm and result.weight is layer.weight and result.running_mean is layer.running_mean
    with pytest.raises(amp.ModelError, match="run one forward pass"):
        convert_syncbn_model(nn.Sequential(nn.LazyBatchNorm1d()))


def test_converting_a_converted_model_keeps_the_options_of_its_layers():
    layer, x = SyncBatchNorm(5, channel_last=True, fuse_relu=True), torch.randn(3, 2, 5)
    expected = copy.deepcopy(layer)(x)
    torch.testing.assert_close(convert_syncbn_model(nn.Sequential(layer))(x), expected)


class BatchNormAct(nn.BatchNorm1d):
    def __init__(self, act):
        super().__init__(4)
        self.drop, self.act = nn.Identity(), act

    def forward(self, x):
        return self.act(self.drop(super().forward(x)))


def test_a_layer_whose_activation_would_be_lost_is_refused():
    with pytest.raises(amp.ModelError, match="also runs its act, .* timm.layers.convert_sync_batchnorm"):
        convert_syncbn_model(nn.Sequential(BatchNormAct(nn.ReLU())))
    assert type(convert_syncbn_model(BatchNormAct(nn.Identity()))) is SyncBatchNorm


def test_layers_can_be_copied_and_work_without_a_process_group():
    x = torch.randn(3, 2, 5)
    layer = SyncBatchNorm(5, channel_last=True, fuse_relu=True)
    expected = F.relu(nn.BatchNorm1d(5)(x.movedim(-1, 1)).movedim(1, -1))
    torch.testing.assert_close(copy.deepcopy(layer)(x), expected)
    assert layer(x.bfloat16()).dtype is torch.bfloat16
