"""Rules of models and optimizers around `initialize`, and of checkpoints."""

import ast
from collections.abc import Iterator

from .rules import Context, Fault, rule
from .script import Script
from .tree import argument_of, function_of, names_in, parts_of, position, text_of

_WRAPPERS = frozenset(
    {"torch.nn.DataParallel", "torch.nn.parallel.DistributedDataParallel", "apex.parallel.DistributedDataParallel"}
)


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
)
def wrapped_models(context: Context) -> Iterator[Fault]:
    """`initialize` changes weights that the wrapper would hold, so it raises an error for a wrapped model."""
    script = context.script
    for call in script.initializations:
        for model in parts_of(argument_of(call, "models", 0)):
            value = model if isinstance(model, ast.Call) else script.assigned_before(text_of(model), call)
            while isinstance(value, ast.Call):
                wrappers = script.names.resolve(value.func) & _WRAPPERS
                if wrappers and not _is_ruled_out(script, value, call):
                    name = min(wrappers).rpartition(".")[2]
                    message = f"{name} wraps the model before amp.initialize, which refuses parallel wrappers"
                    yield Fault(value, "error", message, "Give amp.initialize the bare model and wrap what it returns.")
                value = value.func.value if isinstance(value.func, ast.Attribute) else None


def _is_ruled_out(script: Script, wrapped: ast.Call, call: ast.Call) -> bool:
    """Whether an `assert` before the wrapper speaks of its condition and of that of `initialize`: not both, it says."""
    conditions = [_names_of_conditions(script, node) for node in (wrapped, call)]
    asserted = [one for one in script.nodes if isinstance(one, ast.Assert) and script.is_before(one, wrapped)]
    return any(all(names & names_in(one.test) for names in conditions) for one in asserted)


def _names_of_conditions(script: Script, node: ast.AST) -> set[str]:
    return {name for outer in script.around(node) if isinstance(outer, ast.If) for name in names_in(outer.test)}


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
)
def models_moved_late(context: Context) -> Iterator[Fault]:
    """`initialize` prepares casts for the device of the model; `scale_loss` raises an error for a loss on another."""
    script = context.script
    if script.calls_of("torch.set_default_device", "torch.set_default_tensor_type"):
        return  # models are made on their device
    moves = [(call, receiver) for call, receiver in script.method_calls("cuda", "to") if _is_move(script, call)]
    for call in script.initializations:
        for model in map(text_of, parts_of(argument_of(call, "models", 0))):
            made = script.assigned_before(model, call)
            if not isinstance(made, ast.Call) or not _makes_model(made):
                continue
            of_model = [move for move, receiver in moves if model in names_in(receiver)]
            is_moved = any(script.is_before(move, call) for move in of_model)
            late = [move for move in of_model if script.is_before(call, move)]
            if late and not is_moved:
                message = f"{model} moves to its device after amp.initialize, which prepared it for the one it was on"
                yield Fault(late[0], "error", message, "Move the model first, then call amp.initialize.")


def _makes_model(call: ast.Call) -> bool:
    """Whether a call surely makes a model on the CPU: a class does, or `from_pretrained`; a function may move it."""
    name = function_of(call)
    return name[:1].isupper() or name == "from_pretrained"


def _is_move(script: Script, call: ast.Call) -> bool:
    """Whether a call of `cuda` or `to` moves to a device that is, or may be, other than the CPU."""
    if function_of(call) == "cuda":
        return True
    place = argument_of(call, "device", 0)
    if place is None or any(name.startswith("torch.") for name in script.names.resolve(place)):
        return False
    if isinstance(place, ast.Constant):
        return place.value != "cpu"
    return any(word in text_of(place).lower() for word in ("dev", "cuda", "gpu", "rank"))


@rule(
    "AMP210",
    "an optimizer made anew after initialize",
    bad="""
        model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
        optimizer = torch.optim.Adam(model.parameters())  # AMP210
    """,
    good="""
        optimizer = torch.optim.Adam(model.parameters())
        model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
    """,
)
def optimizers_made_anew(context: Context) -> Iterator[Fault]:
    """amp knows only the optimizers passed to `initialize`. `scale_loss` raises an error for another one."""
    script = context.script
    for call in script.initializations:
        optimizers = {text_of(one) for one in parts_of(argument_of(call, "optimizers", 1))}
        for one in script.assignments:
            is_anew = one.target in optimizers and isinstance(one.value, ast.Call) and _makes_optimizer(one.value)
            if not is_anew or not script.is_before(call, one.statement) or one.target in names_in(one.value):
                continue
            again = [other for other in script.initializations if script.is_before(one.statement, other)]
            if not again and not script.is_without_amp(one.statement):
                message = f"{one.target} is created again after amp.initialize, which was given the old one"
                yield Fault(one.value, "error", message, "Make the optimizer first, then call amp.initialize.")


def _makes_optimizer(call: ast.Call) -> bool:
    """Whether a call makes an optimizer of parameters, whatever its class is."""
    params = argument_of(call, "params", 0)
    return params is not None and "param" in text_of(params)


@rule(
    "AMP211",
    "initialize inside the training loop",
    bad="""
        for images, target in loader:
            model, optimizer = amp.initialize(model, optimizer, opt_level="O1")  # AMP211
            train(model, optimizer, images, target)
    """,
    good="""
        model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
        for images, target in loader:
            train(model, optimizer, images, target)
    """,
)
def initialize_in_loop(context: Context) -> Iterator[Fault]:
    """Each call starts again from the initial loss scale, and at O2 and O5 from masters that are rounded to 16 bits."""
    script = context.script
    for call in script.initializations:
        loop = script.loop(call)
        if loop is None or script.parent_statement(call) not in loop.body:
            continue  # under an `if` it may run once
        given = {name for model in parts_of(argument_of(call, "models", 0)) for name in names_in(model)}
        made_before: set[str] = set()
        for one in script.nodes:
            is_bound = isinstance(getattr(one, "ctx", None), ast.Store) and script.is_inside(one, loop)
            if is_bound and position(one) < position(script.parent_statement(call)):
                made_before.add(text_of(one))
        if given and not given & made_before:
            message = "amp.initialize in a loop, for a model that the loop does not make"
            yield Fault(call, "warning", message, "Call amp.initialize once, before the loop.")


@rule(
    "AMP501",
    "a checkpoint without amp's state",
    bad="""
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)  # AMP501
    """,
    good="""
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()}, path)
    """,
)
def saves_without_amp(context: Context) -> Iterator[Fault]:
    """A run that resumes without its loss scale starts from the initial one, and skips steps until the scale fits."""
    if any("save" in function_of(call) for call in context.script.calls):
        for call in _calls_without_amp(context, "state_dict"):
            message = "the checkpoint has the optimizer's state but not amp's: a resumed run skips steps"
            yield Fault(call, "warning", message, 'Save `"amp": amp.state_dict()` as well.')


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
)
def loads_without_amp(context: Context) -> Iterator[Fault]:
    """A run that resumes without its loss scale starts from the initial one, and skips steps until the scale fits."""
    for call in _calls_without_amp(context, "load_state_dict"):
        message = "the optimizer's state is loaded but not amp's: the run skips steps until its loss scale fits"
        yield Fault(call, "warning", message, 'Call `amp.load_state_dict(checkpoint["amp"])` after amp.initialize.')


def _calls_without_amp(context: Context, method: str) -> list[ast.Call]:
    """Return the first call of this method of an optimizer in a script that may lose its loss scale by it, or none.

    A script may if its scale is dynamic, and it neither calls amp's function of that name nor reads the scalers itself.
    """
    script = context.script
    is_kept = bool(script.calls_of(f"amp.{method}")) or "loss_scalers" in script.text
    is_trained = bool(script.initializations or script.blocks)
    if is_kept or not is_trained or not script.uses_amp or not context.expected.skips:
        return []
    return [call for call, receiver in script.method_calls(method) if _holds_state(script, call, receiver)][:1]


def _holds_state(script: Script, call: ast.Call, receiver: ast.expr) -> bool:
    """Whether the receiver of `state_dict` or `load_state_dict` is an optimizer under amp.

    Not one that may keep its own loss scale (`FP16_Optimizer`), that was loaded itself, that a wrapper delegates to,
    that a script uses where amp is off, or on a TPU, where it cannot be on.
    """
    frame = script.frame(call)
    is_delegated = isinstance(frame, ast.FunctionDef) and frame.name == function_of(call)
    makers = {function_of(value) for value in script.values_of(text_of(receiver)) if isinstance(value, ast.Call)}
    has_own_scale = any(function_of(one).startswith("FP16_Optimizer") for one in script.calls)
    is_on_tpu = any("tpu" in text and (True, "") in pairs for text, pairs in script.conditions(call).items())
    is_other = "load" in makers or has_own_scale or is_on_tpu
    return script.is_optimizer(receiver) and not is_delegated and not is_other and not script.is_without_amp(call)


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
)
def state_before_initialize(context: Context) -> Iterator[Fault]:
    """Before `initialize` there is no state, so the call raises SessionError; in many scripts only when they resume."""
    script = context.script
    for call in script.calls_of("amp.load_state_dict", "amp.state_dict"):
        is_after = any(script.is_before(one, call) for one in script.initializations)
        is_before = any(script.is_before(call, one) for one in script.initializations)
        if is_before and not is_after and script.loop(call) is None:
            message = "amp has no state before amp.initialize: this raises SessionError"
            advice = "Call amp.initialize first, then load the model's, the optimizer's and amp's state."
            yield Fault(call, "error", message, advice)
