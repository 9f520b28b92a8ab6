"""Op lists: which torch functions run in the low dtype, which in float32, which in the widest type of their arguments.

A list is a YAML file with these keys, all optional:

    description        free text
    extends            a shipped list, a path relative to this file, or a list of those; read first, so that this file wins
    whitelist          ops that run in the low dtype
    blacklist          ops that run in float32
    promote            ops that run in the widest dtype among their arguments
    sequence_promote   the same for ops whose first argument is a sequence of tensors
    banned             ops that refuse 16-bit arguments
    neutral            ops that come off whatever list an earlier file put them on
    inplace_blacklist  what the in-place twin of a blacklisted op does to a 16-bit tensor: `match` (default) computes in the tensor's
                       own dtype, `error` refuses

An entry is a name or `{op: name, why: reason, since: "2.12", until: "2.14", optional: true}`: `since` is the first torch version the entry
applies to, `until` the first it no longer applies to, `optional` lets torch lack the op.

A bare name (`softmax`) means every spelling of the op, a dotted name that one spelling; `opnames` finds them. In-place twins (`exp_` of `exp`)
follow by rule. Reading a list imports nothing and runs nothing.
"""

import hashlib
import logging
import os
import re
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch

from .errors import OpListError, did_you_mean
from .opnames import Key, find_late, find_spellings, inplace_twin, is_augmented, is_inplace
from .yaml_loader import Node, load_mapping

RULES = ("whitelist", "blacklist", "promote", "sequence_promote", "banned", "neutral")
MAX_EXTENDS = 16

_log = logging.getLogger(__name__)
_KEEPS_STATISTICS = frozenset({"batch_norm", "instance_norm", "native_batch_norm"})
_KEYS = ("description", "extends", "inplace_blacklist", *RULES)
_ENTRY_KEYS = ("op", "why", "since", "until", "optional")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")
_VERSION = re.compile(r"[0-9]{1,4}(\.[0-9]{1,4}){0,2}")


@dataclass(frozen=True, slots=True)
class OpEntry:
    """One line of a list file: the op as written, the list it is on, and where."""

    op: str
    rule: str
    why: str
    path: str
    line: int
    column: int


@dataclass(frozen=True, slots=True)
class Spelling:
    """One attribute to replace: `getattr(owner, name)` is to follow the rule `kind`. The owner is None while its package is not imported."""

    owner: object | None
    owner_name: str
    name: str
    kind: str
    entry: OpEntry


@dataclass(frozen=True, slots=True)
class OpLists:
    """The resolved lists. Each (owner_name, name) occurs once in `spellings` and `pending` together.

    Attributes:
        names: the lists asked for.
        missing: entries that the running torch has no op for.
        pending: spellings of packages that are not imported yet.
        digest: SHA-256 of the rules, the same wherever the files lie and whatever is imported.
    """

    names: tuple[str, ...]
    spellings: tuple[Spelling, ...]
    missing: tuple[OpEntry, ...]
    pending: tuple[Spelling, ...]
    digest: str

    @property
    def deferred(self) -> tuple[OpEntry, ...]:
        """The entries of packages that are not imported yet."""
        return tuple(spelling.entry for spelling in self.pending)


def lists_dir() -> Path:
    """Return the directory of the shipped lists: inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parent
    candidates = (package / "lists", package.parent / "lists")
    for path in candidates:
        if (path / "presets.yaml").is_file() or (path / "float16.yaml").is_file():
            return path
    raise OpListError(f"{candidates[0]}:1:1: the shipped lists are missing here and in {candidates[1]}; reinstall amp_patch")


def shipped_names() -> tuple[str, ...]:
    """Return the names of the shipped lists, sorted."""
    return tuple(sorted(path.stem for path in lists_dir().glob("*.yaml") if path.stem != "presets"))


def load_oplists(spec: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> OpLists:
    """Return the lists that `spec` names: a shipped name, a path, or a sequence of those, of which later ones win.

    Raises OpListError, with `file:line:column` where the fault is in a file, before anything has been changed anywhere.
    """
    specs = [spec] if isinstance(spec, (str, os.PathLike)) else list(spec) if isinstance(spec, (list, tuple)) else []
    if not specs or not all(isinstance(one, (str, os.PathLike)) for one in specs):
        raise OpListError(f"op lists {spec!r}: give a shipped name ({', '.join(shipped_names())}), a path, or a non-empty list of those")
    overlay = _Overlay()
    for one in specs:
        overlay.add(_locate(one, Path(), f"op list {os.fspath(one)!r}"), ())
    return overlay.resolve(tuple(str(os.fspath(one)) for one in specs))


def _locate(spec: str | os.PathLike[str], base: Path, at: str) -> Path:
    """Return the file that a spec names; `at` opens the error message."""
    text = str(os.fspath(spec))
    separators = tuple(filter(None, (os.sep, os.altsep)))
    if isinstance(spec, os.PathLike) or text.endswith((".yaml", ".yml")) or any(separator in text for separator in separators):
        return base / text
    if text in shipped_names():
        return lists_dir() / f"{text}.yaml"
    known = shipped_names()
    raise OpListError(f"{at}: {text!r} is not a shipped list ({', '.join(known)}), and a path ends in .yaml or .yml.{did_you_mean(text, known)}")


@dataclass(frozen=True, slots=True)
class _Claim:
    """The rule of one spelling; `owner` is None while its package is not imported."""

    owner: object | None
    entry: OpEntry


class _Overlay:
    """Files laid over each other, later over earlier."""

    def __init__(self) -> None:
        self._claims: dict[Key, _Claim] = {}
        self._missing: dict[str, OpEntry] = {}
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
            problem = "the files extend each other" if identity in chain else f"more than {MAX_EXTENDS} files extend each other"
            raise OpListError(f"{at}: {problem}: {shown}; remove one `extends`")
        if identity in self._done:
            return
        root = load_mapping(path, OpListError)
        keys = _checked_keys(root, _KEYS, path)
        for node in _items(keys.get("extends"), path, "extends"):
            here = f"{path}:{node.line}:{node.column}"
            self.add(_locate(_text(node, path, "extends"), path.parent, here), (*chain, identity), here)
        self._done.add(identity)
        if "description" in keys:
            _text(keys["description"], path, "description")
        if inplace := keys.get("inplace_blacklist"):
            self._inplace = _choice(inplace, path, "inplace_blacklist", ("match", "error"))
        self._merge(_read_entries(keys, path), is_shipped=Path(identity).parent == lists_dir())

    def _merge(self, entries: Iterator[tuple[OpEntry, bool]], is_shipped: bool) -> None:
        """Claim every spelling of one file's entries, then lay the claims over those of earlier files."""
        claims: dict[Key, _Claim] = {}
        absent: dict[Key, OpEntry] = {}
        for entry, is_optional in entries:
            found = _find(entry, may_be_missing=is_shipped or is_optional)
            if entry.rule == "neutral" and found and not _matches(found, self._claims.keys() | claims.keys()):
                _log.warning("%s: %r is neutral, but it was on no list", describe_place(entry), entry.op)
            for key in found or {("", entry.op): None}:
                other = claims[key].entry if key in claims else absent.get(key)
                if other is not None:
                    _refuse_twice(entry, other, ".".join(filter(None, key)))
            claims |= {key: _Claim(owner, entry) for key, owner in found.items()}
            if not found:
                absent["", entry.op] = entry
        self._claims |= claims
        self._missing |= {entry.op: entry for entry in absent.values()}

    def resolve(self, names: tuple[str, ...]) -> OpLists:
        """Add the in-place twins, and freeze."""
        claims = dict(self._claims)
        for key, claim in self._claims.items():
            if claim.entry.rule in ("whitelist", "blacklist", "promote") and (twin := inplace_twin(key)) and twin not in claims:
                claims[twin] = claim
        live = {key: claim for key, claim in claims.items() if claim.entry.rule != "neutral"}
        kinds = {key: self._kind(key[1], claim.entry.rule) for key, claim in live.items()}
        spellings = tuple(Spelling(claim.owner, *key, kinds[key], claim.entry) for key, claim in live.items() if claim.owner is not None)
        pending = tuple(Spelling(None, *key, kinds[key], claim.entry) for key, claim in live.items() if claim.owner is None)
        content = "\n".join(sorted(f"{owner_name}.{name} {kinds[owner_name, name]}" for owner_name, name in live))
        return OpLists(names, spellings, tuple(self._missing.values()), pending, hashlib.sha256(content.encode()).hexdigest())

    def _kind(self, name: str, rule: str) -> str:
        """Return how a spelling behaves. An op that writes to its first argument must not be handed a cast copy of it.

        Apex does hand a copy to augmented operators (`x **= 2` rebinds x and leaves views of it alone); so does a list that refuses in-place twins.
        """
        if is_augmented(name) and self._inplace != "error":
            return "match_self"
        if not is_inplace(name) or rule == "banned":
            return rule
        return "inplace_error" if rule == "blacklist" and self._inplace == "error" else "match_self"


def _matches(found: Iterable[Key], claimed: Set[Key]) -> bool:
    """Whether a spelling, or the op whose in-place twin it is, has a rule."""
    return any({(owner_name, name), (owner_name, name.removesuffix("_"))} & claimed for owner_name, name in found)


def _find(entry: OpEntry, may_be_missing: bool) -> dict[Key, object | None]:
    """Return the spellings of an entry with their owners; a refusal gets the entry's position."""
    try:
        return find_spellings(entry.op, may_be_missing)
    except OpListError as exc:
        raise OpListError(f"{describe_place(entry)}: {exc}") from None


def find_owner(spelling: Spelling, complete: str) -> object | None:
    """Return who owns a name outside torch, now that the module `complete` has run, or None while the name may still be imported.

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


# ---- reading --------------------------------------------------------------------------------------------------------------------------------


def _checked_keys(node: Node, allowed: tuple[str, ...], path: Path) -> dict[str, Node]:
    assert isinstance(node.value, dict)
    for key, (line, column) in node.key_at.items():
        if key not in allowed:
            raise OpListError(f"{path}:{line}:{column}: unknown key {key!r}; allowed are {', '.join(allowed)}.{did_you_mean(key, allowed)}")
    return node.value


def _text(node: Node, path: Path, what: str) -> str:
    if not isinstance(node.value, str):
        raise OpListError(f"{path}:{node.line}:{node.column}: {what} must be a single text value, not a {type(node.value).__name__}")
    return node.value


def _choice(node: Node, path: Path, what: str, allowed: tuple[str, ...]) -> str:
    text = _text(node, path, what)
    if text not in allowed:
        raise OpListError(f"{path}:{node.line}:{node.column}: {what} is {text!r}; allowed are {', '.join(allowed)}.{did_you_mean(text, allowed)}")
    return text


def _items(node: Node | None, path: Path, key: str) -> list[Node]:
    """Return a key's items; a key with nothing after it has none, and `extends` may hold one name without brackets."""
    if node is None or (node.value == "" and not node.quoted):
        return []
    if isinstance(node.value, list):
        return node.value
    if key == "extends":
        return [node]
    raise OpListError(f"{path}:{node.line}:{node.column}: {key} must be a list of ops (`- name` lines)")


def _read_entries(keys: dict[str, Node], path: Path) -> Iterator[tuple[OpEntry, bool]]:
    """Yield the entries that apply to the running torch, each with whether torch may lack its op."""
    for rule in RULES:
        for node in _items(keys.get(rule), path, rule):
            fields = _checked_keys(node, _ENTRY_KEYS, path) if isinstance(node.value, dict) else {"op": node}
            if "op" not in fields:
                raise OpListError(f"{path}:{node.line}:{node.column}: an entry of {rule} needs the key 'op'")
            op = fields["op"]
            name = _text(op, path, f"an entry of {rule}")
            if not _NAME.fullmatch(name):
                raise OpListError(f"{path}:{op.line}:{op.column}: {name!r} is not an op name; write a name such as softmax or torch.fft.rfft")
            if rule == "whitelist" and name.rpartition(".")[2] in _KEEPS_STATISTICS:
                raise OpListError(
                    f"{path}:{op.line}:{op.column}: {name} writes its running statistics, which are float32, and would write to cast copies of them. "
                    "Leave it unlisted: it takes 16-bit inputs as it is"
                )
            why = _text(fields["why"], path, "why") if "why" in fields else ""
            is_optional = "optional" in fields and _choice(fields["optional"], path, "optional", ("true", "false")) == "true"
            if _applies(fields, path):
                yield OpEntry(name, rule, why, str(path), op.line, op.column), is_optional


def _applies(fields: dict[str, Node], path: Path) -> bool:
    since, until = _version(fields.get("since"), path, "since"), _version(fields.get("until"), path, "until")
    if since and until and since >= until:
        node = fields["until"]
        raise OpListError(f"{path}:{node.line}:{node.column}: until {node.value!r} is not later than since {fields['since'].value!r}; no torch fits")
    running = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:3])
    return (since is None or since <= running) and (until is None or running < until)


def _version(node: Node | None, path: Path, what: str) -> tuple[int, ...] | None:
    if node is None:
        return None
    text = _text(node, path, what)
    if not _VERSION.fullmatch(text):
        raise OpListError(f"{path}:{node.line}:{node.column}: {what} is {text!r}; give a torch version such as 2.12")
    parts = tuple(int(part) for part in text.split("."))
    return parts + (0,) * (3 - len(parts))
