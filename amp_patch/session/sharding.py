"""Finds the sharded parts of models (FSDP modules, DTensor parameters), and the ranks that hold the other shards."""

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..config import Policy
from ..dtypes import LOW_DTYPES, dtype_name
from ..errors import ArgumentTypeError, ModelError
from ..torch_distributed import get_mp_policy
from ..torch_private import BatchNormBase, get_local_tensor

_FSDP = "torch.distributed.fsdp"


def is_instance_of(value: Any, module_name: str, class_name: str) -> bool:
    """Return whether a value is an instance of a class of torch, without importing the module of the class."""
    kind = getattr(sys.modules.get(module_name), class_name, None)
    return kind is not None and isinstance(value, kind)


def find_sharding_problem(model: nn.Module, policy: Policy) -> str | None:
    """Return the reason why `policy` cannot cast the shards of a model, or None."""
    low, name = policy.cast_model_type, type(model).__name__
    if low not in LOW_DTYPES:
        return None
    for module in model.modules():
        if is_instance_of(module, _FSDP, "FullyShardedDataParallel"):
            return (
                f"{name} is sharded by FullyShardedDataParallel, whose flat parameters {policy.opt_level} cannot cast:"
                " use O1 or O4, or shard it by torch.distributed.fsdp.fully_shard with amp_patch.fsdp_policy"
            )
    for path, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            if get_local_tensor(parameter) is None:
                continue
            if policy.master_weights:
                remedy = _find_policy_remedy(model, path, module, policy)
            elif parameter.dtype is low:
                remedy = None
            else:
                remedy = f"cast the model to {dtype_name(low)} before it is sharded"
            if remedy is not None:
                full_key = f"{path}.{key}".removeprefix(".")
                return f"{name}: {full_key} is a DTensor, which {policy.opt_level} cannot cast in place: {remedy}"
    return None


def find_gathered_dtype(policy: Policy, module: nn.Module | None) -> torch.dtype | None:
    """Return the 16-bit dtype in which FSDP should gather the shards of a module, or None for the dtype they have."""
    is_kept = bool(policy.keep_batchnorm_fp32) and isinstance(module, BatchNormBase)
    is_low = policy.cast_model_type in LOW_DTYPES and policy.master_weights and not is_kept
    return policy.cast_model_type if is_low else None


def _find_policy_remedy(model: nn.Module, path: str, module: nn.Module, policy: Policy) -> str | None:
    """Return the remedy if FSDP gathers the shards of `module` in another dtype than the level needs, or if
    `fully_shard` has sharded neither the module nor one around it. Else return None.
    """
    # find the innermost module around this one, or this one itself, that `fully_shard` has sharded
    sharded_path = path
    sharded = module
    while not is_instance_of(sharded, _FSDP, "FSDPModule"):
        if not sharded_path:
            return "use O1 or O4 for tensor parallelism without fully_shard"
        sharded_path = sharded_path.rpartition(".")[0]
        sharded = model.get_submodule(sharded_path)

    needed, given = find_gathered_dtype(policy, module), get_mp_policy(sharded).param_dtype
    if given is needed or (needed is None and given is torch.float32):
        return None
    target = "model"
    if path:
        target = f"model.get_submodule({path!r})"
    return (
        f"shard it by fully_shard({target}, mp_policy=amp_patch.fsdp_policy({policy.opt_level!r}, module)), with the"
        f" module that is sharded, instead of param_dtype={dtype_name(given) if given is not None else None}"
    )


def find_fsdp_modules(models: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules that `fully_shard` has sharded."""
    return [module for model in models for module in model.modules() if is_instance_of(module, _FSDP, "FSDPModule")]


# ---- deciding together -----------------------------------------------------------------------------------------------


def find_groups(models: Sequence[nn.Module], parameters: Iterable[Tensor], given: Any) -> Sequence[Any]:
    """Return the process groups whose ranks skip the same steps. If there is none, each rank decides for itself.

    Args:
        given: the `overflow_group` of `initialize`. None: the groups of the ranks that hold shards. False: no group. A
            process group or a mesh: its groups, followed by the groups of the shards unless it contains their ranks.

    Raises:
        ArgumentTypeError: `given` is something else, or it is a group or mesh and torch.distributed is not initialized.
        ModelError: no mesh or group of shards contains the ranks of all others, and `given` does not either.
    """
    if given is False or not (dist.is_available() and dist.is_initialized()):
        if given:
            raise ArgumentTypeError(
                "overflow_group: torch.distributed has no process group yet: make one first, by"
                " init_process_group, or leave overflow_group out"
            )
        return ()
    groups = () if given is None else _groups_of(given)
    # the process groups of each mesh (or FullyShardedDataParallel), by the ranks that they contain
    shard_groups: dict[frozenset[int], Sequence[Any]] = {}
    sharded: list[Any] = [parameter for parameter in parameters if get_local_tensor(parameter) is not None]
    for mesh in {parameter.device_mesh for parameter in sharded}:
        is_member = mesh.get_coordinate() is not None  # torch makes no groups of a mesh for other ranks
        shard_groups[frozenset(mesh.mesh.flatten().tolist())] = _groups_of(mesh) if is_member else ()
    for model in models:
        for module in model.modules():
            if is_instance_of(module, _FSDP, "FullyShardedDataParallel"):
                group: Any = module.process_group
                shard_groups[frozenset(dist.get_process_group_ranks(group))] = _groups_of(group)
    if not shard_groups:
        return groups
    ranks_of_given = {rank for group in groups for rank in dist.get_process_group_ranks(group)}
    if all(ranks <= ranks_of_given for ranks in shard_groups):
        return groups
    largest = max(shard_groups, key=len)
    # if no mesh contains the ranks of all others, no group has all ranks, and they could not decide together
    if not all(ranks <= largest for ranks in shard_groups):
        raise ModelError(
            "parameters are sharded over meshes that overlap in part or not at all: pass the process group of all ranks"
            " that step together to initialize, as overflow_group"
        )
    return [*groups, *(group for group in shard_groups[largest] if all(group is not listed for listed in groups))]


def _groups_of(given: Any) -> Sequence[Any]:
    """Return a process group as a list. For a DeviceMesh, return the group of each dimension, or only the group of the
    world if the mesh has all ranks. Raises ArgumentTypeError for anything else.
    """
    if isinstance(given, dist.ProcessGroup):
        return [given]
    if not hasattr(given, "get_all_groups"):
        raise ArgumentTypeError(
            f"overflow_group={given!r} must be a process group or a DeviceMesh, None (found by the shards), or False"
        )
    if given.size() == dist.get_world_size():
        return [dist.group.WORLD]
    return list(given.get_all_groups())
