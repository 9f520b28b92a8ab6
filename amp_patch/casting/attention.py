"""`Attention`: short attention of 16-bit operands, computed in float32 on a CPU.

torch's attention has no double backward. So if only autograd records a call, it is one node here, too.
"""

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor

from ..dtypes import PLAIN_CLASSES, is_opaque
from ..torch_private import chooses_flash_attention, flash_attention, flash_attention_backward
from .compiling import is_recorded


@dataclass(slots=True)
class Attention:
    """The arguments of one call of `torch.nn.functional.scaled_dot_product_attention`."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    _: KW_ONLY
    scale: float | None = None
    enable_gqa: bool = False

    def is_short(self, low: torch.dtype, longest: int) -> bool:
        """Return whether all operands have the dtype `low`, there are at most `longest` queries times keys, and the
        call has no dropout and no additive mask.
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
        queries, keys = self.query.shape, self.key.shape
        # with other numbers of heads, or other head sizes, torch itself takes another kernel
        is_even = queries[1] == keys[1] and queries[3] == keys[3] == self.value.shape[3]
        return is_even and queries[2] * keys[2] <= longest

    def compute_in_float32(self, original: Callable[..., Tensor]) -> Tensor:
        """Return the result of torch's function `original`, rounded to the dtype of the operands.

        Where torch would take its flash kernel, it saves 16-bit values for backward, including the result, as that
        kernel does. Otherwise torch's function saves float32.
        """
        query, key, value = self.query, self.key, self.value
        how = (self.attn_mask, self.dropout_p, self.is_causal)
        if is_recorded() and chooses_flash_attention(query, key, value, *how, scale=self.scale):
            options = {"is_causal": self.is_causal, "scale": self.scale}
            added = None  # the mask in additive form
            if self.attn_mask is not None:
                added = torch.zeros_like(self.attn_mask, dtype=torch.float32).masked_fill_(~self.attn_mask, -math.inf)
            rounded: Tensor = _Recorded.apply(query, key, value, added, options)  # type: ignore[no-untyped-call]
            return rounded
        return original(query.float(), key.float(), value.float(), *how, scale=self.scale).to(query.dtype)


class _Recorded(torch.autograd.Function):
    """torch's attention for CPUs on 16-bit operands, computed in float32. Saves 16-bit values for backward.

    If an operand or the result is changed in place before backward, that raises RuntimeError, as in torch.
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
        # The float32 operands have no names, so they are freed before the gradients are cast.
        of_query, of_key, of_value = flash_attention_backward(
            *(gradient.float(), query.float(), key.float(), value.float(), rounded.float(), logsumexp),
            dropout_p=0.0,
            attn_mask=mask,
            **ctx.options,
        )
        low = query.dtype
        return of_query.to(low), of_key.to(low), of_value.to(low), None, None
