"""Entries of an op list that keep modules or ops in float32: which cover which, and how they are written."""

import fnmatch
import itertools
import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ...tables import natural_order
from ..remedies import Remedy, RemedyKind


@dataclass(frozen=True, slots=True)
class ListEntry:
    """One line of a list.

    Attributes:
        kind: "module" or "op".
        name: a pattern for qualified names, or an op.
    """

    kind: str
    name: str

    def matches(self, module: str) -> bool:
        """Tell whether this names a module itself."""
        if self.kind != "module":
            return False
        if self.name in ("**", module):
            return True
        parts, own = module.split("."), self.name.split(".")
        return len(parts) == len(own) and all(map(fnmatch.fnmatchcase, parts, own))

    def covers(self, other: "ListEntry") -> bool:
        """Tell whether this makes another entry, for modules inside of its own, needless."""
        if self == other or self.kind != "module" or other.kind != "module":
            return False
        if self.name == "**":
            return True
        own, parts = self.name.split("."), other.name.split(".")
        return len(parts) >= len(own) and all(a in (b, "*") for a, b in zip(own, parts, strict=False))


def find_entries(remedy: Remedy, units: str) -> list[ListEntry]:
    """Return entries of the units asked for that do what a remedy says; none where such entries cannot."""
    choosers = [chooser.partition("match: ") for chooser in remedy.regions]
    modules = [ListEntry("module", json.loads(name)) for _, is_match, name in choosers if is_match]
    modules = [one for one in modules if not one.name.startswith("re:")]
    ops = [ListEntry("op", name) for name in remedy.ops]
    if len(modules) < len(remedy.regions) or remedy.kind is not RemedyKind.LIST:
        return []
    if units == "both":
        return [*modules, *ops]
    if units == "modules":
        return [] if ops else modules
    if modules and not remedy.alternative:
        return []
    return ops + [ListEntry("op", name) for name in remedy.alternative]


def prune(entries: Iterable[ListEntry]) -> tuple[ListEntry, ...]:
    """Return entries without those that others cover, sorted: modules first, then by name."""
    given = set(entries)
    kept = [one for one in given if not any(other.covers(one) for other in given)]
    return tuple(sorted(kept, key=lambda one: (one.kind, natural_order(one.name))))


def fold(names: Iterable[str], existing: Collection[str]) -> list[ListEntry]:
    """Return entries for modules: one for siblings that differ in numbers only, if all that there are are among them.

    In the order of the first name of each.
    """
    left, entries = list(dict.fromkeys(names)), []
    while left:
        name = left[0]
        for pattern in _patterns(name):
            entry = ListEntry("module", pattern)
            matched = [one for one in existing if entry.matches(one)]
            if len(matched) > 1 and set(matched) <= set(left):
                break
        else:
            entry, matched = ListEntry("module", name), [name]
        entries.append(entry)
        left = [one for one in left if one not in matched]
    return entries


def _patterns(name: str) -> Iterator[str]:
    """Yield a name with `*` for its numbers: for all of them first, for one last."""
    parts = name.split(".")
    numbers = [index for index, part in enumerate(parts) if part.isdecimal()]
    for size in range(len(numbers), 0, -1):
        for chosen in itertools.combinations(numbers, size):
            pattern = list(parts)
            for index in chosen:
                pattern[index] = "*"
            yield ".".join(pattern)


def format_list(extends: Sequence[str], entries: Sequence[ListEntry], reasons: dict[ListEntry, str]) -> str:
    """Return the text of a list file with these entries."""
    lines = []
    if len(extends) == 1 and re.fullmatch(r"[\w/][\w./-]*", extends[0]):
        lines.append(f"extends: {extends[0]}")
    elif extends:
        lines.append(f"extends: {json.dumps(extends)}")
    modules = [one for one in entries if one.kind == "module"]
    if modules:
        lines.append("modules:")
    for one in modules:
        lines.append(f"  - {{match: {json.dumps(one.name)}, run: float32{_why(reasons.get(one))}}}")
    ops = [one for one in entries if one.kind == "op"]
    if ops:
        lines.append("blacklist:")
    for one in ops:
        lines.append(f"  - {{op: {one.name}{_why(reasons.get(one))}}}")
    return "".join(f"{line}\n" for line in lines)


def _why(reason: str | None) -> str:
    if not reason:
        return ""
    return f", why: {json.dumps(reason)}"
