"""The doctor: reads training scripts, without running or importing them, for what goes wrong under amp.

A script becomes a `Script` (tree, names, structure), and each check in the table of `diagnoses` yields faults of it.
The comment `# amp-patch: ignore[CODE]` on a line silences one.
"""

from .coverage import get_coverage as get_coverage
from .diagnoses import CHECKS as CHECKS
from .files import diagnose_files as diagnose_files
from .files import find_files as find_files
from .machine import get_machine as get_machine
from .machine import machine_findings as machine_findings
from .report import as_json as as_json
from .report import as_text as as_text
