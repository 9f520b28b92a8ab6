"""`apex_C`, a compiled extension of Apex, by torch's own functions: flattens tensors into one, and splits it again."""

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
