"""What a script asks of `initialize`: literal arguments, the levels they may mean, and what those levels do."""

import ast
import inspect
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ..api import initialize
from ..config import Policy, make_policy, presets, shipped
from ..dtypes import LOW_DTYPES
from ..errors import PolicyError
from .script import Script
from .structure import argument_of, text_of

_PARAMETERS = tuple(inspect.signature(initialize).parameters)
APEX_LEVELS = ("O0", "O1", "O2", "O3")
OVERRIDES = tuple(name for name in _PARAMETERS if name in Policy.get_overrides())


class _Unknown:
    """The value of an expression that only a run could tell."""


UNKNOWN = _Unknown()


def literal(script: Script, node: ast.AST) -> Any:
    """Return the value of a literal or of a name assigned once, or the name of a torch dtype; else `UNKNOWN`."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, (ast.List, ast.Tuple)):
        items = [literal(script, item) for item in node.elts]
        return UNKNOWN if UNKNOWN in items else items
    if isinstance(node, ast.Dict):
        keys = [UNKNOWN if key is None else literal(script, key) for key in node.keys]
        values = [literal(script, value) for value in node.values]
        is_known = all(isinstance(key, str) for key in keys) and UNKNOWN not in values
        return dict(zip(keys, values, strict=True)) if is_known else UNKNOWN
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = literal(script, node.operand)
        return -value if isinstance(value, (int, float)) else UNKNOWN
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Pow, ast.Mult)):
        left, right = literal(script, node.left), literal(script, node.right)
        if not (
            isinstance(left, (int, float)) and isinstance(right, (int, float)) and abs(left) < 1e9 and abs(right) <= 64
        ):
            return UNKNOWN
        return left * right if isinstance(node.op, ast.Mult) else float(left) ** right if left else UNKNOWN
    dtypes = [
        name
        for name in script.names.resolve(node)
        if isinstance(getattr(torch, name.removeprefix("torch."), None), torch.dtype)
    ]
    if dtypes:
        return dtypes[0]
    value = script.constant(node.id) if isinstance(node, ast.Name) else None
    return UNKNOWN if value is None or isinstance(value, ast.Name) else literal(script, value)


def arguments_of(call: ast.Call) -> dict[str, ast.expr]:
    """Return the arguments of a call of `initialize` by parameter, as far as they are written out."""
    arguments: dict[str, ast.expr] = {}
    for name, value in zip(_PARAMETERS, call.args, strict=False):
        if isinstance(value, ast.Starred):
            break
        arguments[name] = value
    arguments.update({keyword.arg: keyword.value for keyword in call.keywords if keyword.arg})
    return arguments


def is_written_out(call: ast.Call) -> bool:
    """Tell whether a call has neither `*args` nor `**kwargs`."""
    return not any(isinstance(value, ast.Starred) for value in call.args) and all(
        keyword.arg for keyword in call.keywords
    )


@cache
def presets_in_force() -> tuple[Path, str | None]:
    """Return the presets file that a run would use, and what is wrong with the one in AMP_PATCH_PRESETS.

    A file that is wrong gives way to the shipped one.
    """
    chosen = os.environ.get(presets.PRESETS_VARIABLE)
    if chosen:
        try:
            table = presets.Presets(Path(chosen))
            for level in table.names():
                table.properties(level)
            return Path(chosen), None
        except (PolicyError, OSError) as error:
            return shipped.shipped_presets(), str(error)
    return shipped.shipped_presets(), None


def known_levels() -> tuple[str, ...]:
    """Return the levels that `initialize` would know here."""
    return presets.Presets(presets_in_force()[0]).names()


@dataclass(frozen=True, slots=True)
class Expected:
    """What the calls of `initialize` in view may do, and what they must do.

    They may do what any of them does at any possible level, and must do what all of them do at all levels.
    """

    policies: tuple[Policy, ...]
    unknown: frozenset[str]

    @property
    def may_scale(self) -> bool:
        """Whether a loss may be multiplied by anything but 1."""
        return "loss_scale" in self.unknown or any(policy.loss_scale != 1.0 for policy in self.policies)

    @property
    def may_skip(self) -> bool:
        """Whether steps may be skipped after an overflow."""
        return "loss_scale" in self.unknown or any(policy.is_scale_dynamic for policy in self.policies)

    @property
    def must_skip(self) -> bool:
        """Whether every possible level skips steps after an overflow."""
        return "loss_scale" not in self.unknown and all(policy.is_scale_dynamic for policy in self.policies)

    @property
    def may_have_masters(self) -> bool:
        """Whether the optimizer may step on float32 masters."""
        return "master_weights" in self.unknown or any(policy.master_weights for policy in self.policies)

    @property
    def must_have_masters(self) -> bool:
        """Whether every possible level has masters."""
        return "master_weights" not in self.unknown and all(policy.master_weights for policy in self.policies)

    @property
    def may_cast_model(self) -> bool:
        """Whether the model's weights may become 16-bit."""
        return any(policy.cast_model_type in LOW_DTYPES for policy in self.policies)

    @property
    def takes_low_model(self) -> bool:
        """Whether every possible level takes a model that is in 16 bits already."""
        return all(policy.cast_model_type in LOW_DTYPES and not policy.master_weights for policy in self.policies)

    @property
    def may_use_low(self) -> bool:
        """Whether anything may run in 16 bits."""
        return any(policy.low_dtype is not None for policy in self.policies)

    @property
    def may_patch(self) -> bool:
        """Whether torch functions may be patched."""
        return any(policy.patch_torch_functions for policy in self.policies)

    @property
    def lists(self) -> tuple[str, ...]:
        """The shipped op lists that may be in force. Files of the user's are left aside."""
        names = {name for policy in self.policies if policy.patch_torch_functions for name in policy.lists}
        return tuple(sorted(names & set(shipped.shipped_names())))


def expect(scripts: Iterable[Script]) -> Expected:
    """Return what the calls of `initialize` in these scripts may do; without any call, every level is possible."""
    scripts = list(scripts)
    calls = [(script, call) for script in scripts for call in script.initializations]
    policies: list[Policy] = []
    unknown: set[str] = set()
    for script, call in calls:
        given = {name: literal(script, value) for name, value in arguments_of(call).items()}
        if given.get("enabled") is False:
            continue
        hidden = {name for name in OVERRIDES if given.get(name) is UNKNOWN} if is_written_out(call) else set(OVERRIDES)
        unknown |= hidden
        overrides = {name: given[name] for name in OVERRIDES if name in given and name not in hidden}
        policies += [_policy_of(level, overrides, is_apex(script, call)) for level in possible_levels(script, call)]
    if not calls:
        imports_apex = any("apex.amp" in script.imported_modules for script in scripts)
        policies = [_policy_of(level, {}, imports_apex) for level in (APEX_LEVELS if imports_apex else known_levels())]
    return Expected(tuple(dict.fromkeys(policies)), frozenset(unknown))


def is_apex(script: Script, call: ast.Call) -> bool:
    """Tell whether a call of amp is certainly one of Apex's, which the stand-in answers, and not one of amp_patch's."""
    return all(name.startswith(("apex.", "amp_patch.apex.")) for name in script.names.dotted(call.func))


def _policy_of(level: str, overrides: Mapping[str, Any], in_apex: bool) -> Policy:
    """Return the policy of a level; overrides that contradict it are left out.

    The stand-in patches by Apex's list.
    """
    try:
        policy = make_policy(level, overrides, presets=presets_in_force()[0])
    except PolicyError:
        policy = make_policy(level, {}, presets=presets_in_force()[0])
    return replace(policy, lists=("apex",)) if in_apex and policy.patch_torch_functions else policy


def levels_for(script: Script, call: ast.Call) -> tuple[str, ...]:
    """Return the levels that a call of `initialize` takes: Apex's four through the stand-in, else the presets'."""
    return APEX_LEVELS if is_apex(script, call) else known_levels()


def possible_levels(script: Script, call: ast.Call) -> tuple[str, ...]:
    """Return the known levels that a call of `initialize` may run at."""
    arguments = arguments_of(call)
    levels = levels_for(script, call)
    if "presets" in arguments or not is_written_out(call):
        return levels
    if "opt_level" not in arguments:
        return ("O1",)
    value = literal(script, arguments["opt_level"])
    values = [value] if isinstance(value, str) else offered(script, arguments["opt_level"])
    return tuple(level for level in values if level in levels) or levels


def offered(script: Script, node: ast.AST) -> list[str]:
    """Return the `choices` of the command line option that an expression such as `args.opt_level` reads, if any."""
    for option in options_read_by(script, node):
        written = argument_of(option, "choices")
        choices = UNKNOWN if written is None else literal(script, written)
        if isinstance(choices, list) and all(isinstance(choice, str) for choice in choices):
            return choices
    return []


def options_read_by(script: Script, node: ast.AST) -> list[ast.Call]:
    """Return the `add_argument` calls that declare the option an expression such as `args.opt_level` reads."""
    name = text_of(node).rpartition(".")[2]
    return [call for call, _ in script.method_calls("add_argument") if name in destinations(call)]


def destinations(option: ast.Call) -> list[str]:
    """Return the names of the attribute that an `add_argument` call may fill."""
    explicit = argument_of(option, "dest")
    if isinstance(explicit, ast.Constant):
        return [str(explicit.value)]
    flags = [value.value for value in option.args if isinstance(value, ast.Constant) and isinstance(value.value, str)]
    return [flag.lstrip("-").replace("-", "_") for flag in flags]
