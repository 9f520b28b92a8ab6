"""Training scripts drawn at random do what the same scripts do by hand, bit by bit: `tests/support/run_programs.py`."""

import os

import pytest
from run_programs import check_seed

COUNT = int(os.environ.get("AMP_PATCH_PROGRAMS", "50"))
FIRST = int(os.environ.get("AMP_PATCH_FIRST_PROGRAM", "0"))


@pytest.mark.parametrize("seed", range(FIRST, FIRST + COUNT))
def test_a_program_trains_as_by_hand(seed):
    check_seed(seed)
