"""The two loss scalers of `apex.fp16_utils`, for scripts that use them directly."""

from collections.abc import Iterable

import torch
from torch import Tensor

from ..updates import norms


class LossScaler:
    """A static loss scale. Never finds an overflow."""

    def __init__(self, scale: float = 1.0) -> None:
        self.cur_scale = scale

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Return False."""
        return False

    def update_scale(self, overflow: bool) -> None:
        """Leave the scale as it is."""

    @property
    def loss_scale(self) -> float:
        """The scale."""
        return self.cur_scale

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Run the backward pass of the scaled loss."""
        (loss * self.loss_scale).backward(retain_graph=retain_graph)


class DynamicLossScaler(LossScaler):
    """A dynamic loss scale.

    An overflow divides it by `scale_factor`, to 1 at the least. Every `scale_window` good steps in a row multiply it by
    `scale_factor`.
    """

    def __init__(self, init_scale: float = 2.0**32, scale_factor: float = 2.0, scale_window: int = 1000) -> None:
        super().__init__(init_scale)
        self.cur_iter = 0
        self.last_overflow_iter = -1
        self.scale_factor = scale_factor
        self.scale_window = scale_window

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Return whether the gradient of a parameter contains inf or NaN. Waits for the device."""
        gradients: list[Tensor] = []
        for parameter in params:
            gradient = parameter.grad
            if gradient is not None:
                gradients.append(gradient.coalesce().values() if gradient.is_sparse else gradient)
        return any(not bool(torch.isfinite(norm)) for norm in norms(gradients, float("inf")))

    def update_scale(self, overflow: bool) -> None:
        """Count an iteration, and update the scale for the next one."""
        if overflow:
            self.cur_scale = max(self.cur_scale / self.scale_factor, 1.0)
            self.last_overflow_iter = self.cur_iter
        # the difference is the number of good steps since the last overflow, including this one
        elif (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0:
            self.cur_scale *= self.scale_factor
        self.cur_iter += 1
