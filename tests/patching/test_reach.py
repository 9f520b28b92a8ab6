"""Layers whose arithmetic lies below Python, or in fused kernels, run in the dtype that the lists say, whether they
were built before `initialize` or after it: results, and in training gradients, are those of the casts written out by
hand. To the bit where products are native, and but for rounding where they are computed in float32.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hand_casts import lows
from torch import Tensor, nn
from torch.func import functional_call

import amp_patch as amp

MODES = ("train", "eval", "no_grad")  # "no_grad" is eval mode without gradients, where some layers have a fused path


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def is_same(result: Tensor, expected: Tensor, compute: str, low: torch.dtype) -> bool:
    """Whether a result is that of the casts by hand, or, of products in float32, a few steps of the low dtype away."""
    if compute == "native":
        return torch.equal(result, expected)
    tolerance = 4 * torch.finfo(low).eps * max(1.0, expected.abs().max().item())
    return result.dtype is expected.dtype and torch.allclose(result, expected, rtol=0, atol=tolerance)


def parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return dict(module.named_parameters())


def first_of(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


# ---- layers by hand --------------------------------------------------------------------------------------------------


def in_dtype(module: nn.Module, inputs: tuple[Any, ...], dtype: torch.dtype) -> Tensor:
    """All of a layer in one dtype: weights and inputs cast, torch's own code in between."""
    cast = {name: value.to(dtype) for name, value in parameters(module).items()}
    return first_of(functional_call(module, cast, tuple(value.to(dtype) for value in inputs)))


def all_low(module: nn.Module, inputs: tuple[Tensor, ...], low: torch.dtype) -> Tensor:
    return in_dtype(module, inputs, low)


def all_float32(module: nn.Module, inputs: tuple[Tensor, ...], low: torch.dtype) -> Tensor:
    return in_dtype(module, inputs, torch.float32)


def attend(module: nn.MultiheadAttention, value: Tensor, low: torch.dtype, has_weights: bool) -> Tensor:
    """Self-attention with every product in low; the softmax is inside the fused kernel, or, where its weights are asked
    for, in float32.
    """
    batch, length, width = value.shape
    projected = F.linear(value.to(low).transpose(0, 1), module.in_proj_weight.to(low), module.in_proj_bias.to(low))
    heads = [part.reshape(length, batch * module.num_heads, -1).transpose(0, 1) for part in projected.chunk(3, -1)]
    if has_weights:
        query, key, value = heads
        logits = torch.bmm(query * (1.0 / width * module.num_heads) ** 0.5, key.transpose(-2, -1))
        attended = torch.bmm(logits.float().softmax(-1).to(low), value)
    else:
        query, key, value = (head.reshape(batch, module.num_heads, length, -1) for head in heads)
        attended = F.scaled_dot_product_attention(query, key, value).reshape(batch * module.num_heads, length, -1)
    joined = attended.transpose(0, 1).reshape(length * batch, width)
    output = F.linear(joined, module.out_proj.weight.to(low), module.out_proj.bias.to(low))
    return output.reshape(length, batch, width).transpose(0, 1)


def attention(module: nn.Module, inputs: tuple[Tensor, ...], low: torch.dtype, has_weights: bool) -> Tensor:
    if torch.is_grad_enabled() or inputs[0].dtype is not torch.float32:
        return attend(module, inputs[0], low, has_weights)
    return in_dtype(
        module, inputs, low
    )  # the fused path, which the layer takes if input and weights agree: it is low throughout


def encoder_layer(module: nn.Module, inputs: tuple[Tensor, ...], low: torch.dtype) -> Tensor:
    """Attention and feed-forward in low, the normalizations in float32; residual sums widen."""
    (value,) = inputs
    if not torch.is_grad_enabled():
        return in_dtype(module, inputs, torch.float32)  # the fused path

    def normalize(norm: nn.LayerNorm, value: Tensor) -> Tensor:
        return F.layer_norm(value.float(), norm.normalized_shape, norm.weight, norm.bias, norm.eps)

    def feed(value: Tensor) -> Tensor:
        hidden = module.activation(F.linear(value.to(low), module.linear1.weight.to(low), module.linear1.bias.to(low)))
        return F.linear(hidden, module.linear2.weight.to(low), module.linear2.bias.to(low))

    if module.norm_first:
        value = value + attend(module.self_attn, normalize(module.norm1, value), low, has_weights=False)
        return value + feed(normalize(module.norm2, value))
    value = normalize(module.norm1, value + attend(module.self_attn, value, low, has_weights=False))
    return normalize(module.norm2, value + feed(value))


@dataclass(frozen=True)
class Layer:
    make: Callable[[], nn.Module]
    inputs: tuple[Tensor, ...]
    by_hand: Callable[[Any, tuple[Tensor, ...], torch.dtype], Tensor]


class WithWeights(nn.MultiheadAttention):
    """Self-attention that asks for the attention weights, or does not."""

    def forward(self, value: Tensor, need_weights: bool = True) -> Any:  # type: ignore[override]
        return super().forward(value, value, value, need_weights=need_weights)


class WithoutWeights(WithWeights):
    def forward(self, value: Tensor) -> Any:  # type: ignore[override]
        return super().forward(value, need_weights=False)


SEQUENCE = rand(2, 3, 8)
encoder = functools.partial(nn.TransformerEncoderLayer, 8, 2, 16, dropout=0.0, batch_first=True)
LAYERS = {
    "LSTM": Layer(lambda: nn.LSTM(8, 4, num_layers=2, batch_first=True), (SEQUENCE,), all_low),
    "LSTM-projected": Layer(lambda: nn.LSTM(8, 4, proj_size=3), (SEQUENCE,), all_low),
    "GRU": Layer(lambda: nn.GRU(8, 4), (SEQUENCE, rand(1, 3, 4, seed=1)), all_low),
    "RNN-relu": Layer(lambda: nn.RNN(8, 4, nonlinearity="relu", bias=False), (SEQUENCE,), all_low),
    "LSTMCell": Layer(lambda: nn.LSTMCell(8, 4), (SEQUENCE[0],), all_low),
    "PReLU": Layer(lambda: nn.PReLU(3), (SEQUENCE,), all_low),
    "Bilinear": Layer(lambda: nn.Bilinear(8, 8, 4), (SEQUENCE, rand(2, 3, 8, seed=1)), all_float32),
    "MultiheadAttention": Layer(
        lambda: WithoutWeights(8, 2, batch_first=True), (SEQUENCE,), functools.partial(attention, has_weights=False)
    ),
    "MultiheadAttention-weights": Layer(
        lambda: WithWeights(8, 2, batch_first=True), (SEQUENCE,), functools.partial(attention, has_weights=True)
    ),
    "TransformerEncoderLayer-gelu": Layer(lambda: encoder(activation=F.gelu), (SEQUENCE,), encoder_layer),
    "TransformerEncoderLayer-norm-first": Layer(lambda: encoder(norm_first=True), (SEQUENCE,), encoder_layer),
}


def run(module: nn.Module, call: Callable[[], Any], mode: str) -> tuple[Tensor, list[Tensor]]:
    """The result in one mode, and in training the gradients of the parameters."""
    module.train(mode == "train")
    with torch.set_grad_enabled(mode != "no_grad"):
        result = first_of(call())
    if mode != "train":
        return result.detach(), []
    weights = torch.linspace(0.5, 1.5, result.numel()).reshape(result.shape).to(result.dtype)
    return result.detach(), list(torch.autograd.grad(result, list(module.parameters()), weights))


@pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
@pytest.mark.parametrize(
    ("low", "is_built_first", "compute"),
    [(torch.float16, True, "native"), (torch.bfloat16, False, "native"), (torch.float16, False, "float32")],
    ids=["float16-built-before", "bfloat16-built-after", "float16-in-float32"],
)
@pytest.mark.parametrize("layer", LAYERS.values(), ids=list(LAYERS))
def test_a_layer_runs_as_if_cast_by_hand(layer: Layer, low: torch.dtype, is_built_first: bool, compute: str) -> None:
    torch.manual_seed(0)
    make, reference = layer.make, layer.make()
    cases = {
        f"{given}, {mode}": (tuple(value.to(dtype) for value in layer.inputs), mode)
        for given, dtype in (("float32", torch.float32), ("low", low))
        for mode in MODES
    }
    expected = {
        case: run(reference, lambda inputs=inputs: layer.by_hand(reference, inputs, low), mode)
        for case, (inputs, mode) in cases.items()
    }
    # Within a larger model: a layer with hooks of its own takes no fused path.
    model = nn.Sequential(nn.Linear(2, 2), make() if is_built_first else nn.Identity())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    amp.initialize(model, optimizer, opt_level="O1", patch_torch_functions_type=low, compute=compute, verbosity=0)
    module = model[1] if is_built_first else make()
    module.load_state_dict(reference.state_dict())
    results = {case: run(module, lambda inputs=inputs: module(*inputs), mode) for case, (inputs, mode) in cases.items()}
    amp.reset()
    for case in cases:
        assert results[case][0].dtype is expected[case][0].dtype, case
        for result, wanted in zip(
            [results[case][0], *results[case][1]], [expected[case][0], *expected[case][1]], strict=True
        ):
            assert is_same(result, wanted, compute, low), case


# ---- functions -------------------------------------------------------------------------------------------------------

HEADS = rand(1, 2, 3, 4, seed=3)


@pytest.mark.parametrize("compute", ["native", "float32"])
def test_a_mask_of_huge_negatives_masks_in_float16_and_zeroes_rows_that_are_masked_whole(compute: str) -> None:
    mask = torch.tensor([[0.0, -1e9, 0.0], [0.0, 0.0, -1e9], [-1e9, -1e9, -1e9]])
    amp.initialize(nn.Linear(2, 2), opt_level="O1", compute=compute, verbosity=0)
    result = F.scaled_dot_product_attention(HEADS, HEADS, HEADS, attn_mask=mask)
    amp.reset()
    expected = F.scaled_dot_product_attention(*[HEADS.half()] * 3, attn_mask=mask == 0)
    assert is_same(result[..., :2, :], expected[..., :2, :], compute, torch.float16)
    assert torch.equal(result[..., 2, :], torch.zeros(1, 2, 4, dtype=torch.float16))


@lows
def test_what_is_blacklisted_is_float32_throughout_though_torch_wrote_it_in_python(
    tmp_path: Any, low: torch.dtype
) -> None:
    """Else the products inside would be cast to low again."""
    lists = tmp_path / "wide_attention.yaml"
    lists.write_text("extends: float16\nblacklist: [multi_head_attention_forward]\n")
    module = WithWeights(8, 2, batch_first=True)
    matrix = rand(6, 6).to(low)
    expected, factors = module(SEQUENCE), reduced(matrix.float())
    amp.initialize(module, opt_level="O1", lists=str(lists), patch_torch_functions_type=low, verbosity=0)
    result, low_factors = module(SEQUENCE), reduced(matrix)
    amp.reset()
    assert all(map(torch.equal, result, expected))
    assert all(map(torch.equal, low_factors, factors))


def reduced(matrix: Tensor) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return tuple(torch.svd_lowrank(matrix, 2))
