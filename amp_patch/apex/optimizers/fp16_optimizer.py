"""`FP16_Optimizer` as Apex had it beside its fused optimizers, in 2019 here and later in `contrib`."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ..fp16_utils.fp16_optimizer import FP16_Optimizer as _FP16Optimizer


class FP16_Optimizer(_FP16Optimizer):
    """`fp16_utils.FP16_Optimizer` whose dynamic scale doubles every 1000 good steps and never falls below 1, and whose
    `step` unscales: backward passes add up until then, and the scale is decided once for all of them.

    Works around any optimizer. Its state dict is that of `fp16_utils.FP16_Optimizer`, not the one this variant had in
    Apex.
    """

    dynamic_loss_defaults: Mapping[str, Any] = {"scale_window": 1000, "min_loss_scale": 1.0}

    def backward(self, loss: Tensor, update_master_grads: bool = False, retain_graph: bool = False) -> None:
        """Go backward from the scaled loss."""
        super().backward(loss, update_master_grads, retain_graph)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Unscale, unless `update_master_grads` has been called since the last backward pass, and step.

        With a closure, which the optimizer may call more than once, each call of it unscales.
        """
        if closure is None:
            self._unscale()
        return super().step(closure)

    def _wrap(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        evaluate = super()._wrap(closure)

        def evaluate_and_unscale() -> Any:
            loss = evaluate()
            self._unscale()
            return loss

        return evaluate_and_unscale

    def _unscale(self) -> None:
        if self._carried is not None and not self._is_unscaled:
            self.update_master_grads()
