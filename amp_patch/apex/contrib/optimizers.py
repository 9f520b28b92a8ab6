"""`apex.contrib.optimizers`: `FP16_Optimizer` with the bounds that this variant had."""

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from ..fp16_utils.fp16_optimizer import FP16_Optimizer as _FP16Optimizer


class FP16_Optimizer(_FP16Optimizer):
    """`fp16_utils.FP16_Optimizer` whose dynamic scale doubles every 1000 good steps and never falls below 1.

    Works around any optimizer. Its state dict is that of `fp16_utils.FP16_Optimizer`, not the one this variant had in
    Apex.
    """

    def __init__(
        self,
        init_optimizer: Optimizer,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        bounds = {"scale_window": 1000, "min_loss_scale": 1.0, **(dynamic_loss_args or {})}
        super().__init__(init_optimizer, static_loss_scale, dynamic_loss_scale, bounds, verbose)
