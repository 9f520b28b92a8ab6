"""Op lists: the rule that each listed function of torch or another package follows, such as "run in float32".

The module `list_file` reads one file, and `op_names` finds the *spellings* of a name: the functions that it means, such
as `torch.exp` and `Tensor.exp` for `exp`. Here, `Overlay` merges files, and `load_oplists` caches the result. An entry
for an op also applies to its in-place *twin* (`exp_` for `exp`), unless its rule excludes twins. Reading a list imports
no package and runs no code of one. docs/lists.md describes the files.
"""

import hashlib
import inspect
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..errors import OpListError
from .list_file import Diagnostics as Diagnostics
from .list_file import ListProblem as ListProblem
from .list_file import OpEntry as OpEntry
from .list_file import find_base, get_items, identify, is_null, read_entries, read_keys, read_text
from .list_file import get_running_torch as get_running_torch
from .list_names import Version
from .list_names import locate as locate
from .list_names import split_version as split_version
from .module_rules import ModuleRule, read_module_rule
from .op_arguments import find_position as find_position
from .op_names import (
    SpellingKey,
    find_deferred,
    find_warning,
    get_name_of_op,
    inplace_twins,
    is_augmented,
    is_inplace,
)
from .op_names import find_spellings as find_spellings
from .op_namespaces import NAMESPACES
from .op_rules import RULE_KEYS as RULE_KEYS
from .op_rules import RULES as RULES
from .op_rules import OpRule as OpRule
from .product_names import find_float32_spellings as find_float32_spellings
from .product_names import is_product as is_product
from .product_names import is_without_cpu_kernel as is_without_cpu_kernel
from .shipped import lists_dir, shipped_names
from .yaml_nodes import Node, load_mapping, read_bytes

MAX_CACHED = 16


@dataclass(frozen=True, slots=True)
class Spelling:
    """A function that follows a rule: `getattr(owner, name)`.

    Attributes:
        owner: the module or class that has the function; None while its package is not imported.
        owner_name: the dotted name of the owner, such as "torch.Tensor".
        name: the name of the function there, such as "exp".
        rule: the rule that the function follows. For a function that writes to its first argument (`exp_`), it may
            differ from the rule of the entry: see `_find_rule`.
        entry: the entry of a list that puts the function under a rule.
        overridden: the entries of earlier files for the same function, the earliest first.
    """

    owner: object | None
    owner_name: str
    name: str
    rule: OpRule
    entry: OpEntry
    overridden: tuple[OpEntry, ...] = ()

    def describe_rule(self) -> str:
        """Return the rule with the argument that its entry names, such as "match v"."""
        return self.rule.describe(self.entry.like)


@dataclass(frozen=True, slots=True)
class OpLists:
    """Merged lists, with their names looked up in torch.

    Each pair of `owner_name` and `name` occurs at most once in `spellings` and `deferred` together.

    Attributes:
        names: the lists as the caller named them.
        spellings: the functions to patch.
        missing: entries whose op the running torch, or an imported package, does not have.
        deferred: functions to patch once their package is imported.
        modules: rules for parts of a model. If several cover a module, the last one counts.
        digest: SHA-256 of the rules of functions and modules. Lists with the same rules have the same digest, whatever
            their files are, and whether or not the packages of their functions are imported.
        neutral: functions that an entry under `neutral` names, and their twins.
        other_torch: entries whose bounds exclude the torch that the lists are read for, by default the running one.
        is_whole: a file says `extends: null`, so the lists do not build on others.
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
    """Return the merged lists that `spec` names: a shipped name, a path, or a sequence of them. Later ones win.

    The result is cached, because scripts call `initialize` in loops, and looking up the names takes 30 ms. The lists
    are loaded again if a file, the names in torch, or an imported package has changed.

    Args:
        may_be_overlay: the lists may be meant for use on top of others, although they are loaded alone here. Then a
            neutral entry for an op that no file lists causes a warning only if an earlier file lists other ops.

    Raises OpListError, with a location if the fault is in a file.
    """
    specs: list[Any] = list(spec) if isinstance(spec, (list, tuple)) else [spec]
    if not specs or not all(isinstance(name, (str, os.PathLike)) for name in specs):
        known = ", ".join(shipped_names())
        raise OpListError(f"op lists {spec!r}: give a shipped name ({known}), a path, or a non-empty list of those")
    names = tuple(str(os.fspath(name)) for name in specs)
    sources = tuple(map(_locate, specs))
    key = (names, sources, torch.__version__, may_be_overlay)
    cached = _cache.pop(key, None)
    if cached is None or not cached.is_current():
        cached = _CachedLists(names, sources, may_be_overlay=may_be_overlay)
    if not cached.has_warned:  # lists with a warning are loaded each time, so the user sees the warning each time
        _cache[key] = cached
    while len(_cache) > MAX_CACHED:
        del _cache[next(iter(_cache))]
    return cached.lists


_Source = tuple[Path, Version | None]
"""A list file, and the version of torch whose entries are read from it; None for the running torch."""


def _locate(spec: str | os.PathLike[str]) -> _Source:
    try:
        return locate(spec, Path()), split_version(spec)[1]
    except OpListError as error:
        raise OpListError(f"op list {os.fspath(spec)!r}: {error}") from None


class _CachedLists:
    """Merged lists, with the content of their files and the names in torch's namespaces at the time of loading."""

    def __init__(self, names: tuple[str, ...], sources: Sequence[_Source], *, may_be_overlay: bool) -> None:
        diagnostics = Diagnostics()
        overlay = Overlay(diagnostics, may_be_overlay=may_be_overlay)
        for path, version in sources:
            overlay.read_file(path, version)
        self.lists = overlay.resolve(names)
        self.has_warned = diagnostics.has_warned
        self._files = diagnostics.files
        self._names_of_torch = _get_names_of_torch()

    def is_current(self) -> bool:
        """Return whether loading the lists again would give the same, as far as can be checked quickly."""
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
    """Return the names in each namespace of torch. If they change, a name on a list may mean other ops."""
    return [list(vars(owner)) for owner in NAMESPACES.values()]


def _has_same_owner(spelling: Spelling) -> bool:
    """Return whether the module or class that has the function is still the same object.

    In a notebook it may not be: users reload modules, and run a cell that defines a class again. torch's namespaces
    stay the same.
    """
    if spelling.owner_name in NAMESPACES:
        return True
    # by the name of the owner, because the in-place twins of the op are not among its spellings
    found = find_spellings(spelling.entry.op, may_be_missing=True)
    owners = {owner_name: owner for (owner_name, _), owner in found.items()}
    return owners.get(spelling.owner_name, "missing") is spelling.owner


_cache: dict[object, _CachedLists] = {}  # in the order of their last use, the latest one at the end


def check_oplists(path: Path, version: Version | None = None) -> Diagnostics:
    """Return all errors and warnings about a list file and the files that it extends. Raises no OpListError.

    `version` is the version of torch whose entries are read; None for the running torch.
    """
    diagnostics = Diagnostics(is_collecting=True)
    with diagnostics:
        Overlay(diagnostics, may_be_overlay=True).read_file(path, version)
    return diagnostics


def find_owner(spelling: Spelling) -> object | None:
    """Return the module or class that has the function of a deferred spelling, now that packages were imported.

    Return None if a later import may still define the function. Raises OpListError, with the location of the entry, if
    no import can.
    """
    entry = spelling.entry
    try:
        owner = find_deferred(spelling.owner_name, spelling.name)
        if owner is not None:
            _check_argument(entry, owner, (spelling.owner_name, spelling.name))
        return owner
    except OpListError as error:
        raise _error_of(entry, str(error)) from None


def _check_argument(entry: OpEntry, owner: object, key: SpellingKey) -> None:
    """Raise OpListError, without a location, if a function lacks the argument that its entry names by `like`."""
    if not entry.rule.takes_argument:
        return
    try:
        find_position(inspect.getattr_static(owner, key[1]), entry.like)
    except OpListError as error:
        if "." in entry.op:
            raise
        raise OpListError(f"{entry.op!r} also means {'.'.join(key)}: {error}") from None


# ---- merging files ---------------------------------------------------------------------------------------------------


class Overlay:
    """Merges list files: the entry of a later file overrides the entries of earlier files for the same spelling.

    Call `read_file` for each file in order, then `resolve`. Before `resolve`, the `rule` of each `Spelling` is the rule
    of its entry, also for functions that write in place. If errors are collected, an OpListError ends only the block
    `with self._diagnostics` around it, and reading goes on after the block.

    Args:
        may_be_overlay: see `load_oplists`.
    """

    def __init__(self, diagnostics: Diagnostics, *, may_be_overlay: bool) -> None:
        self._diagnostics = diagnostics
        self._may_be_overlay = may_be_overlay
        self._clear(is_whole=False)

    def _clear(self, *, is_whole: bool) -> None:
        self._files_read: set[tuple[str, Version | None]] = set()
        self._spellings: dict[SpellingKey, Spelling] = {}
        self._missing: dict[str, OpEntry] = {}
        self._modules: list[ModuleRule] = []
        self._other_torch: list[OpEntry] = []
        self._is_whole = is_whole

    def read_file(self, path: Path, version: Version | None = None, chain: tuple[str, ...] = ()) -> None:
        """Read the files that a file extends, then the file itself. Do nothing if it was read before, for that version.

        Args:
            version: the version of torch for which entries are read; None for the running one.
            chain: the files whose `extends` led to this one, so that a circle is noticed.
        """
        identity = identify(path)
        if (identity, version) in self._files_read:
            return
        content = self._diagnostics.files[path] = read_bytes(path, OpListError)
        keys = read_keys(load_mapping(path, OpListError, content), path, self._diagnostics)
        extends = keys.get("extends")
        if is_null(extends):
            # `extends: null` discards the files that were read before this one
            self._clear(is_whole=True)
            extends = None
        for node in get_items(extends, path, "extends"):
            with self._diagnostics:
                base, base_version = find_base(node, path, (*chain, identity))
                self.read_file(base, base_version or version, (*chain, identity))
        self._files_read.add((identity, version))
        self._read_settings(keys, path)
        entries = read_entries(keys, path, self._diagnostics)
        self._merge(entries, version or get_running_torch(), is_shipped=Path(identity).parent == lists_dir())

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

    def _merge(self, entries: Iterable[OpEntry], version: Version, is_shipped: bool) -> None:
        """Add the entries of one file for a version of torch. They override the entries of earlier files."""
        named: dict[SpellingKey, Spelling] = {}  # spellings of this file's entries
        missing: dict[SpellingKey, OpEntry] = {}  # this file's entries without a spelling, by ("", name)
        for entry in entries:
            if not entry.is_for(version):
                self._other_torch.append(entry)
                self._warn_of_version(entry, version, is_shipped)
                continue
            with self._diagnostics:
                # shipped lists are for all versions of torch, so an op that one of them lacks is no error
                owners = self._find_owners(entry, named, missing, may_be_missing=is_shipped or entry.is_optional)
                if not owners:
                    missing["", entry.op] = entry
                for key, owner in owners.items():
                    named[key] = self._make_spelling(entry, key, owner)
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
        """Return the spellings of an entry with their owners; no spellings if torch lacks the op.

        Raises OpListError if the op is missing and may not be, if it lacks the argument that the entry names, or if an
        earlier entry of the same file means the same spelling. `named` and `missing` hold these earlier entries.
        """
        try:
            owners = find_spellings(entry.op, may_be_missing)
            for key, owner in owners.items():
                if owner is not None:
                    _check_argument(entry, owner, key)
        except OpListError as error:
            raise _error_of(entry, str(error)) from None
        # a file may not name a function twice; an op that torch lacks has no spelling, so its name is compared instead
        for key in owners or {("", entry.op): None}:
            earlier_entry = named[key].entry if key in named else missing.get(key)
            if earlier_entry is not None:
                raise _duplicate_error(entry, earlier_entry, ".".join(key).removeprefix("."))
        if owners and not may_be_missing:
            problem = find_warning(entry.op)
            if problem:
                self._warn(entry, f"{entry.op!r} has no effect: {problem}")
        if owners and entry.rule is OpRule.NEUTRAL:
            self._warn_of_neutral(entry, owners, named)
        return owners

    def _make_spelling(self, entry: OpEntry, key: SpellingKey, owner: object | None) -> Spelling:
        """Return the spelling that an entry names, with the entries of earlier files that the entry overrides."""
        earlier = self._spellings.get(key)
        overridden: tuple[OpEntry, ...] = ()
        if earlier is not None:
            overridden = (*earlier.overridden, earlier.entry)
        return Spelling(owner, *key, entry.rule, entry, overridden)

    def resolve(self, names: tuple[str, ...]) -> OpLists:
        """Return the merged lists, with in-place twins, and with the rule that each spelling follows.

        `names`: the lists as the caller named them.
        """
        spellings = dict(self._spellings)
        for key, spelling in self._spellings.items():
            if not spelling.entry.rule.covers_twins:
                continue
            for twin in inplace_twins(key):
                # a twin that has an entry of its own follows that entry
                if twin not in spellings:
                    spellings[twin] = replace(spelling, name=twin[1])
        live: list[Spelling] = []
        deferred: list[Spelling] = []
        neutral: list[Spelling] = []
        for spelling in spellings.values():
            spelling = replace(spelling, rule=_find_rule(spelling))
            if spelling.rule is OpRule.NEUTRAL:
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
        lines = sorted(f"{spelling.owner_name}.{spelling.name} {spelling.describe_rule()}" for spelling in spellings)
        lines += [f"{rule.chooser} {rule.run}" for rule in self._modules]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    # ---- warnings about entries without effect ----

    def _warn_of_version(self, entry: OpEntry, version: Version, is_shipped: bool) -> None:
        """Warn if the bounds of an entry exclude every torch (`OpEntry.find_warning`). When a user's file is checked,
        also warn if they exclude the version of torch that it is read for.
        """
        reason = entry.find_warning()
        if reason is None and self._diagnostics.is_collecting and not is_shipped:
            reason = f"its bounds leave out torch {'.'.join(map(str, version))}"
        if reason is not None:
            self._warn(entry, f"{entry.op!r} has no effect: {reason}")

    def _warn_of_neutral(
        self, entry: OpEntry, keys: Iterable[SpellingKey], named: Mapping[SpellingKey, Spelling]
    ) -> None:
        """Warn if a neutral entry has no effect: no list names one of its functions, or the op of an in-place function.

        `keys`: its spellings. `named`: the spellings of earlier entries of the same file.
        """
        if self._may_be_overlay and not self._spellings:
            return  # no earlier file lists ops; the user may combine this file with lists that are unknown here
        listed = {**self._spellings, **named}
        if not any(key in listed or _get_key_of_op(key) in listed for key in keys):
            self._warn(entry, f"{entry.op!r} is neutral, but it was on no list")

    def _warn_of_redundant(self, named: Mapping[SpellingKey, Spelling]) -> None:
        """Warn about entries that change nothing, because all their spellings would follow the same rule without them.

        `named`: the spellings of the entries of one file.
        """
        by_entry: dict[OpEntry, list[SpellingKey]] = {}
        for key, spelling in named.items():
            by_entry.setdefault(spelling.entry, []).append(key)
        for entry, keys in by_entry.items():
            reasons = [self._explain_redundant(key, entry, named) for key in keys]
            if None not in reasons:
                self._warn(entry, f"{entry.op!r} is on {entry.rule} without this entry, {reasons[0]}")

    def _explain_redundant(self, key: SpellingKey, entry: OpEntry, named: Mapping[SpellingKey, Spelling]) -> str | None:
        """Return why a spelling follows the rule of `entry` also without `entry`; None if it would follow another rule.

        For example, "by 'exp' at /path/to/base.yaml:4:5".
        """
        earlier = self._spellings.get(key)
        if earlier is not None:
            is_same = (earlier.entry.rule, earlier.entry.like) == (entry.rule, entry.like)
            return f"by {earlier.entry.op!r} at {earlier.entry.location}" if is_same else None
        op_key = _get_key_of_op(key)
        op = named.get(op_key) or self._spellings.get(op_key)
        if op is None or key not in inplace_twins(op_key):
            return None
        is_followed = op.entry.rule is entry.rule and entry.rule.covers_twins
        return f"as the in-place twin of {op.entry.op!r} at {op.entry.location}" if is_followed else None

    def _warn(self, entry: OpEntry, text: str) -> None:
        self._diagnostics.warn(text, entry.path, entry.line, entry.column)


def _find_rule(spelling: Spelling) -> OpRule:
    """Return the rule of a function's entry. Return MATCH_SELF if the function may write to its first argument, and the
    rule does not cover such functions: a write to a cast copy would be lost.
    """
    rule, key = spelling.entry.rule, (spelling.owner_name, spelling.name)
    may_write = is_inplace(key) or is_augmented(spelling.name)
    return OpRule.MATCH_SELF if may_write and not rule.covers_writes else rule


def _get_key_of_op(key: SpellingKey) -> SpellingKey:
    """Return the key of the op of an in-place twin: ("torch", "exp") for ("torch", "exp_"). Return other keys as is."""
    return (key[0], get_name_of_op(key[1])) if is_inplace(key) else key


def _error_of(entry: OpEntry, problem: str) -> OpListError:
    return OpListError(problem, entry.path, entry.line, entry.column)


def _duplicate_error(entry: OpEntry, earlier: OpEntry, spelling: str) -> OpListError:
    """Return the error for two entries of one file that mean the same spelling."""
    named_by = f"{earlier.op!r} at {earlier.location}"
    if entry.rule is earlier.rule:
        problem = f"{entry.op!r} is on {entry.rule} twice: {spelling} is also meant by {named_by}"
    else:
        problem = f"{entry.op!r} is on {entry.rule}, but {spelling} is on {earlier.rule} by {named_by}"
    return _error_of(entry, f"{problem}; take one of them out")
