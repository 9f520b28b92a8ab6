"""Write the tables of docs/trace.md: scripts with a fault or a quiet loss, and what `trace` says of each.

python tools/generate_trace_page.py
"""

import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "trace.md"
sys.path.insert(0, str(ROOT / "tests" / "support"))

import quiet_faults  # noqa: E402
from seeded_faults import CASES, as_given, describe, find  # noqa: E402


def main() -> None:
    """Run all cases and write their rows in the place of those that are there."""
    warnings.simplefilter("ignore")
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    write_rows(lines, 0, [describe(case, find(case, as_given(case))) for case in CASES.values()])
    write_rows(lines, 1, list(map(quiet_faults.describe, quiet_faults.FAULTY.values())))
    PAGE.write_text("\n".join([*lines, ""]), encoding="utf-8")


def write_rows(lines: list[str], number: int, rows: list[str]) -> None:
    """Replace the rows of the table with a number, from 0, in the lines of a page."""
    first = [number for number, line in enumerate(lines) if line.startswith("|---")][number] + 1
    last = next(number for number, line in enumerate(lines[first:], first) if not line.startswith("|"))
    lines[first:last] = rows


if __name__ == "__main__":
    main()
