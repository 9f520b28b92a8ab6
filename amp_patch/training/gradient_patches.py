"""Replacements of what touches gradients and steps in torch."""

from collections.abc import Callable, Container, Sequence
from typing import Any

import torch

from ..casting import compiling
from ..torch_distributed import broadcast_tensors
from .masters import Masters
from .reduction import LocalGradients
from .scale_updates import ScaleUpdates


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


def sync_masters(original: Callable[..., Any], masters: Masters, scale_updates: ScaleUpdates) -> Callable[..., Any]:
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
            masters.copy_to_parameters()
        scale_updates.give_scales(process_group, src)

    return sync_module_states


def note_forward(original: Callable[..., Any], local: LocalGradients) -> Callable[..., Any]:
    """DistributedDataParallel decides in its forward whether it reduces the gradients of that forward."""

    def forward(module: torch.nn.parallel.DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
        if not compiling.is_compiling():
            local.on_forward(module)
        return original(module, *args, **kwargs)

    return forward
