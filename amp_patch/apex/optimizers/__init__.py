"""`apex.optimizers`: Apex's optimizers on torch's own kernels for lists of tensors, for any device.

All but `FP16_Optimizer`, which wraps another optimizer, compute in float32 for all dtypes of parameters (in float64 for
float64), and keep their state in that dtype. They can be copied and pickled, and their state dicts have Apex's layout.
With `amp.initialize` at an opt_level with float32 masters, they update the masters, like any other optimizer.
"""

__role__ = "optimizer"  # reports name the caller of an op by this word: see `insight/sites.py`

from typing import NoReturn

from .._finder import refuse_name
from .fp16_optimizer import FP16_Optimizer
from .fused_adagrad import FusedAdagrad
from .fused_adam import FusedAdam
from .fused_lamb import FusedLAMB
from .fused_mixed_precision_lamb import FusedMixedPrecisionLamb
from .fused_novograd import FusedNovoGrad
from .fused_sgd import FusedSGD

__all__ = [
    "FP16_Optimizer",
    "FusedAdagrad",
    "FusedAdam",
    "FusedLAMB",
    "FusedMixedPrecisionLamb",
    "FusedNovoGrad",
    "FusedSGD",
]


def __getattr__(name: str) -> NoReturn:
    refuse_name(__name__, name)
