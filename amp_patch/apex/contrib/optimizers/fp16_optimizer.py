"""`apex.contrib.optimizers.fp16_optimizer`."""

from ...optimizers.fp16_optimizer import FP16_Optimizer as FP16_Optimizer
