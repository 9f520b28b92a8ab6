"""Under `amp-patch run` a script sees the same as under python, and `apex` besides.

Guards: cli/run, cli/startup/sitecustomize, apex/_finder.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

import pytest

from amp_patch.cli.main import main

ROOT = Path(__file__).resolve().parent.parent.parent

REPORT = """
import sys

is_main = sys.modules["__main__"].__dict__ is globals()
print(__name__, __package__, sys.argv, sys.path[0], __file__, is_main, getattr(__spec__, "name", None))
"""


def run(*command, cwd, env=None):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(env or {})}
    return subprocess.run(
        [sys.executable, *map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300
    )


def amp_patch_run(*command, cwd, env=None):
    return run("-m", "amp_patch", "run", *command, cwd=cwd, env=env)


# ---- as under python -------------------------------------------------------------------------------------------------

PROGRAMS = {
    "arguments": (["sub/script.py", "--opt-level", "O9", "-m", "--", "x"], REPORT + "sys.exit(3)\n"),
    "module": (["-m", "sub.script", "--lr", "0.1"], REPORT + "import sub.other\n"),
    "package": (["-m", "sub", "-m"], ""),
    "no module": (["-m", "nowhere"], ""),
    "no package": (["."], ""),
    "archive": (["sub.zip", "x"], ""),
    "exception": (["sub/script.py"], "def f():\n    return 1 / 0\n\n\nprint('on')\nf()\n"),
    "at-exit": (
        ["sub/script.py"],
        (
            "import atexit, pickle\n\n\n"
            "class Box:\n"
            "    pass\n\n\n"
            "atexit.register(lambda: print(pickle.loads(pickle.dumps(Box())).__class__.__name__))\n"
        ),
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_runs_as_under_python(name, tmp_path):
    arguments, source = PROGRAMS[name]
    (tmp_path / "sub").mkdir()
    for file, text in {"script.py": source, "other.py": "", "__init__.py": "", "__main__.py": REPORT}.items():
        (tmp_path / "sub" / file).write_text(text)
    shutil.make_archive(str(tmp_path / "sub"), "zip", tmp_path / "sub")
    plain, ours = run(*arguments, cwd=tmp_path), amp_patch_run(*arguments, cwd=tmp_path)
    assert ours.returncode == plain.returncode
    assert ours.stdout == plain.stdout
    assert ours.stderr == plain.stderr


# ---- apex in it ------------------------------------------------------------------------------------------------------

TRAIN = """
import sys

import torch
from apex import amp

model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = amp.initialize(model, optimizer, opt_level=sys.argv[1], verbosity=0)
level, dtype = amp._amp_state.opt_properties.opt_level, torch.sigmoid(torch.ones(2).half()).dtype
print(level, model.weight.dtype, dtype, "theirs" in vars(amp))
"""


@pytest.fixture
def other_apex(tmp_path):
    """An `apex` beside the script that has an `amp` of its own."""
    (tmp_path / "apex" / "amp").mkdir(parents=True)
    (tmp_path / "apex" / "__init__.py").write_text("")
    (tmp_path / "apex" / "amp" / "__init__.py").write_text("theirs = True\n")


def test_an_apex_with_amp_is_left_alone(other_apex, run_command):
    _, out, err = run_command("run", TRAIN, arguments=["O2"])
    assert not out and "has amp itself and is left alone" in err


def test_an_error_of_amp_is_the_scripts_own(run_command):
    _, _, err = run_command("run", TRAIN, arguments=["o2"])
    assert 'train.py", line 9, in <module>' in err
    assert "PolicyError: opt_level 'o2'" in err.splitlines()[-1]


CHILD = "import sys; from apex import amp; print(amp.__name__, sys.argv[1:])"


def test_processes_that_it_starts_have_it_too_with_its_options(other_apex, tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text("import builtins\nbuiltins.own = True\n")
    (tmp_path / "mine.yaml").write_text("blacklist: [torch.sigmoid]\n")
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "script.py").write_text(
        "import os, subprocess, sys\n"
        "os.chdir('/')\n"
        f"subprocess.run([sys.executable, '-c', {CHILD!r}, 'x'], check=True)\n"
        f"subprocess.run([sys.executable, {str(tmp_path / 'train.py')!r}, 'O2'], check=True)\n"
        "print(own, [entry for entry in sys.path if 'startup' in entry], 'torch' in sys.modules)\n"
    )
    options = ["--opt-level", "O4", "--lists", "mine.yaml", "--force", "--"]
    path = os.pathsep.join([str(tmp_path / "own"), str(ROOT)])
    done = amp_patch_run(*options, "script.py", cwd=tmp_path, env={"PYTHONPATH": path})
    assert done.stdout.splitlines() == [
        "amp_patch.apex.amp ['x']",
        "O4 torch.float32 torch.float32 False",
        "True [] False",
    ], done.stderr


def test_options_behind_the_script_are_said_to_be_the_scripts(tmp_path, monkeypatch, capsys):
    (tmp_path / "script.py").write_text("amp.initialize(model, opt_level='O1')")
    (tmp_path / "apex_script.py").write_text("parser.add_argument('--opt-level')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("amp_patch.cli.run.start", lambda line, environment: None)
    for given, told in [
        (["script.py", "--lists", "fast"], ["--lists"]),
        (["script.py", "--lists=fast"], ["--lists"]),
        (["-m", "script", "--lists", "fast"], ["--lists"]),
        (["--lists", "fast", "script.py", "--list"], []),
        (["--", "script.py", "--lists", "fast", "--opt-level=O0"], []),
        (["script.py", "--opt-level", "O0"], ["--opt-level"]),
        (["apex_script.py", "--opt-level", "O0"], []),
        (["-m", "script", "--opt-level", "O0"], []),
    ]:
        main(["run", *given])
        notes = [f"amp-patch run: note: {name} after the script was passed to the script" for name in told]
        assert [line.partition(";")[0] for line in capsys.readouterr().err.splitlines()] == notes


def test_where_processes_cannot_be_replaced_it_waits(tmp_path, monkeypatch):
    """As on Windows."""
    (tmp_path / "script.py").write_text("import apex, sys\nopen('found', 'w').write(apex.__name__)\nsys.exit(7)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("amp_patch.cli.run.IS_WINDOWS", True)
    with pytest.raises(SystemExit) as left:
        main(["run", "script.py"])
    assert left.value.code == 7 and (tmp_path / "found").read_text() == "amp_patch.apex"


def test_a_script_with_nothing_to_change_is_refused_in_a_line(run_command):
    source = """
import contextlib

import torch


def initialize(model, optimizer, opt_level):
    return model, optimizer


@contextlib.contextmanager
def scale_loss(loss, optimizer):
    yield loss


model = torch.nn.Linear(2, 2)
model, optimizer = initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "O1")
with scale_loss(model(torch.ones(1, 2)).sum(), optimizer) as scaled_loss:
    scaled_loss.backward()
optimizer.step()
"""
    code, _, err = run_command(
        "run", source + "left_open = open('log', 'w')\nleft_open.write('x')\n", "--opt-level", "O4"
    )
    (line,) = [line for line in err.splitlines() if line.startswith("amp-patch run: failed: ")]
    assert "train.py:20 steps, without torch.autocast, and without the initialize of amp_patch or apex" in line
    assert code == 1 and "Traceback" not in err and Path("log").read_text() == "x"
    assert run_command("run", source)[::2] == (0, "")


OTHER = """
import subprocess, sys
code = "import sys; print(sys.own, [name for name in sys.modules if name.startswith('amp_patch')])"
print(subprocess.run([sys.argv[1], "-c", code], capture_output=True, text=True, check=False), flush=True)
"""


@pytest.mark.parametrize("options, path", [([], ""), (["--opt-level", "O4"], str(ROOT))], ids=["without", "unusable"])
def test_a_python_of_another_installation_starts_as_without_it(options, path, tmp_path):
    venv.create(tmp_path / "venv", symlinks=True)
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (packages / "sitecustomize.py").write_text("import sys\nsys.own = 'own'\n")
    (tmp_path / "script.py").write_text(OTHER)
    python, environment = tmp_path / "venv" / "bin" / "python", {"PYTHONPATH": path}
    plain = run("script.py", python, cwd=tmp_path, env=environment)
    ours = amp_patch_run(*options, "script.py", python, cwd=tmp_path, env=environment)
    assert "own" in plain.stdout and (ours.stdout, ours.stderr) == (plain.stdout, plain.stderr)


WORKERS = """
import json, multiprocessing, torch

def train():
    with torch.autocast("cpu", torch.bfloat16):
        torch.nn.Linear(2, 2)(torch.ones(1, 2))

for number in range(2):
    worker = multiprocessing.get_context("fork").Process(target=train)
    worker.start()
    worker.join()
train()
print(json.dumps({"accuracy": 1}))
"""


@pytest.mark.parametrize("options, lines", [([], 1), (["--quiet"], 0)], ids=["said", "quiet"])
def test_what_is_changed_is_said_once_and_not_on_the_scripts_stdout(options, lines, run_command, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    _, out, err = run_command("run", WORKERS, *options, "--opt-level", "O4")
    assert out == '{"accuracy": 1}\n'
    assert len([line for line in err.splitlines() if "names patched" in line]) == lines
    assert not list(tmp_path.glob("amp-patch-*"))
