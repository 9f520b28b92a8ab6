"""The private names of torch.distributed that the package uses. See `torch_private`."""

from typing import Any

import torch
from torch import Tensor, nn

# The function with which DistributedDataParallel gives all ranks the states of one, when it is made and when its Join
# ends. Absent if torch was built without torch.distributed. Without it: masters are rounded to 16 bits there.
SYNC_MODULE_STATES = (torch.nn.parallel.distributed, "_sync_module_states")


def sync_module_states(module: nn.Module, group: Any, bucket_size: int, src: int) -> None:
    """Give all ranks of a process group the parameters of one, as DistributedDataParallel does, patched or not."""
    owner, name = SYNC_MODULE_STATES
    getattr(owner, name)(
        module=module,
        process_group=group,
        broadcast_bucket_size=bucket_size,
        src=src,
        params_and_buffers_to_ignore=(),
        broadcast_buffers=False,
    )


def broadcast_tensors(group: Any, tensors: list[Tensor], bucket_size: int, src: int) -> None:
    """Give all ranks of a process group the tensors of one, in place, many in one message."""
    torch.distributed._broadcast_coalesced(group, tensors, bucket_size, src)  # type: ignore[attr-defined]


def get_reduced_dtypes(module: Any) -> set[str]:
    """Return the C++ names of the dtypes of the parameters that a DistributedDataParallel was made for.

    Empty without it: a wrapper that was made before its model was cast reduces nothing, and nobody warns.
    """
    read: Any = getattr(module, "_get_ddp_logging_data", dict)
    return set(filter(None, read().get("dtypes", "").split(", ")))


def get_mp_policy(module: Any) -> Any:
    """Return the MixedPrecisionPolicy that `fully_shard` was given for a module. Without it: O2 and O5 cannot tell
    whether shards are used in 16 bits.
    """
    return module._get_fsdp_state()._mp_policy


def get_unsharded_gradients(module: Any) -> list[Tensor]:
    """Return the whole gradients that a module of `fully_shard` holds from passes that were not reduced. Without it:
    sums over passes with different loss scales are wrong.
    """
    gradients: dict[int, Tensor] = {}  # by identity: from torch 2.15 on, both attributes hold the same gradient
    for group in module._get_fsdp_state()._fsdp_param_groups:
        for parameter in group.fsdp_params:
            whole = getattr(parameter, "_unsharded_param", None)
            for gradient in (parameter.unsharded_accumulated_grad, None if whole is None else whole.grad):
                if gradient is not None:
                    gradients[id(gradient)] = gradient
    return [getattr(gradient, "_local_tensor", gradient) for gradient in gradients.values()]


# The helpers of torch.distributed.checkpoint that name the parameters of an optimizer after the model's. Without them:
# get_state_dict and set_state_dict raise KeyError where there are masters.
STATE_DICT_MODULE = "torch.distributed.checkpoint.state_dict"
GET_OPTIM_STATE_DICT, LOAD_OPTIM_STATE_DICT = "_get_optim_state_dict", "_load_optim_state_dict"


def init_optim_state(optimizer: Any) -> None:
    """Make an optimizer create its state by a step of length 0, as those helpers do. Without it: they create it
    themselves, from 16-bit parameters.
    """
    from torch.distributed.checkpoint.state_dict import _init_optim_state

    _init_optim_state(optimizer)
