"""The models that the benchmarks train, each with a loss of its own: what a mode does to it is the benchmark's
business.
"""

import functools
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
        query, key, value = (
            self.qkv(self.attention_norm(x)).view(batch, sequence, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        )
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(batch, sequence, width))
        return x + self.contract(F.gelu(self.expand(self.mlp_norm(x))))


class Transformer(nn.Module):
    """GPT-style: token ids `[batch, sequence]` to logits `[batch, sequence, vocabulary]`.

    Tied: the head's weight is that of the embedding.
    """

    def __init__(
        self, width: int, blocks: int, sequence: int, vocabulary: int = VOCABULARY, is_tied: bool = False
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(sequence, width)
        self.blocks = nn.Sequential(*(Block(width, max(1, width // 64)) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=not is_tied)
        if is_tied:
            nn.init.normal_(
                self.tokens.weight, std=0.02
            )  # as a weight of the head it would give logits of the order of the width
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.blocks(x)))


class Residual(nn.Module):
    """Two 3x3 convolutions with BatchNorm around a shortcut, which is a 1x1 convolution where the shape changes."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.first, self.first_norm = (
            nn.Conv2d(inside, outside, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outside),
        )
        self.second, self.second_norm = nn.Conv2d(outside, outside, 3, padding=1, bias=False), nn.BatchNorm2d(outside)
        self.shortcut = (
            nn.Conv2d(inside, outside, 1, stride, bias=False) if (inside, stride) != (outside, 1) else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.second_norm(self.second(y)) + self.shortcut(x))


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions with BatchNorm around a shortcut, the last four times as wide; the stride is in the
    3x3 one.
    """

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        outside = 4 * width
        self.first, self.first_norm = nn.Conv2d(inside, width, 1, bias=False), nn.BatchNorm2d(width)
        self.second, self.second_norm = nn.Conv2d(width, width, 3, stride, padding=1, bias=False), nn.BatchNorm2d(width)
        self.third, self.third_norm = nn.Conv2d(width, outside, 1, bias=False), nn.BatchNorm2d(outside)
        is_same = (inside, stride) == (outside, 1)
        self.shortcut = (
            nn.Identity()
            if is_same
            else nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))
        )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.first_norm(self.first(x)))
        y = F.relu(self.second_norm(self.second(y)))
        return F.relu(self.third_norm(self.third(y)) + self.shortcut(x))


@dataclass(frozen=True, slots=True)
class Size:
    """How large a batch is. A workload takes what it has a use for; None stands for its own default on that device.

    Attributes:
        batch: rows; the mlp takes 16 times as many.
        sequence: tokens of a row.
        image: pixels of a side.
        channels_last: images and convolutions in torch.channels_last.
    """

    batch: int | None = None
    sequence: int | None = None
    image: int | None = None
    channels_last: bool = False


@dataclass(frozen=True, slots=True)
class Workload:
    """A way to build a model, and one batch for it: `inputs [batch, ...]` and class indices `targets [batch, ...]`."""

    build: Callable[[], nn.Module]
    inputs: Tensor
    targets: Tensor

    def loss(self, run: Callable[..., Tensor], rows: slice) -> Tensor:
        """The mean cross entropy of the model on some rows of the batch."""
        logits = run(self.inputs[rows])
        return F.cross_entropy(logits.flatten(0, -2), self.targets[rows].flatten())

    def micro_batches(self, count: int) -> list[Callable[[Callable[..., Tensor]], Tensor]]:
        """The losses of `count` equal parts of the batch; what does not divide is left out."""
        size = len(self.inputs) // count
        return [functools.partial(self._loss_from, size, start) for start in range(0, size * count, size)]

    def _loss_from(self, size: int, start: int, run: Callable[..., Tensor]) -> Tensor:
        return self.loss(run, slice(start, start + size))


Maker = Callable[[Size, torch.device], Workload]


def _choose(given: int | None, device: torch.device, on_cpu: int, elsewhere: int) -> int:
    return given or (on_cpu if device.type == "cpu" else elsewhere)


def _gpt(width: int, blocks: int) -> Maker:
    def make(size: Size, device: torch.device) -> Workload:
        batch, sequence = _choose(size.batch, device, 8, 32), _choose(size.sequence, device, 64, 256)
        return _language(lambda: Transformer(width, blocks, sequence), VOCABULARY, batch, sequence, device)

    return make


def _gpt2(size: Size, device: torch.device) -> Workload:
    """GPT-2 in its smallest shape: 12 blocks of width 768, 50257 tokens, tied head; 124 million parameters."""
    batch, sequence = _choose(size.batch, device, 1, 8), _choose(size.sequence, device, 64, 1024)
    return _language(lambda: Transformer(768, 12, sequence, 50257, is_tied=True), 50257, batch, sequence, device)


def _language(
    build: Callable[[], nn.Module], vocabulary: int, batch: int, sequence: int, device: torch.device
) -> Workload:
    tokens = torch.randint(vocabulary, (batch, sequence + 1), device=device)
    return Workload(lambda: build().to(device), tokens[:, :-1], tokens[:, 1:].contiguous())


def _mlp(size: Size, device: torch.device) -> Workload:
    """Four hidden layers of 1024 over 256 features."""
    sizes = [256, 1024, 1024, 1024, 1024]

    def build() -> nn.Module:
        hidden = [layer for pair in zip(sizes[:-1], sizes[1:], strict=True) for layer in (nn.Linear(*pair), nn.ReLU())]
        return nn.Sequential(*hidden, nn.Linear(sizes[-1], CLASSES)).to(device)

    rows = 16 * _choose(size.batch, device, 8, 32)
    return Workload(build, torch.randn(rows, sizes[0], device=device), torch.randint(CLASSES, (rows,), device=device))


def _resnet(size: Size, device: torch.device) -> Workload:
    """Six residual blocks of 32 to 128 channels over images of 32x32."""

    def build() -> nn.Module:
        stages = [
            Residual(*shape)
            for shape in ((32, 32, 1), (32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2), (128, 128, 1))
        ]
        stem = (nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU())
        return nn.Sequential(*stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, CLASSES))

    return _vision(build, CLASSES, _choose(size.batch, device, 8, 32), size.image or 32, size.channels_last, device)


def _resnet50(size: Size, device: torch.device) -> Workload:
    """The shape of ResNet-50: 3, 4, 6 and 3 bottlenecks, 1000 classes; images of 224x224, on the CPU 64x64."""

    def build() -> nn.Module:
        blocks, inside = [], 64
        for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for number in range(count):
                blocks.append(Bottleneck(inside, width, stride if number == 0 else 1))
                inside = 4 * width
        stem = (
            nn.Conv2d(3, 64, 7, 2, padding=3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, padding=1),
        )
        return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, 1000))

    return _vision(
        build,
        1000,
        _choose(size.batch, device, 8, 128),
        _choose(size.image, device, 64, 224),
        size.channels_last,
        device,
    )


def _vision(
    build: Callable[[], nn.Module], classes: int, batch: int, side: int, channels_last: bool, device: torch.device
) -> Workload:
    layout = torch.channels_last if channels_last else torch.contiguous_format
    images = torch.randn(batch, 3, side, side, device=device).to(memory_format=layout)
    return Workload(
        lambda: build().to(device, memory_format=layout), images, torch.randint(classes, (batch,), device=device)
    )


WORKLOADS: dict[str, Maker] = {
    "gpt-64": _gpt(64, blocks=4),
    "gpt-256": _gpt(256, blocks=4),
    "gpt-512": _gpt(512, blocks=4),
    "gpt2": _gpt2,
    "mlp": _mlp,
    "resnet": _resnet,
    "resnet50": _resnet50,
}
