"""The models that the step benchmark trains, each with a loss of its own: what a mode does to it is the benchmark's business."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 512
CLASSES = 10


class Block(nn.Module):
    """A pre-norm transformer block over `[batch, sequence, width]`."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.expand, self.contract = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, width = x.shape
        query, key, value = self.qkv(self.attention_norm(x)).view(batch, sequence, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(batch, sequence, width))
        return x + self.contract(F.gelu(self.expand(self.mlp_norm(x))))


class Transformer(nn.Module):
    """GPT-style: token ids `[batch, sequence]` to logits `[batch, sequence, VOCABULARY]`."""

    def __init__(self, width: int, blocks: int, sequence: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(sequence, width)
        self.blocks = nn.Sequential(*(Block(width, max(1, width // 64)) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.blocks(x)))


class Residual(nn.Module):
    """Two 3x3 convolutions with BatchNorm around a shortcut, which is a 1x1 convolution where the shape changes."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.first, self.first_norm = nn.Conv2d(inside, outside, 3, stride, padding=1, bias=False), nn.BatchNorm2d(outside)
        self.second, self.second_norm = nn.Conv2d(outside, outside, 3, padding=1, bias=False), nn.BatchNorm2d(outside)
        self.shortcut = nn.Conv2d(inside, outside, 1, stride, bias=False) if (inside, stride) != (outside, 1) else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.second_norm(self.second(y)) + self.shortcut(x))


@dataclass(frozen=True, slots=True)
class Workload:
    """A way to build a model, and one batch for it: `inputs [batch, ...]` and class indices `targets [batch, ...]`."""

    build: Callable[[], nn.Module]
    inputs: Tensor
    targets: Tensor

    def loss(self, model: nn.Module, rows: slice) -> Tensor:
        """The mean cross entropy of the model on some rows of the batch."""
        logits = model(self.inputs[rows])
        return F.cross_entropy(logits.flatten(0, -2), self.targets[rows].flatten())


def _gpt(width: int, blocks: int) -> Callable[[int, int, torch.device], Workload]:
    def make(batch: int, sequence: int, device: torch.device) -> Workload:
        tokens = torch.randint(VOCABULARY, (batch, sequence + 1), device=device)
        return Workload(lambda: Transformer(width, blocks, sequence).to(device), tokens[:, :-1], tokens[:, 1:].contiguous())

    return make


def _mlp(batch: int, sequence: int, device: torch.device) -> Workload:
    """Four hidden layers of 1024 over 256 features; `sequence` has no meaning here."""
    sizes = [256, 1024, 1024, 1024, 1024]

    def build() -> nn.Module:
        hidden = [layer for pair in zip(sizes[:-1], sizes[1:], strict=True) for layer in (nn.Linear(*pair), nn.ReLU())]
        return nn.Sequential(*hidden, nn.Linear(sizes[-1], CLASSES)).to(device)

    rows = 16 * batch
    return Workload(build, torch.randn(rows, sizes[0], device=device), torch.randint(CLASSES, (rows,), device=device))


def _resnet(batch: int, sequence: int, device: torch.device) -> Workload:
    """Six residual blocks of 32 to 128 channels over 32x32 images; `sequence` has no meaning here."""

    def build() -> nn.Module:
        stages = [Residual(*shape) for shape in ((32, 32, 1), (32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2), (128, 128, 1))]
        stem = (nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU())
        return nn.Sequential(*stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, CLASSES)).to(device)

    return Workload(build, torch.randn(batch, 3, 32, 32, device=device), torch.randint(CLASSES, (batch,), device=device))


WORKLOADS: dict[str, Callable[[int, int, torch.device], Workload]] = {
    "gpt-64": _gpt(64, blocks=4),
    "gpt-256": _gpt(256, blocks=4),
    "gpt-512": _gpt(512, blocks=4),
    "mlp": _mlp,
    "resnet": _resnet,
}
