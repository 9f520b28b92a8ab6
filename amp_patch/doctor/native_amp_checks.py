"""Checks of torch's own mixed precision in a script that uses amp: `torch.autocast` and GradScaler."""

import ast
from collections.abc import Iterator

from .context import Context
from .findings import Fault
from .levels import literal
from .script import Script
from .structure import argument_of

_AUTOCASTS = frozenset({"torch.autocast", "torch.amp.autocast", "torch.cuda.amp.autocast", "torch.cpu.amp.autocast"})

_SCALERS = frozenset(
    {"torch.amp.GradScaler", "torch.cuda.amp.GradScaler", "torch.cpu.amp.GradScaler", "torch.GradScaler"}
)


def native_amp(context: Context) -> Iterator[Fault]:
    """`torch.autocast` or a GradScaler in use together with amp."""
    script = context.script
    if not script.calls_of("amp.initialize", "amp.scale_loss"):
        return
    for call in script.calls:
        names = script.names.resolve(call.func)
        if not names & (_AUTOCASTS | _SCALERS) or _enabled(script, call) is not True or script.is_without_amp(call):
            continue
        if script.has_flag_of_its_own(call) or _is_in_class_of_its_own(script, call):
            continue  # one of several ways to train, as a rule
        if names & _SCALERS:
            message = "a GradScaler beside amp: the loss would be scaled twice, and step() decided upon twice"
            fix = "Use amp.scale_loss, or GradScaler with torch.autocast and no amp.initialize."
            yield Fault(call, "error", message, fix)
        else:
            message = "torch.autocast beside amp: two sets of rules cast the same ops, those of autocast last"
            fix = "Leave autocast out; the op lists of amp_patch decide (lists= takes your own)."
            yield Fault(call, "warning", message, fix)


def _is_in_class_of_its_own(script: Script, call: ast.Call) -> bool:
    """Whether a call stands in a class that does not use amp."""
    classes = [outer for outer in script.structure.around(call) if isinstance(outer, ast.ClassDef)]
    amp = script.calls_of("amp.initialize", "amp.scale_loss")
    return bool(classes) and not any(script.structure.is_inside(one, classes[-1]) for one in amp)


def _enabled(script: Script, call: ast.Call) -> object:
    """Return the value of `enabled=`; True where it is left out."""
    node = argument_of(call, "enabled")
    return True if node is None else literal(script, node)


def autocast_switched_off(context: Context) -> Iterator[Fault]:
    """`torch.autocast(enabled=False)`, which does not turn amp's casts off."""
    script = context.script
    if not context.expected.may_patch:
        return
    for call in script.calls:
        if (
            script.names.resolve(call.func) & _AUTOCASTS
            and _enabled(script, call) is False
            and not script.is_without_amp(call)
        ):
            message = "autocast(enabled=False) does not turn the casts of amp_patch off"
            yield Fault(call, "warning", message, "Use `with amp.disable_casts():`.")
