"""What a script asks of `initialize`: literal arguments, the levels they may mean, and what those levels do.

Presets and signature are read as text: importing what uses them would import torch.
"""

import ast
import itertools
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

import amp_patch

from .script import Script
from .structure import argument_of, text_of

PACKAGE = Path(amp_patch.__file__).parent
APEX_LEVELS = ("O0", "O1", "O2", "O3")
_LOW = ("float16", "bfloat16")
DTYPES = {"torch.half": "float16", **{f"torch.{name}": name for name in (*_LOW, "float32", "float64")}}


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
    if isinstance(node, ast.Dict):  # a dynamic loss scale, whatever its knobs are
        return {}
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Pow, ast.Mult)):
        left, right = literal(script, node.left), literal(script, node.right)
        if not all(isinstance(one, (int, float)) for one in (left, right)) or not 0 < left < 1e9 or abs(right) > 64:
            return UNKNOWN
        return left * right if isinstance(node.op, ast.Mult) else float(left) ** right
    dtypes = script.names.resolve(node) & DTYPES.keys()
    if dtypes:
        return DTYPES[min(dtypes)]
    value = script.constant(node.id) if isinstance(node, ast.Name) else None
    return UNKNOWN if value is None or isinstance(value, ast.Name) else literal(script, value)


@cache
def _parameters() -> tuple[str, ...]:
    """Return the parameters of `initialize` that may be given by position."""
    tree = ast.parse((PACKAGE / "api.py").read_bytes())
    (function,) = (one for one in tree.body if isinstance(one, ast.FunctionDef) and one.name == "initialize")
    return tuple(argument.arg for argument in function.args.args)


def arguments_of(call: ast.Call) -> dict[str, ast.expr]:
    """Return the arguments of a call of `initialize` by parameter, as far as they are written out."""
    given = itertools.takewhile(lambda value: not isinstance(value, ast.Starred), call.args)
    arguments = dict(zip(_parameters(), given, strict=False))
    arguments.update({keyword.arg: keyword.value for keyword in call.keywords if keyword.arg})
    return arguments


def is_written_out(call: ast.Call) -> bool:
    """Tell whether a call has neither `*args` nor `**kwargs`."""
    return not any(isinstance(value, ast.Starred) for value in call.args) and all(
        keyword.arg for keyword in call.keywords
    )


def get_presets() -> dict[str, dict[str, Any]]:
    """Return the properties of each level: the shipped ones, and those in AMP_PATCH_PRESETS if it can be read."""
    shipped = next(path for path in (PACKAGE, PACKAGE.parent) if (path / "lists/presets.yaml").is_file())
    levels = _resolve(_read(shipped / "lists/presets.yaml"), {})
    return {**levels, **_resolve(_read(Path(os.environ.get("AMP_PATCH_PRESETS") or os.devnull)), levels)}


@cache
def _read(path: Path) -> dict[str, Any]:
    try:
        table = yaml.safe_load(path.read_bytes())
    except (OSError, ValueError, yaml.YAMLError):  # initialize will say
        return {}
    return {str(name): one for name, one in table.items() if isinstance(one, dict)} if isinstance(table, dict) else {}


def _resolve(table: Mapping[str, Any], shipped: Mapping[str, Any]) -> dict[str, Any]:
    def properties(name: str, depth: int) -> dict[str, Any]:
        own = dict(table.get(name, {}))
        base = own.pop("extends", None)
        if base == name or base not in table or not depth:
            return {**shipped.get(base, {}), **own}
        return {**properties(base, depth - 1), **own}

    return {name: properties(name, len(table)) for name in table}


@dataclass(frozen=True, slots=True)
class Level:
    """What a level does: it multiplies the loss, by a scale that moves; casts the model, with masters; patches ops."""

    scales: bool
    is_dynamic: bool
    casts_model: bool
    has_masters: bool
    patches: bool

    @classmethod
    def of(cls, properties: Mapping[str, Any]) -> "Level":
        """Return what properties, as a presets file has them, come to."""
        scale = properties.get("loss_scale")
        return cls(
            scales=scale is not None and str(scale) not in ("1", "1.0"),
            is_dynamic=scale == "dynamic" or isinstance(scale, dict),
            casts_model=properties.get("cast_model_type") in _LOW,
            has_masters=properties.get("master_weights") in (True, "True"),
            patches=bool(properties.get("patch_torch_functions")),
        )


@dataclass(frozen=True, slots=True)
class Expected:
    """What the calls of `initialize` in view may do: what any of them does at any level that is possible."""

    levels: frozenset[Level]

    @property
    def may_scale(self) -> bool:
        """Whether a loss may be multiplied by anything but 1."""
        return any(level.scales for level in self.levels)

    @property
    def may_skip(self) -> bool:
        """Whether steps may be skipped after an overflow."""
        return any(level.is_dynamic for level in self.levels)

    @property
    def takes_low_model(self) -> bool:
        """Whether every possible level takes a model that is in 16 bits already."""
        return all(level.casts_model and not level.has_masters for level in self.levels)

    @property
    def may_use_low(self) -> bool:
        """Whether anything may run in 16 bits."""
        return any(level.casts_model or level.patches for level in self.levels)

    @property
    def may_patch(self) -> bool:
        """Whether torch functions may be patched."""
        return any(level.patches for level in self.levels)


def expect(scripts: Iterable[Script]) -> Expected:
    """Return what the calls of `initialize` in these scripts may do; without any call, every level is possible."""
    scripts, presets = list(scripts), get_presets()
    calls = [(script, call) for script in scripts for call in script.initializations]
    if not calls:
        imports_apex = any("apex.amp" in script.imported_modules for script in scripts)
        return Expected(frozenset(Level.of(presets[name]) for name in (APEX_LEVELS if imports_apex else presets)))
    levels: set[Level] = set()
    for script, call in calls:
        given = {name: literal(script, value) for name, value in arguments_of(call).items()}
        if not is_written_out(call):
            given.setdefault("loss_scale", UNKNOWN)
        if given.get("enabled") is False:
            continue
        for name in possible_levels(script, call):
            levels.update(Level.of(properties) for properties in _variants(presets[name], given))
    return Expected(frozenset(levels))


def _variants(properties: dict[str, Any], given: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the properties of a level under what is given: twice if the loss scale is not known."""
    known = {name: value for name, value in given.items() if name in properties and value not in (None, UNKNOWN)}
    scales = ["dynamic", 1.0] if given.get("loss_scale") is UNKNOWN else []
    laid_over = {**properties, **known}
    return [{**laid_over, "loss_scale": scale} for scale in scales] or [laid_over]


def is_apex(script: Script, call: ast.Call) -> bool:
    """Tell whether a call of amp is certainly one of Apex's, which the stand-in answers, and not one of amp_patch's."""
    return all(name.startswith(("apex.", "amp_patch.apex.")) for name in script.names.dotted(call.func))


def levels_for(script: Script, call: ast.Call) -> tuple[str, ...]:
    """Return the levels that a call of `initialize` takes: Apex's four through the stand-in, else the presets'."""
    return APEX_LEVELS if is_apex(script, call) else tuple(get_presets())


def possible_levels(script: Script, call: ast.Call) -> tuple[str, ...]:
    """Return the known levels that a call of `initialize` may run at."""
    arguments = arguments_of(call)
    levels = levels_for(script, call)
    if "presets" in arguments or not is_written_out(call):
        return levels
    if "opt_level" not in arguments:
        return ("O1",)
    value = literal(script, arguments["opt_level"])
    values = [value] if isinstance(value, str) else _offered(script, arguments["opt_level"])
    return tuple(level for level in values if level in levels) or levels


def _offered(script: Script, node: ast.AST) -> list[str]:
    """Return the `choices` of the command line option that an expression such as `args.opt_level` reads, if any."""
    name = text_of(node).rpartition(".")[2]
    for option, _ in script.method_calls("add_argument"):
        written = argument_of(option, "choices") if name in destinations(option) else None
        choices = UNKNOWN if written is None else literal(script, written)
        if isinstance(choices, list):
            return [choice for choice in choices if isinstance(choice, str)]
    return []


def destinations(option: ast.Call) -> list[str]:
    """Return the names of the attribute that an `add_argument` call may fill."""
    explicit = argument_of(option, "dest")
    if isinstance(explicit, ast.Constant):
        return [str(explicit.value)]
    flags = [value.value for value in option.args if isinstance(value, ast.Constant) and isinstance(value.value, str)]
    return [flag.lstrip("-").replace("-", "_") for flag in flags]
