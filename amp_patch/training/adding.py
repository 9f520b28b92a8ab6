"""Adding gradients up: to those of masters, and to sums that were set aside."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..multi_tensor import clone, copy_, group
from ..torch_private import foreach_add_
from .masters import Pair
from .unscaling import dense_values


class SumsAside:
    """Sums of earlier passes, kept apart while a pass is judged on what it adds."""

    def __init__(self) -> None:
        self._kept: list[tuple[Tensor, Tensor, Tensor]] = []  # parameters, their `.grad`, and its value before the pass

    def clear(self) -> None:
        """Forget them."""
        self._kept.clear()

    def put(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Put the gradients aside, and zeros in their place; the `.grad` objects stay, others may hold them.

        Returns those that need not be: on a CPU, where looking waits for nothing, finite ones.
        """
        stay = []
        with torch.no_grad():
            for parameter in parameters:
                gradient = parameter.grad
                if gradient is not None and gradient.is_cpu and is_finite(gradient):
                    stay.append(gradient)
                elif gradient is not None:
                    self._kept.append((parameter, gradient, clone(gradient)))
                    gradient.zero_()
        return stay

    @torch.no_grad()
    def take_back(self) -> None:
        """Add the sums to the gradients; not where the gradient has been dropped since."""
        kept, self._kept = self._kept, []
        for parameter, held, earlier in kept:
            gradient = parameter.grad
            if gradient is not None and (
                gradient is held or gradient.requires_grad or gradient.is_sparse != held.is_sparse
            ):
                add_each([(parameter, earlier)])


def add_each(pairs: Iterable[Pair]) -> None:
    """Add gradients to those that masters have; dense ones in one call.

    A first one of 16 bits is freed before the next is looked at.
    """
    sums: list[Tensor] = []
    addends: list[Tensor] = []
    for master, gradient in pairs:
        total = master.grad
        if total is None:
            is_alike = gradient.is_sparse or gradient.stride() == master.stride()
            master.grad = gradient.float() if is_alike else to_float32([gradient], [master])[0]
        elif gradient.is_sparse or total.is_sparse:
            # the dense one must come first
            master.grad = gradient.to(total.dtype) + total if total.is_sparse else total + gradient
        else:
            sums.append(total)
            addends.append(gradient)
    if sums:
        foreach_add_(sums, addends)  # a CPU needs no float32 copies to sum up two dtypes


def to_float32(low: Sequence[Tensor], masters: Sequence[Tensor]) -> list[Tensor]:
    """Return float32 copies of gradients, in one kernel for each (device, dtype)."""
    full = [
        torch.empty_like(master, requires_grad=False) if gradient.layout == torch.strided else gradient.float()
        for gradient, master in zip(low, masters, strict=True)
    ]
    dense = [index for index, gradient in enumerate(low) if gradient.layout == torch.strided]
    copy_(group([full[index] for index in dense], [low[index] for index in dense]))
    return full


def is_finite(gradient: Tensor) -> bool:
    """Tell whether a gradient holds neither inf nor NaN. Waits for the device."""
    values = dense_values(gradient)
    # a sum with one of them is one itself, and takes a tenth of the time; finite values can sum up to inf, too
    return bool(torch.isfinite(values.sum())) or bool(torch.isfinite(values).all())
