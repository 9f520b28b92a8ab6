"""Records as lines of JSON, and back."""

import json
import math
import reprlib
import stat
import types
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import IO, Any, TypeVar, get_args, get_origin

from ..errors import RecordError
from ..terminal import make_printable

R = TypeVar("R")

MAX_LINE = 1 << 26
"""Bytes of a line: a file without any, such as one of zeros, is not read into memory."""

MAX_INT = 1 << 63


def read_lines(path: Path, kinds: Mapping[str, type[R]]) -> Iterator[tuple[dict[str, Any], R | None]]:
    """Yield the data of each line of a file and its record, of the class that `kinds` has for it; None for a kind that
    only a later version knows.

    A file may come from anybody: a record has values of the types that its fields have, and texts without control
    characters, which a terminal would obey. Raises RecordError for any other file.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe may never have a writer, and a device no end
            raise RecordError(f"{path}: not a regular file; give the path of a recording")
        with path.open("rb") as stream:
            yield from _read_stream(stream, path, kinds)
    except (OSError, ValueError) as error:
        if isinstance(error, RecordError):
            raise
        raise RecordError(f"{path}: {getattr(error, 'strerror', None) or error}") from None


def _read_stream(
    stream: IO[bytes], path: Path, kinds: Mapping[str, type[R]]
) -> Iterator[tuple[dict[str, Any], R | None]]:
    number = 0
    while line := stream.readline(MAX_LINE + 1):
        number += 1
        try:
            data, record = _read_line(line, kinds)
        except RecursionError:
            problem = "nested too deeply"
        except (ValueError, TypeError) as error:
            problem = str(error)
        else:
            yield data, record
            continue
        raise RecordError(f"{path}:{number}: not a line of a recording ({make_printable(problem)})") from None


def _read_line(line: bytes, kinds: Mapping[str, type[R]]) -> tuple[dict[str, Any], R | None]:
    if len(line) > MAX_LINE:
        raise ValueError(f"longer than {MAX_LINE} bytes")
    data = json.loads(line.decode("utf-8"))
    if not isinstance(data, dict):
        raise TypeError("no JSON object")
    name = data.pop("kind", None)
    if name is not None and not isinstance(name, str):
        raise TypeError(f"kind is {reprlib.repr(name)}")
    kind = kinds.get(name or "")
    if kind is None:
        return data, None
    values = {
        field.name: to_type(data[field.name], field.type, field.name)
        for field in fields(kind)  # type: ignore[arg-type]
        if field.name in data
    }
    return data, kind(**values)


def to_type(value: Any, kind: Any, name: str) -> Any:
    """Return a value of JSON as one of a field's type: lists are tuples there, and the names of inf and NaN are floats.
    Raises TypeError for a value that is of another type, by the name of its field.
    """
    if isinstance(kind, types.UnionType):
        if value is None and type(None) in get_args(kind):
            return None
        (kind,) = (one for one in get_args(kind) if one is not type(None))
    if get_origin(kind) is tuple and isinstance(value, list):
        return _to_tuple(value, get_args(kind), name)
    if kind is str and isinstance(value, str):
        return make_printable(value)
    if kind is float and value in ("inf", "-inf", "nan"):
        return float(value)
    if kind is float and type(value) in (int, float) and (isinstance(value, float) or abs(value) < MAX_INT):
        return float(value)
    if kind is int and type(value) is int and abs(value) < MAX_INT:
        return value
    if kind is bool and isinstance(value, bool):
        return value
    raise TypeError(f"{name} is {reprlib.repr(value)}")


def _to_tuple(values: list[Any], kinds: tuple[Any, ...], name: str) -> tuple[Any, ...]:
    if kinds[1:] == (...,):  # tuple[X, ...]
        kinds = kinds[:1] * len(values)
    if len(values) != len(kinds):
        raise TypeError(f"{name} has an element of {len(values)} values, and not {len(kinds)}")
    return tuple(to_type(value, kind, name) for value, kind in zip(values, kinds, strict=True))


def plain(value: Any) -> Any:
    """A value as JSON can hold it."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, tuple):
        return [plain(one) for one in value]
    return value
