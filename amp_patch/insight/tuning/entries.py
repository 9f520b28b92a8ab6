"""`ListEntry`: an entry of an op list that keeps modules or an op in float32."""

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
        """Return whether the pattern of this entry matches the name of a module."""
        if self.kind != "module":
            return False
        if self.name in ("**", module):
            return True
        parts, own = module.split("."), self.name.split(".")
        return len(parts) == len(own) and all(map(fnmatch.fnmatchcase, parts, own))

    def covers(self, other: "ListEntry") -> bool:
        """Return whether this entry makes another one needless, because its modules contain the other's."""
        if self == other or self.kind != "module" or other.kind != "module":
            return False
        if self.name == "**":
            return True
        own, parts = self.name.split("."), other.name.split(".")
        return len(parts) >= len(own) and all(a in (b, "*") for a, b in zip(own, parts, strict=False))


def find_entries(remedy: Remedy, units: str) -> list[ListEntry]:
    """Return entries of these units that apply a remedy; an empty list if there are none."""
    choosers = [chooser.partition("match: ") for chooser in remedy.regions]
    modules = [ListEntry("module", json.loads(name)) for _, is_match, name in choosers if is_match]
    modules = [entry for entry in modules if not entry.name.startswith("re:")]
    ops = [ListEntry("op", name) for name in remedy.ops]
    # no `ListEntry` expresses a rule by class, or one for the root of several models
    if len(modules) < len(remedy.regions) or remedy.kind is not RemedyKind.LIST:
        return []
    if units == "both":
        return [*modules, *ops]
    if units == "modules":
        return [] if ops else modules
    if modules and not remedy.alternative:
        return []  # no ops suffice in place of the modules
    return ops + [ListEntry("op", name) for name in remedy.alternative]


def prune(entries: Iterable[ListEntry]) -> tuple[ListEntry, ...]:
    """Return entries without needless ones, modules before ops, each by name."""
    given = set(entries)
    kept = [entry for entry in given if not any(wider.covers(entry) for wider in given)]
    return tuple(sorted(kept, key=lambda entry: (entry.kind, natural_order(entry.name))))


def fold_siblings(names: Iterable[str], existing: Collection[str]) -> list[ListEntry]:
    """Return entries for modules, in the order of `names`.

    Siblings, whose names differ only in numbers, get one entry if `names` has all that exist.
    """
    left, entries = list(dict.fromkeys(names)), []
    while left:
        name = left[0]
        # patterns with more stars come first, so the first that matches only modules in `left` is the widest
        for pattern in _patterns(name):
            entry = ListEntry("module", pattern)
            matched = [module for module in existing if entry.matches(module)]
            if len(matched) > 1 and set(matched) <= set(left):
                break
        else:
            entry, matched = ListEntry("module", name), [name]
        entries.append(entry)
        left = [module for module in left if module not in matched]
    return entries


def _patterns(name: str) -> Iterator[str]:
    """Yield a name with `*` in place of some of its numbers: first of all, at last of a single one."""
    parts = name.split(".")
    numbers = [index for index, part in enumerate(parts) if part.isdecimal()]
    for size in range(len(numbers), 0, -1):
        for chosen in itertools.combinations(numbers, size):
            pattern = list(parts)
            for index in chosen:
                pattern[index] = "*"
            yield ".".join(pattern)


def format_list(extends: Sequence[str], entries: Sequence[ListEntry], reasons: dict[ListEntry, str]) -> str:
    """Return the text of a list file with these entries, and with a reason for each if it has one."""
    lines = []
    if len(extends) == 1 and re.fullmatch(r"[\w/][\w./-]*", extends[0]):
        lines.append(f"extends: {extends[0]}")
    elif extends:
        lines.append(f"extends: {json.dumps(extends)}")
    modules = [entry for entry in entries if entry.kind == "module"]
    if modules:
        lines.append("modules:")
    for entry in modules:
        lines.append(f"  - {{match: {json.dumps(entry.name)}, run: float32{_why(reasons.get(entry))}}}")
    ops = [entry for entry in entries if entry.kind == "op"]
    if ops:
        lines.append("blacklist:")
    for entry in ops:
        lines.append(f"  - {{op: {entry.name}{_why(reasons.get(entry))}}}")
    return "".join(f"{line}\n" for line in lines)


def _why(reason: str | None) -> str:
    if not reason:
        return ""
    return f", why: {json.dumps(reason)}"
