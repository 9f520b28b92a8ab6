"""What the doctor finds: a fault at a node of a script, and a finding with its code and place."""

import ast
from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "note"]

SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
"""error: breaks, or gives wrong numbers. warning: does so at some levels or in some runs. note: worth knowing."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault as a check reports it; the runner adds the check's code and the place of the node."""

    node: ast.AST
    severity: Severity
    message: str
    fix: str


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    `line` and `column` start at 1 and count characters; findings about the machine have no place.
    """

    code: str
    severity: Severity
    message: str
    fix: str
    path: str | None = None
    line: int | None = None
    column: int | None = None

    def place(self) -> str:
        """Return `path:line:column`, or `machine`."""
        return "machine" if self.path is None else f"{self.path}:{self.line}:{self.column}"


def sort_key(finding: Finding) -> tuple[str, int, int, str, str]:
    """By place, then by code."""
    return finding.path or "", finding.line or 0, finding.column or 0, finding.code, finding.message
