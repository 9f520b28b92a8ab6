"""Checks of the arguments of `initialize`: levels, and what contradicts them."""

import ast
from collections.abc import Iterator

from ..config import make_policy
from ..errors import PolicyError, did_you_mean
from .context import Context
from .findings import Fault
from .levels import (
    APEX_LEVELS,
    OVERRIDES,
    UNKNOWN,
    arguments_of,
    destinations,
    is_apex,
    is_written_out,
    known_levels,
    levels_for,
    literal,
    options_read_by,
    presets_in_force,
)
from .script import Script
from .structure import argument_of, text_of


def unknown_levels(context: Context) -> Iterator[Fault]:
    """An opt_level, or a default or choice of the option it comes from, that names no level."""
    script = context.script
    for call in script.initializations:
        arguments = arguments_of(call)
        if "presets" in arguments or "opt_level" not in arguments:
            continue
        node = arguments["opt_level"]
        level = literal(script, node)
        if level is not UNKNOWN:
            yield from _judge_level(node, level, levels_for(script, call))
            continue
        for option in options_read_by(script, node):
            may_be_none = argument_of(option, "default") is None and not _is_required(option)
            if may_be_none and not _mentions(script, call, node):
                message = (
                    "this option has no default: where it is left out, opt_level is None, and initialize raises"
                    " PolicyError"
                )
                fix = 'Give it `default="O1"`, or call initialize only where the option is given.'
                yield Fault(option, "warning", message, fix)
    yield from _levels_offered(script)


def _levels_offered(script: Script) -> Iterator[Fault]:
    is_apexs = bool(script.initializations) and all(is_apex(script, call) for call in script.initializations)
    levels = APEX_LEVELS if is_apexs else known_levels()
    for option, _ in script.method_calls("add_argument"):
        if not any(name.endswith("opt_level") for name in destinations(option)):
            continue
        for keyword in option.keywords:
            value = literal(script, keyword.value)
            if keyword.arg == "default" and isinstance(value, str):
                yield from _judge_level(keyword.value, value, levels)
            elif keyword.arg == "choices" and isinstance(value, list):
                for choice in value:
                    yield from _judge_level(keyword.value, choice, levels)


def _judge_level(node: ast.AST, level: object, levels: tuple[str, ...]) -> Iterator[Fault]:
    if level not in levels:
        problem = f"opt_level {level!r} is not a level.{did_you_mean(level, levels)}"
        yield Fault(node, "error", problem, f"Use one of {', '.join(levels)}.")


def _is_required(option: ast.Call) -> bool:
    is_positional = not any(
        isinstance(value, ast.Constant) and str(value.value).startswith("-") for value in option.args
    )
    return is_positional or argument_of(option, "required") is not None


def _mentions(script: Script, call: ast.Call, node: ast.AST) -> bool:
    """Whether a condition around `call`, or its argument `enabled`, reads `node`."""
    tests = [outer.test for outer in script.structure.around(call) if isinstance(outer, (ast.If, ast.IfExp))]
    others = [value for name, value in arguments_of(call).items() if name == "enabled"]
    return any(text_of(node) in text_of(one) for one in (*tests, *others))


def contradicting_arguments(context: Context) -> Iterator[Fault]:
    """Literal arguments of `initialize` that their level does not allow."""
    for call in context.script.initializations:
        arguments = arguments_of(call)
        given = {name: literal(context.script, arguments[name]) for name in OVERRIDES if name in arguments}
        overrides = {name: value for name, value in given.items() if value is not UNKNOWN}
        level = literal(context.script, arguments["opt_level"]) if "opt_level" in arguments else "O1"
        if level not in levels_for(context.script, call) or "presets" in arguments or not is_written_out(call):
            continue
        try:
            make_policy(level, overrides, presets=presets_in_force()[0])
        except PolicyError as error:
            _, *problems = (line.removeprefix("  - ") for line in str(error).splitlines())
            message = f"initialize refuses these arguments: {'; '.join(problems) or error}"
            yield Fault(call, "error", message, "Change the level or the argument.")
