"""Runs that a command adds by itself leave the user's files as they are, and start from these files.

Guards: scratch/folders, scratch/redirect, cli/scripts.
"""

import re
import stat
import tempfile
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.xdist_group("scripts")

SCRIPT = """
import os
import shutil

import torch
from apex import amp

torch.manual_seed(0)
start = torch.load("best.pt")["step"]
assert start in (59, 1) and open("log").read().count("end") == 0, "these are the files of another run"
open("log", "a").write("begun")
if os.path.exists("samples"):
    shutil.rmtree("samples")
os.mkdir("samples")
model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0, loss_scale=128.0)
for number in range(4):
    x = torch.randn(8, 16)
    if number == 2:
        x[2, 3] = 1e5
    loss = model(x).float().square().mean()
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    torch.save({"step": number}, "part.pt")
    os.replace("part.pt", "best.pt")
    open(f"samples/{number}", "w").close()
open("log", "a").write("end")
"""
COMMANDS = {
    "compare": ["--runs", "O0,O4", "--steps", "2"],
    "tune": ["--max-runs", "3"],
    "trace": ["--fix", "fix.yaml"],  # whose first run is the user's own
}


@pytest.fixture
def files(tmp_path, monkeypatch):
    """What an earlier run of the script has left, in the folder of the test."""
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "old").write_text("old")
    (tmp_path / "log").write_text("")
    torch.save({"step": 59}, tmp_path / "best.pt")
    (tmp_path / "temp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temp"))
    return [tmp_path / name for name in ("samples", "samples/old", "log", "best.pt")]


def take_down(paths):
    return [
        (about.st_mode, about.st_mtime_ns, stat.S_ISDIR(about.st_mode) or path.read_bytes())
        for path in paths
        for about in [path.lstat()]
    ]


@pytest.mark.parametrize("command", COMMANDS)
def test_earlier_files_stay_and_what_is_written_is_named(command, run_command, files, tmp_path):
    before = take_down(files)
    code, out, err = run_command(command, SCRIPT, *COMMANDS[command])
    assert code in (0, 1) and "another run" not in out + err
    if command == "trace":
        assert (tmp_path / "log").read_text() == "begun" and torch.load("best.pt")["step"] == 1
        assert "fix.yaml is enough" in out
    else:
        assert take_down(files) == before
    (folder,) = re.findall(r"to (\S+), not over yours", err)
    (best, *_) = Path(folder).rglob("best.pt")
    assert best.name in err and torch.load(best)["step"] != 59
    assert list(best.parent.parent.rglob("gone")) == []  # what was kept is what the script has written


def test_runs_in_place_write_where_the_script_says(run_command, files, tmp_path):
    _, _, err = run_command("compare", SCRIPT, "--in-place", *COMMANDS["compare"])
    assert torch.load("best.pt")["step"] == 0 and "not over yours" not in err
    assert not (tmp_path / "samples" / "old").exists()


def test_the_arguments_of_the_script_are_in_no_file_unless_asked_for(run_command, files, tmp_path, monkeypatch):
    for option, is_there in ((), False), (("--with-arguments",), True):
        line = [*option, "train.py", "--", "--token", "SECRET"]
        monkeypatch.setattr("sys.argv", ["amp-patch", "trace", *line])
        run_command("trace", SCRIPT, "--fix", "fix.yaml", *option, arguments=["--", "--token", "SECRET"])
        monkeypatch.setattr("sys.argv", ["amp-patch", "explain", *line])
        run_command("explain", SCRIPT, "--html", "e.html", *option, arguments=["--", "--token", "SECRET"])
        texts = [(tmp_path / name).read_text() for name in ("fix.yaml", "e.html")]
        assert ["SECRET" in text for text in texts] == [is_there] * 2
        assert all("train.py" in text for text in texts)
        torch.save({"step": 59}, tmp_path / "best.pt")
        (tmp_path / "log").write_text("")
