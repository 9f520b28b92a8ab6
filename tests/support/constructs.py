"""What models are made of, as a table: layers, losses, function transforms, hooks, ways to call and to trace a module.

A construct is a module, its inputs and how it is called. Nothing here imports amp_patch: each construct runs under
whatever casts are in force, and `train` says what came of two steps of it.
"""

import copy
import functools
import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn.utils import parametrizations, parametrize, rnn
from torch.utils import checkpoint

LOW = torch.bfloat16
Inputs = tuple[Any, ...]


@dataclass(frozen=True)
class Construct:
    """One row.

    Attributes:
        make: returns the module, which has weights or none.
        inputs: returns what it is called with, floating tensors in float32.
        call: calls the module; what it returns may be nested.
        variables: how many of the floating inputs, from the first, take gradients.
        given: the dtypes that floating inputs come in.
        needs_gradients: it takes gradients itself, and does not run without them.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    call: Callable[..., Any] = lambda module, *inputs: module(*inputs)
    variables: int = 99
    given: tuple[torch.dtype, ...] = (torch.float32, LOW)
    needs_gradients: bool = False


CONSTRUCTS: dict[str, Construct] = {}


class Weights(nn.Module):
    """Parameters, and a function that is called with the inputs and then with them."""

    def __init__(self, function: Callable[..., Any], shapes: tuple[tuple[int, ...], ...]) -> None:
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(shape) / 2) for shape in shapes])

    def forward(self, *inputs: Any) -> Any:
        return self.function(*inputs, *self.weights)


def sizes(*shapes: tuple[int, ...]) -> Callable[[], Inputs]:
    """Normal random inputs of these shapes."""
    return lambda: tuple(torch.randn(shape) for shape in shapes)


def layer(name: str, make: Callable[[], nn.Module], *shapes: tuple[int, ...], **options: Any) -> None:
    """Enter a module; inputs are normal, of `shapes`, unless `inputs` is given."""
    assert name not in CONSTRUCTS, name
    CONSTRUCTS[name] = Construct(make, **{"inputs": sizes(*shapes), **options})


def function(
    name: str,
    op: Callable[..., Any],
    *shapes: tuple[int, ...],
    weights: tuple[tuple[int, ...], ...] = (),
    **options: Any,
) -> None:
    """Enter a function of inputs and then of weights with the shapes `weights`."""
    layer(name, functools.partial(Weights, op, weights), *shapes, **options)


FLOAT32_ONLY = {"given": (torch.float32,)}
VECTORS, IMAGES, SEQUENCES, VOLUMES = (3, 8), (2, 4, 6, 6), (2, 5, 8), (2, 4, 4, 4, 4)
SIGNALS = (2, 4, 12)


def before(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """The layer behind a linear one, whose result is low."""
    return lambda: nn.Sequential(nn.Linear(8, 8), make())


# ---- linear layers and convolutions ----------------------------------------------------------------------------------

layer("linear", lambda: nn.Linear(8, 4), VECTORS)
layer("linear without bias", lambda: nn.Linear(8, 4, bias=False), SEQUENCES)
layer("linear of one vector", lambda: nn.Linear(8, 4), (8,))
layer("linear on a transposed input", lambda: nn.Linear(5, 4), SEQUENCES, call=lambda m, x: m(x.transpose(1, 2)))
layer(
    "linear by keywords",
    lambda: nn.Linear(8, 4),
    VECTORS,
    call=lambda m, x: F.linear(bias=m.bias, input=x, weight=m.weight),
)
layer("linear called twice", lambda: nn.Linear(8, 8), VECTORS, call=lambda m, x: m(torch.tanh(m(x))))
layer("lazy linear", lambda: _initialized(nn.LazyLinear(4), 3, 8), VECTORS)
layer("linear with a frozen weight", lambda: _frozen(nn.Linear(8, 4), "weight"), VECTORS)
layer("bilinear", lambda: nn.Bilinear(8, 4, 3), VECTORS, (3, 4), given=(torch.float32,))
layer("perceptron", lambda: nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4)), VECTORS)
layer("conv1d", lambda: nn.Conv1d(4, 6, 3), SIGNALS)
layer("conv2d", lambda: nn.Conv2d(4, 6, 3, padding=1), IMAGES)
layer("conv3d", lambda: nn.Conv3d(4, 2, 3), VOLUMES)
layer("conv2d in groups", lambda: nn.Conv2d(4, 8, 3, groups=4, dilation=2), IMAGES)
layer("conv2d padded by reflection", lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), IMAGES)
layer("conv2d of one image", lambda: nn.Conv2d(4, 6, 3, stride=2, padding="valid"), IMAGES[1:])
layer("conv2d in channels_last", lambda: nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last), IMAGES)
layer("conv_transpose1d", lambda: nn.ConvTranspose1d(4, 3, 3), SIGNALS)
layer("conv_transpose2d", lambda: nn.ConvTranspose2d(4, 3, 3, stride=2), (1, 4, 3, 3))
layer("conv_transpose3d", lambda: nn.ConvTranspose3d(4, 2, 2), (1, 4, 2, 2, 2))
layer("unfold and fold", lambda: nn.Conv2d(4, 4, 1), IMAGES, call=lambda m, x: F.fold(F.unfold(m(x), 3), (6, 6), 3))


def _initialized(module: nn.Module, *shape: int) -> nn.Module:
    module(torch.zeros(shape))
    return module


def _frozen(module: nn.Module, name: str) -> nn.Module:
    getattr(module, name).requires_grad_(False)
    return module


# ---- embeddings ------------------------------------------------------------------------------------------------------

TOKENS = torch.tensor([[1, 4, 2, 0], [3, 3, 8, 5]])
tokens = {"inputs": lambda: (TOKENS,), **FLOAT32_ONLY}

layer("embedding", lambda: nn.Sequential(nn.Embedding(9, 8, padding_idx=0), nn.Linear(8, 4)), **tokens)
layer("embedding with a maximal norm", lambda: nn.Embedding(9, 8, max_norm=1.0), **tokens)
layer(
    "embedding with sparse gradients", lambda: nn.Sequential(nn.Embedding(9, 8, sparse=True), nn.Linear(8, 4)), **tokens
)
layer("embedding bag", lambda: nn.Sequential(nn.EmbeddingBag(9, 8), nn.Linear(8, 4)), **tokens)
layer(
    "embedding bag with weights",
    lambda: nn.EmbeddingBag(9, 8, mode="sum"),
    call=lambda m, i, w: m(i, per_sample_weights=w),
    inputs=lambda: (TOKENS, torch.rand(2, 4)),
    **FLOAT32_ONLY,
)
function("one_hot", lambda i, w: F.one_hot(i, 9) @ w.long() + F.one_hot(i, 9).float() @ w, weights=((9, 4),), **tokens)


# ---- norms, dropout, activations -------------------------------------------------------------------------------------

layer("BatchNorm1d", before(lambda: nn.BatchNorm1d(8)), VECTORS)
layer("BatchNorm2d", lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)), IMAGES)
layer("BatchNorm3d without statistics", lambda: nn.BatchNorm3d(4, track_running_stats=False), VOLUMES)
layer("InstanceNorm2d", lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True), IMAGES)
layer("LayerNorm", before(lambda: nn.LayerNorm(8)), SEQUENCES)
layer("LayerNorm without weights", before(lambda: nn.LayerNorm(8, elementwise_affine=False)), SEQUENCES)
layer("GroupNorm", lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.GroupNorm(2, 4)), IMAGES)
layer("RMSNorm", before(lambda: nn.RMSNorm(8)), SEQUENCES)
layer("LocalResponseNorm", lambda: nn.LocalResponseNorm(3), IMAGES)
layer("normalize", before(lambda: nn.Identity()), VECTORS, call=lambda m, x: F.normalize(m(x), dim=-1))
layer("Dropout", before(lambda: nn.Dropout(0.4)), VECTORS)
layer("AlphaDropout", before(lambda: nn.AlphaDropout(0.4)), VECTORS)
layer("Dropout2d", lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.Dropout2d(0.5)), IMAGES)
layer("PReLU", before(lambda: nn.PReLU(8)), VECTORS)
layer("softmax", before(lambda: nn.Softmax(-1)), SEQUENCES)
layer(
    "log_softmax in float32",
    before(nn.Identity),
    VECTORS,
    call=lambda m, x: F.log_softmax(m(x), -1, dtype=torch.float32),
)
layer("GELU and SiLU", before(lambda: nn.Sequential(nn.GELU(), nn.SiLU(inplace=True), nn.Mish())), VECTORS)
layer("GLU and Softplus", before(lambda: nn.Sequential(nn.GLU(), nn.Softplus(), nn.Hardswish())), VECTORS)
layer("ReLU in place", before(lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 2))), VECTORS)
layer("gumbel_softmax", before(nn.Identity), VECTORS, call=lambda m, x: F.gumbel_softmax(m(x), hard=True))


# ---- pooling, upsampling, padding ------------------------------------------------------------------------------------

layer("max pooling", lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.MaxPool2d(2), nn.AdaptiveMaxPool2d(1)), IMAGES)
layer("average pooling", lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(1)), IMAGES)
layer("pooling of signals", lambda: nn.Sequential(nn.Conv1d(4, 4, 3), nn.MaxPool1d(2), nn.AvgPool1d(2)), SIGNALS)
layer("MaxPool3d", lambda: nn.Sequential(nn.Conv3d(4, 4, 1), nn.MaxPool3d(2)), VOLUMES)
layer("AvgPool3d", lambda: nn.Sequential(nn.Conv3d(4, 4, 1), nn.AvgPool3d(2)), VOLUMES)
layer("AdaptiveAvgPool3d", lambda: nn.Sequential(nn.Conv3d(4, 4, 1), nn.AdaptiveAvgPool3d(1)), VOLUMES)
layer("AdaptiveMaxPool3d", lambda: nn.Sequential(nn.Conv3d(4, 4, 1), nn.AdaptiveMaxPool3d(1)), VOLUMES)
layer("LPPool2d", lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.LPPool2d(2, 2)), IMAGES)
layer(
    "FractionalMaxPool2d", lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.FractionalMaxPool2d(2, output_size=3)), IMAGES
)
layer(
    "MaxUnpool2d",
    lambda: nn.Conv2d(4, 4, 1),
    IMAGES,
    call=lambda m, x: F.max_unpool2d(*F.max_pool2d(m(x), 2, return_indices=True), 2),
)
layer(
    "MaxPool3d with indices",
    lambda: nn.Conv3d(4, 4, 1),
    VOLUMES,
    call=lambda m, x: F.max_pool3d(m(x), 2, return_indices=True),
)
for mode in ("nearest", "bilinear", "bicubic", "area"):
    layer(
        f"upsampling, {mode}",
        lambda: nn.Conv2d(4, 4, 3),
        IMAGES,
        call=lambda m, x, mode=mode: F.interpolate(m(x), scale_factor=2, mode=mode),
    )
layer("PixelShuffle", lambda: nn.Sequential(nn.Conv2d(4, 8, 3), nn.PixelShuffle(2)), IMAGES)
layer(
    "grid_sample",
    lambda: nn.Conv2d(4, 6, 6),
    IMAGES,
    call=lambda m, x: F.grid_sample(
        x, F.affine_grid(m(x).view(-1, 2, 3), [2, 4, 3, 3], align_corners=False), align_corners=False
    ),
)
for mode in ("constant", "reflect", "replicate", "circular"):
    layer(
        f"padding, {mode}",
        lambda: nn.Conv2d(4, 4, 3),
        IMAGES,
        call=lambda m, x, mode=mode: F.pad(m(x), (1, 1, 1, 1), mode),
    )


# ---- attention -------------------------------------------------------------------------------------------------------

HEADS = ((2, 4, 5, 8),) * 3
ALLOWED = torch.ones(5, 5, dtype=torch.bool).tril()
PADDING = torch.tensor([[False, False, False, False, True], [False, False, False, True, True]])

function("attention", lambda q, k, v: F.scaled_dot_product_attention(q, k, v), *HEADS)
function("attention, causal", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), *HEADS)
function("attention, scaled", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=0.25), *HEADS)
function("attention, boolean mask", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, ALLOWED), *HEADS)
function(
    "attention, additive mask",
    lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, attn_mask=mask),
    *HEADS,
    (5, 5),
)
function(
    "attention, learned bias",
    lambda q, k, v, bias: F.scaled_dot_product_attention(q, k, v, bias),
    *HEADS,
    weights=((5, 5),),
)
function(
    "attention, grouped queries",
    lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
    (2, 4, 5, 8),
    (2, 2, 5, 8),
    (2, 2, 5, 8),
)
function("attention, dropout", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.3), *HEADS)
function("attention, all by name", lambda q, k, v: F.scaled_dot_product_attention(query=q, key=k, value=v), *HEADS)
function(
    "attention, other lengths", lambda q, k, v: F.scaled_dot_product_attention(q, k, v), (2, 3, 8), (2, 5, 8), (2, 5, 4)
)
function(
    "attention, causal bias", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=_causal_bias()), *HEADS
)
function("attention by hand", lambda q, k, v: torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(8), -1) @ v, *HEADS)


def _causal_bias() -> Tensor:
    from torch.nn.attention.bias import causal_lower_right

    return causal_lower_right(5, 5)


def _self_attention(**options: Any) -> Callable[..., Any]:
    return lambda module, x: module(x, x, x, **options)


layer("MultiheadAttention", lambda: nn.MultiheadAttention(8, 2), SEQUENCES, call=_self_attention())
layer(
    "MultiheadAttention, batch first",
    lambda: nn.MultiheadAttention(8, 2, batch_first=True),
    SEQUENCES,
    call=_self_attention(),
)
layer(
    "MultiheadAttention without weights",
    lambda: nn.MultiheadAttention(8, 2, batch_first=True),
    SEQUENCES,
    call=_self_attention(need_weights=False),
)
layer(
    "MultiheadAttention, weights of each head",
    lambda: nn.MultiheadAttention(8, 2, batch_first=True),
    SEQUENCES,
    call=_self_attention(average_attn_weights=False),
)
layer(
    "MultiheadAttention, padding",
    lambda: nn.MultiheadAttention(8, 2, batch_first=True),
    SEQUENCES,
    call=_self_attention(key_padding_mask=PADDING),
)
layer(
    "MultiheadAttention, padding without weights",
    lambda: nn.MultiheadAttention(8, 2, batch_first=True),
    SEQUENCES,
    call=_self_attention(key_padding_mask=PADDING, attn_mask=~ALLOWED, need_weights=False),
)
layer(
    "MultiheadAttention, causal",
    lambda: nn.MultiheadAttention(8, 2, batch_first=True),
    SEQUENCES,
    call=_self_attention(attn_mask=~ALLOWED, is_causal=True, need_weights=False),
)
layer(
    "MultiheadAttention, crossed",
    lambda: nn.MultiheadAttention(8, 2, kdim=6, vdim=4, batch_first=True),
    SEQUENCES,
    (2, 3, 6),
    (2, 3, 4),
)
layer(
    "MultiheadAttention, more keys",
    lambda: nn.MultiheadAttention(8, 2, add_bias_kv=True, add_zero_attn=True),
    SEQUENCES,
    call=_self_attention(),
)


def encoder_layer(**options: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True, **options)


layer("TransformerEncoderLayer", encoder_layer, SEQUENCES)
layer("TransformerEncoderLayer, norm first", lambda: encoder_layer(norm_first=True, activation="gelu"), SEQUENCES)
layer(
    "TransformerEncoder",
    lambda: nn.TransformerEncoder(encoder_layer(), 2, enable_nested_tensor=False),
    SEQUENCES,
    call=lambda m, x: m(x, src_key_padding_mask=PADDING),
)
layer(
    "TransformerDecoderLayer",
    lambda: nn.TransformerDecoderLayer(8, 2, 16, batch_first=True),
    SEQUENCES,
    (2, 3, 8),
    call=lambda m, x, y: m(x, y, tgt_mask=~ALLOWED),
)
layer("Transformer", lambda: nn.Transformer(8, 2, 1, 1, 16, batch_first=True), SEQUENCES, (2, 3, 8))


# ---- losses ----------------------------------------------------------------------------------------------------------

CLASSES = torch.tensor([1, 0, 7])
SIGNS = torch.tensor([1.0, -1.0, 1.0])


def loss(name: str, op: Callable[..., Any], *targets: Any, variables: int = 1) -> None:
    """Enter a loss of the result of a linear layer, and of the input too, with `targets`."""
    layer(
        name,
        lambda: nn.Linear(8, 8),
        variables=variables,
        inputs=lambda: (torch.randn(VECTORS), *targets),
        call=lambda m, x, *targets: (op(m(x), *targets), op(x, *targets)),
    )


loss("cross_entropy", lambda x, y: F.cross_entropy(x, y), CLASSES)
loss(
    "cross_entropy, smoothed and weighted",
    lambda x, y, w: F.cross_entropy(x, y, w, label_smoothing=0.1, ignore_index=0),
    CLASSES,
    torch.linspace(0.5, 2, 8),
)
loss(
    "cross_entropy of probabilities",
    lambda x, y: F.cross_entropy(x, y),
    torch.softmax(torch.linspace(-1, 1, 24).view(3, 8), -1),
)
loss("nll_loss", lambda x, y: F.nll_loss(F.log_softmax(x, -1), y), CLASSES)
loss("mse_loss", lambda x, y: F.mse_loss(x, y), torch.linspace(-1, 1, 24).view(3, 8), variables=2)
loss("l1_loss", lambda x, y: F.l1_loss(x, y, reduction="none"), torch.linspace(-1, 1, 24).view(3, 8))
loss("smooth_l1_loss", lambda x, y: F.smooth_l1_loss(x, y, beta=0.3), torch.linspace(-1, 1, 24).view(3, 8))
loss("huber_loss", lambda x, y: F.huber_loss(x, y, delta=0.3), torch.linspace(-1, 1, 24).view(3, 8))
loss(
    "binary_cross_entropy",
    lambda x, y: F.binary_cross_entropy(torch.sigmoid(x), y),
    torch.linspace(0, 1, 24).view(3, 8),
)
loss(
    "binary_cross_entropy_with_logits",
    lambda x, y: F.binary_cross_entropy_with_logits(x, y, pos_weight=torch.full((8,), 2.0)),
    torch.linspace(0, 1, 24).view(3, 8),
)
loss("kl_div", lambda x, y: F.kl_div(F.log_softmax(x, -1), y, reduction="batchmean"), torch.full((3, 8), 0.125))
loss("cosine_embedding_loss", lambda x, y: F.cosine_embedding_loss(x, x.flip(1), y, margin=0.1), SIGNS)
loss("hinge_embedding_loss", lambda x, y: F.hinge_embedding_loss(x[:, 0], y), SIGNS)
loss("margin_ranking_loss", lambda x, y: F.margin_ranking_loss(x[:, 0], x[:, 1], y, margin=0.2), SIGNS)
loss("multi_margin_loss", lambda x, y: F.multi_margin_loss(x, y), CLASSES)
loss(
    "multilabel_margin_loss", lambda x, y: F.multilabel_margin_loss(x, y), torch.tensor([[1, 3, -1, 0, 0, 0, 0, 0]] * 3)
)
loss(
    "multilabel_soft_margin_loss",
    lambda x, y: F.multilabel_soft_margin_loss(x, y),
    torch.linspace(0, 1, 24).view(3, 8).round(),
)
loss("soft_margin_loss", lambda x, y: F.soft_margin_loss(x[:, 0], y), SIGNS)
loss("triplet_margin_loss", lambda x: F.triplet_margin_loss(x, x.flip(1), x.roll(1, 1)))
loss("triplet_margin_with_distance_loss", lambda x: F.triplet_margin_with_distance_loss(x, x.flip(1), x.roll(1, 1)))
loss("poisson_nll_loss", lambda x, y: F.poisson_nll_loss(x, y, full=True), torch.linspace(0, 4, 24).view(3, 8))
loss("gaussian_nll_loss", lambda x, y: F.gaussian_nll_loss(x, y, x.exp()), torch.linspace(-1, 1, 24).view(3, 8))
loss(
    "ctc_loss",
    lambda x: F.ctc_loss(
        F.log_softmax(x.view(6, 1, 4), -1), torch.tensor([[1, 2]]), torch.tensor([6]), torch.tensor([2])
    ),
)
layer(
    "AdaptiveLogSoftmaxWithLoss",
    lambda: nn.AdaptiveLogSoftmaxWithLoss(8, 10, [4, 7], div_value=2.0),
    inputs=lambda: (torch.randn(4, 8), torch.tensor([0, 5, 9, 3])),
)


# ---- recurrent layers ------------------------------------------------------------------------------------------------

layer("RNN", lambda: nn.RNN(8, 4), SEQUENCES)
layer("RNN with relu", lambda: nn.RNN(8, 4, nonlinearity="relu", num_layers=2, batch_first=True), SEQUENCES)
layer("LSTM", lambda: nn.LSTM(8, 4), SEQUENCES)
layer("LSTM, both ways", lambda: nn.LSTM(8, 4, num_layers=2, bidirectional=True, batch_first=True), SEQUENCES)
layer("LSTM, projected", lambda: nn.LSTM(8, 4, proj_size=3), SEQUENCES)
layer("LSTM, behind a linear layer", before(lambda: nn.LSTM(8, 4, batch_first=True)), SEQUENCES)
layer(
    "LSTM of a packed sequence",
    lambda: nn.LSTM(8, 4, batch_first=True),
    SEQUENCES,
    call=lambda m, x: rnn.pad_packed_sequence(
        m(rnn.pack_padded_sequence(x, torch.tensor([5, 3]), batch_first=True))[0]
    )[0],
)
layer("GRU", lambda: nn.GRU(8, 4), SEQUENCES)
layer("GRU, behind a linear layer", before(lambda: nn.GRU(8, 4, batch_first=True)), SEQUENCES)
layer("RNNCell", lambda: nn.RNNCell(8, 4), VECTORS)
layer("LSTMCell", lambda: nn.LSTMCell(8, 4), VECTORS)
layer("GRUCell", lambda: nn.GRUCell(8, 4), VECTORS)
layer("GRUCell with a state", lambda: nn.GRUCell(8, 4), VECTORS, (3, 4))


# ---- products --------------------------------------------------------------------------------------------------------

SQUARE = (4, 4)
function("@", lambda x, w: x @ w, VECTORS, weights=((8, 4),))
function("@ from the right", lambda x, w: w.T @ x, (8, 3), weights=((8, 4),))
function("@ of vectors", lambda x, w: x @ w, (8,), weights=((8,),))
function("@ with a vector", lambda x, w: x @ w, VECTORS, weights=((8,),))
function("@ of batches", lambda x, w: x @ w, SEQUENCES, weights=((2, 8, 3),))
function("matmul method", lambda x, w: x.matmul(w).mm(w.T), VECTORS, weights=((8, 4),))
function("mv and dot", lambda x, w: (torch.mv(x, w), torch.dot(x[0], w)), VECTORS, weights=((8,),), **FLOAT32_ONLY)
function(
    "outer and inner",
    lambda x, w: torch.outer(x[0], w) * torch.inner(x, w).sum(),
    VECTORS,
    weights=((8,),),
    **FLOAT32_ONLY,
)
function("bmm and baddbmm", lambda x, w: torch.baddbmm(x[:, :, :3], x, w), SEQUENCES, weights=((2, 8, 3),))
function("addmm, weighted", lambda x, w, b: torch.addmm(b, x, w, beta=0.5, alpha=2.0), VECTORS, weights=((8, 4), (4,)))
function(
    "addmv and addr",
    lambda x, w: (torch.addmv(x[0, :3], x, w), torch.addr(x, x[:, 0], w)),
    VECTORS,
    weights=((8,),),
    **FLOAT32_ONLY,
)
function("multi_dot", lambda x, w, v: torch.linalg.multi_dot([x, w, v]), VECTORS, weights=((8, 4), (4, 2)))
function("einsum", lambda x, w: torch.einsum("bsi,io->bso", x, w), SEQUENCES, weights=((8, 4),))
function("einsum of attention", lambda q, k: torch.einsum("bhid,bhjd->bhij", q, k), *HEADS[:2])
function("einsum without a sum", lambda x, w: torch.einsum("bi,i->bi", x, w), VECTORS, weights=((8,),), **FLOAT32_ONLY)
function("tensordot", lambda x, w: torch.tensordot(x, w, dims=([2], [0])), SEQUENCES, weights=((8, 4),))
function("kron", lambda x, w: torch.kron(x, w), (2, 2), weights=((2, 3),))
function("cdist", lambda x, w: torch.cdist(x, w), VECTORS, weights=((4, 8),))
function("cosine_similarity", lambda x, w: F.cosine_similarity(x, w), VECTORS, weights=(VECTORS,))
function("pairwise_distance", lambda x, w: F.pairwise_distance(x, w), VECTORS, weights=(VECTORS,))
function("products of one input", lambda x, w: (x @ w) * torch.sigmoid(x @ w), VECTORS, weights=((8, 8),))
function(
    "linear algebra",
    lambda x: (torch.linalg.inv(x), torch.linalg.solve(x, x[0]), torch.linalg.det(x)),
    inputs=lambda: (torch.randn(SQUARE) / 4 + 2 * torch.eye(4),),
    **FLOAT32_ONLY,
)
function(
    "decompositions",
    lambda x: (torch.linalg.svdvals(x), torch.linalg.cholesky(x), torch.linalg.eigvalsh(x), torch.linalg.qr(x)[1]),
    inputs=lambda: (torch.diag(torch.arange(1.0, 5.0)) + 0.1,),
    **FLOAT32_ONLY,
)
function("matrix_power and cov", lambda x: (torch.linalg.matrix_power(x, 3), torch.cov(x)), SQUARE, **FLOAT32_ONLY)


# ---- reductions, joining, indexing -----------------------------------------------------------------------------------

joined = before(nn.Identity)
INDEX = torch.tensor([[0, 2, 1, 3], [3, 1, 0, 2], [1, 0, 2, 3]])
layer(
    "reductions",
    joined,
    VECTORS,
    call=lambda m, x: [
        op(m(x), -1) for op in (torch.sum, torch.mean, torch.prod, torch.cumsum, torch.logsumexp, torch.std)
    ],
)
layer(
    "norms",
    joined,
    VECTORS,
    call=lambda m, x: (m(x).norm(), torch.linalg.vector_norm(m(x), 3), torch.linalg.norm(m(x)), m(x).renorm(2, 0, 1.0)),
)
layer(
    "exp, log and pow",
    joined,
    VECTORS,
    call=lambda m, x: (m(x).exp() + m(x).abs().log1p() + m(x) ** 2) / (1 + torch.rsqrt(1 + x * x)),
)
layer("quantile", lambda: nn.Linear(8, 8), VECTORS, call=lambda m, x: torch.quantile(m(x), 0.3, dim=1))
layer("cat", joined, VECTORS, call=lambda m, x: torch.cat([m(x), x], 1))
layer(
    "stack and hstack",
    joined,
    VECTORS,
    call=lambda m, x: (torch.stack((m(x), x)), torch.hstack((m(x), x)), torch.vstack([x, m(x)])),
)
layer("where", joined, VECTORS, call=lambda m, x: torch.where(x > 0, m(x), x))
layer(
    "gather and scatter",
    joined,
    VECTORS,
    call=lambda m, x: m(x).gather(1, INDEX) + torch.zeros(3, 4).scatter(1, INDEX, m(x)[:, :4].float()),
)
layer("index_copy", joined, VECTORS, call=lambda m, x: m(x).index_copy(0, torch.tensor([0]), x[:1]))
layer("sort and topk", joined, VECTORS, call=lambda m, x: (m(x).sort(-1), torch.topk(m(x), 2)))
layer("residual", joined, VECTORS, call=lambda m, x: x + m(x) * m(x).sigmoid() - x.mean())


# ---- sparse, complex, integer, float64 -------------------------------------------------------------------------------

EDGES = torch.tensor([[0, 1, 2, 0], [1, 2, 0, 0]])


def adjacency(dtype: torch.dtype) -> Tensor:
    return torch.sparse_coo_tensor(EDGES, torch.linspace(0.5, 2, 4, dtype=dtype), (3, 3)).coalesce()


for name, op in {
    "sparse @": lambda a, x: a @ x,
    "torch.sparse.mm": lambda a, x: torch.sparse.mm(a, x),
    "torch.spmm": lambda a, x: torch.spmm(a, x),
    "sparse mv": lambda a, x: torch.mv(a, x[:, 0]),
    "sparse addmm": lambda a, x: torch.sparse.addmm(x, a, x),
}.items():
    layer(f"{name}", lambda: nn.Linear(8, 4), VECTORS, call=lambda m, x, op=op: op(adjacency(torch.float32), m(x)))
layer("rfft", joined, VECTORS, call=lambda m, x: torch.fft.irfft(torch.fft.rfft(m(x)) * 0.5))
layer("fft2", joined, (8, 8), call=lambda m, x: torch.fft.ifft2(torch.fft.fft2(m(x))).real)
layer(
    "stft",
    lambda: nn.Linear(8, 16),
    VECTORS,
    call=lambda m, x: torch.stft(m(x), 8, window=torch.hann_window(8), return_complex=True).abs(),
)
layer(
    "view_as_complex",
    joined,
    VECTORS,
    call=lambda m, x: torch.view_as_real(torch.view_as_complex(m(x).view(3, 4, 2)) ** 2),
)


class Rotary(nn.Linear):
    """Positions turned as complex numbers, as Llama does it."""

    def forward(self, x: Tensor) -> Tensor:
        turns = torch.polar(torch.ones(5, 4), torch.outer(torch.arange(5.0), torch.tensor([1.0, 0.1, 0.01, 0.001])))
        pairs = torch.view_as_complex(super().forward(x).float().unflatten(-1, (4, 2)))
        return torch.view_as_real(pairs * turns).flatten(-2).type_as(x)


layer("rotary positions", lambda: Rotary(8, 8), SEQUENCES)
layer(
    "complex linear",
    lambda: nn.Linear(8, 4, dtype=torch.complex64),
    inputs=lambda: (torch.randn(VECTORS, dtype=torch.complex64),),
    given=(torch.float32,),
)
function(
    "complex weight on a real input",
    lambda x, w: (x.to(torch.complex64) @ torch.complex(w, w)).abs(),
    VECTORS,
    weights=((8, 4),),
    **FLOAT32_ONLY,
)
layer(
    "float64",
    lambda: nn.Sequential(nn.Linear(8, 8, dtype=torch.float64), nn.LayerNorm(8, dtype=torch.float64)),
    VECTORS,
    call=lambda m, x: m(x.double()),
)
layer(
    "float64 in between",
    lambda: nn.Linear(8, 4),
    VECTORS,
    call=lambda m, x: m(x).double().softmax(-1) @ torch.ones(4, 2, dtype=torch.float64),
)
function(
    "integer products",
    lambda x, w: ((x.long() @ x.long().T) + torch.einsum("ij,kj->ik", x.int(), x.int())).float() @ x @ w,
    VECTORS,
    weights=((8, 2),),
)


# ---- in place, out= --------------------------------------------------------------------------------------------------


def _edit(module: nn.Module, x: Tensor) -> Tensor:
    hidden = module(x).clone()
    hidden += 1
    hidden.mul_(x).clamp_(-2, 2)
    hidden[0] = x[0]
    hidden[:, :2].add_(x[:, 2:4])
    hidden.masked_fill_(x > 1, 0.5)
    return hidden.index_add_(0, torch.tensor([1]), hidden.detach()[:1].clone())


layer("edits in place", joined, VECTORS, call=_edit)
function(
    "addmm_ and baddbmm_",
    lambda x, w, v: (x.new_ones(3, 4).addmm_(x, w), x.new_ones(1, 3, 4).baddbmm_(x[None], v)),
    VECTORS,
    weights=((8, 4), (1, 8, 4)),
    **FLOAT32_ONLY,
)
function(
    "out= of a product", lambda x: torch.mm(x, x.T, out=torch.empty(3, 3)) @ x, VECTORS, variables=0, **FLOAT32_ONLY
)
function("out= of cat", lambda x: torch.cat([x, x], out=torch.empty(6, 8)), VECTORS, variables=0, **FLOAT32_ONLY)
layer(
    "augmented @",
    lambda: nn.Linear(8, 8),
    VECTORS,
    call=lambda m, x: functools.reduce(lambda a, b: a @ b, [m(x), m.weight, m.weight]),
)


# ---- function transforms ---------------------------------------------------------------------------------------------


def _loss(module: nn.Module, parameters: dict[str, Tensor], x: Tensor) -> Tensor:
    return functional_call(module, parameters, (x,)).float().pow(2).mean()


def _parameters(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_parameters())


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4))


def norm_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 6), nn.LayerNorm(6), nn.Linear(6, 4))


layer(
    "functional_call",
    mlp,
    VECTORS,
    call=lambda m, x: functional_call(m, {n: p * 2 for n, p in m.named_parameters()}, (x,)),
)
layer("func.grad", mlp, VECTORS, call=lambda m, x: list(grad(lambda p: _loss(m, p, x))(_parameters(m)).values()))
layer("func.grad of the input", mlp, VECTORS, call=lambda m, x: grad(lambda y: m(y).float().pow(2).sum())(x))
layer("vmap", mlp, VECTORS, call=lambda m, x: vmap(m)(x))
layer(
    "gradients of each sample",
    mlp,
    VECTORS,
    call=lambda m, x: list(vmap(grad(lambda p, y: _loss(m, p, y)), in_dims=(None, 0))(_parameters(m), x).values()),
)
layer("vjp", mlp, VECTORS, call=lambda m, x: [(out, back(torch.ones_like(out))) for out, back in [vjp(m, x)]])
layer("jvp", mlp, VECTORS, call=lambda m, x: jvp(m, (x,), (torch.ones_like(x),)))
layer("jvp through LayerNorm", norm_mlp, VECTORS, call=lambda m, x: jvp(m, (x,), (torch.ones_like(x),)))
layer("jacrev", mlp, VECTORS, call=lambda m, x: jacrev(m)(x))
layer("jacfwd", mlp, VECTORS, call=lambda m, x: jacfwd(m)(x))
layer("hessian", mlp, (8,), call=lambda m, x: hessian(lambda y: m(y).float().pow(2).sum())(x))
layer(
    "jacobian of torch.autograd",
    mlp,
    VECTORS,
    call=lambda m, x: torch.autograd.functional.jacobian(m, x, create_graph=True),
)


def _ensemble(module: nn.ModuleList, x: Tensor) -> Tensor:
    stacked = {
        name: torch.stack([dict(one.named_parameters())[name] for one in module])
        for name, _ in module[0].named_parameters()
    }
    return vmap(lambda p: functional_call(module[0], p, (x,)))(stacked)


layer("ensemble", lambda: nn.ModuleList([mlp(), mlp()]), VECTORS, call=_ensemble)


def _penalty(module: nn.Module, x: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(module(x).float().sum(), x, create_graph=True)
    return gradient.float().norm(dim=1)


layer("gradient penalty", mlp, VECTORS, call=_penalty, needs_gradients=True)


# ---- nested tensors --------------------------------------------------------------------------------------------------


def _jagged(x: Tensor) -> Tensor:
    return torch.nested.as_nested_tensor([x[0, :2], x[1]], layout=torch.jagged)


layer("jagged linear", lambda: nn.Linear(8, 4), SEQUENCES, call=lambda m, x: m(_jagged(x)).values())
layer(
    "jagged perceptron",
    lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4)),
    SEQUENCES,
    call=lambda m, x: m(_jagged(x)).values(),
)
layer(
    "strided nested linear",
    lambda: nn.Linear(8, 4),
    SEQUENCES,
    call=lambda m, x: m(torch.nested.as_nested_tensor([x[0, :2], x[1]])).to_padded_tensor(0.0),
)


def _jagged_attention(module: nn.Module, x: Tensor) -> Tensor:
    q, k, v = (one(_jagged(x)).unflatten(-1, (2, 8)).transpose(1, 2) for one in module)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).values()


layer(
    "jagged attention", lambda: nn.ModuleList([nn.Linear(8, 16) for _ in range(3)]), SEQUENCES, call=_jagged_attention
)


# ---- hooks -----------------------------------------------------------------------------------------------------------


def hooked(set_hooks: Callable[[nn.Module], Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        module = mlp()
        set_hooks(module)
        return module

    return make


layer(
    "forward hook", hooked(lambda m: m[0].register_forward_hook(lambda module, args, out: out @ out.T @ out)), VECTORS
)
layer(
    "forward pre-hook", hooked(lambda m: m[2].register_forward_pre_hook(lambda module, args: (args[0] * 2,))), VECTORS
)
layer(
    "full backward hook",
    hooked(
        lambda m: m[0].register_full_backward_hook(
            lambda module, gin, gout: tuple(g if g is None else g * 2 for g in gin)
        )
    ),
    VECTORS,
)
layer(
    "full backward pre-hook",
    hooked(lambda m: m[0].register_full_backward_pre_hook(lambda module, gout: (gout[0] / 2,))),
    VECTORS,
)
layer("gradient hook of a weight", hooked(lambda m: m[0].weight.register_hook(lambda g: g.clamp(-0.1, 0.1))), VECTORS)


def _hook_result(module: nn.Module, x: Tensor) -> Tensor:
    hidden = module[0](x)
    hidden.register_hook(lambda g: g * 0.5 + g.sign())
    return module[2](hidden.tanh())


layer("gradient hook of a result", mlp, VECTORS, call=_hook_result, needs_gradients=True)


def _packed(module: nn.Module, x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (t.dtype, t.detach().double()), lambda p: p[1].to(p[0])):
        return module(x)


layer("hooks of saved tensors", mlp, VECTORS, call=_packed)
layer("save_on_cpu", mlp, VECTORS, call=lambda m, x: _within(torch.autograd.graph.save_on_cpu(), m, x))


def _within(context: AbstractContextManager[Any], module: nn.Module, *inputs: Any) -> Any:
    with context:
        return module(*inputs)


# ---- activation checkpointing ----------------------------------------------------------------------------------------


def _selective(module: nn.Module, x: Tensor) -> Tensor:
    saved = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
    context = functools.partial(checkpoint.create_selective_checkpoint_contexts, saved)
    return checkpoint.checkpoint(module, x, use_reentrant=False, context_fn=context)


for name, inner in {"": mlp, " with Dropout": before(lambda: nn.Dropout(0.3)), " of attention": encoder_layer}.items():
    layer(f"checkpoint{name}", inner, SEQUENCES, call=lambda m, x: checkpoint.checkpoint(m, x, use_reentrant=False))
    layer(
        f"reentrant checkpoint{name}",
        inner,
        SEQUENCES,
        call=lambda m, x: checkpoint.checkpoint(m, x, use_reentrant=True),
    )
layer("selective checkpoint", norm_mlp, SEQUENCES, call=_selective)
layer(
    "checkpoint_sequential",
    lambda: nn.Sequential(mlp(), nn.Linear(4, 8), norm_mlp()),
    SEQUENCES,
    call=lambda m, x: checkpoint.checkpoint_sequential(m, 2, x, use_reentrant=False),
)


# ---- traces ----------------------------------------------------------------------------------------------------------

layer("torch.fx, traced before", lambda: torch.fx.symbolic_trace(norm_mlp()), VECTORS)


def _export(model: nn.Module, x: Tensor) -> Tensor:
    module = torch.export.export(model, (x,), strict=False).module
    # torch 2.6 checks none
    return module(check_guards=False)(x) if "check_guards" in inspect.signature(module).parameters else module()(x)


layer("torch.fx, traced in the forward", norm_mlp, VECTORS, call=lambda m, x: torch.fx.symbolic_trace(m)(x))
layer("torch.jit.trace", mlp, VECTORS, call=lambda m, x: torch.jit.trace(m, (x,), check_trace=False)(x), **FLOAT32_ONLY)
layer(
    "torch.export",
    mlp,
    VECTORS,
    call=_export,
    **FLOAT32_ONLY,
)
layer(
    "make_fx",
    mlp,
    VECTORS,
    call=lambda m, x: torch.fx.experimental.proxy_tensor.make_fx(m)(x)(x),
    variables=0,
    **FLOAT32_ONLY,
)


# ---- weights ---------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """An embedding that is the output layer too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.middle, self.head = nn.Embedding(9, 8), nn.Linear(8, 8), nn.Linear(8, 9, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, indices: Tensor) -> Tensor:
        return self.head(self.middle(self.embedding(indices)).relu())


class Square(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight @ weight


def _parametrized() -> nn.Module:
    module = nn.Linear(8, 8)
    parametrize.register_parametrization(module, "weight", Square())
    return module


def _old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.utils.weight_norm(nn.Linear(8, 4))


layer("tied weights", Tied, **tokens)
layer("weight_norm", lambda: parametrizations.weight_norm(nn.Linear(8, 4)), VECTORS)
layer("weight_norm of a convolution", lambda: parametrizations.weight_norm(nn.Conv2d(4, 4, 3)), IMAGES)
layer("weight_norm, the old", _old_weight_norm, VECTORS)
layer("spectral_norm", lambda: parametrizations.spectral_norm(nn.Linear(8, 4)), VECTORS)
layer("spectral_norm, the old", lambda: nn.utils.spectral_norm(nn.Linear(8, 4)), VECTORS)
layer("orthogonal", lambda: parametrizations.orthogonal(nn.Linear(8, 4)), VECTORS)
layer("a parametrization of one's own", _parametrized, VECTORS)
layer(
    "cached parametrization",
    _parametrized,
    VECTORS,
    call=lambda m, x: _within(parametrize.cached(), lambda y: m(m(y)), x),
)
layer(
    "a view of a weight",
    lambda: nn.Linear(8, 8),
    VECTORS,
    call=lambda m, x: F.linear(x, m.weight[:4], m.bias[:4]) + x @ m.weight.T[:, 4:],
)
layer("a scaled weight", lambda: nn.Linear(8, 8), VECTORS, call=lambda m, x: F.linear(x, m.weight * 0.5, m.bias))
layer(
    "a low-rank update",
    lambda: nn.ParameterDict({"base": torch.randn(8, 4), "a": torch.randn(8, 2), "b": torch.randn(2, 4)}),
    VECTORS,
    call=lambda m, x: x @ m["base"].detach() + (x @ m["a"]) @ m["b"],
)
layer(
    "experts",
    lambda: nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)]),
    VECTORS,
    call=lambda m, x: (
        torch.zeros_like(x)
        .index_add(0, torch.tensor([0, 2]), m[0](x[[0, 2]]).to(x.dtype))
        .index_add(0, torch.tensor([1]), m[1](x[[1]]).to(x.dtype))
    ),
)


def _partly_frozen(module: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        hidden = module[0](x)
    return module[2](hidden.tanh()) + module(x).detach() + module(x)


layer("parts without gradients", mlp, VECTORS, call=_partly_frozen)
layer("inference mode inside", mlp, VECTORS, call=lambda m, x: m(x) + _within(torch.inference_mode(), m, x).clone())
layer("a copy of the model", mlp, VECTORS, call=lambda m, x: m(x) + copy.deepcopy(m)(x))


# ---- autograd functions of one's own ---------------------------------------------------------------------------------


class Product(torch.autograd.Function):
    """Written without a thought of mixed precision: what it saves has the dtypes that it was given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * 2 + weight.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient * 2, gradient.sum().to(weight.dtype).expand_as(weight)


def _linear_function(cast_inputs: torch.dtype | None, is_decorated: bool = True) -> type[torch.autograd.Function]:
    forwarded = torch.amp.custom_fwd(device_type="cpu", cast_inputs=cast_inputs) if is_decorated else lambda f: f
    backwarded = torch.amp.custom_bwd(device_type="cpu") if is_decorated else lambda f: f

    class Linear(torch.autograd.Function):
        @staticmethod
        @forwarded
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            return x @ weight

        @staticmethod
        @backwarded
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
            x, weight = ctx.saved_tensors
            return gradient @ weight.T, x.T @ gradient

    return Linear


weights = {"weights": ((8, 8),)}
function("autograd.Function", lambda x, w: Product.apply(x @ w, w), VECTORS, **weights)
function(
    "autograd.Function with products",
    lambda x, w: _linear_function(None, False).apply(x, w.to(x.dtype)),
    VECTORS,
    given=(LOW,),
    **weights,
)
function("custom_fwd", lambda x, w: _linear_function(None).apply(x, w), VECTORS, **weights)
function("custom_fwd with float32 inputs", lambda x, w: _linear_function(torch.float32).apply(x, w), VECTORS, **weights)
function("custom_fwd with low inputs", lambda x, w: _linear_function(LOW).apply(x, w), VECTORS, **weights)
layer(
    "autocast disabled inside",
    lambda: nn.Linear(8, 4),
    VECTORS,
    call=lambda m, x: _within(torch.autocast("cpu", enabled=False), m, x.float()),
)
layer(
    "is_autocast_enabled",
    lambda: nn.Linear(8, 4),
    VECTORS,
    call=lambda m, x: m(x) * (2 if torch.is_autocast_enabled("cpu") else 1),
)


# ---- running one -----------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """A construct in one mode, with inputs of one dtype: its module, and an optimizer unless it has no weights."""

    construct: Construct
    is_training: bool
    given: torch.dtype
    module: nn.Module = field(init=False)
    optimizer: torch.optim.Optimizer | None = field(init=False)

    def __post_init__(self) -> None:
        torch.random.default_generator.manual_seed(0)
        self.module = self.construct.make().train(self.is_training)
        parameters = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.SGD(parameters, lr=0.0625) if parameters else None

    def make_inputs(self) -> Inputs:
        torch.random.default_generator.manual_seed(1)
        count = 0
        values = []
        for value in self.construct.inputs():
            if isinstance(value, Tensor) and value.dtype in (torch.float32, torch.complex64):
                value = value.clone() if value.is_complex() else value.to(self.given, copy=True)
                value.requires_grad_(count < self.construct.variables)
                count += 1
            values.append(value)
        return tuple(values)


def train(
    run: Run,
    forward: Callable[[], AbstractContextManager[Any]],
    scaled: Callable[[Tensor, Any], AbstractContextManager[Tensor]],
) -> dict[str, Any]:
    """Take two steps, and return what came of them: results, gradients of inputs and weights, weights.

    Args:
        forward: opens the context of the forward.
        scaled: opens that of the backward, for a loss and an optimizer, and gives the loss that goes backward.
    """
    seen: dict[str, Any] = {}
    for step in range(2):
        inputs = run.make_inputs()
        with forward():
            results = list(tensors_of(run.construct.call(run.module, *_as_results(inputs))))
        seen[f"results {step}"] = [result.detach().clone() for result in results]
        losses = [_as_loss(result) for result in results if result.requires_grad]
        if losses:
            with scaled(sum(losses[1:], losses[0]), run.optimizer) as loss:
                loss.backward()
        seen[f"gradients of inputs {step}"] = [value.grad for value in inputs if isinstance(value, Tensor)]
        if run.optimizer is not None:
            stepped = [parameter for group in run.optimizer.param_groups for parameter in group["params"]]
            seen[f"gradients {step}"] = [None if one.grad is None else one.grad.clone() for one in stepped]
            run.optimizer.step()
            run.optimizer.zero_grad()
    state = run.module.state_dict().values()
    seen["weights"] = [value.detach().clone() for value in state if isinstance(value, Tensor)]
    if not run.is_training and not run.construct.needs_gradients:
        inputs = tuple(value.detach() if isinstance(value, Tensor) else value for value in run.make_inputs())
        with torch.no_grad(), forward():
            seen["without gradients"] = [value.clone() for value in tensors_of(run.construct.call(run.module, *inputs))]
    return seen


def _as_results(inputs: Inputs) -> Inputs:
    """Inputs as they come from other layers: autocast keeps copies of float32 leaves, so that the gradients of one that
    is used twice are added in the low dtype.
    """
    return tuple(value * 1 if isinstance(value, Tensor) and value.requires_grad else value for value in inputs)


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in what a module returns."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_of(item)
    elif isinstance(value, Mapping):
        yield from tensors_of(list(value.values()))


def _as_loss(result: Tensor) -> Tensor:
    """A float32 or float64 scalar whose gradient differs from element to element, by ops that no list casts."""
    value = torch.view_as_real(result) if result.is_complex() else result
    value = value if value.dtype is torch.float64 else value.to(torch.float32)
    factors = torch.linspace(-1.0, 2.0, value.numel(), dtype=value.dtype).view(value.shape)
    return (value * factors).sum().float()
