"""What a list file holds, as written: its keys, and the entries under them, which name ops.

Every function raises OpListError with `path:line:column`; one that takes `faults` may leave errors there and go on.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from ..errors import OpListError, did_you_mean
from .diagnostics import Faults
from .yaml_nodes import Node

RULES = ("whitelist", "blacklist", "promote", "sequence_promote", "banned", "neutral")

_KEEPS_STATISTICS = frozenset({"batch_norm", "instance_norm", "native_batch_norm"})
_ENTRY_KEYS = ("op", "why", "since", "until", "optional")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")
_VERSION = re.compile(r"[0-9]{1,4}(\.[0-9]{1,4}){0,2}")


@dataclass(frozen=True, slots=True)
class OpEntry:
    """One line of a list file: the op as written, the list it is on, where, and the bounds on torch's version,
    if any.
    """

    op: str
    rule: str
    why: str
    path: str
    line: int
    column: int
    since: str = ""
    until: str = ""


class Line(NamedTuple):
    """An entry, whether torch may lack its op, and whether it is meant for the running torch."""

    entry: OpEntry
    is_optional: bool = False
    applies: bool = True


def check_keys(node: Node, allowed: tuple[str, ...], path: Path, faults: Faults) -> dict[str, Node]:
    """Return a mapping's values, after a look at its keys."""
    assert isinstance(node.value, dict)
    for key, (line, column) in node.key_at.items():
        with faults:
            if key not in allowed:
                raise OpListError(
                    f"{path}:{line}:{column}: unknown key {key!r}; allowed are"
                    f" {', '.join(allowed)}.{did_you_mean(key, allowed)}"
                )
    return node.value


def read_text(node: Node, path: Path, what: str) -> str:
    """Return the text of a scalar; `what` it stands for opens the error."""
    if not isinstance(node.value, str):
        raise OpListError(
            f"{path}:{node.line}:{node.column}: {what} must be a single text value, not a {type(node.value).__name__}"
        )
    return node.value


def read_choice(node: Node, path: Path, what: str, allowed: tuple[str, ...]) -> str:
    """Return the text of a scalar that must be one of the allowed words."""
    text = read_text(node, path, what)
    if text not in allowed:
        raise OpListError(
            f"{path}:{node.line}:{node.column}: {what} is {text!r}; allowed are"
            f" {', '.join(allowed)}.{did_you_mean(text, allowed)}"
        )
    return text


def get_items(node: Node | None, path: Path, key: str) -> list[Node]:
    """Return a key's items; a key with nothing after it has none, and `extends` may hold one name without brackets."""
    if node is None or (node.value == "" and not node.quoted):
        return []
    if isinstance(node.value, list):
        return node.value
    if key == "extends":
        return [node]
    raise OpListError(f"{path}:{node.line}:{node.column}: {key} must be a list of ops (`- name` lines)")


def read_entries(keys: dict[str, Node], path: Path, faults: Faults) -> Iterator[Line]:
    """Yield the entries of all rules."""
    for rule in RULES:
        nodes: list[Node] = []
        with faults:
            nodes = get_items(keys.get(rule), path, rule)
        for node in nodes:
            with faults:
                yield from _read_entry(rule, node, path, faults)


def _read_entry(rule: str, node: Node, path: Path, faults: Faults) -> Iterator[Line]:
    """Yield one entry, or none where a fault leaves open which op it names."""
    fields = check_keys(node, _ENTRY_KEYS, path, faults) if isinstance(node.value, dict) else {"op": node}
    why, is_optional = "", False
    with faults:
        why = read_text(fields["why"], path, "why") if "why" in fields else ""
    with faults:
        is_optional = (
            "optional" in fields and read_choice(fields["optional"], path, "optional", ("true", "false")) == "true"
        )
    applies = _applies(fields, path, faults)
    if "op" not in fields:
        raise OpListError(f"{path}:{node.line}:{node.column}: an entry of {rule} needs the key 'op'")
    name = _op_name(fields["op"], rule, path)
    since, until = (str(fields[bound].value) if bound in fields else "" for bound in ("since", "until"))
    yield Line(
        OpEntry(name, rule, why, str(path), fields["op"].line, fields["op"].column, since, until), is_optional, applies
    )


def _op_name(node: Node, rule: str, path: Path) -> str:
    name = read_text(node, path, f"an entry of {rule}")
    if not _NAME.fullmatch(name):
        raise OpListError(
            f"{path}:{node.line}:{node.column}: {name!r} is not an op name; write a name such as softmax or"
            " torch.fft.rfft"
        )
    if rule == "whitelist" and name.rpartition(".")[2] in _KEEPS_STATISTICS:
        raise OpListError(
            f"{path}:{node.line}:{node.column}: {name} writes its running statistics, which are float32, and would"
            " write to cast copies of them. Leave it unlisted: it takes 16-bit inputs as it is"
        )
    return name


def _applies(fields: dict[str, Node], path: Path, faults: Faults) -> bool:
    """Whether an entry is meant for the running torch; not if its bounds are at fault, as nothing can be said of its op
    then.
    """
    bounds: list[tuple[int, ...] | None] = []
    for name in ("since", "until"):
        with faults:
            bounds.append(_version(fields.get(name), path, name))
    if len(bounds) < 2:
        return False
    since, until = bounds
    with faults:
        if since and until and since >= until:
            node, text = fields["until"], fields["since"].value
            raise OpListError(
                f"{path}:{node.line}:{node.column}: until {node.value!r} is not later than since {text!r}; no torch"
                " fits"
            )
    running = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:3])
    return (since is None or since <= running) and (until is None or running < until)


def _version(node: Node | None, path: Path, what: str) -> tuple[int, ...] | None:
    """Return the three numbers of a version, or None for no version."""
    if node is None:
        return None
    text = read_text(node, path, what)
    if not _VERSION.fullmatch(text):
        raise OpListError(f"{path}:{node.line}:{node.column}: {what} is {text!r}; give a torch version such as 2.12")
    parts = tuple(int(part) for part in text.split("."))
    return parts + (0,) * (3 - len(parts))
