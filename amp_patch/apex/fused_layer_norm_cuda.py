"""`fused_layer_norm_cuda`, the compiled module behind Apex's norms, which scripts may call directly.

A *row* is a part of the input that is normalized by itself. A forward function returns the output and the statistics of
the rows, of shape (rows,), in float32 (float64 for float64). For LayerNorm, these are the means and the inverse
deviations 1 / sqrt(variance + eps); for RMSNorm, only 1 / sqrt(mean square + eps). A backward function takes the
statistics as arguments, but computes its own, and raises ArgumentTypeError if `memory_efficient` is true. "affine"
functions take a weight (`gamma`), and for LayerNorm a bias (`beta`). The output has the dtype of the input, or for
"mixed" functions the dtype of the weight.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import ArgumentTypeError
from .updates import full_dtype

Shape = Sequence[int]


def forward(input: Tensor, normalized_shape: Shape, eps: float) -> list[Tensor]:
    """Return [output, means, inverse deviations] of LayerNorm without weight and bias."""
    return _layer_norm(input, normalized_shape, None, None, eps, input.dtype)


def forward_affine(input: Tensor, normalized_shape: Shape, gamma: Tensor, beta: Tensor, eps: float) -> list[Tensor]:
    """Return [output, means, inverse deviations] of LayerNorm."""
    return _layer_norm(input, normalized_shape, gamma, beta, eps, input.dtype)


def forward_affine_mixed_dtypes(
    input: Tensor, normalized_shape: Shape, gamma: Tensor, beta: Tensor, eps: float
) -> list[Tensor]:
    """Like `forward_affine`, with the output in the dtype of `gamma`."""
    return _layer_norm(input, normalized_shape, gamma, beta, eps, gamma.dtype)


def backward(
    dout: Tensor,
    mean: Tensor | None,
    invvar: Tensor,
    input: Tensor,
    normalized_shape: Shape,
    eps: float,
    memory_efficient: bool = False,
) -> Tensor:
    """Return the gradient of the input."""
    _refuse_memory_efficient(memory_efficient)
    shape = tuple(normalized_shape)
    return _differentiate(lambda x: F.layer_norm(x, shape, eps=eps), dout, input)[0]


def backward_affine(
    dout: Tensor,
    mean: Tensor | None,
    invvar: Tensor,
    input: Tensor,
    normalized_shape: Shape,
    gamma: Tensor,
    beta: Tensor,
    eps: float,
    memory_efficient: bool = False,
) -> list[Tensor]:
    """Return the gradients of the input, of `gamma` and of `beta`."""
    _refuse_memory_efficient(memory_efficient)
    shape = tuple(normalized_shape)
    return _differentiate(lambda x, weight, bias: F.layer_norm(x, shape, weight, bias, eps), dout, input, gamma, beta)


def rms_forward(input: Tensor, normalized_shape: Shape, eps: float) -> list[Tensor]:
    """Return [output, inverse deviations] of RMSNorm without a weight."""
    return _rms_norm(input, normalized_shape, None, eps, input.dtype)


def rms_forward_affine(input: Tensor, normalized_shape: Shape, gamma: Tensor, eps: float) -> list[Tensor]:
    """Return [output, inverse deviations] of RMSNorm."""
    return _rms_norm(input, normalized_shape, gamma, eps, input.dtype)


def rms_forward_affine_mixed_dtypes(input: Tensor, normalized_shape: Shape, gamma: Tensor, eps: float) -> list[Tensor]:
    """Like `rms_forward_affine`, with the output in the dtype of `gamma`."""
    return _rms_norm(input, normalized_shape, gamma, eps, gamma.dtype)


def rms_backward(
    dout: Tensor, invvar: Tensor, input: Tensor, normalized_shape: Shape, eps: float, memory_efficient: bool = False
) -> Tensor:
    """Return the gradient of the input."""
    _refuse_memory_efficient(memory_efficient)
    return _differentiate(lambda x: F.rms_norm(x, tuple(normalized_shape), eps=eps), dout, input)[0]


def rms_backward_affine(
    dout: Tensor,
    invvar: Tensor,
    input: Tensor,
    normalized_shape: Shape,
    gamma: Tensor,
    eps: float,
    memory_efficient: bool = False,
) -> list[Tensor]:
    """Return the gradients of the input and of `gamma`."""
    _refuse_memory_efficient(memory_efficient)
    return _differentiate(lambda x, weight: F.rms_norm(x, tuple(normalized_shape), weight, eps), dout, input, gamma)


def _layer_norm(
    input: Tensor, shape: Shape, gamma: Tensor | None, beta: Tensor | None, eps: float, dtype: torch.dtype
) -> list[Tensor]:
    output = F.layer_norm(_to_full(input), tuple(shape), _to_full(gamma), _to_full(beta), eps)
    variance, mean = torch.var_mean(_rows(input, shape), 1, correction=0)
    return [output.to(dtype), mean, (variance + eps).rsqrt()]


def _rms_norm(input: Tensor, shape: Shape, gamma: Tensor | None, eps: float, dtype: torch.dtype) -> list[Tensor]:
    output = F.rms_norm(_to_full(input), tuple(shape), _to_full(gamma), eps)
    return [output.to(dtype), (_rows(input, shape).square().mean(1) + eps).rsqrt()]


def _to_full(tensor: Tensor | None) -> Any:
    return None if tensor is None else tensor.to(full_dtype(tensor))


def _rows(input: Tensor, shape: Shape) -> Tensor:
    rows: Tensor = _to_full(input).reshape(-1, torch.Size(shape).numel())
    return rows


def _differentiate(function: Callable[..., Tensor], dout: Tensor, *tensors: Tensor) -> list[Tensor]:
    """Return the gradients of the tensors, each in the dtype of its tensor."""
    with torch.enable_grad():
        # run the forward again, at full precision, because torch's backward takes the statistics in another form
        leaves = [_to_full(tensor).detach().requires_grad_() for tensor in tensors]
        output = function(*leaves)
    gradients = torch.autograd.grad(output, leaves, dout.to(output.dtype))
    return [gradient.to(tensor.dtype) for gradient, tensor in zip(gradients, tensors, strict=True)]


def _refuse_memory_efficient(memory_efficient: bool) -> None:
    if memory_efficient:
        raise ArgumentTypeError(
            "fused_layer_norm_cuda: memory_efficient takes the output in place of the input, which is not supported:"
            " save the input, and leave memory_efficient out"
        )
