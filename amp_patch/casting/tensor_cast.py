"""Casting one tensor, or those in a list or tuple, as wrappers do it."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..dtypes import CASTABLE, PLAIN_CLASSES, TensorCast, is_opaque

_COMPRESSED = frozenset({torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc})


def is_uncastable(tensor: Tensor) -> bool:
    """Tell whether `tensor` is never cast to a low dtype although its dtype could be: an op on it runs in the dtype
    that it shows. Such are opaque tensors (quantized ones), and on a CPU, which has no 16-bit products of those,
    compressed sparse ones.
    """
    return is_opaque(tensor) or (tensor.is_cpu and tensor.layout in _COMPRESSED and tensor.dtype is torch.float32)


def make_plain_cast(dtype: torch.dtype, device_type: str, *, is_for_kernels: bool = False) -> TensorCast:
    """Return a function that casts a castable tensor of that device type to `dtype` by `Tensor.to`, and returns any
    other as it is. Where kernels of a low dtype are to have the result (`is_for_kernels`), uncastable ones, too.
    """
    # as in make_test, which would be a frame more for each cast
    on_cpu, on_cuda = device_type == "cpu", device_type == "cuda"
    asks_layout, strided = is_for_kernels and on_cpu, torch.strided

    def cast(tensor: Tensor) -> Tensor:
        if tensor.dtype not in CASTABLE:
            return tensor
        if not (tensor.is_cpu if on_cpu else tensor.is_cuda if on_cuda else tensor.device.type == device_type):
            return tensor
        if asks_layout and tensor.layout is not strided and is_uncastable(tensor):
            return tensor
        return tensor.to(dtype) if tensor.__class__ in PLAIN_CLASSES or not is_opaque(tensor) else tensor

    return cast


def make_test(device_type: str) -> Callable[[Tensor], bool]:
    """Return a function that tells whether a tensor is on such a device and not opaque."""
    # `device.type` makes a string, at a tenth of what a cast costs
    on_cpu, on_cuda = device_type == "cpu", device_type == "cuda"

    def is_here(tensor: Tensor) -> bool:
        if not (tensor.is_cpu if on_cpu else tensor.is_cuda if on_cuda else tensor.device.type == device_type):
            return False
        return tensor.__class__ in PLAIN_CLASSES or not is_opaque(tensor)

    return is_here


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a list or tuple (of lists or tuples); of a tensor itself, or anything else, none."""
    if value.__class__ is list or value.__class__ is tuple:
        for item in value:
            if isinstance(item, Tensor):
                yield item
            else:
                yield from tensors_in(item)


def cast_nested(value: Any, cast: TensorCast) -> Any:
    """Cast a tensor, or the tensors in a list or tuple (of lists or tuples); anything else is returned as it is."""
    if isinstance(value, Tensor):
        return cast(value)
    if value.__class__ is list:
        return [cast_nested(item, cast) for item in value]
    if value.__class__ is tuple:
        return tuple([cast_nested(item, cast) for item in value])
    return value
