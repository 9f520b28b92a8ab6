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
    """One entry of a list.

    Attributes:
        kind: "module" or "op".
        name: a pattern for qualified names of modules, such as "encoder.*.norm" or "**" (all), or the name of an op.
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
        """Return whether this entry makes another one needless: "encoder.*" covers "encoder.0" and "encoder.0.norm".

        An entry for modules also keeps everything inside these modules in float32.
        """
        if self == other or self.kind != "module" or other.kind != "module":
            return False
        if self.name == "**":
            return True
        own_parts, other_parts = self.name.split("."), other.name.split(".")
        pairs = zip(own_parts, other_parts, strict=False)
        return len(other_parts) >= len(own_parts) and all(own in (other, "*") for own, other in pairs)


def find_entries(remedy: Remedy, units: str) -> list[ListEntry]:
    """Return entries that apply a remedy; an empty list if no entries of these units do.

    `units` is "modules", "ops" or "both", as in `TuneOptions`.
    """
    modules: list[ListEntry] = []
    for chooser in remedy.regions:  # such as 'match: "encoder.0"' or "type: torch.nn.LayerNorm"
        _, is_by_name, name = chooser.partition("match: ")
        if is_by_name and not json.loads(name).startswith("re:"):
            modules.append(ListEntry("module", json.loads(name)))
    ops = [ListEntry("op", name) for name in remedy.ops]
    # a `ListEntry` has no `type:` and no regular expression
    if len(modules) < len(remedy.regions) or remedy.kind is not RemedyKind.LIST:
        return []
    if units == "both":
        return [*modules, *ops]
    if units == "modules":
        return [] if ops else modules
    # only ops: the remedy may name ops that are enough in place of its modules
    if modules and not remedy.alternative:
        return []
    return ops + [ListEntry("op", name) for name in remedy.alternative]


def prune(entries: Iterable[ListEntry]) -> tuple[ListEntry, ...]:
    """Return the entries that no other one covers, each once, modules before ops, sorted by name."""
    unique = set(entries)
    needed = [entry for entry in unique if not any(wider.covers(entry) for wider in unique)]
    return tuple(sorted(needed, key=lambda entry: (entry.kind, natural_order(entry.name))))


def fold_siblings(names: Iterable[str], existing: Collection[str]) -> list[ListEntry]:
    """Return entries for modules, in the order of `names`.

    Modules whose names differ only in numbers share an entry, such as "layers.*.norm" for "layers.0.norm" and
    "layers.1.norm", if it matches no other module of the model. `existing` has the names of all modules.
    """
    remaining, entries = list(dict.fromkeys(names)), []
    while remaining:
        name = remaining[0]
        entry, matched = ListEntry("module", name), [name]
        # patterns with more stars come first, so the first pattern that is allowed is the widest
        for pattern in _patterns(name):
            shared = ListEntry("module", pattern)
            matched_by_shared = [module for module in existing if shared.matches(module)]
            if len(matched_by_shared) > 1 and set(matched_by_shared) <= set(remaining):
                entry, matched = shared, matched_by_shared
                break
        entries.append(entry)
        remaining = [module for module in remaining if module not in matched]
    return entries


def _patterns(name: str) -> Iterator[str]:
    """Yield "a.*.b.*", "a.*.b.1", "a.0.b.*" for "a.0.b.1": a star for all numbers, at last for a single one."""
    parts = name.split(".")
    numbers = [index for index, part in enumerate(parts) if part.isdecimal()]
    for size in range(len(numbers), 0, -1):
        for chosen in itertools.combinations(numbers, size):
            pattern = list(parts)
            for index in chosen:
                pattern[index] = "*"
            yield ".".join(pattern)


def format_list(extends: Sequence[str], entries: Sequence[ListEntry], reasons: dict[ListEntry, str]) -> str:
    """Return the text of a list file with these entries.

    Args:
        extends: the lists that the file extends.
        reasons: the texts for the key `why`, for entries that have one.
    """
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
