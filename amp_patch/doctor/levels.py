"""What a script asks of `initialize`, as far as it is written out: whether losses are scaled, and steps skipped."""

import ast
from collections.abc import Sequence
from dataclasses import dataclass

from .script import Script
from .tree import argument_of

LEVELS = {"O0": False, "O1": True, "O2": True, "O3": False, "O4": False, "O5": False}
"""Whether a level has a dynamic loss scale; those that have none do not scale."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What the calls of `initialize` in view may do: what any of them does at any level that is possible.

    Attributes:
        scales: the loss may be multiplied by something other than 1.
        skips: steps may be skipped after an overflow, since the scale is dynamic.
    """

    scales: bool
    skips: bool


def expect(scripts: Sequence[Script]) -> Expected:
    """Return what the calls of `initialize` in these scripts may do; without any call, everything is possible."""
    expected = [_expect_of(script, call) for script in scripts for call in script.initializations]
    if not expected:
        return Expected(scales=True, skips=True)
    return Expected(any(one.scales for one in expected), any(one.skips for one in expected))


def _expect_of(script: Script, call: ast.Call) -> Expected:
    enabled = _constant(script, argument_of(call, "enabled", 2), True)
    level = _constant(script, argument_of(call, "opt_level", 3), "O1")
    scale = _constant(script, argument_of(call, "loss_scale"), None)
    has_stars = any(isinstance(one, ast.Starred) for one in call.args) or not all(one.arg for one in call.keywords)
    if enabled is False:
        return Expected(scales=False, skips=False)
    if isinstance(scale, (int, float)):
        return Expected(scales=scale != 1, skips=False)
    is_dynamic = scale is not None or has_stars or LEVELS.get(str(level), True)
    return Expected(scales=is_dynamic, skips=is_dynamic)


def _constant(script: Script, node: ast.expr | None, default: object) -> object:
    """Return the value of a constant, or of a name that is assigned one constant in the whole script, or its text."""
    if node is None:
        return default
    if isinstance(node, ast.Name):
        values = script.values_of(node.id)
        is_argument = any(isinstance(one, ast.arg) and one.arg == node.id for one in script.nodes)
        node = values[0] if len(values) == 1 and not is_argument else node
    return node.value if isinstance(node, ast.Constant) else ast.unparse(node)
