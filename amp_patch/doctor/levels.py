"""What a script asks of `initialize`: its arguments, the levels they may mean, and what those levels do.

Presets are read as text: importing what uses them would import torch.
"""

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

import amp_patch

from .script import Script

_PACKAGE = Path(amp_patch.__file__).parent
_APEX_LEVELS = ("O0", "O1", "O2", "O3")
_POSITIONAL = ("models", "optimizers", "enabled", "opt_level")
_LOW = ("float16", "bfloat16")
_UNKNOWN = object()
"""The value of an expression that only a run could tell."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What the calls of `initialize` in view may do: what any of them does at any level that is possible.

    Attributes:
        scales: the loss may be multiplied by something other than 1.
        skips: steps may be skipped after an overflow, since the scale is dynamic.
        is_low: something may run in 16 bits.
    """

    scales: bool
    skips: bool
    is_low: bool


def expect(scripts: Sequence[Script]) -> Expected:
    """Return what the calls of `initialize` in these scripts may do; without any call, every level is possible."""
    possible: list[dict[str, Any]] = []
    calls = [(script, call) for script in scripts for call in script.initializations]
    for script, call in calls:
        possible += _possible_properties(script, call)
    if not calls:
        possible = list(_get_presets().values())
    scales = [properties.get("loss_scale") for properties in possible]
    return Expected(
        scales=any(scale is not None and str(scale) not in ("1", "1.0") for scale in scales),
        skips=any(scale == "dynamic" or isinstance(scale, dict) for scale in scales),
        is_low=any(one.get("cast_model_type") in _LOW or one.get("patch_torch_functions") for one in possible),
    )


def _possible_properties(script: Script, call: ast.Call) -> list[dict[str, Any]]:
    """Return the properties of each level that a call of `initialize` may run at, as changed by its arguments."""
    given = {keyword.arg: _literal(script, keyword.value) for keyword in call.keywords if keyword.arg}
    for name, value in zip(_POSITIONAL, call.args, strict=False):
        given[name] = _literal(script, value)
    has_stars = any(isinstance(value, ast.Starred) for value in call.args) or not all(one.arg for one in call.keywords)
    if has_stars:
        given.setdefault("loss_scale", _UNKNOWN)
        given.setdefault("opt_level", _UNKNOWN)
    if given.get("enabled") is False:
        return []
    presets = _get_presets()
    levels: Sequence[str] = _APEX_LEVELS if _is_apex(script, call) else tuple(presets)
    if given.setdefault("opt_level", "O1") in levels and "presets" not in given:
        levels = [given["opt_level"]]
    possible = []
    for level in levels:
        changed = {name: value for name, value in given.items() if value is not None and value is not _UNKNOWN}
        if given.get("loss_scale") is _UNKNOWN:
            changed["loss_scale"] = "dynamic"
        possible.append({**presets[level], **{name: changed[name] for name in changed if name in presets[level]}})
    return possible


def _is_apex(script: Script, call: ast.Call) -> bool:
    """Whether a call of amp is certainly one of Apex's, which the stand-in answers, and not one of amp_patch's."""
    return all(name.startswith(("apex.", "amp_patch.apex.")) for name in script.names.dotted(call.func))


def _literal(script: Script, node: ast.expr) -> Any:
    """Return the value of a constant, or of a name that is assigned one constant in the whole script."""
    if isinstance(node, ast.Name):
        values = script.values_of(node.id)
        is_argument = any(isinstance(one, ast.arg) and one.arg == node.id for one in script.nodes)
        node = values[0] if len(values) == 1 and not is_argument else node
    if isinstance(node, ast.Dict):  # a dynamic loss scale, whatever its bounds are
        return {}
    return node.value if isinstance(node, ast.Constant) else _UNKNOWN


@cache
def _get_presets() -> dict[str, dict[str, Any]]:
    """Return the properties of each shipped level."""
    folder = next(path for path in (_PACKAGE, _PACKAGE.parent) if (path / "lists/presets.yaml").is_file())
    table: dict[str, dict[str, Any]] = yaml.safe_load((folder / "lists/presets.yaml").read_bytes())
    levels: dict[str, dict[str, Any]] = {}
    for name, own in table.items():  # a level stands behind the one that it extends
        levels[name] = {**levels.get(own.get("extends", ""), {}), **own}
    return levels
