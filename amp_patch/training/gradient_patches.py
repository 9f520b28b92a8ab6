"""Replacements of functions of torch that zero or clip gradients, and of functions of DistributedDataParallel."""

__role__ = ""  # reports of `insight` do not count ops that run here as ops of amp (see `insight.sites`)

from collections.abc import Callable, Container, Sequence
from typing import Any

import torch

from ..casting import compiling
from ..torch_distributed import broadcast_tensors
from .masters import Masters
from .reduction import LocalGradients
from .scale_updates import ScaleUpdates
from .split_masters import open_gradients


def zero_masters(
    original: Callable[..., Any], masters: Masters, on_zero_grad: Callable[[torch.nn.Module], None]
) -> Callable[..., Any]:
    """Return a `Module.zero_grad` that also drops the gradients of masters, and calls `on_zero_grad(module)`.

    Without this, the next step would use gradients that the script has zeroed, or could be skipped because of them.
    """

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
    """Return a clipping function that takes the master in place of each parameter that has one.

    The function first calls `prepare` with the parameters, which moves gradients to the masters.
    """

    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        clipped = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        prepare(clipped)
        with_masters = []
        for parameter in clipped:
            master = masters.get(parameter)
            with_masters.append(parameter if master is None else master)
        open_gradients(with_masters)  # all together; torch would open one after another
        return original(with_masters, *args, **kwargs)

    return clip


def sync_masters(original: Callable[..., Any], masters: Masters, scale_updates: ScaleUpdates) -> Callable[..., Any]:
    """Return a replacement of the function with which torch's DistributedDataParallel broadcasts a module's parameters.

    It also broadcasts their float32 masters and the dynamic loss scales.
    """

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
        sent_masters = [
            masters.float32_of(parameter)
            for name, parameter in module.named_parameters()
            if name not in params_and_buffers_to_ignore and masters.get(parameter) is not None
        ]
        if sent_masters:
            broadcast_tensors(process_group, sent_masters, broadcast_bucket_size, src)
            masters.copy_to_parameters()
        scale_updates.broadcast_scales(process_group, src)

    return sync_module_states


def note_forward(original: Callable[..., Any], local: LocalGradients) -> Callable[..., Any]:
    """Return a forward of DistributedDataParallel that first calls `local.on_forward`, except in compiled code.

    `on_forward` records whether the module will reduce its gradients. This depends on a flag that `no_sync` clears, and
    that torch reads in the forward, too.
    """

    def forward(module: torch.nn.parallel.DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
        if not compiling.is_compiling():
            local.on_forward(module)
        return original(module, *args, **kwargs)

    return forward
