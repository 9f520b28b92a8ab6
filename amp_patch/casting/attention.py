"""`Attention`: computes short attention of 16-bit operands in float32, where that is faster on a CPU.

torch's flash attention is one autograd node, which saves its operands and has no double backward. Where torch would use
it in eager code, attention in float32 is one node, too: `_LowAttention`, which saves its operands in 16 bits.
"""

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor

from ..dtypes import PLAIN_CLASSES, is_opaque
from ..torch_private import chooses_flash_attention, flash_attention, flash_attention_backward
from .compiling import is_eager_autograd


@dataclass(slots=True)
class Attention:
    """One call of `torch.nn.functional.scaled_dot_product_attention`: its arguments, and its computation in float32."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    _: KW_ONLY
    scale: float | None = None
    enable_gqa: bool = False

    def can_use_float32(self, low: torch.dtype, max_scores: int) -> bool:
        """Return whether `compute_in_float32` supports this call, and is expected to be faster than a 16-bit kernel.

        Query, key and value must be 4-dim tensors of dtype `low` on a CPU, with the same head size. They must not be
        nested or opaque (`dtypes.is_opaque`). Query and key must have the same number of heads. A head may have at most
        `max_scores` scores (queries times keys). A mask must be bool. Calls with dropout or `enable_gqa` are not
        supported.
        """
        if self.dropout_p or self.enable_gqa:
            return False
        if self.attn_mask is not None and self.attn_mask.dtype is not torch.bool:
            return False
        for operand in (self.query, self.key, self.value):
            if operand.dtype is not low or operand.dim() != 4 or not operand.is_cpu or operand.is_nested:
                return False
            if operand.__class__ not in PLAIN_CLASSES and is_opaque(operand):
                return False
        query_shape, key_shape = self.query.shape, self.key.shape  # (batch, heads, length, head size)
        same_heads = query_shape[1] == key_shape[1]
        same_head_size = query_shape[3] == key_shape[3] == self.value.shape[3]
        if not (same_heads and same_head_size):
            return False
        return query_shape[2] * key_shape[2] <= max_scores

    def compute_in_float32(self, original: Callable[..., Tensor]) -> Tensor:
        """Return the result of torch's function `original`, rounded to the dtype of the operands.

        In eager code, if torch would use its flash kernel for the 16-bit operands, the operands and the result are
        saved for backward in 16 bits, as that kernel saves them. Otherwise `original` saves float32 values.
        """
        query, key, value = self.query, self.key, self.value
        options = (self.attn_mask, self.dropout_p, self.is_causal)
        if is_eager_autograd() and chooses_flash_attention(query, key, value, *options, scale=self.scale):
            kernel_options = {"is_causal": self.is_causal, "scale": self.scale}
            additive_mask = None
            if self.attn_mask is not None:
                zeros = torch.zeros_like(self.attn_mask, dtype=torch.float32)
                additive_mask = zeros.masked_fill_(~self.attn_mask, -math.inf)
            arguments = (query, key, value, additive_mask, kernel_options)
            rounded: Tensor = _LowAttention.apply(*arguments)  # type: ignore[no-untyped-call]
            return rounded
        return original(query.float(), key.float(), value.float(), *options, scale=self.scale).to(query.dtype)


class _LowAttention(torch.autograd.Function):
    """torch's flash attention on a CPU, computed in float32. Saves its 16-bit operands and result for backward.

    If an operand or the result is changed in place before backward, backward raises RuntimeError, as in torch.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        result, logsumexp = flash_attention(query.float(), key.float(), value.float(), attn_mask=mask, **options)
        rounded: Tensor = result.to(query.dtype)
        ctx.save_for_backward(query, key, value, rounded, logsumexp, mask)
        ctx.options = options
        return rounded

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, rounded, logsumexp, mask = ctx.saved_tensors
        # no variable holds the float32 operands, so they are freed before the gradients are cast
        query_grad, key_grad, value_grad = flash_attention_backward(
            *(gradient.float(), query.float(), key.float(), value.float(), rounded.float(), logsumexp),
            dropout_p=0.0,
            attn_mask=mask,
            **ctx.options,
        )
        low = query.dtype
        return query_grad.to(low), key_grad.to(low), value_grad.to(low), None, None
