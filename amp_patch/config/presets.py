"""Makes a `Policy` from an opt_level in a presets file and the caller's overrides."""

import os
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from ..dtypes import LOW_DTYPES, dtype_name
from ..errors import AmpError, PolicyError, did_you_mean
from .list_file import is_op_list
from .policy import DynamicScale as DynamicScale
from .policy import Policy, find_contradictions
from .policy import parse_loss_scale as parse_loss_scale
from .shipped import shipped_presets
from .yaml_nodes import Node, load_mapping

PRESETS_VARIABLE = "AMP_PATCH_PRESETS"


def make_policy(
    opt_level: object, overrides: Mapping[str, Any], *, presets: str | os.PathLike[str] | None = None
) -> Policy:
    """Return the policy of a level, with overrides applied.

    Args:
        overrides: values of properties, by name. None counts as not given. Names of anything that is not an override
            (see `Policy.get_overrides`) are ignored, so a caller can pass all its arguments.
        presets: a presets file, whose levels are added to the shipped ones. By default, the file whose path is in the
            environment variable AMP_PATCH_PRESETS; if that is not set, there are only the shipped levels.

    Raises PolicyError for an unknown level or a wrong presets file; and for overrides that cannot be read or contradict
    the level, with all of these problems in the message.
    """
    levels = _read_presets(presets)
    if not isinstance(opt_level, str) or opt_level not in levels.names():
        raise _unknown_level(opt_level, levels.names())
    properties = levels.properties(opt_level)
    properties_to_override = Policy.get_overrides()
    given = {}
    for name, value in overrides.items():
        if name in properties_to_override and value is not None:
            given[name] = value
    # `lists: null` in a presets file reads as None; the property is a tuple
    preset = Policy(opt_level=opt_level, **{**properties, "lists": properties.get("lists") or ()})
    policy, problems = _override(preset, given)
    problems += find_contradictions(preset, given, policy)
    if problems:
        raise PolicyError(
            f"opt_level {opt_level!r} cannot be combined with these arguments:\n"
            + "\n".join(f"  - {problem}" for problem in problems)
        )
    # by default, a level that patches functions uses the shipped list with the name of its low dtype
    if policy.patch_torch_functions and not policy.lists:
        policy = replace(policy, lists=(dtype_name(policy.patch_torch_functions_type),))
    return policy


def make_policy_without_model(
    opt_level: str, overrides: Mapping[str, Any], *, presets: str | os.PathLike[str] | None = None
) -> Policy:
    """Return the policy of a level for code without a model.

    Raises PolicyError as `make_policy` does, and for a level that casts only models.
    """
    policy = make_policy(opt_level, overrides, presets=presets)
    if policy.low_dtype is None or policy.patch_torch_functions:
        return policy
    levels = _read_presets(presets)
    patching = []
    for level in levels.names():
        if levels.properties(level).get("patch_torch_functions"):
            patching.append(level)
    raise PolicyError(
        f"opt_level {opt_level!r} casts models and patches no functions, so code without a model would run in float32."
        f" Levels that patch functions: {', '.join(patching)}. To cast a model, pass it to initialize."
    )


def _read_presets(presets: str | os.PathLike[str] | None) -> "Presets":
    """Return the levels of the file `presets`, else of the file in AMP_PATCH_PRESETS, else the shipped levels."""
    if presets is not None and not isinstance(presets, (str, os.PathLike)):
        raise PolicyError(f"presets={presets!r} is not a path: pass the path of a presets file, or leave it out")
    return Presets(Path(presets or os.environ.get(PRESETS_VARIABLE) or shipped_presets()))


def _override(preset: Policy, given: Mapping[str, Any]) -> tuple[Policy, list[str]]:
    """Return `preset` with the values `given` in place of its own, and a message for each value that cannot be read."""
    parsers = Policy.get_overrides()
    problems: list[str] = []
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name == "cast_model_type" and value is False:  # as in Apex: do not cast the model
            values[name] = None
            continue
        try:
            values[name] = parsers[name](value)
        except (AmpError, ValueError, TypeError) as error:
            problems.append(_with_name(error, name, f"{name}={value!r}"))
    return replace(preset, **values), problems


def _with_name(error: Exception, name: str, shown: str) -> str:
    """Return the text of an error about the property `name`.

    `shown`, such as "loss_scale='x'", comes first, unless the text begins with the property already.
    """
    text = str(error)
    if text.startswith(f"{name}="):
        return text
    return f"{shown}: {text}"


class Presets:
    """The levels of a presets file, together with the shipped levels.

    A level of a user's file may extend a shipped level, and replaces a shipped level of the same name.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        root = load_mapping(path, PolicyError)
        self._levels = dict(_get_mapping(path, root))  # the level's mapping of properties, by the level's name
        self._shipped = None if path == shipped_presets() else Presets(shipped_presets())
        if is_op_list(root):
            problem = f"this is an op list, with the keys {', '.join(self._levels)}: pass it as lists=..."
            raise PolicyError(problem, path, root.line, root.column)

    def names(self) -> tuple[str, ...]:
        """Return the names of the shipped levels, then of the file's own levels."""
        shipped = () if self._shipped is None else self._shipped.names()
        return tuple(dict.fromkeys([*shipped, *self._levels]))

    def properties(self, level: str, seen: tuple[str, ...] = ()) -> dict[str, Any]:
        """Return the values of the properties that a level states or inherits through `extends`.

        Args:
            seen: the levels through whose `extends` this level was reached, to detect a circle.
        """
        if level not in self._levels and self._shipped is not None:
            return self._shipped.properties(level)
        node = self._levels[level]
        entries = dict(_get_mapping(self.path, node))
        base = entries.pop("extends", None)
        properties: dict[str, Any] = {}
        if base is not None:
            properties = self._properties_of_base(level, base, seen)
        properties |= _parse_properties(self.path, node, entries)
        low = properties.get("patch_torch_functions_type")
        if properties.get("patch_torch_functions") and low not in LOW_DTYPES:
            problem = f"level {level!r} patches functions, so patch_torch_functions_type must be float16 or bfloat16"
            raise self._error_at(node, problem)
        return properties

    def _properties_of_base(self, level: str, base: Node, seen: tuple[str, ...]) -> dict[str, Any]:
        """Return the properties of the level that `level` extends. `base` is the value of `extends`."""
        if not isinstance(base.value, str):
            raise self._error_at(base, "extends takes the name of one level")
        is_same_name = base.value == level
        if is_same_name and self._shipped is not None and level in self._shipped.names():
            return self._shipped.properties(level)  # a user's O2 extends the shipped O2, not itself
        if is_same_name or base.value in seen:
            raise self._error_at(base, f"level {level!r} extends itself through {base.value!r}; name another level")
        if base.value not in self.names():
            raise self._error_at(base, str(_unknown_level(base.value, self.names())))
        return self.properties(base.value, (*seen, level))

    def _error_at(self, node: Node, problem: str) -> PolicyError:
        return PolicyError(problem, self.path, node.line, node.column)


def _get_mapping(path: Path, node: Node) -> Mapping[str, Node]:
    """Return the nodes in a mapping, by key. Raises PolicyError if `node` is not a mapping."""
    if not isinstance(node.value, dict):
        problem = "a level must be a mapping of properties; write one such as {extends: O2, loss_scale: 128}"
        raise PolicyError(problem, path, node.line, node.column)
    return node.value


def _parse_properties(path: Path, level: Node, entries: Mapping[str, Node]) -> dict[str, Any]:
    """Return the values of the properties in `entries`, the mapping in the node `level` without `extends`."""
    parsers = Policy.get_preset_properties()
    # `null` stands for a default that is None, empty or False, so it is an error for `loss_scale` and `compute`
    may_be_null = {declared.name for declared in fields(Policy) if not declared.default}
    result: dict[str, Any] = {}
    for name, node in entries.items():
        if name not in parsers:
            line, column = level.key_positions.get(name, (node.line, node.column))
            problem = f"unknown property {name!r} ({', '.join(parsers)}).{did_you_mean(name, parsers)}"
            raise PolicyError(problem, path, line, column)
        if _is_null(node) and name in may_be_null:
            result[name] = None
            continue
        try:
            result[name] = parsers[name](_to_plain_data(node))
        except AmpError as error:
            line, column = _locate_error(node, parsers[name])
            raise PolicyError(_with_name(error, name, name), path, line, column) from None
    return result


def _to_plain_data(node: Node) -> Any:
    """Return the value of a node as text, lists and dictionaries, without the positions."""
    if isinstance(node.value, dict):
        return {key: _to_plain_data(item) for key, item in node.value.items()}
    if isinstance(node.value, list):
        return [_to_plain_data(item) for item in node.value]
    return node.value


def _locate_error(node: Node, parse: Callable[[Any], Any]) -> tuple[int, int]:
    """Return the line and column to report for a value that `parse` refuses.

    In a mapping, such as a dynamic `loss_scale`, this is the first key that `parse` refuses when it stands alone.
    """
    if isinstance(node.value, dict):
        for key, item in node.value.items():
            try:
                parse({key: _to_plain_data(item)})
            except AmpError:
                return node.key_positions[key]
    return node.line, node.column


def _is_null(node: Node) -> bool:
    """Return whether a value is empty, or `null`, `none` or `~` without quotes."""
    return isinstance(node.value, str) and not node.quoted and node.value.lower() in ("", "null", "~", "none")


def _unknown_level(level: object, allowed: tuple[str, ...]) -> PolicyError:
    hint = did_you_mean(str(level), allowed)  # `str`, because a common mistake is the number 1 for "O1"
    return PolicyError(f"opt_level {level!r} is not a preset ({', '.join(allowed)}).{hint}")
