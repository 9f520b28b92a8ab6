"""`Report`: the result of the doctor, its findings and the machine, as text or JSON."""

import json
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..tables import WIDTH, align, count_of, wrap_sentences
from .machine import Machine, recommend
from .rules import SEVERITIES, Finding

_MARGIN = "    "  # before the advice of a finding

# what the report says of each `kind` of `ApexInstall`
_APEX = {
    "none": "not installed",
    "with amp": "NVIDIA's, with amp",
    "without amp": "NVIDIA's, without amp (removed in May 2025)",
    "stand-in": "amp_patch's stand-in",
    "other": "another package of that name",
}


@dataclass(frozen=True, slots=True)
class Report:
    """The findings in `file_count` files, and the machine. `machine` is None if the machine was not examined."""

    findings: Sequence[Finding]
    file_count: int
    machine: Machine | None = None

    def as_text(self, *, with_notes: bool = False) -> str:
        """Return the advice on a level, a summary, a table about the machine, and the findings, in this order.

        Advice and table are left out if the machine was not examined. Without `with_notes`, notes are only counted.
        """
        lines = [*self._summarize(with_notes=with_notes)]
        if self.machine is not None:
            lines = [f"advice: {recommend(self.machine.devices[0]).text}", *lines, *_machine_lines(self.machine)]
        for finding in self.findings:
            if finding.severity != "note" or with_notes:
                lines.append(f"{finding.location()}: {finding.severity}: {finding.message} [{finding.code}]")
                lines += textwrap.wrap(finding.advice, WIDTH, initial_indent=_MARGIN, subsequent_indent=_MARGIN)
        return "\n".join(lines)

    def _summarize(self, *, with_notes: bool) -> Iterator[str]:
        """Yield a line with the number of findings of each shown severity, and a line about notes that are not shown.

        There is no first line without files and findings, and no second line if all notes are shown.
        """
        counts = Counter(finding.severity for finding in self.findings)
        shown = [count_of(counts[severity], severity) for severity in SEVERITIES if severity != "note" or with_notes]
        if self.file_count or self.findings:
            yield f"{', '.join(shown)} in {count_of(self.file_count, 'file')}"
        if counts["note"] and not with_notes:
            codes = sorted({finding.code for finding in self.findings if finding.severity == "note"})
            yield f"{count_of(counts['note'], 'note')} ({', '.join(codes)}): shown by --notes"

    def as_json(self) -> str:
        """Return a JSON object with `findings` and `summary`, and `machine` if it was examined."""
        counts = Counter(finding.severity for finding in self.findings)
        summary: dict[str, int] = {severity: counts[severity] for severity in SEVERITIES}
        summary["files"] = self.file_count
        whole: dict[str, Any] = {"findings": [asdict(finding) for finding in self.findings], "summary": summary}
        if self.machine is not None:
            whole["machine"] = {**asdict(self.machine), "advice": recommend(self.machine.devices[0]).text}
        return json.dumps(whole, indent=2)


def _machine_lines(machine: Machine) -> list[str]:
    """Return a table about the machine, as lines."""
    versions = ", ".join(f"{name} {version or 'missing'}" for name, version in machine.versions.items())
    rows = [("python", machine.python), ("packages", f"amp_patch {machine.amp_patch}, {versions}")]
    for device in machine.devices:
        rows.append(("device", device.name))
        rows += [("", f"{dtype.name} {dtype.verdict}: {dtype.evidence}") for dtype in device.low_dtypes]
    if machine.malloc:
        rows.append(("malloc", machine.malloc))
    apex = _APEX[machine.apex.kind]
    if machine.apex.location:
        apex += f", {machine.apex.location}"
    rows.append(("apex", apex))
    table = "\n".join(f"  {row}" for row in align(rows, gap=3))
    return ["machine:", *wrap_sentences(table).split("\n")]
