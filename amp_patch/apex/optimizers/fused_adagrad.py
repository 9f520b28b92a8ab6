"""`FusedAdagrad`: Adagrad with Apex's arguments."""

from typing import Any, ClassVar

from .. import amp_C
from ..updates import adagrad_
from .base import FusedOptimizer, Work


class FusedAdagrad(FusedOptimizer):
    """torch.optim.Adagrad without `lr_decay`; `updates.adagrad_` has the formula.

    `adagrad_w_mode` decouples weight decay from the gradient.
    """

    _options: ClassVar[tuple[str, ...]] = ("set_grad_none", "adagrad_w_mode")
    multi_tensor_adagrad = staticmethod(amp_C.multi_tensor_adagrad)

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

    @property
    def reads_flag(self) -> bool:  # type: ignore[override]
        """No kernel decouples the weight decay."""
        return not self.adagrad_w_mode

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
                found_inf=self.found_inf,
            )
