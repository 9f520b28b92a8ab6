"""Training in 16 bits by hand, with `apex.fp16_utils` and `FP16_Optimizer`, is training in float32, up to rounding.

Guards: apex/fp16_utils/*.
"""

import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from reference import make_batches, make_model
from torch import nn
from training import take_step

import amp_patch as amp
from amp_patch.apex import fp16_utils
from amp_patch.apex.contrib.clip_grad import clip_grad_norm_
from amp_patch.apex.contrib.optimizers import FP16_Optimizer as ContribFP16_Optimizer
from amp_patch.apex.fp16_utils import FP16_Optimizer
from amp_patch.apex.optimizers import FusedAdam

NAMES = (
    "BN_convert_float network_to_half prep_param_lists model_grads_to_master_grads master_params_to_model_params tofp16"
    " to_python_float clip_grad_norm convert_module convert_network FP16_Optimizer LossScaler"
    " DynamicLossScaler fp16util fp16_optimizer loss_scaler"
)


def test_a_star_import_gives_the_names_of_apex():
    names = {}
    exec("from amp_patch.apex.fp16_utils import *", names)
    assert set(NAMES.split()) == set(fp16_utils.__all__) <= set(names)


# ---- casting ---------------------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4, affine=False))
        self.rnn = nn.LSTM(4, 2)
        self.own = nn.Parameter(torch.ones(2))
        self.register_buffer("table", torch.ones(2))
        self.register_buffer("count", torch.ones(2, dtype=torch.int64))

    def forward(self, x):
        return self.rnn(self.inner(x))[0]


def dtypes_of(module):
    return {name: tensor.dtype for name, tensor in (*module.named_parameters(), *module.named_buffers())}


@pytest.mark.parametrize("way", ["network_to_half", "convert_network"])
def test_networks_are_cast_but_for_affine_batchnorm(way):
    model = Mixed()
    model.own.grad = torch.ones(2)
    parameters = list(model.parameters())
    before = dtypes_of(model)
    if way == "network_to_half":
        result = fp16_utils.network_to_half(model)
        assert result[1] is model
        assert result(torch.randn(5, 3)).dtype is torch.float16
    else:
        assert fp16_utils.convert_network(model, torch.float16) is model
    for name, dtype in dtypes_of(model).items():
        is_kept = name.startswith("inner.1") or not before[name].is_floating_point
        assert dtype is (before[name] if is_kept else torch.float16), name
    assert model.own.grad.dtype is torch.float16
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))


def test_convert_module_leaves_the_children():
    model = Mixed()
    fp16_utils.convert_module(model, torch.bfloat16)
    low = [name for name, dtype in dtypes_of(model).items() if dtype is torch.bfloat16]
    assert low == ["own", "table"]


@pytest.mark.parametrize("is_flat", [False, True], ids=["list", "flat"])
def test_masters_by_hand_take_gradients_and_give_values(is_flat):
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1)).half()
    model[0].bias.requires_grad_(False)
    params, masters = fp16_utils.prep_param_lists(model, flat_master=is_flat)
    assert [p.shape for p in params] == [(8, 4), (1, 8), (1,)]
    assert all(master.dtype is torch.float32 and master.is_leaf for master in masters)

    def split(tensors):
        return [part.view_as(p) for part, p in zip(tensors[0].split([32, 8, 1]), params, strict=True)]

    parts = split if is_flat else lambda tensors: tensors
    assert all(map(torch.equal, parts([m.detach() for m in masters]), [p.detach().float() for p in params]))
    for scale in (1, 3):  # without gradients of the masters, and over those that they have
        for p in params:
            p.grad = torch.full_like(p, scale)
        fp16_utils.model_grads_to_master_grads(params, masters, flat_master=is_flat)
        assert all((grad == scale).all() for grad in parts([m.grad for m in masters]))
    torch.optim.SGD(masters, lr=0.1).step()
    fp16_utils.master_params_to_model_params(params, masters, flat_master=is_flat)
    assert all(map(torch.equal, params, [part.half() for part in parts([m.detach() for m in masters])]))
    params[0].grad = None
    fp16_utils.model_grads_to_master_grads(params, masters, flat_master=is_flat)
    assert parts([m.grad for m in masters])[0].count_nonzero() == 0 if is_flat else masters[0].grad is None


def test_a_flat_master_needs_one_dtype():
    with pytest.raises(RuntimeError, match=r"torch.float16, torch.float32"):
        fp16_utils.prep_param_lists(nn.Sequential(nn.Linear(2, 2).half(), nn.Linear(2, 2)), flat_master=True)


def test_small_things():
    assert fp16_utils.to_python_float(torch.tensor(2.5)) == 2.5 and fp16_utils.to_python_float([3]) == 3.0
    for clip in (fp16_utils.clip_grad_norm, clip_grad_norm_):
        parameter = nn.Parameter(torch.zeros(2))
        parameter.grad = torch.tensor([3.0, 4.0])
        assert clip([parameter], 1.0).item() == 5.0
        torch.testing.assert_close(parameter.grad, torch.tensor([0.6, 0.8]))
    parameter.grad = torch.tensor([float("nan"), 0.0])
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_(parameter, 1.0, error_if_nonfinite=True)


# ---- the scalers of old ----------------------------------------------------------------------------------------------


def test_the_dynamic_scaler_follows_the_sequence_of_apex():
    scaler = fp16_utils.DynamicLossScaler(init_scale=4, scale_window=3)
    scales = []
    for overflow in [False] * 4 + [True] + [False] * 4:
        scaler.update_scale(overflow)
        scales.append(scaler.loss_scale)
    assert scales == [4, 4, 8, 8, 4, 4, 4, 8, 8]
    for _ in range(10):
        scaler.update_scale(True)
    assert scaler.loss_scale == 1.0


@pytest.mark.parametrize("value", [1e38, float("inf"), float("nan")])
def test_an_overflow_is_an_element_that_is_not_finite(value):
    params = [nn.Parameter(torch.zeros(8)), nn.Parameter(torch.zeros(2))]
    params[0].grad = torch.full((8,), value)  # the sum of finite ones would overflow
    assert fp16_utils.DynamicLossScaler().has_overflow(params) is (value != 1e38)
    assert fp16_utils.LossScaler().has_overflow(params) is False


def test_sparse_gradients_are_checked():
    table = nn.Embedding(3, 2, sparse=True)
    for factor in (1.0, float("inf")):
        table.weight.grad = None
        (table(torch.tensor([0, 0])) * factor).sum().backward()
        assert fp16_utils.DynamicLossScaler().has_overflow([table.weight]) is (factor != 1.0)


def test_a_static_scaler_scales_losses_and_stays():
    parameter = nn.Parameter(torch.ones(2))
    scaler = fp16_utils.LossScaler(8.0)
    scaler.backward(parameter.sum())
    scaler.update_scale(True)
    assert parameter.grad.tolist() == [8.0, 8.0] and scaler.loss_scale == 8.0


# ---- FP16_Optimizer --------------------------------------------------------------------------------------------------


def low_model(seed=0):
    """The small network in bfloat16 (float16 is slow here) with float32 BatchNorm."""
    return fp16_utils.convert_network(make_model(seed), torch.bfloat16)


def make(make_inner=lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9), cls=FP16_Optimizer, **options):
    model = low_model()
    return model, cls(make_inner(model.parameters()), verbose=False, **options)


def loss_of(model, batch):
    return F.cross_entropy(model(batch[0].bfloat16()).float(), batch[1])


def train(model, optimizer, batches):
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        optimizer.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def masters_of(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


INNERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "FusedAdam": lambda params: FusedAdam(params, lr=0.01),
}
SCALES = {"static": {"static_loss_scale": 128.0}, "dynamic": {"dynamic_loss_scale": True}}


@pytest.mark.parametrize(
    ("inner", "scale"), [(INNERS["SGD"], SCALES["static"]), (INNERS["FusedAdam"], SCALES["dynamic"])]
)
def test_training_is_that_of_amp_at_o5(inner, scale):
    batches = make_batches(5)
    model, optimizer = make(inner, **scale)
    assert all(master.dtype is torch.float32 for master in masters_of(optimizer))
    losses = train(model, optimizer, batches)
    reference = make_model()
    with torch.no_grad():  # masters that start from the rounded weights
        for parameter in reference.parameters():
            parameter.copy_(parameter.bfloat16())
    steps = inner(reference.parameters())
    amp.initialize(reference, steps, opt_level="O5", compute="native", verbosity=0)
    expected = []
    for batch in batches:
        loss = F.cross_entropy(reference(batch[0]), batch[1])
        take_step(loss, steps)
        expected.append(loss.item())
    assert losses == expected
    for parameter, twin in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(parameter, twin)


def test_masters_have_the_exact_values_and_the_state_of_before():
    model = low_model()
    inner = torch.optim.Adam(model.parameters(), lr=0.01)
    loss_of(model, make_batches(1)[0]).backward()
    inner.step()
    state = {id(p): {name: value.clone() for name, value in inner.state[p].items()} for p in model.parameters()}
    model.fc.bias.requires_grad_(False)
    optimizer = FP16_Optimizer(inner, verbose=False)
    for parameter, master in zip(model.parameters(), masters_of(optimizer), strict=True):
        if parameter is model.fc.bias:
            assert master is parameter
            continue
        assert torch.equal(parameter.float(), master) and (master is parameter) is (parameter.dtype is torch.float32)
        assert torch.equal(inner.state[master]["exp_avg"], state[id(parameter)]["exp_avg"].float())
        assert inner.state[master]["exp_avg"].dtype is torch.float32


def test_gradients_hold_what_apex_put_there():
    batch = make_batches(1)[0]
    model, optimizer = make(static_loss_scale=16.0)
    twin = low_model()
    loss_of(twin, batch).backward()
    optimizer.backward(loss_of(model, batch))
    for name, parameter in model.named_parameters():
        expected = dict(twin.named_parameters())[name].grad
        is_low = parameter.dtype is torch.bfloat16
        torch.testing.assert_close(parameter.grad, expected * (16.0 if is_low else 1.0), rtol=1e-2, atol=1e-5)
    assert all(master.grad.dtype is torch.float32 for master in masters_of(optimizer))
    optimizer.zero_grad()
    assert all(p.grad.count_nonzero() == 0 for p in model.parameters())
    optimizer.zero_grad(set_grads_to_None=True)
    assert all(p.grad is None for p in (*model.parameters(), *masters_of(optimizer)))


@pytest.mark.parametrize("updates_each", [False, True])
@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_gradients_of_several_passes_add_up(scale, updates_each):
    batches = make_batches(3)
    model, optimizer = make(**scale)
    twin = low_model()
    for index, batch in enumerate(batches):
        loss_of(twin, batch).backward()
        optimizer.backward(loss_of(model, batch), update_master_grads=updates_each)
        if index == 0:
            optimizer.loss_scale = optimizer.loss_scale * 4
    optimizer.update_master_grads()
    optimizer.update_master_grads()
    for parameter, master in zip(twin.parameters(), masters_of(optimizer), strict=True):
        torch.testing.assert_close(master.grad, parameter.grad.float(), rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("way", ["optimizer", "model"])
def test_an_abandoned_pass_is_forgotten_however_gradients_are_zeroed(way):
    batches = make_batches(2)
    found = []
    for abandons in (False, True):
        model, optimizer = make(dynamic_loss_scale=True)
        if abandons:
            optimizer.backward(loss_of(model, batches[1]))
            (optimizer if way == "optimizer" else model).zero_grad()
        optimizer.backward(loss_of(model, batches[0]))
        found.append([master.grad for master in masters_of(optimizer)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_an_overflow_skips_the_step_once_and_halves_the_scale(capsys):
    batch = make_batches(1)[0]
    model = low_model()
    optimizer = FP16_Optimizer(
        torch.optim.SGD(model.parameters(), lr=0.05), dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 64.0}
    )
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.backward(loss_of(model, batch) * float("inf"))
    assert optimizer.overflow and optimizer.loss_scale == 32.0
    assert optimizer.clip_master_grads(1.0) == -1
    assert optimizer.step() is None
    assert "Gradient overflow" in capsys.readouterr().out
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    optimizer.zero_grad()
    optimizer.backward(loss_of(model, batch))
    assert not optimizer.overflow and optimizer.clip_master_grads(0.1) > 0.1
    optimizer.step()
    assert not torch.equal(before[0], next(model.parameters()))
    assert torch.nn.utils.get_total_norm([p.grad for p in masters_of(optimizer)]).item() == pytest.approx(0.1, rel=1e-3)


def test_the_bounds_of_a_dynamic_scale():
    args = {"init_scale": 4.0, "scale_window": 2, "min_loss_scale": 2.0}
    given = ((FP16_Optimizer, {}, 2.0**16, 2000, None), (ContribFP16_Optimizer, {}, 2.0**16, 1000, 1.0))
    for cls, options, *expected in (*given, *((cls, args, 4.0, 2, 2.0) for cls, *_ in given)):
        _, optimizer = make(cls=cls, dynamic_loss_scale=True, dynamic_loss_args=options)
        scaler = optimizer.loss_scaler
        assert [optimizer.loss_scale, scaler.growth_interval, scaler.min_loss_scale] == expected
    large = {"init_scale": 2.0**32, "scale_window": None}
    _, optimizer = make(dynamic_loss_scale=True, dynamic_loss_args=large)
    assert (optimizer.loss_scale, optimizer.loss_scaler.growth_interval) == (2.0**32, 2000)


def test_arguments_that_cannot_be_honoured_are_refused():
    with pytest.raises(amp.OptimizerError, match="scale_factor is always 2"):
        make(dynamic_loss_scale=True, dynamic_loss_args={"scale_factor": 4.0})
    with pytest.raises(amp.OptimizerError, match="may hold only init_scale"):
        make(dynamic_loss_scale=True, dynamic_loss_args={"window": 4})
    model, optimizer = make(dynamic_loss_scale=True)
    with pytest.raises(amp.OptimizerError, match="takes no closure"):
        optimizer.step(lambda: 1 / 0)
    with pytest.raises(RuntimeError, match="not FP16_Optimizer"):
        amp.initialize(model, optimizer)
    with pytest.raises(RuntimeError, match="state_dict"):
        pickle.dumps(optimizer)


@pytest.mark.parametrize(
    ("inner", "scale"), [(INNERS["Adam"], SCALES["static"]), (INNERS["FusedAdam"], SCALES["dynamic"])]
)
def test_resuming_is_bitwise_and_files_are_plain(inner, scale):
    batches = make_batches(6)
    model, optimizer = make(inner, **scale)
    train(model, optimizer, batches[:2])
    optimizer.loss_scale = 2.0**9
    train(model, optimizer, batches[2:3])
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    expected = train(model, optimizer, batches[3:])
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    keys = "loss_scaler dynamic_loss_scale overflow first_closure_call_this_step optimizer_state_dict fp32_from_fp16"
    assert set(saved["optimizer"]) == set(keys.split())
    model, optimizer = make(inner)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    assert optimizer.loss_scale == 2.0**9
    assert train(model, optimizer, batches[3:]) == expected


def test_a_file_with_the_scaler_of_apex_in_it_is_read_and_one_of_another_model_is_not():
    class ScalerOfApex:
        _loss_scale = 512.0
        _unskipped = 7

    _, optimizer = make(dynamic_loss_scale=True)
    saved = {**optimizer.state_dict(), "loss_scaler": ScalerOfApex()}
    _, other = make()
    other.load_state_dict(saved)
    assert other.loss_scaler.is_dynamic and other.loss_scaler.state_dict() == {"loss_scale": 512.0, "unskipped": 7}
    narrow = fp16_utils.convert_network(make_model(width=4), torch.bfloat16)
    with pytest.raises(amp.CheckpointError, match="do not fit"):
        FP16_Optimizer(torch.optim.SGD(narrow.parameters(), lr=0.1), verbose=False).load_state_dict(saved)
    with pytest.raises(amp.CheckpointError, match="does not fit this"):
        other.load_state_dict({**saved, "optimizer_state_dict": None})


def test_groups_may_come_later():
    batches = make_batches(3)
    model = low_model()
    others = [p for name, p in model.named_parameters() if not name.startswith("fc")]
    optimizer = FP16_Optimizer(torch.optim.SGD(others, lr=0.05), verbose=False)
    train(model, optimizer, batches[:1])
    optimizer.add_param_group({"params": list(model.fc.parameters()), "lr": 0.5})
    before = model.fc.weight.detach().clone()
    train(model, optimizer, batches[1:])
    assert not torch.equal(before, model.fc.weight) and torch.equal(
        model.fc.weight, optimizer.param_groups[1]["params"][0].bfloat16()
    )
