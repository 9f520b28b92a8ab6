"""What torch has sharded of models: FSDP modules, DTensor parameters, and which ranks hold the other shards.

The modules of torch that define them are never imported for that: an object of theirs means that they are.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
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


def _is_a(value: Any, module_name: str, class_name: str) -> bool:
    kind = getattr(sys.modules.get(module_name), class_name, None)
    return kind is not None and isinstance(value, kind)


def is_zero_redundancy(optimizer: Any) -> bool:
    """Tell whether an optimizer is torch's ZeroRedundancyOptimizer."""
    return _is_a(optimizer, "torch.distributed.optim", "ZeroRedundancyOptimizer")


def is_post_local(optimizer: Any) -> bool:
    """Tell whether an optimizer is torch's PostLocalSGDOptimizer, which averages parameters that have a gradient."""
    module = "torch.distributed.optim.post_localSGD_optimizer"
    return _is_a(optimizer, module, "PostLocalSGDOptimizer")


def find_sharding_problems(model: nn.Module, policy: Policy) -> Iterator[str]:
    """Yield what keeps the shards of a model from being trained under `policy`, one sentence each."""
    low, name = policy.cast_model_type, type(model).__name__
    if low not in LOW_DTYPES:
        return
    if any(_is_a(module, _FSDP, "FullyShardedDataParallel") for module in model.modules()):
        yield (
            f"{name} is sharded by FullyShardedDataParallel, whose flat parameters {policy.opt_level} cannot cast: use"
            " O1 or O4, or shard it by torch.distributed.fsdp.fully_shard with amp_patch.fsdp_policy"
        )
        return
    for key, module, parameter in _find_sharded(model):
        fsdp = _find_fsdp(model, key)
        if policy.master_weights:
            problem = _find_policy_problem(key, module, fsdp, policy)
        else:
            problem = None if parameter.dtype is low else f"cast the model to {dtype_name(low)} before it is sharded"
        if problem is not None:
            yield f"{name}: {key} is a DTensor, which {policy.opt_level} cannot cast in place: {problem}"
            return


def find_gathered_dtype(policy: Policy, module: nn.Module | None) -> torch.dtype | None:
    """Return the 16-bit dtype in which FSDP is to gather float32 shards of a module; None: in float32."""
    keeps = bool(policy.keep_batchnorm_fp32) and isinstance(module, BatchNormBase)
    is_low = policy.cast_model_type in LOW_DTYPES and policy.master_weights and not keeps
    return policy.cast_model_type if is_low else None


def _find_policy_problem(key: str, module: nn.Module, fsdp: nn.Module | None, policy: Policy) -> str | None:
    """Return what to do where the 16-bit side of a sharded parameter is not what the level asks for."""
    if fsdp is None:
        return "use O1 or O4 for tensor parallelism without fully_shard"
    wanted, found = find_gathered_dtype(policy, module), get_mp_policy(fsdp).param_dtype
    if found is wanted or (wanted is None and found is torch.float32):
        return None
    path = key.rpartition(".")[0]
    shard = f"fully_shard({f'model.get_submodule({path!r})' if path else 'model'}"
    return (
        f"shard it by {shard}, mp_policy=amp_patch.fsdp_policy({policy.opt_level!r}, module)), with the module that is"
        " sharded, instead of"
        f" param_dtype={dtype_name(found) if found is not None else None}"
    )


def _find_sharded(model: nn.Module) -> Iterator[tuple[str, nn.Module, Tensor]]:
    """Yield the DTensor parameters of a model, with their names and modules."""
    for path, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            if get_local_tensor(parameter) is not None:
                yield ".".join(filter(None, (path, key))), module, parameter


def _find_fsdp(model: nn.Module, key: str) -> nn.Module | None:
    """Return the innermost module that `fully_shard` has taken around a parameter, or None."""
    path = key.rpartition(".")[0]
    while True:
        module = model.get_submodule(path)
        if _is_a(module, _FSDP, "FSDPModule"):
            return module
        if not path:
            return None
        path = path.rpartition(".")[0]


def find_fsdp_modules(models: Iterable[nn.Module]) -> list[nn.Module]:
    """Return what `fully_shard` has taken of models."""
    return [module for model in models for module in model.modules() if _is_a(module, _FSDP, "FSDPModule")]


# ---- who decides together --------------------------------------------------------------------------------------------


def find_groups(models: Sequence[nn.Module], parameters: Iterable[Tensor], given: Any) -> Sequence[Any]:
    """Return the process groups whose ranks decide together whether a step is skipped; none: each for itself.

    A group that is given and lacks ranks which hold other shards comes before theirs: all of them decide together.

    Args:
        models, parameters: of the session; their shards tell.
        given: `initialize`'s `overflow_group`.

    Raises ArgumentTypeError, or ModelError where shards lie on meshes neither of which holds the other.
    """
    if given is False or not (dist.is_available() and dist.is_initialized()):
        if given:
            raise ArgumentTypeError(
                "overflow_group: torch.distributed has no process group yet: make one first, by"
                " init_process_group, or leave overflow_group out"
            )
        return ()
    groups = () if given is None else _groups_of(given)
    found: dict[frozenset[int], Sequence[Any]] = {}
    sharded: list[Any] = [parameter for parameter in parameters if get_local_tensor(parameter) is not None]
    for mesh in {parameter.device_mesh for parameter in sharded}:
        found[frozenset(mesh.mesh.flatten().tolist())] = _groups_of(mesh)
    for model in models:
        for module in model.modules():
            if _is_a(module, _FSDP, "FullyShardedDataParallel"):
                group: Any = module.process_group
                found[frozenset(dist.get_process_group_ranks(group))] = _groups_of(group)
    if not found:
        return groups
    largest = max(found, key=len)
    if not all(ranks <= largest for ranks in found):
        raise ModelError(
            "parameters are sharded over meshes that overlap in part or not at all: pass the process group of all ranks"
            " that step together to initialize, as overflow_group"
        )
    if not groups:
        return found[largest]
    if largest <= {rank for group in groups for rank in dist.get_process_group_ranks(group)}:
        return groups
    return [*groups, *(group for group in found[largest] if all(group is not one for one in groups))]


def _groups_of(given: Any) -> Sequence[Any]:
    """Return a process group, or those of a mesh: one if its ranks are all there are, else one for each dimension."""
    if isinstance(given, dist.ProcessGroup):
        return [given]
    if not hasattr(given, "get_all_groups"):
        raise ArgumentTypeError(
            f"overflow_group={given!r} must be a process group or a DeviceMesh, None (found by the shards), or False"
        )
    if given.size() == dist.get_world_size():
        return [dist.group.WORLD]
    return list(given.get_all_groups())
