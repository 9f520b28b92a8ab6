"""`trace` names what each faulty script loses quietly, at its line or tensor and with its cause, and nothing else.

Each script is what it says: the faulty lose something that the same script in float32 does not, without inf or NaN, and
lose nothing once they are mended; the healthy agree with float32, and no alarm is raised.

Guards: insight/quiet/watch, insight/quiet/updates, insight/quiet/tally, insight/quiet/values, insight/quiet/gradients.
Guards: insight/quiet/copies, insight/quiet/findings, insight/twins.
"""

from pathlib import Path

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


def test_the_op_that_rounded_the_angles_is_named_with_a_rule_for_its_module():
    class Time(nn.Module):
        def forward(self, t):
            angles = t.float()[:, None] @ torch.linspace(1, 0.001, 8)[None]  # HERE
            return torch.sin(angles)

    model = nn.Sequential(Time(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(torch.arange(3000, 3064)).float().square().mean()
        loss.backward()
        optimizer.step()

    (lost,) = insight.trace(step, steps=2).quiet
    lines = Path(__file__).read_text().splitlines()
    here = next(number for number, line in enumerate(lines, 1) if line.endswith("# HERE"))
    assert lost.site.endswith(f":{here}") and lost.used.endswith(f":{here + 1}")
    assert 'modules: [{match: "0", run: float32}]' in insight.format_quiet(lost, None)


def test_log_probabilities_of_equal_weights_are_not_reported_although_only_one_side_is_recomputed():
    """The exact difference of the stored and the new log-probabilities is zero, and so is the difference in 16 bits."""
    policy, states = nn.Linear(8, 16), torch.randn(32, 8)
    actions = torch.arange(32)[:, None] % 16
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)

    def log_probabilities():
        with torch.autocast("cpu", torch.bfloat16):
            logits = policy(states)
            return (logits - logits.logsumexp(-1, keepdim=True).to(logits.dtype)).gather(-1, actions)

    with torch.no_grad():
        stored = log_probabilities()

    def step():
        ratio = (log_probabilities() - stored).exp()
        ratio.float().mean().backward()
        optimizer.step()

    assert not insight.trace(step).quiet
