"""Everything of torch that a session patches beside listed ops and registrations, in one table.

Two things stand beside it, since they replace no function: the hooks after optimizer steps, which torch has an API for,
and `Optimizer.step_was_skipped`, a property that is absent without a session.
"""

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.checkpoint
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad

from ..casting import OpCasts, WeightCache, op_patches
from ..config import OpLists
from ..patching import Patch, Patcher
from ..torch_distributed import SYNC_MODULE_STATES
from ..torch_private import JIT_TRACE, VF
from ..training import Decisions, LocalGradients, Masters, gradient_patches


@dataclass(frozen=True, slots=True)
class Parts:
    """What of a session the patches use.

    Attributes:
        casts, oplists: None at levels that cast at no ops.
        patches_ops: whether ops are patched, be it for casts or for how products are computed.
        cache: the weight cache, or None.
        scales: whether there are masters or a loss scale.
        casts_model: whether the parameters of models are cast.
        has_deferred_ops: whether packages that are not imported yet have listed ops.
    """

    casts: OpCasts | None
    patches_ops: bool
    oplists: OpLists | None
    cache: WeightCache | None
    patcher: Patcher
    masters: Masters
    local: LocalGradients
    decisions: Decisions
    scales: bool
    casts_model: bool
    on_zero_grad: Callable[[torch.nn.Module], None]
    has_deferred_ops: bool = False
    on_reload: Callable[[str], None] = lambda name: None
    fold_gradients: Callable[[], None] = lambda: None

    @property
    def lists_recurrent(self) -> bool:
        """Whether recurrent layers run in the low dtype."""
        spellings = () if self.oplists is None else self.oplists.spellings
        return any(spelling.owner is VF and spelling.kind == "whitelist" for spelling in spellings)


Make = Callable[[Callable[..., Any], Any], Callable[..., Any]]


@dataclass(frozen=True, slots=True)
class TorchPatch:
    """One name of torch: when a session replaces it, and by what.

    Attributes:
        is_for: tells from the parts of a session whether it needs the patch.
        make: returns the replacement of the original, for the parts of a session.
        with_ops: it is counted, suspended and undone with the ops.
    """

    owner: Any
    name: str
    is_for: Callable[[Parts], bool]
    make: Make
    with_ops: bool = False


def _casts(parts: Parts) -> bool:
    return parts.casts is not None


def _scales(parts: Parts) -> bool:
    return parts.scales


def _sync(original: Callable[..., Any], parts: Parts) -> Callable[..., Any]:
    return gradient_patches.sync_masters(original, parts.masters, parts.decisions)


def _clip(original: Callable[..., Any], parts: Parts) -> Callable[..., Any]:
    return gradient_patches.clip_masters(original, parts.masters, parts.fold_gradients)


TABLE = (
    TorchPatch(
        torch.utils.checkpoint,
        "checkpoint",
        _casts,
        lambda original, parts: op_patches.replay_regions(original, parts.casts.switch),
        with_ops=True,
    ),
    TorchPatch(
        torch.nn.RNNBase,
        "check_input",
        lambda parts: parts.lists_recurrent,
        lambda original, parts: op_patches.check_shapes_only(original, parts.casts),
        with_ops=True,
    ),
    TorchPatch(
        torch.jit,
        "script",
        lambda parts: parts.patches_ops,
        lambda original, parts: op_patches.read_originals(original, parts.patcher),
        with_ops=True,
    ),
    TorchPatch(
        *JIT_TRACE,  # not torch.jit.trace: Dynamo wraps that for good when it first compiles
        lambda parts: parts.cache is not None,
        lambda original, parts: op_patches.trace_without_cache(original, parts.cache),
        with_ops=True,
    ),
    TorchPatch(
        importlib,
        "reload",
        lambda parts: parts.has_deferred_ops,
        lambda original, parts: op_patches.tell_of_reload(original, parts.on_reload),
    ),
    TorchPatch(
        torch.nn.Module,
        "zero_grad",
        _scales,
        lambda original, parts: gradient_patches.zero_masters(original, parts.masters, parts.on_zero_grad),
    ),
    *(
        TorchPatch(owner, name, _scales, _clip)
        for owner in (torch.nn.utils, clip_grad)
        for name in ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_")
        if hasattr(owner, name)
    ),
    TorchPatch(
        DistributedDataParallel,
        "forward",
        lambda parts: parts.scales or parts.casts_model,
        lambda original, parts: gradient_patches.note_forward(original, parts.local),
    ),
    *(TorchPatch(*place, _scales, _sync) for place in [SYNC_MODULE_STATES] if hasattr(*place)),
)


def plan(parts: Parts, *, with_ops: bool) -> Iterator[Patch]:
    """Yield the patches of the table that a session needs: those that go with its ops, or the others."""
    for row in TABLE:
        if row.with_ops is with_ops and row.is_for(parts):
            yield Patch(row.owner, row.name, _factory(row.make, parts))


def _factory(make: Make, parts: Parts) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return lambda original: make(original, parts)
