"""What the benchmarks train, and in which ways: float32, torch.autocast, a model cast to 16 bits, and every opt_level.

Each way is a `Trainer` with the same three phases, so that what differs between two figures is the mode alone.
"""

import argparse
import contextlib
import functools
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import amp_patch as amp

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
            nn.init.normal_(self.tokens.weight, std=0.02)  # else logits would be of the order of the width
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.blocks(x)))


class Residual(nn.Module):
    """Layers around a shortcut, which is empty where the shape stays the same."""

    def __init__(self, layers: list[nn.Module], shortcut: list[nn.Module]) -> None:
        super().__init__()
        self.layers, self.shortcut = nn.Sequential(*layers), nn.Sequential(*shortcut)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.layers(x) + self.shortcut(x))


def _convolve(inside: int, outside: int, size: int, stride: int = 1) -> list[nn.Module]:
    """A convolution that keeps the size of images, but for its stride, and a BatchNorm."""
    convolution = nn.Conv2d(inside, outside, size, stride, padding=size // 2, bias=False)
    return [convolution, nn.BatchNorm2d(outside)]


def _make_basic(inside: int, outside: int, stride: int) -> Residual:
    """Two 3x3 convolutions; the shortcut has no BatchNorm."""
    layers = [*_convolve(inside, outside, 3, stride), nn.ReLU(), *_convolve(outside, outside, 3)]
    is_same = (inside, stride) == (outside, 1)
    return Residual(layers, [] if is_same else _convolve(inside, outside, 1, stride)[:1])


def _make_bottleneck(inside: int, width: int, stride: int) -> Residual:
    """1x1, 3x3 and 1x1 convolutions, the last four times as wide; the stride is in the 3x3 one."""
    outside = 4 * width
    layers = [*_convolve(inside, width, 1), nn.ReLU(), *_convolve(width, width, 3, stride), nn.ReLU()]
    layers += _convolve(width, outside, 1)
    is_same = (inside, stride) == (outside, 1)
    return Residual(layers, [] if is_same else _convolve(inside, outside, 1, stride))


Loss = Callable[[Callable[..., Any]], Tensor]
"""Computes the loss of one micro-batch with the model it is given."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A way to build a model, and one batch for it: `inputs [batch, ...]` and class indices `targets [batch, ...]`."""

    build: Callable[[], nn.Module]
    inputs: Tensor
    targets: Tensor

    def micro_batches(self, count: int) -> list[Loss]:
        """Return the losses of `count` parts of the batch."""
        parts = zip(self.inputs.chunk(count), self.targets.chunk(count), strict=True)
        return [functools.partial(_compute_loss, *part) for part in parts]


def _compute_loss(inputs: Tensor, targets: Tensor, run: Callable[..., Tensor]) -> Tensor:
    return F.cross_entropy(run(inputs).flatten(0, -2), targets.flatten())


@dataclass(frozen=True, slots=True)
class Size:
    """How large a batch is; None stands for the workload's own default on that device.

    Attributes:
        batch: rows; the mlp takes 16 times as many.
        sequence: tokens of a row.
        channels_last: images and convolutions in torch.channels_last.
    """

    batch: int | None = None
    sequence: int | None = None
    channels_last: bool = False


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


def _mlp(width: int) -> Maker:
    """Four hidden layers over 256 features."""
    sizes = [256, width, width, width, width]

    def build(device: torch.device) -> nn.Module:
        hidden = [layer for pair in zip(sizes[:-1], sizes[1:], strict=True) for layer in (nn.Linear(*pair), nn.ReLU())]
        return nn.Sequential(*hidden, nn.Linear(sizes[-1], CLASSES)).to(device)

    def make(size: Size, device: torch.device) -> Workload:
        rows = 16 * _choose(size.batch, device, 8, 32)
        inputs, targets = torch.randn(rows, sizes[0], device=device), torch.randint(CLASSES, (rows,), device=device)
        return Workload(functools.partial(build, device), inputs, targets)

    return make


def _resnet(side: int) -> Maker:
    """Six residual blocks of 32 to 128 channels over square images."""

    def build() -> nn.Module:
        shapes = [(32, 32, 1), (32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2), (128, 128, 1)]
        blocks = [_make_basic(*shape) for shape in shapes]
        return _classify([*_convolve(3, 32, 3), nn.ReLU()], blocks, 128, CLASSES)

    def make(size: Size, device: torch.device) -> Workload:
        return _vision(build, CLASSES, _choose(size.batch, device, 8, 32), side, size.channels_last, device)

    return make


def _resnet50(size: Size, device: torch.device) -> Workload:
    """The shape of ResNet-50: 3, 4, 6 and 3 bottlenecks, 1000 classes; images of 224x224, on the CPU 64x64."""

    def build() -> nn.Module:
        blocks, inside = [], 64
        for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for number in range(count):
                blocks.append(_make_bottleneck(inside, width, stride if number == 0 else 1))
                inside = 4 * width
        return _classify([*_convolve(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)], blocks, inside, 1000)

    side = 64 if device.type == "cpu" else 224
    return _vision(build, 1000, _choose(size.batch, device, 8, 128), side, size.channels_last, device)


def _classify(stem: list[nn.Module], blocks: list[nn.Module], features: int, classes: int) -> nn.Module:
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(features, classes))


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
    "mlp": _mlp(1024),
    "mlp-64": _mlp(64),
    "resnet": _resnet(32),
    "resnet-8": _resnet(8),
    "resnet50": _resnet50,
}


LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
AUTOCAST = {"autocast-float16": torch.float16, "autocast-bfloat16": torch.bfloat16}
PURE = {"pure-float16": torch.float16, "pure-bfloat16": torch.bfloat16}
OVERLAID = ("O1+fast", "O4+fast")
DEFAULT_LISTS = {"O1": "float16", "O4": "bfloat16"}
NATIVE = ("O4+native", "O5+native")
SPLIT = ("O5+split", "O5+split+states")
STATES = ("O4+states", "O5+split+states")
EIGHT_BIT = ("O5+8bit",)
MODES = ("float32", *AUTOCAST, *PURE, *LEVELS, *OVERLAID, *NATIVE, *dict.fromkeys((*SPLIT, *STATES)), *EIGHT_BIT)
SLOW_ON_CPU = frozenset({"autocast-float16", "pure-float16"})  # kernels of torch, up to 150 times slower than float32


class Trainer:
    """A model and its optimizer in one mode; plain torch as it stands.

    Attributes:
        run: what losses call: the model, or what torch.compile made of it.
        low: the 16-bit dtype of the mode, or None.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, low: torch.dtype | None = None) -> None:
        self.model, self.optimizer, self.low = model, optimizer, low
        self.run: Callable[..., Any] = model

    def forward(self, compute: Loss) -> Tensor:
        return compute(self.run)

    def backward(self, loss: Tensor, is_last: bool) -> None:
        """`is_last`: no other micro-batch follows before the update."""
        loss.backward()

    def update(self) -> None:
        self.optimizer.step()

    def step(self, losses: Sequence[Loss]) -> Tensor:
        """One update from the mean of the losses; returns the last of them."""
        self.optimizer.zero_grad()
        for number, compute in enumerate(losses, start=1):
            loss = self.forward(compute)
            self.backward(loss / len(losses), is_last=number == len(losses))
        self.update()
        return loss


class Autocast(Trainer):
    """The forward under torch.autocast; with a GradScaler for float16 and without one for bfloat16."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, low: torch.dtype, device_type: str) -> None:
        super().__init__(model, optimizer, low)
        self._device_type = device_type
        self._scaler = torch.amp.GradScaler(device_type, enabled=low == torch.float16)

    def forward(self, compute: Loss) -> Tensor:
        with torch.autocast(self._device_type, dtype=self.low):
            return compute(self.run)

    def backward(self, loss: Tensor, is_last: bool) -> None:
        self._scaler.scale(loss).backward()

    def update(self) -> None:
        self._scaler.step(self.optimizer)
        self._scaler.update()


class Amp(Trainer):
    """A bound model; only the last micro-batch unscales."""

    def backward(self, loss: Tensor, is_last: bool) -> None:
        with amp.scale_loss(loss, self.optimizer, delay_unscale=not is_last) as scaled_loss:
            scaled_loss.backward()


def _cast_inputs(model: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Cast floating inputs to the dtype of the weights; amp_patch does so by itself."""
    low = next(model.parameters()).dtype
    return tuple(value.to(low) if value.is_floating_point() else value for value in inputs)


def make_8bit_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return torchao's AdamW with 8-bit states. It compiles its step."""
    from torchao.optim import AdamW8bit  # not installed with the benchmarks

    return AdamW8bit(model.parameters())


@contextlib.contextmanager
def prepared(
    mode: str,
    build: Callable[[], nn.Module],
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    device: torch.device,
    compile_mode: str | None = None,
) -> Iterator[Trainer]:
    """Build a model and an optimizer anew and prepare them for `mode`; leave no session and nothing compiled behind.

    Args:
        mode: of `MODES`: a level may come with an op list to lay over its own ("O4+fast"), or with `compute="native"`
            ("O4+native"), or with `split_masters=True` ("O5+split"), or with `optimizer_state_type="bfloat16"`
            ("O4+states", "O5+split+states"), or with the AdamW of torchao that has 8-bit states ("O5+8bit").
        compile_mode: compile the model with torch.compile in this mode of it, or not at all.
    """
    level, _, overlay = mode.partition("+")
    model = build()
    if mode in PURE:
        model.to(PURE[mode]).register_forward_pre_hook(_cast_inputs)
    optimizer = make_8bit_optimizer(model) if mode in EIGHT_BIT else make_optimizer(model)
    try:
        if level in LEVELS:
            compute = "native" if mode in NATIVE else None
            lists = [DEFAULT_LISTS[level], overlay] if mode in OVERLAID else None
            split_masters = True if mode in SPLIT else None
            model, optimizer = amp.initialize(
                *(model, optimizer),
                opt_level=level,
                lists=lists,
                compute=compute,
                split_masters=split_masters,
                optimizer_state_type="bfloat16" if mode in STATES else None,
                verbosity=0,
            )
            trainer: Trainer = Amp(model, optimizer, amp.stats().low_dtype)
        elif mode in AUTOCAST:
            trainer = Autocast(model, optimizer, AUTOCAST[mode], device.type)
        else:
            trainer = Trainer(model, optimizer, PURE.get(mode))
        if compile_mode is not None:
            trainer.run = torch.compile(model, mode=None if compile_mode == "default" else compile_mode)
        yield trainer
    finally:
        amp.reset()
        if compile_mode is not None:
            torch.compiler.reset()


def add_options(parser: argparse.ArgumentParser, workloads: str) -> None:
    """Add what to train, in which modes and sizes, and on which device."""
    known, device = ", ".join(WORKLOADS), "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--workload", default=workloads, help=f"of {known}; default: %(default)s")
    parser.add_argument(
        "--modes", help=f"of {', '.join(MODES)}; default: all, but no float16 by torch on the CPU, where it is slow"
    )
    parser.add_argument("--device", default=device, type=torch.device, help="default: %(default)s")
    parser.add_argument("--batch", type=int, help="rows of a step; default: the workload's")
    parser.add_argument("--sequence", type=int, help="tokens of a row")
    parser.add_argument("--fused", action="store_true", help="fused AdamW, in every mode")


def parse_options(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line, and split its lists."""
    parsed = parser.parse_args()
    parsed.workload = parsed.workload.split(",")
    parsed.modes = parsed.modes.split(",") if parsed.modes else default_modes(parsed.device)
    for option, allowed in (("workload", WORKLOADS), ("modes", MODES)):
        unknown = sorted(set(getattr(parsed, option)) - set(allowed))
        if unknown:
            parser.error(f"--{option}: {', '.join(unknown)} is not one of {', '.join(allowed)}")
    return parsed


def default_modes(device: torch.device) -> list[str]:
    """All modes, but on the CPU none that has torch's own float16, and without torchao none that needs it."""
    left_out = set(SLOW_ON_CPU) if device.type == "cpu" else set()
    if importlib.util.find_spec("torchao") is None:
        print(f"torchao is not installed: without {', '.join(EIGHT_BIT)}\n")
        left_out.update(EIGHT_BIT)
    return [mode for mode in MODES if mode not in left_out]
