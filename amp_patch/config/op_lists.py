"""Op lists: which torch functions run in the low dtype, which in float32, which in the widest dtype of their arguments.

`list_file` reads one file, `op_names` finds the spellings of a name, `Overlay` lays files over each other, and
`load_oplists` keeps the result. In-place twins (`exp_` of `exp`) are added by rule. Reading a list imports nothing and
runs nothing. docs/lists.md describes the files.
"""

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..errors import OpListError, did_you_mean
from .list_file import Diagnostics as Diagnostics
from .list_file import ListProblem as ListProblem
from .list_file import OpEntry as OpEntry
from .list_file import fault, get_items, is_null, read_entries, read_keys, read_text
from .list_names import locate as locate
from .module_rules import ModuleRule, read_module_rule
from .op_names import (
    SpellingKey,
    find_deferred,
    find_doubt,
    inplace_twin,
    is_augmented,
    is_inplace,
)
from .op_names import find_spellings as find_spellings
from .op_namespaces import OWNERS
from .op_rules import RULE_KEYS as RULE_KEYS
from .op_rules import RULES as RULES
from .op_rules import OpRule as OpRule
from .product_names import find_products as find_products
from .product_names import is_product as is_product
from .product_names import is_without_kernel as is_without_kernel
from .shipped import lists_dir, shipped_names
from .yaml_nodes import Node, load_mapping, read_bytes

MAX_LOADED = 16


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
    kind: OpRule
    entry: OpEntry
    overridden: tuple[OpEntry, ...] = ()


@dataclass(frozen=True, slots=True)
class OpLists:
    """The resolved lists. Each (owner_name, name) occurs once in `spellings` and `deferred` together.

    Attributes:
        names: the lists asked for.
        missing: entries that the running torch has no op for.
        deferred: spellings of packages that are not imported yet.
        modules: rules for parts of a model. If several cover a module, the last one counts.
        digest: SHA-256 of the rules, the same wherever the files lie and whatever is imported.
        neutral: spellings that a neutral entry took off.
        other_torch: entries that `since` or `until` keep out on the running torch.
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
    is_whole: bool = False


# ---- loading ---------------------------------------------------------------------------------------------------------


def load_oplists(
    spec: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], *, may_be_overlay: bool = False
) -> OpLists:
    """Return the lists that `spec` names: a shipped name, a path, or a sequence of them. Later ones win.

    The result is kept, and returned again while the files, the names of torch and the owners of names outside torch are
    the same: scripts call `initialize` in loops, and resolving names takes 30 ms.

    Args:
        may_be_overlay: the lists are shown alone but used over others, so neutral entries without a list below them are
            no reason to warn.

    Raises OpListError, with its place if the fault is in a file, before anything has been changed anywhere.
    """
    specs: list[Any] = list(spec) if isinstance(spec, (list, tuple)) else [spec]
    if not specs or not all(isinstance(name, (str, os.PathLike)) for name in specs):
        known = ", ".join(shipped_names())
        raise OpListError(f"op lists {spec!r}: give a shipped name ({known}), a path, or a non-empty list of those")
    names = tuple(str(os.fspath(name)) for name in specs)
    paths = tuple(map(_locate, specs))
    key = (names, tuple(map(str, paths)), torch.__version__, may_be_overlay)
    kept = _kept.pop(key, None)
    if kept is None or not kept.is_current():
        kept = _Loaded(names, paths, may_be_overlay=may_be_overlay)
    if not kept.has_warned:  # a warning comes each time
        _kept[key] = kept
    while len(_kept) > MAX_LOADED:
        del _kept[next(iter(_kept))]
    return kept.lists


def _locate(spec: str | os.PathLike[str]) -> Path:
    try:
        return locate(spec, Path())
    except OpListError as error:
        raise OpListError(f"op list {os.fspath(spec)!r}: {error}") from None


class _Loaded:
    """Resolved lists, with their sources: the files, the names of torch, and the owners of names outside torch."""

    def __init__(self, names: tuple[str, ...], paths: Sequence[Path], *, may_be_overlay: bool) -> None:
        diagnostics = Diagnostics()
        overlay = Overlay(diagnostics, may_be_overlay=may_be_overlay)
        for path in paths:
            overlay.read_file(path)
        self.lists = overlay.resolve(names)
        self.has_warned = diagnostics.has_warned
        self._files = diagnostics.files
        self._names_of_torch = _get_names_of_torch()

    def is_current(self) -> bool:
        """Return whether loading the files again would give the same."""
        if self._names_of_torch != _get_names_of_torch():
            return False
        lists = self.lists
        try:
            for path, content in self._files.items():
                if read_bytes(path, OpListError) != content:
                    return False
            for spelling in (*lists.spellings, *lists.deferred, *lists.neutral):
                if not _has_same_owner(spelling):
                    return False
            if any(find_spellings(entry.op, may_be_missing=True) for entry in lists.missing):
                return False
            return not any(rule.find_problem() for rule in lists.modules)
        except OpListError:
            return False


def _get_names_of_torch() -> list[list[str]]:
    """Return the names in each namespace of ops. While they are the same, names on a list mean the same ops."""
    return [list(vars(owner)) for owner in OWNERS.values()]


def _has_same_owner(spelling: Spelling) -> bool:
    """Return whether a name outside torch has the owner that it had: modules are reloaded, and cells run again."""
    if spelling.owner_name in OWNERS:
        return True
    owners = find_spellings(spelling.entry.op, may_be_missing=True)
    return owners == {(spelling.owner_name, spelling.name): spelling.owner}


_kept: dict[object, _Loaded] = {}  # the lists that were used last come last


def check_oplists(path: Path) -> Diagnostics:
    """Return all faults of a list file and of the files that it extends. Raises nothing."""
    diagnostics = Diagnostics(is_collecting=True)
    with diagnostics:
        Overlay(diagnostics, may_be_overlay=True).read_file(path)
    return diagnostics


def find_owner(spelling: Spelling) -> object | None:
    """Return the owner of a deferred op, or None while it may come; OpListError with its place if it cannot."""
    entry = spelling.entry
    try:
        return find_deferred(entry.op)
    except OpListError as error:
        raise _at(entry, str(error)) from None


# ---- files over files ------------------------------------------------------------------------------------------------


class Overlay:
    """The spellings that files put on lists, later files over earlier ones.

    Until `resolve`, the `kind` of each spelling is the rule of its entry. A `with self._diagnostics` block encloses
    the code that is useless after a fault: when faults are collected, reading goes on after the block.

    Args:
        may_be_overlay: the files are only shown or checked, and may be meant for use over others.
    """

    def __init__(self, diagnostics: Diagnostics, *, may_be_overlay: bool) -> None:
        self._diagnostics = diagnostics
        self._may_be_overlay = may_be_overlay
        self._clear(is_whole=False)

    def _clear(self, *, is_whole: bool) -> None:
        self._done: set[str] = set()  # the files that were read
        self._spellings: dict[SpellingKey, Spelling] = {}
        self._missing: dict[str, OpEntry] = {}
        self._modules: list[ModuleRule] = []
        self._other_torch: list[OpEntry] = []
        self._is_whole = is_whole

    def read_file(self, path: Path, chain: tuple[str, ...] = ()) -> None:
        """Read the files that a file extends, then the file itself, each once. `chain`: the files that extend it."""
        identity = _identify(path)
        if identity in self._done:
            return
        content = self._diagnostics.files[path] = read_bytes(path, OpListError)
        keys = read_keys(load_mapping(path, OpListError, content), path, self._diagnostics)
        extends = keys.get("extends")
        if is_null(extends):
            # null: nothing that was read before this file counts
            self._clear(is_whole=True)
            extends = None
        for node in get_items(extends, path, "extends"):
            with self._diagnostics:
                self.read_file(_find_base(node, path, (*chain, identity)), (*chain, identity))
        self._done.add(identity)
        self._read_settings(keys, path)
        self._merge(read_entries(keys, path, self._diagnostics), is_shipped=Path(identity).parent == lists_dir())

    def _read_settings(self, keys: Mapping[str, Node], path: Path) -> None:
        """Read the keys of a file that are not rules for ops."""
        with self._diagnostics:
            if "description" in keys:
                read_text(keys["description"], path, "description")
        for node in get_items(keys.get("modules"), path, "modules"):
            with self._diagnostics:
                rule = read_module_rule(node, path, self._diagnostics)
                if rule is not None:
                    self._modules.append(rule)

    def _merge(self, entries: Iterable[OpEntry], is_shipped: bool) -> None:
        """Lay the entries of one file over the entries of earlier files."""
        named: dict[SpellingKey, Spelling] = {}
        missing: dict[SpellingKey, OpEntry] = {}
        for entry in entries:
            if not entry.is_for_this_torch():
                self._other_torch.append(entry)
                self._warn_of_version(entry, is_shipped)
                continue
            with self._diagnostics:
                owners = self._find_owners(entry, named, missing, may_be_missing=is_shipped or entry.is_optional)
                if not owners:
                    missing["", entry.op] = entry
                for key, owner in owners.items():
                    named[key] = self._lay_over(entry, key, owner)
        if self._diagnostics.is_collecting:
            self._warn_of_redundant(named)
        self._spellings |= named
        for entry in missing.values():
            self._missing[entry.op] = entry

    def _find_owners(
        self,
        entry: OpEntry,
        named: Mapping[SpellingKey, Spelling],
        missing: Mapping[SpellingKey, OpEntry],
        *,
        may_be_missing: bool,
    ) -> dict[SpellingKey, object | None]:
        """Return the spellings of an entry with their owners; none if torch lacks the op and may lack it.

        Raises OpListError if torch must have the op, or the same file names a spelling twice. `named`, `missing`: the
        entries of the file so far.
        """
        try:
            owners = find_spellings(entry.op, may_be_missing)
        except OpListError as error:
            raise _at(entry, str(error)) from None
        # an op that torch lacks may not be named twice either
        for key in owners or {("", entry.op): None}:
            earlier = named[key].entry if key in named else missing.get(key)
            if earlier is not None:
                raise _twice(entry, earlier, ".".join(key).removeprefix("."))
        if owners and not may_be_missing:
            problem = find_doubt(entry.op)
            if problem:
                self._warn(entry, f"{entry.op!r} has no effect: {problem}")
        if owners and entry.rule is OpRule.NEUTRAL:
            self._warn_of_neutral(entry, owners, named)
        return owners

    def _lay_over(self, entry: OpEntry, key: SpellingKey, owner: object | None) -> Spelling:
        """Return the spelling that an entry names, with the entries of earlier files that it overrides."""
        earlier = self._spellings.get(key)
        overridden: tuple[OpEntry, ...] = ()
        if earlier is not None:
            overridden = (*earlier.overridden, earlier.entry)
        return Spelling(owner, *key, entry.rule, entry, overridden)

    def resolve(self, names: tuple[str, ...]) -> OpLists:
        """Add the in-place twins, and freeze."""
        spellings = dict(self._spellings)
        for key, spelling in self._spellings.items():
            if spelling.entry.rule.covers_twins:
                twin = inplace_twin(key)
                # an entry of its own decides a twin
                if twin is not None and twin not in spellings:
                    spellings[twin] = replace(spelling, name=twin[1])
        live: list[Spelling] = []
        deferred: list[Spelling] = []
        neutral: list[Spelling] = []
        for spelling in spellings.values():
            spelling = replace(spelling, kind=_find_rule(spelling.name, spelling.entry.rule))
            if spelling.kind is OpRule.NEUTRAL:
                neutral.append(spelling)
            elif spelling.owner is None:
                deferred.append(spelling)
            else:
                live.append(spelling)
        return OpLists(
            names,
            spellings=tuple(live),
            missing=tuple(self._missing.values()),
            deferred=tuple(deferred),
            modules=tuple(self._modules),
            digest=self._digest([*live, *deferred]),
            neutral=tuple(neutral),
            other_torch=tuple(self._other_torch),
            is_whole=self._is_whole,
        )

    def _digest(self, spellings: Iterable[Spelling]) -> str:
        # the order of module rules matters, the order of op rules does not
        lines = sorted(f"{spelling.owner_name}.{spelling.name} {spelling.kind}" for spelling in spellings)
        lines += [f"{rule.chooser} {rule.run}" for rule in self._modules]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    # ---- warnings of entries without effect ----

    def _warn_of_version(self, entry: OpEntry, is_shipped: bool) -> None:
        """Warn if the bounds of an entry fit no torch, and, when a file is checked, if they do not fit this one."""
        doubt = entry.find_doubt()
        if doubt is None and self._diagnostics.is_collecting and not is_shipped:
            doubt = f"its bounds leave out torch {torch.__version__}"
        if doubt is not None:
            self._warn(entry, f"{entry.op!r} has no effect: {doubt}")

    def _warn_of_neutral(
        self, entry: OpEntry, keys: Iterable[SpellingKey], named: Mapping[SpellingKey, Spelling]
    ) -> None:
        """Warn if a neutral entry takes off nothing: no spelling, nor the op whose in-place twin it is, has a rule."""
        if self._may_be_overlay and not self._spellings:
            return  # the file extends no other, so the lists below it are unknown
        ruled = {**self._spellings, **named}
        if not any(key in ruled or _without_underscore(key) in ruled for key in keys):
            self._warn(entry, f"{entry.op!r} is neutral, but it was on no list")

    def _warn_of_redundant(self, named: Mapping[SpellingKey, Spelling]) -> None:
        """Warn of entries that change nothing: all their spellings follow that rule already, or as twins."""
        by_entry: dict[OpEntry, list[SpellingKey]] = {}
        for key, spelling in named.items():
            by_entry.setdefault(spelling.entry, []).append(key)
        for entry, keys in by_entry.items():
            causes = [self._cause(key, entry.rule, named) for key in keys]
            if None not in causes:
                self._warn(entry, f"{entry.op!r} is on {entry.rule} without this entry, {causes[0]}")

    def _cause(self, key: SpellingKey, rule: OpRule, named: Mapping[SpellingKey, Spelling]) -> str | None:
        """Return why a spelling follows a rule even without its entry in the file of `named`; None if it would not."""
        earlier = self._spellings.get(key)
        if earlier and earlier.entry.rule is not rule:
            return None
        if earlier:
            return f"by {earlier.entry.op!r} at {earlier.entry.location}"
        base = _without_underscore(key)
        plain = named.get(base) or self._spellings.get(base)
        if plain is None or plain.entry.rule is not rule or not rule.covers_twins or inplace_twin(base) != key:
            return None
        return f"as the in-place twin of {plain.entry.op!r} at {plain.entry.location}"

    def _warn(self, entry: OpEntry, text: str) -> None:
        self._diagnostics.warn(text, entry.path, entry.line, entry.column)


def _find_rule(name: str, rule: OpRule) -> OpRule:
    """Return the rule that a spelling follows whose entry is under `rule`.

    An op that writes to its first argument must not get a cast copy of it. Augmented operators count as such ops:
    `x **= 2` may write to `x`.
    """
    writes = is_inplace(name) or is_augmented(name)
    if writes and not rule.covers_writes:
        return OpRule.MATCH_SELF
    return rule


def _find_base(node: Node, path: Path, chain: tuple[str, ...]) -> Path:
    """Return the file that an item of `extends` names; one of `chain` would close a circle."""
    text = read_text(node, path, "extends")
    try:
        base = locate(text, path.parent)
    except OpListError as error:
        raise fault(str(error), path, node) from None
    if not os.path.exists(base):
        files = (file.name for file in base.parent.glob("*.y*ml") if file.name != path.name)
        hint = did_you_mean(base.name, files, prefix=text.removesuffix(base.name), cutoff=0.8)
        known = ", ".join(shipped_names())
        problem = f"extends names {text!r}, and there is no such file; give a shipped list ({known}), or a path.{hint}"
        raise fault(problem, path, node)
    identity = _identify(base)
    if identity in chain:
        shown = " -> ".join(Path(name).name for name in (*chain, identity))
        raise fault(f"the files extend each other: {shown}; remove one `extends`", path, node)
    return base


def _identify(path: Path) -> str:
    try:
        return os.path.realpath(path)
    except (OSError, ValueError):  # a null byte, a loop of links: the reader says it with the path
        return str(path)


def _without_underscore(key: SpellingKey) -> SpellingKey:
    """Return the spelling of the op whose in-place twin this may be."""
    return key[0], key[1].removesuffix("_")


def _at(entry: OpEntry, problem: str) -> OpListError:
    return OpListError(problem, entry.path, entry.line, entry.column)


def _twice(entry: OpEntry, earlier: OpEntry, spelling: str) -> OpListError:
    """Return the error of two entries of one file that mean the same spelling."""
    named_by = f"{earlier.op!r} at {earlier.location}"
    if entry.rule is earlier.rule:
        problem = f"{entry.op!r} is on {entry.rule} twice: {spelling} is also meant by {named_by}"
    else:
        problem = f"{entry.op!r} is on {entry.rule}, but {spelling} is on {earlier.rule} by {named_by}"
    return _at(entry, f"{problem}; take one of them out")
