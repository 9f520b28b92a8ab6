"""The `amp-patch` command: which demo runs, and what bad usage is told."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import amp_patch as amp
from amp_patch.cli.main import build_parser, main
from amp_patch.demos import DEMOS, digits
from amp_patch.errors import AmpError
from amp_patch.insight.runs import Run

ROOT = Path(__file__).parent.parent.parent

pytestmark = pytest.mark.usefixtures("large_packages_are_searched")


def test_demo_leaves_no_session_open() -> None:
    linear = torch.nn.functional.linear
    main(["demo", "--opt-level", "O4", "--steps", "1", "--device", "cpu"])
    assert torch.nn.functional.linear is linear
    assert amp.stats().names_patched == 0


def test_levels_may_be_repeated_or_listed() -> None:
    arguments = ["demo", "--opt-level", "O1", "--opt-level", "O4,O5"]
    parsed = build_parser(arguments).parse_args(arguments)
    assert parsed.levels == ["O1", "O4", "O5"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        pytest.param(
            ["--opt-level", "o1"], "'o1' is not an opt_level (O0, O1, O2, O3, O4, O5). Did you mean 'O1'?", id="level"
        ),
        pytest.param(["--opt-level", "O1,O9"], "'O9' is not an opt_level", id="level-in-list"),
        pytest.param(["--steps", "0"], "'0' is not a whole number of 1 or more", id="steps"),
        pytest.param(["--device", "abacus"], "device 'abacus' cannot be used here", id="device"),
        pytest.param(["digitz"], "'digitz' is not a demo", id="name"),
        pytest.param(["digitz"], "Did you mean 'digits'?", id="name-meant"),
        pytest.param(["paper", "--seeds", "2"], "the demo paper takes no --seeds", id="seeds"),
        pytest.param(["paper", "--html", "x.html"], "the demo paper takes no --html", id="html"),
        pytest.param(["--plot", "curves.jpg"], "'curves.jpg' must be a .png file in a folder that exists", id="plot"),
    ],
)
def test_bad_usage_is_told_before_any_training(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["demo", *options])
    assert left.value.code == 2
    assert said in capsys.readouterr().err


def test_missing_extra_is_one_line_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    assert main(["demo", "--steps", "1"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "sklearn" in said and 'pip install "amp_patch[demo]"' in said


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (AmpError("no luck"), "no luck"),
        (PermissionError(errno.EACCES, "Permission denied", "r.html"), "r.html: Permission denied"),
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (OSError("no luck"), "no luck"),
    ],
)
def test_failure_of_the_work_is_one_line(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(digits, "train", fail)
    assert main(["demo", "--steps", "1", "--device", "cpu"]) == 1
    assert capsys.readouterr().err.endswith(f"amp-patch demo: failed: {said}\n")


@pytest.mark.parametrize("exists", [True, False])
def test_a_file_that_may_not_be_written_is_told_of_before_the_work(exists, tmp_path, monkeypatch, capsys):
    report = tmp_path / "r.html"
    if exists:
        report.touch()
    closed = report if exists else tmp_path
    monkeypatch.setattr(os, "access", lambda path, mode: (Path(path), mode) != (closed, os.W_OK))
    with pytest.raises(SystemExit) as left:
        main(["demo", "--html", str(report)])
    assert left.value.code == 2
    assert f"argument --html: '{report}' cannot be written: permission denied" in capsys.readouterr().err


def test_the_first_demo_is_the_one_without_a_name() -> None:
    named = [[], ["--steps", "3"], ["digits", "--steps", "3"]]
    parsed = [build_parser(["demo", *each]).parse_args(["demo", *each]) for each in named]
    assert [each.demo for each in parsed] == [DEMOS[0]] * 3
    assert DEMOS[0].name == "digits"


def test_help_names_every_demo_and_takes_no_torch(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["demo", "--help"])
    assert left.value.code == 0
    said = capsys.readouterr().out
    assert all(f"  {demo.name} " in said and demo.summary in said for demo in DEMOS)
    script = (
        "import sys\nfrom amp_patch.cli import main\n"
        "try: main(['demo', 'digits', '--help'])\nexcept SystemExit: print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.endswith("False\n"), done.stdout + done.stderr


def test_module_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "amp_patch", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0
    assert "demo" in done.stdout


@pytest.mark.parametrize(
    ("line", "runs"),
    [
        ("SCRIPT --steps 2", ["SCRIPT"]),
        ("--steps 2 SCRIPT", ["SCRIPT"]),
        ("SCRIPT --steps 2 -- --steps 9 -- x", ["SCRIPT", "--steps", "9", "--", "x"]),
        ("--steps 2 -- SCRIPT --steps 9", ["SCRIPT", "--steps", "9"]),
        ("-m json.tool --steps 2 -- -m x", ["-m", "json.tool", "-m", "x"]),
        ("--steps 2 -m json.tool", ["-m", "json.tool"]),
    ],
)
@pytest.mark.parametrize("command", ["explain", "trace", "compare", "tune"])
def test_options_stand_before_or_after_the_script_and_its_own_follow_two_dashes(command, line, runs, monkeypatch):
    class Ran(Exception):
        pass

    def run_script(command, *arguments):
        raise Ran(command)

    monkeypatch.setattr("amp_patch.cli.scripts._call", run_script)
    monkeypatch.setattr("amp_patch.insight.comparing.Campaign._watch", lambda self, *asked: self._runner.watch(Run("")))
    with pytest.raises(Ran) as ran:
        main([command, *line.replace("SCRIPT", __file__).split()])
    (called,) = ran.value.args
    flags = subprocess._args_from_interpreter_flags()
    assert called == [sys.executable, *flags, *(part.replace("SCRIPT", __file__) for part in runs)]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("SCRIPT --epochs 3", "unrecognized arguments: --epochs 3; arguments of the script go after --"),
        ("SCRIPT data --steps 2", "unrecognized arguments: data; arguments of the script go after --"),
        ("-m json.tool data", "data: what is the module's follows a --"),
        ("--steps 2", "name a script, or a module with -m"),
        ("--", "name a script, or a module with -m"),
        ("-m", "argument -m: expected one argument"),
    ],
)
@pytest.mark.parametrize("command", ["explain", "trace", "compare", "tune"])
def test_what_is_neither_of_the_command_nor_after_two_dashes_is_refused(command, line, told, capsys):
    with pytest.raises(SystemExit) as error:
        main([command, *line.replace("SCRIPT", __file__).split()])
    assert error.value.code == 2 and told in capsys.readouterr().err
