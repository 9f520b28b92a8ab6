"""`apex.contrib.optimizers.fused_lamb`: the same as in `apex.optimizers`."""

from ...optimizers import FusedLAMB as FusedLAMB
