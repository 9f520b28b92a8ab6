"""The doctor: finds faults in training scripts that use amp, without running or importing the scripts.

It parses each file into a `Script`. A *rule* yields *faults*: nodes of the script, each with a message. A *finding* is
an entry of the report: a fault with its file, line and code, a file that cannot be read, or a fact about the machine.
The comment `# amp-patch: ignore[CODE]` on a line silences a rule there.
"""

from .machine import get_advice as get_advice
from .machine import get_machine as get_machine
from .machine import machine_findings as machine_findings
from .project import Project as Project
from .project import find_files as find_files
from .report import Report as Report
from .rules import Selection as Selection
from .rules import explain_rule as explain_rule
from .rules import sorted_rules as sorted_rules
