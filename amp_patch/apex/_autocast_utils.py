"""`apex._autocast_utils`: casts the arguments of Apex's own functions while `torch.autocast` is enabled."""

from typing import Any

import torch
from torch import Tensor

from ._core import cast_tree


def _cast_if_autocast_enabled(*args: Any) -> tuple[Any, ...]:
    """Return the arguments, with floating tensors cast to the dtype of `torch.autocast`.

    float64 tensors, and tensors on devices where autocast is disabled, stay as they are.
    """
    cast: tuple[Any, ...] = cast_tree(args, _cast)
    return cast


def _cast(tensor: Tensor) -> Tensor:
    device = tensor.device.type
    is_cast = tensor.is_floating_point() and tensor.dtype is not torch.float64
    if is_cast and torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return tensor.to(torch.get_autocast_dtype(device))
    return tensor
