"""The stages of `benchmarks/gpu.py` run at the first try.

Guards: benchmarks/gpu.py.
"""

import os
import subprocess
import sys
from pathlib import Path

from devices import requires_sim

pytestmark = requires_sim

ROOT = Path(__file__).resolve().parent.parent.parent


def test_stages_of_each_script_run(tmp_path):
    command = [sys.executable, "-W", "ignore", "benchmarks/gpu.py", "--out", str(tmp_path), "--rehearse"]
    command += ["--only", "quick-bfloat16,resnet50,memory,list-errors"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.count(": done") == 4, done.stdout + done.stderr
    assert all(len(path.read_text().splitlines()) > 4 for path in tmp_path.glob("*.txt"))
