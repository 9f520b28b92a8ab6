"""What gradients and steps need of torch: patches around the ops."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from ..patching import Patch
from .masters import Masters


def plan_gradient_patches(masters: Masters, tell_zeroed: Callable[[torch.nn.Module], None]) -> Iterator[Patch]:
    """Yield what gradients need of torch:

    `model.zero_grad()` reaches masters and is told, and clipping past masters is pointed out.
    """
    yield Patch(torch.nn.Module, "zero_grad", lambda original: _zeroing_masters(original, masters, tell_zeroed))
    has_warned: list[str] = []
    for owner in (torch.nn.utils, torch.nn.utils.clip_grad):
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            yield Patch(owner, name, lambda original: _warning_of_masters(original, masters, has_warned))


def _zeroing_masters(
    original: Callable[..., Any], masters: Masters, tell_zeroed: Callable[[torch.nn.Module], None]
) -> Callable[..., Any]:
    """An abandoned sum in the masters would be stepped on later, and an abandoned overflow would skip a good step."""

    def zero_grad(module: torch.nn.Module, set_to_none: bool = True) -> None:
        original(module, set_to_none)
        for parameter in module.parameters():
            master = masters.get(parameter)
            if master is not None:
                master.grad = None
        tell_zeroed(module)

    return zero_grad


def _warning_of_masters(original: Callable[..., Any], masters: Masters, has_warned: list[str]) -> Callable[..., Any]:
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if not has_warned and any(masters.get(parameter) is not None for parameter in parameters):
            has_warned.append("once is enough")
            warnings.warn(
                "these are the model's 16-bit parameters, whose gradients are in the float32 masters: this clips"
                " nothing. Clip amp.master_params(optimizer) instead.",
                stacklevel=2,
            )
        return original(parameters, *args, **kwargs)

    return clip


@contextlib.contextmanager
def asking_before(settle: Callable[[Optimizer], None]) -> Iterator[None]:
    """Have `settle(optimizer)` called inside the block before anybody reads `step_was_skipped` of any optimizer."""

    def read(optimizer: Optimizer) -> bool:
        settle(optimizer)
        try:
            return bool(vars(optimizer)["step_was_skipped"])
        except KeyError:
            raise AttributeError(f"{type(optimizer).__name__!r} object has no attribute 'step_was_skipped'") from None

    def write(optimizer: Optimizer, value: bool) -> None:
        vars(optimizer)["step_was_skipped"] = value

    def delete(optimizer: Optimizer) -> None:
        if vars(optimizer).pop("step_was_skipped", None) is None:
            raise AttributeError("step_was_skipped")

    Optimizer.step_was_skipped = property(read, write, delete)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del Optimizer.step_was_skipped  # type: ignore[attr-defined]
