"""Casting whatever a model takes or returns."""

import copy
import dataclasses
import types
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from ..dtypes import TensorCast


def cast_tree(value: Any, cast: TensorCast) -> Any:
    """Return `value` with every tensor in it replaced by `cast(tensor)`.

    Lists, tuples, named tuples, sets, dataclasses and mappings keep their class: lists, mappings and dataclasses are
    copied and filled, others go through their constructor, and pass through untouched where that takes something else.
    A value in which nothing changes is returned itself, so a model that fills a container of its caller still does. A
    generator becomes a generator of cast values. Modules, arrays, strings and every other object pass through
    untouched.
    """
    if isinstance(value, Tensor):
        return cast(value)
    if value is None or isinstance(value, (str, bytes, bool, int, float, torch.nn.Module, torch.Size)):
        return value
    if isinstance(value, (tuple, list, set, frozenset)):
        items = [cast_tree(item, cast) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return _rebuild(value, items)
    if isinstance(value, Mapping):
        return _cast_mapping(value, cast)
    if isinstance(value, types.GeneratorType):
        return (cast_tree(item, cast) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _cast_dataclass(value, cast)
    return value


def _rebuild(value: Any, items: list[Any]) -> Any:
    """Return a container like `value` that holds `items`, or `value` where its class does not let one be made."""
    kind = type(value)
    if kind in (tuple, list, set, frozenset):
        return kind(items)
    try:
        if isinstance(value, list):
            result: Any = copy.copy(value)
            list.clear(result)
            list.extend(result, items)
        else:
            result = kind._make(items) if hasattr(kind, "_make") else kind(items)
        is_like = type(result) is kind and sorted(map(id, result)) == sorted(map(id, items))
    except Exception:  # a constructor of the user's may raise anything
        return value
    return result if is_like else value


def _cast_mapping(value: Mapping[Any, Any], cast: TensorCast) -> Mapping[Any, Any]:
    changed = {key: new for key, old in value.items() if (new := cast_tree(old, cast)) is not old}
    if not changed:
        return value
    if type(value) is dict:
        return {**value, **changed}
    if not isinstance(
        value, MutableMapping
    ):  # such as types.MappingProxyType: nothing but its own constructor can fill it
        return type(value)({**value, **changed})  # type: ignore[call-arg]
    result = copy.copy(value)
    if not isinstance(value, dict):  # the copy of a mapping of the user's own shares the dict inside with the original
        for name, inner in vars(result).items():
            if isinstance(inner, MutableMapping):
                setattr(result, name, copy.copy(inner))
    for key, new in changed.items():
        result[key] = new
    return result


def _cast_dataclass(value: Any, cast: TensorCast) -> Any:
    fields = {
        field.name: getattr(value, field.name) for field in dataclasses.fields(value) if hasattr(value, field.name)
    }
    changed = {name: new for name, old in fields.items() if (new := cast_tree(old, cast)) is not old}
    if not changed:
        return value
    try:
        result = copy.copy(value)
    except dataclasses.FrozenInstanceError:  # slots of its own: copy sets them one by one
        result = object.__new__(type(value))
        changed = {**fields, **changed}
    for name, new in changed.items():
        object.__setattr__(result, name, new)  # works for frozen dataclasses too
    return result
