"""Rules of `amp-patch doctor` about torch.amp.GradScaler."""

import ast
from collections.abc import Iterator

from .flow import Flow
from .precision_checks import find_trainers, may_train_only_float32
from .region_checks import dtypes_of, find_regions
from .rules import Fault, rule
from .scaler_flow import ScalerFlow, grade
from .script import Script
from .tree import argument_of, names_in, text_of


@rule(
    "AMP702",
    "an unscaled loss before scaler.step",
    bad="""
        import torch

        scaler = torch.amp.GradScaler()
        loss.backward()  # AMP702
        scaler.step(optimizer)
        scaler.update()
    """,
    good="""
        import torch

        scaler = torch.amp.GradScaler()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    """,
)
def steps_on_unscaled(script: Script) -> Iterator[Fault]:
    """`scaler.step` divides the gradients by the loss scale. Gradients of a loss that was not scaled become almost
    zero. Without any call of `scaler.scale`, `scaler.step` raises AssertionError: "_scale is None".
    """
    flow = ScalerFlow(script)
    if not flow.is_used:
        return
    for loss in flow.plain_backwards:
        if any(_divides_unscaled(script, flow, loss, step) for step in flow.steps):
            message = f"{text_of(loss.func).removesuffix('.backward')} goes backward without a scale"
            message += ", and scaler.step divides its gradients by the scale"
            yield Fault(loss, grade(flow), message, "Write `scaler.scale(loss).backward()`.")


def _divides_unscaled(script: Script, flow: ScalerFlow, loss: ast.Call, step: ast.Call) -> bool:
    """Return whether `scaler.step` seems to use gradients of an unscaled loss whenever the GradScaler is enabled."""
    if not flow.are_in_order(loss, step) or not flow.surely_runs(loss, step):
        return False
    if flow.may_be_without_scale(loss, step) or flow.may_be_without_scale(step, loss):
        return False
    # another step may have used the gradients already, or a call may have zeroed them
    if any(flow.between([*flow.plain_steps, *flow.steps, *flow.zeroings], loss, step)):
        return False
    # a backward pass in another loop is usually no part of the training that `step` belongs to
    return script.loop_around(loss) is script.loop_around(step)


@rule(
    "AMP703",
    "a step on scaled gradients",
    bad="""
        import torch

        scaler = torch.amp.GradScaler()
        scaler.scale(loss).backward()
        optimizer.step()  # AMP703
        scaler.update()
    """,
    good="""
        import torch

        scaler = torch.amp.GradScaler()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    """,
)
def steps_on_scaled(script: Script) -> Iterator[Fault]:
    """Only the scaler divides gradients by the loss scale, and leaves a step out after an overflow. The optimizer's
    own step uses gradients that are still multiplied by the scale (65536 at first), and may be inf.
    """
    flow = ScalerFlow(script)
    if not flow.is_used:
        return
    for step in flow.plain_steps:
        if _is_in_scaler_class(script, step):
            continue
        if any(_uses_scaled(flow, loss, step) for loss in flow.scaled_backwards):
            message = f"{text_of(step.func)}() uses gradients that are multiplied by the loss scale"
            yield Fault(step, grade(flow), message, f"Write `scaler.step({text_of(step.func).rpartition('.')[0]})`.")


def _uses_scaled(flow: ScalerFlow, loss: ast.Call, step: ast.Call) -> bool:
    """Return whether `optimizer.step()` seems to use gradients of a scaled loss whenever the GradScaler is enabled."""
    if not flow.are_in_order(loss, step) or not flow.surely_runs(loss, step):
        return False
    if flow.may_unscale_between(loss, step) or flow.may_be_without_scale(step, loss):
        return False
    # after one of these calls, the step may use other gradients
    replacing = [*flow.plain_backwards, *flow.steps, *flow.updates, *flow.zeroings]
    return not any(flow.between(replacing, loss, step))


def _is_in_scaler_class(script: Script, step: ast.Call) -> bool:
    """Return whether a step is in a class with "scaler" in its name, which probably unscales the gradients itself."""
    around = (outer for outer, _ in script.around(step))
    return any(isinstance(outer, ast.ClassDef) and "scaler" in outer.name.lower() for outer in around)


@rule(
    "AMP704",
    "unscale_ twice before a step",
    bad="""
        import torch

        scaler = torch.amp.GradScaler()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        log(norm_of(model))
        scaler.unscale_(optimizer)  # AMP704
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    """,
    good="""
        import torch

        scaler = torch.amp.GradScaler()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        log(norm_of(model))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    """,
)
def unscales_twice(script: Script) -> Iterator[Fault]:
    """The second call raises RuntimeError: "unscale_() has already been called on this optimizer since the last
    update()". Under gradient accumulation, call it only in iterations that step.
    """
    flow = ScalerFlow(script)
    if not flow.is_used:
        return
    for second in flow.unscales:
        updates = [call for call in flow.updates if script.frame(call) is script.frame(second)]
        if updates and all(flow.is_rarer(update, second) for update in updates):
            message = f"{text_of(second)} runs in each iteration, and scaler.update() only in some"
            advice = "Call it in the same `if` as scaler.step, before the clipping."
            yield Fault(second, grade(flow), f"{message}: this raises RuntimeError", advice)
            continue
        for first in flow.unscales:
            if text_of(first) != text_of(second) or not flow.are_in_order(first, second):
                continue
            if flow.surely_runs(first, second) and not any(flow.between(flow.updates, first, second)):
                message = f"{text_of(second)} is called a second time before scaler.update(): this raises RuntimeError"
                yield Fault(second, grade(flow), message, "Call it once per step, after the last backward pass.")
                break


@rule(
    "AMP707",
    "float16 weights under a GradScaler",
    bad="""
        import torch

        model = Net().half()
        optimizer = torch.optim.AdamW(model.parameters())
        scaler = torch.amp.GradScaler()
        scaler.scale(model(batch).mean()).backward()
        scaler.step(optimizer)  # AMP707
        scaler.update()
    """,
    good="""
        import torch

        model = Net()
        optimizer = torch.optim.AdamW(model.parameters())
        scaler = torch.amp.GradScaler()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(batch).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    """,
)
def unscales_low_weights(script: Script) -> Iterator[Fault]:
    """GradScaler refuses gradients in float16: "Attempting to unscale FP16 gradients". Only the step of a fused
    optimizer takes them. Keep the weights in float32; torch.autocast casts them for the ops that gain from 16 bits.
    """
    flow = ScalerFlow(script)
    if not flow.is_used or not (flow.steps or flow.unscales):
        return
    if not flow.unscales and any(_may_be_fused(script, step.args[0]) for step in flow.steps):
        return
    values = Flow(script)
    first = min([*flow.unscales, *flow.steps], key=lambda call: call.lineno)
    for _, trainer, models in find_trainers(script):
        for model in models:
            verdict = values.judge(model, trainer)
            if verdict is None or verdict.dtype != "float16" or not verdict.is_certain:
                continue
            if may_train_only_float32(script, values, model):
                continue
            line, _ = script.location_of(verdict.node)
            message = f"{text_of(model)} has float16 weights (line {line}), whose gradients GradScaler refuses"
            advice = "Keep the weights in float32 and use torch.autocast, or cast the trained ones back by .float()."
            yield Fault(first, grade(flow), message, advice)
            return


def _may_be_fused(script: Script, optimizer: ast.expr) -> bool:
    """Return whether an optimizer is made with the argument `fused`, whose value may be true."""
    for value in script.values_of(text_of(optimizer)):
        fused = argument_of(value, "fused") if isinstance(value, ast.Call) else None
        if fused is not None and not (isinstance(fused, ast.Constant) and not fused.value):
            return True
    return False


@rule(
    "AMP708",
    "gradients zeroed before scaler.step",
    bad="""
        import torch

        scaler = torch.amp.GradScaler()
        scaler.scale(loss).backward()
        optimizer.zero_grad()  # AMP708
        scaler.step(optimizer)
        scaler.update()
    """,
    good="""
        import torch

        scaler = torch.amp.GradScaler()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    """,
)
def zeroes_before_step(script: Script) -> Iterator[Fault]:
    """Without gradients, `scaler.step` raises AssertionError: "No inf checks were recorded for this optimizer". If the
    optimizer is fused, `scaler.update` raises an error instead. With `set_to_none=False`, the step uses zeros, and
    nothing raises. The AssertionError also appears if the loss does not depend on the parameters of the optimizer.
    """
    flow = ScalerFlow(script)
    if not flow.is_used:
        return
    for zeroing in flow.zeroings:
        owner = text_of(zeroing.func).rpartition(".")[0]  # an optimizer or a model
        for step in flow.steps:
            if _holds_parameters_of(script, step.args[0], owner) and _loses_gradients(flow, zeroing, step):
                message = f"{owner}.zero_grad() removes the gradients that {text_of(step)} needs"
                yield Fault(zeroing, grade(flow), message, "Call it before the backward pass, or after the step.")
                break


def _holds_parameters_of(script: Script, optimizer: ast.expr, owner: str) -> bool:
    """Return whether `owner` is the optimizer, or a model whose parameters the optimizer was made with."""
    if text_of(optimizer) == owner:
        return True
    values = script.values_of(text_of(optimizer))
    return any(f"{owner}.parameters" in names_in(value) for value in values)


def _loses_gradients(flow: ScalerFlow, zeroing: ast.Call, step: ast.Call) -> bool:
    """Return whether `scaler.step` finds no gradients, because `zero_grad` runs after the backward pass."""
    loss = flow.find_only_loss(zeroing, step)
    # a step or `unscale_` before the zeroing has recorded the checks, so torch does not raise the error
    return loss is not None and not any(flow.between([*flow.steps, *flow.unscales], loss, zeroing))


# ---- notes -----------------------------------------------------------------------------------------------------------


@rule(
    "AMP709",
    "a GradScaler for bfloat16",
    bad="""
        import torch

        scaler = torch.amp.GradScaler()  # AMP709
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(batch).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    """,
    good="""
        import torch

        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(batch).mean()
        loss.backward()
        optimizer.step()
    """,
)
def scales_bfloat16(script: Script) -> Iterator[Fault]:
    """bfloat16 has the range of float32, so its gradients need no scale. A GradScaler makes each step wait for the
    device, unless the optimizer is fused, and may skip steps whose gradients would fit without a scale.
    """
    flow = ScalerFlow(script)
    if not flow.is_used or not flow.is_always_enabled or not flow.scaled_backwards:
        return
    values = Flow(script)
    regions = list(find_regions(script))
    dtypes = [dtype for region in regions for dtype in dtypes_of(script, values, region.call) or [""]]
    if dtypes and set(dtypes) == {"bfloat16"}:
        message = "every region is bfloat16, whose gradients need no scale"
        yield Fault(flow.makers[0], "note", message, "Leave the GradScaler out, or pass enabled=False.")


@rule(
    "AMP710",
    "a scheduler that counts skipped steps",
    bad="""
        import torch

        scaler = torch.amp.GradScaler()
        for batch in loader:
            scaler.scale(loss_of(batch)).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()  # AMP710
    """,
    good="""
        import torch

        scaler = torch.amp.GradScaler()
        for batch in loader:
            scaler.scale(loss_of(batch)).backward()
            scaler.step(optimizer)
            scale = scaler.get_scale()
            scaler.update()
            if scaler.get_scale() >= scale:
                scheduler.step()
    """,
)
def schedules_skipped_steps(script: Script) -> Iterator[Fault]:
    """GradScaler often skips the first steps, until its scale fits. A scheduler that counts them is a few steps ahead.
    If the first step is skipped, torch warns: "Detected call of lr_scheduler.step() before optimizer.step()". The
    difference matters in short schedules.
    """
    flow = ScalerFlow(script)
    if not flow.is_used or "get_scale" in script.text or "step_was_skipped" in script.text:
        return
    for call, receiver in script.method_calls("step"):
        # with an argument, an epoch or a metric decides on the learning rate, and not the number of calls
        if "sched" not in text_of(receiver).lower() or call.args or call.keywords:
            continue
        for step in flow.steps:
            loop = script.loop_around(step)
            if loop is None or loop is not script.loop_around(call) or not flow.are_in_order(step, call):
                continue
            message = "the scheduler also counts steps that the GradScaler skips"
            yield Fault(call, "note", message, "Call it only if scaler.get_scale() has not fallen in scaler.update().")
            return
