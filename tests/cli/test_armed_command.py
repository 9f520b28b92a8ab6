"""`--armed` of `trace` and `run`: its options, and a script that it stops.

Guards: cli/armed, cli/trace_armed, cli/recording.
"""

import contextlib

import pytest

from amp_patch.cli import scripts
from amp_patch.cli.main import main
from amp_patch.insight import Recording

pytestmark = pytest.mark.xdist_group("scripts")

SCRIPT = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(8):
    optimizer.zero_grad()
    loss = torch.log(model(torch.ones(2, 4)).square().mean() * (step != 5))
    loss.backward()
    optimizer.step()
print("trained")
"""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trace", "--then", "go"], "--then needs --armed"),
        (["trace", "--armed", "--fix", "fix.yaml"], "--fix does not go with --armed"),
        (["trace", "--armed", "--then", "skip", "--every", "2"], "--then skip needs --every 1"),
        (["trace", "--armed", "--every", "0"], "1 or more"),
        (["run", "--record", "10"], "--record needs --armed"),
        (["run", "--json", "o.jsonl"], "--json needs --armed"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_that_do_not_go_together_are_refused(arguments, words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "train.py"])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(("command", "then"), [("trace", "stop"), ("run", "go")])
def test_a_script_is_armed(command, then, run_scripts, tmp_path, capsys):
    (tmp_path / "train.py").write_text(SCRIPT)
    file = tmp_path / "armed.jsonl"
    with contextlib.suppress(run_scripts):
        code = main([command, "--armed", "--then", then, "--json", str(file), str(tmp_path / "train.py")])
        assert code == 1
    printed = capsys.readouterr().out
    assert "step 5: the loss is -inf" in printed and "log at train.py:10" in printed
    assert ("trained" in printed) == (then == "go")
    assert [trouble.step for trouble in Recording.read(file).troubles] == [5]


def test_a_rank_that_is_stopped_trains_no_further_while_it_waits_for_its_end(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(scripts, "_GRACE_SECONDS", 0.5)
    is_a_rank = 'import os\nos.environ.update(RANK="1", WORLD_SIZE="2")\n'
    counts = "    open('steps', 'a').write(f'{step} ')\n"
    (tmp_path / "train.py").write_text(is_a_rank + SCRIPT.replace("    optimizer.zero_grad()\n", counts, 1))
    monkeypatch.chdir(tmp_path)
    assert main(["trace", "--armed", "train.py"]) == 1
    assert "rank 1, step 5: the loss is" in capfd.readouterr().out
    assert (tmp_path / "steps").read_text().split() == list("012345")
