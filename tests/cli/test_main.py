"""A command that fails says so in one line, and options of commands and scripts may stand where the help says.

Guards: cli/main, cli/parser, cli/scripts, __main__.
"""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from amp_patch.cli.main import main
from amp_patch.errors import AmpError
from amp_patch.insight.runs import Run

ROOT = Path(__file__).parent.parent.parent


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

    monkeypatch.setattr("amp_patch.config.load_oplists", fail)
    assert main(["lists", "show", "float16"]) == 1
    assert capsys.readouterr().err == f"amp-patch lists: failed: {said}\n"


@pytest.mark.parametrize("exists", [True, False])
def test_a_file_that_may_not_be_written_is_told_of_before_the_work(exists, tmp_path, monkeypatch, capsys):
    report = tmp_path / "r.html"
    if exists:
        report.touch()

    def refuse(path, *_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(SystemExit) as left:
        main(["explain", "--html", str(report), __file__])
    assert left.value.code == 2
    assert f"argument --html: '{report}' cannot be written: permission denied" in capsys.readouterr().err


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "amp_patch", "doctor", "--list"]
    done = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


LINES = {
    "SCRIPT --steps 2": ["SCRIPT"],
    "--steps 2 SCRIPT": ["SCRIPT"],
    "SCRIPT --steps 2 -- --steps 9 -- x": ["SCRIPT", "--steps", "9", "--", "x"],
    "--steps 2 -- SCRIPT --steps 9": ["SCRIPT", "--steps", "9"],
    "-m json.tool --steps 2 -- -m x": ["-m", "json.tool", "-m", "x"],
    "--steps 2 -m json.tool": ["-m", "json.tool"],
}


@pytest.mark.parametrize("command", ["explain", "trace", "compare", "tune"])
def test_options_stand_before_or_after_the_script_and_its_own_follow_two_dashes(command, monkeypatch):
    class Ran(BaseException):
        pass

    def run_script(command, *arguments):
        raise Ran(command)

    monkeypatch.setattr("amp_patch.cli.scripts._call", run_script)
    watch = "amp_patch.insight.comparing.Campaign._watch"
    monkeypatch.setattr(watch, lambda self, *_, **__: self._runner.watch(Run("")))
    flags = subprocess._args_from_interpreter_flags()
    for line, runs in LINES.items():
        with pytest.raises(Ran) as ran:
            main([command, *line.replace("SCRIPT", __file__).split()])
        (called,) = ran.value.args
        assert called == [sys.executable, *flags, *(part.replace("SCRIPT", __file__) for part in runs)]
