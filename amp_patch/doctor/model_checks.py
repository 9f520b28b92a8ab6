"""Checks of models before and after `initialize`: wrappers, TorchScript, casts, moves and copies."""

import ast
from collections.abc import Iterator

from .context import WRAPPERS, Context
from .findings import Fault
from .levels import literal
from .script import Script
from .structure import text_of

_LOW = frozenset({"torch.float16", "torch.half", "torch.bfloat16"})


def wrapped_models(context: Context) -> Iterator[Fault]:
    """A parallel wrapper put around a model before `initialize` sees it."""
    script = context.script
    for call in script.initializations:
        for model in context.models(call):
            value = model if isinstance(model, ast.Call) else script.assigned_before(text_of(model), call)
            wrapper = _find_in_chain(script, value, WRAPPERS)
            if wrapper is not None:
                name = next(iter(script.names.resolve(wrapper.func) & WRAPPERS)).rpartition(".")[2]
                message = f"{name} is put around the model before amp.initialize, which refuses parallel wrappers"
                fix = "Give the bare model to amp.initialize and wrap what it returns."
                yield Fault(wrapper, "error", message, fix)


def _find_in_chain(script: Script, value: ast.AST | None, names: frozenset[str]) -> ast.Call | None:
    """Return the call of one of `names` in a chain such as `DDP(model).cuda()`."""
    while isinstance(value, ast.Call):
        if script.is_call_of(value, names):
            return value
        value = value.func.value if isinstance(value.func, ast.Attribute) else None
    return None


def scripted_models(context: Context) -> Iterator[Fault]:
    """TorchScript made before `initialize`, or from a model that `initialize` has changed."""
    script, compilers = context.script, frozenset({"torch.jit.script", "torch.jit.trace"})
    for call in script.initializations:
        for model in context.models(call):
            value = model if isinstance(model, ast.Call) else script.assigned_before(text_of(model), call)
            compiled = _find_in_chain(script, value, compilers)
            if compiled is not None:
                message = (
                    "the model is TorchScript before amp.initialize, which refuses it: it calls no patched function"
                )
                fix = "Initialize the model it is made from; torch.compile works before and after."
                yield Fault(compiled, "error", message, fix)
    for compiled in script.calls_of("torch.jit.script"):
        target = text_of(compiled.args[0]) if compiled.args else ""
        calls = [call for call in script.initializations if target in map(text_of, context.models(call))]
        before = [call for call in calls if script.structure.is_before(call, compiled)]
        undone = any(script.structure.is_before(reset, compiled) for reset in script.calls_of("amp.reset"))
        if before and not undone and not script.is_without_amp(compiled):
            message = "torch.jit.script of a model after amp.initialize: TorchScript cannot compile the hooks on it"
            yield Fault(compiled, "error", message, "Call amp.reset() first, or use torch.jit.trace or torch.compile.")


def low_models(context: Context) -> Iterator[Fault]:
    """A model cast to 16 bits by hand before `initialize`."""
    if context.expected.takes_low_model:
        return
    for cast, model in _casts_of_models(context):
        message = (
            f"{model} is cast to 16 bits before amp.initialize, which starts from float32 weights and refuses it (but"
            " for O3)"
        )
        fix = "Leave the cast out: initialize casts the model where the level asks for it."
        yield Fault(cast, "error", message, fix)


def _casts_of_models(context: Context) -> Iterator[tuple[ast.Call, str]]:
    """Yield (call, model) for each cast of a model to 16 bits that comes before `initialize`."""
    script = context.script
    for cast, _ in low_casts(script):
        for call in script.initializations:
            for model in map(text_of, context.models(call)):
                is_cast = _root(cast) == model or script.assigned_before(model, call) is _outermost(script, cast)
                if is_cast and script.structure.is_before(cast, call) and not _is_widened(script, model, cast, call):
                    yield cast, model
                    break


def _is_widened(script: Script, model: str, cast: ast.AST, call: ast.AST) -> bool:
    """Whether the model is made float32 again between a cast and `initialize`."""
    structure = script.structure
    return any(
        text_of(receiver) == model and structure.is_before(cast, widened) and structure.is_before(widened, call)
        for widened, receiver in script.method_calls("float")
    )


def casts_by_hand(context: Context) -> Iterator[Fault]:
    """Any other cast to 16 bits by hand in a script that uses amp."""
    if not context.script.uses_amp or not context.expected.may_use_low:
        return
    before = {cast for cast, _ in _casts_of_models(context)}
    for cast, receiver in low_casts(context.script):
        if cast not in before and not context.script.is_without_amp(cast):
            is_model = text_of(receiver) in context.model_texts()
            what = (
                "the model is cast to 16 bits by hand: its weights lose what float32 held"
                if is_model
                else "a cast to 16 bits by hand"
            )
            message = f"{what}; amp casts what its level says, and float32 ops behind this cast get rounded values"
            fix = "Leave the cast out, or put the code under `with amp.disable_casts():` if it must run in 16 bits."
            yield Fault(cast, "warning", message, fix)


def low_casts(script: Script) -> Iterator[tuple[ast.Call, ast.expr]]:
    """Yield (call, receiver) for `.half()`, `.bfloat16()`, and `.to()` or `.type()` with a literal 16-bit dtype."""
    for call, receiver in script.method_calls("half", "bfloat16"):
        if not call.args and not call.keywords:
            yield call, receiver
    for call, receiver in script.method_calls("to", "type"):
        values = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg == "dtype")]
        if any(script.names.resolve(value) & _LOW for value in values):
            yield call, receiver


def _root(call: ast.Call) -> str:
    """Return what a chain of method calls starts from: `model` of `model.cuda().half()`."""
    value: ast.expr = call
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
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


def models_moved_late(context: Context) -> Iterator[Fault]:
    """A model that goes to its device only after `initialize`."""
    script = context.script
    moves = [
        (call, text_of(receiver)) for call, receiver in script.method_calls("cuda", "to") if _is_move(script, call)
    ]
    for call in script.initializations:
        for model in map(text_of, context.models(call)):
            made = script.assigned_before(model, call)
            early = any(script.structure.is_before(move, call) and _root(move) == model for move, _ in moves)
            if made is None or early:
                continue
            if any(script.structure.is_inside(move, made) for move, _ in moves) or not _is_class(made):
                continue
            late = [move for move, receiver in moves if receiver == model and script.structure.is_before(call, move)]
            for move in late[:1]:
                message = (
                    f"{model} moves to its device after amp.initialize, which has prepared it for the device it was on"
                )
                yield Fault(move, "error", message, "Move the model first, then call amp.initialize.")


def _is_move(script: Script, call: ast.Call) -> bool:
    if isinstance(call.func, ast.Attribute) and call.func.attr == "cuda":
        return True
    if not call.args or any(name.startswith("torch.") for name in script.names.resolve(call.args[0])):
        return False
    return bool(literal(script, call.args[0]) != "cpu")


def _is_class(value: ast.AST) -> bool:
    """Whether a value is made by a class, as far as the case of its name tells: a function may move what it makes."""
    if not isinstance(value, ast.Call):
        return False
    return text_of(value.func).rpartition(".")[2][:1].isupper()


def copied_models(context: Context) -> Iterator[Fault]:
    """A deep copy of a model whose weights `initialize` has made 16-bit."""
    script, levels = context.script, context.expected
    if not levels.may_cast_model:
        return
    for copy in script.calls_of("copy.deepcopy"):
        target = text_of(copy.args[0]) if copy.args else ""
        for call in script.initializations:
            if (
                target in map(text_of, context.models(call))
                and script.structure.is_before(call, copy)
                and not script.is_without_amp(copy)
            ):
                message = (
                    "a copy of a model that amp has cast is a 16-bit model without masters: an average of its weights"
                    " stands still"
                )
                fix = "Copy before amp.initialize, and average over amp.master_params(optimizer) or model.state_dict()."
                yield Fault(copy, "warning" if levels.must_have_masters else "note", message, fix)
                break
