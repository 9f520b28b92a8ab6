"""The rules: what each is called, why it is there, an example with its fault and one without, and what finds it.

A rule is a generator of faults with the decorator `rule`; its docstring says why. The examples are its test: the lines
of `bad` that end in its code are found, and `good` has no finding. A code is for good: people select it, and silence it
by `# amp-patch: ignore[CODE]`. The codes of rules that are gone stand in CHANGELOG.md and are not given again.
"""

import ast
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from textwrap import indent
from typing import Literal, NamedTuple

from ..errors import SettingsError, did_you_mean
from .script import Script

Severity = Literal["error", "warning", "note"]

SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
"""error: breaks, or gives wrong numbers. warning: does so at some levels or in some runs. note: worth knowing."""


class Fault(NamedTuple):
    """One fault at a node, as a rule yields it."""

    node: ast.AST
    severity: Severity
    message: str
    advice: str


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report: a fault with its code and place.

    `line` and `column` start at 1 and count characters, in a notebook within `cell`, the number of a code cell from 1;
    findings about the machine have no place.
    """

    code: str
    severity: Severity
    message: str
    advice: str
    path: str | None = None
    line: int | None = None
    column: int | None = None
    cell: int | None = None

    def place(self) -> str:
        """Return `path:line:column`, `path:cell 2:line:column`, or `machine`."""
        if self.path is None:
            return "machine"
        cell = "" if self.cell is None else f"cell {self.cell}:"
        return f"{self.path}:{cell}{self.line}:{self.column}"


Find = Callable[[Script], Iterator[Fault]]


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule. Those without `find` come from reading a file and from the look at the machine."""

    code: str
    summary: str
    why: str
    bad: str = ""
    good: str = ""
    find: Find | None = None


RULES: dict[str, Rule] = {
    rule.code: rule
    for rule in (
        Rule("AMP001", "a file that cannot be read or parsed", "What cannot be parsed is not checked."),
        Rule("AMP901", "another package under the name apex", "`from apex import amp` would fail, or find it."),
    )
}


def rule(code: str, summary: str, *, bad: str, good: str) -> Callable[[Find], Find]:
    """Enter a function into the rules; its docstring says why there is one."""

    def enter(find: Find) -> Find:
        why = inspect.cleandoc(find.__doc__ or "")
        RULES[code] = Rule(code, summary, why, inspect.cleandoc(bad), inspect.cleandoc(good), find)
        return find

    return enter


def sorted_rules() -> list[Rule]:
    """Return all rules by code."""
    return [RULES[code] for code in sorted(RULES)]


def explain(code: str) -> str:
    """Return what a rule is for, with its examples; raises SettingsError for a code of none."""
    code = code.upper()
    if code not in RULES:
        raise SettingsError(f"{code!r} is not the code of a rule.{did_you_mean(code, RULES)}")
    one = RULES[code]
    parts = [f"{code}: {one.summary}", one.why]
    if one.bad:
        parts += [f"Bad:\n{indent(one.bad, '    ')}", f"Good:\n{indent(one.good, '    ')}"]
    return "\n\n".join([*parts, f"Silence it on a line with `# amp-patch: ignore[{code}]`."])


class Selection:
    """Which rules to follow: of a code's prefixes in `select` and `ignore` the longest decides, `ignore` at a tie.

    Raises SettingsError for a prefix of no code.
    """

    def __init__(self, select: Sequence[str] = ("AMP",), ignore: Sequence[str] = ()) -> None:
        self._select = [prefix.upper() for prefix in select]
        self._ignore = [prefix.upper() for prefix in ignore]
        for prefix in (*self._select, *self._ignore):
            if not prefix or not any(code.startswith(prefix) for code in RULES):
                codes = ", ".join(sorted(RULES))
                raise SettingsError(f"{prefix!r} is not the code of a rule, nor the start of one. There are {codes}.")

    def has(self, code: str) -> bool:
        """Tell whether a rule is to be followed."""
        selected = max((len(prefix) for prefix in self._select if code.startswith(prefix)), default=0)
        ignored = max((len(prefix) for prefix in self._ignore if code.startswith(prefix)), default=0)
        return selected > ignored
