"""Commands that run a script, each in a fork of a process that has imported torch, and not in a new one."""

import json
from pathlib import Path

from amp_patch.cli import scripts
from amp_patch.cli.main import main

SETUP = "import torch._dynamo, torch._inductor.config, amp_patch.api, amp_patch.insight.recorder"
"""What a `ForkServer` for this is to import: what a session and a recording need."""


def make_call(command, fork_server, monkeypatch, folder, capsys):
    """Return a function that runs a command on the source of a script, with options before it and arguments after it,
    and returns the exit code and what was printed.
    """

    def run_script(line, environment, log=None):
        begin = f"import json, os, sys; os.execve(sys.executable, {line!r}, json.loads({json.dumps(environment)!r}))"
        done = fork_server.run("-c", begin, cwd=folder)
        if log is None:
            print(done.stdout, end="")
            print(done.stderr, end="", file=scripts.sys.stderr)
        else:
            Path(log).write_text(done.stdout + done.stderr)
        return done.returncode

    monkeypatch.setattr(scripts, "_call", run_script)
    monkeypatch.chdir(folder)

    def call(source, *options, arguments=()):
        (folder / "train.py").write_text(source)
        code = main([command, *options, "train.py", *arguments])
        output = capsys.readouterr()
        return code, output.out, output.err

    return call
