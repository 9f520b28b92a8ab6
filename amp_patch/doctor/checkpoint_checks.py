"""Rules of `amp-patch doctor` about the state of amp, and of a GradScaler, in checkpoints."""

import ast
from collections.abc import Iterator

from .rules import Fault, Severity, rule
from .scaler_flow import ScalerFlow
from .script import Script
from .tree import function_of, text_of


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
def saves_without_amp(script: Script) -> Iterator[Fault]:
    """A run resumed without its loss scale starts at the initial scale, and may skip steps until the scale fits."""
    # without a call such as torch.save, the state may serve another purpose than a checkpoint
    if any("save" in function_of(call) for call in script.calls):
        call = _find_call_without_amp(script, "state_dict")
        if call is not None:
            message = "the checkpoint has the optimizer's state but not amp's: a resumed run may skip steps"
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
def loads_without_amp(script: Script) -> Iterator[Fault]:
    """A run resumed without its loss scale starts at the initial scale, and may skip steps until the scale fits."""
    call = _find_call_without_amp(script, "load_state_dict")
    if call is not None:
        message = "the optimizer's state is loaded but not amp's: the run may skip steps until its loss scale fits"
        yield Fault(call, "warning", message, 'Call `amp.load_state_dict(checkpoint["amp"])` after amp.initialize.')


def _find_call_without_amp(script: Script, method: str) -> ast.Call | None:
    """Return the first call of an optimizer's `method` in a script that does not save or load amp's loss scale.

    `method` is "state_dict" or "load_state_dict". A script saves or loads the loss scale if it calls amp's function of
    the same name, or reads `loss_scalers`. Returns None if the script does so, if no optimizer's `method` is called, if
    the script does not train with amp, or if the loss scale is not dynamic.
    """
    keeps_scale = bool(script.calls_of(f"amp.{method}")) or "loss_scalers" in script.text
    is_training = bool(script.initializations or script.blocks)
    if keeps_scale or not is_training or not script.uses_amp or not script.expected.skips:
        return None
    if any(function_of(call).startswith("FP16_Optimizer") for call in script.calls):
        return None  # Apex's FP16_Optimizer has a loss scale of its own in its state
    for call, receiver in script.method_calls(method):
        if not script.is_optimizer(receiver) or script.is_without_amp(call):
            continue
        frame = script.frame(call)
        if isinstance(frame, ast.FunctionDef) and frame.name == method:
            continue  # the class of a wrapper: its `state_dict` calls the one of the wrapped optimizer
        values = script.values_of(text_of(receiver))
        # an object that was loaded from a file is not an optimizer of this run
        if not any(isinstance(value, ast.Call) and function_of(value) == "load" for value in values):
            return call
    return None


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
def state_before_initialize(script: Script) -> Iterator[Fault]:
    """amp has no state before `initialize`, so the call raises SessionError. Often only a resumed run has this call."""
    for call in script.calls_of("amp.load_state_dict", "amp.state_dict"):
        is_after = any(script.is_before(initialization, call) for initialization in script.initializations)
        is_before = any(script.is_before(call, initialization) for initialization in script.initializations)
        # in a loop, `initialize` may have been called in an earlier iteration
        if is_before and not is_after and not script.is_in_loop(call):
            message = "amp has no state before amp.initialize: this raises SessionError"
            advice = "Call amp.initialize first, then load the model's, the optimizer's and amp's state."
            yield Fault(call, "error", message, advice)


@rule(
    "AMP504",
    "a checkpoint without the GradScaler's state",
    bad="""
        import torch

        scaler = torch.amp.GradScaler()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)  # AMP504
    """,
    good="""
        import torch

        scaler = torch.amp.GradScaler()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
        torch.save(state, path)
    """,
)
def saves_without_scaler(script: Script) -> Iterator[Fault]:
    """A run resumed without its loss scale starts at the initial scale, and may skip steps until the scale fits."""
    if any("save" in function_of(call) for call in script.calls):
        call = _find_call_without_scaler(script, "state_dict")
        if call is not None:
            message = "the checkpoint has the optimizer's state but not the GradScaler's: a resumed run may skip steps"
            yield Fault(call, _grade(script), message, 'Save `"scaler": scaler.state_dict()` as well.')


@rule(
    "AMP505",
    "a checkpoint loaded without the GradScaler's state",
    bad="""
        import torch

        scaler = torch.amp.GradScaler()
        optimizer.load_state_dict(torch.load(path)["optimizer"])  # AMP505
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    """,
    good="""
        import torch

        scaler = torch.amp.GradScaler()
        checkpoint = torch.load(path)
        optimizer.load_state_dict(checkpoint["optimizer"])
        scaler.load_state_dict(checkpoint["scaler"])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    """,
)
def loads_without_scaler(script: Script) -> Iterator[Fault]:
    """A run resumed without its loss scale starts at the initial scale, and may skip steps until the scale fits."""
    call = _find_call_without_scaler(script, "load_state_dict")
    if call is not None:
        message = (
            "the optimizer's state is loaded but not the GradScaler's: the run may skip steps until its scale fits"
        )
        yield Fault(call, _grade(script), message, 'Call `scaler.load_state_dict(checkpoint["scaler"])` as well.')


def _grade(script: Script) -> Severity:
    """Return "warning" if the GradScaler is surely enabled, else "note": a disabled one has no state to save."""
    return "warning" if ScalerFlow(script).is_always_enabled else "note"


def _find_call_without_scaler(script: Script, method: str) -> ast.Call | None:
    """Return the first call of an optimizer's `method`, if the script does not call the GradScaler's `method`.

    `method` is "state_dict" or "load_state_dict". Returns None if the script may call the GradScaler's `method`, or if
    it does not call the `method` of an optimizer that a GradScaler steps.
    """
    flow = ScalerFlow(script)
    if not flow.is_used or not flow.makers or not flow.steps:
        return None
    if any(flow.is_scaler(receiver) for _, receiver in script.method_calls(method)):
        return None
    stepped = {text_of(step.args[0]) for step in flow.steps}
    # a function that is given the scaler may save or load its state
    passed = {text_of(argument) for call in script.calls for argument in call.args if call not in flow.steps}
    if any("scaler" in text.lower() and "." not in text for text in passed):
        return None
    for call, receiver in script.method_calls(method):
        # `a.load_state_dict(b.state_dict())` copies a state, and loads no checkpoint
        is_copy = any(isinstance(value, ast.Call) and function_of(value) == "state_dict" for value in call.args)
        if text_of(receiver) in stepped and not is_copy:
            return call
    return None
