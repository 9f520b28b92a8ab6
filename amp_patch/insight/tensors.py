"""Finds the tensors among the arguments of ops, and reads their addresses in memory and their largest values."""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..dtypes import PLAIN_CLASSES
from ..torch_dispatch import aminmax


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
    """Return the address of the first value of a tensor; 0 for a tensor without values.

    Also return 0 if the tensor is sparse, is not of `PLAIN_CLASSES`, or hides its address, as in torch.func.
    """
    return _read_address(tensor) if tensor.numel() else 0


def storage_of(tensor: Tensor) -> int:
    """Return the address of the storage of a tensor, which its views share; 0 where `address_of` returns 0."""
    return _read_address(tensor) and tensor.untyped_storage().data_ptr()


def _read_address(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr() if type(tensor) in PLAIN_CLASSES and tensor.layout is torch.strided else 0
    except RuntimeError:  # also NotImplementedError, its subclass
        return 0


def floating_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the floating and complex tensors with values among `values`, and in containers of them.

    float8 is left out: most kernels of torch do not take it. So is a tensor without an address (see `storage_of`).
    """
    for tensor in tensors_in(values):
        is_readable = tensor.is_complex() or (tensor.is_floating_point() and tensor.itemsize > 1)
        if is_readable and tensor.numel() and storage_of(tensor):
            yield tensor


def is_whole(tensor: Tensor) -> bool:
    """Return whether a tensor has as many bytes as its storage.

    It then covers the storage, unless its elements overlap.
    """
    return tensor.nbytes == tensor.untyped_storage().nbytes()


def read_largest(tensor: Tensor) -> float:
    """Return the largest magnitude of a tensor that is not empty; inf or NaN if it holds one. Waits for the device.

    Of a complex tensor, the real and imaginary parts count.
    """
    values = tensor.detach()
    # One kernel finds the smallest and the largest value, without a copy of the magnitudes. With a NaN, both are NaN.
    low, high = aminmax(torch.view_as_real(values.resolve_conj()) if values.is_complex() else values)
    smallest, largest = low.item(), high.item()
    if math.isnan(smallest):
        return math.nan
    return float(max(-smallest, largest)) + 0.0  # + 0.0: no -0.0


def read_largest_number(tensor: Tensor) -> float:
    """Return the largest finite magnitude of a tensor, 0 for none. Waits for the device."""
    numbers = tensor[tensor.isfinite()]
    return read_largest(numbers) if numbers.numel() else 0.0


def is_finite(tensor: Tensor) -> bool:
    """Return whether a tensor that is not empty holds neither inf nor NaN. Waits for the device."""
    return math.isfinite(read_largest(tensor))


def has_nan(tensor: Tensor) -> bool:
    """Return whether a tensor holds NaN. Waits for the device."""
    return bool(tensor.isnan().any())


def find_largest_of(tensors: Iterable[Tensor]) -> float:
    """Return the largest magnitude in floating tensors; inf or NaN if one has it, 0 for none. Waits for the device."""
    floating = [tensor.detach() for tensor in tensors if tensor.is_floating_point() and tensor.numel()]
    if not floating:
        return 0.0
    return float(torch.nn.utils.get_total_norm(floating, math.inf))
