"""The tensors among what ops are given, where in memory they are, and what they hold."""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..dtypes import PLAIN_CLASSES
from ..torch_dispatch import find_range


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among values, and in lists, tuples and dictionaries of them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)
        elif isinstance(value, dict):
            yield from tensors_in(value.values())


def address_of(tensor: Tensor) -> int:
    """Return where the values of a tensor begin; 0 for one that has none or hides them, as those of torch.func do."""
    return _read_address(tensor) if tensor.numel() else 0


def storage_of(tensor: Tensor) -> int:
    """Return where the storage of a tensor begins, which its views share; 0 as above."""
    return _read_address(tensor) and tensor.untyped_storage().data_ptr()


def _read_address(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr() if type(tensor) in PLAIN_CLASSES and tensor.layout is torch.strided else 0
    except RuntimeError:  # NotImplementedError is one
        return 0


def floating_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the floating and complex tensors that have values, of those among `values` and in containers of them."""
    for tensor in tensors_in(values):
        if (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel() and storage_of(tensor):
            yield tensor


def is_whole(tensor: Tensor) -> bool:
    """Tell whether a tensor has all of its storage."""
    return tensor.nbytes == tensor.untyped_storage().nbytes()


def read_largest(tensor: Tensor) -> float:
    """Return the largest magnitude of a tensor that is not empty: inf or NaN if it has one. Waits for the device."""
    values = tensor.detach()
    low, high = find_range(torch.view_as_real(values.resolve_conj()) if values.is_complex() else values)
    smallest, largest = low.item(), high.item()
    return math.nan if smallest != smallest else max(-smallest, largest) + 0.0  # NaN is not itself; no -0.0


def read_largest_number(tensor: Tensor) -> float:
    """Return the largest finite magnitude of a tensor, 0 for none. Waits for the device."""
    numbers = tensor[tensor.isfinite()]
    return read_largest(numbers) if numbers.numel() else 0.0


def is_finite(tensor: Tensor) -> bool:
    """Tell whether a tensor that is not empty holds neither inf nor NaN. Waits for the device."""
    return math.isfinite(read_largest(tensor))


def has_nan(tensor: Tensor) -> bool:
    """Tell whether a tensor holds NaN. Waits for the device."""
    return bool(tensor.isnan().any())


def find_largest_of(tensors: Iterable[Tensor]) -> float:
    """Return the largest magnitude of all, inf or NaN if one has that; 0 for none. Waits for the device."""
    floating = [one.detach() for one in tensors if one.is_floating_point() and one.numel()]
    if not floating:
        return 0.0
    return float(torch.nn.utils.get_total_norm(floating, math.inf))
