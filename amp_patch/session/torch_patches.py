"""Lists the patches of torch that a session makes besides the patches of ops.

`installer.py` also makes changes that replace no function, such as hooks after optimizer steps and the property
`Optimizer.step_was_skipped`. `checkpoints.py` patches the helpers of torch.distributed.checkpoint once they are
imported.
"""

import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils.checkpoint
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad

from ..casting import OpCasts, WeightCache, op_patches
from ..config import OpLists
from ..patching import Patch, Patcher
from ..torch_dispatch import EAGER_FLEX_ATTENTION, FLEX_ATTENTION
from ..torch_distributed import SYNC_MODULE_STATES
from ..torch_private import JIT_TRACE, VF
from ..training import PATCHED_LAYERS, gradient_patches, take_any_input
from .bindings import Bindings


def plan_with_ops(
    casts: OpCasts | None, oplists: OpLists | None, cache: WeightCache | None, patcher: Patcher
) -> Iterator[Patch]:
    """Yield the patches of functions that run, record or compile ops.

    `patcher`: installs them, together with the patches of ops.
    """
    yield Patch(torch.jit, "script", lambda original: op_patches.read_originals(original, patcher))
    if casts is not None:
        yield Patch(
            torch.utils.checkpoint, "checkpoint", lambda original: op_patches.replay_regions(original, casts.switch)
        )
        # if no list names flex_attention, the products that it calls follow their own rules
        for owner, name in EAGER_FLEX_ATTENTION if oplists is not None and _lists_flex_attention(oplists) else ():
            yield Patch(owner, name, lambda original: op_patches.run_without_casts(original, casts.switch))
        if casts.autocast is None:  # under torch.autocast, torch's own decorators cast
            yield from op_patches.plan_custom_functions(casts)
        if oplists is not None and _lists_recurrent(oplists):
            yield Patch(torch.nn.RNNBase, "check_input", lambda original: op_patches.check_shapes_only(original, casts))
    if cache is not None:
        # not the public torch.jit.trace: Dynamo wraps it when it first compiles, and never restores it
        yield Patch(*JIT_TRACE, lambda original: op_patches.trace_without_cache(original, cache))
        if casts is not None and casts.autocast is not None:
            # torch calls this when a thread leaves its outermost region of autocast
            yield Patch(torch, "clear_autocast_cache", lambda original: op_patches.invalidate_too(original, cache))


def _lists_recurrent(oplists: OpLists) -> bool:
    """Return whether the lists run recurrent layers in the low dtype."""
    return any(spelling.owner is VF and spelling.rule.runs_in == "low" for spelling in oplists.spellings)


def _lists_flex_attention(oplists: OpLists) -> bool:
    """Return whether the lists have an entry for flex_attention."""
    spellings = (*oplists.spellings, *oplists.deferred, *oplists.neutral)
    return any(spelling.owner_name == FLEX_ATTENTION for spelling in spellings)


def plan_for_gradients(bindings: Bindings, *, with_scales: bool) -> Iterator[Patch]:
    """Yield the patches of functions that reduce, zero or clip gradients, or broadcast parameters.

    `with_scales`: whether the session has masters or a loss scale. Otherwise, only DistributedDataParallel is patched.
    """
    masters, gradients = bindings.masters, bindings.gradients
    yield Patch(
        DistributedDataParallel, "forward", lambda original: gradient_patches.note_forward(original, gradients.local)
    )
    if not with_scales:
        return
    yield Patch(
        torch.nn.Module,
        "zero_grad",
        lambda original: gradient_patches.zero_masters(original, masters, bindings.on_zero_grad),
    )
    clippers: list[tuple[Any, str]] = []
    for name in ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_"):
        # patch the names in both modules: torch.nn.utils has imported the functions by name
        clippers += [(torch.nn.utils, name), (clip_grad, name)]
    for owner, name in clippers:
        if hasattr(owner, name):
            yield Patch(
                owner,
                name,
                lambda original: gradient_patches.clip_masters(original, masters, gradients.prepare_clipping),
            )
    if hasattr(*SYNC_MODULE_STATES):
        yield Patch(
            *SYNC_MODULE_STATES,
            lambda original: gradient_patches.sync_masters(original, masters, gradients.scale_updates),
        )


def plan_for_models(low: torch.dtype, patcher: Patcher) -> Iterator[Patch]:
    """Yield the patches for a session that casts models: `torch.jit.script`, and the layers in `PATCHED_LAYERS`."""
    yield Patch(torch.jit, "script", lambda original: op_patches.read_originals(original, patcher))
    for layer, count in PATCHED_LAYERS.items():
        yield Patch(layer, "forward", functools.partial(take_any_input, low=low, count=count))
