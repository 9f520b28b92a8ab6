"""Commands that run a script: here the script's process is a fork of one that has imported what it needs."""

import json
import sys

import pytest
from fork_server import ForkServer

from amp_patch.cli import run, scripts
from amp_patch.cli.main import main


@pytest.fixture(scope="session")
def warm_server():
    """Forks of a process that has imported what a session and a probe need."""
    names = "torch._dynamo, torch._inductor.config, amp_patch.api, amp_patch.insight.tracer"
    server = ForkServer(f"import {names}, amp_patch.insight.comparing.probes, amp_patch.insight.tuning.float32_run")
    yield server
    server.close()


class Started(BaseException):
    """Python has run in the place of the command."""


@pytest.fixture
def run_scripts(warm_server, monkeypatch, tmp_path):
    """Commands run scripts in forks, and in the test's folder. Returns what `run` raises after its script."""

    def run_script(command, environment, is_over=None, log=None):
        begin = f"import json, os, sys; os.execve(sys.executable, {command!r}, json.loads({json.dumps(environment)!r}))"
        done = warm_server.run("-c", begin, cwd=tmp_path)
        if log is None:
            print(done.stdout, end="")
            print(done.stderr, end="", file=sys.stderr)
        else:
            log.write_text(done.stdout + done.stderr)
        return done.returncode

    monkeypatch.setattr(scripts, "_call", run_script)

    def start(line, environment):
        raise Started(run_script([sys.executable, *line], environment))

    monkeypatch.setattr(run, "start", start)
    monkeypatch.chdir(tmp_path)
    return Started


@pytest.fixture
def run_command(run_scripts, tmp_path, capsys):
    """Returns a function that runs a command on a script of that source and returns exit code, output and errors."""

    def run_it(command, source, *options, arguments=()):
        (tmp_path / "train.py").write_text(source)
        try:
            code = main([command, *options, "train.py", *arguments])
        except Started as started:
            (code,) = started.args
        output = capsys.readouterr()
        return code, output.out, output.err

    return run_it
