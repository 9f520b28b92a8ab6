"""Rules of optimizer steps, and of what comes right before and after them: clipping and LR schedulers."""

import ast
from collections.abc import Iterator

from . import edits
from .blocks import get_block_around, get_blocks
from .context import Context
from .findings import Edits, Fault
from .rules import rule
from .structure import argument_of, bound_in, names_in, text_of

_CLIPPERS = tuple(
    f"{module}.{name}"
    for module in ("torch.nn.utils", "apex.contrib.clip_grad", "apex.fp16_utils")
    for name in ("clip_grad_norm_", "clip_grad_value_", "clip_grad_norm")
)


def _calls_in_blocks(context: Context, calls: list[ast.Call]) -> Iterator[tuple[ast.Call, str, Edits]]:
    """Yield those of the calls that stand in a block, with advice, and edits that let the block end before them."""
    blocks = get_blocks(context.script)
    for call in calls:
        block = get_block_around(context.script, blocks, call)
        if block is not None and argument_of(block.call, "delay_unscale", 4):
            yield call, "Move it behind the block of the pass that unscales, the last one before the step.", ()
        elif block is not None:
            given = {name for one in (*call.args[1:], *call.keywords) for name in names_in(one)}
            is_made_there = given & bound_in(ast.walk(block.statement))  # of the loss scale, as a rule
            change = edits.close_block_before(context.script, block.statement, call, block.name)
            change = () if is_made_there else change
            yield call, "Move it behind the block.", change


@rule(
    "AMP304",
    "optimizer.step() inside scale_loss",
    bad="""
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
            optimizer.step()  # AMP304
    """,
    good="""
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    """,
    mends=True,
)
def steps_in_block(context: Context) -> Iterator[Fault]:
    """Apex divides gradients when the block ends, so a step inside takes scaled ones. amp_patch divides them first."""
    steps = [call for call, receiver in context.script.method_calls("step") if context.is_optimizer(receiver)]
    for call, advice, change in _calls_in_blocks(context, steps):
        message = f"{text_of(call.func)}() inside the scale_loss block: Apex would step with scaled gradients"
        yield Fault(call, "warning", message, advice, change)


@rule(
    "AMP305",
    "clipping inside scale_loss",
    bad="""
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # AMP305
    """,
    good="""
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    """,
    mends=True,
)
def clips_in_block(context: Context) -> Iterator[Fault]:
    """Inside the block gradients are still multiplied by the loss scale: the norm is wrong, nearly all are clipped."""
    clips = context.script.calls_of(*_CLIPPERS) if context.expected.may_scale else []
    for call, advice, change in _calls_in_blocks(context, clips):
        message = "clipping inside the scale_loss block sees gradients that are multiplied by the loss scale"
        yield Fault(call, "error", message, advice, change)


@rule(
    "AMP309",
    "an LR scheduler that counts skipped steps",
    bad="""
        for images in loader:
            optimizer.step()
            scheduler.step()  # AMP309
    """,
    good="""
        for images in loader:
            optimizer.step()
            if not optimizer.step_was_skipped:
                scheduler.step()
    """,
)
def unguarded_schedulers(context: Context) -> Iterator[Fault]:
    """A dynamic loss scale skips a few steps at the start of a run, which a scheduler in the same loop counts, too."""
    script = context.script
    if not script.uses_amp or not context.expected.may_skip or "step_was_skipped" in script.text:
        return
    loops = {
        script.structure.loop(call) for call, receiver in script.method_calls("step") if context.is_optimizer(receiver)
    } - {None}
    for call, receiver in script.method_calls("step"):
        is_scheduler = "sched" in text_of(receiver).lower()
        if is_scheduler and script.structure.loop(call) in loops and not script.is_without_amp(call):
            message = f"{text_of(receiver)}.step() also counts steps that were skipped after an overflow"
            advice = "If the schedule must be exact: `if not optimizer.step_was_skipped: scheduler.step()`."
            yield Fault(call, "note", message, advice)
