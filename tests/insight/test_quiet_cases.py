"""`trace` names what each faulty script loses quietly, at its line or tensor and with its cause, and nothing else.

Each script is what it says: the faulty lose something that the same script in float32 does not, without inf or NaN, and
lose nothing once they are mended; the healthy agree with float32, and no alarm is raised.

Guards: insight/quiet/watch, insight/quiet/updates, insight/quiet/tally, insight/quiet/values, insight/quiet/gradients.
Guards: insight/quiet/copies, insight/quiet/findings, insight/twins.
"""

import pytest
from quiet_faults import CASES, FAULTY, HEALTHY, check


@pytest.mark.parametrize("name", CASES)
def test_a_case_is_what_it_says(name):
    assert check(CASES[name]) == ""


def test_there_are_enough():
    assert len(FAULTY) >= 40 and len(HEALTHY) >= 20
