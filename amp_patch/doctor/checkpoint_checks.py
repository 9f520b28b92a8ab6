"""Rules of checkpoints: the state of amp belongs to them, and is loaded after `initialize`."""

import ast
from collections.abc import Iterator

from . import edits
from .context import Context
from .findings import Edits, Fault
from .rules import rule
from .script import Script
from .structure import function_of, names_in, text_of


@rule(
    "AMP501",
    "a checkpoint without amp's state",
    bad="""
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)  # AMP501
    """,
    good="""
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()}, path)
    """,
    mends=True,
)
def saves_without_amp(context: Context) -> Iterator[Fault]:
    """A run that is resumed without the loss scale starts from the first one, and skips steps until it fits again."""
    script = context.script
    if not script.uses_amp or not context.expected.may_skip or _touches(script, "amp.state_dict"):
        return
    if not _saves(script):
        return
    for call, receiver in script.method_calls("state_dict"):
        if context.is_optimizer(receiver) and not script.is_without_amp(call):
            message = "the checkpoint has the optimizer's state but not amp's: a resumed run skips steps"
            yield Fault(call, "warning", message, 'Save `"amp": amp.state_dict()` as well.', _save(context, call))
            return


def _saves(script: Script) -> list[ast.Call]:
    return [call for call in script.calls if "save" in function_of(call).lower()]


def _save(context: Context, call: ast.Call) -> Edits:
    """Add amp's state behind the optimizer's, in a dict that is saved as it is."""
    script, amp, holder = context.script, context.find_amp(call), context.script.structure.parent(call)
    if amp is None or not context.is_amp_on(call) or any(to.endswith("['amp']") for to, *_ in script.assignments):
        return ()
    saved = _saved_dicts(script)
    target = holder.targets[0] if isinstance(holder, ast.Assign) else None
    if isinstance(target, ast.Subscript) and isinstance(getattr(target.slice, "value", None), str):
        name = text_of(target.value)
        line = f'{name}["amp"] = {amp}.state_dict()'
        is_saved = script.assigned_before(name, call) in saved
        return edits.insert_after(script, script.statement(call), line) if is_saved else ()
    key = holder.keys[holder.values.index(call)] if holder in saved else None
    if key is None:
        return ()
    before = script.text[script.offset(key.lineno) : script.span(key)[0]]
    gap = " " if before.strip() else script.newline + before
    return edits.insert(script, call, f',{gap}"amp": {amp}.state_dict()')


def _saved_dicts(script: Script) -> list[ast.Dict]:
    """Return the dicts that calls of `save` take, in place or by a name, if "amp" is surely none of their keys."""
    given = [
        one for call in _saves(script) for one in (*call.args, *(word.value for word in call.keywords if word.arg))
    ]
    values = [script.assigned_before(one.id, one) if isinstance(one, ast.Name) else one for one in given]
    dicts = [value for value in values if isinstance(value, ast.Dict)]
    return [one for one in dicts if all(isinstance(key, ast.Constant) and key.value != "amp" for key in one.keys)]


@rule(
    "AMP502",
    "a checkpoint loaded without amp's state",
    bad="""
        optimizer.load_state_dict(checkpoint["optimizer"])  # AMP502
    """,
    good="""
        optimizer.load_state_dict(checkpoint["optimizer"])
        if "amp" in checkpoint:
            amp.load_state_dict(checkpoint["amp"])
    """,
    mends=True,
)
def loads_without_amp(context: Context) -> Iterator[Fault]:
    """A run that is resumed without the loss scale starts from the first one, and skips steps until it fits again."""
    script = context.script
    if not script.uses_amp or not context.expected.may_skip or _touches(script, "amp.load_state_dict"):
        return
    for call, receiver in script.method_calls("load_state_dict"):
        if context.is_optimizer(receiver) and not script.is_without_amp(call):
            message = "the optimizer's state is loaded but not amp's: the run skips steps until its loss scale fits"
            advice = 'Call `amp.load_state_dict(checkpoint["amp"])` after amp.initialize.'
            yield Fault(call, "warning", message, advice, _load(context, call))
            return


def _load(context: Context, call: ast.Call) -> Edits:
    """Load amp's state behind the optimizer's, from the same checkpoint, where `initialize` has run by then."""
    script, amp, statement = context.script, context.find_amp(call), context.script.statement(call)
    source = call.args[0].value if call.args and isinstance(call.args[0], ast.Subscript) else None
    is_initialized = any(script.structure.is_before(one, call) for one in script.initializations)
    is_plain = isinstance(source, (ast.Name, ast.Attribute)) and isinstance(statement, ast.Expr)
    is_plain = is_plain and not _has_amp_of_its_own(script)
    if source is None or amp is None or not is_plain or not is_initialized or not context.is_amp_on(call):
        return ()
    loading = f'{script.indent}{amp}.load_state_dict({text_of(source)}["amp"])'
    return edits.insert_after(script, statement, f'if "amp" in {text_of(source)}:', loading)


@rule(
    "AMP503",
    "amp's state before initialize",
    bad="""
        amp.load_state_dict(checkpoint["amp"])  # AMP503
        model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
    """,
    good="""
        model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
        amp.load_state_dict(checkpoint["amp"])
    """,
    mends=True,
)
def state_before_initialize(context: Context) -> Iterator[Fault]:
    """There is no state before `initialize`: the call raises SessionError, in many scripts only when they resume."""
    script = context.script
    for call in script.calls_of("amp.load_state_dict", "amp.state_dict"):
        before = [one for one in script.initializations if script.structure.is_before(one, call)]
        after = [one for one in script.initializations if script.structure.is_before(call, one)]
        if after and not before and script.structure.loop(call) is None:
            message = "amp has no state before amp.initialize: this raises SessionError"
            advice = "Call amp.initialize first, then load the model's, the optimizer's and amp's state."
            yield Fault(call, "error", message, advice, _load_later(script, call, after[0]))


def _has_amp_of_its_own(script: Script) -> bool:
    """Whether a script has a dict with "amp" for something else, such as the name of a level."""
    pairs = (
        pair for one in script.nodes if isinstance(one, ast.Dict) for pair in zip(one.keys, one.values, strict=True)
    )
    return any(
        isinstance(key, ast.Constant) and key.value == "amp" and isinstance(value, ast.Constant) for key, value in pairs
    )


def _load_later(script: Script, call: ast.Call, initialize: ast.Call) -> Edits:
    """Move the loading of amp's state, or the `if` around it, behind `initialize`, over what has to do with neither."""
    statement = script.statement(call)
    outer = script.structure.parent(statement)
    moved = outer if isinstance(outer, ast.If) and not outer.orelse else statement
    anchor, siblings = script.ancestor_beside(moved, initialize), script.siblings(moved)
    if anchor is None or function_of(call) != "load_state_dict" or anchor is not script.statement(initialize):
        return ()
    between = siblings[siblings.index(moved) + 1 : siblings.index(anchor)]
    is_named = any(names_in(one) & names_in(moved) for one in between)
    return () if is_named else edits.move(script, moved, initialize)


def _touches(script: Script, function: str) -> bool:
    """Whether a script calls a function of amp, or reads the loss scalers themselves."""
    return bool(script.calls_of(function)) or any(
        isinstance(node, ast.Attribute) and node.attr == "loss_scalers" for node in script.nodes
    )
