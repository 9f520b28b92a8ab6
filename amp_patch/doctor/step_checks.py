"""Checks of optimizer steps, and of what comes right before and after them: clipping and LR schedulers."""

import ast
from collections.abc import Iterator

from .blocks import get_block_around, get_blocks
from .context import Context
from .findings import Fault
from .levels import literal
from .script import Script
from .structure import argument_of, text_of

_CLIPS = tuple(
    f"{module}.{name}"
    for module in ("torch.nn.utils", "apex.contrib.clip_grad")
    for name in ("clip_grad_norm_", "clip_grad_value_")
)

_CLIPPERS = frozenset({*_CLIPS, "torch.nn.utils.clip_grad_norm", "apex.fp16_utils.clip_grad_norm"})


def steps_in_block(context: Context) -> Iterator[Fault]:
    """`optimizer.step()` inside `scale_loss`."""
    script, blocks = context.script, get_blocks(context.script)
    for call, receiver in script.method_calls("step"):
        if get_block_around(script, blocks, call) is not None and context.is_optimizer(receiver):
            message = (
                f"{text_of(receiver)}.step() inside the scale_loss block: Apex would step with gradients that are still"
                " scaled"
            )
            yield Fault(call, "warning", message, "Move it behind the block. amp_patch unscales first either way.")


def clips_in_block(context: Context) -> Iterator[Fault]:
    """Clipping inside `scale_loss`, where gradients are still scaled."""
    script, blocks = context.script, get_blocks(context.script)
    if not context.expected.may_scale:
        return
    for call in script.calls_of(*_CLIPPERS):
        if get_block_around(script, blocks, call) is not None:
            message = (
                "clipping inside the scale_loss block sees gradients that are multiplied by the loss scale, and so"
                " clips nearly all of them"
            )
            yield Fault(call, "error", message, "Move it behind the block, and clip amp.master_params(optimizer).")


def unguarded_schedulers(context: Context) -> Iterator[Fault]:
    """An LR scheduler that steps with the optimizer, also when the step was skipped."""
    script = context.script
    if not script.uses_amp or not context.expected.may_skip or _asks_for_skips(script):
        return
    loops = {
        script.structure.loop(call) for call, receiver in script.method_calls("step") if context.is_optimizer(receiver)
    } - {None}
    for call, receiver in script.method_calls("step"):
        if (
            "sched" in text_of(receiver).lower()
            and script.structure.loop(call) in loops
            and not script.is_without_amp(call)
        ):
            message = (
                f"{text_of(receiver)}.step() also counts steps that were skipped after an overflow (a few at the start"
                " of a run)"
            )
            fix = "If the schedule must be exact: `if not optimizer.step_was_skipped: scheduler.step()`."
            yield Fault(call, "note", message, fix)


def _asks_for_skips(script: Script) -> bool:
    return any(
        (isinstance(node, ast.Attribute) and node.attr == "step_was_skipped")
        or (isinstance(node, ast.Constant) and node.value == "step_was_skipped")
        for node in script.nodes
    )


def closures(context: Context) -> Iterator[Fault]:
    """`optimizer.step(closure)` where steps may be skipped."""
    script, levels = context.script, context.expected
    if not script.uses_amp or not levels.may_skip:
        return
    for call, receiver in script.method_calls("step"):
        closure = argument_of(call, "closure", 0)
        is_given = closure is not None and literal(script, closure) is not None
        if is_given and context.is_optimizer(receiver) and not script.is_without_amp(call):
            message = (
                "step(closure) with a dynamic loss scale raises OptimizerError: whether to skip must be known before"
                " the closure runs"
            )
            fix = (
                "Call step() without a closure, give initialize a static loss_scale, or use a bfloat16 level (O4, O5)."
            )
            yield Fault(call, "error" if levels.must_skip else "warning", message, fix)
