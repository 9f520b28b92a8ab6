"""Stands in for `apex_C`, a compiled extension of Apex: flattens tensors into one tensor, and splits such a tensor."""

from collections.abc import Sequence

from torch import Tensor

from ..torch_private import flatten_dense_tensors, unflatten_dense_tensors


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Return a tensor of shape (n,) with the elements of all `tensors`, which have one dtype and device.

    For a single contiguous tensor, the result is a view of it.
    """
    flat: Tensor = flatten_dense_tensors(tuple(tensors))
    return flat


def unflatten(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return views of `flat` in the shapes of `tensors`, in their order."""
    return list(unflatten_dense_tensors(flat, tuple(tensors)))
