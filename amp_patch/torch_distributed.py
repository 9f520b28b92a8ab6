"""The private names of torch.distributed that the package uses.

As in `torch_private`, a sentence with "would" says what the package would lose without a private name.
"""

from typing import Any

import torch
from torch import Tensor, nn

# The function by which DistributedDataParallel gives all ranks the parameters of one rank, when it is constructed and
# when a Join context ends. It is absent if torch was built without torch.distributed. Without it, masters would be
# rounded to 16 bits at these times.
SYNC_MODULE_STATES = (torch.nn.parallel.distributed, "_sync_module_states")


def sync_module_states(module: nn.Module, group: Any, bucket_size: int, src: int) -> None:
    """Give all ranks of a process group the parameters of the rank `src`, as DistributedDataParallel does.

    Calls torch's function by its name, so a patch of it acts here too.
    """
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
    """Give all ranks of a group the tensors of the rank `src`, in place, in messages of about `bucket_size` bytes."""
    torch.distributed._broadcast_coalesced(group, tensors, bucket_size, src)  # type: ignore[attr-defined]


def get_reduced_dtypes(module: Any) -> set[str]:
    """Return the C++ names of the dtypes that the parameters had when a DistributedDataParallel was constructed.

    They show whether the model was cast afterwards: the wrapper does not reduce gradients of cast parameters. If torch
    drops the name, this returns an empty set, and nothing tells the user.
    """
    read: Any = getattr(module, "_get_ddp_logging_data", dict)
    return set(filter(None, read().get("dtypes", "").split(", ")))


def get_mp_policy(module: Any) -> Any:
    """Return the MixedPrecisionPolicy that was passed to `fully_shard` for a module.

    Without it, O2 and O5 could not tell whether shards are used in 16 bits.
    """
    return module._get_fsdp_state()._mp_policy


def get_unsharded_gradients(module: Any) -> list[Tensor]:
    """Return the unsharded gradients that a module of `fully_shard` has added up in passes that did not reduce them.

    Without it, sums over passes with different loss scales would be wrong.
    """
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # older versions of torch have one group for a module, or none
        groups = filter(None, [state._fsdp_param_group])
    # by identity, because from torch 2.15 on both attributes below hold the same gradient
    gradients: dict[int, Tensor] = {}
    for group in groups:
        for parameter in group.fsdp_params:
            whole = getattr(parameter, "_unsharded_param", None)
            for gradient in (parameter.unsharded_accumulated_grad, None if whole is None else whole.grad):
                if gradient is not None:
                    gradients[id(gradient)] = gradient
    return [getattr(gradient, "_local_tensor", gradient) for gradient in gradients.values()]


# The functions of torch.distributed.checkpoint that give the parameters of an optimizer the names that they have in the
# model. Without them, get_state_dict and set_state_dict would raise KeyError if there are masters.
STATE_DICT_MODULE = "torch.distributed.checkpoint.state_dict"
GET_OPTIM_STATE_DICT, LOAD_OPTIM_STATE_DICT = "_get_optim_state_dict", "_load_optim_state_dict"


def init_optim_state(optimizer: Any) -> None:
    """Make an optimizer create its state by a step with a learning rate of 0, as get_state_dict and set_state_dict do.

    Without it, they would create the state themselves, from 16-bit parameters.
    """
    from torch.distributed.checkpoint.state_dict import _init_optim_state

    _init_optim_state(optimizer)
