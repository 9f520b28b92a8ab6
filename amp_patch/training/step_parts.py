"""`step_in_parts`: takes the step of an optimizer a part of its parameters at a time, so that few split masters are open
at once.
"""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..torch_private import without_overrides
from .fused_skip import has_foreign_hooks
from .groups import Groups
from .masters import Masters
from .split_masters import ClosedMaster

_PART_ON_CPU = 2**20
"""Elements of the split masters in a part: 4 MiB of float32. A part has at least one parameter."""

_PART = 2**24
"""The same on other devices, where each kernel costs a launch."""

_Part = list[list[Tensor]]
"""Parameters of a part, for each group of the optimizer."""


def step_in_parts(optimizer: Optimizer, groups: Groups, masters: Masters, run: Callable[[], Any]) -> Any:
    """Call `run`, a step without a closure, for each part of the parameters, and return its last result.

    Before each call, the groups hold the parameters of one part, and its split masters are opened. The optimizer's hook
    (`CopyMastersHook`) closes them. With hooks of the script, which must run once, there is one part.

    Args:
        groups: the parameter groups of the optimizer.
    """
    whole = [group["params"] for group in optimizer.param_groups]
    parts = [whole] if has_foreign_hooks(optimizer) else _divide(whole)
    if len(parts) == 1:
        masters.open(_with_gradients(whole))
        return run()
    result = None
    groups.whole = whole
    try:
        for part in parts:
            for group, parameters in zip(optimizer.param_groups, part, strict=True):
                group["params"] = parameters
            masters.open(_with_gradients(part))
            result = run()
    finally:
        groups.put_back()
    return result


def _divide(whole: _Part) -> list[_Part]:
    """Return the parts: consecutive parameters of all groups. Parameters that are not stepped on take no memory."""
    parts: list[_Part] = [[[] for _ in whole]]
    size = 0
    with without_overrides():
        for number, parameters in enumerate(whole):
            for parameter in parameters:
                added = 0
                if type(parameter) is ClosedMaster and parameter.grad is not None:
                    added = parameter.numel()
                if size and size + added > (_PART_ON_CPU if parameter.is_cpu else _PART):
                    parts.append([[] for _ in whole])
                    size = 0
                size += added
                parts[-1][number].append(parameter)
    return parts


def _with_gradients(part: Iterable[Iterable[Tensor]]) -> list[Tensor]:
    stepped: list[Tensor] = []
    with without_overrides():
        for parameters in part:
            stepped += [parameter for parameter in parameters if parameter.grad is not None]
    return stepped

