"""The commands work on a script that makes everything on the device.

Guards: cli/run, cli/explain, cli/trace, cli/compare, cli/tune.
"""

from pathlib import Path

import pytest
from devices import DEVICE, IS_SIM, requires_device

from amp_patch.insight.comparing import Comparison

pytestmark = [requires_device, pytest.mark.xdist_group("scripts")]

SUPPORT = Path(__file__).resolve().parent.parent / "support"
HEAD = f"""
import sys

import torch

sys.path.append({str(SUPPORT)!r})
{"import simdev" if IS_SIM else ""}
torch.set_default_device({DEVICE!r})


class Gate(torch.nn.Module):
    def forward(self, x):
        weights = torch.exp(torch.tanh(x) + 12)
        print("gate", x.dtype, weights.dtype, weights.device.type)
        return x * weights / weights.sum(-1, keepdim=True)


torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Dropout(0.2), Gate(), torch.nn.Linear(96, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
APEX = f"""
{HEAD}
from apex import amp

model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
for number in range(4):
    optimizer.zero_grad()
    loss = model(torch.randn(6, 64)).float().square().mean()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
"""
NATIVE = f"""
{HEAD}
scaler = torch.amp.GradScaler({DEVICE!r})
model(torch.randn(6, 64))
for number in range(4):
    optimizer.zero_grad()
    with torch.autocast({DEVICE!r}, torch.float16):
        loss = model(torch.randn(6, 64)).float().square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""
SCRIPTS = {"apex": APEX, "native": NATIVE}
each_script = pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
LOW = "extends: apex\nwhitelist: [exp, sum]\n"


@pytest.fixture
def call(run_command, tmp_path):
    (tmp_path / "low.yaml").write_text(LOW)
    return run_command


@each_script
def test_run(script, call):
    for options, given, found in (
        (("--lists", "low.yaml"), "float16", "float16"),
        (("--opt-level", "O4"), "bfloat16", "float32"),
    ):
        code, out, err = call("run", script, *options)
        assert code == 0 and out.count(f"gate torch.{given} torch.{found} {DEVICE}") >= 4, out + err


@each_script
def test_explain(script, call):
    code, out, err = call("explain", script)
    assert code == 0 and f"f16 on {DEVICE}" in out, out + err
    assert "aten.tanh" in out and "train.py:" in out


@each_script
def test_trace(script, call):
    code, out, _ = call("trace", script, "--lists", "low.yaml", "--steps", "1:2")
    assert code == 1 and "step 1, forward" in out and "exp" in out


def test_compare(call):
    options = ("--runs", "O0,O1,O4", "--steps", "3", "--jsonl", "c.jsonl")
    code, out, _ = call("compare", APEX, *options)
    found = Comparison.read("c.jsonl")
    assert code == 0 and not found.failed, out
    assert all(one.peak for one in found.runs) and {one.module for one in found.layers("O4")} == {"0", "1", "2", "3"}


def test_tune(call, tmp_path):
    code, out, err = call("tune", APEX, "--extends", "low.yaml", "--out", "tuned.yaml")
    assert code == 0, out + err
    assert 'match: "2"' in (tmp_path / "tuned.yaml").read_text()
