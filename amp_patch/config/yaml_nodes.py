"""A strict reader of YAML: data with positions, and nothing else.

A file is one mapping of text, lists and mappings. Scalars stay text, so `no`, `1.0` and `2.12` arrive as they were
written. What lets a YAML file surprise its reader is refused: anchors and aliases, tags, duplicate or compound keys, a
second document, deep nesting, huge files. The reader walks the parser's events and builds only `Node`; no constructor
of PyYAML ever runs.
"""

import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import yaml

from ..errors import AmpError, OpListError, PolicyError
from .yaml_syntax import explain_syntax, quote

MAX_BYTES = 1 << 20
MAX_DEPTH = 16

FileError = type[OpListError] | type[PolicyError]
"""What a fault of a file is raised as."""

# Only its event parser is used, which is the same for the safe and the full loader.
_LOADER = getattr(yaml, "CLoader", yaml.Loader)
# The characters YAML 1.1 allows; looked for here so that both parsers report them alike, with a position.
_FORBIDDEN = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True, slots=True)
class Node:
    """One value of the file and where it starts; lines and columns count from 1."""

    value: "str | list[Node] | dict[str, Node]"
    line: int
    column: int
    quoted: bool = False
    key_at: dict[str, tuple[int, int]] = field(default_factory=dict)


def load_mapping(path: Path, error: FileError, data: bytes | None = None) -> Node:
    """Return the mapping that the file holds, or raise `error` with the place of the fault.

    Raises nothing but `error`, whatever the bytes are.

    Args:
        data: what `read_bytes` returned, where that was called before.
    """
    text = _decode(path, error, read_bytes(path, error) if data is None else data)
    reader = _Reader(path, error, text)
    try:
        return reader.read()
    except AmpError:  # some of these are ValueErrors too, and already say where
        raise
    except yaml.YAMLError as exc:
        reader.refuse_syntax(exc)
    except (ValueError, ArithmeticError, RecursionError) as exc:  # of a bad escape or number, in the pure Python parser
        raise error(f"not valid YAML: {exc}", path, 1, 1) from exc


def read_bytes(path: Path, error: FileError) -> bytes:
    """Return what is in a regular file of no more than `MAX_BYTES`, or raise `error`."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise error("this is a directory; give the path of a YAML file", path, 1, 1)
        if not stat.S_ISREG(mode):  # a pipe or a device would block or never end
            raise error("this is not a regular file; give the path of a YAML file", path, 1, 1)
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except AmpError:
        raise
    except FileNotFoundError as exc:
        raise error("there is no such file; give the path of an existing YAML file", path, 1, 1) from exc
    except (OSError, ValueError) as exc:
        raise error(f"the file cannot be read: {exc}", path, 1, 1) from exc
    if len(data) > MAX_BYTES:
        raise error(f"the file is larger than {MAX_BYTES} bytes, the most that is read", path, 1, 1)
    return data


def _decode(path: Path, error: FileError, data: bytes) -> str:
    data = data.removeprefix(b"\xef\xbb\xbf")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as exc:
        line, column = _position(data[: exc.start].decode("utf-8"))
        problem = f"byte 0x{data[exc.start]:02x} is not UTF-8 ({exc.reason}); save the file as UTF-8"
        raise error(problem, path, line, column) from exc
    if found := _FORBIDDEN.search(text):
        line, column = _position(text[: found.start()])
        raise error(f"character U+{ord(found[0]):04X} is not allowed in YAML; remove it", path, line, column)
    return text


def _position(before: str) -> tuple[int, int]:
    """Return the line and column of the character that follows the text `before`."""
    return before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1


class _Reader:
    """Builds nodes from the events of one file."""

    def __init__(self, path: Path, error: FileError, text: str) -> None:
        self._path, self._error, self._text = path, error, text
        self._events: Iterator[Any] = iter(yaml.parse(text, Loader=_LOADER))

    def read(self) -> Node:
        next(self._events)  # the start of the stream
        event = next(self._events)
        if isinstance(event, yaml.StreamEndEvent):
            raise self._error("the file is empty; it must hold a mapping (`key: value` lines)", self._path, 1, 1)
        root = self._node(next(self._events), 1)
        if not isinstance(root.value, dict):
            self._refuse(
                root.line, root.column, f"the file holds {_kind(root)}; it must hold a mapping (`key: value` lines)"
            )
        next(self._events)  # the end of the document
        event = next(self._events)
        if not isinstance(event, yaml.StreamEndEvent):
            self._refuse_event(event, "a second document starts here; put it into a file of its own")
        return root

    def refuse_syntax(self, exc: yaml.YAMLError) -> NoReturn:
        """Raise the parser's complaint, in plain words, with its position."""
        problem, line, column = explain_syntax(exc, self._text)
        raise self._error(f"not valid YAML: {problem}", self._path, line, column) from exc

    def _node(self, event: Any, depth: int) -> Node:
        if isinstance(event, yaml.AliasEvent):
            quoted = quote(f"*{event.anchor}")
            self._refuse_event(event, f"alias *{event.anchor} is not allowed; if it is a pattern, quote it: {quoted}")
        if getattr(event, "anchor", None) is not None:
            self._refuse_event(event, f"anchor &{event.anchor} is not allowed; write the value out where it is needed")
        if getattr(event, "tag", None) is not None:
            self._refuse_event(event, f"tag {event.tag!r} is not allowed; write plain text, a list or a mapping")
        if depth > MAX_DEPTH:
            self._refuse_event(event, f"nested deeper than {MAX_DEPTH} levels, the most that is allowed")
        line, column = event.start_mark.line + 1, event.start_mark.column + 1
        if isinstance(event, yaml.ScalarEvent):
            return Node(event.value, line, column, quoted=bool(event.style))
        if isinstance(event, yaml.SequenceStartEvent):
            return Node(list(self._items(depth)), line, column)
        return self._mapping(line, column, depth)

    def _items(self, depth: int) -> Iterator[Node]:
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            yield self._node(event, depth + 1)

    def _mapping(self, line: int, column: int, depth: int) -> Node:
        values: dict[str, Node] = {}
        key_at: dict[str, tuple[int, int]] = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            key = self._node(event, depth + 1)
            if not isinstance(key.value, str):
                self._refuse(key.line, key.column, f"a key is {_kind(key)}; keys must be plain text")
            if key.value in key_at:
                first = "{}:{}".format(*key_at[key.value])
                self._refuse(key.line, key.column, f"key {key.value!r} is already given at {first}; give each key once")
            key_at[key.value] = key.line, key.column
            values[key.value] = self._node(next(self._events), depth + 1)
        return Node(values, line, column, key_at=key_at)

    def _refuse_event(self, event: Any, problem: str) -> NoReturn:
        self._refuse(event.start_mark.line + 1, event.start_mark.column + 1, problem)

    def _refuse(self, line: int, column: int, problem: str) -> NoReturn:
        raise self._error(problem, self._path, line, column)


def _kind(node: Node) -> str:
    return {str: "a single text value", list: "a list", dict: "a mapping"}[type(node.value)]
