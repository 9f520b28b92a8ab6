"""`amp-patch doctor` has the documented exit codes and formats of output.

Guards: cli/doctor, doctor/report, doctor/rules.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import amp_patch
from amp_patch.cli import doctor as command
from amp_patch.cli.main import main
from amp_patch.doctor import machine
from amp_patch.doctor.rules import sorted_rules

ROOT = Path(amp_patch.__file__).parent.parent
WARNING = (
    'import amp_patch as amp\nmodel, optimizer = amp.initialize(model, optimizer, opt_level="O1")\n'
    "if resume: optimizer.load_state_dict(checkpoint)\n"
)
ERROR = "import amp_patch\n\namp_patch.initialise(model, optimizer)\n"
NOTE = "from apex import amp\n"


@pytest.fixture
def diagnose(tmp_path, monkeypatch, capsys):
    """Writes files, and runs the command in their folder: exit code, output and errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command.doctor, "get_advice", lambda: machine.Advice("use O9 here"))

    def run(*options, **sources):
        for name, source in sources.items():
            Path(f"{name}.py").write_bytes(source.encode())
        try:
            code = main(["doctor", *(options or ["."])])
        except SystemExit as left:
            code = left.code
        return code, *capsys.readouterr()

    return run


@pytest.mark.parametrize(
    ("source", "code"),
    [("x = 1\n", 0), (NOTE, 0), (WARNING, 1), (ERROR, 1), ("x = = 1\n", 1)],
    ids=["sound", "note", "warning", "error", "unreadable"],
)
def test_what_is_found_makes_the_exit_code_1_but_for_notes(source, code, diagnose):
    assert diagnose(train=source)[0] == code


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["absent.py"], "neither a file nor a directory"),
        (["--select", "AMP3O5"], "'AMP3O5' is not the code of a rule, nor the start of one. There are AMP001, AMP101"),
        (["--select", ""], "--select: '' names no rule: write codes or prefixes, such as AMP3,AMP501"),
        (["--explain", "AMP999"], "'AMP999' is not the code of a rule"),
    ],
)
def test_what_cannot_be_used_is_2(options, said, diagnose):
    code, _, errors = diagnose(*options, ".", train=WARNING)
    assert code == 2 and said in errors


def test_lines_for_people_begin_with_the_counts_and_end_with_advice(diagnose):
    _, said, _ = diagnose(train=WARNING + NOTE)
    summary, notes, place, advice, last = said.splitlines()
    assert place.startswith("train.py:3:12: warning: the optimizer's state is loaded") and place.endswith("[AMP502]")
    assert advice.startswith("    Call `amp.load_state_dict")
    assert (summary, last) == ("0 errors, 1 warning in 1 file", "advice: use O9 here")
    assert notes == "1 note (AMP101): shown by --notes"
    _, said, _ = diagnose("--notes", "--no-advice", ".")
    assert "train.py:4:1: note: apex.amp: covered by" in said and "`amp-patch run train.py`" in said
    assert said.splitlines()[0] == "0 errors, 1 warning, 1 note in 1 file"


def test_json(diagnose):
    code, said, _ = diagnose("--output-format", "json", ".", train=ERROR)
    report = json.loads(said)
    assert code == 1 and set(report) == {"findings", "summary"}
    assert report["summary"] == {"error": 1, "warning": 0, "note": 0, "files": 1}
    (finding,) = report["findings"]
    assert "'initialise'" in finding.pop("message") and "Did you mean 'initialize'?" in finding.pop("advice")
    place = {"path": "train.py", "cell": None, "line": 3, "column": 1}
    assert finding == {"code": "AMP102", "severity": "error", **place}


def test_list_and_explain(diagnose):
    assert [line.split()[0] for line in diagnose("--list")[1].splitlines()] == [rule.code for rule in sorted_rules()]
    code, said, _ = diagnose("--explain", "AMP305")
    assert code == 0 and said.startswith("AMP305: clipping inside scale_loss\n\nInside the block, gradients are still")


def test_the_hook_of_pre_commit_is_this_command(diagnose):
    _, hook = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    program, name, *options = hook["entry"].split()
    assert (program, name, hook["types_or"]) == ("amp-patch", "doctor", ["python", "jupyter"])
    assert diagnose(*options, "train.py", train=WARNING)[0] == 1


def test_scripts_are_read_without_torch(tmp_path):
    (tmp_path / "train.py").write_text(ERROR)
    code = (
        "import sys\n"
        "from amp_patch.cli.main import main\n"
        "code = main(['doctor', '--no-advice', '--output-format', 'json', 'train.py'])\n"
        "sys.exit(code + 3 * ('torch' in sys.modules))"
    )
    environment = {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True)
    assert done.returncode == 1, done
