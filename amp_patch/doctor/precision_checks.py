"""Rules of the doctor about weights in 16 bits, and averages of weights."""

import ast
import re
from collections.abc import Iterator

from .. import config
from .flow import LOW, Flow, Verdict
from .rules import Fault, Severity, rule
from .scaler_flow import ScalerFlow
from .script import Script
from .tree import argument_of, function_of, names_in, text_of

_MAY_BE_LOW = re.compile(r"half\b|Half|float16|[bf]p?16")
"""A script without these words makes no value in 16 bits itself."""

_KEEPS_UPDATES = re.compile(
    r"deepspeed|fsdp|master_?(?:params?|weights?|copy|copies)|(?:fp32|float32)_(?:params?|copy|weights?|groups?)|kahan"
    r"|stochastic_round|FP16_?Optimizer|Float16Optimizer"
    r"|get_peft_model|mark_only_lora|add_adapter|inject_adapter|peft_config|prepare_model_for_kbit|cast_training_params",
    re.IGNORECASE,
)
"""Names in scripts that keep float32 weights beside 16-bit ones, make up for rounding, or train a few new weights."""

_TRAINER = re.compile(r"(?:transformers|trl)\.(?:\w+\.)*\w*Trainer$")
"""Trainers whose optimizer is AdamW of torch, on the weights as they are."""

_LOST_SHARE = {"float16": "0.02 %", "bfloat16": "0.2 %"}
"""The share of a weight below which an update never changes it: a quarter of the dtype's epsilon."""

_LEVELS = {low: config.levels.find_master_level(low).name for low in sorted(LOW)}


def may_be_low(script: Script) -> bool:
    """Return whether a script may make values in 16 bits itself."""
    return "torch" in script.text and _MAY_BE_LOW.search(script.text) is not None


def grade_by(verdict: Verdict, message: str) -> tuple[Severity, str]:
    """Return severity and message: a note that begins with "if" for a dtype that only some runs have."""
    if verdict.is_certain:
        return "warning", message
    return "note", f"if the dtype is {verdict.dtype}: {message}"


# ---- weights ---------------------------------------------------------------------------------------------------------


@rule(
    "AMP601",
    "an optimizer that steps on 16-bit weights",
    bad="""
        import torch

        model = Net().to(torch.bfloat16)  # AMP601
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        optimizer.step()
    """,
    good="""
        import torch
        import amp_patch as amp

        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        model, optimizer = amp.initialize(model, optimizer, opt_level="O5")
        optimizer.step()
    """,
)
def steps_on_low_weights(script: Script) -> Iterator[Fault]:
    """torch's optimizers round each update to the dtype of the weight. bfloat16 loses every update below 0.2 % of the
    weight, float16 below 0.02 %. A fine-tuning learns less than in float32, or nothing, and no message says so.
    """
    if not may_be_low(script) or _KEEPS_UPDATES.search(script.identifiers):
        return
    yield from _find_true_precisions(script)
    flow = Flow(script)
    scalers = ScalerFlow(script)
    has_scaler = scalers.is_used and bool(scalers.steps or scalers.unscales)
    reported = set[ast.AST]()
    for stepper, trainer, models in find_trainers(script):
        for model in models:
            verdict = flow.judge(model, trainer)
            if verdict is None or verdict.node in reported or may_train_only_float32(script, flow, model):
                continue
            if verdict.dtype == "float16" and verdict.is_certain and has_scaler:
                continue  # GradScaler refuses such weights: AMP707
            reported.add(verdict.node)
            message = f"{stepper} steps on the {verdict.dtype} weights of {text_of(model)}"
            message += f": updates below {_LOST_SHARE[verdict.dtype]} of a weight are lost"
            severity, message = grade_by(verdict, message)
            level = _LEVELS[verdict.dtype]
            advice = f'Leave the model in float32, and call amp.initialize at "{level}", or use torch.autocast.'
            yield Fault(verdict.node, severity, message, advice)


def _find_true_precisions(script: Script) -> Iterator[Fault]:
    """Yield the trainers of Lightning that cast the model: `precision="bf16-true"`."""
    for call in script.calls:
        precision = argument_of(call, "precision")
        if function_of(call) not in ("Trainer", "Fabric") or not isinstance(precision, ast.Constant):
            continue
        if function_of(call) == "Fabric" and not _may_train(script, call):
            continue
        if precision.value in ("bf16-true", "16-true"):
            message = f"precision={precision.value!r} trains 16-bit weights without float32 masters"
            mixed = str(precision.value).replace("true", "mixed")
            advice = f"Write precision={mixed!r}, or use amp_patch.integrations.lightning at a level with masters."
            yield Fault(call, "warning", f"{message}: small updates are lost", advice)


def _may_train(script: Script, fabric: ast.Call) -> bool:
    """Return whether a Fabric may train.

    It may if it is an attribute, or if its function runs a backward pass, passes it on, or launches another function.
    """
    frame = script.frame(fabric)
    here = [call for call in script.calls if script.frame(call) is frame]
    names = {assignment.target for assignment in script.assignments if assignment.value is fabric}
    is_attribute = any("." in name for name in names)
    return is_attribute or any(
        function_of(call) == "backward"
        or names & {name for argument in call.args for name in names_in(argument)}
        # fabric.launch(main, ...)
        or (function_of(call) == "launch" and call.args)
        for call in here
    )


def find_trainers(script: Script) -> Iterator[tuple[str, ast.AST, list[ast.expr]]]:
    """Yield each optimizer of torch.optim: the name of its class, its last step, and the models that it may train.

    Also yields the class, the call and the model of each trainer of transformers or trl that trains, because it makes
    such an optimizer itself. Leaves out optimizers that are passed to `initialize`.
    """
    trained = {text_of(receiver) for _, receiver in script.method_calls("train")}
    for call in script.calls:
        name = _class_of(script, call)
        if name and not _is_given_to_amp(script, call):
            yield name, _last_step_of(script, call), list(_find_trained(script, argument_of(call, "params", 0)))
        makers = script.names.resolve(call.func)
        model = argument_of(call, "model", 0)
        if model is None or not any(_TRAINER.match(maker) for maker in makers):
            continue
        targets = {assignment.target for assignment in script.assignments if assignment.value is call}
        if targets & trained:
            yield function_of(call), call, [model]


def _class_of(script: Script, call: ast.Call) -> str:
    """Return the name of the optimizer of torch.optim that a call makes, or ""."""
    for name in sorted(script.names.resolve(call.func)):
        module, _, kind = name.rpartition(".")
        is_of_torch = module.startswith("torch.optim") and not module.endswith(("lr_scheduler", "swa_utils"))
        if is_of_torch and kind[:1].isupper():
            return kind
    return ""


def _is_given_to_amp(script: Script, optimizer: ast.Call) -> bool:
    """Return whether an optimizer is passed to `initialize`. Then amp makes masters, or warns."""
    targets = {assignment.target for assignment in script.assignments if assignment.value is optimizer}
    given = {name for call in script.initializations for name in names_in(call)}
    return bool(targets & given)


def _find_trained(script: Script, params: ast.expr | None, depth: int = 0) -> Iterator[ast.expr]:
    """Yield the models whose parameters an optimizer is given, also through names and functions that group them.

    Yields none for copies of parameters, which may be float32.
    """
    if params is None or depth > 3:
        return
    for node in ast.walk(params):
        if isinstance(node, ast.Attribute) and node.attr in ("float", "float32", "clone", "deepcopy"):
            return
    for node in ast.walk(params):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute) and node.func.attr in ("parameters", "named_parameters"):
                yield node.func.value
            elif not isinstance(node.func, ast.Attribute) and "param" in function_of(node):
                yield from (given for given in node.args if isinstance(given, ast.Name))
    names = {text_of(node) for node in ast.walk(params) if isinstance(node, (ast.Name, ast.Attribute))}
    for target, value in script.assignments:
        if target in names and script.frame(value) is script.frame(params) and value is not params:
            yield from _find_trained(script, value, depth + 1)


def _last_step_of(script: Script, optimizer: ast.Call) -> ast.AST:
    """Return the last step in the function that makes the optimizer; without one, the call that makes it."""
    frame = script.frame(optimizer)
    # a later cast does not matter: it prepares the trained model for its use
    steps = [call for call, _ in script.method_calls("step") if script.frame(call) is frame]
    return steps[-1] if steps and script.is_before(optimizer, steps[-1]) else optimizer


def may_train_only_float32(script: Script, flow: Flow, model: ast.expr) -> bool:
    """Return whether the optimizer of a model may hold no 16-bit weight: a part is frozen or in float32."""
    name = text_of(model)
    for call, receiver in script.method_calls("requires_grad_", "float", "to"):
        part = text_of(receiver)
        if part != name and not part.startswith(f"{name}."):
            continue
        if function_of(call) == "requires_grad_":
            return True
        if part != name and (function_of(call) == "float" or "float32" in flow.find_dtypes(argument_of(call, "", 0))):
            return True
    for target, value in script.assignments:
        if target == name and "requires_grad_" in {
            function_of(part) for part in ast.walk(value) if isinstance(part, ast.Call)
        }:
            return True
        if target.endswith(".requires_grad") and isinstance(value, ast.Constant) and value.value is False:
            return True
        if target.endswith(".data") and ("float(" in text_of(value) or "float32" in text_of(value)):
            return True
    return False


@rule(
    "AMP603",
    "an average of weights in 16 bits",
    bad="""
        model = Net()
        ema = copy.deepcopy(model).to(torch.bfloat16)  # AMP603
        for average, parameter in zip(ema.parameters(), model.parameters()):
            average.lerp_(parameter.to(average.dtype), 0.001)
    """,
    good="""
        model = Net()
        ema = copy.deepcopy(model)
        for average, parameter in zip(ema.parameters(), model.parameters()):
            average.lerp_(parameter, 0.001)
    """,
)
def averages_in_low(script: Script) -> Iterator[Fault]:
    """Each step moves an average by about a thousandth of its distance from the weights. 16 bits round that to nothing,
    and the average keeps its first value.
    """
    if not may_be_low(script):
        return
    flow = Flow(script)
    for target, value in script.assignments:
        makers = {function_of(node) for node in ast.walk(value) if isinstance(node, ast.Call)}
        is_average = "AveragedModel" in makers or ("deepcopy" in makers and _is_averaged(script, target))
        if not is_average:
            continue
        # casts in place may follow the copy
        casts = [
            call for call, name in script.method_calls("to", "half", "bfloat16", "float") if text_of(name) == target
        ]
        verdict = flow.judge(value, value)
        for cast in casts:
            if script.is_before(value, cast) and isinstance(script.parent(cast), ast.Expr):
                verdict = flow.judge(cast, cast)
        if verdict is not None:
            message = f"{target} averages weights in {verdict.dtype}, which is too coarse for the steps of an average"
            severity, message = grade_by(verdict, message)
            yield Fault(verdict.node, severity, message, f"Keep the average in float32: `{target}.float()`.")


_AVERAGING = ("lerp_", "mul_", "add_", "sub_", "addcmul_")


def _is_averaged(script: Script, name: str) -> bool:
    """Return whether a loop over a copy of a model, or `torch._foreach_*`, changes it as averages are changed."""
    for node in script.nodes:
        if isinstance(node, (ast.For, ast.AsyncFor)) and name in names_in(node.iter):
            moved = (part for part in ast.walk(node.target) if isinstance(part, ast.Name))
            names = {part.id for part in moved}
            if any(_moves(inner, names) for inner in ast.walk(node)):
                return True
        elif isinstance(node, ast.Call) and node.args and function_of(node).startswith("_foreach_"):
            is_moved = name in names_in(node.args[0])
            if is_moved:
                return True
    return False


def _moves(node: ast.AST, names: set[str]) -> bool:
    """Return whether a node changes a tensor with one of these names as averages are changed."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        # also in a chain: average.mul_(decay).add_(parameter)
        is_own = bool(names_in(node.func.value) & names)
        return is_own and (node.func.attr in _AVERAGING or (node.func.attr == "copy_" and _is_sum(node.args)))
    if isinstance(node, ast.Assign):
        return text_of(node.targets[0]).removesuffix(".data") in names and _is_sum([node.value])
    return isinstance(node, ast.AugAssign) and text_of(node.target).removesuffix(".data") in names


def _is_sum(arguments: list[ast.expr]) -> bool:
    return bool(arguments) and isinstance(arguments[0], ast.BinOp)
