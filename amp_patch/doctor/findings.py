"""What the doctor finds: a fault at a node of a script, and a finding with its code and place."""

import ast
from dataclasses import dataclass
from typing import Literal, NamedTuple

Severity = Literal["error", "warning", "note"]

SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
"""error: breaks, or gives wrong numbers. warning: does so at some levels or in some runs. note: worth knowing."""


class Edit(NamedTuple):
    """Text for the characters `start` to `end` of a script, counted from 0."""

    start: int
    end: int
    text: str


Edits = tuple[Edit, ...]


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault as a rule reports it: the runner adds the rule's code and the place of the node.

    `edits` mend it; there are none where that takes more than the place itself.
    """

    node: ast.AST
    severity: Severity
    message: str
    advice: str
    edits: Edits = ()


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

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
    edits: Edits = ()

    def place(self) -> str:
        """Return `path:line:column`, `path:cell 2:line:column`, or `machine`."""
        if self.path is None:
            return "machine"
        return f"{self.path}:{'' if self.cell is None else f'cell {self.cell}:'}{self.line}:{self.column}"


def sort_key(finding: Finding) -> tuple[str, int, int, int, str, str]:
    """By place, then by code."""
    place = finding.cell or 0, finding.line or 0, finding.column or 0
    return finding.path or "", *place, finding.code, finding.message
