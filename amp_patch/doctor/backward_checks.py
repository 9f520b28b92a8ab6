"""Rules of backward passes: which loss they start from, and in which `scale_loss` block."""

import ast
import itertools
from collections.abc import Iterator

from . import edits
from .blocks import Block, get_backward_calls, get_block_around, get_blocks
from .context import Context
from .findings import Edits, Fault, Severity
from .levels import UNKNOWN, arguments_of, is_written_out, literal
from .rules import rule
from .script import Script
from .structure import argument_of, bound_in, function_of, names_in, position, text_of

_BLOCK = "with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()"


@rule(
    "AMP301",
    "an unscaled loss inside scale_loss",
    bad="""
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            loss.backward()  # AMP301
    """,
    good="""
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
    """,
    mends=True,
)
def unscaled_in_block(context: Context) -> Iterator[Fault]:
    """When the block ends it divides gradients by the loss scale, those of an unscaled loss too, to almost nothing."""
    script, blocks, scaled = context.script, get_blocks(context.script), _scaled_names(context.script)
    for call, loss in get_backward_calls(script):
        block = get_block_around(script, blocks, call)
        if block is not None and not names_in(loss) & scaled:
            severity: Severity = "error" if context.expected.may_scale else "note"
            message = (
                f"{text_of(loss)} is not the scaled loss: the block divides its gradients by the scale all the same"
            )
            change = _take_scaled(script, block, loss) if context.expected.may_scale else ()
            yield Fault(call, severity, message, f"Write `{_BLOCK}`.", change)


def _take_scaled(script: Script, block: Block, loss: ast.expr) -> Edits:
    """Have a backward pass start from what the block gives, if it is the block's loss that it starts from."""
    given = argument_of(block.call, "loss", 0)
    if (
        given is None
        or text_of(given) != text_of(loss)
        or (block.name is None and (block.item.optional_vars is not None or _has_other_use(script)))
        or text_of(loss) in bound_in(ast.walk(block.statement))
    ):
        return ()
    change = edits.replace(script, loss, block.name or "scaled_loss")
    return change if block.name else (*change, *edits.insert(script, block.call, " as scaled_loss"))


def _has_other_use(script: Script) -> bool:
    """Whether a script has a `scaled_loss` that no `with` gives it."""
    return "scaled_loss" in bound_in(
        one for one in script.nodes if not isinstance(script.structure.parent(one), ast.withitem)
    )


@rule(
    "AMP302",
    "a scaled loss after its scale_loss",
    bad="""
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            pass
        scaled_loss.backward()  # AMP302
    """,
    good="""
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            pass
            scaled_loss.backward()
    """,
    mends=True,
)
def scaled_after_block(context: Context) -> Iterator[Fault]:
    """Gradients are divided by the loss scale when the block ends: those that come later stay multiplied by it."""
    script, blocks, structure = context.script, get_blocks(context.script), context.script.structure
    for call, loss in get_backward_calls(script):
        same = [block for block in blocks if text_of(loss) == block.name]
        ended = [block.statement for block in same if structure.is_before(block.statement, call)]
        if not ended or any(structure.is_inside(call, block.statement) for block in same):
            continue
        last = ended[-1]
        renewed = any(
            target == text_of(loss) and position(statement) > position(last) and structure.is_before(statement, call)
            for target, _, statement in script.assignments
        )
        if not renewed:
            message = f"{text_of(loss)} goes backward after its block: its gradients stay multiplied by the loss scale"
            severity: Severity = "error" if context.expected.may_scale else "note"
            statement, siblings = script.statement(call), script.siblings(last)
            is_next = siblings[siblings.index(last) + 1 :][:1] == [statement]
            change = edits.reindent(script, [statement], script.indentation(last.body[0])) if is_next else ()
            yield Fault(call, severity, message, f"Move it into the block: `{_BLOCK}`.", change)


@rule(
    "AMP303",
    "a backward pass without scale_loss",
    bad="""
        loss = F.mse_loss(model(images), target)
        loss.backward()  # AMP303
        optimizer.step()
    """,
    good="""
        loss = F.mse_loss(model(images), target)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    """,
    mends=True,
)
def unscaled_losses(context: Context) -> Iterator[Fault]:
    """Small float16 gradients become 0 unless the loss is scaled, and no overflow is noticed outside of a block."""
    script, blocks = context.script, get_blocks(context.script)
    if not script.initializations or not context.expected.may_scale:
        return
    scaled = _scaled_names(script)
    for call, loss in get_backward_calls(script):
        is_inside = any(script.structure.is_inside(call, block.statement) for block in blocks)
        is_scaled = names_in(loss) & scaled or _may_be_scaled_outside(script, loss, scaled, call)
        if not is_inside and not is_scaled and not script.is_without_amp(call):
            message = f"{text_of(loss)} goes backward without amp.scale_loss: small float16 gradients become 0"
            yield Fault(call, "warning", message, f"Write `{_BLOCK}`.", _open_block(context, call, loss))


def _open_block(context: Context, call: ast.Call, loss: ast.expr) -> Edits:
    """Put a backward pass of a loss made in its scope into a block, if the step behind it shows the optimizer."""
    script, amp, statement = context.script, context.find_amp(call), context.script.statement(call)
    is_made_here = isinstance(loss, ast.Name) and script.assigned_before(loss.id, call) is not None
    is_alone = isinstance(statement, ast.Expr) and statement.value is call and script.lines_of(statement) is not None
    optimizer = _find_optimizer(context, call)
    is_free = is_made_here and is_alone and not _has_other_use(script)
    if optimizer is None or amp is None or not is_free or not context.is_amp_on(call):
        return ()
    indentation, (start, dot) = script.indentation(statement), script.receiver_span(call)
    header = f"with {amp}.scale_loss({text_of(loss)}, {optimizer}) as scaled_loss:"
    return (edits.Edit(start, dot, f"{header}{script.newline}{indentation}{script.indent}scaled_loss"),)


def _find_optimizer(context: Context, call: ast.Call) -> str | None:
    """Return the optimizer that alone steps next behind a backward pass, if it is amp's and takes the gradients."""
    script, structure = context.script, context.script.structure
    calls = [one for one in script.method_calls("step", "backward") if structure.is_before(call, one[0])]
    phases = itertools.groupby(calls, key=lambda one: text_of(one[0].func).endswith(".step"))
    steps = next((list(phase) for is_step, phase in phases if is_step), [])
    named = [(one, text_of(one.args[0] if one.args else to)) for one, to in steps if "sched" not in text_of(to).lower()]
    if len({name for _, name in named}) != 1 or named[0][0] is not steps[0][0]:
        return None
    step, name = named[0]  # optimizer.step(), or scaler.step(optimizer)
    made = script.assigned_before(name, step)
    is_amps = made is None or any(one is made or structure.is_before(made, one) for one in script.initializations)
    statement, siblings = script.statement(step), script.siblings(script.statement(call))
    outer = structure.parent(statement)
    is_under_if = isinstance(outer, ast.If) and outer in siblings and name not in names_in(outer.test)
    between = (one for one in script.nodes if position(call) < position(one) < position(step))
    is_taken = not any(isinstance(one, ast.Attribute) and one.attr in ("grad", "zero_grad") for one in between)
    is_sure = is_amps and is_taken and (statement in siblings or is_under_if)
    return name if is_sure and name in context.optimizer_texts() else None


def _scaled_names(script: Script) -> set[str]:
    """Return what gives a scaled loss, or holds one or what is made of it, by whatever binds names or appends."""
    scaled = {text_of(one) for one in script.nodes if script.names.resolve(one) & {"amp.scale_loss", "amp.scale"}}
    made = [(names_in(receiver), names_in(call)) for call, receiver in script.method_calls("append")]
    for node in ast.walk(script.tree):
        stored = [one for one in ast.iter_child_nodes(node) if isinstance(getattr(one, "ctx", None), ast.Store)]
        values = [getattr(node, field, None) for field in ("value", "iter", "context_expr")]
        made.extend((bound_in(stored), names_in(value)) for value in values if scaled and stored and value)
    while found := set().union(*(targets for targets, sources in made if sources & scaled)) - scaled - {"self"}:
        scaled |= found
    return scaled


def _may_be_scaled_outside(script: Script, loss: ast.expr, scaled: set[str], call: ast.Call) -> bool:
    """Whether a loss comes from a parameter of a function that is called in a block, or with something scaled."""
    function = script.structure.frame(call)
    if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return False
    parameters = {one.arg for one in ast.walk(function.args) if isinstance(one, ast.arg)}
    callers = [one for one in script.calls if function_of(one) == function.name]
    blocks = {block.statement for block in get_blocks(script)}
    return bool(names_in(loss) & parameters) and any(
        names_in(one) & scaled or not blocks.isdisjoint(script.structure.around(one)) for one in callers
    )


@rule(
    "AMP310",
    "a loss_id without a loss scaler",
    bad="""
        model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
        with amp.scale_loss(loss, optimizer, loss_id=1) as scaled_loss:  # AMP310
            scaled_loss.backward()
    """,
    good="""
        model, optimizer = amp.initialize(model, optimizer, opt_level="O1", num_losses=2)
        with amp.scale_loss(loss, optimizer, loss_id=1) as scaled_loss:
            scaled_loss.backward()
    """,
    mends=True,
)
def loss_ids(context: Context) -> Iterator[Fault]:
    """`initialize` makes as many loss scalers as `num_losses` says, one by default; a loss_id picks one of them."""
    script, calls = context.script, context.script.initializations
    counts = [arguments_of(call).get("num_losses") for call in calls]
    numbers = [1 if count is None else literal(script, count) for count in counts]
    if not all(isinstance(number, int) for number in numbers) or not all(map(is_written_out, calls)):
        return
    for call in script.calls_of("amp.scale_loss"):
        node = argument_of(call, "loss_id", 2)
        wanted = literal(script, node) if node is not None else 0
        if numbers and isinstance(wanted, int) and wanted >= max(numbers):
            message = f"loss_id {wanted}, but initialize makes {max(numbers)} loss scaler(s)"
            change: Edits = ()
            if len(calls) == 1 and (counts[0] is None or isinstance(counts[0], ast.Constant)):
                text, count = str(wanted + 1), counts[0]
                change = (
                    edits.add_argument(script, calls[0], f"num_losses={text}")
                    if count is None
                    else edits.replace(script, count, text)
                )
            yield Fault(call, "error", message, f"Pass num_losses={wanted + 1} to amp.initialize.", change)


@rule(
    "AMP312",
    "a gradient penalty on unscaled outputs",
    bad="(gradients,) = torch.autograd.grad(outputs.sum(), images, create_graph=True)  # AMP312",
    good="(gradients,) = amp.unscale(torch.autograd.grad(amp.scale(outputs.sum()), images, create_graph=True))",
)
def gradient_penalties(context: Context) -> Iterator[Fault]:
    """Gradients of which a penalty is made are float16, too: small ones become 0 unless the outputs are scaled."""
    script = context.script
    if not script.uses_amp or not context.expected.may_scale or script.calls_of("amp.scale", "amp.unscale"):
        return
    for call in script.calls_of("torch.autograd.grad"):
        create_graph = argument_of(call, "create_graph")
        is_kept = create_graph is not None and literal(script, create_graph) in (True, UNKNOWN)
        if is_kept and not script.is_without_amp(call):
            message = "gradients for a penalty are taken of outputs that are not scaled: small float16 ones become 0"
            advice = "amp.unscale(torch.autograd.grad(amp.scale(outputs), inputs, create_graph=True))."
            yield Fault(call, "note", message, advice)
