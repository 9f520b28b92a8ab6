"""Adam and SGD by the kernels behind `torch.optim.AdamW(fused=True)`: one launch for many tensors, which does
nothing where a flag on the device is 1.

Each function does on one part, at full precision, what that of `updates` does, or returns False and leaves the tensors
alone: where they lie differently in memory, through which the kernels go straight, where one is of a subclass or a lazy
negative, and on devices for which torch has no such kernel. `found_inf` is None or the flag, 0-dim float32.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..torch_private import fused_adam_, fused_adamw_, fused_sgd_

Part = list[Tensor] | tuple[Tensor, ...]
"""Tensors of one device and dtype."""


def adam_(g: Part, p: Part, m: Part, v: Part, *, step: float | Tensor, is_decoupled: bool, **options: Any) -> bool:
    """`updates.adam_`. `step` counts from 1; infinity is without a correction of the bias."""
    kernel = fused_adamw_ if is_decoupled else fused_adam_
    steps = [_to_device(step, p[0].device)] * len(p)
    return _run(kernel, (p, g, m, v), max_exp_avg_sqs=[], state_steps=steps, amsgrad=False, **options)


def sgd_(g: Part, p: Part, m: Part | None, **options: Any) -> bool:
    """`updates.sgd_`. `m` is None without momentum."""
    if m is None:
        return _run(fused_sgd_, (p, g), momentum_buffer_list=[], **options)
    return _run(fused_sgd_, (p, g, m), **options)


def _to_device(step: float | Tensor, device: torch.device) -> Tensor:
    """Return the number as a 0-dim float32 tensor there, without a wait."""
    if isinstance(step, Tensor):
        return step.to(device, torch.float32)
    return torch.full((), step, dtype=torch.float32, device=device)


def _run(kernel: Callable[..., Any], lists: tuple[Part, ...], *, found_inf: Tensor | None, **options: Any) -> bool:
    """Run a kernel on lists of equal length, of which the first is changed; return False if it cannot take them."""
    if not all(map(_lie_alike, *lists)):
        return False
    flag = None if found_inf is None else found_inf.to(lists[0][0].device)
    try:
        kernel(*lists, **options, maximize=False, found_inf=flag)
    except NotImplementedError:  # torch looks for the kernel of the device before it does anything
        return False
    torch.autograd.graph.increment_version(list(lists[0]))  # fused kernels do not
    return True


def _lie_alike(*tensors: Tensor) -> bool:
    """Tell whether plain tensors of one shape lie in memory in one order, without gaps, as they read."""
    if any(type(tensor) not in (Tensor, nn.Parameter) or tensor.is_neg() for tensor in tensors):
        return False
    return all(map(Tensor.is_contiguous, tensors)) or (
        tensors[0].dim() == 4 and all(tensor.is_contiguous(memory_format=torch.channels_last) for tensor in tensors)
    )
