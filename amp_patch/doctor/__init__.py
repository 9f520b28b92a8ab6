"""The doctor: reads training scripts, without running or importing them, for what goes wrong under amp.

A file becomes a `Script` (tree, names, structure), and each of the `RULES` yields faults of it, some with edits that
mend them. The comment `# amp-patch: ignore[CODE]`, or `# noqa: CODE`, on a line silences one.
"""

from .coverage import get_coverage as get_coverage
from .files import Project as Project
from .files import find_files as find_files
from .machine import get_advice as get_advice
from .machine import get_machine as get_machine
from .machine import machine_findings as machine_findings
from .report import Report as Report
from .rules import explain as explain
from .rules import sorted_rules as sorted_rules
from .settings import settings_for as settings_for
