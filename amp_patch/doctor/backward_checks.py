"""Checks of backward passes: which loss they start from, and in which `scale_loss` block."""

import ast
from collections.abc import Iterator

from .blocks import get_backward_calls, get_block_around, get_blocks
from .context import Context
from .findings import Fault, Severity
from .levels import UNKNOWN, arguments_of, is_written_out, literal
from .script import Script
from .structure import argument_of, names_in, position, text_of

_BLOCK = "with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()"


def unscaled_in_block(context: Context) -> Iterator[Fault]:
    """A backward pass inside `scale_loss` that starts from another loss than the scaled one."""
    script, blocks = context.script, get_blocks(context.script)
    names = {block.name for block in blocks if block.name} | _entered_names(script)
    for call, loss in get_backward_calls(script):
        if get_block_around(script, blocks, call) is not None and not _is_scaled(script, loss, names, call):
            severity: Severity = "error" if context.expected.may_scale else "note"
            message = (
                f"{text_of(loss)} is not the scaled loss: the block divides its gradients by the loss scale all the"
                " same"
            )
            yield Fault(call, severity, message, f"Write `{_BLOCK}`.")


def scaled_after_block(context: Context) -> Iterator[Fault]:
    """A backward pass of the scaled loss after its block has ended."""
    script, blocks = context.script, get_blocks(context.script)
    structure = script.structure
    for call, loss in get_backward_calls(script):
        ended = [
            block for block in blocks if text_of(loss) == block.name and structure.is_before(block.statement, call)
        ]
        ended = [block for block in ended if not structure.is_inside(call, block.statement)]
        if not ended or any(
            block.name == text_of(loss) and structure.is_inside(call, block.statement) for block in blocks
        ):
            continue
        last = ended[-1].statement
        renewed = any(
            target == text_of(loss) and position(statement) > position(last) and structure.is_before(statement, call)
            for target, _, statement in script.assignments
        )
        if not renewed:
            message = (
                f"{text_of(loss)} goes backward after its scale_loss block: its gradients stay multiplied by the loss"
                " scale"
            )
            severity: Severity = "error" if context.expected.may_scale else "note"
            yield Fault(call, severity, message, f"Move it into the block: `{_BLOCK}`.")


def unscaled_losses(context: Context) -> Iterator[Fault]:
    """A backward pass outside `scale_loss` in a script that calls `initialize` at a level that scales."""
    script, blocks = context.script, get_blocks(context.script)
    if not script.initializations or not context.expected.may_scale:
        return
    scaled = {block.name for block in blocks if block.name} | _entered_names(script)
    for call, loss in get_backward_calls(script):
        is_inside = any(script.structure.is_inside(call, block.statement) for block in blocks)
        if not is_inside and not _is_scaled(script, loss, scaled, call) and not script.is_without_amp(call):
            message = (
                f"{text_of(loss)} goes backward without amp.scale_loss: small float16 gradients become 0, and an"
                " overflow is not noticed"
            )
            yield Fault(call, "warning", message, f"Write `{_BLOCK}`.")


def _entered_names(script: Script) -> set[str]:
    """Return the variables that hold what `scale_loss` gave through an ExitStack."""
    scaled = set()
    for target, value, _ in script.assignments:
        if any(script.is_call_of(node, ["amp.scale_loss", "amp.scale"]) for node in ast.walk(value)):
            scaled.add(target)
    return scaled


def _is_scaled(script: Script, loss: ast.expr, names: set[str], call: ast.Call) -> bool:
    """Whether a loss is made of one of `names`, or of a variable that was."""
    used = names_in(loss)
    made_of = {name for target in used for name in names_in(script.assigned_before(target, call) or ast.Pass())}
    return bool((used | made_of) & names)


def loss_ids(context: Context) -> Iterator[Fault]:
    """A `loss_id` for which there is no loss scaler."""
    script = context.script
    counts = [
        literal(script, arguments_of(call)["num_losses"]) if "num_losses" in arguments_of(call) else 1
        for call in script.initializations
    ]
    if (
        not counts
        or not all(isinstance(count, int) for count in counts)
        or not all(is_written_out(call) for call in script.initializations)
    ):
        return
    for call in script.calls_of("amp.scale_loss"):
        node = argument_of(call, "loss_id", 2)
        number = literal(script, node) if node is not None else 0
        if isinstance(number, int) and number >= max(counts):
            message = f"loss_id {number}, but initialize makes {max(counts)} loss scaler(s)"
            yield Fault(call, "error", message, f"Pass num_losses={number + 1} to amp.initialize.")


def gradient_penalties(context: Context) -> Iterator[Fault]:
    """Gradients taken with `torch.autograd.grad` for a penalty, of outputs that are not scaled."""
    script = context.script
    if not script.uses_amp or not context.expected.may_scale or script.calls_of("amp.scale", "amp.unscale"):
        return
    for call in script.calls_of("torch.autograd.grad"):
        create_graph = argument_of(call, "create_graph")
        is_kept = create_graph is not None and literal(script, create_graph) in (True, UNKNOWN)
        if is_kept and not script.is_without_amp(call):
            message = "gradients for a penalty are taken of outputs that are not scaled: small float16 ones become 0"
            fix = "amp.unscale(torch.autograd.grad(amp.scale(outputs), inputs, create_graph=True))."
            yield Fault(call, "note", message, fix)
