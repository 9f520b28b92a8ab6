"""The report: lines for people, or one JSON document for machines."""

import json
from collections.abc import Sequence

import torch

from ..dtypes import dtype_name
from ..hardware import has_low_products
from ..tables import align
from .findings import SEVERITIES, Finding
from .machine import Machine, recommend

_APEX = {
    "none": "not installed",
    "with amp": "NVIDIA's, with amp",
    "without amp": "NVIDIA's, without amp (as since May 2025)",
    "pyramid": "the Pyramid web toolkit of that name",
    "stand-in": "amp_patch's stand-in",
    "other": "another package of that name",
}


def as_text(machine: Machine, findings: Sequence[Finding], file_count: int) -> str:
    """Return the report for people: the machine, the findings by place, and a summary as the last line."""
    lines = ["machine:", *(f"  {row}" for row in align(_machine_rows(machine), gap=3))]
    if findings:
        lines.append("")
    for finding in findings:
        lines.append(f"{finding.place()}: {finding.severity}: {finding.message} [{finding.code}]")
        lines.append(f"    {finding.fix}")
    lines += ["", _summary(findings, file_count)]
    return "\n".join(lines)


def _machine_rows(machine: Machine) -> list[tuple[str, str]]:
    versions = ", ".join(f"{name} {version or 'missing'}" for name, version in machine.versions.items())
    lines = [("python", machine.python), ("packages", f"amp_patch {machine.amp_patch}, {versions}")]
    for device in machine.devices:
        lines.append(("device", device.name))
        lines += [("", f"{dtype.name} {dtype.verdict}: {dtype.evidence}") for dtype in device.low_dtypes]
    in_float32 = [dtype_name(low) for low in (torch.float16, torch.bfloat16) if not has_low_products("cpu", low)]
    lines.append(("", f"on the CPU, products of {' and '.join(in_float32)} values are computed in float32 by default"))
    where = f", {machine.apex.location}" if machine.apex.location else ""
    lines.append(("apex", f"{_APEX[machine.apex.kind]}{where}"))
    lines.append(("advice", recommend(machine)))
    return lines


def _summary(findings: Sequence[Finding], file_count: int) -> str:
    counts = ", ".join(
        _count(len([one for one in findings if one.severity == severity]), severity) for severity in SEVERITIES
    )
    return f"{counts} in {_count(file_count, 'file')}"


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def as_json(machine: Machine, findings: Sequence[Finding], file_count: int) -> str:
    """Return the report as a JSON object: `machine`, `findings` and `summary`."""
    listed = [{name: getattr(finding, name) for name in Finding.__slots__} for finding in findings]
    summary = {severity: len([one for one in findings if one.severity == severity]) for severity in SEVERITIES}
    shown = {**machine.as_dict(), "advice": recommend(machine)}
    return json.dumps({"machine": shown, "findings": listed, "summary": {**summary, "files": file_count}}, indent=2)
