"""`apex.parallel`, on torch.distributed.

Importing it does not start torch.distributed. As in Apex, `LARC` is the submodule, and the class is `LARC.LARC`.
"""

from typing import NoReturn

from torch.distributed import ReduceOp

from .._finder import refuse_name
from . import LARC, distributed
from .distributed import DistributedDataParallel, Reducer
from .sync_batchnorm import SyncBatchNorm, convert_syncbn_model, create_syncbn_process_group

__all__ = [
    "LARC",
    "DistributedDataParallel",
    "ReduceOp",
    "Reducer",
    "SyncBatchNorm",
    "convert_syncbn_model",
    "create_syncbn_process_group",
    "distributed",
]


def __getattr__(name: str) -> NoReturn:
    refuse_name(__name__, name)
