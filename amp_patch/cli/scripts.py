"""`ScriptRunner`: runs a script in a process of its own, watched by a probe, for the commands of `insight`."""

import argparse
import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..interrupts import TerminatedError
from ..scratch import Folders, find_inductor_cache, find_shared
from ..script_settings import NoRegionError
from . import run as runs
from .ranks import find_ranks, name_for_node, refuse_ranks
from .recording import ERROR, NO_REGION, PROGRESS, WAITING, WIDENED
from .values import check_lists, get_level

if TYPE_CHECKING:
    from ..insight import Recording
    from ..insight.runs import Run

TAIL = 20
"""How many of the last lines of a quiet script are shown if it fails."""

_POLL_SECONDS = 0.5
_PROGRESS_SECONDS = 10.0
_GRACE_SECONDS = 5.0
_FILE = re.compile(r"(\d+)-(\d+)-(\d+)\.jsonl")  # rank, process, steps


class Watched(NamedTuple):
    """The result of a run of a script.

    Attributes:
        code: its exit code.
        steps, recordings: one for each process that opened a session, sorted by rank.
        was_widened: whether it got float32 where it asked for 16 bits, and failed.
    """

    code: int
    steps: list[int]
    recordings: "list[Recording]"
    was_widened: bool = False

    @property
    def is_interrupted(self) -> bool:
        """Whether Ctrl-C ended the run."""
        return self.code == -signal.SIGINT


def add_script(
    parser: argparse.ArgumentParser,
    *,
    usage: str,
    has_level: bool = True,
    is_repeated: bool = True,
    has_report: bool = False,
) -> None:
    """Declare the script and the options that change it.

    Args:
        usage: the command's own options.
        has_level: the command takes --opt-level.
        is_repeated: it runs the script more often than the user asked for.
        has_report: it writes its own command line to a file.
    """
    runs.add_settings(parser, has_level=has_level)
    parser.set_defaults(in_place=False, with_arguments=False)
    if has_report:
        parser.add_argument(
            "--with-arguments",
            action="store_true",
            help="write the script's arguments into the files, with the command (default: leave them out, since they"
            " may hold passwords)",
        )
        usage += " [--with-arguments]"
    if is_repeated:
        parser.add_argument(
            "--in-place",
            action="store_true",
            help="let repeated runs write their files where the script says, over earlier ones (default: each run"
            " writes to a scratch folder, which is named at the end)",
        )
        usage += " [--in-place]"
    parser.set_defaults(has_level=has_level)
    if has_level:
        usage += " [--opt-level LEVEL]"
    parser.usage = f"%(prog)s (SCRIPT | -m MODULE) {usage} [--lists LIST] [--everywhere] [-- ARGUMENT ...]"
    parser.add_argument("-m", dest="module", metavar="MODULE", help="run a module, as python -m does")
    parser.add_argument("script", nargs="?", metavar="SCRIPT", help="the script; arguments after -- are passed to it")


def describe_command(arguments: argparse.Namespace) -> str:
    """Return the command line to write to a file, with the script's arguments if --with-arguments is given."""
    words = sys.argv[1:]
    if arguments.rest and not arguments.with_arguments:
        words = [*words[: words.index("--")], "--", "..."] if "--" in words else words
    return shlex.join(["amp-patch", *words])


class ScriptRunner:
    """Runs the script of a command line. A run's own settings override the command line.

    A script that does not exist is a usage error.

    Args:
        arguments: declared by `add_script`.
        is_quiet: do not show the script's output, unless it fails. Ctrl-C then ends the command, not only the run.
        is_repeated: these runs are not the user's own, so each one writes its files to a folder of its own, unless
            --in-place is given.
    """

    def __init__(self, arguments: argparse.Namespace, *, is_quiet: bool = False, is_repeated: bool = False) -> None:
        self._command = list(arguments.rest)
        if arguments.script:
            self._command.insert(0, arguments.script)
        if arguments.module:
            if arguments.script:
                arguments.parser.error(f"{arguments.script}: write arguments of the module after --")
            self._command[:0] = ["-m", arguments.module]
        if is_quiet:
            refuse_ranks(arguments.parser, arguments.command.name)
        if arguments.everywhere and arguments.has_level:
            runs.check_everywhere(arguments.parser, arguments.opt_level, arguments.lists)
        runs.check_command(arguments.parser, self._command)
        check_lists(arguments.parser, "--lists", *arguments.lists)
        self._opt_level = arguments.opt_level
        self._lists = arguments.lists
        self._force = arguments.force
        self._everywhere = arguments.everywhere
        self._is_quiet = is_quiet
        self._prog = arguments.parser.prog
        self._folders: Folders | None = None
        if is_repeated and not arguments.in_place:
            if runs.IS_WINDOWS:
                arguments.parser.error("on Windows the script writes its files where it always does: give --in-place")
            self._folders = Folders(self._prog.split()[-1])
        self._has_noted_waiting = False
        self._said: list[str] = []  # the error of a script that failed, or its last lines

    def __call__(self, run: "Run") -> "Recording":
        """Run the script, and return the recording of its first rank.

        Raises RunFailedError if it ends in an error or opens no session, and KeyboardInterrupt if it was interrupted.
        """
        from ..insight.runs import RunFailedError

        watched = self.watch(run)
        if watched.is_interrupted:
            raise KeyboardInterrupt
        said = "".join(f"\n  {line}" for line in self._said)
        if not watched.recordings:
            reason = "took no step"
            if watched.code:
                reason = f"ended with exit code {watched.code}"
            raise RunFailedError(f"the script {reason}{said}", was_widened=watched.was_widened)
        recording = watched.recordings[0]
        if watched.code:
            raise RunFailedError(
                f"the script ended with exit code {watched.code}{said}", recording, was_widened=watched.was_widened
            )
        return recording

    def watch(self, run: "Run", until: "Callable[[Recording], bool]" = lambda recording: False) -> Watched:
        """Run the script, and end it soon after `until` returns True for the recording of a process.

        Raises NoRegionError for a script without amp that was to be changed.
        """
        ranks = find_ranks()
        meeting = tempfile.TemporaryDirectory(prefix="amp-patch-") if ranks is None else ranks.meet()
        with meeting as folder, self._redirect(run, folder) as scratch:
            level = run.settings.opt_level or self._opt_level
            lists = [*self._lists, *run.settings.lists]
            # float32 casts nothing, so it needs no region
            casts_some = bool(lists) if level is None else get_level(level).fits_whole_script
            line, environment = runs.prepare(
                self._command,
                opt_level=level,
                lists=lists,
                force=self._force,
                everywhere=self._everywhere and casts_some,
                needs_region=self._is_quiet and not self._everywhere,
                in_float32=run.in_float32,
                watch={"folder": folder, "probe": run.probe, "options": dict(run.options), "seed": run.seed},
                scratch=scratch,
            )
            log = None
            if self._is_quiet:
                log = Path(folder, "printed")

            progress = _Progress(self._prog, Path(folder, PROGRESS), run.options.get("steps"))

            def is_over() -> bool:
                if self._is_quiet:
                    progress.print_if_due()
                    if Path(folder, WAITING).exists():
                        self._note_waiting()
                if any(until(recording) for _, recording in _read(folder)):
                    return True
                return ranks is not None and ranks.find_code() != 0

            code = _call([sys.executable, *line], environment, is_over, log)
            if ranks is not None:
                if not ranks.is_first:
                    ranks.leave(code)
                ranks.wait(is_over=is_over())
                code = code or ranks.find_code()
            refusal, error = Path(folder, NO_REGION), Path(folder, ERROR)
            if error.exists():
                self._said = error.read_text(encoding="utf-8").splitlines()
            elif log is not None:
                self._said = log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL:]
            recorded, was_widened = _read(folder), Path(folder, WIDENED).exists()
            # another process of the script may train in float32
            if refusal.exists() and not recorded:
                raise NoRegionError(refusal.read_text(encoding="utf-8"))
        steps, recordings = [steps for steps, _ in recorded], [recording for _, recording in recorded]
        return Watched(code, steps, recordings, was_widened)

    @contextlib.contextmanager
    def _redirect(self, run: "Run", folder: str) -> Iterator[dict[str, object] | None]:
        """Yield the arguments of `redirect` for a run, or None for a run in place. Afterwards, keep its files."""
        if self._folders is None:
            yield None
            return
        # the files of a run without a name are removed at its end
        root = self._folders.begin(run.name or "thrown away")
        try:
            yield {"root": root, "shared": [*find_shared(), folder], "inductor_cache": find_inductor_cache()}
        finally:
            self._folders.end(root, keep=bool(run.name))

    def tell_of_files(self) -> None:
        """Print the files that repeated runs wrote, and their folder; nothing if they wrote none."""
        for line in self._folders.describe() if self._folders is not None else ():
            print(f"{self._prog}: {line}", file=sys.stderr)

    def _note_waiting(self) -> None:
        """Print once that a quiet script may run to its end without a result."""
        if not self._has_noted_waiting:
            self._has_noted_waiting = True
            print(
                f"{self._prog}: the script takes steps without mixed precision so far; waiting for its first"
                " torch.autocast or amp.initialize (Ctrl-C ends it)",
                file=sys.stderr,
            )


class _Progress:
    """Prints the progress of a quiet run every `_PROGRESS_SECONDS`.

    Args:
        prog: the start of each line.
        file: contains the number of steps, after the first one.
        steps: the number of steps of the whole run, if it is known.
    """

    def __init__(self, prog: str, file: Path, steps: object) -> None:
        self._prog = prog
        self._file = file
        self._of = f" of {steps}" if steps else ""
        self._began = self._printed = time.monotonic()

    def print_if_due(self) -> None:
        """Print a line, if one is due."""
        now = time.monotonic()
        if now - self._printed < _PROGRESS_SECONDS:
            return
        self._printed = now
        taken = "0"
        with contextlib.suppress(OSError):
            taken = self._file.read_text(encoding="utf-8") or taken
        print(f"{self._prog}:   {taken}{self._of} steps after {now - self._began:.0f} s", file=sys.stderr)


def _read(folder: str) -> "list[tuple[int, Recording]]":
    """Return the number of steps and the recording of each process, sorted by rank."""
    from ..insight import Recording

    if not os.path.isdir(folder):  # the first of several ranks has removed it
        return []
    names = [match for path in Path(folder).iterdir() if (match := _FILE.fullmatch(path.name))]
    names.sort(key=lambda match: [int(part) for part in match.groups()])
    return [(int(match[3]), Recording.read(Path(folder, match[0]))) for match in names]


def _call(command: list[str], environment: dict[str, str], is_over: Callable[[], bool], log: Path | None = None) -> int:
    """Run a process to its end, or until soon after `is_over` returns True, and return its exit code.

    The process gets Ctrl-C, too, and SIGTERM is passed on. After either, the exit code is `-SIGINT`.

    Args:
        log: a file for its output; None: the output of this process.
    """
    sys.stdout.flush()
    is_interrupted = False
    with contextlib.ExitStack() as stack:
        output: dict[str, Any] = {}
        if log is not None:
            output = {"stdout": stack.enter_context(log.open("wb")), "stderr": subprocess.STDOUT}
        process = stack.enter_context(subprocess.Popen(command, env=environment, **output))
        stack.callback(process.terminate)  # if an interrupt comes between two waits
        while True:
            try:
                code = process.wait(_POLL_SECONDS)
                if is_interrupted:
                    return -signal.SIGINT
                return code
            except KeyboardInterrupt as error:
                is_interrupted = True
                if isinstance(error, TerminatedError):
                    process.terminate()
            except subprocess.TimeoutExpired:
                if is_over():
                    return _end(process)


def _end(process: "subprocess.Popen[bytes]") -> int:
    """Wait for the other ranks to write their recordings, then end the process."""
    try:
        process.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait()
    # the recording is complete, so it does not matter how the script ended
    return 0


def write_all(recordings: "Sequence[Recording]", path: Path) -> None:
    """Write each recording to a file: the first to `path`, the others with their number before the suffix."""
    path = name_for_node(path)
    for number, recording in enumerate(recordings):
        if number > 0:
            recording.to_jsonl(path.with_suffix(f".{number}{path.suffix}"))
        else:
            recording.to_jsonl(path)
