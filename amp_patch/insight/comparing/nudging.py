"""`Nudge`: moves what a model is given by one unit in the last place, for a noise floor."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from ...casting import cast_tree
from ...session import current


class Nudge:
    """From `open` to `close`, each forward of a model gets its floating tensors moved up by one unit in the last place.

    A model that is given none, such as one of language, has those moved that its first module with any is given. Only
    positional arguments are looked at.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._models = set(models)
        self._is_due = self.has_moved = False
        self._handle: RemovableHandle | None = None

    def open(self) -> None:
        """Register a hook on all modules."""
        self._handle = register_module_forward_pre_hook(self._move)

    def close(self) -> None:
        """Remove it. Harmless twice."""
        if self._handle is not None:
            self._handle.remove()

    def _move(self, module: nn.Module, args: Any) -> Any:
        self._is_due |= module in self._models
        if not self._is_due:
            return None
        with current.without_casts():
            moved = cast_tree(args, self._move_one)
        return None if self._is_due else moved

    def _move_one(self, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        self._is_due, self.has_moved = False, True
        return move_up(tensor)


def move_up(tensor: Tensor) -> Tensor:
    """Return the next larger values; the gradient passes as it is."""
    with torch.no_grad():
        if tensor.dtype in (torch.float32, torch.float64):
            step = torch.nextafter(tensor, torch.full_like(tensor, math.inf)) - tensor
        else:
            step = tensor.abs() * torch.finfo(tensor.dtype).eps
    return tensor + step
