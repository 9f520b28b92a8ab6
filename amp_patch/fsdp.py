"""What FSDP2 is to be told for a level: `fully_shard` keeps float32 shards itself, and casts what it gathers."""

from typing import TYPE_CHECKING

import torch

from .config import make_policy
from .errors import ArgumentTypeError
from .session import find_gathered_dtype

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy


def fsdp_policy(
    opt_level: str, module: torch.nn.Module | None = None, *, reduce_dtype: torch.dtype | None = None
) -> "MixedPrecisionPolicy":
    """Return the `mp_policy` with which `torch.distributed.fsdp.fully_shard` is to shard a module for a level.

    At levels with masters (O2, O5) the float32 shards are the masters: parameters are gathered, used and reduced in the
    low dtype, as DistributedDataParallel does at these levels. At the others nothing is cast by FSDP.

    Args:
        opt_level: a level of the shipped presets.
        module: what is sharded: a batch normalization layer stays in float32 where the level keeps them so, and so has
            to be sharded by itself. None: any other module.
        reduce_dtype: in which gradients are summed over the ranks; None: in the low dtype. float32 costs twice the
            traffic, and rounds sums less.

    Raises PolicyError for a level that there is not, and ArgumentTypeError for what is no module or dtype.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if reduce_dtype is not None and not isinstance(reduce_dtype, torch.dtype):
        raise ArgumentTypeError(f"reduce_dtype={reduce_dtype!r} is no torch.dtype: pass torch.float32, or leave it out")
    if module is not None and not isinstance(module, torch.nn.Module):
        raise ArgumentTypeError(
            f"module must be the torch.nn.Module that is sharded, not {type(module).__name__}: pass it, or leave it out"
        )
    low = find_gathered_dtype(make_policy(opt_level, {}), module)
    if low is None:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=low, reduce_dtype=reduce_dtype or low)
