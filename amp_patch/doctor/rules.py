"""`Rule`: a code, the reason for the rule, a bad and a good example, and the function that finds its faults.

To add a rule, write a generator of `Fault`s with the decorator `rule`. Its docstring is the reason for the rule, which
users see. The examples are its test: the rule must report the lines of `bad` that end in a comment with its code, and
nothing in `good`. Codes never change, because users select rules by code, and silence a rule with
`# amp-patch: ignore[CODE]`. Do not use the code of a removed rule again: CHANGELOG.md lists the removed rules.
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
"""error: the script fails, computes wrong numbers, or cannot be read. warning: it may fail, or train worse. note:
worth knowing.
"""


class Fault(NamedTuple):
    """A fault that a rule has found at a node of a script. `Project` turns it into a `Finding`, with a location."""

    node: ast.AST
    severity: Severity
    message: str
    advice: str


@dataclass(frozen=True, slots=True)
class Finding:
    """An entry of the report: a message and advice, with the code of the rule and the location.

    Attributes:
        path, line, column: the place in the script. Lines and columns (in characters) count from 1. None for a finding
            about the machine.
        cell: in a notebook, the number of the code cell, from 1; `line` is then counted in the cell.
    """

    code: str
    severity: Severity
    message: str
    advice: str
    path: str | None = None
    line: int | None = None
    column: int | None = None
    cell: int | None = None

    def location(self) -> str:
        """Return `path:line:column`, `path:cell 2:line:column`, or `machine`."""
        if self.path is None:
            return "machine"
        cell = "" if self.cell is None else f"cell {self.cell}:"
        return f"{self.path}:{cell}{self.line}:{self.column}"


Find = Callable[[Script], Iterator[Fault]]


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule.

    Attributes:
        code: such as "AMP101".
        summary: the fault in a few words.
        why: the reason for the rule.
        bad, good: examples with and without the fault.
        find: yields the faults in a script. None for the rules about unreadable files and about the machine: other code
            makes their findings.
    """

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
        Rule("AMP901", "another package under the name apex", "`from apex import amp` fails, or finds that package."),
    )
}


def rule(code: str, summary: str, *, bad: str, good: str) -> Callable[[Find], Find]:
    """Decorator: add a rule to `RULES` that finds its faults by the function. The function's docstring becomes the
    reason for the rule.
    """

    def register(find: Find) -> Find:
        why = inspect.cleandoc(find.__doc__ or "")
        RULES[code] = Rule(code, summary, why, inspect.cleandoc(bad), inspect.cleandoc(good), find)
        return find

    return register


def sorted_rules() -> list[Rule]:
    """Return all rules by code."""
    return [RULES[code] for code in sorted(RULES)]


def explain_rule(code: str) -> str:
    """Return the reason for a rule, with its examples. Raises SettingsError for an unknown code."""
    code = code.upper()
    if code not in RULES:
        raise SettingsError(f"{code!r} is not the code of a rule.{did_you_mean(code, RULES)}")
    rule = RULES[code]
    parts = [f"{code}: {rule.summary}", rule.why]
    if rule.bad:
        parts += [f"Bad:\n{indent(rule.bad, '    ')}", f"Good:\n{indent(rule.good, '    ')}"]
    if rule.find is None:
        parts.append(f"No comment silences it; leave it out with --ignore {code}.")
    else:
        parts.append(f"Silence it on a line with `# amp-patch: ignore[{code}]`.")
    return "\n\n".join(parts)


class Selection:
    """The rules to apply: those whose code begins with a prefix in `select`, and not with one in `ignore`.

    If prefixes in both fit a code, the longest of them all decides. If the longest ones of both are equally long, the
    rule is ignored. For example, `select=["AMP1"], ignore=["AMP"]` applies AMP101. Case does not matter. Raises
    SettingsError for a prefix that fits no code.
    """

    def __init__(self, select: Sequence[str] = ("AMP",), ignore: Sequence[str] = ()) -> None:
        self._select = [prefix.upper() for prefix in select]
        self._ignore = [prefix.upper() for prefix in ignore]
        for prefix in (*self._select, *self._ignore):
            if not prefix or not any(code.startswith(prefix) for code in RULES):
                codes = ", ".join(sorted(RULES))
                raise SettingsError(f"{prefix!r} is not the code of a rule, nor the start of one. There are {codes}.")

    def has(self, code: str) -> bool:
        """Return whether a rule applies."""
        selected = max((len(prefix) for prefix in self._select if code.startswith(prefix)), default=0)
        ignored = max((len(prefix) for prefix in self._ignore if code.startswith(prefix)), default=0)
        return selected > ignored
