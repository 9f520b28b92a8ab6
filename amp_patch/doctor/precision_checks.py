"""Rules of `amp-patch doctor` about optimizers that step on 16-bit weights, and averages of weights in 16 bits."""

import ast
import re
from collections.abc import Iterator

from .. import config
from .flow import LOW, Flow, Verdict
from .rules import Fault, Severity, rule
from .scaler_flow import ScalerFlow
from .script import Script
from .tree import argument_of, function_of, names_in, text_of

_MAY_BE_LOW = re.compile(r"half\b|Half|float16|[bf]p?16|16-true")
"""Words of scripts that may make values in 16 bits."""

_KEEPS_UPDATES = re.compile(
    r"deepspeed|fsdp|master_?(?:params?|weights?|copy|copies)|(?:fp32|float32)_(?:params?|copy|weights?|groups?)|kahan"
    r"|stochastic_round|FP16_?Optimizer|Float16Optimizer"
    r"|get_peft_model|mark_only_lora|add_adapter|inject_adapter|peft_config|prepare_model_for_kbit|cast_training_params",
    re.IGNORECASE,
)
"""If a script has one of these names, its training may keep small updates even with 16-bit weights.

For example, it may have float32 copies of the weights (masters), use Kahan sums or stochastic rounding, or train only a
few new weights, such as LoRA's.
"""

_TRAINER = re.compile(r"(?:transformers|trl)\.(?:\w+\.)*\w*Trainer$")
"""Fits the names of classes that, by default, train a model by torch's AdamW, and keep the dtype of its weights."""

_LOST_SHARE = {"float16": "0.02 %", "bfloat16": "0.2 %"}
"""The share of a weight below which an update never changes it: a quarter of the dtype's epsilon. The spacing of
numbers is at least half the epsilon times the weight, and an update below half the spacing is rounded away.
"""

_LEVELS = {low: config.levels.find_master_level(low).name for low in sorted(LOW)}
"""The opt_level to recommend instead of a model in a 16-bit dtype, by the dtype."""


def may_be_low(script: Script) -> bool:
    """Return whether the code of a script may make values in 16 bits."""
    return "torch" in script.text and _MAY_BE_LOW.search(script.text) is not None


def grade_by(verdict: Verdict, message: str) -> tuple[Severity, str]:
    """Return the severity and the message of a fault about a value in 16 bits.

    The fault is a warning if the value can only have 16-bit dtypes. Else it is a note, and its message begins with
    words such as "if the dtype is bfloat16: ".
    """
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
    """torch's optimizers round each new weight to the dtype of the weight.

    So bfloat16 loses every update below 0.2 % of the weight, and float16 every update below 0.02 %. A fine-tuning
    learns less than in float32, or nothing, and no message says so.
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
    """Yield a fault for each Lightning `Trainer(precision="bf16-true")`, or "16-true", which casts the whole model.

    The same holds for a `Fabric(...)` that may train.
    """
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
    """Return whether the Fabric that the call `fabric` makes may train, and does not only load or evaluate a model."""
    names = {assignment.target for assignment in script.assignments if assignment.value is fabric}
    if any("." in name for name in names):
        return True  # an attribute, which any method may use
    frame = script.frame(fabric)
    for call in script.calls:
        if script.frame(call) is not frame:
            continue
        is_passed = any(names & names_in(argument) for argument in call.args)
        launches_function = function_of(call) == "launch" and bool(call.args)  # fabric.launch(main, ...)
        if function_of(call) == "backward" or is_passed or launches_function:
            return True
    return False


def find_trainers(script: Script) -> Iterator[tuple[str, ast.AST, list[ast.expr]]]:
    """Yield each optimizer of torch.optim as (name of its class, its last step, the models that it may train).

    Also yield each trainer of transformers or trl whose `train` is called, as
    (name of its class, the call that makes it, [its model]). Leave out optimizers that are passed to `initialize`.
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
    """Return whether an optimizer is passed to `initialize`."""
    targets = {assignment.target for assignment in script.assignments if assignment.value is optimizer}
    given = {name for call in script.initializations for name in names_in(call)}
    return bool(targets & given)


def _find_trained(script: Script, params: ast.expr | None, depth: int = 0) -> Iterator[ast.expr]:
    """Yield the models whose parameters are in `params`, the first argument of an optimizer.

    Follows variables. The arguments of a function with "param" in its name, such as `group_params(model)`, count as
    models. Yields none if `params` copies parameters or casts
    them to float32.
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
    """Return the last call of a method `step` in the function that makes the optimizer, if it comes later.

    If there is none, returns `optimizer`, the call that makes the optimizer. A cast of the model after the last step
    does not matter: it prepares the trained model for its use.
    """
    frame = script.frame(optimizer)
    steps = [call for call, _ in script.method_calls("step") if script.frame(call) is frame]
    return steps[-1] if steps and script.is_before(optimizer, steps[-1]) else optimizer


def may_train_only_float32(script: Script, flow: Flow, model: ast.expr) -> bool:
    """Return whether all weights that train may be in float32, although the model is cast to 16 bits.

    They may be if the script calls `requires_grad_` on the model or a part of it, sets a `requires_grad` to False, or
    casts a part of the model or some weights back to float32.
    """
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
    """Each step moves an average by a small part of its distance from the weights. 16 bits round most of these
    moves to nothing, and the average hardly leaves its first value.
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
            advice = f"Keep the average in float32: `{target}.float()`."
            if any(text_of(call.func) == target for call in script.calls):
                advice += f" Call {target} with float32 inputs then, or in torch.autocast."
            yield Fault(verdict.node, severity, message, advice)


_AVERAGING = ("lerp_", "mul_", "add_", "sub_", "addcmul_")
"""Methods of tensors that update an average in place."""


def _is_averaged(script: Script, name: str) -> bool:
    """Return whether the script seems to update a copy of a model as an average of weights.

    It does so in a loop over the copy's parameters, or by a function such as `torch._foreach_lerp_`.
    """
    for node in script.nodes:
        if isinstance(node, (ast.For, ast.AsyncFor)) and name in names_in(node.iter):
            loop_variables = {part.id for part in ast.walk(node.target) if isinstance(part, ast.Name)}
            if any(_updates_average(inner, loop_variables) for inner in ast.walk(node)):
                return True
        if isinstance(node, ast.Call) and node.args and function_of(node).startswith("_foreach_"):
            is_of_copy = name in names_in(node.args[0])
            if is_of_copy:
                return True
    return False


def _updates_average(node: ast.AST, names: set[str]) -> bool:
    """Return whether a node updates a tensor with one of these names: `x.lerp_(...)`, `x = a + b`, `x += y`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        # also in a chain: average.mul_(decay).add_(parameter)
        is_on_average = bool(names_in(node.func.value) & names)
        is_update = node.func.attr in _AVERAGING or (node.func.attr == "copy_" and _is_sum(node.args))
        return is_on_average and is_update
    if isinstance(node, ast.Assign):
        return text_of(node.targets[0]).removesuffix(".data") in names and _is_sum([node.value])
    return isinstance(node, ast.AugAssign) and text_of(node.target).removesuffix(".data") in names


def _is_sum(arguments: list[ast.expr]) -> bool:
    return bool(arguments) and isinstance(arguments[0], ast.BinOp)
