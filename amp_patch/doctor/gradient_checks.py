"""Rules of the doctor about gradients that are clipped or read while a GradScaler scales them."""

import ast
from collections.abc import Iterator

from .loss_checks import CLIPPERS
from .rules import Fault, rule
from .scaler_flow import ScalerFlow, grade
from .script import Script
from .tree import argument_of, function_of, names_in, text_of

_UNSCALE = "Call scaler.unscale_(optimizer) before the gradients are read."
_CLAMPING = ("clamp_", "clip_", "clamp_min_", "clamp_max_", "renorm_")
_CLIPPING_NAMES = ("clip_grad", "clip_gradient", "adaptive_clip", "clip_norm")
"""Parts of names of functions that clip gradients, of a library (`dispatch_clip_grad` of timm) or of the script."""

_MEASURING = {
    *("norm", "vector_norm", "_foreach_norm", "abs", "mean", "median", "quantile", "std", "var", "sum", "pow"),
    *("square", "max", "min", "amax", "amin", "clamp", "item", "tolist"),
    *("histogram", "histc", "Histogram", "add_histogram"),
}
"""Functions and methods whose result depends on the scale of a gradient."""

_SAME_VALUES = ("detach", "float", "cpu", "flatten", "view", "reshape", "clone", "ravel", "double", "numpy")
"""Methods of a gradient whose result has the gradient's values."""

_SCALE_FREE = ("isnan", "isinf", "isfinite", "all_reduce", "zero_", "mul_", "div_", "copy_")
"""Functions and methods that a script may rightly use on scaled gradients."""

_PENALTIES = ("torch.autograd.grad",)


@rule(
    "AMP701",
    "clipping before unscale_",
    bad="""
        import torch

        scaler = torch.amp.GradScaler()
        scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # AMP701
        scaler.step(optimizer)
        scaler.update()
    """,
    good="""
        import torch

        scaler = torch.amp.GradScaler()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    """,
)
def clips_scaled(script: Script) -> Iterator[Fault]:
    """After `scaler.scale(loss).backward()`, gradients are multiplied by the loss scale until `scaler.unscale_` or
    `scaler.step`. With a scale of 65536, max_norm=1 then limits the true gradients to a norm of 1 / 65536, and almost
    every step is clipped.
    """
    flow = ScalerFlow(script)
    if not flow.is_used:
        return
    for call in dict.fromkeys(_find_clippings(script)):
        if flow.meets_scaled_gradients(call):
            message = "the gradients are clipped while they are multiplied by the loss scale"
            yield Fault(call, grade(flow), message, "Call scaler.unscale_(optimizer) before the clipping.")


def _find_clippings(script: Script) -> Iterator[ast.Call]:
    """Yield the calls that seem to clip gradients to a limit that is not scaled. A call may occur twice.

    These are calls of `CLIPPERS`, such as `clip_grad_norm_` of torch, and of the script's functions that call one of
    them. They are also calls of functions with a name such as `dispatch_clip_grad`, and of `p.grad.clamp_()`.
    """
    clippers = script.calls_of(*CLIPPERS)
    clipping_functions = {script.frame(call) for call in clippers}
    for call in script.calls:
        calls_clipping_function = any(function in clipping_functions for function in _own_functions(script, call))
        if calls_clipping_function and not _knows_scaler(script, call):
            yield call
        if call not in clippers and not _clips_by_name(script, call):
            continue
        limit = argument_of(call, "max_norm", 1) or argument_of(call, "clip_value", 1)
        # a limit with "scal" in it may be scaled; with a limit of inf or None, the call only measures the norm
        if limit is None or not any(word in text_of(limit).lower() for word in ("scal", "inf", "none")):
            yield call


def _clips_by_name(script: Script, call: ast.Call) -> bool:
    """Return whether a call clamps a gradient in place, or calls a function whose name says that it clips gradients.

    A function that may unscale the gradients first (see `_knows_scaler`) does not count.
    """
    name = function_of(call)
    if name in _CLAMPING and isinstance(call.func, ast.Attribute):
        return _is_gradient(call.func.value)
    if not any(part in name for part in _CLIPPING_NAMES):
        return False
    # a function that is given the scaler may unscale
    return bool(call.args or call.keywords) and not _knows_scaler(script, call)


def _knows_scaler(script: Script, call: ast.Call) -> bool:
    """Return whether the called function may unscale gradients: it is given a scaler, Fabric or Accelerator, or has
    "scal" in its source.
    """
    if any("scal" in name.lower() or "fabric" in name or "accelerator" in name for name in names_in(call)):
        return True
    return any("scal" in ast.unparse(function) for function in _own_functions(script, call))


def _own_functions(script: Script, call: ast.Call) -> Iterator[ast.FunctionDef]:
    """Yield the functions of the script that a call may run: by name, or as a method of `self`."""
    if isinstance(call.func, ast.Attribute) and text_of(call.func.value) != "self":
        return
    for node in script.nodes:
        if isinstance(node, ast.FunctionDef) and node.name == function_of(call):
            yield node


def _is_gradient(node: ast.AST) -> bool:
    """Return whether an expression is a gradient: `p.grad`, or a view or a copy of it, such as `p.grad.data`."""
    while True:
        if isinstance(node, ast.Attribute):
            if node.attr in ("grad", "main_grad"):
                return True
            if node.attr != "data":
                return False
            node = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _SAME_VALUES:
            node = node.func.value
        else:
            return False


@rule(
    "AMP711",
    "gradients read before unscale_",
    bad="""
        import torch

        scaler = torch.amp.GradScaler()
        scaler.scale(loss).backward()
        for name, parameter in model.named_parameters():
            writer.add_scalar(name, parameter.grad.norm(), step)  # AMP711
        scaler.step(optimizer)
        scaler.update()
    """,
    good="""
        import torch

        scaler = torch.amp.GradScaler()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        for name, parameter in model.named_parameters():
            writer.add_scalar(name, parameter.grad.norm(), step)
        scaler.step(optimizer)
        scaler.update()
    """,
)
def reads_scaled(script: Script) -> Iterator[Fault]:
    """Until `scaler.unscale_` or `scaler.step`, gradients are multiplied by the loss scale, which starts at 65536 and
    changes during the run. A norm or a histogram of them says little, and a limit or a penalty that is computed from
    them is wrong.
    """
    flow = ScalerFlow(script)
    if not flow.is_used:
        return
    for call in script.calls:
        if _is_penalty(script, flow, call):
            message = "these gradients of a scaled loss are multiplied by the loss scale"
            yield Fault(call, "warning", message, "Divide them by scaler.get_scale() before a penalty is computed.")
        elif _measures_gradient(script, call) and flow.meets_scaled_gradients(call):
            message = "the gradients are read while they are multiplied by the loss scale"
            yield Fault(call, "warning", message, _UNSCALE)
        elif script.names.resolve(call.func) & {"wandb.watch"} and flow.scaled_backwards and _logs_gradients(call):
            message = "wandb.watch logs gradients that are multiplied by the loss scale"
            yield Fault(call, "note", message, 'Pass log="parameters", and log the gradients after scaler.unscale_.')


def _is_penalty(script: Script, flow: ScalerFlow, call: ast.Call) -> bool:
    """Return whether a call computes gradients of a scaled loss, in a function that never reads the scale."""
    if script.names.resolve(call.func).isdisjoint(_PENALTIES):
        return False
    outputs = argument_of(call, "outputs", 0)
    if outputs is None or not flow.is_scaled(outputs):
        return False
    text = ast.unparse(script.frame(call))
    return "get_scale" not in text and "unscale" not in text and "inv_scale" not in text


def _logs_gradients(call: ast.Call) -> bool:
    log = argument_of(call, "log", 2)
    return log is None or (isinstance(log, ast.Constant) and log.value in ("gradients", "all"))


def _measures_gradient(script: Script, call: ast.Call) -> bool:
    """Return whether a call measures or logs a gradient, directly or in a function of the script.

    Functions that seem to allow for the scale, or to run a backward pass, do not count.
    """
    if _measures_directly(script, call):
        return True
    name = function_of(call)
    if "grad" in name and "norm" in name and not _is_clipping(name):
        return bool(call.args) and not _knows_scaler(script, call)
    for function in _own_functions(script, call):
        inner = (part for part in ast.walk(function) if isinstance(part, ast.Call))
        has_measurement = any(_measures_directly(script, part) for part in inner)
        text = ast.unparse(function)
        # `add_scalar` of a logger names no scale
        if has_measurement and "scal" not in text.replace("add_scalar", "") and "backward" not in text:
            return True
    return False


def _is_clipping(name: str) -> bool:
    return any(part in name for part in _CLIPPING_NAMES)


def _measures_directly(script: Script, call: ast.Call) -> bool:
    """Return whether a call measures a gradient, as `p.grad.norm()` and `torch.norm(p.grad)` do, in a way that is wrong
    if the gradient is scaled (see `_allows_for_scale`).
    """
    if function_of(call) not in _MEASURING:
        return False
    if isinstance(call.func, ast.Attribute) and _is_gradient(call.func.value):
        return not _allows_for_scale(script, call)
    return any(_is_gradient(argument) for argument in call.args) and not _allows_for_scale(script, call)


def _allows_for_scale(script: Script, call: ast.Call) -> bool:
    """Return whether a measurement of a gradient seems right at any scale.

    That is so if its statement calls a function of `_SCALE_FREE`, compares the result with 0, or has a name with
    "scale" in it.
    """
    statement = script.parent_statement(call)
    parts: list[ast.AST] = [call]
    # a loop or a `with` is the statement of a call in its head; its body says nothing about the call
    if not isinstance(statement, (ast.For, ast.With, ast.While)):
        parts = list(ast.walk(statement))
    if any(isinstance(part, ast.Call) and function_of(part) in _SCALE_FREE for part in parts):
        return True
    # such as p.grad.abs().sum() == 0
    is_compared = any(isinstance(outer, ast.Compare) and _has_zero(outer) for outer, _ in script.around(call))
    return is_compared or any("scale" in name.lower() for part in parts for name in names_in(part))


def _has_zero(comparison: ast.Compare) -> bool:
    return any(isinstance(part, ast.Constant) and part.value == 0 for part in ast.walk(comparison))
