"""`amp-patch tune` tunes unmodified scripts, and prints and keeps what it found.

Guards: cli/tune, cli/scripts, cli/values.
"""

import functools
import os
import signal
import subprocess
import sys
import threading

import pytest

from amp_patch.cli import scripts

pytestmark = pytest.mark.xdist_group("scripts")

SCRIPT = """
import torch
from apex import amp


class Gate(torch.nn.Module):
    def forward(self, x):
        weights = torch.exp(torch.tanh(x) + 12)
        return x * weights / weights.sum(-1, keepdim=True)


model = torch.nn.Sequential(torch.nn.Linear(4, 8), Gate(), torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
for number in range(5):
    optimizer.zero_grad()
    with amp.scale_loss(model(torch.randn(6, 4)).float().square().mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    print("step", number)
"""
LOW = "extends: apex\nwhitelist: [exp, sum]\n"
CALL = scripts._call  # of a process; tests of scripts put another in its place


@pytest.fixture
def call(run_command, tmp_path):
    """Returns a function that tunes a script."""
    (tmp_path / "low.yaml").write_text(LOW)
    return functools.partial(run_command, "tune")


def test_without_a_file_the_list_is_printed(call, tmp_path):
    before = set(tmp_path.iterdir())
    code, out, _ = call(SCRIPT, "--lists", "low.yaml", "--units", "ops", "--steps", "1")
    assert code == 0 and "\nblacklist:\n  - {op: exp, why: " in out and "extends: [" in out and "low.yaml" in out
    assert {path.name for path in set(tmp_path.iterdir()) - before} == {"train.py"}


def test_what_cannot_be_reached_says_so(call, tmp_path):
    code, out, _ = call(SCRIPT, "--tolerance", "1e-9", "--max-runs", "2", "--out", "tuned.yaml")
    assert code == 1 and "stopped after 2 runs" in out
    assert out.startswith("nothing reached a tolerance of 1e-09 so far\nthe best: ")
    assert not (tmp_path / "tuned.yaml").exists()


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("print('nothing')\n", "the script took no step\n  nothing"),
        ("import torch\nprint('so far')\n1 / 0\n", "ZeroDivisionError: division by zero"),
    ],
    ids=["no apex", "crash"],
)
def test_a_script_that_cannot_be_tuned_shows_what_it_printed(source, told, call):
    code, out, err = call(source)
    assert code == 1 and told in err and out == ""


def test_sigterm_ends_the_script_too_and_keeps_the_best_so_far(call, monkeypatch, tmp_path):
    run_script, runs = scripts._call, []

    def terminated(command, environment, is_over, log):
        runs.append(1)
        if len(runs) < 3:
            return run_script(command, environment, is_over, log)
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
        return CALL([sys.executable, "-c", "import time; time.sleep(60)"], {}, is_over, log)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(scripts, "_call", terminated)
    code, out, _ = call(SCRIPT, "--extends", "low.yaml", "--out", "tuned.yaml")
    assert code == 143 and "interrupted in run 3" in out and 'match: "1"' in (tmp_path / "tuned.yaml").read_text()
    assert [path.name for path in tmp_path.glob(".*")] == [] and signal.getsignal(signal.SIGTERM) is before
    runs[:] = [1, 1]
    code, _, err = call(SCRIPT, "--extends", "low.yaml", "--out", "other.yaml")
    assert code == 143 and "nothing is written" in err and not (tmp_path / "other.yaml").exists()


def test_an_interrupt_counts_in_a_run_that_is_over_meanwhile(monkeypatch):
    class Process(subprocess.Popen):
        events = [subprocess.TimeoutExpired("python", 1), KeyboardInterrupt()]

        def wait(self, timeout=None):
            if self.events:
                raise self.events.pop()
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", Process)
    assert scripts._call([sys.executable, "-S", "-c", "pass"], {}, lambda: True) == -signal.SIGINT


def test_an_interrupt_is_told_once_a_quiet_script_has_ended(tmp_path, monkeypatch):
    waits = []

    class Process(subprocess.Popen):
        def wait(self, timeout=None):
            waits.append(timeout)
            if len(waits) == 1:
                raise KeyboardInterrupt
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", Process)
    command = [sys.executable, "-S", "-c", "print('heard')"]
    assert scripts._call(command, {}, lambda: False, tmp_path / "log") == -signal.SIGINT
    assert (tmp_path / "log").read_text() == "heard\n" and len(waits) >= 2
    assert scripts._call(command, {}, lambda: False) == 0
