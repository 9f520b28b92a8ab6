"""`FusedSGD`: SGD with Apex's arguments."""

from typing import Any, ClassVar

from torch.optim.optimizer import required

from ...errors import OptimizerError
from .. import amp_C
from ..updates import sgd_
from .base import FusedOptimizer, Work


class FusedSGD(FusedOptimizer):
    """SGD with momentum. `updates.sgd_` has the formula.

    As in torch.optim.SGD, the momentum of a parameter starts as its first gradient plus weight decay.

    Args:
        wd_after_momentum: raises OptimizerError if true.
        materialize_master_grads: without effect.
    """

    _options: ClassVar[tuple[str, ...]] = ("set_grad_none", "materialize_master_grads")
    multi_tensor_sgd = staticmethod(amp_C.multi_tensor_sgd)
    wd_after_momentum = False
    reads_flag = True

    def __init__(
        self,
        params: Any,
        lr: Any = required,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
    ) -> None:
        if wd_after_momentum:
            raise OptimizerError("FusedSGD: wd_after_momentum is not offered: leave it out")
        if nesterov and (momentum <= 0 or dampening != 0):
            raise OptimizerError(
                f"FusedSGD: Nesterov momentum needs momentum above 0 (not {momentum!r}) and dampening 0 (not"
                f" {dampening!r})"
            )
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
        }
        super().__init__(params, defaults, set_grad_none)
        self.materialize_master_grads = materialize_master_grads

    def _update(self, work: Work) -> None:
        for group, params, gradients in work:
            lacks_momentum = [
                group["momentum"] != 0 and "momentum_buffer" not in self.state[parameter] for parameter in params
            ]
            # A skipped step must not create the momentum: the next gradient would not count as the first, and `sgd_`
            # would dampen it. Waits for the device.
            if self.found_inf is not None and group["dampening"] and any(lacks_momentum) and bool(self.found_inf):
                continue
            # parameters may get their first gradient in different steps, and `sgd_` takes one `is_first` for all
            for is_first in (True, False):
                chosen = [index for index, lacks in enumerate(lacks_momentum) if lacks is is_first]
                part = [params[index] for index in chosen]
                sgd_(
                    [gradients[index] for index in chosen],
                    part,
                    self._moments(part, "momentum_buffer") if group["momentum"] != 0 else None,
                    lr=float(group["lr"]),
                    momentum=group["momentum"],
                    dampening=group["dampening"],
                    weight_decay=group["weight_decay"],
                    is_nesterov=group["nesterov"],
                    is_first=is_first,
                    found_inf=self.found_inf,
                )
