"""Finds out whether one rank can call a model again without the other ranks, and unwraps DistributedDataParallel."""

import torch.distributed as dist
from torch import nn

from ...session import find_fsdp_modules, is_instance_of
from ...torch_private import get_local_tensor

_PARALLEL = "torch.nn.parallel.distributed"


def find_obstacle(model: nn.Module) -> str:
    """Return why one rank alone cannot call a model again: its forward may wait for other ranks. "" if one rank can.

    A DistributedDataParallel is no obstacle by itself: call the model that `unwrap_parallel` returns.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return ""
    is_sharded = bool(list(find_fsdp_modules([model])))
    for module in model.modules():
        is_sharded |= is_instance_of(module, "torch.distributed.fsdp", "FullyShardedDataParallel")
        if isinstance(module, nn.SyncBatchNorm) and module.training and dist.get_world_size() > 1:
            return "the model has a SyncBatchNorm, whose statistics are of all ranks"
    is_sharded |= any(get_local_tensor(parameter) is not None for parameter in model.parameters())
    return "the model is sharded, and its ranks would have to call it together" if is_sharded else ""


def unwrap_parallel(model: nn.Module) -> nn.Module:
    """Return the model inside a DistributedDataParallel, or `model` itself if it is no DistributedDataParallel."""
    while is_instance_of(model, _PARALLEL, "DistributedDataParallel"):
        model = model.module  # type: ignore[assignment]
    return model
