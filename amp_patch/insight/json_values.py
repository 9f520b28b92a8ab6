"""Turns records into values of JSON, and reads records from files of JSON.

A record is a dataclass. If a field of a record is a dataclass, too, the fields of this *part* are keys of the record in
JSON. If a field is declared with `absent(value)`, JSON has `value` in the place of None.
"""

import json
import math
import reprlib
import stat
import types
from collections.abc import Iterator, Mapping
from dataclasses import Field, field, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import IO, Any, TypeVar, get_args, get_origin

from ..errors import RecordError
from ..terminal import make_printable

R = TypeVar("R")

MAX_LINE = 1 << 26
"""The most bytes of a line, or of a file that is one array. A longer one is refused, and is not read to its end."""

MAX_INT = 1 << 63
"""An integer of this or a larger magnitude is refused."""


def read_lines(path: Path, kinds: Mapping[str, type[R]]) -> Iterator[tuple[dict[str, Any], R | None]]:
    """Yield, for each line of a file, its data without the key "kind", and its record: None for an unknown kind.

    `kinds` has the class of each known kind. The file need not be trusted: each value of a record has the type of its
    field, and control characters in its texts, which a terminal would execute, are escaped. Raises RecordError for a
    file that cannot be read, or has a line that is no JSON object or does not fit the class of its kind.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe may never have a writer, and a device has no end
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


def read_array(path: Path, kinds: Mapping[str, type[R]], name: str) -> list[R | None]:
    """Return the records of a file that holds one JSON array of them; None for a kind that `kinds` does not have.

    The file need not be trusted: see `read_lines`. Raises RecordError for any other file. `name` is what its message
    calls the file that was expected.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise RecordError(f"{path}: not a regular file; give the path of {name}")
        with path.open("rb") as stream:
            content = stream.read(MAX_LINE + 1)
        if len(content) > MAX_LINE:
            raise RecordError(f"{path}: longer than {MAX_LINE} bytes: this is not {name}")
        values = json.loads(content.decode("utf-8"))
        if not isinstance(values, list):
            raise RecordError(f"{path}: no JSON array: this is not {name}")
        return [_read_object(value, kinds)[1] for value in values]
    except RecordError:
        raise
    except OSError as error:
        raise RecordError(f"{path}: {error.strerror or error}") from None
    except json.JSONDecodeError as error:
        raise RecordError(f"{path}:{error.lineno}: not {name}, or only a part of one ({error.msg})") from None
    except RecursionError:
        raise RecordError(f"{path}: nested too deeply: this is not {name}") from None
    except (ValueError, TypeError) as error:
        raise RecordError(f"{path}: not {name} ({make_printable(str(error))})") from None


def _read_line(line: bytes, kinds: Mapping[str, type[R]]) -> tuple[dict[str, Any], R | None]:
    if len(line) > MAX_LINE:
        raise ValueError(f"longer than {MAX_LINE} bytes")
    return _read_object(json.loads(line.decode("utf-8")), kinds)


def _read_object(data: Any, kinds: Mapping[str, type[R]]) -> tuple[dict[str, Any], R | None]:
    if not isinstance(data, dict):
        raise TypeError("no JSON object")
    name = data.pop("kind", None)
    if name is not None and not isinstance(name, str):
        raise TypeError(f"kind is {reprlib.repr(name)}")
    kind = kinds.get(name or "")
    if kind is None:
        return data, None
    return data, _build(kind, data)


def _build(kind: type[R], data: Mapping[str, Any]) -> R:
    """Return a record, or a part of one, from the keys of a line. If a key is missing, its field has the default.

    Raises TypeError if a value has another type than its field, or if the field of a missing key has no default.
    """
    values: dict[str, Any] = {}
    for declared in fields(kind):  # type: ignore[arg-type]
        name, type_of_field = declared.name, declared.type
        if is_dataclass(type_of_field):
            values[name] = _build(type_of_field, data)  # type: ignore[arg-type]
        elif name in data and is_stored(declared):  # a file of an earlier version may lack later keys
            is_none = "absent" in declared.metadata and data[name] == plain(declared.metadata["absent"])
            values[name] = None if is_none else to_type(data[name], type_of_field, name)
    return kind(**values)


def to_type(value: Any, kind: Any, name: str) -> Any:
    """Return a value of JSON as the type of a field. For example, a list becomes a tuple, and "nan" becomes a float.

    Raises TypeError, with the name of the field, for a value of another type, and for an integer beyond `MAX_INT`.
    """
    if isinstance(kind, types.UnionType):
        if value is None and type(None) in get_args(kind):
            return None
        (kind,) = (member for member in get_args(kind) if member is not type(None))
    if get_origin(kind) is tuple and isinstance(value, list):
        return _to_tuple(value, get_args(kind), name)
    if kind is str and isinstance(value, str):
        return make_printable(value)
    if isinstance(kind, type) and issubclass(kind, Enum) and value in [member.value for member in kind]:
        return kind(value)
    if kind is float and value in ("inf", "-inf", "nan"):
        return float(value)
    # float() raises OverflowError for very large integers.
    if kind is float and type(value) in (int, float) and (isinstance(value, float) or abs(value) < MAX_INT):
        return float(value)
    # isinstance(True, int) holds, so the type itself is compared.
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


def absent(value: Any) -> Any:
    """Declare a field of a record. Its default is None, which is stored as `value`."""
    return field(default=None, metadata={"absent": value})


def flatten(record: Any) -> dict[str, Any]:
    """Return the stored fields of a record and of its parts by name. None is replaced as `absent` declares."""
    flat: dict[str, Any] = {}
    for declared in fields(record):
        value = getattr(record, declared.name)
        if is_dataclass(value):
            flat.update(flatten(value))
        elif is_stored(declared):
            flat[declared.name] = declared.metadata.get("absent") if value is None else value
    return flat


def is_stored(declared: Field[Any]) -> bool:
    """Return whether a field is written to files. A field with `is_stored: False` in its metadata is not."""
    return bool(declared.metadata.get("is_stored", True))


def plain(value: Any) -> Any:
    """Return a value as JSON can hold it: inf and NaN become strings, and tuples become lists."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    return value
