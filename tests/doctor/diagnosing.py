"""What the tests of the doctor ask of files."""

from collections.abc import Sequence
from pathlib import Path

from amp_patch.doctor.coverage import Coverage
from amp_patch.doctor.files import Project
from amp_patch.doctor.findings import Finding, sort_key
from amp_patch.doctor.rules import Selection


def diagnose_files(files: Sequence[Path], coverage: Coverage) -> list[Finding]:
    """The findings of all rules in these files, by place."""
    project = Project(files, coverage)
    found = [one for script in project.scripts.values() for one in project.diagnose(script, Selection())]
    return sorted([*project.unreadable, *found], key=sort_key)
