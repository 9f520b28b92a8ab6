"""The ways to train that the benchmarks compare: plain float32, torch.autocast, a model cast to 16 bits, and every
opt_level.

Each is a `Trainer` with the same three phases, so that what differs between two figures is the mode and nothing else.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import amp_patch as amp

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
AUTOCAST = {"autocast-float16": torch.float16, "autocast-bfloat16": torch.bfloat16}
PURE = {"pure-float16": torch.float16, "pure-bfloat16": torch.bfloat16}
MODES = ("float32", *AUTOCAST, *PURE, *LEVELS)
SLOW_ON_CPU = frozenset({"autocast-float16", "pure-float16"})  # kernels of torch, up to 150 times slower than float32

Loss = Callable[[Callable[..., Any]], Tensor]
"""Computes the loss of one micro-batch with the model it is given."""


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


class _CastInputs:
    """Floating inputs in the dtype of the weights, which a model cast by `.to(dtype)` needs and amp_patch does by
    itself.
    """

    def __init__(self, low: torch.dtype) -> None:
        self._low = low

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(
            value.to(self._low) if isinstance(value, Tensor) and value.is_floating_point() else value
            for value in inputs
        )


def get_level(mode: str) -> str | None:
    """The opt_level of a mode, also of one with an overlay; None for what is not amp_patch."""
    level = mode.partition("+")[0]
    return level if level in LEVELS else None


@contextlib.contextmanager
def prepared(
    mode: str,
    build: Callable[[], nn.Module],
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    device: torch.device,
    *,
    compile_mode: str | None = None,
    overlays: Mapping[str, Sequence[str]] | None = None,
    **options: Any,
) -> Iterator[Trainer]:
    """Build a model and an optimizer anew and prepare them for `mode`; leave no session and nothing compiled behind.

    Args:
        mode: of `MODES`, or a level, a plus sign, and a key of `overlays`.
        compile_mode: compile the model with torch.compile in this mode of it, or not at all.
        overlays: op lists by name.
        options: for `initialize`, where the mode is a level.
    """
    level, overlay = get_level(mode), mode.partition("+")[2]
    if overlay:
        options["lists"] = list((overlays or {})[overlay])
    model = build()
    if mode in PURE:
        model.to(PURE[mode]).register_forward_pre_hook(_CastInputs(PURE[mode]))
    optimizer = make_optimizer(model)
    try:
        if level is not None:
            model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
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


def default_modes(device: torch.device) -> list[str]:
    """All modes, but on the CPU none that is in float16."""
    return [mode for mode in MODES if not (device.type == "cpu" and mode in SLOW_ON_CPU)]
