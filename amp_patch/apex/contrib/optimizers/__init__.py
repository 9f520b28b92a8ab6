"""`apex.contrib.optimizers`: `FusedAdam` with the arguments that it had in 2019, and the `FusedLAMB`, `FusedSGD` and
`FP16_Optimizer` of `apex.optimizers`.
"""

from typing import NoReturn

from ..._finder import refuse_name
from ...optimizers import FusedLAMB, FusedSGD
from ...optimizers.fp16_optimizer import FP16_Optimizer
from .fused_adam import FusedAdam

__all__ = ["FP16_Optimizer", "FusedAdam", "FusedLAMB", "FusedSGD"]


def __getattr__(name: str) -> NoReturn:
    refuse_name(__name__, name)
