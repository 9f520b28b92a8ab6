"""Runs of a script that a probe watches, for the commands of `insight`: each in a process of its own."""

import argparse
import contextlib
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..interrupts import TerminatedError
from ..script_settings import NoRegionError
from . import run as runs
from .recording import ERROR, NO_REGION
from .values import check_lists

if TYPE_CHECKING:
    from ..insight import Recording
    from ..insight.runs import Run

TAIL = 20
"""How many of the last lines that a quiet script has printed are shown if it fails."""

_POLL_SECONDS = 0.5
_GRACE_SECONDS = 5.0
_FILE = re.compile(r"(\d+)-(\d+)-(\d+)\.jsonl")  # rank, process, steps


class Watched(NamedTuple):
    """What a run of a script left: its exit code, and for each process that opened a session, the first rank first, how
    many steps it took and what its probe recorded.
    """

    code: int
    steps: list[int]
    recordings: "list[Recording]"

    @property
    def is_interrupted(self) -> bool:
        """Whether Ctrl-C ended it."""
        return self.code == -signal.SIGINT


def add_script(parser: argparse.ArgumentParser, *, usage: str, has_level: bool = True) -> None:
    """Declare what names a script, and what is laid over it; `usage` has the command's own options."""
    runs.add_settings(parser, has_level=has_level)
    level = "[--opt-level LEVEL] " if has_level else ""
    parser.usage = f"%(prog)s (SCRIPT | -m MODULE) {usage} {level}[--lists LIST] [-- ARGUMENT ...]"
    parser.add_argument("-m", dest="module", metavar="MODULE", help="run a module, as python -m does")
    parser.add_argument("script", nargs="?", metavar="SCRIPT", help="the script; arguments after -- are passed to it")


class ScriptRunner:
    """Runs the script that a command line names; what is laid over it is that of the run, or of the command line.

    Without a script that could be run, it is a usage error.

    Args:
        arguments: with what `add_script` declares.
        is_quiet: keep what the script prints to itself, unless it fails; Ctrl-C then ends more than the run.
    """

    def __init__(self, arguments: argparse.Namespace, *, is_quiet: bool = False) -> None:
        named, rest = arguments.module or arguments.script, arguments.rest
        line = [named, *rest] if named else rest
        module, script = (line, []) if arguments.module else (None, line)
        if arguments.module and arguments.script:
            arguments.parser.error(f"{arguments.script}: write arguments of the module after --")
        self._arguments = argparse.Namespace(**{**vars(arguments), "module": module, "script": script})
        runs.prepare(self._arguments)
        check_lists(arguments.parser, "--lists", *arguments.lists)
        self._is_quiet = is_quiet
        self._printed = ""
        self._error: list[str] = []

    def __call__(self, run: "Run") -> "Recording":
        """Run it once. Raises RunFailedError if it ends in an error, or opens no session, KeyboardInterrupt if it was
        interrupted.
        """
        code, _, recordings = self.watch(run)
        if code == -signal.SIGINT:
            raise KeyboardInterrupt
        if code or not recordings:
            reason = f"ended with exit code {code}" if code else "took no step"
            shown = self._error or self._printed.splitlines()[-TAIL:]
            printed = "".join(f"\n  {line}" for line in shown)
            from ..insight.runs import RunFailedError

            raise RunFailedError(f"the script {reason}{printed}", recordings[0] if recordings else None)
        return recordings[0]

    def watch(self, run: "Run", until: "Callable[[Recording], bool] | None" = None) -> Watched:
        """Run it once, whatever comes of it; end it soon after one process recorded what `until` asks for.

        Raises NoRegionError for a script without amp that is to be changed.
        """
        given: Mapping[str, Any] = vars(self._arguments)
        with tempfile.TemporaryDirectory(prefix="amp-patch-") as folder:
            laid_over = {
                "opt_level": run.settings.opt_level or given["opt_level"],
                "lists": [*given["lists"], *run.settings.lists],
            }
            watch = {"folder": folder, "probe": run.probe, "options": dict(run.options), "seed": run.seed}
            line, environment = runs.prepare(
                argparse.Namespace(**{**given, **laid_over}), needs_region=self._is_quiet, watch=watch
            )
            log = Path(folder, "printed") if self._is_quiet else None
            is_over = None if until is None else lambda: any(until(recording) for _, recording in _read(folder))
            code = _call([sys.executable, *line], environment, is_over, log)
            self._printed = "" if log is None else log.read_text(encoding="utf-8", errors="replace")
            if (refusal := Path(folder, NO_REGION)).exists():
                raise NoRegionError(refusal.read_text(encoding="utf-8"))
            error = Path(folder, ERROR)
            self._error = error.read_text(encoding="utf-8").splitlines() if error.exists() else []
            found = _read(folder)
        return Watched(code, [steps for steps, _ in found], [recording for _, recording in found])


def _read(folder: str) -> "list[tuple[int, Recording]]":
    """Return for each file in a folder how many steps its process took, and what it recorded, by rank."""
    from ..insight import Recording

    found = [match for path in Path(folder).iterdir() if (match := _FILE.fullmatch(path.name))]
    found.sort(key=lambda match: [int(part) for part in match.groups()])
    return [(int(match[3]), Recording.read(Path(folder, match[0]))) for match in found]


def _call(
    command: list[str],
    environment: dict[str, str],
    is_over: Callable[[], bool] | None = None,
    log: Path | None = None,
) -> int:
    """Run a process to its end, or to soon after `is_over`; through Ctrl-C, which it gets too, and SIGTERM, which it is
    sent: after that its exit code is that of SIGINT.

    With `log`, a file that takes what it prints.
    """
    sys.stdout.flush()
    is_interrupted = False
    with contextlib.ExitStack() as stack:
        output: dict[str, Any] = {}
        if log is not None:
            output = {"stdout": stack.enter_context(log.open("wb")), "stderr": subprocess.STDOUT}
        process = stack.enter_context(subprocess.Popen(command, env=environment, **output))
        stack.callback(process.terminate)  # if this is left by an interrupt between two waits
        while True:
            try:
                code = process.wait(None if is_over is None else _POLL_SECONDS)
                return -signal.SIGINT if is_interrupted else code
            except KeyboardInterrupt as error:
                is_interrupted = True
                if isinstance(error, TerminatedError):
                    process.terminate()
            except subprocess.TimeoutExpired:
                if is_over is not None and is_over():
                    return _end(process)


def _end(process: "subprocess.Popen[bytes]") -> int:
    """Wait for the other ranks to write what they have, then end them."""
    try:
        process.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait()
    return 0


def write_all(recordings: "Sequence[Recording]", path: Path) -> None:
    """Write each recording into a file: the first under this name, the others with their number before its suffix."""
    for number, recording in enumerate(recordings):
        recording.to_jsonl(path.with_suffix(f".{number}{path.suffix}") if number else path)
