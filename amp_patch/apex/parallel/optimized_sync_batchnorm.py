"""`apex.parallel.optimized_sync_batchnorm`, the module of Apex's compiled variant. Here there is only one variant."""

from .sync_batchnorm import SyncBatchNorm as SyncBatchNorm
