"""For scripts with a known fault, `trace` names its line and cause, and its advice, applied literally, repairs the
script.

Guards: insight/faults, insight/causes, insight/placing, insight/repair, insight/advice.
"""

from pathlib import Path

import pytest
from quiet_faults import FAULTY
from quiet_faults import describe as describe_quiet
from seeded_faults import CASES, as_given, describe, find, remedied

PAGE = Path(__file__).parents[2] / "docs" / "trace.md"

pytestmark = pytest.mark.filterwarnings("ignore:non-finite gradients")


@pytest.mark.parametrize("name", CASES)
def test_a_seeded_fault_is_told_and_what_is_advised_repairs(name, tmp_path):
    case = CASES[name]
    found = find(case, as_given(case))
    assert found.fault is not None
    assert found.fault.cause == case.cause
    assert found.fault.site in case.lines or found.fault.phase == "step"
    if case.helps == "script":
        assert not found.remedy.has_list and not found.remedy.scale, found.text
    if case.helps == "list":
        assert found.remedy.has_list and not found.remedy.sites, found.text
    for given in remedied(case, found.remedy, tmp_path):
        assert find(case, given).text == ""
    assert describe(case, found) in PAGE.read_text(encoding="utf-8")


def test_the_page_has_no_other_cases():
    text = PAGE.read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(rows) == len(CASES) + len(FAULTY) + 2
    assert all(describe_quiet(case) in rows for case in FAULTY.values())
