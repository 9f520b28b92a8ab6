"""Rules of what a script does to models and optimizers around `initialize`."""

import ast
from collections.abc import Iterator

from .rules import Fault, rule
from .script import Script
from .tree import argument_of, names_in, parts_of, text_of


@rule(
    "AMP210",
    "an optimizer made anew after initialize",
    bad="""
        model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
        optimizer = torch.optim.Adam(model.parameters())  # AMP210
    """,
    good="""
        optimizer = torch.optim.Adam(model.parameters())
        model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
    """,
)
def optimizers_made_anew(script: Script) -> Iterator[Fault]:
    """amp knows only the optimizers passed to `initialize`. `scale_loss` raises an error for another one, and at O2 its
    steps change nothing.
    """
    stepped = {text_of(receiver) for _, receiver in script.method_calls("step")}
    given_anywhere: set[str] = set()
    for call in script.initializations:
        given_anywhere.update(text_of(one) for one in parts_of(argument_of(call, "optimizers", 1)))
    for call in script.initializations:
        given = {text_of(one) for one in parts_of(argument_of(call, "optimizers", 1))}
        models = {text_of(one) for one in parts_of(argument_of(call, "models", 0))}
        for name, value in script.assignments:
            if not isinstance(value, ast.Call) or name in names_in(value):
                continue
            params = argument_of(value, "params", 0)
            if params is None or "param" not in text_of(params):
                continue  # whatever makes an optimizer is given parameters
            is_given_again = any(script.is_before(value, other) for other in script.initializations)
            if not script.is_before(call, value) or is_given_again or script.is_without_amp(value):
                continue
            message = ""
            if name in given:
                message = f"{name} is created again after amp.initialize, which was given the old one"
            elif given and name not in given_anywhere and names_in(params) & models and name in stepped:
                message = f"{name} is created after amp.initialize, which was not given it"
            if message:
                yield Fault(value, "error", message, "Make the optimizer first, then call amp.initialize.")
