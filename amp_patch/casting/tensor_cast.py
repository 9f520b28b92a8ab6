"""Casting one tensor, or those in a list or tuple, as wrappers do it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..dtypes import CASTABLE, PLAIN_CLASSES, TensorCast, is_opaque


def _is_on_cpu(tensor: Tensor) -> bool:
    return tensor.is_cpu


def _is_on_cuda(tensor: Tensor) -> bool:
    return tensor.is_cuda


def make_plain_cast(dtype: torch.dtype, device_type: str) -> TensorCast:
    """Return a function that casts a castable tensor of that device type to `dtype` by `Tensor.to`, and returns any
    other as it is.
    """

    # `device.type` makes a string, at a tenth of what the cast itself costs
    checks: dict[str, Callable[[Tensor], bool]] = {"cpu": _is_on_cpu, "cuda": _is_on_cuda}
    is_there: Callable[[Tensor], bool] = checks.get(device_type, lambda tensor: tensor.device.type == device_type)

    def cast(tensor: Tensor) -> Tensor:
        if tensor.dtype not in CASTABLE or not is_there(tensor) or tensor.is_quantized:
            return tensor
        return tensor.to(dtype) if tensor.__class__ in PLAIN_CLASSES or not is_opaque(tensor) else tensor

    return cast


def cast_nested(value: Any, cast: TensorCast) -> Any:
    """Cast a tensor, or the tensors in a list or tuple (of lists or tuples); anything else is returned as it is."""
    if isinstance(value, Tensor):
        return cast(value)
    if value.__class__ is list:
        return [cast_nested(item, cast) for item in value]
    if value.__class__ is tuple:
        return tuple([cast_nested(item, cast) for item in value])
    return value
