"""`apex.parallel.optimized_sync_batchnorm`: Apex's name for its compiled variant; there is one here."""

from .sync_batchnorm import SyncBatchNorm as SyncBatchNorm
