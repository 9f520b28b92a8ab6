"""Reads one list file: its keys, and the entries under them, which name ops.

Every function raises OpListError with its place. A function that takes `diagnostics` may store errors there and go on.
"""

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

from ..errors import OpListError, did_you_mean
from .op_namespaces import get_op_names
from .op_rules import RULE_KEYS, OpRule
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
"""Keys of earlier versions, each with its replacement."""

ENTRY_KEYS = ("op", "why", "since", "until", "optional")
BOOLEANS = ("true", "false")
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")
OLDEST_TORCH = (2, 6, 0)
VERSION = re.compile(r"[0-9]{1,4}(\.[0-9]{1,4}){0,2}")

_KEEPS_STATISTICS = frozenset({"batch_norm", "instance_norm", "native_batch_norm"})


# ---- faults ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ListProblem:
    """An error in a list file, or a warning. Its text is `path:line:column: message`.

    Attributes:
        path, line, column: the place; None if there is none.
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
    """Raises the first error in a list file, or collects all.

    A `with diagnostics:` block encloses the code that is useless after one error.

    The error leaves the block, or is stored when collecting; then the code after the block runs.

    Args:
        is_collecting: store errors and warnings, instead of raising the first error and logging the warnings.

    Attributes:
        files: the content of each file that was read, in order.
    """

    def __init__(self, is_collecting: bool = False) -> None:
        self.is_collecting = is_collecting
        self.has_warned = False
        self.files: dict[Path, bytes] = {}
        self._problems: dict[ListProblem, None] = {}  # once each: several files may extend a broken one

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
        """Log or collect a warning about an entry without effect."""
        self.has_warned = True
        if self.is_collecting:
            self._problems[ListProblem(text, path, line, column, is_warning=True)] = None
        else:
            _log.warning("%s:%d:%d: %s", path, line, column, text)

    @property
    def errors(self) -> list[ListProblem]:
        """The collected errors, sorted by place."""
        return self._get(is_warning=False)

    @property
    def warnings(self) -> list[ListProblem]:
        """The collected warnings, sorted by place."""
        return self._get(is_warning=True)

    def _get(self, is_warning: bool) -> list[ListProblem]:
        """Return problems by line and column, the files in the order of their first problem."""
        problems = [problem for problem in self._problems if problem.is_warning is is_warning]
        files = [problem.path for problem in problems]
        return sorted(problems, key=lambda problem: (files.index(problem.path), problem.line or 0, problem.column or 0))


def fault(problem: str, path: Path, node: Node) -> OpListError:
    """Return the error of a value, with its place."""
    return OpListError(problem, path, node.line, node.column)


# ---- keys and values -------------------------------------------------------------------------------------------------


def is_op_list(root: Node) -> bool:
    """Return whether a file is an op list. All values of a presets file are mappings."""
    assert isinstance(root.value, dict)
    has_key = has_level = False
    for key, node in root.value.items():
        is_level = isinstance(node.value, dict)
        has_key = has_key or (key in KEYS and not is_level)
        has_level = has_level or (key not in KEYS and is_level)
    return has_key and not has_level


def read_keys(root: Node, path: Path, diagnostics: Diagnostics) -> dict[str, Node]:
    """Return the values of a list file by key. Raises an error for a presets file."""
    assert isinstance(root.value, dict)
    if root.value and all(key not in KEYS and isinstance(node.value, dict) for key, node in root.value.items()):
        problem = (
            f"this is a presets file, with levels at its top ({', '.join(root.value)}): pass it as presets=...; an op"
            f" list has the keys {', '.join(KEYS)}"
        )
        raise fault(problem, path, root)
    return check_keys(root, KEYS, path, diagnostics)


def check_keys(node: Node, allowed: tuple[str, ...], path: Path, diagnostics: Diagnostics) -> dict[str, Node]:
    """Return the values of a mapping by key, after checking the keys."""
    assert isinstance(node.value, dict)
    for key, (line, column) in node.key_at.items():
        with diagnostics:
            if key not in allowed:
                unknown = f"unknown key {key!r}; allowed are {', '.join(allowed)}.{did_you_mean(key, allowed)}"
                problem = _REMOVED_KEYS.get(key, unknown)
                raise OpListError(problem, path, line, column)
    return node.value


def read_text(node: Node, path: Path, meaning: str) -> str:
    """Return the text of a scalar. An error begins with `meaning`, the meaning of the value."""
    if not isinstance(node.value, str):
        kind = "list" if isinstance(node.value, list) else "mapping"
        raise fault(f"{meaning} must be a single text value, not a {kind}; write the text alone", path, node)
    return node.value


def read_choice(node: Node, path: Path, meaning: str, allowed: tuple[str, ...]) -> str:
    """Return the text of a scalar that must be one of the allowed words."""
    text = read_text(node, path, meaning)
    if text not in allowed:
        problem = f"{meaning} is {text!r}; allowed are {', '.join(allowed)}.{did_you_mean(text, allowed)}"
        raise fault(problem, path, node)
    return text


def is_null(node: Node | None) -> bool:
    """Return whether a value is the word `null`."""
    return node is not None and node.value == "null" and not node.quoted


def get_items(node: Node | None, path: Path, key: str) -> list[Node]:
    """Return the items of a key. An empty key has none. `extends` may hold one name without brackets."""
    if node is None or (node.value == "" and not node.quoted):
        return []
    if isinstance(node.value, list):
        return node.value
    if key == "extends":
        return [node]
    item = "{type: torch.nn.LayerNorm, run: float32}" if key == "modules" else "softmax"
    raise fault(f"{key} must be a list; begin a line with `- ` for each item, such as `- {item}`", path, node)


# ---- entries ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpEntry:
    """One line of a list file.

    Attributes:
        op: the name, as written.
        rule: the key that the entry is under.
        why: free text.
        path, line, column: the place of the name.
        since, until: the first version of torch that the entry applies to, and the first that it no longer applies to;
            empty for no bound.
        is_optional: whether torch may lack the op.
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

    @property
    def location(self) -> str:
        """`file:line:column` of the entry."""
        return f"{self.path}:{self.line}:{self.column}"

    def is_for_this_torch(self) -> bool:
        """Return whether the bounds include the running torch."""
        if not self.since and not self.until:
            return True
        running = _running_torch()
        is_early = bool(self.since) and running < _parse_version(self.since)
        is_late = bool(self.until) and running >= _parse_version(self.until)
        return not is_early and not is_late

    def find_doubt(self) -> str | None:
        """Return a sentence if the bounds exclude every torch that exists and is supported."""
        # a list may look ahead, but not to another major version
        if self.since and _parse_version(self.since) >= (_running_torch()[0] + 1, 0, 0):
            return f"there is no torch {self.since}"
        if self.until and _parse_version(self.until) <= OLDEST_TORCH:
            return f"it ends before torch {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]}, the oldest that amp_patch supports"
        return None


def _running_torch() -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:3])


def read_entries(keys: dict[str, Node], path: Path, diagnostics: Diagnostics) -> Iterator[OpEntry]:
    """Yield the entries of all rules."""
    for rule in RULE_KEYS:
        nodes: list[Node] = []
        with diagnostics:
            nodes = get_items(keys.get(rule), path, rule)
        for node in nodes:
            with diagnostics:
                yield _read_entry(rule, node, path, diagnostics)


def _read_entry(rule: OpRule, node: Node, path: Path, diagnostics: Diagnostics) -> OpEntry:
    if not isinstance(node.value, dict):
        return OpEntry(_read_name(node, rule, path), rule, "", str(path), node.line, node.column)
    for key in node.value:
        if "." in key or key in get_op_names():  # `softmax: range`, or `linear: float32`
            problem = (
                f"{key!r} is an op, and not a key of an entry; put `- {key}` under the list that decides its dtype, or"
                f" with a reason `- {{op: {key}, why: range}}`"
            )
            raise fault(problem, path, node)
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
            raise fault(problem, path, fields["until"])
    if "op" not in fields:
        raise fault(f"an entry of {rule} needs the key 'op'; write {{op: softmax}}, or the name alone", path, node)
    op = fields["op"]
    name, is_optional = _read_name(op, rule, path), values["optional"] == "true"
    return OpEntry(name, rule, values["why"], str(path), op.line, op.column, since, until, is_optional)


def _read_field(name: str, node: Node, path: Path) -> str:
    """Return the value of any key of an entry except `op`."""
    if name == "why":
        return read_text(node, path, name)
    if name == "optional":
        return read_choice(node, path, name, BOOLEANS)
    text = read_text(node, path, name)
    if not VERSION.fullmatch(text):
        raise fault(f"{name} is {text!r}; give a torch version such as 2.12", path, node)
    return text


def _read_name(node: Node, rule: OpRule, path: Path) -> str:
    name = read_text(node, path, f"an entry of {rule}")
    if "::" in name:
        name = name.replace("::", ".")  # a kernel; `refuse_kernel` names its function
    if not NAME.fullmatch(name):
        key, colon, rest = name.partition(":")
        if colon and key in ENTRY_KEYS:
            raise fault(f"a colon needs a space after it; write {{{key}: {rest.strip() or 'softmax'}}}", path, node)
        problem = (
            f"{name!r} is not an op name; write a name such as softmax or torch.fft.rfft, each on a line that begins"
            " with `- `, the dashes below each other"
        )
        raise fault(problem, path, node)
    if rule is OpRule.WHITELIST and name.rpartition(".")[2] in _KEEPS_STATISTICS:
        problem = (
            f"{name} writes its running statistics, which are float32, and would write to cast copies of them; leave it"
            " unlisted, it takes 16-bit inputs as it is"
        )
        raise fault(problem, path, node)
    return name


def _parse_version(text: str) -> tuple[int, ...]:
    """Return the three numbers of a version."""
    parts = [int(part) for part in text.split(".")]
    return (*parts, 0, 0, 0)[:3]
