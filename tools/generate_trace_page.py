"""Write the table of docs/trace.md: scripts with a fault, and what `trace` says of each.

python tools/generate_trace_page.py
"""

import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "trace.md"
sys.path.insert(0, str(ROOT / "tests" / "support"))

from seeded_faults import CASES, as_given, describe, find  # noqa: E402


def main() -> None:
    """Run all cases and write their rows in the place of those that are there."""
    warnings.simplefilter("ignore")
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("|---")) + 1
    last = next(number for number, line in enumerate(lines[first:], first) if not line.startswith("|"))
    lines[first:last] = [describe(case, find(case, as_given(case))) for case in CASES.values()]
    PAGE.write_text("\n".join([*lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
