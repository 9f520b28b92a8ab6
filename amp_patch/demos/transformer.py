"""The transformer block of the demos, by plain `nn.Linear` layers, which quantisers and adapters can replace."""

import torch
from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    """Attention and a feed-forward part, each behind a LayerNorm and beside the residual: `[n, length, width]` to
    the same. If it is causal, a token sees those before it and itself.
    """

    def __init__(self, width: int, heads: int, dropout: float, is_causal: bool) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.is_causal = is_causal
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = (part.squeeze(-3).transpose(1, 2) for part in qkv.split(1, dim=-3))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=self.is_causal)
        x = x + self._drop(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self._drop(self.down(functional.gelu(self.up(self.mlp_norm(x)))))

    def _drop(self, x: Tensor) -> Tensor:
        return torch.dropout(x, self.dropout, self.training)
