"""Checks of the training loop: losses, backward passes, clipping, steps."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from .context import Context
from .findings import Fault
from .levels import UNKNOWN, arguments_of, is_written_out, literal
from .script import Script
from .structure import position, text_of

_CLIPS = tuple(
    f"{module}.{name}"
    for module in ("torch.nn.utils", "apex.contrib.clip_grad")
    for name in ("clip_grad_norm_", "clip_grad_value_")
)
_CLIPPERS = frozenset({*_CLIPS, "torch.nn.utils.clip_grad_norm", "apex.fp16_utils.clip_grad_norm"})
_AUTOCASTS = frozenset({"torch.autocast", "torch.amp.autocast", "torch.cuda.amp.autocast", "torch.cpu.amp.autocast"})
_SCALERS = frozenset(
    {"torch.amp.GradScaler", "torch.cuda.amp.GradScaler", "torch.cpu.amp.GradScaler", "torch.GradScaler"}
)
_BLOCK = "with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()"


@dataclass(frozen=True, slots=True)
class _Block:
    """One `with ... scale_loss(...) as name:`; the name is None where the block binds none, or more than a name."""

    statement: ast.With | ast.AsyncWith
    call: ast.Call
    name: str | None


def _blocks(script: Script) -> list[_Block]:
    found = []
    for node in script.nodes:
        for item in node.items if isinstance(node, (ast.With, ast.AsyncWith)) else []:
            if script.is_call_of(item.context_expr, ["amp.scale_loss"]):
                name = item.optional_vars.id if isinstance(item.optional_vars, ast.Name) else None
                found.append(_Block(node, item.context_expr, name))  # type: ignore[arg-type]
    return found


def _block_around(script: Script, blocks: list[_Block], node: ast.AST) -> _Block | None:
    """Return the innermost block in whose body a node runs."""
    scope = script.structure.scope(node)
    for outer in script.structure.around(node):
        for block in blocks:
            if block.statement is outer and script.structure.scope(outer) is scope:
                return block
    return None


def _backward_calls(script: Script) -> Iterator[tuple[ast.Call, ast.expr]]:
    """Yield (call, loss) for `loss.backward()`: not `engine.backward(loss)`, not `self.backward()`, not what a
    GradScaler has scaled.
    """
    for call, loss in script.method_calls("backward"):
        is_own = isinstance(loss, ast.Name) and loss.id in ("self", "cls", "ctx")
        methods = [node.func for node in ast.walk(loss) if isinstance(node, ast.Call)]
        is_scaled_otherwise = any(text_of(method).rpartition(".")[2] in ("scale", "super") for method in methods)
        if not call.args and not is_own and not is_scaled_otherwise:
            yield call, loss


def _names_of(node: ast.AST) -> set[str]:
    return {text_of(one) for one in ast.walk(node) if isinstance(one, (ast.Name, ast.Attribute))}


def _is_scaled(script: Script, loss: ast.expr, names: set[str], call: ast.Call) -> bool:
    """Whether a loss is made of one of `names`, or of a variable that was."""
    used = _names_of(loss)
    made_of = {name for target in used for name in _names_of(script.assigned_before(target, call) or ast.Pass())}
    return bool((used | made_of) & names)


def unscaled_in_block(context: Context) -> Iterator[Fault]:
    """A backward pass inside `scale_loss` that starts from another loss than the scaled one."""
    script, blocks = context.script, _blocks(context.script)
    names = {block.name for block in blocks if block.name} | _entered_names(script)
    for call, loss in _backward_calls(script):
        if _block_around(script, blocks, call) is not None and not _is_scaled(script, loss, names, call):
            message = (
                f"{text_of(loss)} is not the scaled loss: the block divides its gradients by the loss scale all the"
                " same"
            )
            yield Fault(call, "error" if context.expected.may_scale else "note", message, f"Write `{_BLOCK}`.")


def _entered_names(script: Script) -> set[str]:
    """Return the variables that hold what `scale_loss` gave through an ExitStack."""
    scaled = set()
    for target, value, _ in script.assignments:
        if any(script.is_call_of(node, ["amp.scale_loss", "amp.scale"]) for node in ast.walk(value)):
            scaled.add(target)
    return scaled


def scaled_after_block(context: Context) -> Iterator[Fault]:
    """A backward pass of the scaled loss after its block has ended."""
    script, blocks = context.script, _blocks(context.script)
    structure = script.structure
    for call, loss in _backward_calls(script):
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
            yield Fault(
                call, "error" if context.expected.may_scale else "note", message, f"Move it into the block: `{_BLOCK}`."
            )


def unscaled_losses(context: Context) -> Iterator[Fault]:
    """A backward pass outside `scale_loss` in a script that calls `initialize` at a level that scales."""
    script, blocks = context.script, _blocks(context.script)
    if not script.initializations or not context.expected.may_scale:
        return
    scaled = {block.name for block in blocks if block.name} | _entered_names(script)
    for call, loss in _backward_calls(script):
        is_inside = any(script.structure.is_inside(call, block.statement) for block in blocks)
        if not is_inside and not _is_scaled(script, loss, scaled, call) and not script.is_without_amp(call):
            message = (
                f"{text_of(loss)} goes backward without amp.scale_loss: small float16 gradients become 0, and an"
                " overflow is not noticed"
            )
            yield Fault(call, "warning", message, f"Write `{_BLOCK}`.")


def steps_in_block(context: Context) -> Iterator[Fault]:
    """`optimizer.step()` inside `scale_loss`."""
    script, blocks = context.script, _blocks(context.script)
    for call, receiver in script.method_calls("step"):
        if _block_around(script, blocks, call) is not None and context.is_optimizer(receiver):
            message = (
                f"{text_of(receiver)}.step() inside the scale_loss block: Apex would step with gradients that are still"
                " scaled"
            )
            yield Fault(call, "warning", message, "Move it behind the block. amp_patch unscales first either way.")


def clips_in_block(context: Context) -> Iterator[Fault]:
    """Clipping inside `scale_loss`, where gradients are still scaled."""
    script, blocks = context.script, _blocks(context.script)
    if not context.expected.may_scale:
        return
    for call in script.calls_of(*_CLIPPERS):
        if _block_around(script, blocks, call) is not None:
            message = (
                "clipping inside the scale_loss block sees gradients that are multiplied by the loss scale, and so"
                " clips nearly all of them"
            )
            yield Fault(call, "error", message, "Move it behind the block, and clip amp.master_params(optimizer).")


def clips_past_masters(context: Context) -> Iterator[Fault]:
    """Clipping of the model's parameters at a level where the gradients are in the masters."""
    script, blocks, levels = context.script, _blocks(context.script), context.expected
    if not script.uses_amp or not levels.may_have_masters:
        return
    for call in script.calls_of(*_CLIPPERS):
        target = (
            call.args[0]
            if call.args
            else next((keyword.value for keyword in call.keywords if keyword.arg == "parameters"), None)
        )
        if (
            target is None
            or script.is_without_amp(call)
            or (_block_around(script, blocks, call) is not None and levels.may_scale)
        ):
            continue
        if _takes_parameters(script, target, call):
            when = "" if levels.must_have_masters else " at O2 and O5"
            message = f"clipping the model's parameters clips nothing{when}: the gradients are in the float32 masters"
            yield Fault(
                call, "error" if levels.must_have_masters else "warning", message, "Clip amp.master_params(optimizer)."
            )


def _takes_parameters(script: Script, target: ast.expr, call: ast.Call) -> bool:
    """Whether an expression, or the variable it names, takes `.parameters()` of something."""
    value = script.assigned_before(text_of(target), call) if isinstance(target, ast.Name) else target
    if value is None:
        return False
    taken = [node for node in ast.walk(value) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    return any(
        node.func.attr in ("parameters", "named_parameters") for node in taken if isinstance(node.func, ast.Attribute)
    )


def native_amp(context: Context) -> Iterator[Fault]:
    """`torch.autocast` or a GradScaler in use together with amp."""
    script = context.script
    if not script.calls_of("amp.initialize", "amp.scale_loss"):
        return
    for call in script.calls:
        names = script.names.resolve(call.func)
        if not names & (_AUTOCASTS | _SCALERS) or _enabled(script, call) is not True or script.is_without_amp(call):
            continue
        if script.has_flag_of_its_own(call) or _is_in_class_of_its_own(script, call):
            continue  # one of several ways to train, as a rule
        if names & _SCALERS:
            message = "a GradScaler beside amp: the loss would be scaled twice, and step() decided upon twice"
            yield Fault(
                call, "error", message, "Use amp.scale_loss, or GradScaler with torch.autocast and no amp.initialize."
            )
        else:
            message = "torch.autocast beside amp: two sets of rules cast the same ops, those of autocast last"
            yield Fault(
                call,
                "warning",
                message,
                "Leave autocast out; the op lists of amp_patch decide (lists= takes your own).",
            )


def _is_in_class_of_its_own(script: Script, call: ast.Call) -> bool:
    """Whether a call stands in a class that does not use amp."""
    classes = [outer for outer in script.structure.around(call) if isinstance(outer, ast.ClassDef)]
    amp = script.calls_of("amp.initialize", "amp.scale_loss")
    return bool(classes) and not any(script.structure.is_inside(one, classes[-1]) for one in amp)


def _enabled(script: Script, call: ast.Call) -> object:
    """Return the value of `enabled=`; True where it is left out."""
    node = next((keyword.value for keyword in call.keywords if keyword.arg == "enabled"), None)
    return True if node is None else literal(script, node)


def autocast_switched_off(context: Context) -> Iterator[Fault]:
    """`torch.autocast(enabled=False)`, which does not turn amp's casts off."""
    script = context.script
    if not context.expected.may_patch:
        return
    for call in script.calls:
        if (
            script.names.resolve(call.func) & _AUTOCASTS
            and _enabled(script, call) is False
            and not script.is_without_amp(call)
        ):
            message = "autocast(enabled=False) does not turn the casts of amp_patch off"
            yield Fault(call, "warning", message, "Use `with amp.disable_casts():`.")


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
            yield Fault(
                call,
                "note",
                message,
                "If the schedule must be exact: `if not optimizer.step_was_skipped: scheduler.step()`.",
            )


def _asks_for_skips(script: Script) -> bool:
    return any(
        (isinstance(node, ast.Attribute) and node.attr == "step_was_skipped")
        or (isinstance(node, ast.Constant) and node.value == "step_was_skipped")
        for node in script.nodes
    )


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
        node = (
            call.args[2]
            if len(call.args) > 2
            else next((keyword.value for keyword in call.keywords if keyword.arg == "loss_id"), None)
        )
        number = literal(script, node) if node is not None else 0
        if isinstance(number, int) and number >= max(counts):
            message = f"loss_id {number}, but initialize makes {max(counts)} loss scaler(s)"
            yield Fault(call, "error", message, f"Pass num_losses={number + 1} to amp.initialize.")


def closures(context: Context) -> Iterator[Fault]:
    """`optimizer.step(closure)` where steps may be skipped."""
    script, levels = context.script, context.expected
    if not script.uses_amp or not levels.may_skip:
        return
    for call, receiver in script.method_calls("step"):
        values = [*call.args[:1], *(keyword.value for keyword in call.keywords if keyword.arg == "closure")]
        given = [value for value in values if literal(script, value) is not None]
        if given and context.is_optimizer(receiver) and not script.is_without_amp(call):
            message = (
                "step(closure) with a dynamic loss scale raises OptimizerError: whether to skip must be known before"
                " the closure runs"
            )
            fix = (
                "Call step() without a closure, give initialize a static loss_scale, or use a bfloat16 level (O4, O5)."
            )
            yield Fault(call, "error" if levels.must_skip else "warning", message, fix)


def gradient_penalties(context: Context) -> Iterator[Fault]:
    """Gradients taken with `torch.autograd.grad` for a penalty, of outputs that are not scaled."""
    script = context.script
    if not script.uses_amp or not context.expected.may_scale or script.calls_of("amp.scale", "amp.unscale"):
        return
    for call in script.calls_of("torch.autograd.grad"):
        is_kept = any(
            keyword.arg == "create_graph" and literal(script, keyword.value) in (True, UNKNOWN)
            for keyword in call.keywords
        )
        if is_kept and not script.is_without_amp(call):
            message = "gradients for a penalty are taken of outputs that are not scaled: small float16 ones become 0"
            yield Fault(
                call,
                "note",
                message,
                "amp.unscale(torch.autograd.grad(amp.scale(outputs), inputs, create_graph=True)).",
            )
