"""Everything of torch that a session patches beside listed ops and registrations, in one table.

Two things stand beside it, since they replace no function: the hooks after optimizer steps, which torch has an API for,
and `Optimizer.step_was_skipped`, a property that is absent without a session.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.checkpoint
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad

from ..casting import op_patches
from ..patching import Patch
from ..torch_distributed import SYNC_MODULE_STATES
from ..torch_private import JIT_TRACE, VF
from ..training import gradient_patches

Make = Callable[[Callable[..., Any], Any], Callable[..., Any]]


@dataclass(frozen=True, slots=True)
class TorchPatch:
    """One name of torch: when a session replaces it, and by what.

    Attributes:
        is_for: tells of a session, by its `Installer`, whether it needs the patch.
        make: returns the replacement of the original, for the session of an `Installer`.
        with_ops: it is counted, suspended and undone with the ops.
    """

    owner: Any
    name: str
    is_for: Callable[[Any], bool]
    make: Make
    with_ops: bool = False


def _casts(session: Any) -> bool:
    return session.casts is not None


def _scales(session: Any) -> bool:
    return bool(session.scales)


def _lists_recurrent(session: Any) -> bool:
    """Tell whether recurrent layers run in the low dtype."""
    spellings = () if session.oplists is None else session.oplists.spellings
    return any(spelling.owner is VF and spelling.kind == "whitelist" for spelling in spellings)


def _sync(original: Callable[..., Any], session: Any) -> Callable[..., Any]:
    return gradient_patches.sync_masters(original, session.bindings.masters, session.bindings.ledgers.decisions)


def _clip(original: Callable[..., Any], session: Any) -> Callable[..., Any]:
    return gradient_patches.clip_masters(original, session.bindings.masters, session.bindings.ledgers.fold_for_clipping)


TABLE = (
    TorchPatch(
        torch.utils.checkpoint,
        "checkpoint",
        _casts,
        lambda original, session: op_patches.replay_regions(original, session.casts.switch),
        with_ops=True,
    ),
    TorchPatch(
        torch.nn.RNNBase,
        "check_input",
        _lists_recurrent,
        lambda original, session: op_patches.check_shapes_only(original, session.casts),
        with_ops=True,
    ),
    TorchPatch(
        torch.jit,
        "script",
        lambda session: session.patches_ops,
        lambda original, session: op_patches.read_originals(original, session.patcher),
        with_ops=True,
    ),
    TorchPatch(
        *JIT_TRACE,  # not torch.jit.trace: Dynamo wraps that for good when it first compiles
        lambda session: session.cache is not None,
        lambda original, session: op_patches.trace_without_cache(original, session.cache),
        with_ops=True,
    ),
    TorchPatch(
        torch,
        "clear_autocast_cache",  # called where a thread leaves its outermost region of autocast
        lambda session: session.cache is not None and session.casts.autocast is not None,
        lambda original, session: op_patches.invalidate_too(original, session.cache),
        with_ops=True,
    ),
    TorchPatch(
        torch.nn.Module,
        "zero_grad",
        _scales,
        lambda original, session: gradient_patches.zero_masters(
            original, session.bindings.masters, session.bindings.on_zero_grad
        ),
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
        lambda session: session.scales or session.casts_model,
        lambda original, session: gradient_patches.note_forward(original, session.bindings.ledgers.local),
    ),
    *(TorchPatch(*place, _scales, _sync) for place in [SYNC_MODULE_STATES] if hasattr(*place)),
)


def plan(session: Any, *, with_ops: bool) -> Iterator[Patch]:
    """Yield the patches of the table that a session needs: those that go with its ops, or the others."""
    for row in TABLE:
        if row.with_ops is with_ops and row.is_for(session):
            yield Patch(row.owner, row.name, _factory(row.make, session))


def _factory(make: Make, session: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return lambda original: make(original, session)
