"""Rules of torch's own mixed precision in a script that uses amp, and of losses that 16 bits are too few for."""

import ast
from collections.abc import Iterator

from . import edits
from .blocks import get_switch
from .context import Context
from .findings import Edits, Fault
from .levels import is_apex
from .names import AUTOCASTS, SCALERS
from .rules import rule
from .script import Script
from .structure import text_of

_BCE = ("torch.nn.functional.binary_cross_entropy", "torch.nn.BCELoss")


@rule(
    "AMP307",
    "torch.autocast or a GradScaler beside amp",
    bad="""
        scaler = torch.amp.GradScaler()  # AMP307
        with torch.autocast("cuda"):  # AMP307
            loss = F.mse_loss(model(images), target)
    """,
    good="""
        scaler = torch.amp.GradScaler(enabled=False)
        loss = F.mse_loss(model(images), target)
    """,
    mends=True,
)
def native_amp(context: Context) -> Iterator[Fault]:
    """Two sets of rules would cast the same ops, autocast's last, and two scalers decide upon the same steps."""
    script = context.script
    if not script.calls_of("amp.initialize", "amp.scale_loss") or not context.expected.levels:
        return
    expected = context.expected
    beside = (*(AUTOCASTS if expected.may_patch else ()), *(SCALERS if expected.may_scale else ()))
    for call in script.calls_of(*beside):
        switch, is_enabled = get_switch(script, call)
        if is_enabled is not True or script.is_without_amp(call):
            continue
        if script.has_flag_of_its_own(call) or _is_in_class_of_its_own(script, call):
            continue  # one of several ways to train, as a rule
        if script.is_call_of(call, SCALERS):
            message = "a GradScaler beside amp: the loss would be scaled twice, and step() decided upon twice"
            advice = "Use amp.scale_loss and take the GradScaler out, or switch it off by enabled=False."
            off = (
                edits.replace(script, switch, "False") if switch else edits.add_argument(script, call, "enabled=False")
            )
            yield Fault(call, "error", message, advice, off if context.is_beside_amp(call) else ())
        else:
            message = "torch.autocast beside amp: two sets of rules cast the same ops, those of autocast last"
            advice = "Leave autocast out; the op lists decide (lists= takes your own)."
            is_sure = context.is_beside_amp(call) and context.is_amp_on(call)
            yield Fault(call, "warning", message, advice, _take_out(script, call) if is_sure else ())


def _take_out(script: Script, call: ast.Call) -> Edits:
    """Take a call out of the `with` that it opens."""
    item = script.structure.parent(call)
    block = script.structure.parent(item) if isinstance(item, ast.withitem) and item.optional_vars is None else None
    if not isinstance(item, ast.withitem) or not isinstance(block, (ast.With, ast.AsyncWith)):
        return ()
    return edits.unwrap(script, block, item)


def _is_in_class_of_its_own(script: Script, call: ast.Call) -> bool:
    """Whether a call stands in a class that does not use amp."""
    classes = [outer for outer in script.structure.around(call) if isinstance(outer, ast.ClassDef)]
    amp = script.calls_of("amp.initialize", "amp.scale_loss")
    return bool(classes) and not any(script.structure.is_inside(one, classes[-1]) for one in amp)


@rule(
    "AMP308",
    "autocast(enabled=False) to turn casts off",
    bad="""
        with torch.autocast("cuda", enabled=False):  # AMP308
            loss = F.mse_loss(output, target)
    """,
    good="""
        with amp.disable_casts():
            loss = F.mse_loss(output, target)
    """,
    mends=True,
)
def autocast_switched_off(context: Context) -> Iterator[Fault]:
    """It switches torch's own casts off; those of amp go on."""
    script = context.script
    for call in script.calls_of(*AUTOCASTS) if context.expected.may_patch else ():
        if get_switch(script, call)[1] is False and not script.is_without_amp(call):
            amp = context.find_amp(call)
            is_block = isinstance(script.structure.parent(call), ast.withitem)
            is_sure = amp and is_block and context.is_beside_amp(call) and context.is_amp_on(call)
            change = edits.replace(script, call, f"{amp}.disable_casts()") if is_sure else ()
            message = "autocast(enabled=False) does not turn the casts of amp off"
            yield Fault(call, "warning", message, "Use `with amp.disable_casts():`.", change)


@rule(
    "AMP402",
    "a loss on probabilities",
    bad="loss = F.binary_cross_entropy(torch.sigmoid(output), target)  # AMP402",
    good="loss = F.binary_cross_entropy_with_logits(output, target)",
)
def probability_losses(context: Context) -> Iterator[Fault]:
    """16 bits round probabilities near 0 and 1 to 0 and 1, where the loss is infinite and gradients are 0."""
    script = context.script
    for call in script.calls_of(*_BCE) if context.expected.may_use_low else ():
        first = call.args[0].func if call.args and isinstance(call.args[0], ast.Call) else None
        is_widened = isinstance(first, ast.Attribute) and first.attr in ("float", "double")
        if not is_widened and not script.is_without_amp(call):
            by_apex = any(is_apex(script, one) for one in script.initializations)
            message = f"{text_of(call.func)} takes probabilities, which 16 bits round to 0 and 1"
            message += "; Apex's list bans it" if by_apex else ""
            advice = "Leave the sigmoid out and use F.binary_cross_entropy_with_logits or nn.BCEWithLogitsLoss."
            yield Fault(call, "warning", message, advice)
