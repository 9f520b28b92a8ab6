"""A strict reader of YAML: data with positions, and nothing else.

A file is one mapping of text, lists and mappings. Scalars stay text, so `no`, `1.0` and `2.12` arrive as written.
Surprising features are errors: anchors and aliases, tags, duplicate or compound keys, a second document, deep nesting,
huge files, control characters. The reader walks the parser's events and builds only `Node`; no constructor of PyYAML
ever runs.
"""

import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import yaml

from ..errors import AmpError, OpListError, PolicyError
from .look_alikes import find_look_alike

MAX_BYTES = 1 << 20
MAX_DEPTH = 16

FREE_TEXT_KEYS = ("description", "why", "extends", "lists")
"""Keys whose text is prose or the name of a file. Every character is allowed there."""

_TOO_DEEP = f"nested deeper than {MAX_DEPTH} levels, the most that is allowed"

FileError = type[OpListError] | type[PolicyError]
"""The class of errors that the reader raises."""

# Only its event parser is used, which is the same for the safe and the full loader.
_LOADER = getattr(yaml, "CLoader", yaml.Loader)
# All characters except those that YAML 1.1 allows. The search is here so that both parsers report them alike, with a
# position. Characters that change the text direction make a terminal or a diff show another line than the file has.
_FORBIDDEN = re.compile(
    "[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]|[\u202a-\u202e\u2066-\u2069]"
)


@dataclass(frozen=True, slots=True)
class Node:
    """One value of a file and the place where it starts. Lines and columns count from 1."""

    value: "str | list[Node] | dict[str, Node]"
    line: int
    column: int
    quoted: bool = False
    key_at: dict[str, tuple[int, int]] = field(default_factory=dict)


def load_mapping(path: Path, error: FileError, data: bytes | None = None) -> Node:
    """Return the mapping that the file holds, or raise `error` with the place of the fault.

    Raises only `error`, whatever the bytes are.

    Args:
        data: the result of `read_bytes`, if it was called before.
    """
    if data is None:
        data = read_bytes(path, error)
    text = _decode(path, error, data)
    try:
        return _Reader(path, error, text).read()
    except AmpError:  # some of these are ValueErrors too, but already say where
        raise
    except yaml.YAMLError as exc:
        problem, line, column = _explain_syntax(exc, text)
        if "nesting depth" in problem:  # libyaml has a limit of its own, and reads ahead
            raise error(_TOO_DEEP, path, line, column) from exc
        raise error(f"not valid YAML: {problem}", path, line, column) from exc
    except (ValueError, ArithmeticError, RecursionError) as exc:  # a bad escape or number, in the pure Python parser
        raise error(f"not valid YAML: {exc}", path, 1, 1) from exc


def read_bytes(path: Path, error: FileError) -> bytes:
    """Return the content of a regular file of at most `MAX_BYTES`, or raise `error`."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise error("this is a directory; give the path of a YAML file", path, 1, 1)
        if not stat.S_ISREG(mode):  # a pipe or a device would block or never end
            raise error("this is not a regular file; give the path of a YAML file", path, 1, 1)
        with path.open("rb") as stream:
            # a byte more than allowed shows that the file is too large
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
    # the byte order mark, which some editors write
    data = data.removeprefix(b"\xef\xbb\xbf")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as exc:
        line, column = _position(data[: exc.start].decode("utf-8"))
        problem = f"byte 0x{data[exc.start]:02x} is not UTF-8 ({exc.reason}); save the file as UTF-8"
        raise error(problem, path, line, column) from exc
    forbidden = _FORBIDDEN.search(text)
    if forbidden:
        line, column = _position(text[: forbidden.start()])
        raise error(f"character U+{ord(forbidden[0]):04X} is not allowed; remove it", path, line, column)
    return text


def _position(before: str) -> tuple[int, int]:
    """Return the line and column of the character that follows the text `before`."""
    return before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1


class _Reader:
    """Builds nodes from the events of one file."""

    def __init__(self, path: Path, error: FileError, text: str) -> None:
        self._path, self._error = path, error
        self._lines = text.splitlines()
        self._events: Iterator[Any] = iter(yaml.parse(text, Loader=_LOADER))

    def read(self) -> Node:
        next(self._events)  # the start of the stream
        event = next(self._events)
        if isinstance(event, yaml.StreamEndEvent):
            raise self._error("the file is empty; it must hold a mapping (`key: value` lines)", self._path, 1, 1)
        root = self._node(next(self._events), 1)
        if not isinstance(root.value, dict):
            problem = f"the file holds {_kind(root)}; it must hold a mapping (`key: value` lines)"
            if isinstance(root.value, str):
                problem = _find_missing_space(root.value) or problem
            raise self._error(problem, self._path, root.line, root.column)
        next(self._events)  # the end of the document
        event = next(self._events)
        if not isinstance(event, yaml.StreamEndEvent):
            self._refuse(event, "a second document starts here; put it into a file of its own")
        return root

    def _node(self, event: Any, depth: int, *, is_free: bool = False) -> Node:
        """Return the value that begins with an event. `is_free`: its key is in `FREE_TEXT_KEYS`."""
        if isinstance(event, yaml.AliasEvent):
            alias = f"*{event.anchor}"
            self._refuse(event, f'alias {alias} is not allowed; if it is a pattern, quote it: "{alias}"')
        if getattr(event, "anchor", None) is not None:
            self._refuse(event, f"anchor &{event.anchor} is not allowed; write the value out where it is needed")
        if getattr(event, "tag", None) is not None:
            self._refuse(event, f"tag {event.tag!r} is not allowed; write plain text, a list or a mapping")
        if depth > MAX_DEPTH:
            self._refuse(event, _TOO_DEEP)
        line, column = event.start_mark.line + 1, event.start_mark.column + 1
        if isinstance(event, yaml.ScalarEvent):
            escaped = _FORBIDDEN.search(event.value)
            if escaped:  # a terminal would obey it
                self._refuse(event, f"the escape of character U+{ord(escaped[0]):04X} is not allowed; remove it")
            if not is_free:
                self._check_letters(event.value, line, column)
            return Node(event.value, line, column, quoted=bool(event.style))
        if isinstance(event, yaml.MappingStartEvent):
            return self._mapping(line, column, depth)
        items: list[Node] = []
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            items.append(self._node(event, depth + 1, is_free=is_free))
        return Node(items, line, column)

    def _mapping(self, line: int, column: int, depth: int) -> Node:
        values: dict[str, Node] = {}
        key_at: dict[str, tuple[int, int]] = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            key = self._node(event, depth + 1)
            if not isinstance(key.value, str):
                self._refuse(event, f"a key is {_kind(key)}; keys must be plain text")
            missing = None if key.quoted else _find_missing_space(key.value)
            if missing:
                self._refuse(event, missing)
            if key.value in key_at:
                first = "{}:{}".format(*key_at[key.value])
                self._refuse(event, f"key {key.value!r} is already given at {first}; give each key once")
            key_at[key.value] = key.line, key.column
            values[key.value] = self._node(next(self._events), depth + 1, is_free=key.value in FREE_TEXT_KEYS)
        return Node(values, line, column, key_at=key_at)

    def _check_letters(self, text: str, line: int, column: int) -> None:
        """Raise the error of a character that looks like another, at its place in the line."""
        look_alike = find_look_alike(text)
        if look_alike is not None:
            position, problem = look_alike
            at = self._lines[line - 1].find(text[position], column - 1)  # the text may begin with a quote
            raise self._error(problem, self._path, line, column if at < 0 else at + 1)

    def _refuse(self, event: Any, problem: str) -> NoReturn:
        raise self._error(problem, self._path, event.start_mark.line + 1, event.start_mark.column + 1)


def _kind(node: Node) -> str:
    return {str: "a single text value", list: "a list", dict: "a mapping"}[type(node.value)]


# ---- syntax errors ---------------------------------------------------------------------------------------------------

_QUOTE_IT = 'a value that begins with one of * & ! % @ ` | > needs quotes, such as "*.norm"'
_REMEDIES = (
    ("alias", _QUOTE_IT),
    ("anchor", _QUOTE_IT),
    ("cannot start any token", _QUOTE_IT),
    ("flow", "close the bracket, or quote a value that has a `:` in it, or remove a second comma"),
    ("unexpected ':'", "quote a value that has a `:` in it"),
    ("quoted scalar", "close the quote; in double quotes a backslash begins an escape, in single quotes it does not"),
    ("simple key", "write `key:` with a colon, and `- ` with a space before an item"),
    (
        "mapping values",
        "quote a value that has a `:` in it; put the dashes of a list, or the keys of a mapping, in one column",
    ),
    ("block", "put the dashes of a list, or the keys of a mapping, in one column"),
)
"""Words in the messages of PyYAML's parsers, and the remedy for each. The first match counts."""

_FREE_KEY = re.compile(rf"\b({'|'.join(FREE_TEXT_KEYS)})\s*:\s")
_COMMENT = re.compile(r"(^|\s)#.*")
_COLON = re.compile(r"(?:- +|[{,] *)?([A-Za-z_]{2,}):([^\s:,{}\[\]/][^\s,{}\[\]]*)")


def _find_missing_space(text: str) -> str | None:
    """Return the error for text that begins with a key, a colon and a value without a space between them, or None."""
    match = _COLON.match(text.lstrip())
    if match is None:
        return None
    return f"a colon needs a space after it; write `{match[1]}: {match[2]}`"


_INDICATOR = re.compile(r"[*&!%@`|>]")


def _explain_syntax(exc: Any, text: str) -> tuple[str, int, int]:
    """Return the problem and remedy of a YAMLError of either parser, with line and column from 1."""
    problem = getattr(exc, "problem", None) or " ".join(str(exc).split()) or type(exc).__name__
    context = getattr(exc, "context", None) or ""
    begin = getattr(exc, "context_mark", None)
    mark = getattr(exc, "problem_mark", None) or begin
    if mark is None:
        return problem, 1, 1
    # a mark may lie behind the last line
    lines = [*text.splitlines(), "", ""]
    source = lines[mark.line]
    if "\t" in source[: len(source) - len(source.lstrip())]:
        return "this line begins with a tab; indent with spaces, YAML does not allow tabs there", *_place_of(mark)
    for number in range(begin.line if begin else mark.line, mark.line + 1):
        code = _COMMENT.sub("", lines[number])
        look_alike = None if _FREE_KEY.search(code) else find_look_alike(code)
        if look_alike is not None:
            return look_alike[1], number + 1, look_alike[0] + 1
        missing = _find_missing_space(code)
        if missing:
            return missing, number + 1, len(code) - len(code.lstrip()) + 1
    if begin and ("escape" in problem or ("simple key" in context and lines[begin.line].lstrip().startswith("-"))):
        mark = begin  # where the text or the item starts; the parser noticed later
    line, column = _place_of(mark)
    complaint = f"{context} {problem}".strip()
    for words, remedy in _REMEDIES:
        if words in complaint:
            complaint = f"{complaint}; {remedy}"
            break
    if _QUOTE_IT in complaint and column > 1 and _INDICATOR.match(source, column - 2):
        column -= 1  # one of the parsers points behind the character
    return complaint, line, column


def _place_of(mark: Any) -> tuple[int, int]:
    return mark.line + 1, mark.column + 1
