"""Multiplying and dividing lists of gradients by a loss scale in place, one kernel for each device and dtype."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..multi_tensor import group
from ..torch_private import (
    foreach_mul_,
    foreach_non_finite_check_and_unscale_,
    get_local_tensor,
    get_sparse_values,
    view_negated,
)


def unscale_(gradients: Sequence[Tensor], scale: Tensor, found_inf: Tensor | None) -> None:
    """Divide `gradients` by `scale`, one read and one write each, and set `found_inf` to 1.0 if an element is inf
    or NaN.

    Gradients may be of any floating or complex dtype, dense or sparse, on any devices. `scale` and `found_inf` are
    0-dim float32. Waits for nothing.
    """
    groups = _group_values(gradients)
    if not groups:
        return
    is_on_mps = scale.device.type == "mps"  # which has no float64
    inverse = scale.reciprocal() if is_on_mps else scale.double().reciprocal().float()
    for values in groups:
        device = values[0].device
        is_here = found_inf is not None and found_inf.device == device
        found = found_inf if is_here else torch.zeros((), dtype=torch.float32, device=device)
        assert found is not None
        foreach_non_finite_check_and_unscale_(values, found, inverse.to(device))
        if found_inf is not None and not is_here:
            found_inf.copy_(torch.maximum(found_inf, found.to(found_inf.device)))


def rescale_(gradients: Sequence[Tensor], scale: Tensor) -> None:
    """Multiply `gradients` by `scale`, so that a backward pass of a loss scaled by it may add to them."""
    for values in _group_values(gradients):
        foreach_mul_(values, scale.to(values[0].device))


def _group_values(gradients: Iterable[Tensor]) -> list[list[Tensor]]:
    return [values for (values,) in group(map(dense_values, gradients))]


def dense_values(gradient: Tensor) -> Tensor:
    """Return the values that a gradient stores here, real, in the same memory: those of a sparse one without its zeros,
    those of a DTensor that are on this rank.

    Where a gradient is a lazy conjugate or negative of that memory, they are the memory's own: a scale is real, and
    signs change neither what it does nor whether a value is finite.
    """
    if type(gradient) is not Tensor and (local := get_local_tensor(gradient)) is not None:
        gradient = local
    values = get_sparse_values(gradient) if gradient.layout == torch.sparse_coo else gradient
    if values.is_complex():
        values = torch.view_as_real(values.conj() if values.is_conj() else values)
    return view_negated(values) if values.is_neg() else values
