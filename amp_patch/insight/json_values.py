"""Values of records as JSON has them, and back."""

import math
from dataclasses import fields
from typing import Any, get_args, get_origin


def check(record: Any) -> None:
    """Raise TypeError for a value that is not of the type that its field has."""
    for field in fields(record):
        value, kind = getattr(record, field.name), field.type
        kinds: Any = tuple if get_origin(kind) is tuple else kind
        if not isinstance(value, kinds):
            raise TypeError(f"{field.name} is {value!r}")


def freeze(value: Any, kind: Any) -> Any:
    """A value of JSON as one of a field's type."""
    if isinstance(value, list):
        elements = get_args(kind) if get_origin(kind) is tuple else ()
        if elements[1:] in ((), (...,)):  # tuple[X, ...]
            elements = (elements[0] if elements else None,) * len(value)
        return tuple(freeze(one, element) for one, element in zip(value, elements, strict=True))
    is_float = kind is float or float in get_args(kind)
    return float(value) if is_float and value in _NONFINITE else value


_NONFINITE = ("inf", "-inf", "nan")


def plain(value: Any) -> Any:
    """A value as JSON can hold it."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, tuple) else value
