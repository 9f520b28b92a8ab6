"""What the scripts of quiet_updates.py, quiet_values.py, quiet_gradients.py and quiet_healthy.py are made of.

A case returns a function that trains for a step and returns its loss, or that function and a second function that
returns the tensor that matters. `given` is how the case runs: in 16 bits, mended by hand, or in float32, the truth.
"""

import contextlib
import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from seeded_faults import Layer, draw, linear
from torch import Tensor, nn
from training import take_step

import amp_patch as amp

__all__ = [
    "CASES",
    "Case",
    "Given",
    "Layer",
    "LoRA",
    "Run",
    "Seen",
    "case",
    "copy_of",
    "draw",
    "gradients_of",
    "healthy",
    "labels",
    "linear",
    "mlp",
    "moved",
    "waves",
]

LOST, COLLAPSED, CANCELLED = "lost update", "collapsed", "cancelled"
ZERO, STALE = "zero gradients", "stale copy"


@dataclass(frozen=True)
class Given:
    """How a case runs.

    Attributes:
        low: the 16-bit dtype of the script. float32 in the run that gives the truth.
        is_mended: the script is mended by hand, as a good report advises.
    """

    low: torch.dtype
    is_mended: bool = False

    @property
    def is_float32(self) -> bool:
        return self.low is torch.float32

    @property
    def kept(self) -> torch.dtype:
        """The dtype of what a mended script keeps in float32."""
        return torch.float32 if self.is_mended else self.low

    def autocast(self, *, enabled=True):
        """A region of torch.autocast in the 16-bit dtype."""
        if self.is_float32 or not enabled:
            return contextlib.nullcontext()
        return torch.autocast("cpu", self.low)

    def mixed(self):
        """A region in which float32 weights run in 16 bits, once the script is mended."""
        return self.autocast(enabled=self.is_mended)

    def start(self, model, optimizer, compute_loss):
        """Train a model whose weights the script casts to 16 bits; the mended script has float32 masters.

        Returns:
            The function that trains for a step, and the function that returns how far the weights have moved.
        """
        if not self.is_mended:
            model.to(self.low)
            weights = list(model.parameters())
            return lambda: self.descend(compute_loss(), optimizer), moved(weights)
        level = "O5" if self.low is torch.bfloat16 else "O2"
        amp.initialize(model, optimizer, opt_level=level, loss_scale=None if level == "O5" else 128.0, verbosity=0)
        return lambda: self.take(compute_loss(), optimizer), moved(list(amp.master_params(optimizer)))

    @staticmethod
    def descend(loss, optimizer):
        """Step on the gradients of a loss, as scripts without amp do."""
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    @staticmethod
    def take(loss, optimizer):
        """Step on the gradients of a loss in a session."""
        take_step(loss, optimizer)
        return loss


class Run(NamedTuple):
    """A case that is ready to run: a function that trains for a step, and the function that returns what matters."""

    step: Callable[[], Any]
    measure: Callable[[], Tensor] | None


@dataclass(frozen=True)
class Case:
    """A script: what is lost in words, the cause, and the name that a report gives.

    Attributes:
        cause: None for a healthy script.
        names: what the name of the reported tensor contains, or several such texts of which one is enough. Empty: the
            report names a line that ends in `# HERE`.
        steps: how many are traced.
        proof: how many are trained before the runs are compared. What matters is the loss of the last step, where a
            case has nothing else to measure.
        rounding: the largest relative error against float32 of the mended, or the healthy, script.
        lost: the smallest relative error against float32 of the faulty script.
    """

    make: Callable[[Given], Any]
    about: str
    cause: str | None
    names: tuple[str, ...]
    low: torch.dtype
    steps: int
    proof: int
    rounding: float
    lost: float

    @property
    def name(self) -> str:
        return self.make.__name__

    @property
    def lines(self) -> set[str]:
        """The lines that may be named, as `file.py:line`."""
        source, first = inspect.getsourcelines(self.make)
        marked = [first + number for number, line in enumerate(source) if line.rstrip().endswith("# HERE")]
        file = Path(inspect.getsourcefile(self.make)).name
        return {f"{file}:{line}" for line in marked}

    def is_named(self, tensor: str | None, site: str | None) -> bool:
        """True if a report of a tensor and a line names what is lost."""
        if self.names:
            return any(name in (tensor or "") for name in self.names)
        return site in self.lines

    def start(self, *, is_float32=False, is_mended=False) -> Run:
        """Make the case anew."""
        torch.manual_seed(0)
        made = self.make(Given(torch.float32 if is_float32 else self.low, is_mended=is_mended and not is_float32))
        return Run(*made) if isinstance(made, tuple) else Run(made, None)


CASES: dict[str, Case] = {}
"""All cases, faulty and healthy, by name."""


def case(about, cause, names=(), *, low=torch.bfloat16, steps=3, proof=None, rounding=0.1, lost=0.25):
    """Enter a script that loses something quietly."""

    def enter(make):
        listed = (names,) if isinstance(names, str) else tuple(names)
        assert make.__name__ not in CASES
        CASES[make.__name__] = Case(make, about, cause, listed, low, steps, proof or steps, rounding, lost)
        return make

    return enter


def healthy(about, *, low=torch.bfloat16, steps=3, proof=None, rounding=0.05):
    """Enter a script that loses nothing, but looks like one that does."""
    return case(about, None, low=low, steps=steps, proof=proof, rounding=rounding)


def copy_of(model, dtype=None):
    """A copy of a model, without gradients, in another dtype: the average, the target or the teacher of a script."""
    return copy.deepcopy(model).requires_grad_(False).to(dtype)


def moved(tensors):
    """A function that returns how far tensors have moved since now, as a flat float32 tensor."""
    tensors = list(tensors.parameters() if isinstance(tensors, nn.Module) else tensors)
    start = [tensor.detach().float().clone() for tensor in tensors]
    return lambda: torch.cat(
        [(now.detach().float() - then).flatten() for now, then in zip(tensors, start, strict=True)]
    )


def gradients_of(model):
    """A function that returns the gradients of a model, without those that it has not got, as a flat tensor."""
    weights = list(model.parameters())
    return lambda: torch.cat([weight.grad.flatten() for weight in weights if weight.grad is not None])


def mlp(inputs=16, width=32, outputs=4, seed=0):
    """A network of two linear layers."""
    return nn.Sequential(linear(inputs, width, seed=seed), nn.GELU(), linear(width, outputs, seed=seed + 1))


def labels(count, classes, seed=5):
    """Classes drawn with a seed: int64 `[count]`."""
    return torch.randint(classes, (count,), generator=torch.Generator().manual_seed(seed))


def waves(positions, width, longest=10_000.0):
    """Sines and cosines of positions, in float32: `[n]` to `[n, width]`."""
    rates = longest ** (-torch.arange(width // 2, dtype=torch.float32) / (width // 2))
    angles = positions.float()[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], -1)


class LoRA(nn.Module):
    """A frozen float32 layer and two trained factors in another dtype."""

    def __init__(self, base, rank, dtype):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Parameter(draw(rank, base.in_features, seed=7, factor=0.25).to(dtype))
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank, dtype=dtype))

    def forward(self, x):
        return self.base(x) + (x.to(self.lora_a.dtype) @ self.lora_a.T @ self.lora_b.T).to(x.dtype)


class Seen:
    """Keeps the last tensor that it was given, for what a case measures."""

    def __init__(self):
        self.last = None

    def keep(self, tensor):
        self.last = tensor.detach().float()
        return tensor

    def read(self):
        return self.last
