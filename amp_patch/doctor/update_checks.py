"""Rules of the doctor about `scaler.update`."""

import ast
from collections.abc import Iterator

from .rules import Fault, rule
from .scaler_flow import ScalerFlow, grade
from .script import Script
from .tree import function_of, names_in, text_of

_UPDATE = "Call scaler.update() once per iteration, after the scaler.step of every optimizer."


@rule(
    "AMP705",
    "no scaler.update",
    bad="""
        import torch

        scaler = torch.amp.GradScaler()
        for batch in loader:
            scaler.scale(loss_of(batch)).backward()
            scaler.step(optimizer)  # AMP705
    """,
    good="""
        import torch

        scaler = torch.amp.GradScaler()
        for batch in loader:
            scaler.scale(loss_of(batch)).backward()
            scaler.step(optimizer)
            scaler.update()
    """,
)
def never_updates(script: Script) -> Iterator[Fault]:
    """Without `scaler.update`, the second step of an optimizer raises RuntimeError: "step() has already been called
    since the last update()".
    """
    flow = ScalerFlow(script)
    if not flow.is_used or not flow.makers or not flow.steps or flow.updates:
        return
    if any(function_of(call) == "update" and not call.args for call in script.calls):
        return
    # a function that gets the scaler as an argument may update it
    step = flow.steps[0]
    scaler = step.func.value if isinstance(step.func, ast.Attribute) else step
    if any(text_of(scaler) in names_in(argument) for call in script.calls for argument in _arguments_of(call)):
        return
    is_kept_here = isinstance(scaler, ast.Name) or text_of(scaler).startswith("self.")
    # for a scaler in an attribute, the loop may be in another method
    if is_kept_here and (script.is_in_loop(step) or isinstance(scaler, ast.Attribute)):
        message = "nothing calls scaler.update(): the second step raises RuntimeError"
        yield Fault(step, grade(flow), message, "Call scaler.update() after scaler.step, once per iteration.")


def _arguments_of(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]


@rule(
    "AMP706",
    "scaler.update between a loss and its step",
    bad="""
        import torch

        scaler = torch.amp.GradScaler()
        scaler.scale(loss_a + loss_b).backward()
        scaler.step(optimizer_a)
        scaler.update()
        scaler.step(optimizer_b)  # AMP706
        scaler.update()
    """,
    good="""
        import torch

        scaler = torch.amp.GradScaler()
        scaler.scale(loss_a + loss_b).backward()
        scaler.step(optimizer_a)
        scaler.step(optimizer_b)
        scaler.update()
    """,
)
def updates_too_early(script: Script) -> Iterator[Fault]:
    """`scaler.update` may change the scale, by default to its half or double. A later `scaler.step` may then divide
    gradients by a scale that they were not multiplied by. And `update` forgets an `unscale_`: the step unscales the
    gradients a second time.
    """
    flow = ScalerFlow(script)
    if not flow.is_used:
        return
    for step in flow.steps:
        if _updates_for_each_optimizer(script, flow, step):
            message = (
                "scaler.update() runs in the loop over optimizers: the scale may change before the next scaler.step"
            )
            yield Fault(step, "warning", message, _UPDATE)
        elif _follows_update(flow, step):
            message = "the scale may have changed since the backward pass: scaler.update() comes before this step"
            yield Fault(step, "warning", message, _UPDATE)


def _follows_update(flow: ScalerFlow, step: ast.Call) -> bool:
    """Return whether `scaler.update` runs between a step and the backward pass that gave the step its gradients."""
    update = next((call for call in reversed(flow.updates) if flow.are_in_order(call, step)), None)
    loss = None if update is None else flow.find_only_loss(update, step)
    if update is None or loss is None:
        return False
    # if the optimizer also steps before the update, its second step may use gradients that the script set by hand
    steps_before = {text_of(call) for call in flow.between(flow.steps, loss, update)}
    return text_of(step) not in steps_before


def _updates_for_each_optimizer(script: Script, flow: ScalerFlow, step: ast.Call) -> bool:
    """Return whether a step is in a loop over optimizers that also calls `scaler.update`.

    The backward pass must be before the loop. A loop that contains a backward pass does not count.
    """
    loop = script.loop_around(step)
    if not isinstance(loop, (ast.For, ast.AsyncFor)) or not names_in(step.args[0]) & names_in(loop.target):
        return False
    inside = set(ast.walk(loop))
    scaled = flow.scaled_backwards_and_callers
    has_update = any(update in inside for update in flow.updates)
    has_loss = any(loss in inside for loss in (*scaled, *flow.plain_backwards))
    return has_update and not has_loss and any(flow.are_in_order(loss, loop) for loss in scaled)


@rule(
    "AMP712",
    "scaler.update without scaler.step",
    bad="""
        import torch

        scaler = torch.amp.GradScaler()
        for i, batch in enumerate(loader):
            scaler.scale(loss_of(batch) / 4).backward()
            if (i + 1) % 4 == 0:
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()  # AMP712
    """,
    good="""
        import torch

        scaler = torch.amp.GradScaler()
        for i, batch in enumerate(loader):
            scaler.scale(loss_of(batch) / 4).backward()
            if (i + 1) % 4 == 0:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    """,
)
def updates_without_step(script: Script) -> Iterator[Fault]:
    """`scaler.update` raises AssertionError: "No inf checks were recorded prior to update", if no step or `unscale_`
    has checked gradients since the last update.
    """
    flow = ScalerFlow(script)
    if not flow.is_used:
        return
    for update in flow.updates:
        if update.args or update.keywords:
            continue  # update(new_scale) sets the scale, and needs no checked gradients
        steps = [call for call in flow.steps if script.frame(call) is script.frame(update)]
        has_check = any(script.frame(call) is script.frame(update) for call in flow.unscales)
        if steps and not has_check and all(flow.is_rarer(step, update) for step in steps):
            message = "scaler.update() runs in each iteration, and scaler.step only in some: this raises AssertionError"
            yield Fault(update, grade(flow), message, "Call it in the same `if` as scaler.step.")
