"""The report: lines for people, JSON, GitHub's annotations, or SARIF 2.1.0."""

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import amp_patch

from ..tables import align, count_of
from .findings import SEVERITIES, Finding
from .machine import Machine, recommend
from .rules import sorted_rules

_APEX = {
    "none": "not installed",
    "with amp": "NVIDIA's, with amp",
    "without amp": "NVIDIA's, without amp (as since May 2025)",
    "pyramid": "the Pyramid web toolkit of that name",
    "stand-in": "amp_patch's stand-in",
    "other": "another package of that name",
}


@dataclass(frozen=True, slots=True)
class Report:
    """What was found in how many files; `machine` where that was asked for, `fixed` findings that are gone."""

    findings: Sequence[Finding]
    file_count: int
    fixed: int = 0
    machine: Machine | None = None

    def as_text(self, *, with_notes: bool = False) -> str:
        """Return lines for people: the machine, the findings by place, and a summary; notes are counted only."""
        lines = self._machine_lines() if self.machine else []
        for finding in self.findings:
            if finding.severity != "note" or with_notes:
                fixable = ", --fix mends it" if finding.edits else ""
                lines.append(f"{finding.place()}: {finding.severity}: {finding.message} [{finding.code}{fixable}]")
                lines.append(f"    {finding.advice}")
        counts = Counter(finding.severity for finding in self.findings)
        shown = [count_of(counts[severity], severity) for severity in SEVERITIES if severity != "note" or with_notes]
        fixed = f"; {count_of(self.fixed, 'finding')} mended" if self.fixed else ""
        if self.file_count or self.findings:
            lines.append(f"{', '.join(shown)} in {count_of(self.file_count, 'file')}{fixed}")
        if counts["note"] and not with_notes:
            codes = sorted({finding.code for finding in self.findings if finding.severity == "note"})
            lines.append(f"{count_of(counts['note'], 'note')} ({', '.join(codes)}): shown by --notes")
        return "\n".join(lines)

    def _machine_lines(self) -> list[str]:
        assert self.machine is not None
        versions = ", ".join(f"{name} {version or 'missing'}" for name, version in self.machine.versions.items())
        rows = [("python", self.machine.python), ("packages", f"amp_patch {self.machine.amp_patch}, {versions}")]
        for device in self.machine.devices:
            rows.append(("device", device.name))
            rows += [("", f"{dtype.name} {dtype.verdict}: {dtype.evidence}") for dtype in device.low_dtypes]
            in_float32 = [name for name in ("float16", "bfloat16") if name not in device.multiplies]
            if in_float32:
                rows.append(("", f"products of {' and '.join(in_float32)} values are computed in float32 by default"))
        where = f", {self.machine.apex.location}" if self.machine.apex.location else ""
        rows.append(("apex", f"{_APEX[self.machine.apex.kind]}{where}"))
        rows += [("advice", recommend(device)) for device in self.machine.devices[:1]]
        return ["machine:", *(f"  {row}" for row in align(rows, gap=3))]

    def as_json(self) -> str:
        """Return an object of `findings` and `summary`, and `machine` if it was looked at."""
        names = [name for name in Finding.__slots__ if name != "edits"]
        listed = [
            {**{name: getattr(finding, name) for name in names}, "fixable": bool(finding.edits)}
            for finding in self.findings
        ]
        counts = Counter(finding.severity for finding in self.findings)
        summary: dict[str, int] = {severity: counts[severity] for severity in SEVERITIES}
        summary |= {"files": self.file_count, "fixed": self.fixed}
        whole: dict[str, Any] = {"findings": listed, "summary": summary}
        if self.machine is not None:
            advice = [recommend(device) for device in self.machine.devices[:1]]
            whole["machine"] = {**asdict(self.machine), "advice": "".join(advice)}
        return json.dumps(whole, indent=2)

    def as_github(self) -> str:
        """Return workflow commands, which GitHub shows as annotations; lines of notebooks are named in the text."""
        lines = []
        for finding in self.findings:
            command = {"note": "notice"}.get(finding.severity, finding.severity)
            given: dict[str, object] = {"file": finding.path} if finding.path else {}
            if finding.path and finding.cell is None:
                given |= {"line": finding.line, "col": finding.column}
            given["title"] = finding.code
            properties = ",".join(f"{name}={_escape(str(value), ':,')}" for name, value in given.items())
            lines.append(f"::{command} {properties}::{_escape(_described(finding))}")
        return "\n".join(lines)

    def as_sarif(self) -> str:
        """Return a SARIF log of one run."""
        rules = [
            {
                "id": rule.code,
                "shortDescription": {"text": rule.summary},
                "fullDescription": {"text": rule.why},
                "help": {"text": f"{rule.why}\n\nBad:\n{rule.bad}\n\nGood:\n{rule.good}" if rule.bad else rule.why},
            }
            for rule in sorted_rules()
        ]
        driver = {"name": "amp-patch doctor", "version": amp_patch.__version__, "rules": rules}
        results = [_sarif_result(finding) for finding in self.findings]
        run = {"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}
        log = {"$schema": "https://json.schemastore.org/sarif-2.1.0.json", "version": "2.1.0", "runs": [run]}
        return json.dumps(log, indent=2)


def _sarif_result(finding: Finding) -> dict[str, Any]:
    result: dict[str, Any] = {"ruleId": finding.code, "level": finding.severity}
    result["message"] = {"text": _described(finding)}
    if finding.path is None:
        return result
    path = Path(finding.path)
    uri = path.as_uri() if path.is_absolute() else "/".join(map(quote, path.parts))
    place: dict[str, Any] = {"artifactLocation": {"uri": uri}}
    if finding.cell is None:
        place["region"] = {"startLine": finding.line, "startColumn": finding.column}
        if finding.edits:
            replacements = [
                {
                    "deletedRegion": {"charOffset": edit.start, "charLength": edit.end - edit.start},
                    "insertedContent": {"text": edit.text},
                }
                for edit in finding.edits
            ]
            change = {"artifactLocation": {"uri": uri}, "replacements": replacements}
            result["fixes"] = [{"description": {"text": finding.advice}, "artifactChanges": [change]}]
    return {**result, "locations": [{"physicalLocation": place}]}


def _described(finding: Finding) -> str:
    where = "" if finding.cell is None else f"cell {finding.cell}, line {finding.line}: "
    return f"{where}{finding.message}. {finding.advice}"


def _escape(text: str, more: str = "") -> str:
    return re.sub(f"[%\r\n{more}]", lambda match: f"%{ord(match[0]):02X}", text)
