"""The commands, on a script that makes everything on the device."""

from pathlib import Path

import pytest
from devices import DEVICE, IS_SIM, requires_device

from amp_patch.insight.comparing import Comparison

pytestmark = requires_device

SUPPORT = Path(__file__).resolve().parent.parent / "support"
SCRIPT = f"""
import sys

import torch
from apex import amp

sys.path.append({str(SUPPORT)!r})
{"import simdev" if IS_SIM else ""}
torch.set_default_device({DEVICE!r})


class Gate(torch.nn.Module):
    def forward(self, x):
        weights = torch.exp(torch.tanh(x) + 12)
        return x * weights / weights.sum(-1, keepdim=True)


torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Dropout(0.2), Gate(), torch.nn.Linear(96, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
for number in range(4):
    optimizer.zero_grad()
    loss = model(torch.randn(6, 64)).float().square().mean()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    print("loss", number, loss.device.type, loss.item())
"""
LOW = "extends: apex\nwhitelist: [exp, sum]\n"


@pytest.fixture
def call(run_command, tmp_path):
    (tmp_path / "low.yaml").write_text(LOW)
    return run_command


def test_run(call):
    code, out, err = call("run", SCRIPT)
    found = [line.split()[:3] for line in out.splitlines() if line.startswith("loss")]
    assert code == 0 and found == [["loss", str(number), DEVICE] for number in range(4)], err


def test_explain(call):
    code, out, err = call("explain", SCRIPT)
    assert (code, err) == (0, "") and f"O1, f16 on {DEVICE}" in out
    assert "torch.exp" in out and "blacklist" in out


def test_trace(call):
    code, out, _ = call("trace", SCRIPT, "--lists", "low.yaml", "--steps", "1:2")
    assert code == 1 and "step 1, forward" in out and "exp" in out


def test_compare(call):
    options = ("--runs", "O0,O1,O4", "--steps", "3", "--jsonl", "c.jsonl")
    code, out, _ = call("compare", SCRIPT, *options)
    found = Comparison.read("c.jsonl")
    assert code == 0 and not found.failed, out
    assert all(one.peak for one in found.runs) and {one.module for one in found.layers("O4")} == {"0", "1", "2", "3"}


def test_tune(call, tmp_path):
    code, out, err = call("tune", SCRIPT, "--extends", "low.yaml", "--out", "tuned.yaml")
    assert (code, err) == (0, ""), out + err
    assert 'match: "2"' in (tmp_path / "tuned.yaml").read_text()
