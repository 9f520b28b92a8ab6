"""Rules of levels, and of models before and after `initialize`: wrappers, TorchScript, casts and moves."""

import ast
import re
from collections.abc import Iterator
from dataclasses import replace

from ..errors import did_you_mean
from . import edits
from .context import WRAPPERS, Context, parts
from .findings import Edits, Fault
from .levels import arguments_of, destinations, levels_for, literal
from .names import LOW
from .rules import rule
from .script import Script
from .structure import argument_of, end, function_of, position, text_of


@rule(
    "AMP201",
    "an opt_level that is no level",
    bad='amp.initialize(model, optimizer, opt_level="o1")  # AMP201',
    good='amp.initialize(model, optimizer, opt_level="O1")',
    mends=True,
)
def unknown_levels(context: Context) -> Iterator[Fault]:
    """A level is the letter O and a digit. The default of an option may be wrong for long before a run takes it."""
    script = context.script
    for call in script.initializations:
        arguments, levels = arguments_of(call), levels_for(script, call)
        given = arguments.get("opt_level")
        if given is not None and "presets" not in arguments:
            yield from _judge_level(script, given, levels)
            if isinstance(given, ast.Attribute):
                yield from _judge_option(script, given, levels)


def _judge_level(script: Script, node: ast.AST, levels: tuple[str, ...]) -> Iterator[Fault]:
    level = literal(script, node)
    if not isinstance(level, (str, int)) or level in levels:
        return
    spelled = re.sub(r"^[oO0]?(?=\d$)", "O", str(level))
    change = edits.replace(script, node, f'"{spelled}"') if spelled in levels and isinstance(node, ast.Constant) else ()
    advice = f"Use one of {', '.join(levels)}."
    yield Fault(node, "error", f"opt_level {level!r} is not a level.{did_you_mean(str(level), levels)}", advice, change)


def _judge_option(script: Script, given: ast.Attribute, levels: tuple[str, ...]) -> Iterator[Fault]:
    """Judge the default and the choices of the option that `initialize` takes, if it takes them as they are.

    One that is looked at elsewhere is not changed, and may have values that are for there, such as "none".
    """
    uses = [one for one in script.nodes if isinstance(one, ast.Attribute) and one.attr == given.attr]
    readers = [script.structure.parent(one) for one in uses]
    is_only_passed = all(
        isinstance(one, (ast.keyword, ast.FormattedValue)) or one in script.initializations for one in readers
    )
    compared = [text_of(one) for reader in readers if isinstance(reader, ast.Compare) for one in ast.walk(reader)]
    for option, _ in script.method_calls("add_argument"):
        kind = argument_of(option, "type")
        is_taken = given.attr in destinations(option) and (kind is None or text_of(kind) == "str")
        if not is_taken or any(isinstance(one.ctx, ast.Store) for one in uses):
            continue
        for value in (*parts(argument_of(option, "default")), *parts(argument_of(option, "choices"))):
            for fault in _judge_level(script, value, levels):
                if is_only_passed:
                    yield fault
                elif fault.edits or text_of(value) not in compared:
                    yield replace(fault, edits=())


def _made_by(context: Context, call: ast.Call, names: frozenset[str]) -> Iterator[ast.Call]:
    """Yield the call of one of `names` that made a model given to `initialize`, as in `DDP(model).cuda()`."""
    for model in context.models(call):
        value = model if isinstance(model, ast.Call) else context.script.assigned_before(text_of(model), call)
        while isinstance(value, ast.Call):
            if context.script.is_call_of(value, names):
                yield value
            value = value.func.value if isinstance(value.func, ast.Attribute) else None


@rule(
    "AMP203",
    "a parallel wrapper before initialize",
    bad="""
        model = nn.parallel.DistributedDataParallel(model)  # AMP203
        model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
    """,
    good="""
        model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
        model = nn.parallel.DistributedDataParallel(model)
    """,
    mends=True,
)
def wrapped_models(context: Context) -> Iterator[Fault]:
    """`initialize` changes the weights that a wrapper would have taken hold of, and refuses one that comes first."""
    script = context.script
    for call in script.initializations:
        for wrapper in _made_by(context, call, WRAPPERS):
            name = min(script.names.resolve(wrapper.func) & WRAPPERS).rpartition(".")[2]
            message = f"{name} is put around the model before amp.initialize, which refuses parallel wrappers"
            advice = "Give the bare model to amp.initialize and wrap what it returns."
            yield Fault(wrapper, "error", message, advice, _wrap_later(script, wrapper, call))


def _wrap_later(script: Script, wrapper: ast.Call, call: ast.Call) -> Edits:
    """Move `x = Wrapper(x)`, or the `if` that holds no other, behind `initialize`; nothing between may unwrap it."""
    wrapping = script.statement(wrapper)
    model = text_of(wrapper.args[0]) if wrapper.args else ""
    if text_of(wrapping) != f"{model} = {text_of(wrapper)}":
        return ()
    outer = script.structure.parent(wrapping)
    moved = outer if isinstance(outer, ast.If) and outer.body == [wrapping] and not outer.orelse else wrapping
    is_left_alone = _is_left_alone(script, model, wrapping, script.statement(call))
    return edits.move(script, moved, call, model=model) if is_left_alone else ()


def _is_left_alone(script: Script, model: str, first: ast.AST, second: ast.AST) -> bool:
    """Tell whether nothing between two places has to do with a model but for handing its parameters to an optimizer."""
    between = [one for one in script.nodes if end(first) <= position(one) and end(one) <= position(second)]
    takers = [script.structure.parent(one) for one in between if text_of(one) == model]
    return all(isinstance(one, ast.Attribute) and one.attr == "parameters" for one in takers)


@rule(
    "AMP204",
    "TorchScript of a model that amp has changed",
    bad="torch.jit.script(model).save(path)  # AMP204",
    good="""
        amp.reset()
        torch.jit.script(model).save(path)
    """,
)
def scripted_models(context: Context) -> Iterator[Fault]:
    """TorchScript cannot compile the hooks on the model, which comes out at the end of a training, when it is saved."""
    script = context.script
    for compiled in script.calls_of("torch.jit.script"):
        target = text_of(compiled.args[0]) if compiled.args else ""
        calls = [call for call in script.initializations if target in map(text_of, context.models(call))]
        is_later = any(script.structure.is_before(call, compiled) for call in calls)
        if is_later and not script.is_without_amp(compiled):
            message = "torch.jit.script of a model after amp.initialize: TorchScript cannot compile the hooks on it"
            yield Fault(compiled, "error", message, "Call amp.reset() first, or use torch.jit.trace or torch.compile.")


@rule(
    "AMP206",
    "a model cast to 16 bits before initialize",
    bad="""
        model = model.cuda().half()  # AMP206
        model, optimizer = amp.initialize(model, optimizer, opt_level="O2")
    """,
    good="""
        model = model.cuda()
        model, optimizer = amp.initialize(model, optimizer, opt_level="O2")
    """,
    mends=True,
)
def low_models(context: Context) -> Iterator[Fault]:
    """`initialize` starts from float32 weights, of which 16 bits have lost a part, and refuses them but for O3."""
    if context.expected.takes_low_model:
        return
    for cast, model in _casts_of_models(context):
        message = f"{model} is cast to 16 bits before amp.initialize, which refuses it (but for O3)"
        advice = "Leave the cast out: initialize casts the model where the level asks for it."
        yield Fault(cast, "error", message, advice, _take_out_cast(context, cast, model))


def _take_out_cast(context: Context, cast: ast.Call, model: str) -> Edits:
    """Take a cast out where `initialize` stands beside it, whatever is asked for, and nothing lies between."""
    script = context.script
    call = next(one for one in script.initializations if script.structure.is_before(cast, one))
    statement, initialize = script.statement(cast), script.statement(call)
    is_beside = script.ancestor_beside(statement, call) is initialize and "enabled" not in arguments_of(call)
    if not is_beside or not _is_left_alone(script, model, statement, initialize):
        return ()
    receiver = cast.func.value if isinstance(cast.func, ast.Attribute) else cast
    low = [value for value in (*cast.args, *(one.value for one in cast.keywords)) if script.names.resolve(value) & LOW]
    if len(cast.args) + len(cast.keywords) > 1:
        return edits.remove_argument(script, cast, low[0])
    statement = script.statement(cast)
    is_all = isinstance(statement, (ast.Expr, ast.Assign)) and statement.value is cast
    targets = list(map(text_of, statement.targets)) if isinstance(statement, ast.Assign) else [text_of(receiver)]
    if is_all and isinstance(receiver, (ast.Name, ast.Attribute)) and targets == [text_of(receiver)]:
        return edits.remove(script, statement)
    return edits.replace(script, cast, script.text[slice(*script.receiver_span(cast))])


def _casts_of_models(context: Context) -> Iterator[tuple[ast.Call, str]]:
    """Yield (call, model) for each cast of a model to 16 bits that comes before `initialize`."""
    script, structure = context.script, context.script.structure
    for cast, _ in low_casts(script):
        for call in script.initializations:
            for model in map(text_of, context.models(call)):
                is_cast = _root(cast) == model or script.assigned_before(model, call) is _outermost(script, cast)
                is_widened = any(
                    text_of(receiver) == model and structure.is_before(cast, one) and structure.is_before(one, call)
                    for one, receiver in script.method_calls("float")
                )
                if is_cast and structure.is_before(cast, call) and not is_widened:
                    yield cast, model
                    break


@rule(
    "AMP207",
    "a cast to 16 bits by hand",
    bad="output = model(images.half())  # AMP207",
    good="output = model(images)",
)
def casts_by_hand(context: Context) -> Iterator[Fault]:
    """amp casts what its level says; float32 ops behind another cast get rounded values, and weights lose bits."""
    if not context.script.uses_amp or not context.expected.may_use_low:
        return
    before = {cast for cast, _ in _casts_of_models(context)}
    for cast, receiver in low_casts(context.script):
        if cast not in before and not context.script.is_without_amp(cast):
            is_model = text_of(receiver) in context.model_texts()
            what = "the model is cast to 16 bits by hand" if is_model else "a cast to 16 bits by hand"
            message = f"{what}: {'its weights lose' if is_model else 'float32 ops behind it miss'} what float32 held"
            advice = "Leave the cast out, or put the code under `with amp.disable_casts():` if it must run in 16 bits."
            yield Fault(cast, "warning", message, advice)


def low_casts(script: Script) -> Iterator[tuple[ast.Call, ast.expr]]:
    """Yield (call, receiver) for `.half()`, `.bfloat16()`, and `.to()` or `.type()` with a literal 16-bit dtype."""
    for call, receiver in script.method_calls("half", "bfloat16"):
        if not call.args and not call.keywords:
            yield call, receiver
    for call, receiver in script.method_calls("to", "type"):
        values = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg == "dtype")]
        if any(script.names.resolve(value) & LOW for value in values):
            yield call, receiver


_OF_ITSELF = ("to", "type", "cuda", "cpu", "half", "bfloat16", "float", "double", "train", "eval", "requires_grad_")


def _root(call: ast.Call) -> str:
    """Return what a chain of methods that give the model itself starts from: `model` of `model.cuda().half()`."""
    value: ast.expr = call
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in _OF_ITSELF:
        value = value.func.value
    return text_of(value)


def _outermost(script: Script, call: ast.Call) -> ast.AST:
    """Return the whole of the chain of method calls that a call stands in."""
    node: ast.AST = call
    while isinstance(script.structure.parent(node), ast.Attribute):
        outer = script.structure.parent(script.structure.parent(node) or node)
        if not isinstance(outer, ast.Call):
            break
        node = outer
    return node


@rule(
    "AMP208",
    "a model moved to its device after initialize",
    bad="""
        model = Net()
        model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
        model.cuda()  # AMP208
    """,
    good="""
        model = Net()
        model.cuda()
        model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
    """,
    mends=True,
)
def models_moved_late(context: Context) -> Iterator[Fault]:
    """`initialize` prepares casts for the device that the model is on: on another one nothing is cast."""
    script, structure = context.script, context.script.structure
    moves = [one for one in script.method_calls("cuda", "to") if _is_move(script, one[0])]
    for call in script.initializations:
        for model in map(text_of, context.models(call)):
            made = script.assigned_before(model, call)
            early = any(structure.is_before(move, call) and _root(move) == model for move, _ in moves)
            if not isinstance(made, ast.Call) or early or any(structure.is_inside(move, made) for move, _ in moves):
                continue
            if not function_of(made)[:1].isupper():
                continue  # a function may move what it makes
            late = [move for move, one in moves if text_of(one) == model and structure.is_before(call, move)]
            for move in late[:1]:
                message = f"{model} moves to its device after amp.initialize, which prepared it for the one it was on"
                advice = "Move the model first, then call amp.initialize."
                yield Fault(move, "error", message, advice, _move_earlier(script, move, model, call))


def _move_earlier(script: Script, move: ast.Call, model: str, call: ast.Call) -> Edits:
    statement = script.statement(move)
    siblings, initialize = script.siblings(statement), script.statement(call)
    is_next = initialize in siblings and siblings.index(statement) == siblings.index(initialize) + 1
    if not isinstance(statement, (ast.Expr, ast.Assign)) or statement.value is not move or not is_next:
        return ()
    return edits.move(script, statement, call, is_before=True, model=model)


def _is_move(script: Script, call: ast.Call) -> bool:
    if isinstance(call.func, ast.Attribute) and call.func.attr == "cuda":
        return True
    if not call.args or any(name.startswith("torch.") for name in script.names.resolve(call.args[0])):
        return False
    place = literal(script, call.args[0])
    is_named = any(word in text_of(call.args[0]).lower() for word in ("dev", "cuda", "gpu", "rank"))
    return place != "cpu" if isinstance(place, (str, int)) else is_named
