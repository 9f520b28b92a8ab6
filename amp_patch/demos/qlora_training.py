"""What the demo `qlora` trains: a byte-level language model, quantised by bitsandbytes, with adapters by peft."""

import argparse
import dataclasses
import inspect
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

import amp_patch as amp

from .training import draw_batches, take_step
from .transformer import Block

WIDTH, DEPTH, LENGTH, BATCH_SIZE = 128, 3, 64, 8
QUANTISED = ("qkv", "out", "up", "down")
"""The layers of a block that are quantised and have adapters; embeddings, norms and the head stay float32."""
RANK = 8


class LanguageModel(nn.Module):
    """A causal transformer: ASCII codes `[n, length]` int64 to logits `[n, length, 128]`; `length` is 64 at most."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.blocks = nn.Sequential(*(Block(WIDTH, heads=4, dropout=0.0, is_causal=True) for _ in range(DEPTH)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 128)

    def forward(self, codes: Tensor) -> Tensor:
        x = self.embedding(codes) + self.positions[: codes.shape[1]]
        return self.head(self.norm(self.blocks(x)))  # type: ignore[no-any-return]


@dataclasses.dataclass(frozen=True, slots=True)
class Text:
    """Windows of a text, `[n, 65]` ASCII codes each: those to train on, and those after them to test on."""

    train: Tensor
    test: Tensor


def read_help(device: torch.device) -> Text:
    """Return the English of Python's `help()`."""
    from pydoc_data.topics import topics

    return _cut("\n".join(topics[name] for name in sorted(topics)), device)


def read_source(device: torch.device) -> Text:
    """Return Python source, that of modules which come with it."""
    return _cut("\n".join(inspect.getsource(module) for module in (argparse, dataclasses, inspect, typing)), device)


def _cut(text: str, device: torch.device) -> Text:
    codes = torch.tensor([min(ord(character), 127) for character in text], device=device)
    windows = codes[: len(codes) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
    border = len(windows) * 9 // 10
    return Text(windows[:border], windows[border :: max(1, (len(windows) - border) // 128)])


def compute_loss(model: nn.Module, windows: Tensor) -> Tensor:
    """Return the mean loss in nats of the next character, float32."""
    return functional.cross_entropy(model(windows[:, :-1]).float().flatten(0, 1), windows[:, 1:].flatten())


def measure_loss(model: nn.Module, text: Text) -> float:
    """Return the loss on the windows to test on."""
    with torch.no_grad():
        return float(compute_loss(model, text.test))


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, text: Text, steps: int, seed: int, on_step: Callable[[], object]
) -> None:
    """Take so many steps under the session that is open."""
    for rows in draw_batches(len(text.train), BATCH_SIZE, steps, seed, text.train.device):
        take_step(compute_loss(model, text.train[rows]), optimizer)
        on_step()


def build_model(device: torch.device, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a new model, float32, and AdamW on all of it."""
    torch.manual_seed(seed)
    model = LanguageModel().to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=2e-3)


def quantise(model: nn.Module, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Freeze the model, its blocks' linear layers in 4 bits (NF4, double quantisation); return it with LoRA adapters,
    float32, and paged 8-bit AdamW on those.
    """
    from bitsandbytes.nn import Linear4bit
    from bitsandbytes.optim import PagedAdamW8bit
    from peft import LoraConfig, get_peft_model

    for block in model.get_submodule("blocks"):  # type: ignore[attr-defined]
        for name in QUANTISED:
            linear = block.get_submodule(name)
            low = Linear4bit(
                linear.in_features, linear.out_features, bias=False, compute_dtype=torch.float32, quant_type="nf4"
            )
            low.load_state_dict(linear.state_dict())
            setattr(block, name, low.to(linear.weight.device))  # quantised by the move, even to where it is
    model.is_loaded_in_4bit = True  # type: ignore[assignment]  # peft asks for it
    torch.manual_seed(seed)
    adapted = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=list(QUANTISED)))
    adapters = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    # by default, state of fewer than 4096 elements, which most adapters here have, would be float32
    return adapted, PagedAdamW8bit(adapters, lr=2e-3, min_8bit_size=256)


def base_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Yield every tensor of the model that is not an adapter, those that 4-bit weights are quantised by included."""
    for parameter in model.parameters():
        if not parameter.requires_grad:
            yield parameter.detach()
            state = getattr(parameter, "quant_state", None)
            if state is not None:
                yield from (value for value in state.as_dict(packed=True).values() if isinstance(value, Tensor))


def find_gradients(model: nn.Module, windows: Tensor, optimizer: torch.optim.Optimizer | None) -> list[Tensor]:
    """Return the gradients of the adapters for a batch: under amp if there is an optimizer, else under torch.autocast
    in bfloat16.
    """
    model.zero_grad(set_to_none=True)
    if optimizer is not None:
        with amp.scale_loss(compute_loss(model, windows), optimizer) as scaled_loss:
            scaled_loss.backward()
    else:
        with torch.autocast(windows.device.type, torch.bfloat16):
            loss = compute_loss(model, windows)
        loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad(set_to_none=True)
    return gradients


def state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield what the optimizer keeps for each parameter."""
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def are_equal(ones: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Tell whether two lists hold the same tensors, bit by bit."""
    return len(ones) == len(others) and all(map(torch.equal, ones, others))


def count_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of all elements."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
