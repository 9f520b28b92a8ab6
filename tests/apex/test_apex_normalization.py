"""Apex's layer norms have torch's values and the dtype that each of them promises, for every mixture and under amp.

Guards: apex/normalization/*, apex/_autocast_utils.
"""

import pickle

import pytest
import torch
from torch import nn

import amp_patch as amp
from amp_patch.apex.normalization import (
    FusedLayerNorm,
    FusedRMSNorm,
    MixedFusedLayerNorm,
    MixedFusedRMSNorm,
    fused_layer_norm,
)
from amp_patch.dtypes import LOW_DTYPES

FUSED = {FusedLayerNorm: nn.LayerNorm, FusedRMSNorm: nn.RMSNorm}
MIXED = {MixedFusedLayerNorm: nn.LayerNorm, MixedFusedRMSNorm: nn.RMSNorm}
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 1e-5, torch.float64: 1e-10}


def by_hand(x, shape, weight, bias, eps, is_rms):
    """In float64."""
    x, dims = x.double(), tuple(range(-len(shape), 0))
    if not is_rms:
        x = x - x.mean(dims, keepdim=True)
    x = x / (x.pow(2).mean(dims, keepdim=True) + eps).sqrt()
    x = x if weight is None else x * weight.double()
    return x if bias is None else x + bias.double()


def fill(layer, dtype):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return layer.to(dtype)


def make_input(dtype):
    return (torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(1)) * 5 + 3).to(dtype)


@pytest.mark.parametrize(
    ("input_dtype", "weight_dtype", "shape"),
    [
        (torch.float16, torch.float16, 4),
        (torch.float16, torch.float32, [2, 4]),
        (torch.float32, torch.bfloat16, (4,)),
        (torch.bfloat16, torch.float16, torch.Size([2, 4])),
        (torch.float32, torch.float32, [2, 4]),
        (torch.float32, torch.float64, 4),
        (torch.float64, torch.float16, (4,)),
    ],
    ids=str,
)
@pytest.mark.parametrize("cls", [*FUSED, *MIXED])
def test_values_are_those_of_torch_and_the_dtype_is_the_promised_one(cls, input_dtype, weight_dtype, shape):
    layer = fill(cls(shape, eps=0.1), weight_dtype)
    x = make_input(input_dtype).requires_grad_()
    output = layer(x)
    has_weights = cls in MIXED or (cls is FusedRMSNorm and weight_dtype in LOW_DTYPES)
    assert output.dtype is (weight_dtype if has_weights else input_dtype)
    expected = by_hand(
        x, layer.normalized_shape, layer.weight, getattr(layer, "bias", None), 0.1, "RMS" in cls.__name__
    )
    tolerance = max(TOLERANCE[dtype] for dtype in (input_dtype, weight_dtype, output.dtype))
    torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=5 * tolerance)
    output.float().pow(2).sum().backward()
    assert x.grad.dtype is input_dtype and layer.weight.grad.dtype is weight_dtype


@pytest.mark.parametrize("cls", FUSED)
def test_without_a_weight_the_dtype_is_that_of_the_input(cls):
    layer = cls(4, elementwise_affine=False)
    assert list(layer.parameters()) == []
    x = make_input(torch.float16)
    assert layer(x).dtype is torch.float16
    expected = by_hand(x, (4,), None, None, 1e-5, "RMS" in cls.__name__)
    torch.testing.assert_close(layer(x).double(), expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(("cls", "torch_cls"), [*FUSED.items(), *MIXED.items()], ids=lambda cls: cls.__name__)
def test_checkpoints_are_interchangeable_with_torchs_and_layers_can_be_pickled(cls, torch_cls):
    layer, twin = fill(cls((2, 4), 1e-3), torch.float32), torch_cls((2, 4), 1e-3)
    assert isinstance(layer, torch_cls)
    twin.load_state_dict(layer.state_dict())
    x = make_input(torch.float32)
    assert torch.equal(layer(x), twin(x))
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x), twin(x))


def test_positional_arguments_are_in_the_order_of_apex():
    for cls in FUSED:
        layer = cls(4, 0.5, False, True)
        assert (layer.eps, layer.elementwise_affine, layer.memory_efficient) == (0.5, False, True)
        assert cls(4).eps == 1e-5
    for cls in MIXED:
        assert cls(4, 0.5, memory_efficient=True).eps == 0.5 and cls(4).eps == 1e-5


@pytest.mark.parametrize("cls", MIXED)
def test_a_mixed_norm_has_a_weight(cls):
    with pytest.raises(RuntimeError, match="needs one: use Fused"):
        cls(4, elementwise_affine=False)
    assert cls(4, elementwise_affine=True).weight is not None


FUNCTIONS = {
    "fused_layer_norm": ("", False),
    "fused_layer_norm_affine": ("wb", False),
    "mixed_dtype_fused_layer_norm_affine": ("wb", False),
    "fused_rms_norm": ("", True),
    "fused_rms_norm_affine": ("w", True),
    "mixed_dtype_fused_rms_norm_affine": ("w", True),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_forms(name):
    parameters, is_rms = FUNCTIONS[name]
    weight, bias = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([0.5, 0.0, -1.0, 1.0])
    given = {"": (), "w": (weight,), "wb": (weight, bias)}[parameters]
    w, b = (*given, None, None)[:2]
    function = getattr(fused_layer_norm, name)
    x, small = make_input(torch.bfloat16), torch.full((1, 4), 1e-3)  # the small one shows eps
    value = function(x, *given, (4,), 0.5, True)
    assert value.dtype is (torch.float32 if name.startswith("mixed") else torch.bfloat16)
    torch.testing.assert_close(value.double(), by_hand(x, (4,), w, b, 0.5, is_rms), rtol=2e-2, atol=0.1)
    expected = by_hand(small, (4,), w, b, 1e-6, is_rms)
    torch.testing.assert_close(function(small, *given, 4).double(), expected, rtol=1e-4, atol=1e-4)


def test_the_autograd_functions_are_the_functions():
    assert fused_layer_norm.FusedLayerNormAffineFunction.apply is fused_layer_norm.fused_layer_norm_affine
    assert fused_layer_norm.FusedRMSNormAffineFunction.apply is fused_layer_norm.fused_rms_norm_affine


class Model(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), norm(8), nn.Linear(8, 2)

    def forward(self, x):
        hidden = self.first(x)
        self.seen = (hidden.dtype, self.norm(hidden).dtype)
        return self.last(self.norm(hidden))


@pytest.mark.parametrize(
    ("norm", "level"),
    [
        (FusedLayerNorm, "O1"),
        (FusedRMSNorm, "O2"),
        (MixedFusedLayerNorm, "O2"),
        (MixedFusedRMSNorm, "O1"),
    ],
)
def test_the_dtypes_hold_under_amp(norm, level):
    model = Model(norm)
    amp.initialize(model, opt_level=level, verbosity=0)
    model(torch.randn(6, 4)).float().sum().backward()
    weight = torch.float16 if level == "O2" else torch.float32
    assert model.norm.weight.dtype is model.norm.weight.grad.dtype is weight
    assert model.seen == (torch.float16, torch.float16 if norm in FUSED else weight)
