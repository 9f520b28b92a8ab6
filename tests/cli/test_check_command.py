"""`amp-patch check` writes a contract, checks a script against it and tells CI by its exit code; `diff` compares files.

Guards: cli/check, cli/diff, insight/checking/text, insight/checking/page.
"""

import functools
import json
import re

import pytest

from amp_patch.cli.main import main

pytestmark = pytest.mark.xdist_group("scripts")

SCRIPT = """
import torch
from torch import nn

net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(6):
    with torch.autocast("cpu", torch.bfloat16):
        loss = (net(torch.randn(4, 4)) * 0.5).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
open("weights.txt", "w").write("trained")
"""


@pytest.fixture
def call(run_command):
    return functools.partial(run_command, "check")


def test_a_contract_is_written_held_broken_and_updated(call, tmp_path, monkeypatch):
    file = str(tmp_path / "numerics.json")
    code, out, err = call(SCRIPT, "--write", file, "--steps", "3")
    assert code == 0 and "train.py: 3 steps" in out and f"written: {file}" in err
    assert not (tmp_path / "weights.txt").exists()  # runs write to scratch folders
    lines = json.loads((tmp_path / "numerics.json").read_text())
    assert lines[0]["kind"] == "contract" and lines[0]["steps"] == 3

    code, out, _ = call("# moved\n" + SCRIPT, "--against", file)
    assert code == 0 and "holds" in out

    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    files = ("--json", str(tmp_path / "result.json"), "--html", str(tmp_path / "result.html"))
    code, out, _ = call(SCRIPT.replace("0.5", "0.75"), "--against", file, *files)
    assert code == 1 and "0.5 -> 0.75" in out and "::error file=train.py,line=9," in out
    result = json.loads((tmp_path / "result.json").read_text())
    assert not result["holds"] and result["breaks"][0]["kind"] == "constant"
    assert "0.5 -&gt; 0.75" in re.sub("</?span[^>]*>", "", (tmp_path / "result.html").read_text())

    plain = SCRIPT.replace('with torch.autocast("cpu", torch.bfloat16)', "if True")
    (tmp_path / "result.html").unlink()
    code, out, err = call(plain, "--against", file, *files)
    assert code == 1 and "no mixed precision" in out and "--update" not in out
    assert f"not written: {tmp_path / 'result.html'}" in err and not (tmp_path / "result.html").exists()
    assert json.loads((tmp_path / "result.json").read_text())["breaks"][0]["kind"] == "region"

    other = SCRIPT.replace("nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)", "*[nn.Softplus(), nn.PReLU()] * 6")
    (tmp_path / "numerics.json").write_text((tmp_path / "numerics.json").read_text().replace("train.py", "old.py", 1))
    code, _, err = call(other, "--against", file)
    assert code == 2 and "contract of old.py" in err


def test_what_cannot_be_judged_ends_with_two(call, tmp_path):
    (tmp_path / "cut.json").write_text('[\n{"kind": "contract", ')
    for source, file in ((SCRIPT, "cut.json"), (SCRIPT, "missing.json")):
        code, _, err = call(source, "--against", str(tmp_path / file))
        assert code == 2 and "not judged" in err and file in err
    with pytest.raises(SystemExit) as left:
        call(SCRIPT, "--write", str(tmp_path / "new.json"), "--update")
    assert left.value.code == 2


def test_diff_compares_recordings(run_command, tmp_path, capsys):
    for name, source in (("a.json", SCRIPT), ("b.json", SCRIPT.replace("* 0.5", "* 0.25").replace("ReLU", "GELU"))):
        run_command("explain", source, "--json", str(tmp_path / name))
    capsys.readouterr()
    assert main(["diff", str(tmp_path / "a.json"), str(tmp_path / "a.json")]) == 0
    assert "no difference" in capsys.readouterr().out
    assert main(["diff", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 1
    out = capsys.readouterr().out
    assert "appeared  aten.gelu" in out and "vanished  aten.relu" in out and "0.5 -> 0.25" in out
    (tmp_path / "none.json").write_text("{}")
    assert main(["diff", str(tmp_path / "a.json"), str(tmp_path / "none.json")]) == 2
    assert "none.json" in capsys.readouterr().err
