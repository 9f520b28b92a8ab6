"""Mending: broken scripts run afterwards, and what is no part of a fault stays byte for byte."""

from pathlib import Path

import pytest
from broken_scripts import BROKEN
from fork_server import ForkServer

from amp_patch.cli.main import main


@pytest.fixture(scope="module")
def server():
    """Forks of a process that has imported torch and the package."""
    server = ForkServer("import torch._dynamo, torch._inductor.config, amp_patch.api")
    yield server
    server.close()


def mend(path: Path, *options: str) -> int:
    return main(["doctor", "--no-advice", *options, str(path)])


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_script_runs_when_it_is_mended_and_not_before(name, tmp_path, server, capsys):
    broken, path = tmp_path / "broken.py", tmp_path / "train.py"
    for one in (broken, path):
        one.write_text(BROKEN[name])
    assert mend(path, "--fix") == 0, capsys.readouterr().out
    runner = ["-m", "amp_patch", "run"] if name.startswith("apex") else []
    commands = [[*runner, broken], [*runner, path]]
    before, after = server.run_together(commands, cwd=tmp_path, environments=[{}, {}])
    assert before.returncode == 1
    assert after.returncode == 0, after.stderr + path.read_text()
    mended = path.read_bytes()
    assert mend(path, "--fix") == 0
    assert path.read_bytes() == mended
