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

A bare name (`softmax`) means every spelling: `torch.softmax`, `torch.nn.functional.softmax`, `torch.Tensor.softmax`, `torch.special.softmax`,
and those of its aliases. A dotted name means that one spelling. In-place twins (`exp_` of `exp`) follow by rule. Reading a list imports nothing
and runs nothing: names are looked up as attributes of torch's op namespaces, and of other packages only where they are imported already.
"""

import difflib
import hashlib
import inspect
import logging
import os
import re
import sys
import types
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from .errors import OpListError, did_you_mean
from .yaml_loader import Node, load_mapping

RULES = ("whitelist", "blacklist", "promote", "sequence_promote", "banned", "neutral")
MAX_EXTENDS = 16

_log = logging.getLogger(__name__)
_KEYS = ("description", "extends", "inplace_blacklist", *RULES)
_ENTRY_KEYS = ("op", "why", "since", "until", "optional")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")
_VERSION = re.compile(r"[0-9]{1,4}(\.[0-9]{1,4}){0,2}")

# The namespaces a name may be resolved in. A bare name is looked up in the first five. `torch.fft` is left to dotted names: its members are
# called `fft` or `rfft`, and `torch.fft` itself is a module, so a bare `fft` would be read two ways.
_OWNERS: dict[str, object] = {
    "torch": torch,
    "torch.nn.functional": torch.nn.functional,
    "torch.Tensor": torch.Tensor,
    "torch.special": torch.special,
    "torch.linalg": torch.linalg,
    "torch.fft": torch.fft,
    "torch.sparse": torch.sparse,
    "torch._VF": torch._VF,
}
_SEARCHED = ("torch", "torch.nn.functional", "torch.Tensor", "torch.special", "torch.linalg")
# nn.RNN and its relatives call the C functions through torch._VF, which torch.lstm and the others do not pass by.
_RNN = frozenset(f"{name}{cell}" for name in ("lstm", "gru", "rnn_tanh", "rnn_relu") for cell in ("", "_cell"))

# Names of one and the same op: naming one names them all. Two names belong together when they compute the same function of the same arguments,
# in any order and up to argument defaults, because a rule looks at nothing but the dtypes.
# Kept apart on purpose: float_power (always float64), fmod (rounds otherwise than remainder), equal (gives one bool for a whole tensor),
# inv_ex and the other _ex forms (they also return an error code), sum and nansum, var and var_mean (another function).
# The same name in torch and torch.linalg may differ (norm, cross, lu_solve, vander) and still means both: each reads the same data with the
# same range, so one rule fits. torch.cond and torch.solve are not ops (control flow; a function that only raises) and are never matched.
_ALIASES = (
    # arithmetic: the operators, their reflected and their augmented forms
    "add __add__ __radd__ __iadd__",
    "sub subtract rsub __sub__ __rsub__ __isub__",
    "mul multiply __mul__ __rmul__ __imul__",
    "div divide true_divide __truediv__ __rtruediv__ __itruediv__ __div__ __rdiv__ __idiv__",
    "floor_divide __floordiv__ __rfloordiv__ __ifloordiv__",
    "remainder __mod__ __rmod__ __imod__",
    "pow __pow__ __rpow__ __ipow__",
    "matmul __matmul__ __rmatmul__",
    # comparison
    "eq __eq__",
    "ne not_equal __ne__",
    "gt greater __gt__",
    "ge greater_equal __ge__",
    "lt less __lt__",
    "le less_equal __le__",
    # numpy's names for trigonometry
    *(f"a{name} arc{name}" for name in ("cos", "cosh", "sin", "sinh", "tan", "tanh", "tan2")),
    # other second names that torch documents as such
    "abs absolute __abs__",
    "neg negative __neg__",
    "clamp clip",
    "trunc fix",
    "cat concat concatenate",
    "vstack row_stack",
    "outer ger",
    "trapezoid trapz",
    "inverse inv",
    "pinverse pinv",
    "orgqr householder_product",
    "sigmoid expit",
    "digamma psi",
    "lgamma gammaln",
    "mvlgamma multigammaln",
    "igamma gammainc",
    "igammac gammaincc",
)
_GROUPS = {name: tuple(group.split()) for group in _ALIASES for name in group.split()}
_OPERATORS = frozenset(name for name in _GROUPS if name.startswith("__"))

# Python functions count as ops when they come from one of these; the other functions in `torch` load files, seed generators, compile...
_OP_MODULES = frozenset({"torch.functional", "torch.nn.functional", "torch._tensor", "torch._lowrank", "torch._lobpcg"})
# The casts themselves call these, or they are no computation.
_REFUSED = frozenset({"load", "save", "compile", "to", "type", "type_as", "float", "double", "half", "bfloat16", "backward", "detach", "copy_"})


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
    """One attribute to replace: `getattr(owner, name)` is to follow the rule `kind`."""

    owner: object
    owner_name: str
    name: str
    kind: str
    entry: OpEntry


@dataclass(frozen=True, slots=True)
class OpLists:
    """The resolved lists. Each (owner_name, name) occurs once in `spellings`.

    Attributes:
        names: the lists asked for.
        missing: entries that the running torch has no op for.
        deferred: entries of packages that are not imported yet.
        digest: SHA-256 of the rules, the same wherever the files lie and whatever is imported.
    """

    names: tuple[str, ...]
    spellings: tuple[Spelling, ...]
    missing: tuple[OpEntry, ...]
    deferred: tuple[OpEntry, ...]
    digest: str


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


_Key = tuple[str, str]  # owner name, attribute name


class _Overlay:
    """Files laid over each other, later over earlier."""

    def __init__(self) -> None:
        self._claims: dict[_Key, _Claim] = {}
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
        claims: dict[_Key, _Claim] = {}
        absent: dict[_Key, OpEntry] = {}
        for entry, is_optional in entries:
            found = _find(entry, may_be_missing=is_shipped or is_optional)
            if entry.rule == "neutral" and found and not _matches(found, self._claims.keys() | claims.keys()):
                _log.warning("%s:%d:%d: %r is neutral, but it was on no list", entry.path, entry.line, entry.column, entry.op)
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
        for (owner_name, name), claim in self._claims.items():
            twin = owner_name, f"{name}_"
            if claim.entry.rule in ("whitelist", "blacklist", "promote") and owner_name in _OWNERS and twin not in claims and not name.endswith("_"):
                value = getattr(claim.owner, twin[1], None)
                if value is not None and _fault(value, twin[1]) is None:
                    claims[twin] = claim
        live = {key: claim for key, claim in claims.items() if claim.entry.rule != "neutral"}
        kinds = {key: self._kind(key[1], claim.entry.rule) for key, claim in live.items()}
        spellings = tuple(Spelling(claim.owner, *key, kinds[key], claim.entry) for key, claim in live.items() if claim.owner is not None)
        deferred = tuple(claim.entry for claim in live.values() if claim.owner is None)
        content = "\n".join(sorted(f"{owner_name}.{name} {kinds[owner_name, name]}" for owner_name, name in live))
        return OpLists(names, spellings, tuple(self._missing.values()), deferred, hashlib.sha256(content.encode()).hexdigest())

    def _kind(self, name: str, rule: str) -> str:
        """Return how a spelling behaves. An op that writes to its first argument must not be handed a cast copy of it."""
        if not name.endswith("_") or name.endswith("__") or rule == "banned":
            return rule
        return "inplace_error" if rule == "blacklist" and self._inplace == "error" else "match_self"


def _matches(found: Iterable[_Key], claimed: Set[_Key]) -> bool:
    """Whether a spelling, or the op whose in-place twin it is, has a rule."""
    return any({(owner_name, name), (owner_name, name.removesuffix("_"))} & claimed for owner_name, name in found)


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


# ---- resolving ------------------------------------------------------------------------------------------------------------------------------


def _find(entry: OpEntry, may_be_missing: bool) -> dict[_Key, object | None]:
    """Return the spellings of an entry with their owners; none at all for a missing op, a None owner for a package not imported yet."""
    owner_name, _, name = entry.op.rpartition(".")
    if name.startswith("__") and name not in _OPERATORS:
        _refuse(entry, f"{name!r} is not an operator that a rule can apply to; allowed are {', '.join(sorted(_OPERATORS))}")
    if name in _REFUSED and owner_name in ("", *_OWNERS):
        _refuse(entry, f"{entry.op!r} cannot be on a list: it is no computation, or the casts are made of it")
    if not owner_name:
        found, faults = _find_bare(name)
    elif owner_name in _OWNERS:
        value = getattr(_OWNERS[owner_name], name, None)
        fault = None if value is None else _fault(value, name)
        found, faults = ({(owner_name, name): _OWNERS[owner_name]} if value is not None and fault is None else {}), [fault] if fault else []
    elif entry.op.split(".")[0] == "torch":
        _refuse(entry, f"{owner_name!r} is not a namespace of ops; allowed are {', '.join(_OWNERS)}")
    else:
        return {(owner_name, name): _find_elsewhere(entry, owner_name.split("."), name)}
    if faults and not found:
        _refuse(entry, f"{entry.op!r} is {faults[0]}, so no rule can apply to it; name a function")
    if not found and not may_be_missing:
        _refuse(entry, f"torch {torch.__version__} has no op {entry.op!r}.{_suggestion(owner_name, name)}")
    return dict(found)


def _find_bare(name: str) -> tuple[dict[_Key, object], list[str]]:
    """Return every spelling of a bare name, and why the attributes of that name that are not ops are not."""
    found: dict[_Key, object] = {}
    faults: list[str] = []
    for alias in _GROUPS.get(name, (name,)):
        for owner_name in (*_SEARCHED, "torch._VF") if alias in _RNN else _SEARCHED:
            owner = _OWNERS[owner_name]
            value = None if alias.startswith("__") and owner is not torch.Tensor else getattr(owner, alias, None)
            if value is None:
                continue
            if fault := _fault(value, alias):
                faults.append(fault)
            else:
                found[owner_name, alias] = owner
    return found, faults


def _fault(value: Any, name: str) -> str | None:
    """Return what keeps an attribute of a torch namespace from being an op, or None. Decides alike for an op and its patched replacement."""
    if isinstance(value, type):
        return "a class"
    if isinstance(value, types.ModuleType):
        return "a module"
    if not callable(value):
        return "not a function"
    module = getattr(value, "__module__", None) or ""
    if module.partition(".")[0] in sys.stdlib_module_names:
        return f"a function of {module}, not of torch"
    is_foreign = module.partition(".")[0] != "torch"  # a method of C, or a replacement that amp_patch or another package put there
    if module == "torch._C" or (isinstance(value, types.FunctionType) and not is_foreign and module not in _OP_MODULES) or name in _REFUSED:
        return "not an op"
    return None


def _find_elsewhere(entry: OpEntry, owner_path: list[str], name: str) -> object | None:
    """Return the owner of a name outside torch, or None where its package is not imported. Looks attributes up without running code."""
    top = owner_path[0]
    if top in sys.stdlib_module_names or top == "amp_patch" or any(part.startswith("__") for part in owner_path[1:]):
        _refuse(entry, f"{entry.op!r} is not an op; a rule applies to functions of torch, or of packages built on it")
    length = next((n for n in range(len(owner_path), 0, -1) if ".".join(owner_path[:n]) in sys.modules), 0)
    if not length:
        return None
    owner: object = sys.modules[".".join(owner_path[:length])]
    for part in (*owner_path[length:], name):
        value = inspect.getattr_static(owner, part, None)
        if value is None:
            if isinstance(owner, types.ModuleType) and (part != name or hasattr(type(owner), "__getattr__") or "__getattr__" in vars(owner)):
                return None  # a submodule, or a lazily imported name, that may yet come
            _refuse(entry, f"{'.'.join(owner_path)!r} has no {part!r}.{did_you_mean(part, dir(owner))}")
        if part is name:
            break
        home = value.__name__ if isinstance(value, types.ModuleType) else value.__module__ if isinstance(value, type) else ""
        if home.partition(".")[0] != top:
            _refuse(entry, f"{entry.op!r} leads through {part!r}, which is no module or class of {top!r}; name the function where it is defined")
        owner = value
    is_stdlib = (getattr(value, "__module__", None) or "").partition(".")[0] in sys.stdlib_module_names
    if isinstance(value, (type, types.ModuleType)) or not callable(value) or is_stdlib:
        _refuse(entry, f"{entry.op!r} is a class, a module, a constant or of the standard library, so no rule can apply to it; name a function")
    return owner


def _suggestion(owner_name: str, name: str) -> str:
    """Return a hint for an unknown torch op: the same name in another namespace, or a similar name."""
    for other, owner in _OWNERS.items():
        if other not in _SEARCHED and other != "torch._VF" and hasattr(owner, name):
            return f" Did you mean '{other}.{name}'?"
    owners = (owner_name,) if owner_name else _SEARCHED
    names = {n for other in owners for n in dir(_OWNERS[other]) if not n.startswith("_") and _fault(getattr(_OWNERS[other], n), n) is None}
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f" Did you mean {'.'.join(filter(None, (owner_name, close[0])))!r}?" if close else ""


def _refuse(entry: OpEntry, problem: str) -> NoReturn:
    raise OpListError(f"{entry.path}:{entry.line}:{entry.column}: {problem}")


def _refuse_twice(entry: OpEntry, other: OpEntry, spelling: str) -> NoReturn:
    where = f"{other.path}:{other.line}:{other.column}"
    if entry.rule == other.rule:
        problem = f"{entry.op!r} is on {entry.rule} twice: {spelling} is also meant by {other.op!r} at {where}"
    else:
        problem = f"{entry.op!r} is on {entry.rule}, but {spelling} is on {other.rule} by {other.op!r} at {where}"
    _refuse(entry, f"{problem}; an op may be on one list of a file, once")
