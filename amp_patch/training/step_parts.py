"""`step_in_parts`: takes the step of an optimizer a part of its parameters at a time, so that few split masters are
open at once: only an open one takes memory for its float32 values (see `split_masters`).
"""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..torch_private import without_overrides
from .fused_skip import has_foreign_hooks
from .groups import Groups
from .split_masters import ClosedMaster, has_gradient

_PART_ON_CPU = 2**20
"""The most float32 numbers that are open in a part (4 MiB), unless a single parameter needs more."""

_PART = 2**24
"""The most float32 numbers on other devices, where each kernel costs a launch."""

_STATES = 3
"""The largest number of states that an optimizer which steps in parts keeps for each element."""

_Part = list[list[Tensor]]
"""Parameters of a part, for each group of the optimizer."""


def step_in_parts(
    optimizer: Optimizer,
    groups: Groups,
    run: Callable[[], Any],
    has_states: bool,
    begin_part: Callable[..., None],
    end_part: Callable[[list[Tensor]], None],
) -> Any:
    """Call `run`, a step without a closure, for each part of the parameters, and return its last result.

    Before each call, the groups hold the parameters of one part, and `begin_part` opens its split masters and states.
    The optimizer's hook (`CopyMastersHook`) closes them. With hooks of the script, which must run once, there is one
    part.

    Args:
        groups: the parameter groups of the optimizer.
        has_states: whether states are opened, too.
        begin_part: called with the parameters that have a gradient, and with `is_private`, which is True if no code of
            the script runs in the step.
        end_part: drops the gradients of masters. If there are several parts, it is called after the step of each, with
            the parameters of `begin_part`.
    """
    whole = [group["params"] for group in optimizer.param_groups]
    is_private = not has_foreign_hooks(optimizer)
    parts = _divide(whole, groups.are_split, has_states) if is_private else [whole]
    if len(parts) == 1:
        begin_part(_with_gradients(whole), is_private=is_private)
        return run()
    result = None
    groups.whole = whole
    try:
        for part in parts:
            for group, parameters in zip(optimizer.param_groups, part, strict=True):
                group["params"] = parameters
            stepped = _with_gradients(part)
            begin_part(stepped, is_private=True)
            result = run()
            end_part(stepped)
    finally:
        groups.put_back()
    return result


def _divide(whole: _Part, are_split: bool, has_states: bool) -> list[_Part]:
    """Return the parts. The smallest parameters come first, so the gradients of their masters are gone when the largest
    are opened.

    `are_split`: whether split masters are opened. `has_states`: whether states are.
    """
    sized: list[tuple[int, int, Tensor]] = []
    with without_overrides():
        for number, parameters in enumerate(whole):
            for parameter in parameters:
                opened = (are_split and type(parameter) is ClosedMaster) + _STATES * has_states
                size = parameter.numel() * opened if has_gradient(parameter) else 0
                sized.append((size, number, parameter))
        limit = _PART_ON_CPU if all(parameter.is_cpu for _, _, parameter in sized) else _PART
    if sum(size for size, _, _ in sized) <= limit:
        return [whole]
    parts: list[_Part] = [[[] for _ in whole]]
    total = 0
    for size, number, parameter in sorted(sized, key=lambda entry: entry[0]):
        if total and total + size > limit:
            parts.append([[] for _ in whole])
            total = 0
        total += size
        parts[-1][number].append(parameter)
    return parts


def _with_gradients(part: Iterable[Iterable[Tensor]]) -> list[Tensor]:
    stepped: list[Tensor] = []
    for parameters in part:
        stepped += filter(has_gradient, parameters)
    return stepped
