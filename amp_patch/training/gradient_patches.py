"""Replacements of what touches gradients and steps in torch."""

__role__ = ""  # in reports of `insight`: see its `sites`

from collections.abc import Callable, Container, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from ..casting import compiling
from ..interrupts import UndoStack
from ..torch_distributed import broadcast_tensors
from .decisions import Decisions
from .masters import Masters
from .reduction import LocalGradients


def zero_masters(
    original: Callable[..., Any], masters: Masters, on_zero_grad: Callable[[torch.nn.Module], None]
) -> Callable[..., Any]:
    """An abandoned sum in the masters would be stepped on later, and an abandoned overflow would skip a good step."""

    def zero_grad(module: torch.nn.Module, set_to_none: bool = True) -> None:
        original(module, set_to_none)
        for parameter in module.parameters():
            master = masters.get(parameter)
            if master is not None:
                master.grad = None
        on_zero_grad(module)

    return zero_grad


def clip_masters(
    original: Callable[..., Any],
    masters: Masters,
    prepare: Callable[[Sequence[torch.Tensor]], None],
) -> Callable[..., Any]:
    """Clipping 16-bit parameters clips what the optimizer steps on: their masters. `prepare` moves gradients there."""

    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        prepare(given)
        stepped = []
        for parameter in given:
            master = masters.get(parameter)
            stepped.append(parameter if master is None else master)
        return original(stepped, *args, **kwargs)

    return clip


def sync_masters(original: Callable[..., Any], masters: Masters, decisions: Decisions) -> Callable[..., Any]:
    """Giving all ranks the parameters of one gives them its masters, unrounded, and its loss scales."""

    def sync_module_states(
        module: torch.nn.Module,
        process_group: Any,
        broadcast_bucket_size: int,
        src: int,
        params_and_buffers_to_ignore: Container[str],
        broadcast_buffers: bool = True,
    ) -> None:
        masters.sync()
        original(module, process_group, broadcast_bucket_size, src, params_and_buffers_to_ignore, broadcast_buffers)
        sent = [
            master.detach()
            for name, parameter in module.named_parameters()
            if name not in params_and_buffers_to_ignore and (master := masters.get(parameter)) is not None
        ]
        if sent:
            broadcast_tensors(process_group, sent, broadcast_bucket_size, src)
            masters.push()
        decisions.give_scales(process_group, src)

    return sync_module_states


def note_forward(original: Callable[..., Any], local: LocalGradients) -> Callable[..., Any]:
    """DistributedDataParallel decides in its forward whether it reduces the gradients of that forward."""

    def forward(module: torch.nn.parallel.DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
        if not compiling.is_compiling():
            local.on_forward(module)
        return original(module, *args, **kwargs)

    return forward


def resolve_before_reading(resolve: Callable[[Optimizer], None], undo: UndoStack) -> None:
    """Have `resolve(optimizer)` called before anybody reads `step_was_skipped` of any optimizer, until it is undone."""

    def read(optimizer: Optimizer) -> bool:
        resolve(optimizer)
        try:
            return bool(vars(optimizer)["step_was_skipped"])
        except KeyError:
            raise AttributeError(f"{type(optimizer).__name__!r} object has no attribute 'step_was_skipped'") from None

    def write(optimizer: Optimizer, value: bool) -> None:
        vars(optimizer)["step_was_skipped"] = value

    def delete(optimizer: Optimizer) -> None:
        if vars(optimizer).pop("step_was_skipped", None) is None:
            raise AttributeError("step_was_skipped")

    undo.callback(_delete_step_was_skipped)
    Optimizer.step_was_skipped = property(read, write, delete)  # type: ignore[attr-defined]


def _delete_step_was_skipped() -> None:
    if "step_was_skipped" in vars(Optimizer):
        del Optimizer.step_was_skipped  # type: ignore[attr-defined]
