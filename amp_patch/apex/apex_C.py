"""`apex_C`, the extension that Apex compiled: many tensors as one, and back, by torch's own functions."""

from collections.abc import Sequence

from torch import Tensor

from ..torch_private import flatten_dense_tensors, unflatten_dense_tensors


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Return a new tensor of shape (n,) with all elements of tensors of one dtype and device."""
    flat: Tensor = flatten_dense_tensors(tuple(tensors))
    return flat


def unflatten(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return views of `flat` in the shapes of `tensors`, in their order."""
    return list(unflatten_dense_tensors(flat, tuple(tensors)))
