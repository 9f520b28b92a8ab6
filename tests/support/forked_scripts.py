"""Commands that run a script, with the script in a fork: a process of its own would take seconds to import torch."""

import json

from amp_patch.cli import scripts
from amp_patch.cli.main import main


def make_call(command, server, monkeypatch, folder, capsys):
    """Return a function that writes `train.py` into `folder` and runs a command on it there.

    That returns exit code, stdout and stderr, the script's among them.
    """

    def run_script(line, environment):
        begin = f"import json, os, sys; os.execve(sys.executable, {line!r}, json.loads({json.dumps(environment)!r}))"
        done = server.run("-c", begin, cwd=folder)
        print(done.stdout, end="")
        print(done.stderr, end="", file=scripts.sys.stderr)
        return done.returncode

    monkeypatch.setattr(scripts, "_call", run_script)
    monkeypatch.chdir(folder)

    def call(source, *options, arguments=()):
        (folder / "train.py").write_text(source)
        code = main([command, *options, "train.py", *arguments])
        output = capsys.readouterr()
        return code, output.out, output.err

    return call
