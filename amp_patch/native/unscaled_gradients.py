"""`UnscaledGradients`: notices scaled losses that go backward after `unscale_`. Nothing unscales their gradients."""

import weakref
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from ..torch_private import get_version
from .roots import find_line

Version = tuple[int, int] | None
"""The id and the version of a gradient; None without one."""


def read_version(parameter: Tensor | None) -> Version:
    """Return the version of a parameter's gradient; None without a parameter or gradient."""
    gradient = None if parameter is None else parameter.grad
    return None if gradient is None else (id(gradient), get_version(gradient))


class UnscaledGradients:
    """The optimizers whose gradients a GradScaler has unscaled since its last `update`. Watches a gradient of each."""

    def __init__(self) -> None:
        # For each optimizer, a parameter that had a gradient at `unscale_`. Parameters are not held weakly, because
        # `torch.utils.swap_tensors` refuses tensors with weak references.
        self._parameters: weakref.WeakKeyDictionary[Any, Tensor] = weakref.WeakKeyDictionary()
        self._added_at: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()

    def note_unscale(self, optimizer: Any) -> None:
        """Note that the gradients of an optimizer have been unscaled."""
        parameters: Iterator[Tensor] = (
            parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.grad is not None
        )
        parameter = next(parameters, None)
        if parameter is not None:
            self._parameters[optimizer] = parameter

    def read_versions(self) -> dict[Any, Version]:
        """Return the version of one gradient of each optimizer: the gradient of its first parameter that had one."""
        return {optimizer: read_version(parameter) for optimizer, parameter in self._parameters.items()}

    def note_backward(self, before: dict[Any, Version]) -> None:
        """Note that a scaled loss has gone backward. `before`: what `read_versions` returned before this pass."""
        for optimizer, version in self.read_versions().items():
            if before.get(optimizer) != version:
                self._added_at.setdefault(optimizer, find_line())

    def find_added(self, optimizer: Any) -> str:
        """Return the line of the first scaled backward pass that changed the unscaled gradient; "" without one."""
        return self._added_at.get(optimizer, "")

    def clear(self) -> None:
        """Forget all, at an `update`."""
        self._parameters.clear()
        self._added_at.clear()
