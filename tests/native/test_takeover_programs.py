"""Scripts drawn at random do under op lists what the same scripts do by hand, bit by bit.

`make fuzz KIND=takeover` runs more of them.
"""

import os

import pytest
from run_takeover import TAKEOVER

COUNT = int(os.environ.get("AMP_PATCH_PROGRAMS", "50"))
FIRST = int(os.environ.get("AMP_PATCH_FIRST_PROGRAM", "0"))

pytestmark = pytest.mark.xdist_group("takeover programs")


@pytest.mark.parametrize("seed", range(FIRST, FIRST + COUNT))
def test_a_program_runs_as_by_hand(seed: int) -> None:
    TAKEOVER.check_seed(seed)
