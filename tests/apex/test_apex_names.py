"""Names of Apex beside amp that public code uses can be imported as from Apex, and compute the numbers of torch.

Guards: apex/_gone, apex/_autocast_utils, apex/mlp, apex/contrib/xentropy/*, apex/fused_layer_norm_cuda.
"""

import copy
import importlib

import pytest
import torch
import torch.nn.functional as F

import amp_patch
import amp_patch.apex
from amp_patch.apex.mlp import MLP, MlpFunction


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize(
    "line",
    [
        "from apex.multi_tensor_apply.multi_tensor_apply import MultiTensorApply",
        "from apex.contrib import xentropy; xentropy.SoftmaxCrossEntropyLoss.apply",
        "from apex.contrib.xentropy.softmax_xentropy import SoftmaxCrossEntropyLoss",
        "from apex._autocast_utils import _cast_if_autocast_enabled",
        "import apex.mlp; apex.mlp.MLP; apex.mlp.MlpFunction",
        "import fused_layer_norm_cuda; fused_layer_norm_cuda.forward_affine",
        "import amp_C; amp_C.multi_tensor_lamb_stage1_cuda; amp_C.multi_tensor_lamb_stage2_cuda",
    ],
)
def test_names_are_found_where_apex_had_them(line):
    with amp_patch.apex.install():
        exec(line, {})


def test_a_function_that_amp_C_lacks_says_what_to_use():
    with amp_patch.apex.install(), pytest.raises(AttributeError, match="no amp_C.multi_tensor_adagrad .*: use "):
        _ = importlib.import_module("amp_C").multi_tensor_adagrad


@pytest.mark.parametrize(
    "name", ["fp16_utils.FP16Model", "contrib.sparsity", "contrib.optimizers.DistributedFusedAdam"]
)
def test_a_name_that_is_gone_says_what_to_use_where_it_is_an_attribute(name):
    module, _, own_name = name.rpartition(".")
    with amp_patch.apex.install(), pytest.raises(AttributeError, match=f"no apex.{name} .*: use "):
        getattr(importlib.import_module(f"apex.{module}"), own_name)


def test_scripts_fall_back_where_an_optimizer_is_gone():
    with amp_patch.apex.install():
        try:
            from apex.contrib.optimizers.distributed_fused_lamb import DistributedFusedLAMB as Lamb
        except ImportError:
            from apex.optimizers import FusedLAMB as Lamb
    assert Lamb.__name__ == "FusedLAMB"


# ---- cross entropy ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_cross_entropy_smooths_and_passes_padding_over(smoothing, dtype):
    from amp_patch.apex.contrib.xentropy import SoftmaxCrossEntropyLoss

    logits = draw(5, 7, dtype=dtype).requires_grad_()
    labels = torch.tensor([3, 0, 6, 0, 1])
    losses = SoftmaxCrossEntropyLoss.apply(logits, labels, smoothing, 0, True)
    log_probabilities = logits.double().log_softmax(1)
    rows = -(1 - smoothing) * log_probabilities[torch.arange(5), labels] - smoothing * log_probabilities.mean(1)
    expected = rows.masked_fill(labels == 0, 0.0)
    assert losses.dtype is torch.float32
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-5)
    weights = draw(5, seed=1)
    (found,) = torch.autograd.grad((losses * weights).sum(), logits)
    (wanted,) = torch.autograd.grad((expected * weights).sum(), logits)
    torch.testing.assert_close(found, wanted)


# ---- mlp -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("name", "activation"), [("relu", F.relu), ("sigmoid", torch.sigmoid), ("none", lambda x: x)])
def test_mlp_is_its_layers(name, activation, bias):
    """Also as DLRM writes it, around the forward and backward of the function."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(*args):
            return MlpFunction.forward(*args)

        @staticmethod
        def backward(*args):
            return MlpFunction.backward(*args)

    mlp, x = MLP([4, 6, 3], bias=bias, activation=name), draw(5, 4).requires_grad_()
    biases = mlp.biases if bias else [None, None]
    expected = x
    for weight, its_bias in zip(mlp.weights, biases, strict=True):
        expected = activation(F.linear(expected, weight, its_bias))
    leaves = [x, *mlp.weights, *mlp.biases]
    wanted = torch.autograd.grad(expected.square().sum(), leaves)
    for output in (mlp(x), Function.apply(mlp.bias, mlp.activation, *leaves)):
        torch.testing.assert_close(output, expected)
        torch.testing.assert_close(torch.autograd.grad(output.square().sum(), leaves), wanted)


def test_mlp_is_a_module_like_any_other():
    mlp = MLP([4, 6, 3])
    assert list(mlp.state_dict()) == ["weight_0", "bias_0", "weight_1", "bias_1"]
    assert torch.equal(copy.deepcopy(mlp)(draw(2, 4)), mlp(draw(2, 4)))
    amp_patch.initialize(mlp, torch.optim.SGD(mlp.parameters(), lr=0.1), opt_level="O1", verbosity=0)
    assert mlp(draw(2, 4)).dtype is torch.float16
    with pytest.raises(amp_patch.AmpError, match="none, relu, sigmoid"):
        MLP([1, 2], activation="gelu")


# ---- norms' extension ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "shape"), [(torch.float16, (4,)), (torch.float32, (2, 4))])
@pytest.mark.parametrize("is_rms", [False, True])
def test_the_extension_of_norms_is_torchs_functions(is_rms, dtype, shape):
    from amp_patch.apex import fused_layer_norm_cuda as extension

    x, dout = draw(3, 2, 4, dtype=dtype), draw(3, 2, 4, seed=1, dtype=dtype)
    weight, bias = draw(*shape, seed=2), draw(*shape, seed=3)
    leaves = [tensor.double().requires_grad_() for tensor in ((x, weight) if is_rms else (x, weight, bias))]
    function = F.rms_norm if is_rms else F.layer_norm
    output = function(leaves[0], shape, *leaves[1:], eps=1e-5)
    expected = torch.autograd.grad(output, leaves, dout.double())
    rows = x.double().reshape(-1, weight.numel())
    centered = rows if is_rms else rows - rows.mean(1, keepdim=True)
    roots = (centered.square().mean(1) + 1e-5).rsqrt()
    prefix, affine = ("rms_", [weight]) if is_rms else ("", [weight, bias])
    found, *statistics = getattr(extension, f"{prefix}forward_affine")(x, shape, *affine, 1e-5)
    mixed = getattr(extension, f"{prefix}forward_affine_mixed_dtypes")(x, shape, *affine, 1e-5)[0]
    assert found.dtype is dtype and mixed.dtype is torch.float32
    close = {"rtol": 2e-3, "atol": 2e-3} if dtype is torch.float16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(found.double(), output.detach(), **close)
    torch.testing.assert_close(mixed.double(), output.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(statistics[-1].double(), roots, rtol=1e-5, atol=1e-5)
    if not is_rms:
        torch.testing.assert_close(statistics[0].double(), rows.mean(1), rtol=1e-5, atol=1e-5)
    gradients = getattr(extension, f"{prefix}backward_affine")(dout, *statistics, x, shape, *affine, 1e-5)
    for one, other, of in zip(gradients, expected, (x, *affine), strict=True):
        assert one.dtype is of.dtype
        torch.testing.assert_close(one.double(), other, **close)
    plain = function(x.double(), shape, eps=1e-5)
    torch.testing.assert_close(getattr(extension, f"{prefix}forward")(x, shape, 1e-5)[0].double(), plain, **close)
    leaf = x.double().requires_grad_()
    (wanted,) = torch.autograd.grad(function(leaf, shape, eps=1e-5), leaf, dout.double())
    alone = getattr(extension, f"{prefix}backward")(dout, *statistics, x, shape, 1e-5)
    torch.testing.assert_close(alone.double(), wanted, **close)
    with pytest.raises(TypeError, match="memory_efficient"):
        getattr(extension, f"{prefix}backward")(dout, *statistics, x, shape, 1e-5, True)


# ---- private names of amp --------------------------------------------------------------------------------------------


def test_autocast_dtypes_are_followed():
    from amp_patch.apex._autocast_utils import _cast_if_autocast_enabled

    args = (draw(2), {"x": draw(2).double()}, torch.tensor([1]), None)
    assert [tensor is other for tensor, other in zip(_cast_if_autocast_enabled(*args)[::2], args[::2], strict=True)]
    with torch.autocast("cpu", torch.bfloat16):
        low, nested, whole, nothing = _cast_if_autocast_enabled(*args)
    assert low.dtype is torch.bfloat16 and nested["x"].dtype is torch.float64
    assert whole.dtype is torch.int64 and nothing is None
