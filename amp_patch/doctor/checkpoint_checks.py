"""Checks of checkpoints: the state of amp belongs to them, and is loaded after `initialize`."""

import ast
from collections.abc import Iterator

from .context import Context
from .findings import Fault
from .script import Script
from .structure import text_of


def saves_without_amp(context: Context) -> Iterator[Fault]:
    """An optimizer's state is saved, amp's is not."""
    script = context.script
    if not script.uses_amp or not context.expected.may_skip or _touches(script, "amp.state_dict"):
        return
    if not any("save" in text_of(call.func).rpartition(".")[2].lower() for call in script.calls):
        return
    for call, receiver in script.method_calls("state_dict"):
        if context.is_optimizer(receiver) and not script.is_without_amp(call):
            message = (
                "the checkpoint has the optimizer's state but not amp's: a resumed run starts from the first loss scale"
                " and skips steps"
            )
            yield Fault(call, "warning", message, 'Save `"amp": amp.state_dict()` as well.')
            return


def loads_without_amp(context: Context) -> Iterator[Fault]:
    """An optimizer's state is loaded, amp's is not."""
    script = context.script
    if not script.uses_amp or not context.expected.may_skip or _touches(script, "amp.load_state_dict"):
        return
    for call, receiver in script.method_calls("load_state_dict"):
        if context.is_optimizer(receiver) and not script.is_without_amp(call):
            message = (
                "the optimizer's state is loaded but not amp's: the run starts from the first loss scale and skips"
                " steps"
            )
            yield Fault(call, "warning", message, 'Call `amp.load_state_dict(checkpoint["amp"])` after amp.initialize.')
            return


def state_before_initialize(context: Context) -> Iterator[Fault]:
    """amp's state is asked for or loaded before `initialize`."""
    script = context.script
    for call in script.calls_of("amp.load_state_dict", "amp.state_dict"):
        before = [one for one in script.initializations if script.structure.is_before(one, call)]
        after = [one for one in script.initializations if script.structure.is_before(call, one)]
        if after and not before and script.structure.loop(call) is None:
            message = "amp has no state before amp.initialize: this raises SessionError"
            yield Fault(
                call,
                "error",
                message,
                "Call amp.initialize first, then load the model's, the optimizer's and amp's state.",
            )


def _touches(script: Script, function: str) -> bool:
    """Whether a script calls a function of amp, or reads the loss scalers themselves."""
    return bool(script.calls_of(function)) or any(
        isinstance(node, ast.Attribute) and node.attr == "loss_scalers" for node in script.nodes
    )
