"""The doctor: reads training scripts, without running or importing them, for what goes wrong under amp.

A script becomes a `Script` (tree, names, structure); each check in the table of `diagnoses` yields faults of it; `#
amp-patch: ignore[CODE]` on the line silences one.
"""

from .command import SUMMARY as SUMMARY
from .command import add_arguments as add_arguments
from .command import run as run
