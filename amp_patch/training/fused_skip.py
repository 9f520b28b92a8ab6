"""Facts about the `step` of an optimizer: whether it can skip on the device, whether it calls its closure first, and
whether it may be taken in parts. Also the hooks that run after a step.
"""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, SGD, Adagrad, Adam, AdamW, Optimizer

from ..torch_private import (
    GLOBAL_POST_HOOKS,
    GLOBAL_PRE_HOOKS,
    get_step_hooks,
    is_wrapped_by_scheduler,
    reads_found_inf,
)
from .split_masters import has_gradient

_STEPS = frozenset(inspect.unwrap(optimizer.step) for optimizer in (Adam, AdamW, SGD, Adagrad))
"""The `step` functions of optimizers of torch with fused kernels."""

_NAMES_OF_SEPARATE = (
    *("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "NAdam", "RAdam", "Adadelta", "Adamax", "ASGD", "Rprop"),
    *("Adafactor", "Muon"),
)
_SEPARATE_STEPS = frozenset(
    inspect.unwrap(getattr(torch.optim, name).step) for name in _NAMES_OF_SEPARATE if hasattr(torch.optim, name)
)
"""The `step` functions of torch that update each parameter by its own gradient and state alone."""


class StepHook:
    """A hook after each step that calls `mark_updated` with each group's parameters, also after a step that was skipped
    on the device.

    Args:
        marks_bound: whether to mark the parameters of optimizers that a session has bound, too.
    """

    def __init__(self, mark_updated: Callable[[Iterable[Tensor]], None], *, marks_bound: bool = True) -> None:
        self._mark_updated = mark_updated
        self._marks_bound = marks_bound

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._marks_bound or "_amp_stash" not in vars(optimizer):
            for group in optimizer.param_groups:
                self._mark_updated(group["params"])


class CopyMastersHook(StepHook):
    """A hook after each step of one optimizer that calls `copy_masters`.

    It is a StepHook, because `has_foreign_hooks` does not count such hooks: the optimizer may still skip on the device.
    """

    def __init__(self, copy_masters: Callable[[], None]) -> None:
        self._copy_masters = copy_masters

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._copy_masters()

    def __deepcopy__(self, memo: Any) -> "CopyMastersHook":
        return CopyMastersHook(lambda: None)  # a copied optimizer belongs to no session


def evaluates_closure_first(step: Callable[..., Any]) -> bool:
    """Return whether a bound `step` is known to call its closure once and first. True for every optimizer of
    torch.optim except LBFGS, and for every optimizer of amp_patch.apex.
    """
    function = _get_function(step)
    if function is None or inspect.unwrap(function) is inspect.unwrap(LBFGS.step):
        return False
    layers = [function]  # torch wraps the steps of other packages, too: each layer must be of torch or amp_patch
    while (inner := getattr(layers[-1], "__wrapped__", None)) is not None:
        layers.append(inner)
    # torch.utils: the wrapper that `torch.no_grad()` makes
    owners = ("torch.optim.", "torch.utils.", "amp_patch.")
    return all(str(layer.__globals__["__name__"]).startswith(owners) for layer in layers)


def steps_separately(step: Callable[..., Any]) -> bool:
    """Return whether a bound `step` updates each parameter by its own gradient and state alone. Such a step may be
    taken in parts, a few parameters at a time. True for most optimizers of torch.optim, and for subclasses that inherit
    their `step`.
    """
    function = _get_function(step)
    return function is not None and inspect.unwrap(function) in _SEPARATE_STEPS and evaluates_closure_first(step)


def has_foreign_hooks(optimizer: Optimizer) -> bool:
    """Return whether hooks other than `StepHook`s run before or after the steps of an optimizer."""
    if GLOBAL_PRE_HOOKS:
        return True
    hooks = [*get_step_hooks(optimizer), *GLOBAL_POST_HOOKS.values()]
    return not all(isinstance(hook, StepHook) for hook in hooks)


def _get_function(step: Callable[..., Any]) -> Any:
    """Return the function of a bound `step`, or None. If an LR scheduler has wrapped it, look inside the wrapper."""
    return getattr(step, "__wrapped__" if is_wrapped_by_scheduler(step) else "__func__", None)


class DeviceSkip:
    """Knows whether an optimizer can skip a step on the device: whether its kernels read a flag there.

    torch's fused optimizers have such kernels, and so have the optimizers of amp_patch.apex with `reads_flag`. If a
    subclass or a hook of the script adds code around such a step, the answer is no, because that code would run even if
    the step is skipped.

    Args:
        step: the bound method, as it was before the session replaced it.
    """

    def __init__(self, optimizer: Optimizer, step: Callable[..., Any]) -> None:
        function = _get_function(step)
        is_of_class = function is not None and function is type(optimizer).step
        unwrapped = inspect.unwrap(function) if is_of_class else None
        self._is_torch_step = unwrapped in _STEPS and reads_found_inf(optimizer)
        self._is_apex_step = unwrapped is not None and unwrapped is getattr(type(optimizer), "step_by_flag", None)

    def is_possible(self, optimizer: Any) -> bool:
        """Return whether the next step can skip on the device."""
        if not (self._is_torch_step or (self._is_apex_step and optimizer.reads_flag)):
            return False
        if has_foreign_hooks(optimizer):
            return False
        return all(
            (self._is_apex_step or group.get("fused"))
            and (not group.get("momentum") or _have_momentum(optimizer, group["params"]))
            for group in optimizer.param_groups
        )


def _have_momentum(optimizer: Optimizer, parameters: Iterable[Tensor]) -> bool:
    """Return whether all parameters with a gradient have a momentum buffer. If torch's fused SGD skips the step that
    makes the buffers, it leaves them uninitialized.
    """
    return all(
        optimizer.state.get(parameter, {}).get("momentum_buffer") is not None
        for parameter in parameters
        if has_gradient(parameter)
    )


def step_with_flag(flag: Tensor, optimizer: Any, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a fused optimizer's step with the flag that its kernels read: 0-dim float32. 1.0: the step changes nothing.

    Gradients are unscaled already, so the optimizer gets no `grad_scale`.
    """
    optimizer.found_inf = flag
    try:
        return step(*args, **kwargs)
    finally:
        del optimizer.found_inf
