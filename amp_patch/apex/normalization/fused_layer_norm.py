"""LayerNorm and RMSNorm with Apex's arguments, on torch's functions.

Results are computed in float32 or wider. A "fused" norm returns the dtype of the input, and a "mixed" norm the dtype of
the weight, whatever dtypes input and weight have, also under amp. One exception: a fused RMSNorm with a 16-bit weight
returns the weight's dtype, as does the norm of T5 in transformers, which `FusedRMSNorm` replaces.

By default, `eps` is 1e-5 for the layers and 1e-6 for the functions, as in Apex. `memory_efficient` has no effect.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...dtypes import LOW_DTYPES

Shape = int | Sequence[int]


def fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """`F.layer_norm`, with the result in the dtype of `input`."""
    return _normalize(F.layer_norm, input, (weight, bias), normalized_shape, eps, input.dtype)


def fused_layer_norm(
    input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """`F.layer_norm` without weight and bias, with the result in the dtype of `input`."""
    return _normalize(F.layer_norm, input, (), normalized_shape, eps, input.dtype)


def mixed_dtype_fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """`F.layer_norm`, with the result in the dtype of `weight`."""
    return _normalize(F.layer_norm, input, (weight, bias), normalized_shape, eps, weight.dtype)


def fused_rms_norm_affine(
    input: Tensor, weight: Tensor | None, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """`F.rms_norm`, with the result in the dtype of a 16-bit `weight`, else in the dtype of `input`."""
    dtype = weight.dtype if weight is not None and weight.dtype in LOW_DTYPES else input.dtype
    return _normalize(F.rms_norm, input, (weight,), normalized_shape, eps, dtype)


def fused_rms_norm(input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False) -> Tensor:
    """`F.rms_norm` without a weight, with the result in the dtype of `input`."""
    return _normalize(F.rms_norm, input, (), normalized_shape, eps, input.dtype)


def mixed_dtype_fused_rms_norm_affine(
    input: Tensor, weight: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """`F.rms_norm`, with the result in the dtype of `weight`."""
    return _normalize(F.rms_norm, input, (weight,), normalized_shape, eps, weight.dtype)


def _normalize(
    function: Callable[..., Tensor],
    input: Tensor,
    parameters: Sequence[Tensor | None],
    normalized_shape: Shape,
    eps: float,
    dtype: torch.dtype,
) -> Tensor:
    """Call `function`, and cast the result to `dtype`. If `input` and `parameters` differ in dtype, cast all of them to
    float32 before the call, or to float64 if one of them is float64.
    """
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    dtypes = {input.dtype, *(parameter.dtype for parameter in parameters if parameter is not None)}
    if len(dtypes) > 1:
        wide = torch.float64 if torch.float64 in dtypes else torch.float32
        input = input.to(wide)
        parameters = [None if parameter is None else parameter.to(wide) for parameter in parameters]
    return function(input, shape, *parameters, eps=eps).to(dtype)


class FusedLayerNormAffineFunction:
    """Apex's autograd function of this name. It has only `apply`."""

    apply = staticmethod(fused_layer_norm_affine)


class FusedRMSNormAffineFunction:
    """Apex's autograd function of this name. It has only `apply`."""

    apply = staticmethod(fused_rms_norm_affine)


class FusedLayerNorm(nn.LayerNorm):
    """torch.nn.LayerNorm with the output in the dtype of the input."""

    def __init__(
        self, normalized_shape: Any, eps: float = 1e-5, elementwise_affine: bool = True, memory_efficient: bool = False
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine)
        self.memory_efficient = memory_efficient

    def forward(self, input: Tensor) -> Tensor:
        """Normalize the last dimensions, `normalized_shape`."""
        return fused_layer_norm_affine(input, self.weight, self.bias, self.normalized_shape, self.eps)


class FusedRMSNorm(nn.RMSNorm):
    """torch.nn.RMSNorm with the output in the dtype of the input, or of a 16-bit weight."""

    def __init__(
        self, normalized_shape: Any, eps: float = 1e-5, elementwise_affine: bool = True, memory_efficient: bool = False
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine)
        self.memory_efficient = memory_efficient

    def forward(self, input: Tensor) -> Tensor:
        """Normalize the last dimensions, `normalized_shape`."""
        # torch's own default for None depends on the version of torch, and in some versions on the dtype
        return fused_rms_norm_affine(input, self.weight, self.normalized_shape, 1e-5 if self.eps is None else self.eps)


class _Mixed(nn.Module):
    """A norm with the output in the dtype of its weight."""

    def __init__(
        self,
        normalized_shape: Any,
        eps: float = 1e-5,
        *,
        memory_efficient: bool = False,
        elementwise_affine: bool = True,
    ) -> None:
        if not elementwise_affine:
            name = type(self).__name__
            raise RuntimeError(
                f"{name} has the dtype of its weight, so it needs one: use {name.removeprefix('Mixed')} for"
                " elementwise_affine=False"
            )
        # the next class in the order of bases is FusedLayerNorm or FusedRMSNorm
        super().__init__(normalized_shape, eps, True, memory_efficient)


class MixedFusedLayerNorm(_Mixed, FusedLayerNorm):
    """torch.nn.LayerNorm with the output in the dtype of the weight.

    Raises RuntimeError for `elementwise_affine=False`.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Normalize the last dimensions, `normalized_shape`."""
        return mixed_dtype_fused_layer_norm_affine(input, self.weight, self.bias, self.normalized_shape, self.eps)


class MixedFusedRMSNorm(_Mixed, FusedRMSNorm):
    """torch.nn.RMSNorm with the output in the dtype of the weight.

    Raises RuntimeError for `elementwise_affine=False`.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Normalize the last dimensions, `normalized_shape`."""
        return mixed_dtype_fused_rms_norm_affine(
            input, self.weight, self.normalized_shape, 1e-5 if self.eps is None else self.eps
        )
