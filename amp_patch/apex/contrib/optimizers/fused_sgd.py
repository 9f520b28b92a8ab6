"""`apex.contrib.optimizers.fused_sgd`: the same as in `apex.optimizers`."""

from ...optimizers import FusedSGD as FusedSGD
