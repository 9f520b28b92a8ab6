"""Levels and their properties, as a presets file states them."""

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..dtypes import parse_dtype
from ..errors import AmpError, PolicyError, did_you_mean
from .shipped import shipped_presets
from .yaml_nodes import Node, load_mapping

PRESETS_VARIABLE = "AMP_PATCH_PRESETS"
DTYPE_OVERRIDES = ("cast_model_type", "patch_torch_functions_type")


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


PARSERS: dict[str, Callable[[object], Any]] = {
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
                raise unknown_level(level, self.names())
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
        on_cpu = without_overridden(on_cpu, own)
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
            raise PolicyError(f"{where}: {unknown_level(base.value, self.names())}")
        if base.value == level:  # a user's O2 may build on the shipped O2
            return Presets(shipped_presets()).properties(level)
        return self.properties(base.value, (*seen, level))


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
        if name not in PARSERS:
            line, column = parent.key_at.get(name, (node.line, node.column))
            raise PolicyError(
                f"{path}:{line}:{column}: unknown property {name!r}"
                f" ({', '.join(PARSERS)}).{did_you_mean(name, PARSERS)}"
            )
        value = [item.value for item in node.value] if isinstance(node.value, list) else node.value
        try:
            result[name] = None if _is_null(node) else PARSERS[name](value)
        except AmpError as error:
            raise PolicyError(f"{path}:{node.line}:{node.column}: {name}: {error}") from None
    return result


def unknown_level(level: object, allowed: tuple[str, ...]) -> PolicyError:
    hint = ""
    if isinstance(level, str) and level[:1] in ("0", "o") and f"O{level[1:]}" in allowed:
        hint = f" Did you mean 'O{level[1:]}'? The first character is the letter O."
    return PolicyError(
        f"opt_level {level!r} is not a preset ({', '.join(allowed)}).{hint or did_you_mean(level, allowed)}"
    )


def without_overridden(on_cpu: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a preset's CPU properties still stands beside explicit ones: nothing, if those name a dtype."""
    if any(given.get(name) is not None for name in DTYPE_OVERRIDES):
        return {}
    return {name: value for name, value in on_cpu.items() if name not in given}
