"""`fused_layer_norm_cuda`, the extension behind Apex's norms, which many repositories call by themselves.

A forward function returns the output with the statistics of each row, at full precision and of shape (rows,): the mean
(LayerNorm alone) and 1 / sqrt(variance + eps). A backward function takes them, and computes them anew. "affine" is with
weight and bias; the output has the dtype of the input, that of the "mixed" functions the dtype of the weight.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import ArgumentTypeError
from .updates import full_dtype

Shape = Sequence[int]


def forward(input: Tensor, normalized_shape: Shape, eps: float) -> list[Tensor]:
    """[output, means, inverse deviations] of LayerNorm without weight and bias."""
    output = F.layer_norm(_full(input), tuple(normalized_shape), eps=eps)
    return [output.to(input.dtype), *_statistics(input, normalized_shape, eps)]


def forward_affine(input: Tensor, normalized_shape: Shape, gamma: Tensor, beta: Tensor, eps: float) -> list[Tensor]:
    """[output, means, inverse deviations] of LayerNorm."""
    output, *statistics = forward_affine_mixed_dtypes(input, normalized_shape, _full(gamma), beta, eps)
    return [output.to(input.dtype), *statistics]


def forward_affine_mixed_dtypes(
    input: Tensor, normalized_shape: Shape, gamma: Tensor, beta: Tensor, eps: float
) -> list[Tensor]:
    """The same in the dtype of `gamma`."""
    output = F.layer_norm(_full(input), tuple(normalized_shape), _full(gamma), _full(beta), eps)
    return [output.to(gamma.dtype), *_statistics(input, normalized_shape, eps)]


def backward(
    dout: Tensor,
    mean: Tensor | None,
    invvar: Tensor,
    input: Tensor,
    normalized_shape: Shape,
    eps: float,
    memory_efficient: bool = False,
) -> Tensor:
    """The gradient of the input."""
    _check(memory_efficient)
    return _differentiate(lambda x: F.layer_norm(x, tuple(normalized_shape), eps=eps), dout, input)[0]


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
    """The gradients of the input, of `gamma` and of `beta`."""
    _check(memory_efficient)
    shape = tuple(normalized_shape)
    return _differentiate(lambda x, weight, bias: F.layer_norm(x, shape, weight, bias, eps), dout, input, gamma, beta)


def rms_forward(input: Tensor, normalized_shape: Shape, eps: float) -> list[Tensor]:
    """[output, inverse deviations] of RMSNorm without a weight."""
    output = F.rms_norm(_full(input), tuple(normalized_shape), eps=eps)
    return [output.to(input.dtype), _inverse_root(input, normalized_shape, eps)]


def rms_forward_affine(input: Tensor, normalized_shape: Shape, gamma: Tensor, eps: float) -> list[Tensor]:
    """[output, inverse deviations] of RMSNorm."""
    output, roots = rms_forward_affine_mixed_dtypes(input, normalized_shape, _full(gamma), eps)
    return [output.to(input.dtype), roots]


def rms_forward_affine_mixed_dtypes(input: Tensor, normalized_shape: Shape, gamma: Tensor, eps: float) -> list[Tensor]:
    """The same in the dtype of `gamma`."""
    output = F.rms_norm(_full(input), tuple(normalized_shape), _full(gamma), eps)
    return [output.to(gamma.dtype), _inverse_root(input, normalized_shape, eps)]


def rms_backward(
    dout: Tensor, invvar: Tensor, input: Tensor, normalized_shape: Shape, eps: float, memory_efficient: bool = False
) -> Tensor:
    """The gradient of the input."""
    _check(memory_efficient)
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
    """The gradients of the input and of `gamma`."""
    _check(memory_efficient)
    return _differentiate(lambda x, weight: F.rms_norm(x, tuple(normalized_shape), weight, eps), dout, input, gamma)


def _full(tensor: Tensor) -> Tensor:
    return tensor.to(full_dtype(tensor))


def _rows(input: Tensor, normalized_shape: Shape) -> Tensor:
    return _full(input).reshape(-1, torch.Size(normalized_shape).numel())


def _statistics(input: Tensor, normalized_shape: Shape, eps: float) -> tuple[Tensor, Tensor]:
    variance, mean = torch.var_mean(_rows(input, normalized_shape), 1, correction=0)
    return mean, (variance + eps).rsqrt()


def _inverse_root(input: Tensor, normalized_shape: Shape, eps: float) -> Tensor:
    root: Tensor = (_rows(input, normalized_shape).square().mean(1) + eps).rsqrt()
    return root


def _differentiate(function: Callable[..., Tensor], dout: Tensor, *tensors: Tensor) -> list[Tensor]:
    """Return the gradients of the tensors, in their dtypes."""
    with torch.enable_grad():
        leaves = [_full(tensor).detach().requires_grad_() for tensor in tensors]
        output = function(*leaves)
    gradients = torch.autograd.grad(output, leaves, dout.to(output.dtype))
    return [gradient.to(tensor.dtype) for gradient, tensor in zip(gradients, tensors, strict=True)]


def _check(memory_efficient: bool) -> None:
    if memory_efficient:
        raise ArgumentTypeError(
            "fused_layer_norm_cuda: memory_efficient takes the output in the place of the input, which is not offered:"
            " save the input, and leave memory_efficient out"
        )
