"""Files laid over each other, later over earlier: from the entries of list files to one rule for each spelling."""

import hashlib
import os
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import OpListError, did_you_mean
from .diagnostics import Diagnostics
from .list_file import (
    INPLACE_CHOICES,
    KEYS,
    OpEntry,
    check_keys,
    check_that_it_has_no_levels,
    get_items,
    is_null,
    read_choice,
    read_entries,
    read_text,
)
from .module_rules import ModuleRule, read_module_rule
from .op_names import Key, find_spellings, inplace_twin
from .packages import find_doubt
from .rules import TWINNED, Rule, kind_of
from .shipped import lists_dir, shipped_names
from .shipped import locate as locate
from .yaml_nodes import Node, load_mapping, read_bytes

MAX_EXTENDS = 16


@dataclass(frozen=True, slots=True)
class Spelling:
    """One attribute to replace: `getattr(owner, name)` is to follow the rule `kind`.

    Attributes:
        owner: None while its package is not imported.
        entry: the line that decides.
        overridden: the entries that earlier files had for it, the earliest first.
    """

    owner: object | None
    owner_name: str
    name: str
    kind: Rule
    entry: OpEntry
    overridden: tuple[OpEntry, ...] = ()

    @property
    def is_outside_torch(self) -> bool:
        """Whether the owner belongs to a package built on torch."""
        return self.owner_name.partition(".")[0] != "torch"


@dataclass(frozen=True, slots=True)
class OpLists:
    """The resolved lists. Each (owner_name, name) occurs once in `spellings` and `deferred` together.

    Attributes:
        names: the lists asked for.
        missing: entries that the running torch has no op for.
        deferred: spellings of packages that are not imported yet.
        modules: rules for parts of a model; of those that cover the same module the last one counts.
        digest: SHA-256 of the rules, the same wherever the files lie and whatever is imported.
        neutral: spellings that a neutral entry took off.
        other_torch: entries that `since` or `until` keep out on the running torch.
        inplace_blacklist: that setting.
        is_whole: whether a file says `extends: null`.
    """

    names: tuple[str, ...]
    spellings: tuple[Spelling, ...]
    missing: tuple[OpEntry, ...]
    deferred: tuple[Spelling, ...]
    modules: tuple[ModuleRule, ...]
    digest: str
    neutral: tuple[Spelling, ...] = ()
    other_torch: tuple[OpEntry, ...] = ()
    inplace_blacklist: str = "match"
    is_whole: bool = False


class Overlay:
    """The spellings that files put on lists; the `kind` of each is the rule of its entry until `resolve`.

    Each `with self._diagnostics` block is what one fault spoils.

    Attributes:
        files: what each file holds that was read.
        found: the spellings of each op that was looked for, with their owners.
        twins: the in-place twin of each spelling that may have one, or None.
    """

    def __init__(self, diagnostics: Diagnostics) -> None:
        self._diagnostics = diagnostics
        self.files: dict[Path, bytes] = {}
        self.found: dict[str, dict[Key, object | None]] = {}
        self.twins: dict[Key, Key | None] = {}
        self._spellings: dict[Key, Spelling] = {}
        self._missing: dict[str, OpEntry] = {}
        self._done: set[str] = set()
        self._clear(is_whole=False)

    def _clear(self, *, is_whole: bool) -> None:
        self._done.clear()
        self._spellings.clear()
        self._missing.clear()
        self._modules: list[ModuleRule] = []
        self._other_torch: list[OpEntry] = []
        self._inplace = "match"
        self._is_whole = is_whole

    def add(self, path: Path, chain: tuple[str, ...] = ()) -> None:
        """Read a file and those it extends, each file once; `chain` are the files that are being read."""
        identity = _identify(path)
        if identity in self._done:
            return
        self.files[path] = read_bytes(path, OpListError)
        root = load_mapping(path, OpListError, self.files[path])
        check_that_it_has_no_levels(root, path)
        keys = check_keys(root, KEYS, path, self._diagnostics)
        if is_null(extends := keys.get("extends")):
            self._clear(is_whole=True)
            extends = None
        for node in get_items(extends, path, "extends"):
            with self._diagnostics:
                self.add(_find_base(node, path, (*chain, identity)), (*chain, identity))
        self._done.add(identity)
        if description := keys.get("description"):
            with self._diagnostics:
                read_text(description, path, "description")
        if inplace := keys.get("inplace_blacklist"):
            with self._diagnostics:
                self._inplace = read_choice(inplace, path, "inplace_blacklist", INPLACE_CHOICES)
        for node in get_items(keys.get("modules"), path, "modules"):
            with self._diagnostics:
                rule = read_module_rule(node, path, self._diagnostics)
                self._modules += [] if rule is None else [rule]
        self.merge(read_entries(keys, path, self._diagnostics), is_shipped=Path(identity).parent == lists_dir())

    def merge(self, entries: Iterable[OpEntry], is_shipped: bool) -> None:
        """Find every spelling of one file's entries, then lay them over those of earlier files."""
        named: dict[Key, Spelling] = {}
        absent: dict[Key, OpEntry] = {}
        for entry in entries:
            if not entry.is_for_this_torch():
                self._other_torch.append(entry)
                continue
            with self._diagnostics:
                found = _find(entry, may_be_missing=is_shipped or entry.is_optional)
                self.found[entry.op] = found
                for key in found or {("", entry.op): None}:
                    other = named[key].entry if key in named else absent.get(key)
                    if other is not None:
                        raise _twice(entry, other, ".".join(filter(None, key)))
                if not (is_shipped or entry.is_optional) and (problem := find_doubt(found)):
                    self._warn(entry, f"{entry.op!r} has no effect: {problem}")
                if entry.rule is Rule.NEUTRAL and found:
                    self._warn_of_neutral(entry, found, named)
                named |= {key: self._lay(key, owner, entry) for key, owner in found.items()}
                if not found:
                    absent["", entry.op] = entry
        if self._diagnostics.is_collecting:
            self._warn_of_redundant(named)
        self._spellings |= named
        self._missing |= {entry.op: entry for entry in absent.values()}

    def _lay(self, key: Key, owner: object | None, entry: OpEntry) -> Spelling:
        earlier = self._spellings.get(key)
        return Spelling(owner, *key, entry.rule, entry, (*earlier.overridden, earlier.entry) if earlier else ())

    def resolve(self, names: tuple[str, ...]) -> OpLists:
        """Add the in-place twins, and freeze."""
        spellings = dict(self._spellings)
        for key, spelling in self._spellings.items():
            if spelling.entry.rule not in TWINNED:
                continue
            self.twins[key] = twin = inplace_twin(key)
            if twin is not None and twin not in spellings:
                spellings[twin] = replace(spelling, name=twin[1])
        resolved = [
            replace(spelling, kind=kind_of(spelling.name, spelling.entry.rule, self._inplace))
            for spelling in spellings.values()
        ]
        live = [spelling for spelling in resolved if spelling.kind is not Rule.NEUTRAL]
        rulings = sorted(f"{spelling.owner_name}.{spelling.name} {spelling.kind}" for spelling in live)
        content = "\n".join([*rulings, *(f"{rule.chooser} {rule.run}" for rule in self._modules)])
        return OpLists(
            names,
            spellings=tuple(spelling for spelling in live if spelling.owner is not None),
            missing=tuple(self._missing.values()),
            deferred=tuple(spelling for spelling in live if spelling.owner is None),
            modules=tuple(self._modules),
            digest=hashlib.sha256(content.encode()).hexdigest(),
            neutral=tuple(spelling for spelling in resolved if spelling.kind is Rule.NEUTRAL),
            other_torch=tuple(self._other_torch),
            inplace_blacklist=self._inplace,
            is_whole=self._is_whole,
        )

    # ---- warnings of entries without effect ----

    def _warn_of_neutral(self, entry: OpEntry, found: Iterable[Key], named: Mapping[Key, Spelling]) -> None:
        """Say that a neutral entry takes off nothing: no spelling, nor the op whose in-place twin it is, has a rule."""
        if self._diagnostics.is_collecting and not self._spellings:
            return  # a file that is checked and extends none: what it will lie over is not known
        if not any(_has_rule(key, side) for key in found for side in (self._spellings, named)):
            self._warn(entry, f"{entry.op!r} is neutral, but it was on no list")

    def _warn_of_redundant(self, named: Mapping[Key, Spelling]) -> None:
        """Say which entries change nothing: all their spellings are on that rule already, or follow as twins."""
        by_entry: dict[OpEntry, list[Key]] = {}
        for key, spelling in named.items():
            by_entry.setdefault(spelling.entry, []).append(key)
        for entry, keys in by_entry.items():
            causes = [self._cause(key, entry.rule, named) for key in keys]
            if None not in causes:
                self._warn(entry, f"{entry.op!r} is on {entry.rule} without this entry, {causes[0]}")

    def _cause(self, key: Key, rule: Rule, named: Mapping[Key, Spelling]) -> str | None:
        """Return what puts a spelling on a rule besides its entry in the file of `named`, or None."""
        if earlier := self._spellings.get(key):
            return f"by {earlier.entry.op!r} at {earlier.entry.place}" if earlier.entry.rule is rule else None
        base = (key[0], key[1].removesuffix("_"))
        plain = named.get(base) or self._spellings.get(base)
        if plain is None or plain.entry.rule is not rule or rule not in TWINNED or inplace_twin(base) != key:
            return None
        return f"as the in-place twin of {plain.entry.op!r} at {plain.entry.place}"

    def _warn(self, entry: OpEntry, text: str) -> None:
        self._diagnostics.warn(text, entry.path, entry.line, entry.column)


def _find_base(node: Node, path: Path, chain: tuple[str, ...]) -> Path:
    """Return the file that an item of `extends` names; one of `chain` would close a circle."""
    text = read_text(node, path, "extends")
    try:
        base = locate(text, path.parent)
    except OpListError as error:
        raise OpListError(str(error), path, node.line, node.column) from None
    if not os.path.exists(base):
        beside = (one.name for one in base.parent.glob("*.y*ml") if one.name != path.name)
        hint = did_you_mean(base.name, beside, prefix=text.removesuffix(base.name), cutoff=0.8)
        known = ", ".join(shipped_names())
        problem = f"extends names {text!r}, and there is no such file; give a shipped list ({known}), or a path.{hint}"
        raise OpListError(problem, path, node.line, node.column)
    identity = _identify(base)
    if identity not in chain and len(chain) < MAX_EXTENDS:
        return base
    shown = " -> ".join(Path(name).name for name in (*chain, identity))
    count = "the files" if identity in chain else f"more than {MAX_EXTENDS} files"
    raise OpListError(f"{count} extend each other: {shown}; remove one `extends`", path, node.line, node.column)


def _identify(path: Path) -> str:
    try:
        return os.path.realpath(path)
    except (OSError, ValueError):  # a null byte, a loop of links: the reader says it with the path
        return str(path)


def _find(entry: OpEntry, may_be_missing: bool) -> dict[Key, object | None]:
    """Return the spellings of an entry with their owners; a refusal gets the entry's place."""
    try:
        return find_spellings(entry.op, may_be_missing)
    except OpListError as error:
        raise OpListError(str(error), entry.path, entry.line, entry.column) from None


def _has_rule(key: Key, spellings: Container[Key]) -> bool:
    """Whether a spelling, or the op whose in-place twin it is, has a rule."""
    return key in spellings or (key[0], key[1].removesuffix("_")) in spellings


def _twice(entry: OpEntry, other: OpEntry, spelling: str) -> OpListError:
    if entry.rule is other.rule:
        problem = f"{entry.op!r} is on {entry.rule} twice: {spelling} is also meant by {other.op!r} at {other.place}"
    else:
        problem = f"{entry.op!r} is on {entry.rule}, but {spelling} is on {other.rule} by {other.op!r} at {other.place}"
    text = f"{problem}; take one of them out"
    return OpListError(text, entry.path, entry.line, entry.column)
