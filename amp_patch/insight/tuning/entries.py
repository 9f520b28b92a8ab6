"""Entries of an op list that keep modules or ops in float32: which cover which, and how they are written."""

import fnmatch
import itertools
import json
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a list.

    Attributes:
        kind: "module" or "op".
        name: a pattern for qualified names, or an op.
    """

    kind: str
    name: str

    def matches(self, module: str) -> bool:
        """Tell whether this names a module itself."""
        parts, own = module.split("."), self.name.split(".")
        if self.kind != "module" or self.name == "**" or len(parts) != len(own):
            return self.kind == "module" and self.name in ("**", module)
        return all(map(fnmatch.fnmatchcase, parts, own))

    def covers(self, other: "Entry") -> bool:
        """Tell whether this makes another entry, for modules inside of its own, needless."""
        if self == other or self.kind != "module" or other.kind != "module":
            return False
        if self.name == "**":
            return True
        own, parts = self.name.split("."), other.name.split(".")
        return len(parts) >= len(own) and all(a in (b, "*") for a, b in zip(own, parts, strict=False))


def prune(entries: Iterable[Entry]) -> tuple[Entry, ...]:
    """Return entries without those that others cover, sorted: modules first, then by name."""
    given = set(entries)
    kept = [one for one in given if not any(other.covers(one) for other in given)]
    return tuple(sorted(kept, key=lambda one: (one.kind, _natural(one.name))))


def fold(names: Iterable[str], existing: Collection[str]) -> list[Entry]:
    """Return entries for modules: one for siblings that differ in numbers only, if all that there are are among them.

    In the order of the first name of each.
    """
    left, entries = list(dict.fromkeys(names)), []
    while left:
        name = left[0]
        for pattern in _patterns(name):
            entry = Entry("module", pattern)
            matched = [one for one in existing if entry.matches(one)]
            if len(matched) > 1 and set(matched) <= set(left):
                break
        else:
            entry, matched = Entry("module", name), [name]
        entries.append(entry)
        left = [one for one in left if one not in matched]
    return entries


def _patterns(name: str) -> list[str]:
    """Return a name with `*` for its numbers: for all of them first, for none not at all."""
    parts = name.split(".")
    numbers = [index for index, part in enumerate(parts) if part.isdecimal()]
    chosen = (some for size in range(len(numbers), 0, -1) for some in itertools.combinations(numbers, size))
    return [".".join("*" if index in some else part for index, part in enumerate(parts)) for some in chosen]


def format_list(extends: Sequence[str], entries: Sequence[Entry], reasons: dict[Entry, str]) -> str:
    """Return the text of a list file with these entries."""
    lines = []
    if extends:
        is_plain = len(extends) == 1 and re.fullmatch(r"[\w/][\w./-]*", extends[0])
        lines.append(f"extends: {extends[0] if is_plain else json.dumps(extends)}")
    for kind, key in (("module", "modules"), ("op", "blacklist")):
        chosen = [one for one in entries if one.kind == kind]
        lines += [f"{key}:"] if chosen else []
        lines += [f"  - {_write(one, reasons.get(one, ''))}" for one in chosen]
    return "".join(f"{line}\n" for line in lines)


def _write(entry: Entry, reason: str) -> str:
    name = json.dumps(entry.name)
    why = f", why: {json.dumps(reason)}" if reason else ""
    return f"{{match: {name}, run: float32{why}}}" if entry.kind == "module" else f"{{op: {entry.name}{why}}}"


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")]
