"""Rules of the doctor about regions of torch.autocast.

A *region* is the code in a `with torch.autocast(...):`, or in a function that `@torch.autocast(...)` decorates.
"""

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

from .flow import Flow
from .rules import Fault, rule
from .scaler_flow import ScalerFlow
from .script import Script
from .tree import argument_of, function_of, names_in, text_of

_OLD_REGIONS = {"torch.cuda.amp.autocast": "cuda", "torch.cpu.amp.autocast": "cpu"}
"""Deprecated forms of autocast, and the device of each. Their arguments are `enabled, dtype, cache_enabled`."""

_REGIONS = ("torch.autocast", "torch.amp.autocast", "torch.amp.autocast_mode.autocast")
_DEFAULT_DTYPES = {"cuda": "float16", "cpu": "bfloat16"}
"""The dtype of a region without the argument `dtype`, by its device."""

_SCALES = re.compile(r"scaler|loss_?scal|scale_loss|accelerat|deepspeed|lightning|\bfabric\b", re.IGNORECASE)
"""Fits names in scripts that may scale losses, or use a library that scales them."""


class Region(NamedTuple):
    """A region: the call of autocast, and the `with` statement or the decorated function that contains its code."""

    call: ast.Call
    body: ast.AST


def find_regions(script: Script) -> Iterator[Region]:
    """Yield the regions of autocast, except those with a constant `enabled=False`."""
    if "autocast" not in script.text:
        return
    for call in script.calls_of(*_REGIONS, *_OLD_REGIONS):
        index = 0 if _is_old(script, call) else 2
        enabled = argument_of(call, "enabled", index)
        if isinstance(enabled, ast.Constant) and not enabled.value:
            continue
        for holder in _find_holders(script, call):
            yield Region(call, holder)


def _find_holders(script: Script, call: ast.Call) -> Iterator[ast.AST]:
    """Yield each `with` statement and each decorated function that uses the result of a call of autocast."""
    # the call may be a branch of `autocast(...) if use_amp else nullcontext()`
    choice = script.parent(call)
    values = (call, choice) if isinstance(choice, ast.IfExp) else (call,)
    # `region = autocast(...)`, for a later `with region:`
    names = {assignment.target for assignment in script.assignments if assignment.value in values}
    # `def make_region(): return autocast(...)`, for a later `with make_region():`
    makers = set[str]()
    frame, statement = script.frame(call), script.parent_statement(call)
    if isinstance(frame, ast.FunctionDef) and isinstance(statement, ast.Return) and statement.value in values:
        makers.add(frame.name)
    for node in script.nodes:
        if isinstance(node, (ast.With, ast.AsyncWith)):
            entered = [item.context_expr for item in node.items]
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            entered = node.decorator_list
        else:
            continue
        if any(part in values or text_of(part) in names or _is_call_of(part, makers) for part in entered):
            yield node


def _is_call_of(node: ast.expr, names: set[str]) -> bool:
    return isinstance(node, ast.Call) and function_of(node) in names


def _is_old(script: Script, call: ast.Call) -> bool:
    """Return whether a call of autocast is one of `_OLD_REGIONS`, whose arguments have other positions."""
    return not script.names.resolve(call.func).isdisjoint(_OLD_REGIONS)


@rule(
    "AMP602",
    "float16 without a loss scale",
    bad="""
        import torch

        with torch.autocast("cuda", dtype=torch.float16):  # AMP602
            loss = model(batch).mean()
        loss.backward()
        optimizer.step()
    """,
    good="""
        import torch

        scaler = torch.amp.GradScaler()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(batch).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    """,
)
def float16_without_scale(script: Script) -> Iterator[Fault]:
    """float16 rounds positive numbers up to 3e-8 to zero. Gradients that small become zero unless the loss is scaled,
    and their weights are not trained.
    """
    has_disabled_scaler = _has_disabled_scaler(script)
    if "autocast" not in script.text or (_SCALES.search(script.identifiers) and not has_disabled_scaler):
        return
    flow = Flow(script)
    for region in find_regions(script):
        loss = _find_backward(script, region)
        if loss is None or (_is_scaled(script, loss) and not has_disabled_scaler):
            continue
        if script.frame(loss) is script.tree and not any(script.method_calls("step")):
            continue  # a script without steps may only measure the time of a backward pass
        dtypes = dtypes_of(script, flow, region.call)
        if "float16" not in dtypes:
            continue
        message = "a region of float16, and no loss scale: small gradients become zero"
        advice = "Scale the loss by a torch.amp.GradScaler, or use dtype=torch.bfloat16, which needs none."
        if set(dtypes) == {"float16"}:
            yield Fault(region.call, "warning", message, advice)
        else:
            yield Fault(region.call, "note", f"if the dtype is float16: {message}", advice)


def _has_disabled_scaler(script: Script) -> bool:
    """Return whether the script makes GradScalers, and each of them with `enabled=False`."""
    scalers = [call for call in script.calls if function_of(call).endswith("GradScaler")]
    enabled = [argument_of(call, "enabled") for call in scalers]
    return bool(enabled) and all(isinstance(value, ast.Constant) and value.value is False for value in enabled)


def dtypes_of(script: Script, flow: Flow, call: ast.Call) -> list[str]:
    """Return the dtypes that the region of a call of autocast may have: by its argument `dtype`, or else its device.

    "" stands for further dtypes that the script does not show. The list is empty if it shows none.
    """
    dtype = argument_of(call, "dtype", 1)
    if dtype is not None:
        return flow.find_dtypes(dtype)
    if any(keyword.arg is None for keyword in call.keywords):
        return []
    devices = [_OLD_REGIONS[name] for name in script.names.resolve(call.func) if name in _OLD_REGIONS]
    device = argument_of(call, "device_type", 0)
    if not devices and isinstance(device, ast.Constant):
        devices = [str(device.value)]
    return [_DEFAULT_DTYPES[name] for name in devices if name in _DEFAULT_DTYPES]


def _find_backward(script: Script, region: Region) -> ast.expr | None:
    """Return a loss whose `backward()` is called in the function of a region, or where that function is called.

    Returns None if there is none, and for a region in which gradients are disabled.
    """
    if _is_without_gradients(script, region.body) or _has_only_blocks_without_gradients(script, region.body):
        return None
    frames = {script.frame(region.body)}
    function = region.body if isinstance(region.body, ast.FunctionDef) else script.frame(region.body)
    if isinstance(function, ast.FunctionDef):
        if _is_without_gradients(script, function):
            return None
        # the loss may go backward where the function with the region is called
        frames.add(function)
        calls = [call for call in script.calls if function_of(call) == function.name]
        frames |= {script.frame(call) for call in calls if not _is_without_gradients(script, call)}
    for call, loss in script.method_calls("backward"):
        if script.frame(call) in frames and not call.args:
            return loss
    return None


def _is_without_gradients(script: Script, node: ast.AST) -> bool:
    """Return whether a node is, or is in, a `with torch.no_grad():` block or a function decorated with `no_grad`.

    `inference_mode` and `set_grad_enabled(False)` count, too. Blocks outside of the innermost function do not.
    """
    entered: list[ast.expr] = []
    for outer in (node, *(outer for outer, _ in script.around(node))):
        if isinstance(outer, (ast.With, ast.AsyncWith)):
            entered += [item.context_expr for item in outer.items]
        elif isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef)):
            entered += outer.decorator_list
            break
    return any(map(_disables_gradients, entered))


def _disables_gradients(entered: ast.expr) -> bool:
    """Return whether a context manager or a decorator seems to disable gradients."""
    name = text_of(entered.func if isinstance(entered, ast.Call) else entered).rpartition(".")[2]
    mode = argument_of(entered, "mode", 0) if isinstance(entered, ast.Call) else None
    is_constant_false = isinstance(mode, ast.Constant) and not mode.value
    if name == "set_grad_enabled":  # often `set_grad_enabled(phase == "train")`, which enables them in a training
        return is_constant_false
    return name == "no_grad" or (name == "inference_mode" and not is_constant_false)


def _has_only_blocks_without_gradients(script: Script, body: ast.AST) -> bool:
    """Return whether every statement of a region is a `with` block in which gradients are disabled."""
    statements: list[ast.stmt] = getattr(body, "body", [])
    blocks = (ast.With, ast.AsyncWith)
    return bool(statements) and all(
        isinstance(statement, blocks) and _is_without_gradients(script, statement) for statement in statements
    )


def _is_scaled(script: Script, loss: ast.expr) -> bool:
    """Return whether a loss seems to be multiplied by a scale, or is passed to a function or method `scale`."""
    for value in (loss, *script.values_of(text_of(loss))):
        for node in ast.walk(value):
            if isinstance(node, ast.Call) and function_of(node) == "scale":
                return True
            if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult):
                continue
            if _is_scale_factor(node.left) or _is_scale_factor(node.right):
                return True
    return False


def _is_scale_factor(factor: ast.expr) -> bool:
    """Return whether a factor may be a loss scale: a number above 1, or an expression with "scale" in a name."""
    # a number up to 1 is more likely the weight of a term of the loss
    if isinstance(factor, ast.Constant) and isinstance(factor.value, (int, float)) and factor.value > 1:
        return True
    return any("scale" in name.lower() for name in names_in(factor))


@rule(
    "AMP606",
    "a training loop inside one region",
    bad="""
        with torch.autocast("cuda", dtype=torch.bfloat16):  # AMP606
            for batch in loader:
                loss = model(batch).mean()
                loss.backward()
                optimizer.step()
    """,
    good="""
        for batch in loader:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = model(batch).mean()
            loss.backward()
            optimizer.step()
    """,
)
def loops_in_region(script: Script) -> Iterator[Fault]:
    """torch keeps 16-bit copies of the weights until the outermost region ends. Inside it, steps change the weights but
    not the copies, and the loss stands still.
    """
    reported = set[ast.Call]()
    for region in find_regions(script):
        if _is_without_gradients(script, region.body):
            continue
        index = 2 if _is_old(script, region.call) else 3
        cache_enabled = argument_of(region.call, "cache_enabled", index)
        has_no_cache = isinstance(cache_enabled, ast.Constant) and not cache_enabled.value
        if region.call in reported or has_no_cache:
            continue
        if _has_training_loop(script, region.body):
            reported.add(region.call)
            message = "a training loop in one region of autocast: steps do not reach the 16-bit copies of the weights"
            advice = "Put the region inside the loop, around the model and the loss."
            yield Fault(region.call, "warning", message, advice)


def _has_training_loop(script: Script, body: ast.AST) -> bool:
    """Return whether a region has a loop with a step of an optimizer, or calls a function that has such a loop."""
    steps = [call for call, receiver in script.method_calls("step") if _is_step(script, call, receiver)]
    if any(_is_in_loop_within(script, step, body) for step in steps):
        return True
    # with autocast(...): train()
    calls = [call for call in ast.walk(body) if isinstance(call, ast.Call)]
    functions = [node for node in script.nodes if isinstance(node, ast.FunctionDef)]
    return any(
        _may_call(script, call, function) and _is_in_loop_within(script, step, function)
        for function in functions
        for step in steps
        for call in calls
    )


def _may_call(script: Script, call: ast.Call, function: ast.FunctionDef) -> bool:
    """Return whether a call seems to run `function`, a function or method of the script."""
    if function_of(call) != function.name:
        return False
    holder = script.parent(function)
    if not isinstance(call.func, ast.Attribute):
        return not isinstance(holder, ast.ClassDef)
    if not isinstance(holder, ast.ClassDef):
        return False
    if text_of(call.func.value) in ("self", "cls"):
        return any(outer is holder for outer, _ in script.around(call))
    # `inputs.update(...)` is more likely a method of a dict
    return function.name not in dir(dict)


def _is_step(script: Script, call: ast.Call, receiver: ast.expr) -> bool:
    """Return whether a call of a method `step` steps an optimizer: `optimizer.step()`, `scaler.step(optimizer)`."""
    return script.is_optimizer(receiver) or any(script.is_optimizer(argument) for argument in call.args)


def _is_in_loop_within(script: Script, step: ast.AST, body: ast.AST) -> bool:
    """Return whether a step is in a loop inside `body`, a function or block. Functions inside `body` do not count."""
    is_in_loop = False
    for outer, field in script.around(step):
        if outer is body:
            return is_in_loop
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            return False
        is_in_loop = is_in_loop or (isinstance(outer, (ast.For, ast.AsyncFor, ast.While)) and field == "body")
    return False


@rule(
    "AMP607",
    "a backward pass inside the region",
    bad="""
        import torch

        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(batch).mean()
            loss.backward()  # AMP607
        optimizer.step()
    """,
    good="""
        import torch

        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(batch).mean()
        loss.backward()
        optimizer.step()
    """,
)
def goes_backward_in_region(script: Script) -> Iterator[Fault]:
    """Outside of the region, a backward pass runs each op in the dtype of its forward op. Inside the region, autocast
    casts the ops of the backward pass, too. For example, the gradients of a matrix product that ran in float32 are
    computed in 16 bits. torch advises against a backward pass in a region.
    """
    for region in find_regions(script):
        if not isinstance(region.body, (ast.With, ast.AsyncWith)) or _has_training_loop(script, region.body):
            continue
        for call, _ in script.method_calls("backward"):
            around = [outer for outer, _ in script.around(call)]
            if call.args or region.body not in around or script.frame(call) is not script.frame(region.body):
                continue
            message = "the backward pass is inside the region of autocast"
            yield Fault(call, "note", message, "Leave the region before backward().")


_CASTS = ("float", "double", "to", "type")
_LOSSES = re.compile(r"(?:cross_entropy|mse_loss|l1_loss|nll_loss|kl_div|\w*criterion|loss_f\w*|\w*_loss|\w*Loss)$")


@rule(
    "AMP608",
    "a loss outside of the region",
    bad="""
        import torch
        import torch.nn.functional as F

        with torch.autocast("cuda", dtype=torch.bfloat16):
            output = model(batch)
        loss = F.mse_loss(output, target)  # AMP608
        loss.backward()
    """,
    good="""
        import torch
        import torch.nn.functional as F

        with torch.autocast("cuda", dtype=torch.bfloat16):
            output = model(batch)
            loss = F.mse_loss(output, target)
        loss.backward()
    """,
)
def computes_loss_outside(script: Script) -> Iterator[Fault]:
    """A model may return 16-bit outputs. In the region, autocast computes most losses in float32. Outside of it, a loss
    may be computed in the dtype of the outputs: its value is rounded, and sums of squares may overflow in float16.
    """
    for region in find_regions(script):
        body = region.body
        if not isinstance(body, (ast.With, ast.AsyncWith)) or _is_without_gradients(script, body):
            continue
        outputs = {*_find_assigned_outputs(script, body), *_find_returned_outputs(script, body)}
        for call in script.calls:
            if not call.args or not _LOSSES.match(function_of(call)):
                continue
            name = text_of(call.args[0])
            # a function such as log_loss(loss) takes a loss, and computes none
            if name not in outputs or "loss" in name.lower():
                continue
            if _is_output_at(script, name, body, call) and not _is_in_other_region(script, call, body):
                message = f"{name} may be in 16 bits, and the loss is computed outside of the region"
                yield Fault(call, "note", message, "Compute the loss inside the region, or of `output.float()`.")


def _is_output_at(script: Script, name: str, body: ast.With | ast.AsyncWith, call: ast.Call) -> bool:
    """Return whether the value of `name`, where `call` outside of the region uses it, is an output of the region.

    `name` is one of the names that `_find_assigned_outputs` and `_find_returned_outputs` yield.
    """
    values = script.values_of(name)
    if len(values) == 1 and script.frame(call) is not script.frame(body):
        # an attribute holds the output in every function; a local variable, only in the function that assigns it
        return "." in name or script.frame(values[0]) is script.frame(call)
    # a value from elsewhere, such as `output.float()`, may have replaced the output
    has_only_outputs = all(script.parent(value) in body.body for value in values)
    return has_only_outputs and ScalerFlow(script).are_in_order(body, call)


def _is_in_other_region(script: Script, call: ast.Call, body: ast.AST) -> bool:
    """Return whether a call is in a region other than the one with this body."""
    other_bodies = [region.body for region in find_regions(script) if region.body is not body]
    return any(outer in other_bodies for outer, _ in script.around(call))


def _find_assigned_outputs(script: Script, body: ast.With | ast.AsyncWith) -> Iterator[str]:
    """Yield the names to which a statement of the region assigns the result of a call, unless the call is a cast."""
    for target, value in script.assignments:
        if isinstance(value, ast.Call) and script.parent(value) in body.body and function_of(value) not in _CASTS:
            yield target


def _find_returned_outputs(script: Script, body: ast.With | ast.AsyncWith) -> Iterator[str]:
    """Yield the names to which code outside of the region's function assigns the result of that function, if the region
    ends with a return such as `return model(...)`.
    """
    function, last = script.frame(body), body.body[-1]
    returned = last.value if isinstance(last, ast.Return) else None
    if not isinstance(function, ast.FunctionDef) or not isinstance(returned, ast.Call):
        return
    if function_of(returned) in _CASTS or _LOSSES.match(function_of(returned)):
        return
    for target, value in script.assignments:
        if isinstance(value, ast.Call) and function_of(value) == function.name:
            is_own = not isinstance(value.func, ast.Attribute) or text_of(value.func.value) == "self"
            if is_own and script.frame(value) is not function:
                yield target
