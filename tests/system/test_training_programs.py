"""Random training scripts give bit by bit the same results with amp and by hand: `tests/support/run_programs.py`.

Guards: training/gradient_sums, training/overflow_flags, training/scale_updates, training/step_log.
"""

import os

import pytest
from run_programs import check_seed

COUNT = int(os.environ.get("AMP_PATCH_PROGRAMS", "50"))
FIRST = int(os.environ.get("AMP_PATCH_FIRST_PROGRAM", "0"))


@pytest.mark.parametrize("seed", range(FIRST, FIRST + COUNT))
def test_a_program_trains_as_by_hand(seed):
    check_seed(seed)
