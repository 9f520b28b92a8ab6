"""Presets from YAML plus the caller's overrides -> one frozen `Policy`."""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from .dtypes import LOW_DTYPES, dtype_name, parse_dtype
from .errors import AmpError, PolicyError, did_you_mean
from .oplists import lists_dir
from .yaml_loader import Node, load_mapping

_DESCRIBED = (
    "opt_level",
    "cast_model_type",
    "patch_torch_functions",
    "patch_torch_functions_type",
    "keep_batchnorm_fp32",
    "master_weights",
    "loss_scale",
    "lists",
    "cast_model_outputs",
)

PRESETS_VARIABLE = "AMP_PATCH_PRESETS"


@dataclass(frozen=True, slots=True)
class Policy:
    """The properties of one run.

    `presets.yaml` says what each means; two runs with equal policies can share a session.
    """

    opt_level: str
    cast_model_type: torch.dtype | None = None
    patch_torch_functions: bool = False
    patch_torch_functions_type: torch.dtype | None = None
    keep_batchnorm_fp32: bool | None = None
    master_weights: bool | None = None
    loss_scale: float | str = 1.0
    lists: tuple[str, ...] = ()
    cast_model_outputs: torch.dtype | None = None
    min_loss_scale: float | None = None
    max_loss_scale: float = 2.0**24
    description: str = ""
    is_cpu_variant: bool = False  # the level's own dtype gave way to the one its preset names for the CPU

    @property
    def low_dtype(self) -> torch.dtype | None:
        """The 16-bit dtype in force, or None at a float32 level."""
        if self.patch_torch_functions:
            return self.patch_torch_functions_type
        return self.cast_model_type if self.cast_model_type in LOW_DTYPES else None

    def describe(self) -> list[str]:
        """Return one line for each property, `name : value` with the name padded to 22 columns."""
        shown = {name: value for name, value in asdict(self).items() if name in _DESCRIBED}
        return [
            f"{name:22} : {dtype_name(value) if isinstance(value, torch.dtype) else value}"
            for name, value in shown.items()
        ]


# ---- reading presets -------------------------------------------------------------------------------------------------


def _text(value: object) -> str:
    return str(value)


def _is_null(node: Node) -> bool:
    return isinstance(node.value, str) and not node.quoted and node.value.lower() in ("", "null", "~", "none")


def _boolean(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if value in ("true", "True", "false", "False"):
        return value in ("true", "True")
    raise PolicyError(f"{value!r} is neither true nor false")


def parse_loss_scale(value: object) -> float | str:
    """Return "dynamic" or a finite positive float."""
    if value == "dynamic":
        return "dynamic"
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise PolicyError(f"loss_scale={value!r} is neither a finite positive number nor 'dynamic'")
    return number


def _dtype_parser(name: str) -> Callable[[object], torch.dtype]:
    return lambda value: parse_dtype(value, name)


def _lists(value: object) -> tuple[str, ...]:
    if isinstance(value, (str, os.PathLike)):
        return (os.fspath(value),)
    if isinstance(value, (list, tuple)) and all(isinstance(item, (str, os.PathLike)) for item in value):
        return tuple(os.fspath(item) for item in value)
    raise PolicyError(f"lists={value!r} is neither a name, a path, nor a sequence of those")


_PARSERS: dict[str, Callable[[object], Any]] = {
    "description": _text,
    "cast_model_type": _dtype_parser("cast_model_type"),
    "patch_torch_functions": _boolean,
    "patch_torch_functions_type": _dtype_parser("patch_torch_functions_type"),
    "keep_batchnorm_fp32": _boolean,
    "master_weights": _boolean,
    "loss_scale": parse_loss_scale,
    "lists": _lists,
}


class Presets:
    """The levels of one presets file: properties for any device, and those that differ on the CPU."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._levels = dict(_mapping(path, load_mapping(path, PolicyError)))

    def names(self) -> tuple[str, ...]:
        """Return the levels of this file and the shipped ones."""
        return tuple(dict.fromkeys([*self._shipped_names(), *self._levels]))

    def _shipped_names(self) -> tuple[str, ...]:
        return () if self.path == shipped_presets() else Presets(shipped_presets()).names()

    def properties(self, level: str, seen: tuple[str, ...] = ()) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return (properties, properties that differ on the CPU) of a level; a level the file lacks is looked up in the
        shipped file.
        """
        if level not in self._levels:
            if self.path == shipped_presets():
                raise _unknown_level(level, self.names())
            return Presets(shipped_presets()).properties(level)
        node = self._levels[level]
        entries = dict(_mapping(self.path, node))
        properties: dict[str, Any] = {}
        on_cpu: dict[str, Any] = {}
        base = entries.pop("extends", None)
        if base is not None:
            properties, on_cpu = self._base(level, base, seen)
        cpu = entries.pop("cpu", None)
        own = _parse(self.path, node, entries)
        properties = {**properties, **own}
        on_cpu = _without_overridden(on_cpu, own)
        if cpu is not None:
            on_cpu = {**on_cpu, **_parse(self.path, cpu, dict(_mapping(self.path, cpu)))}
        return properties, on_cpu

    def _base(self, level: str, base: Node, seen: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
        where = f"{self.path}:{base.line}:{base.column}"
        if not isinstance(base.value, str):
            raise PolicyError(f"{where}: extends takes the name of one level")
        if (base.value == level and level not in self._shipped_names()) or base.value in seen:
            raise PolicyError(f"{where}: level {level!r} extends itself through {base.value!r}")
        if base.value not in self.names():
            raise PolicyError(f"{where}: {_unknown_level(base.value, self.names())}")
        if base.value == level:  # a user's O2 may build on the shipped O2
            return Presets(shipped_presets()).properties(level)
        return self.properties(base.value, (*seen, level))


def shipped_presets() -> Path:
    """Return the path of the presets that come with the package."""
    return lists_dir() / "presets.yaml"


def _mapping(path: Path, node: Node) -> Mapping[str, Node]:
    if not isinstance(node.value, dict):
        raise PolicyError(
            f"{path}:{node.line}:{node.column}: expected a mapping of properties, for example {{extends: O2,"
            " loss_scale: 128}"
        )
    return node.value


def _parse(path: Path, parent: Node, entries: Mapping[str, Node]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, node in entries.items():
        if name not in _PARSERS:
            line, column = parent.key_at.get(name, (node.line, node.column))
            raise PolicyError(
                f"{path}:{line}:{column}: unknown property {name!r}"
                f" ({', '.join(_PARSERS)}).{did_you_mean(name, _PARSERS)}"
            )
        value = [item.value for item in node.value] if isinstance(node.value, list) else node.value
        try:
            result[name] = None if _is_null(node) else _PARSERS[name](value)
        except AmpError as error:
            raise PolicyError(f"{path}:{node.line}:{node.column}: {name}: {error}") from None
    return result


def _unknown_level(level: object, allowed: tuple[str, ...]) -> PolicyError:
    hint = ""
    if isinstance(level, str) and level[:1] in ("0", "o") and f"O{level[1:]}" in allowed:
        hint = f" Did you mean 'O{level[1:]}'? The first character is the letter O."
    return PolicyError(
        f"opt_level {level!r} is not a preset ({', '.join(allowed)}).{hint or did_you_mean(level, allowed)}"
    )


# ---- from a level and overrides to a policy --------------------------------------------------------------------------

_DTYPE_OVERRIDES = ("cast_model_type", "patch_torch_functions_type")


def make_policy(
    opt_level: object, overrides: Mapping[str, Any], *, device_type: str, presets: str | os.PathLike[str] | None = None
) -> Policy:
    """Return the policy of a level on a device type, with `overrides` (None means: not given) applied.

    Raises PolicyError for an unknown level, an unreadable value, and for overrides that contradict the level; all
    contradictions at once.
    """
    path = Path(presets or os.environ.get(PRESETS_VARIABLE) or shipped_presets())
    table = Presets(path)
    if not isinstance(opt_level, str) or opt_level not in table.names():
        raise _unknown_level(opt_level, table.names())
    properties, on_cpu = table.properties(opt_level)
    given = {name: value for name, value in overrides.items() if value is not None}
    if device_type == "cpu":
        on_cpu = _without_overridden(on_cpu, {name: value for name, value in given.items() if value is not False})
        is_cpu_variant = any(properties.get(name) != on_cpu[name] for name in _DTYPE_OVERRIDES if name in on_cpu)
        properties = {**properties, **on_cpu, "is_cpu_variant": is_cpu_variant}
    preset = Policy(opt_level=opt_level, **{**properties, "lists": properties.get("lists") or ()})
    policy, problems = _override(preset, given)
    problems += _contradictions(preset, given, policy)
    if problems:
        raise PolicyError(
            f"opt_level {opt_level!r} cannot be combined with these arguments:\n"
            + "\n".join(f"  - {problem}" for problem in problems)
        )
    if policy.patch_torch_functions and not policy.lists:
        policy = replace(policy, lists=(dtype_name(policy.patch_torch_functions_type),))
    return policy


def _without_overridden(on_cpu: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a preset's CPU properties still stands beside explicit ones: nothing, if those name a dtype."""
    if any(given.get(name) is not None for name in _DTYPE_OVERRIDES):
        return {}
    return {name: value for name, value in on_cpu.items() if name not in given}


def _override(preset: Policy, given: Mapping[str, Any]) -> tuple[Policy, list[str]]:
    known = {field.name for field in fields(Policy)}
    problems: list[str] = []
    values: dict[str, Any] = {}
    for name, value in given.items():
        try:
            if name == "cast_model_type" and value is False:  # Apex's way to say "leave the model alone"
                values[name] = None
            elif name == "cast_model_outputs":
                values[name] = parse_dtype(value, name)
            elif name in ("min_loss_scale", "max_loss_scale"):
                values[name] = float(value)
            elif name in known:
                values[name] = _PARSERS[name](value)
        except (AmpError, ValueError, TypeError) as error:
            problems.append(f"{name}={value!r}: {error}")
    return replace(preset, **values), problems


def _contradictions(preset: Policy, given: Mapping[str, Any], policy: Policy) -> list[str]:
    problems: list[str] = []
    level = preset.opt_level
    if preset.patch_torch_functions:
        if policy.cast_model_type not in (None, torch.float32):
            problems.append(
                f"cast_model_type={given['cast_model_type']}: {level} casts at functions and keeps the model float32;"
                " use O2, O3 or O5"
            )
        if given.get("keep_batchnorm_fp32") is not None:
            problems.append(
                f"keep_batchnorm_fp32={given['keep_batchnorm_fp32']!r}: {level} keeps all weights float32 anyway; leave"
                " it out"
            )
        if given.get("master_weights") is not None:
            problems.append(
                f"master_weights={given['master_weights']!r}: {level} keeps all weights float32 anyway; leave it out"
            )
        if policy.patch_torch_functions and policy.patch_torch_functions_type not in LOW_DTYPES:
            problems.append(
                f"patch_torch_functions_type={policy.patch_torch_functions_type}: must be float16 or bfloat16"
            )
    else:
        if policy.patch_torch_functions:
            problems.append(
                f"patch_torch_functions=True: {level} casts the whole model; use O1 or O4 to cast at functions"
            )
        if given.get("patch_torch_functions_type") is not None:
            named = given["patch_torch_functions_type"]
            problems.append(
                f"patch_torch_functions_type={named}: {level} patches nothing; use cast_model_type, or O1 or O4"
            )
        if given.get("lists") is not None and policy.cast_model_type not in LOW_DTYPES:
            problems.append(
                f"lists={given['lists']!r}: {level} runs everything in float32, so op lists have no effect; use another"
                " level"
            )
    if policy.min_loss_scale is not None and not 0 <= policy.min_loss_scale <= policy.max_loss_scale:
        problems.append(
            f"min_loss_scale={policy.min_loss_scale}: must lie between 0 and max_loss_scale={policy.max_loss_scale}"
        )
    if not policy.max_loss_scale > 0:
        problems.append(f"max_loss_scale={policy.max_loss_scale}: must be positive")
    return problems
