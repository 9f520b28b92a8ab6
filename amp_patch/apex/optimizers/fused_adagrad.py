"""`FusedAdagrad`: Adagrad with Apex's arguments."""

from collections.abc import Mapping
from typing import Any, ClassVar

from ..updates import adagrad_
from .base import FusedOptimizer, Work


class FusedAdagrad(FusedOptimizer):
    """Adagrad without decay of the learning rate; `updates.adagrad_` has the formula.

    State dicts of torch.optim.Adagrad can be loaded if they were saved without `lr_decay` and `maximize`.

    Args:
        adagrad_w_mode: whether weight decay is decoupled from the gradient, as in AdamW.
    """

    _options: ClassVar[tuple[str, ...]] = ("set_grad_none", "adagrad_w_mode")

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        adagrad_w_mode: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "eps": eps, "weight_decay": weight_decay}, set_grad_none)
        self.adagrad_w_mode = bool(adagrad_w_mode)

    def _update(self, work: Work) -> None:
        for group, params, gradients in work:
            adagrad_(
                gradients,
                params,
                self._moments(params, "sum"),
                lr=float(group["lr"]),
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                is_decoupled=self.adagrad_w_mode,
            )

    def _convert_state_dict(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Return the saved state without "step", which torch's Adagrad uses only for a decay of the learning rate."""
        saved = super()._convert_state_dict(state_dict)
        for entry in saved["state"].values():
            entry.pop("step", None)
        return saved
