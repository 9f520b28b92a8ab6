"""Checks of which optimizers `initialize` is given."""

import ast
from collections.abc import Iterator

from .context import Context, scaled_optimizers
from .findings import Fault
from .levels import is_written_out
from .script import Script
from .structure import names_in, position, text_of


def unseen_optimizers(context: Context) -> Iterator[Fault]:
    """An optimizer for `scale_loss` that `initialize` has not been given, or that is made anew after it."""
    script = context.script
    calls = script.initializations
    if calls and all(is_written_out(call) and not list(context.optimizers(call)) for call in calls):
        for scaling in script.calls_of("amp.scale_loss"):
            if scaled_optimizers(scaling):
                message = "no call of amp.initialize is given this optimizer, so scale_loss raises OptimizerError"
                fix = "Pass the optimizer: model, optimizer = amp.initialize(model, optimizer, ...)."
                yield Fault(scaling, "error", message, fix)
    seen = {text_of(optimizer) for call in calls for optimizer in context.optimizers(call)}
    for target, value, statement in script.assignments:
        if target not in seen or not _makes_optimizer(script, value):
            continue
        before = any(script.structure.is_before(call, statement) for call in calls)
        again = any(
            position(call) > position(statement) and target in map(text_of, context.optimizers(call)) for call in calls
        )
        if before and not again and not script.is_without_amp(statement) and target not in names_in(value):
            message = (
                f"{target} is made anew after amp.initialize, so amp does not know it and scale_loss raises"
                " OptimizerError"
            )
            fix = "Make the optimizer before amp.initialize, or call initialize again with it."
            yield Fault(statement, "error", message, fix)


def _makes_optimizer(script: Script, value: ast.AST) -> bool:
    """Whether a value is a call of one of torch's or Apex's optimizers, or of anything with `optim` in its name."""
    if not isinstance(value, ast.Call):
        return False
    is_known = any(name.startswith(("torch.optim.", "apex.optimizers.")) for name in script.names.resolve(value.func))
    return is_known or "optim" in text_of(value.func).rpartition(".")[2].lower()
