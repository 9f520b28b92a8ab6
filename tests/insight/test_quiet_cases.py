"""`trace` names what each faulty script loses quietly, at its line or tensor and with its cause, and nothing else.

Each script is what it says: the faulty lose something that the same script in float32 does not, without inf or NaN, and
lose nothing once they are mended; the healthy agree with float32, and no alarm is raised.

Guards: insight/quiet/watch, insight/quiet/updates, insight/quiet/tally, insight/quiet/values, insight/quiet/gradients.
Guards: insight/quiet/copies, insight/quiet/findings, insight/twins.
"""

import pytest
import torch
from quiet_faults import CASES, FAULTY, HEALTHY, check
from torch import nn

from amp_patch import insight


@pytest.mark.parametrize("name", CASES)
def test_a_case_is_what_it_says(name):
    assert check(CASES[name]) == ""


def test_there_are_enough():
    assert len(FAULTY) >= 40 and len(HEALTHY) >= 20


def test_positions_that_collapse_on_the_line_that_uses_them_are_reported():
    model = nn.Linear(100, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        waves = torch.cos(torch.arange(1000, dtype=torch.bfloat16))
        model(waves.float().view(10, 100)).sum().backward()
        optimizer.step()

    (lost,) = insight.trace(step, steps=2).quiet
    assert lost.cause == "collapsed" and lost.error > 0.1 and lost.used is None
