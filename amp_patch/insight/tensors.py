"""The tensors among what ops are given, and where in memory they are."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..dtypes import PLAIN_CLASSES


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
