"""Rules of `amp-patch doctor` about what scripts do with models and optimizers before and after `amp.initialize`."""

import ast
from collections.abc import Iterator

from .rules import Fault, rule
from .script import Script
from .tree import argument_of, function_of, names_in, parts_of, position, text_of


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
def models_moved_late(script: Script) -> Iterator[Fault]:
    """`initialize` prepares casts for one type of device, the model's. `scale_loss` refuses losses on other types."""
    if script.calls_of("torch.set_default_device", "torch.set_default_tensor_type"):
        return  # models may be made on the default device, so a later move may change nothing
    moves = [(call, receiver) for call, receiver in script.method_calls("cuda", "to") if _is_move(script, call)]
    for call in script.initializations:
        for model in parts_of(argument_of(call, "models", 0)):
            name = text_of(model)
            if not _is_made_on_cpu(script, name, call):
                continue
            of_model = [move for move, receiver in moves if name in names_in(receiver)]
            late = [move for move in of_model if script.is_before(call, move)]
            if late and not any(script.is_before(move, call) for move in of_model):
                message = f"{name} moves to its device after amp.initialize, which prepared it for its old device"
                yield Fault(late[0], "error", message, "Move the model first, then call amp.initialize.")


def _is_made_on_cpu(script: Script, name: str, call: ast.Call) -> bool:
    """Return whether the last value of a name before a call is probably a model on the CPU.

    It is one if a class or `from_pretrained` makes it, as in `Net()`. Other functions may move a model to a device.
    """
    values = [value for value in script.values_of(name) if script.is_before(value, call)]
    if not values or not isinstance(values[-1], ast.Call):
        return False
    maker = function_of(values[-1])
    return maker[:1].isupper() or maker == "from_pretrained"  # the names of classes begin with a capital


def _is_move(script: Script, call: ast.Call) -> bool:
    """Return whether a call of `cuda` or `to` moves a model to a device that may be another than the CPU."""
    if function_of(call) == "cuda":
        return True
    device = argument_of(call, "device", 0)
    if device is None or any(name.startswith("torch.") for name in script.names.resolve(device)):
        return False  # a cast, such as `to(torch.float16)`
    if isinstance(device, ast.Constant):
        return device.value != "cpu"
    return any(word in text_of(device).lower() for word in ("dev", "cuda", "gpu", "rank"))


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
def optimizers_made_anew(script: Script) -> Iterator[Fault]:
    """amp knows only the optimizers that are passed to `initialize`. `scale_loss` raises an error for any other."""
    stepped = {text_of(receiver) for _, receiver in script.method_calls("step")}
    given_anywhere: set[str] = set()
    for call in script.initializations:
        given_anywhere.update(map(text_of, parts_of(argument_of(call, "optimizers", 1))))
    for call in script.initializations:
        given = set(map(text_of, parts_of(argument_of(call, "optimizers", 1))))
        models = set(map(text_of, parts_of(argument_of(call, "models", 0))))
        for name, value in script.assignments:
            params = _find_optimizer_params(name, value)
            if params is None or not script.is_before(call, value) or script.is_without_amp(value):
                continue
            if any(script.is_before(value, later) for later in script.initializations):
                continue  # a later `initialize` may be given the new optimizer
            message = ""
            if name in given:
                message = f"{name} is created again after amp.initialize, which was given the old one"
            elif given and name not in given_anywhere and names_in(params) & models and name in stepped:
                message = f"{name} is created after amp.initialize, which was not given it"
            if message:
                yield Fault(value, "error", message, "Make the optimizer first, then call amp.initialize.")


def _find_optimizer_params(name: str, value: ast.expr) -> ast.expr | None:
    """Return the argument with the parameters if `value`, which is assigned to `name`, makes an optimizer. Else None.

    For `optimizer = Adam(model.parameters())`, this is `model.parameters()`.
    """
    # `optimizer = Wrapper(optimizer)` makes no new optimizer
    if not isinstance(value, ast.Call) or name in names_in(value):
        return None
    params = argument_of(value, "params", 0)
    if params is None or "param" not in text_of(params):
        return None
    return params


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
def initialize_in_loop(script: Script) -> Iterator[Fault]:
    """`amp_patch.initialize` ignores a second call with the same arguments. Apex's function, and amp_patch's stand-in
    for it, start again from the initial loss scale.
    """
    for call in script.initializations:
        statement = script.parent_statement(call)
        loop = script.parent(statement)
        if not isinstance(loop, (ast.For, ast.AsyncFor, ast.While)):
            continue  # under an `if` in the loop, the call may run only once
        models = argument_of(call, "models", 0)
        if models is None:
            continue
        # a name that the loop assigns before the call may be a new model in each iteration
        assigned_nodes = [node for node in script.nodes if isinstance(getattr(node, "ctx", None), ast.Store)]
        assigned = {text_of(node) for node in assigned_nodes if position(loop) < position(node) < position(statement)}
        if not names_in(models) & assigned:
            message = "amp.initialize in a loop, for a model that the loop does not make"
            yield Fault(call, "warning", message, "Call amp.initialize once, before the loop.")
