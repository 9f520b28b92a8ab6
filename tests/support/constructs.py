"""What models are made of, as a table: layers, function transforms, hooks, ways to call and to trace a module. What is
one op is compared with autocast in tests/casting/test_conformance.py.

A construct is a module, its inputs and how it is called. It runs under whatever casts are in force, and `train` says
what came of two steps of it.
"""

import copy
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from hand_casts import tensors_of
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jvp, vmap
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
VECTORS, IMAGES, SEQUENCES = (3, 8), (2, 4, 6, 6), (2, 5, 8)


def before(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """The layer behind a linear one, whose result is low."""
    return lambda: nn.Sequential(nn.Linear(8, 8), make())


# ---- linear layers and convolutions ----------------------------------------------------------------------------------

layer("linear", lambda: nn.Linear(8, 4), VECTORS)
layer(
    "linear by keywords",
    lambda: nn.Linear(8, 4),
    VECTORS,
    call=lambda m, x: F.linear(bias=m.bias, input=x, weight=m.weight),
)
layer("linear called twice", lambda: nn.Linear(8, 8), VECTORS, call=lambda m, x: m(torch.tanh(m(x))))
layer("perceptron", lambda: nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4)), VECTORS)
layer("conv2d", lambda: nn.Conv2d(4, 6, 3, padding=1), IMAGES)
layer("conv2d padded by reflection", lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), IMAGES)
layer("conv2d in channels_last", lambda: nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last), IMAGES)
layer("conv_transpose2d", lambda: nn.ConvTranspose2d(4, 3, 3, stride=2), (1, 4, 3, 3))


# ---- embeddings ------------------------------------------------------------------------------------------------------

TOKENS = torch.tensor([[1, 4, 2, 0], [3, 3, 8, 5]])
tokens = {"inputs": lambda: (TOKENS,), **FLOAT32_ONLY}

layer("embedding", lambda: nn.Sequential(nn.Embedding(9, 8, padding_idx=0), nn.Linear(8, 4)), **tokens)
layer(
    "embedding with sparse gradients", lambda: nn.Sequential(nn.Embedding(9, 8, sparse=True), nn.Linear(8, 4)), **tokens
)


# ---- norms, dropout, activations, pooling ----------------------------------------------------------------------------

layer("BatchNorm2d", lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)), IMAGES)
layer("LayerNorm", before(lambda: nn.LayerNorm(8)), SEQUENCES)
layer("GroupNorm", lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.GroupNorm(2, 4)), IMAGES)
layer("RMSNorm", before(lambda: nn.RMSNorm(8)), SEQUENCES)
layer("average pooling", lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(1)), IMAGES)


# ---- attention -------------------------------------------------------------------------------------------------------

HEADS = ((2, 4, 5, 8),) * 3
ALLOWED = torch.ones(5, 5, dtype=torch.bool).tril()
PADDING = torch.tensor([[False, False, False, False, True], [False, False, False, True, True]])

function("attention, causal", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), *HEADS)
function(
    "attention, learned bias",
    lambda q, k, v, bias: F.scaled_dot_product_attention(q, k, v, bias),
    *HEADS,
    weights=((5, 5),),
)
function(
    "attention, causal bias", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=_causal_bias()), *HEADS
)


def _causal_bias() -> Tensor:
    from torch.nn.attention.bias import causal_lower_right

    return causal_lower_right(5, 5)


def _self_attention(**options: Any) -> Callable[..., Any]:
    return lambda module, x: module(x, x, x, **options)


layer(
    "MultiheadAttention, padding",
    lambda: nn.MultiheadAttention(8, 2, batch_first=True),
    SEQUENCES,
    call=_self_attention(key_padding_mask=PADDING),
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


def encoder_layer(**options: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True, **options)


layer("TransformerEncoderLayer", encoder_layer, SEQUENCES)
layer("Transformer", lambda: nn.Transformer(8, 2, 1, 1, 16, batch_first=True), SEQUENCES, (2, 3, 8))


# ---- losses ----------------------------------------------------------------------------------------------------------

layer(
    "cross_entropy",
    lambda: nn.Linear(8, 8),
    variables=1,
    inputs=lambda: (torch.randn(VECTORS), torch.tensor([1, 0, 7])),
    call=lambda m, x, classes: (F.cross_entropy(m(x), classes), F.cross_entropy(x, classes)),
)
layer(
    "binary_cross_entropy_with_logits",
    lambda: nn.Linear(8, 8),
    variables=1,
    inputs=lambda: (torch.randn(VECTORS), torch.linspace(0, 1, 24).view(3, 8)),
    call=lambda m, x, targets: F.binary_cross_entropy_with_logits(m(x), targets, pos_weight=torch.full((8,), 2.0)),
)
layer(
    "AdaptiveLogSoftmaxWithLoss",
    lambda: nn.AdaptiveLogSoftmaxWithLoss(8, 10, [4, 7], div_value=2.0),
    inputs=lambda: (torch.randn(4, 8), torch.tensor([0, 5, 9, 3])),
)


# ---- recurrent layers ------------------------------------------------------------------------------------------------

layer("LSTM", lambda: nn.LSTM(8, 4), SEQUENCES)
layer("LSTM, both ways", lambda: nn.LSTM(8, 4, num_layers=2, bidirectional=True, batch_first=True), SEQUENCES)
layer(
    "LSTM of a packed sequence",
    lambda: nn.LSTM(8, 4, batch_first=True),
    SEQUENCES,
    call=lambda m, x: rnn.pad_packed_sequence(
        m(rnn.pack_padded_sequence(x, torch.tensor([5, 3]), batch_first=True))[0]
    )[0],
)
layer("GRU", lambda: nn.GRU(8, 4), SEQUENCES)
layer("LSTMCell", lambda: nn.LSTMCell(8, 4), VECTORS)


# ---- products, joining -----------------------------------------------------------------------------------------------

function("@", lambda x, w: x @ w, VECTORS, weights=((8, 4),))
function("einsum", lambda x, w: torch.einsum("bsi,io->bso", x, w), SEQUENCES, weights=((8, 4),))
function("products of one input", lambda x, w: (x @ w) * torch.sigmoid(x @ w), VECTORS, weights=((8, 8),))

joined = before(nn.Identity)
layer("cat", joined, VECTORS, call=lambda m, x: torch.cat([m(x), x], 1))
layer("residual", joined, VECTORS, call=lambda m, x: x + m(x) * m(x).sigmoid() - x.mean())


# ---- complex, integer, float64 ---------------------------------------------------------------------------------------


class Rotary(nn.Linear):
    """Positions turned as complex numbers, as Llama does it."""

    def forward(self, x: Tensor) -> Tensor:
        turns = torch.polar(torch.ones(5, 4), torch.outer(torch.arange(5.0), torch.tensor([1.0, 0.1, 0.01, 0.001])))
        pairs = torch.view_as_complex(super().forward(x).float().unflatten(-1, (4, 2)))
        return torch.view_as_real(pairs * turns).flatten(-2).type_as(x)


layer("rotary positions", lambda: Rotary(8, 8), SEQUENCES)
layer(
    "float64",
    lambda: nn.Sequential(nn.Linear(8, 8, dtype=torch.float64), nn.LayerNorm(8, dtype=torch.float64)),
    VECTORS,
    call=lambda m, x: m(x.double()),
)


# ---- in place --------------------------------------------------------------------------------------------------------


def _edit(module: nn.Module, x: Tensor) -> Tensor:
    hidden = module(x).clone()
    hidden += 1
    hidden.mul_(x).clamp_(-2, 2)
    hidden[0] = x[0]
    hidden[:, :2].add_(x[:, 2:4])
    hidden.masked_fill_(x > 1, 0.5)
    return hidden.index_add_(0, torch.tensor([1]), hidden.detach()[:1].clone())


layer("edits in place", joined, VECTORS, call=_edit)
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
layer("vmap", mlp, VECTORS, call=lambda m, x: vmap(m)(x))
layer(
    "gradients of each sample",
    mlp,
    VECTORS,
    call=lambda m, x: list(vmap(grad(lambda p, y: _loss(m, p, y)), in_dims=(None, 0))(_parameters(m), x).values()),
)
layer("jvp", mlp, VECTORS, call=lambda m, x: jvp(m, (x,), (torch.ones_like(x),)))
layer("jvp through LayerNorm", norm_mlp, VECTORS, call=lambda m, x: jvp(m, (x,), (torch.ones_like(x),)))
layer("jacfwd", mlp, VECTORS, call=lambda m, x: jacfwd(m)(x))
layer("hessian", mlp, (8,), call=lambda m, x: hessian(lambda y: m(y).float().pow(2).sum())(x))


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


# ---- hooks -----------------------------------------------------------------------------------------------------------


def hooked(set_hooks: Callable[[nn.Module], Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        module = mlp()
        set_hooks(module)
        return module

    return make


layer(
    "full backward hook",
    hooked(
        lambda m: m[0].register_full_backward_hook(
            lambda module, gin, gout: tuple(g if g is None else g * 2 for g in gin)
        )
    ),
    VECTORS,
)


def _hook_result(module: nn.Module, x: Tensor) -> Tensor:
    hidden = module[0](x)
    hidden.register_hook(lambda g: g * 0.5 + g.sign())
    return module[2](hidden.tanh())


layer("gradient hook of a result", mlp, VECTORS, call=_hook_result, needs_gradients=True)


def _packed(module: nn.Module, x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (t.dtype, t.detach().double()), lambda p: p[1].to(p[0])):
        return module(x)


layer("hooks of saved tensors", mlp, VECTORS, call=_packed)


def _within(context: AbstractContextManager[Any], module: nn.Module, *inputs: Any) -> Any:
    with context:
        return module(*inputs)


# ---- activation checkpointing ----------------------------------------------------------------------------------------


def _selective(module: nn.Module, x: Tensor) -> Tensor:
    saved = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
    context = functools.partial(checkpoint.create_selective_checkpoint_contexts, saved)
    return checkpoint.checkpoint(module, x, use_reentrant=False, context_fn=context)


for name, inner in {"": mlp, " of attention": encoder_layer}.items():
    layer(f"checkpoint{name}", inner, SEQUENCES, call=lambda m, x: checkpoint.checkpoint(m, x, use_reentrant=False))
    layer(
        f"reentrant checkpoint{name}",
        inner,
        SEQUENCES,
        call=lambda m, x: checkpoint.checkpoint(m, x, use_reentrant=True),
    )
layer("selective checkpoint", norm_mlp, SEQUENCES, call=_selective)


# ---- traces ----------------------------------------------------------------------------------------------------------

layer("torch.fx, traced before", lambda: torch.fx.symbolic_trace(norm_mlp()), VECTORS)


layer("torch.fx, traced in the forward", norm_mlp, VECTORS, call=lambda m, x: torch.fx.symbolic_trace(m)(x))
layer("torch.jit.trace", mlp, VECTORS, call=lambda m, x: torch.jit.trace(m, (x,), check_trace=False)(x), **FLOAT32_ONLY)


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


layer("tied weights", Tied, **tokens)
layer("weight_norm", lambda: parametrizations.weight_norm(nn.Linear(8, 4)), VECTORS)
layer("spectral_norm", lambda: parametrizations.spectral_norm(nn.Linear(8, 4)), VECTORS)
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


def _as_loss(result: Tensor) -> Tensor:
    """A float32 or float64 scalar whose gradient differs from element to element, by ops that no list casts."""
    value = torch.view_as_real(result) if result.is_complex() else result
    value = value if value.dtype is torch.float64 else value.to(torch.float32)
    factors = torch.linspace(-1.0, 2.0, value.numel(), dtype=value.dtype).view(value.shape)
    return (value * factors).sum().float()
