"""Op lists: which torch functions run in the low dtype, which in float32, which in the widest type of their arguments.

A list is a YAML file with these keys, all optional:

    description        free text
    extends            a shipped list, a path relative to this file, or a list of those; read first, so that this file
    wins
    whitelist          ops that run in the low dtype
    blacklist          ops that run in float32
    promote            ops that run in the widest dtype among their arguments
    sequence_promote   the same for ops whose first argument is a sequence of tensors
    banned             ops that refuse 16-bit arguments
    neutral            ops that come off whatever list an earlier file put them on
    modules            rules for parts of a model, by name or by type: see `modulerules`
    inplace_blacklist  what the in-place twin of a blacklisted op does to a 16-bit tensor: `match` (default) computes in
                       the tensor's own dtype, `error` refuses

An entry is a name or `{op: name, why: reason, since: "2.12", until: "2.14", optional: true}`: `since` is the first
torch version the entry applies to, `until` the first it no longer applies to, `optional` lets torch lack the op.

A bare name (`softmax`) means every spelling of the op, a dotted name that one spelling; `opnames` finds them. In-place
twins (`exp_` of `exp`) follow by rule. Reading a list imports nothing and runs nothing.
"""

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from ..errors import OpListError, did_you_mean
from .diagnostics import Faults
from .list_file import RULES as RULES
from .list_file import Line, check_keys, get_items, read_choice, read_entries, read_text
from .list_file import OpEntry as OpEntry
from .module_rules import ModuleRule, read_module_rule
from .op_names import Key, find_late, inplace_twin, is_augmented, is_inplace
from .op_names import find_spellings as find_spellings
from .shipped import lists_dir, shipped_names
from .yaml_nodes import load_mapping

MAX_EXTENDS = 16

_KEYS = ("description", "extends", "inplace_blacklist", "modules", *RULES)
_TWINNED = ("whitelist", "blacklist", "promote", "neutral")  # in-place twins follow


@dataclass(frozen=True, slots=True)
class Spelling:
    """One attribute to replace: `getattr(owner, name)` is to follow the rule `kind`; `overridden` are the entries that
    earlier files had for it.

    The owner is None while its package is not imported.
    """

    owner: object | None
    owner_name: str
    name: str
    kind: str
    entry: OpEntry
    overridden: tuple[OpEntry, ...] = ()

    @property
    def is_outside_torch(self) -> bool:
        """Whether the owner belongs to a package built on torch."""
        return self.owner_name.partition(".")[0] != "torch"


@dataclass(frozen=True, slots=True)
class OpLists:
    """The resolved lists. Each (owner_name, name) occurs once in `spellings` and `pending` together.

    Attributes:
        names: the lists asked for.
        missing: entries that the running torch has no op for.
        pending: spellings of packages that are not imported yet.
        modules: rules for parts of a model; of those that cover the same module the last one counts.
        digest: SHA-256 of the rules, the same wherever the files lie and whatever is imported.
        neutral: spellings that a neutral entry took off.
        other_torch: entries that `since` or `until` keep out on the running torch.
        inplace_blacklist: that setting.
    """

    names: tuple[str, ...]
    spellings: tuple[Spelling, ...]
    missing: tuple[OpEntry, ...]
    pending: tuple[Spelling, ...]
    modules: tuple[ModuleRule, ...]
    digest: str
    neutral: tuple[Spelling, ...] = ()
    other_torch: tuple[OpEntry, ...] = ()
    inplace_blacklist: str = "match"

    @property
    def deferred(self) -> tuple[OpEntry, ...]:
        """The entries of packages that are not imported yet."""
        return tuple(spelling.entry for spelling in self.pending)


def load_oplists(spec: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> OpLists:
    """Return the lists that `spec` names: a shipped name, a path, or a sequence of those, of which later ones win.

    Raises OpListError, with `file:line:column` where the fault is in a file, before anything has been changed anywhere.
    """
    specs = [spec] if isinstance(spec, (str, os.PathLike)) else list(spec) if isinstance(spec, (list, tuple)) else []
    if not specs or not all(isinstance(one, (str, os.PathLike)) for one in specs):
        raise OpListError(
            f"op lists {spec!r}: give a shipped name ({', '.join(shipped_names())}), a path, or a non-empty list of"
            " those"
        )
    overlay = _Overlay(Faults())
    for one in specs:
        overlay.add(_locate(one, Path(), f"op list {os.fspath(one)!r}"), ())
    return overlay.resolve(tuple(str(os.fspath(one)) for one in specs))


def make_oplists(rules: Mapping[str, Iterable[str]], name: str) -> OpLists:
    """Return the lists that a file with these ops under these rules would give; `name` stands for its path."""
    overlay = _Overlay(Faults())
    overlay.merge(
        (Line(OpEntry(op, rule, "", name, 0, 0)) for rule, ops in rules.items() for op in ops), is_shipped=False
    )
    return overlay.resolve((name,))


def check_oplists(path: Path) -> Faults:
    """Return all faults of a list file and of those it extends, and what is no fault but has no effect.

    Raises nothing.
    """
    faults = Faults(is_collecting=True)
    with faults:
        _Overlay(faults).add(path, ())
    faults.sort()
    return faults


def _locate(spec: str | os.PathLike[str], base: Path, at: str) -> Path:
    """Return the file that a spec names; `at` opens the error message."""
    text = str(os.fspath(spec))
    separators = tuple(filter(None, (os.sep, os.altsep)))
    if (
        isinstance(spec, os.PathLike)
        or text.endswith((".yaml", ".yml"))
        or any(separator in text for separator in separators)
    ):
        return base / text
    if text in shipped_names():
        return lists_dir() / f"{text}.yaml"
    known = shipped_names()
    raise OpListError(
        f"{at}: {text!r} is not a shipped list ({', '.join(known)}), and a path ends in .yaml or"
        f" .yml.{did_you_mean(text, known)}"
    )


@dataclass(frozen=True, slots=True)
class _Claim:
    """The rule of one spelling; `owner` is None while its package is not imported."""

    owner: object | None
    entry: OpEntry
    overridden: tuple[OpEntry, ...] = ()


class _Overlay:
    """Files laid over each other, later over earlier. Each `with self._faults` block is what one fault spoils."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._claims: dict[Key, _Claim] = {}
        self._missing: dict[str, OpEntry] = {}
        self._modules: list[ModuleRule] = []
        self._other_torch: list[OpEntry] = []
        self._inplace = "match"
        self._done: set[str] = set()

    def add(self, path: Path, chain: tuple[str, ...], at: str = "") -> None:
        """Read a file and those it extends, each file once."""
        try:
            identity = os.path.realpath(path)
        except (OSError, ValueError):  # a null byte, a loop of links: the loader says it with the path
            identity = str(path)
        if identity in chain or len(chain) >= MAX_EXTENDS:
            shown = " -> ".join(Path(name).name for name in (*chain, identity))
            problem = (
                "the files extend each other"
                if identity in chain
                else f"more than {MAX_EXTENDS} files extend each other"
            )
            raise OpListError(f"{at}: {problem}: {shown}; remove one `extends`")
        if identity in self._done:
            return
        root = load_mapping(path, OpListError)
        keys = check_keys(root, _KEYS, path, self._faults)
        for node in get_items(keys.get("extends"), path, "extends"):
            here = f"{path}:{node.line}:{node.column}"
            with self._faults:
                self.add(_locate(read_text(node, path, "extends"), path.parent, here), (*chain, identity), here)
        self._done.add(identity)
        if "description" in keys:
            with self._faults:
                read_text(keys["description"], path, "description")
        if inplace := keys.get("inplace_blacklist"):
            with self._faults:
                self._inplace = read_choice(inplace, path, "inplace_blacklist", ("match", "error"))
        for node in get_items(keys.get("modules"), path, "modules"):
            with self._faults:
                self._modules.append(read_module_rule(node, path, self._faults))
        self.merge(read_entries(keys, path, self._faults), is_shipped=Path(identity).parent == lists_dir())

    def merge(self, lines: Iterable[Line], is_shipped: bool) -> None:
        """Claim every spelling of one file's entries, then lay the claims over those of earlier files."""
        claims: dict[Key, _Claim] = {}
        absent: dict[Key, OpEntry] = {}
        for entry, is_optional, applies in lines:
            if not applies:
                self._other_torch.append(entry)
                continue
            with self._faults:
                found = _find(entry, may_be_missing=is_shipped or is_optional)
                for key in found or {("", entry.op): None}:
                    other = claims[key].entry if key in claims else absent.get(key)
                    if other is not None:
                        _refuse_twice(entry, other, ".".join(filter(None, key)))
                # a file that is checked and extends none is an overlay: what it will lie over is not known
                is_overlay = self._faults.is_collecting and not self._claims
                if (
                    entry.rule == "neutral"
                    and found
                    and not (is_overlay or _matches(found, self._claims) or _matches(found, claims))
                ):
                    self._faults.warn(describe_place(entry), f"{entry.op!r} is neutral, but it was on no list")
                claims |= {key: self._claim(key, owner, entry) for key, owner in found.items()}
                if not found:
                    absent["", entry.op] = entry
        if self._faults.is_collecting:
            self._warn_of_redundant(claims)
        self._claims |= claims
        self._missing |= {entry.op: entry for entry in absent.values()}

    def _claim(self, key: Key, owner: object | None, entry: OpEntry) -> _Claim:
        earlier = self._claims.get(key)
        return _Claim(owner, entry, (*earlier.overridden, earlier.entry) if earlier else ())

    def resolve(self, names: tuple[str, ...]) -> OpLists:
        """Add the in-place twins, and freeze."""
        claims = dict(self._claims)
        for key, claim in self._claims.items():
            if claim.entry.rule in _TWINNED and (twin := inplace_twin(key)) and twin not in claims:
                claims[twin] = claim
        resolved = [
            Spelling(claim.owner, *key, kind_of(key[1], claim.entry.rule, self._inplace), claim.entry, claim.overridden)
            for key, claim in claims.items()
        ]
        live = [spelling for spelling in resolved if spelling.kind != "neutral"]
        rulings = sorted(f"{spelling.owner_name}.{spelling.name} {spelling.kind}" for spelling in live)
        content = "\n".join([*rulings, *(f"{rule.chooser} {rule.run}" for rule in self._modules)])
        return OpLists(
            names,
            tuple(spelling for spelling in live if spelling.owner is not None),
            tuple(self._missing.values()),
            tuple(spelling for spelling in live if spelling.owner is None),
            tuple(self._modules),
            hashlib.sha256(content.encode()).hexdigest(),
            tuple(spelling for spelling in resolved if spelling.kind == "neutral"),
            tuple(self._other_torch),
            self._inplace,
        )

    def _warn_of_redundant(self, claims: dict[Key, _Claim]) -> None:
        """Say which entries of a file change nothing: earlier files have all their spellings on that rule, or they
        follow as in-place twins.
        """
        by_entry: dict[OpEntry, list[Key]] = {}
        for key, claim in claims.items():
            by_entry.setdefault(claim.entry, []).append(key)
        for entry, keys in by_entry.items():
            causes = [self._cause(key, entry.rule, claims) for key in keys]
            if None not in causes:
                self._faults.warn(
                    describe_place(entry), f"{entry.op!r} is on {entry.rule} without this entry, {causes[0]}"
                )

    def _cause(self, key: Key, rule: str, claims: dict[Key, _Claim]) -> str | None:
        """Return what puts a spelling on a rule besides its entry in the file of these claims, or None."""
        if earlier := self._claims.get(key):
            return f"by {earlier.entry.op!r} at {describe_place(earlier.entry)}" if earlier.entry.rule == rule else None
        base = (key[0], key[1].removesuffix("_"))
        claim = claims.get(base) or self._claims.get(base)
        if claim is None or claim.entry.rule != rule or rule not in _TWINNED or inplace_twin(base) != key:
            return None
        return f"as the in-place twin of {claim.entry.op!r} at {describe_place(claim.entry)}"


def kind_of(name: str, rule: str, inplace_blacklist: str) -> str:
    """Return how a spelling behaves. An op that writes to its first argument must not be handed a cast copy of it.

    Apex does hand a copy to augmented operators (`x **= 2` rebinds x and leaves views of it alone); so does a list that
    refuses in-place twins.
    """
    if rule in ("banned", "neutral"):
        return rule
    if is_augmented(name):
        return rule if inplace_blacklist == "error" else "match_self"
    if is_inplace(name):
        return "inplace_error" if rule == "blacklist" and inplace_blacklist == "error" else "match_self"
    return rule


def _matches(found: Iterable[Key], claims: Mapping[Key, _Claim]) -> bool:
    """Whether a spelling, or the op whose in-place twin it is, has a rule."""
    return any(key in claims or (key[0], key[1].removesuffix("_")) in claims for key in found)


def _find(entry: OpEntry, may_be_missing: bool) -> dict[Key, object | None]:
    """Return the spellings of an entry with their owners; a refusal gets the entry's position."""
    try:
        return find_spellings(entry.op, may_be_missing)
    except OpListError as exc:
        raise OpListError(f"{describe_place(entry)}: {exc}") from None


def find_owner(spelling: Spelling, complete: str) -> object | None:
    """Return who owns a name outside torch, now that the module `complete` has run, or None while the name may still be
    imported.

    Raises OpListError, with the position of the entry, if it cannot be.
    """
    try:
        return find_late(spelling.entry.op, complete)
    except OpListError as exc:
        raise OpListError(f"{describe_place(spelling.entry)}: {exc}") from None


def describe_place(entry: OpEntry) -> str:
    """Return `file:line:column`."""
    return f"{entry.path}:{entry.line}:{entry.column}"


def _refuse_twice(entry: OpEntry, other: OpEntry, spelling: str) -> NoReturn:
    where = describe_place(other)
    if entry.rule == other.rule:
        problem = f"{entry.op!r} is on {entry.rule} twice: {spelling} is also meant by {other.op!r} at {where}"
    else:
        problem = f"{entry.op!r} is on {entry.rule}, but {spelling} is on {other.rule} by {other.op!r} at {where}"
    raise OpListError(f"{describe_place(entry)}: {problem}; an op may be on one list of a file, once")
