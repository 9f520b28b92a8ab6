"""What a list file holds, as written: its keys, and the entries under them, which name ops.

Every function raises OpListError with its place; one that takes `diagnostics` may leave errors there and go on.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from ..errors import OpListError, did_you_mean
from .diagnostics import Diagnostics
from .op_namespaces import get_op_names
from .rules import RULES, Rule
from .yaml_nodes import Node
from .yaml_syntax import quote

KEYS = ("description", "extends", "inplace_blacklist", "modules", *RULES)
ENTRY_KEYS = ("op", "why", "since", "until", "optional")
BOOLEANS = ("true", "false")
INPLACE_CHOICES = ("match", "error")
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")
VERSION = re.compile(r"[0-9]{1,4}(\.[0-9]{1,4}){0,2}")

_KEEPS_STATISTICS = frozenset({"batch_norm", "instance_norm", "native_batch_norm"})


@dataclass(frozen=True, slots=True)
class OpEntry:
    """One line of a list file.

    Attributes:
        op: the name, as written.
        rule: the list it is on.
        why: free text.
        path, line, column: where the name stands.
        since, until: the first version of torch that the entry is for, and the first that it is no longer for; empty
            for no bound.
        is_optional: whether torch may lack the op.
    """

    op: str
    rule: Rule
    why: str
    path: str
    line: int
    column: int
    since: str = ""
    until: str = ""
    is_optional: bool = False

    @property
    def place(self) -> str:
        """`file:line:column`."""
        return f"{self.path}:{self.line}:{self.column}"

    def is_for_this_torch(self) -> bool:
        """Whether the bounds leave the running torch in."""
        running = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:3])
        return (not self.since or _parse_version(self.since) <= running) and (
            not self.until or running < _parse_version(self.until)
        )


def is_op_list(root: Node) -> bool:
    """Tell whether a file is an op list, and no presets file, all of whose values are mappings."""
    assert isinstance(root.value, dict)
    are_levels = {key: isinstance(node.value, dict) for key, node in root.value.items()}
    return any(not is_level for key, is_level in are_levels.items() if key in KEYS) and not any(
        is_level for key, is_level in are_levels.items() if key not in KEYS
    )


def check_that_it_has_no_levels(root: Node, path: Path) -> None:
    """Raise OpListError for a presets file: a mapping under each key, none of which a list has."""
    assert isinstance(root.value, dict)
    levels = root.value.items()
    if levels and all(key not in KEYS and isinstance(node.value, dict) for key, node in levels):
        problem = (
            f"this is a presets file, with levels at its top ({', '.join(root.value)}): pass it as presets=...; an op"
            f" list has the keys {', '.join(KEYS)}"
        )
        raise OpListError(problem, path, root.line, root.column)


def check_keys(node: Node, allowed: tuple[str, ...], path: Path, diagnostics: Diagnostics) -> dict[str, Node]:
    """Return a mapping's values, after a look at its keys."""
    assert isinstance(node.value, dict)
    for key, (line, column) in node.key_at.items():
        with diagnostics:
            if key not in allowed:
                problem = f"unknown key {key!r}; allowed are {', '.join(allowed)}.{did_you_mean(key, allowed)}"
                raise OpListError(problem, path, line, column)
    return node.value


def read_text(node: Node, path: Path, what: str) -> str:
    """Return the text of a scalar; `what` it stands for opens the error."""
    if not isinstance(node.value, str):
        kind = {list: "list", dict: "mapping"}[type(node.value)]
        problem = f"{what} must be a single text value, not a {kind}; write the text alone"
        raise OpListError(problem, path, node.line, node.column)
    return node.value


def read_choice(node: Node, path: Path, what: str, allowed: tuple[str, ...]) -> str:
    """Return the text of a scalar that must be one of the allowed words."""
    text = read_text(node, path, what)
    if text not in allowed:
        problem = f"{what} is {text!r}; allowed are {', '.join(allowed)}.{did_you_mean(text, allowed)}"
        raise OpListError(problem, path, node.line, node.column)
    return text


def is_null(node: Node | None) -> bool:
    """Tell whether a value is the word `null`."""
    return node is not None and node.value == "null" and not node.quoted


def get_items(node: Node | None, path: Path, key: str) -> list[Node]:
    """Return a key's items; a key with nothing after it has none, and `extends` may hold one name without brackets."""
    if node is None or (node.value == "" and not node.quoted):
        return []
    if isinstance(node.value, list):
        return node.value
    if key == "extends":
        return [node]
    item = "{type: torch.nn.LayerNorm, run: float32}" if key == "modules" else "softmax"
    problem = f"{key} must be a list; begin a line with `- ` for each item, such as `- {item}`"
    raise OpListError(problem, path, node.line, node.column)


def read_entries(keys: dict[str, Node], path: Path, diagnostics: Diagnostics) -> Iterator[OpEntry]:
    """Yield the entries of all rules."""
    for rule in RULES:
        nodes: list[Node] = []
        with diagnostics:
            nodes = get_items(keys.get(rule), path, rule)
        for node in nodes:
            with diagnostics:
                yield from _read_entry(rule, node, path, diagnostics)


def _read_entry(rule: Rule, node: Node, path: Path, diagnostics: Diagnostics) -> Iterator[OpEntry]:
    """Yield one entry, or none where a fault leaves open which op it names, or for which torch it is."""
    if isinstance(node.value, dict):
        _check_that_its_op_is_no_key(node, path)
    fields = check_keys(node, ENTRY_KEYS, path, diagnostics) if isinstance(node.value, dict) else {"op": node}
    why, is_optional, bounds = "", False, None
    with diagnostics:
        why = read_text(fields["why"], path, "why") if "why" in fields else ""
    with diagnostics:
        is_optional = "optional" in fields and read_choice(fields["optional"], path, "optional", BOOLEANS) == "true"
    bounds = _read_bounds(fields, path, diagnostics)
    if "op" not in fields and not set(fields) <= set(ENTRY_KEYS):
        return  # another word for it may be among the unknown keys
    if "op" not in fields:
        problem = f"an entry of {rule} needs the key 'op'; write {{op: softmax}}, or the name alone"
        raise OpListError(problem, path, node.line, node.column)
    name = _read_name(fields["op"], rule, path)
    if bounds is not None:
        yield OpEntry(name, rule, why, str(path), fields["op"].line, fields["op"].column, *bounds, is_optional)


def _check_that_its_op_is_no_key(node: Node, path: Path) -> None:
    """Raise OpListError for an entry that is `softmax: range`, and nothing more."""
    assert isinstance(node.value, dict)
    key, why = next(iter(node.value.items()), ("", node))
    if len(node.value) == 1 and isinstance(why.value, str) and ("." in key or key in get_op_names()):
        reason = why.value if re.fullmatch(r"[\w ./-]*", why.value) else quote(why.value)
        written = f"{{op: {key}, why: {reason}}}" if reason else key
        raise OpListError(f"{key!r} is an op, and not a key of an entry; write {written}", path, node.line, node.column)


def _read_name(node: Node, rule: Rule, path: Path) -> str:
    name = read_text(node, path, f"an entry of {rule}")
    if not NAME.fullmatch(name):
        problem = _explain_name(name, node.quoted)
    elif rule is Rule.WHITELIST and name.rpartition(".")[2] in _KEEPS_STATISTICS:
        problem = (
            f"{name} writes its running statistics, which are float32, and would write to cast copies of them; leave it"
            " unlisted, it takes 16-bit inputs as it is"
        )
    else:
        return name
    raise OpListError(problem, path, node.line, node.column)


def _explain_name(name: str, is_quoted: bool) -> str:
    """Return what is wrong with text that is no name, and what to do."""
    words = [word for word in re.split(r"[\s,]+", name) if word != "-"]
    if name.startswith("-") and NAME.fullmatch(name[1:]):
        return f"{name!r} is not an op name; take the dash away"
    if is_quoted or len(words) < 2 or not all(NAME.fullmatch(word) for word in words):
        return f"{name!r} is not an op name; write a name such as softmax or torch.fft.rfft"
    if " - " in name:
        return f"{name!r} is one item, since what follows it is indented further; put the dashes below each other"
    return f"{name!r} is one item; begin a line with `- ` for each op, or write [{', '.join(words)}]"


def _read_bounds(fields: dict[str, Node], path: Path, diagnostics: Diagnostics) -> tuple[str, str] | None:
    """Return `since` and `until`, each empty if it is not given, or None if one is at fault."""
    bounds: list[str] = []
    for name in ("since", "until"):
        with diagnostics:
            bounds.append(_read_version(fields[name], path, name) if name in fields else "")
    if len(bounds) < 2:
        return None
    since, until = bounds
    with diagnostics:
        if since and until and _parse_version(since) >= _parse_version(until):
            problem = f"until {until!r} is not later than since {since!r}, so no torch fits; give a later one"
            raise OpListError(problem, path, fields["until"].line, fields["until"].column)
    return since, until


def _read_version(node: Node, path: Path, what: str) -> str:
    text = read_text(node, path, what)
    if not VERSION.fullmatch(text):
        raise OpListError(f"{what} is {text!r}; give a torch version such as 2.12", path, node.line, node.column)
    return text


def _parse_version(text: str) -> tuple[int, ...]:
    """Return the three numbers of a version."""
    parts = tuple(int(part) for part in text.split("."))
    return parts + (0,) * (3 - len(parts))
