"""Reads one list file: its keys, and the entries under them, which name ops.

Every error is an OpListError with its location: path, line and column. A function with an argument `diagnostics` may
store an error there and go on reading, so that `amp-patch lists check` shows all errors of a file at once.
"""

import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

from ..errors import OpListError, did_you_mean
from .list_names import OLDEST_TORCH, Version, locate, parse_version, split_version
from .op_namespaces import get_op_names
from .op_rules import RULE_KEYS, OpRule
from .shipped import shipped_names
from .yaml_nodes import Node

_log = logging.getLogger(__name__)


# ---- keys and values that a list file may have -----------------------------------------------------------------------

KEYS = ("description", "extends", "modules", *RULE_KEYS)
_REMOVED_KEYS = {
    "inplace_blacklist": (
        "inplace_blacklist was removed: in-place variants always compute in the dtype of their tensor. Take the line"
        " out; to refuse 16-bit tensors, list the variant itself: `banned: [exp_]`"
    ),
}
"""Keys that earlier versions had, each with the error that says what to write instead."""

ENTRY_KEYS = ("op", "like", "why", "since", "until", "optional")
BOOLEANS = ("true", "false")
ARGUMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")
VERSION = re.compile(r"[0-9]{1,4}(\.[0-9]{1,4}){0,2}")

_KEEPS_STATISTICS = frozenset({"batch_norm", "instance_norm", "native_batch_norm"})
"""Ops of torch that write to two of their arguments, the running statistics. They cannot be whitelisted."""


# ---- errors and warnings ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ListProblem:
    """An error in a list file, or a warning. `str(problem)` is `path:line:column: message`.

    Attributes:
        path, line, column: the location; all None for an error that concerns no file.
    """

    message: str
    path: str | None
    line: int | None
    column: int | None
    is_warning: bool = False

    def __str__(self) -> str:
        text = self.message
        if self.is_warning:
            text = f"warning: {text}"
        if self.path is None:
            return text
        return f"{self.path}:{self.line}:{self.column}: {text}"


class Diagnostics:
    """Decides what happens to an error in a list file: it is raised, or stored so that reading can go on.

    Code that reads a part of a file, such as one entry, runs in a `with diagnostics:` block. With `is_collecting`, the
    block stores an OpListError in `errors`, and the code after the block runs. Otherwise the block does nothing, and
    the first error is raised.

    Args:
        is_collecting: store errors and warnings. Otherwise errors are raised, and warnings are logged.

    Attributes:
        files: the content of each file that was read, in order.
        has_warned: whether there was a warning.
    """

    def __init__(self, is_collecting: bool = False) -> None:
        self.is_collecting = is_collecting
        self.has_warned = False
        self.files: dict[Path, bytes] = {}
        # A dict as an ordered set: its keys are the problems. A file with an error is read again for each file that
        # extends it, and then reports the same error again.
        self._problems: dict[ListProblem, None] = {}

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if not (self.is_collecting and isinstance(error, OpListError)):
            return False
        self._problems[ListProblem(error.message, error.path, error.line, error.column)] = None
        return True

    def warn(self, text: str, path: str, line: int, column: int) -> None:
        """Log or collect a warning, such as one about an entry without effect."""
        self.has_warned = True
        if self.is_collecting:
            self._problems[ListProblem(text, path, line, column, is_warning=True)] = None
        else:
            _log.warning("%s:%d:%d: %s", path, line, column, text)

    @property
    def errors(self) -> list[ListProblem]:
        """The collected errors, by file, line and column."""
        return self._get(is_warning=False)

    @property
    def warnings(self) -> list[ListProblem]:
        """The collected warnings, by file, line and column."""
        return self._get(is_warning=True)

    def _get(self, is_warning: bool) -> list[ListProblem]:
        """Return the errors or the warnings by file, line and column. Files have the order of their first problem."""
        problems = [problem for problem in self._problems if problem.is_warning is is_warning]
        files = [problem.path for problem in problems]
        return sorted(problems, key=lambda problem: (files.index(problem.path), problem.line or 0, problem.column or 0))


def error_at(problem: str, path: Path, node: Node) -> OpListError:
    """Return an error about the value of a node, with the location of the node."""
    return OpListError(problem, path, node.line, node.column)


# ---- keys and values -------------------------------------------------------------------------------------------------


def is_op_list(root: Node) -> bool:
    """Return whether a file that was given as presets is an op list: it has keys of op lists, and no level."""
    assert isinstance(root.value, dict)
    # every level is a mapping, and no value in an op list is a mapping
    is_mapping = {key: isinstance(node.value, dict) for key, node in root.value.items()}
    has_list_key = any(key in KEYS and not is_mapping[key] for key in root.value)
    has_level = any(key not in KEYS and is_mapping[key] for key in root.value)
    return has_list_key and not has_level


def read_keys(root: Node, path: Path, diagnostics: Diagnostics) -> dict[str, Node]:
    """Return the values of a list file by key. Raises OpListError for a presets file, or as `check_keys` does."""
    assert isinstance(root.value, dict)
    if root.value and all(key not in KEYS and isinstance(node.value, dict) for key, node in root.value.items()):
        problem = (
            f"this is a presets file, with levels at its top ({', '.join(root.value)}): pass it as presets=...; an op"
            f" list has the keys {', '.join(KEYS)}"
        )
        raise error_at(problem, path, root)
    return check_keys(root, KEYS, path, diagnostics)


def check_keys(node: Node, allowed: tuple[str, ...], path: Path, diagnostics: Diagnostics) -> dict[str, Node]:
    """Return the values of a mapping by key, including keys that are not allowed. Raise or collect an error for each of
    these.
    """
    assert isinstance(node.value, dict)
    for key, (line, column) in node.key_positions.items():
        with diagnostics:
            if key not in allowed:
                unknown = f"unknown key {key!r}; allowed are {', '.join(allowed)}.{did_you_mean(key, allowed)}"
                problem = _REMOVED_KEYS.get(key, unknown)
                raise OpListError(problem, path, line, column)
    return node.value


def read_text(node: Node, path: Path, meaning: str) -> str:
    """Return the text of a YAML node. Raises OpListError for a list or a mapping.

    `meaning` says what the text is, such as "run" or "an entry of whitelist". Errors begin with it.
    """
    if not isinstance(node.value, str):
        kind = "list" if isinstance(node.value, list) else "mapping"
        raise error_at(f"{meaning} must be a single text value, not a {kind}; write the text alone", path, node)
    return node.value


def read_choice(node: Node, path: Path, meaning: str, allowed: tuple[str, ...]) -> str:
    """Return the text of a YAML node. Raises OpListError unless it is one of the allowed words."""
    text = read_text(node, path, meaning)
    if text not in allowed:
        problem = f"{meaning} is {text!r}; allowed are {', '.join(allowed)}.{did_you_mean(text, allowed)}"
        raise error_at(problem, path, node)
    return text


def is_null(node: Node | None) -> bool:
    """Return whether a value is the word `null`, without quotes."""
    return node is not None and node.value == "null" and not node.quoted


def get_items(node: Node | None, path: Path, key: str) -> list[Node]:
    """Return the items of the list under a key: none if the key is missing or empty.

    Under `extends`, a single name without brackets is a list of one item. Under any other key, a value
    that is no list raises OpListError.
    """
    if node is None or (node.value == "" and not node.quoted):
        return []
    if isinstance(node.value, list):
        return node.value
    if key == "extends":
        return [node]
    item = "{type: torch.nn.LayerNorm, run: float32}" if key == "modules" else "softmax"
    raise error_at(f"{key} must be a list; begin a line with `- ` for each item, such as `- {item}`", path, node)


def find_base(node: Node, path: Path, chain: tuple[str, ...]) -> tuple[Path, Version | None]:
    """Return the file that an item of `extends` names, and the version of torch after its `@`, or None without one.

    Args:
        node: the item, such as `float16` or `autocast-cuda@2.11`.
        path: the file with the `extends`.
        chain: the files whose `extends` led here, the file `path` last, as `identify` returns them.

    Raises OpListError if the item is no text or names no list, if its version is wrong, or if the file is in `chain`:
    then the files extend each other.
    """
    text = read_text(node, path, "extends")
    try:
        base, version = locate(text, path.parent), split_version(text)[1]
    except OpListError as error:
        raise error_at(str(error), path, node) from None
    if not os.path.exists(base):
        files = (file.name for file in base.parent.glob("*.y*ml") if file.name != path.name)
        hint = did_you_mean(base.name, files, prefix=text.removesuffix(base.name), cutoff=0.8)
        known = ", ".join(shipped_names())
        problem = f"extends names {text!r}, and there is no such file; give a shipped list ({known}), or a path.{hint}"
        raise error_at(problem, path, node)
    identity = identify(base)
    if identity in chain:
        shown = " -> ".join(Path(name).name for name in (*chain, identity))
        raise error_at(f"the files extend each other: {shown}; remove one `extends`", path, node)
    return base, version


def identify(path: Path) -> str:
    """Return the path with all links resolved: a path to a link and a path to its file give the same result."""
    try:
        return os.path.realpath(path)
    except (OSError, ValueError):  # a null byte in the path, for example: reading the file raises the error
        return str(path)


# ---- entries ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpEntry:
    """One entry of a list file, which puts an op under a rule.

    Attributes:
        op: the name, as written.
        rule: the key of the file that the entry is under, such as `whitelist`.
        why: the reason, in free text.
        path, line, column: the location of the name.
        since: the first version of torch to which the entry applies, such as "2.8"; empty for no bound.
        until: the first version of torch to which it no longer applies; empty for no bound.
        is_optional: torch may lack the op. If False, a missing op is an error, except in shipped lists.
        like: the argument to whose dtype the other arguments are cast, under a rule with `takes_argument`; else empty.
    """

    op: str
    rule: OpRule
    why: str
    path: str
    line: int
    column: int
    since: str = ""
    until: str = ""
    is_optional: bool = False
    like: str = ""

    @property
    def location(self) -> str:
        """`file:line:column` of the entry."""
        return f"{self.path}:{self.line}:{self.column}"

    def is_for(self, torch_version: Version) -> bool:
        """Return whether a version of torch is within the bounds."""
        is_early = bool(self.since) and torch_version < _parse_version(self.since)
        is_late = bool(self.until) and torch_version >= _parse_version(self.until)
        return not is_early and not is_late

    def find_warning(self) -> str | None:
        """Return the text of a warning if the bounds exclude every supported torch that may exist, else None."""
        # a later minor version than the running torch's may exist; a later major version is taken not to exist
        if self.since and _parse_version(self.since) >= (get_running_torch()[0] + 1, 0, 0):
            return f"there is no torch {self.since}"
        if self.until and _parse_version(self.until) <= OLDEST_TORCH:
            return f"it ends before torch {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]}, the oldest that amp_patch supports"
        return None


def get_running_torch() -> Version:
    """Return the three numbers of the running torch's version."""
    return tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:3])


def read_entries(keys: dict[str, Node], path: Path, diagnostics: Diagnostics) -> Iterator[OpEntry]:
    """Yield the entries under all rules of a file, in the order of the rules."""
    for rule in RULE_KEYS:
        nodes: list[Node] = []
        with diagnostics:
            nodes = get_items(keys.get(rule), path, rule)
        for node in nodes:
            with diagnostics:
                yield _read_entry(rule, node, path, diagnostics)


def _read_entry(rule: OpRule, node: Node, path: Path, diagnostics: Diagnostics) -> OpEntry:
    """Return an entry that is written as a name alone (`- softmax`) or as a mapping (`- {op: softmax, ...}`)."""
    if not isinstance(node.value, dict):
        name = _read_name(node, rule, path)
        if rule.takes_argument:
            raise error_at(_explain_like(rule, name), path, node)
        return OpEntry(name, rule, "", str(path), node.line, node.column)
    for key in node.value:
        if "." in key or key in get_op_names():  # a common mistake: `- softmax: range`, or `- linear: float32`
            problem = (
                f"{key!r} is an op, and not a key of an entry; put `- {key}` under the list that decides its dtype, or"
                f" with a reason `- {{op: {key}, why: range}}`"
            )
            raise error_at(problem, path, node)
    fields = check_keys(node, ENTRY_KEYS, path, diagnostics)
    values = {"why": "", "since": "", "until": "", "optional": "false"}
    for name in values:
        with diagnostics:
            if name in fields:
                values[name] = _read_field(name, fields[name], path)
    since, until = values["since"], values["until"]
    with diagnostics:
        if since and until and _parse_version(since) >= _parse_version(until):
            problem = f"until {until!r} is not later than since {since!r}, so no torch fits; give a later one"
            raise error_at(problem, path, fields["until"])
    if "op" not in fields:
        raise error_at(f"an entry of {rule} needs the key 'op'; write {{op: softmax}}, or the name alone", path, node)
    op = fields["op"]
    name, is_optional = _read_name(op, rule, path), values["optional"] == "true"
    like = ""
    if "like" in fields:
        like = _read_like(fields["like"], rule, path)
    elif rule.takes_argument:
        raise error_at(_explain_like(rule, name), path, node)
    return OpEntry(name, rule, values["why"], str(path), op.line, op.column, since, until, is_optional, like)


def _explain_like(rule: OpRule, name: str) -> str:
    """Return the message for an entry without the key `like` under a rule that needs it."""
    return (
        f"an entry of {rule} needs the key 'like', the argument whose dtype the others take; write"
        f" {{op: {name}, like: value}}"
    )


def _read_like(node: Node, rule: OpRule, path: Path) -> str:
    """Return the value of `like`, the name of an argument. Whether the op has that argument is checked later."""
    if not rule.takes_argument:
        problem = f"like is a key of entries under match, and this one is under {rule}; take it out, or move the entry"
        raise error_at(problem, path, node)
    text = read_text(node, path, "like")
    if not ARGUMENT.fullmatch(text):
        raise error_at(f"like is {text!r}; give the name of one argument of the op, such as value", path, node)
    return text


def _read_field(name: str, node: Node, path: Path) -> str:
    """Return the value of the key `name` of an entry: `why`, `since`, `until` or `optional`."""
    if name == "why":
        return read_text(node, path, name)
    if name == "optional":
        return read_choice(node, path, name, BOOLEANS)
    text = read_text(node, path, name)
    if not VERSION.fullmatch(text):
        raise error_at(f"{name} is {text!r}; give a torch version such as 2.12", path, node)
    return text


def _read_name(node: Node, rule: OpRule, path: Path) -> str:
    """Return the name of an op, after checking its form. Whether torch has the op is checked later."""
    name = read_text(node, path, f"an entry of {rule}")
    if "::" in name:
        # The user may have named a kernel, such as aten::mm. As aten.mm, the name has a valid form. Later,
        # `op_names.refuse_kernel` raises an error that says which function to name instead.
        name = name.replace("::", ".")
    if not NAME.fullmatch(name):
        # a missing space turns a mapping into text: `{op:softmax}` holds the text `op:softmax`
        key, colon, rest = name.partition(":")
        if colon and key in ENTRY_KEYS:
            raise error_at(f"a colon needs a space after it; write {{{key}: {rest.strip() or 'softmax'}}}", path, node)
        problem = (
            f"{name!r} is not an op name; write a name such as softmax or torch.fft.rfft, each on a line that begins"
            " with `- `, the dashes below each other"
        )
        raise error_at(problem, path, node)
    owner, _, op = name.rpartition(".")
    is_of_torch = owner.partition(".")[0] in ("", "torch", "aten")
    if rule is OpRule.WHITELIST and is_of_torch and op in _KEEPS_STATISTICS:
        problem = (
            f"{name} writes its running statistics, which are float32, and would write to cast copies of them; leave it"
            " unlisted, it takes 16-bit inputs as it is"
        )
        raise error_at(problem, path, node)
    return name


def _parse_version(text: str) -> Version:
    """Return the three numbers of a version whose form has been checked."""
    version = parse_version(text)
    assert version is not None
    return version
