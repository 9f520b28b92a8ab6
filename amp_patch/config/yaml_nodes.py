"""A strict reader of YAML: it turns a file into `Node`s, which are plain data with a line and a column.

A file is one mapping, which contains text, lists and mappings. Scalars stay text: `no`, `1.0` and `2.12` are not
converted to a boolean or numbers. These features of YAML are errors: anchors and aliases, tags, duplicate or compound
keys, a second document, deep nesting, huge files, control characters. The reader uses only the events of PyYAML's
parser: PyYAML never constructs an object from a file.
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
"""Keys whose value is prose, or the names of lists. Such a value may contain look-alikes: characters such as curly
quotes, which look like ASCII (see the module `look_alikes`). In any other value, they are errors.
"""

_TOO_DEEP = f"nested deeper than {MAX_DEPTH} levels, the most that is allowed"

ErrorClass = type[OpListError] | type[PolicyError]
"""The class of the errors that the reader raises: OpListError for a list file, PolicyError for a presets file."""

# libyaml's parser, if PyYAML is built with it
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# Every character that YAML 1.1 forbids. The reader searches for them itself, because the C parser and the Python parser
# report them differently, and not always with a position. The characters after the `|` change the direction of text, so
# a terminal or a diff would show something else than the file holds.
_FORBIDDEN = re.compile(
    "[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]|[\u202a-\u202e\u2066-\u2069]"
)


@dataclass(frozen=True, slots=True)
class Node:
    """One value of a file, and the line and column where it starts, counted from 1.

    Attributes:
        quoted: the value is text in quotes, or a block (`|` or `>`).
        key_positions: the line and column of each key; empty unless the value is a mapping.
    """

    value: "str | list[Node] | dict[str, Node]"
    line: int
    column: int
    quoted: bool = False
    key_positions: dict[str, tuple[int, int]] = field(default_factory=dict)


def load_mapping(path: Path, error_class: ErrorClass, data: bytes | None = None) -> Node:
    """Return the mapping that the file holds. Any fault raises `error_class`, with line and column.

    Args:
        data: the content of the file, if `read_bytes` has read it already.
    """
    if data is None:
        data = read_bytes(path, error_class)
    text = _decode(path, error_class, data)
    try:
        return _Reader(path, error_class, text).read()
    except AmpError:  # the reader's own errors, which are also ValueErrors: the last handler must not get them
        raise
    except yaml.YAMLError as exc:
        problem, line, column = _explain_syntax(exc, text)
        if "nesting depth" in problem:  # libyaml has a limit, too, and may reach it first, because it reads ahead
            raise error_class(_TOO_DEEP, path, line, column) from exc
        raise error_class(f"not valid YAML: {problem}", path, line, column) from exc
    # PyYAML's own parser raises the first two for a bad escape; RecursionError: the caller's stack is nearly full
    except (ValueError, ArithmeticError, RecursionError) as exc:
        raise error_class(f"not valid YAML: {exc}", path, 1, 1) from exc


def read_bytes(path: Path, error_class: ErrorClass) -> bytes:
    """Return the content of a regular file of at most `MAX_BYTES`. Anything else raises `error_class`."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise error_class("this is a directory; give the path of a YAML file", path, 1, 1)
        if not stat.S_ISREG(mode):  # reading a pipe or a device may block, or never end
            raise error_class("this is not a regular file; give the path of a YAML file", path, 1, 1)
        with path.open("rb") as stream:
            # one byte more than allowed shows that the file is too large, without reading all of it
            data = stream.read(MAX_BYTES + 1)
    except AmpError:
        raise
    except FileNotFoundError as exc:
        raise error_class("there is no such file; give the path of an existing YAML file", path, 1, 1) from exc
    except (OSError, ValueError) as exc:
        raise error_class(f"the file cannot be read: {exc}", path, 1, 1) from exc
    if len(data) > MAX_BYTES:
        raise error_class(f"the file is larger than {MAX_BYTES} bytes, the most that is read", path, 1, 1)
    return data


def _decode(path: Path, error_class: ErrorClass, data: bytes) -> str:
    # some editors write a byte order mark
    data = data.removeprefix(b"\xef\xbb\xbf")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as exc:
        line, column = _position_after(data[: exc.start].decode("utf-8"))
        problem = f"byte 0x{data[exc.start]:02x} is not UTF-8 ({exc.reason}); save the file as UTF-8"
        raise error_class(problem, path, line, column) from exc
    forbidden = _FORBIDDEN.search(text)
    if forbidden:
        line, column = _position_after(text[: forbidden.start()])
        raise error_class(f"character U+{ord(forbidden[0]):04X} is not allowed; remove it", path, line, column)
    return text


def _position_after(before: str) -> tuple[int, int]:
    """Return the line and column of the character that follows the text `before`."""
    return before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1


class _Reader:
    """Builds nodes from the parser's events for one file."""

    def __init__(self, path: Path, error_class: ErrorClass, text: str) -> None:
        self._path, self._error_class = path, error_class
        self._lines = text.splitlines()
        self._events: Iterator[Any] = iter(yaml.parse(text, Loader=_LOADER))

    def read(self) -> Node:
        """Return the mapping of the file."""
        next(self._events)  # StreamStartEvent
        event = next(self._events)  # DocumentStartEvent, unless the file is empty
        if isinstance(event, yaml.StreamEndEvent):
            raise self._error_class("the file is empty; it must hold a mapping (`key: value` lines)", self._path, 1, 1)
        root = self._read_node(next(self._events), 1)
        if not isinstance(root.value, dict):
            problem = f"the file holds {_describe_kind(root)}; it must hold a mapping (`key: value` lines)"
            if isinstance(root.value, str):
                problem = _explain_missing_space(root.value) or problem
            raise self._error_class(problem, self._path, root.line, root.column)
        next(self._events)  # DocumentEndEvent
        event = next(self._events)
        if not isinstance(event, yaml.StreamEndEvent):
            self._refuse(event, "a second document starts here; put it into a file of its own")
        return root

    def _read_node(self, event: Any, depth: int, *, is_free: bool = False) -> Node:
        """Return the value that begins with an event, and consume its other events.

        Args:
            depth: the number of lists and mappings around the value, plus 1.
            is_free: the key of the value is in `FREE_TEXT_KEYS`.
        """
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
            if escaped:  # written as an escape such as "\e", so `_decode` did not see it; a terminal would execute it
                self._refuse(event, f"the escape of character U+{ord(escaped[0]):04X} is not allowed; remove it")
            if not is_free:
                self._refuse_look_alikes(event.value, line, column)
            return Node(event.value, line, column, quoted=bool(event.style))
        if isinstance(event, yaml.MappingStartEvent):
            return self._read_mapping(line, column, depth)
        items: list[Node] = []
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            items.append(self._read_node(event, depth + 1, is_free=is_free))
        return Node(items, line, column)

    def _read_mapping(self, line: int, column: int, depth: int) -> Node:
        """Return the mapping whose start event was just consumed, and consume its other events."""
        values: dict[str, Node] = {}
        key_positions: dict[str, tuple[int, int]] = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            key = self._read_node(event, depth + 1)
            if not isinstance(key.value, str):
                self._refuse(event, f"a key is {_describe_kind(key)}; keys must be plain text")
            missing_space = None if key.quoted else _explain_missing_space(key.value)
            if missing_space:
                self._refuse(event, missing_space)
            if key.value in key_positions:
                line_of_first, column_of_first = key_positions[key.value]
                first = f"{line_of_first}:{column_of_first}"
                self._refuse(event, f"key {key.value!r} is already given at {first}; give each key once")
            key_positions[key.value] = key.line, key.column
            values[key.value] = self._read_node(next(self._events), depth + 1, is_free=key.value in FREE_TEXT_KEYS)
        return Node(values, line, column, key_positions=key_positions)

    def _refuse_look_alikes(self, text: str, line: int, column: int) -> None:
        """Raise an error if the text has a look-alike, with its column if it is on the first line of the text."""
        look_alike = find_look_alike(text)
        if look_alike is not None:
            index_in_text, problem = look_alike
            # search the line for the character, because a quote before the text, or an escape in it, shifts the columns
            index_in_line = self._lines[line - 1].find(text[index_in_text], column - 1)
            raise self._error_class(problem, self._path, line, column if index_in_line < 0 else index_in_line + 1)

    def _refuse(self, event: Any, problem: str) -> NoReturn:
        raise self._error_class(problem, self._path, event.start_mark.line + 1, event.start_mark.column + 1)


def _describe_kind(node: Node) -> str:
    return {str: "a single text value", list: "a list", dict: "a mapping"}[type(node.value)]


# ---- syntax errors ---------------------------------------------------------------------------------------------------

_QUOTE_IT = 'a value that begins with one of * & ! % @ ` | > needs quotes, such as "*.norm"'
"""The remedy for an indicator: a character that has a meaning in YAML if a value begins with it."""

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
"""Words in the messages of libyaml and of PyYAML's own parser, each with a remedy. The first row that fits counts."""

_FREE_TEXT_KEY = re.compile(rf"\b({'|'.join(FREE_TEXT_KEYS)})\s*:\s")
_COMMENT = re.compile(r"(^|\s)#.*")
_KEY_COLON_VALUE = re.compile(r"(?:- +|[{,] *)?([A-Za-z_]{2,}):([^\s:,{}\[\]/][^\s,{}\[\]]*|[\[{].*)")


def _explain_missing_space(text: str) -> str | None:
    """Return the error message for text that begins with a key, a colon and a value, if no space follows the colon.

    Returns None for any other text.
    """
    match = _KEY_COLON_VALUE.match(text.strip())
    if match is None:
        return None
    # if the value is a list or a mapping, `text` may end before it does
    value = {"[": "[...]", "{": "{...}"}.get(match[2][0], match[2])
    return f"a colon needs a space after it; write `{match[1]}: {value}`"


_INDICATOR = re.compile(r"[*&!%@`|>]")


def _explain_syntax(exc: Any, text: str) -> tuple[str, int, int]:
    """Return the problem and remedy of a YAMLError, with its line and column, both from 1.

    A YAMLError may have two *marks*: where the parser gave up, and where the value began that it was reading. The
    cause, such as a curly quote, may be on any line between the two.
    """
    problem = getattr(exc, "problem", None) or " ".join(str(exc).split()) or type(exc).__name__
    context = getattr(exc, "context", None) or ""
    start = getattr(exc, "context_mark", None)
    mark = getattr(exc, "problem_mark", None) or start
    if mark is None:
        return problem, 1, 1
    # two more lines, because a mark may lie behind the last one
    lines = [*text.splitlines(), "", ""]
    marked_line = lines[mark.line]
    if "\t" in marked_line[: len(marked_line) - len(marked_line.lstrip())]:
        return "this line is indented with a tab; use spaces, YAML does not allow tabs there", *_to_position(mark)
    first = start.line if start else mark.line
    mistake = _find_usual_mistake(lines, first, mark.line)
    if mistake is not None:
        return mistake
    is_escape = "escape" in problem
    is_list_item = "simple key" in context and lines[first].lstrip().startswith("-")
    if start and (is_escape or is_list_item):
        # A list item without a space is wrong where it begins. For an escape, the two parsers give different columns.
        mark = start
    line, column = _to_position(mark)
    message = f"{context} {problem}".strip()
    for words, remedy in _REMEDIES:
        if words in message:
            message = f"{message}; {remedy}"
            break
    if _QUOTE_IT in message and column > 1 and _INDICATOR.match(marked_line, column - 2):
        column -= 1  # one of the two parsers points at the indicator, the other behind it
    return message, line, column


def _find_usual_mistake(lines: list[str], first: int, last: int) -> tuple[str, int, int] | None:
    """Return the first look-alike, or colon without a space, in a range of lines, or None.

    `first` and `last` are counted from 0. The result is an error, with its line and column from 1.
    """
    for number in range(first, last + 1):
        code = _COMMENT.sub("", lines[number])
        look_alike = None if _FREE_TEXT_KEY.search(code) else find_look_alike(code)
        if look_alike is not None:
            index, problem = look_alike
            return problem, number + 1, index + 1
        problem_of_colon = _explain_missing_space(code)
        if problem_of_colon:
            return problem_of_colon, number + 1, len(code) - len(code.lstrip()) + 1
    return None


def _to_position(mark: Any) -> tuple[int, int]:
    """Return line and column, counted from 1, of a mark of PyYAML, which counts from 0."""
    return mark.line + 1, mark.column + 1
