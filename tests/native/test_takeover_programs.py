"""Random scripts under op lists do bit by bit the same as scripts in which the lists are applied by hand.

`make fuzz KIND=takeover` runs more of them.

Guards: native/takeover, native/changes, native/session, native/whole_script, casting/autocast, casting/op_patches.
"""

import contextlib
import os

import pytest
import run_takeover
from run_takeover import TAKEOVER

COUNT = int(os.environ.get("AMP_PATCH_PROGRAMS", "50"))
FIRST = int(os.environ.get("AMP_PATCH_FIRST_PROGRAM", "0"))

pytestmark = pytest.mark.xdist_group("takeover programs")


@pytest.mark.parametrize("seed", range(FIRST, FIRST + COUNT))
def test_a_program_runs_as_by_hand(seed: int) -> None:
    TAKEOVER.check_seed(seed)


def test_without_a_takeover_most_programs_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_takeover, "installed", lambda program: contextlib.nullcontext())
    differing = [seed for seed in range(12) if TAKEOVER.find_failure(TAKEOVER.draw(seed)) is not None]
    assert len(differing) >= 6
