"""Apex's `FusedAdam` as it was in 2019."""

import math
from typing import Any

from ....errors import OptimizerError
from ... import optimizers


class FusedAdam(optimizers.FusedAdam):
    """Adam with decoupled weight decay. The bias correction multiplies the learning rate, so it also scales the weight
    decay and changes the effect of eps.

    p -= lr sqrt(1 - b2^step) / (1 - b1^step) (m / (sqrt(v) + eps) + wd p)

    Without `bias_correction`, p -= lr (m / (sqrt(v) + eps) + wd p). `updates` explains the letters.

    Args:
        max_grad_norm: clip the gradients of each group to this norm. 0: do not clip.
        eps_inside_sqrt, amsgrad: raise OptimizerError if true.
        use_mt, amp_scale_adjustment: without effect.
    """

    # the step size depends on the number of steps taken, so the host must decide whether a step is skipped
    reads_flag = False

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        amsgrad: bool = False,
        use_mt: bool = False,
        amp_scale_adjustment: float = 1.0,
    ) -> None:
        if eps_inside_sqrt:
            raise OptimizerError("FusedAdam: eps_inside_sqrt is not offered: leave it out")
        super().__init__(
            params,
            lr,
            bias_correction,
            betas,
            eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            max_grad_norm=max_grad_norm,
        )

    def _options_of_step(self, group: dict[str, Any], step: Any) -> dict[str, Any]:
        options = super()._options_of_step(group, step)
        # correct the bias in the step size, and keep `adam_` from correcting the moments
        if options["corrects_bias"]:
            beta1, beta2 = group["betas"]
            options["lr"] *= math.sqrt(1 - beta2**step) / (1 - beta1**step)
        return {**options, "corrects_bias": False}
