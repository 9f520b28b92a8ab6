"""Every example as a reader runs it, to its end. `make test-examples` names this file; other runs do not collect it."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem != "common")


@pytest.mark.parametrize("name", NAMES)
def test_an_example_runs_and_what_it_checks_holds(name, tmp_path):
    picture = tmp_path / f"{name}.png"
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), "--plot", str(picture)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "\nNO " not in done.stdout, f"{done.stdout}\n{done.stderr}"
    assert picture.stat().st_size > 10_000
