"""Records as lines of JSON, and back."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from ..errors import RecordError

R = TypeVar("R")


def read_lines(path: Path, kinds: Mapping[str, type[R]]) -> Iterator[tuple[dict[str, Any], R | None]]:
    """Yield the data of each line of a file and its record, of the class that `kinds` has for it; None for a kind that
    only a later version knows. Raises RecordError.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    for number, line in enumerate(lines, 1):
        try:
            data = json.loads(line)
            kind = kinds.get(data.pop("kind", None))
            record = None
            if kind is not None:
                types = {field.name: field.type for field in fields(kind)}  # type: ignore[arg-type]
                record = kind(**{name: freeze(data[name], types[name]) for name in data if name in types})
                check(record)
            yield data, record
        except (ValueError, AttributeError, TypeError) as error:
            raise RecordError(f"{path}:{number}: not a line of a recording ({error})") from None


def check(record: Any) -> None:
    """Raise TypeError for a value that is not of the type that its field has."""
    for field in fields(record):
        value = getattr(record, field.name)
        kind: Any = get_origin(field.type)
        if kind is not tuple:
            kind = field.type
        if not isinstance(value, kind):
            raise TypeError(f"{field.name} is {value!r}")


def freeze(value: Any, kind: Any) -> Any:
    """A value of JSON as one of a field's type: lists are tuples there, and the names of inf and NaN are floats."""
    if isinstance(value, list):
        kinds = get_args(kind)
        if kinds[1:] == (...,):  # tuple[X, ...]
            kinds = kinds[:1] * len(value)
        return tuple(freeze(one, of) for one, of in zip(value, kinds, strict=True))
    if value in ("inf", "-inf", "nan") and (kind is float or float in get_args(kind)):
        return float(value)
    return value


def plain(value: Any) -> Any:
    """A value as JSON can hold it."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, tuple):
        return [plain(one) for one in value]
    return value
