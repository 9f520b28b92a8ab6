"""Runs `python` commands in forks of a process that has imported torch, which takes a new process seconds.

A fork ends as any interpreter does: exit handlers run, what is raised is printed, Ctrl-C is a signal. What a test says
of the start of the interpreter, or of what is imported before torch, needs a process of its own.
"""

import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import types
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
PATIENCE = 300  # seconds; commands take a few


class ForkServer:
    """A process that has run `setup`, which imports what the commands need, and waits for commands."""

    def __init__(self, setup: str = "import torch, wrapt, yaml", **environment: str) -> None:
        self._setup, self._environment = setup, {**os.environ, **ENVIRONMENT, **environment}
        self._process: subprocess.Popen[str] | None = None

    def run(self, *arguments: object, cwd: Path | str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run `python` with these arguments: `-c CODE ...`, `-m MODULE ...` or `SCRIPT ...`."""
        return self.run_together([arguments], cwd=cwd, environments=[environment])[0]

    def run_together(
        self, commands: Sequence[Sequence[object]], *, cwd: Path | str, environments: Sequence[dict[str, str]]
    ) -> list[subprocess.CompletedProcess[str]]:
        """Run several at once."""
        if self._process is None:
            command = [sys.executable, __file__, self._setup]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=self._environment,
                start_new_session=True,
            )
        with tempfile.TemporaryDirectory() as folder:
            requests = [
                {
                    "arguments": list(map(str, command)),
                    "cwd": str(cwd),
                    "environment": {**self._environment, **environment},
                    "files": [f"{folder}/{index}.{name}" for name in ("out", "err")],
                }
                for index, (command, environment) in enumerate(zip(commands, environments, strict=True))
            ]
            print(json.dumps(requests), file=self._process.stdin, flush=True)
            if not select.select([self._process.stdout], [], [], PATIENCE)[0]:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process = None
                raise TimeoutError(f"no end after {PATIENCE} s: {requests}")
            codes = json.loads(self._process.stdout.readline())
            return [
                subprocess.CompletedProcess(
                    request["arguments"], code, *(Path(file).read_text() for file in request["files"])
                )
                for request, code in zip(requests, codes, strict=True)
            ]

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.communicate()


def serve() -> dict[str, object] | None:
    """Fork for each request that is read, and answer with the exit codes; return the request in the fork."""
    while line := sys.stdin.readline():
        children = []
        for request in json.loads(line):
            child = os.fork()
            if child == 0:
                return request
            children.append(child)
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]), flush=True)
    return None


class Replaced(BaseException):
    """What `os.execve` raises in a fork: the fork goes on as the interpreter that it asked for."""


def become(request: dict[str, object]) -> None:
    """Turn this fork into the interpreter that was asked for, and run its command."""
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    for file, stream in zip(["/dev/null", *request["files"]], (0, 1, 2), strict=True):
        os.dup2(os.open(file, os.O_RDONLY if stream == 0 else os.O_WRONLY | os.O_CREAT), stream)

    def replace(path: str, arguments: list[str], environment: dict[str, str]) -> None:
        flags = subprocess._args_from_interpreter_flags()
        raise Replaced(arguments[1 + len(flags) :], environment)

    os.execve = replace
    try:
        run_command(request["arguments"])
        return
    except Replaced as replaced:
        arguments, environment = replaced.args
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[1:1] = [entry for entry in environment["PYTHONPATH"].split(os.pathsep) if entry not in known]
    sys.modules.pop("sitecustomize", None)
    importlib.import_module("sitecustomize")
    run_command(arguments)


def run_command(arguments: list[str]) -> None:
    """What `python` does with these arguments."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    option, *rest = arguments
    sys.path[0] = "" if option == "-c" else os.getcwd()
    if option == "-m":
        sys.argv[:] = ["-m", *rest[1:]]
        import runpy

        runpy._run_module_as_main(rest[0])
        return
    if option == "-c":
        source, name, sys.argv[:] = rest[0], "<string>", ["-c", *rest[1:]]
    else:
        source, name, sys.argv[:] = Path(option).read_text(), option, arguments
        main.__file__ = name
        sys.path[0] = os.path.dirname(os.path.abspath(option))
    exec(compile(source, name, "exec"), vars(main))


if __name__ == "__main__":
    exec(sys.argv[1], {})
    if "triton" not in sys.modules:  # which says at the end, since 3.9, what of it was never freed
        gc.freeze()  # else the end of each fork walks, and so copies, all that was imported
    asked = serve()
    if asked is not None:
        become(asked)
