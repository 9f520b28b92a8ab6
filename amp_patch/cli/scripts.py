"""`ScriptRunner`: runs a script in another process, for the commands that use `insight`.

A probe of `insight`, such as a recorder or a tracer, watches the script in that process, and writes a recording.
"""

import argparse
import contextlib
import os
import re
import shlex
import shutil
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
from . import run as run_command
from .ranks import find_ranks, name_for_node, refuse_ranks
from .recording import ERROR, NO_REGION, PROGRESS, REFUSED, STOPPED, WAITING, WIDENED
from .values import check_lists, get_level

if TYPE_CHECKING:
    from ..insight import Recording
    from ..insight.runs import Run

TAIL = 20
"""If a script whose output is hidden fails without a traceback, at most this many of its last lines are shown."""

_POLL_SECONDS = 0.5
_ENDED = "amp-patch: the run is over, and all its ranks were ended (the launcher reports that as signal 15)"
_GRACE_SECONDS = 5.0  # for other ranks to write their recordings, after the run is over
_FILE = re.compile(r"(\d+)-(\d+)-(\d+)\.jsonl")  # rank, process ID, number of steps


class WatchedRun(NamedTuple):
    """The result of a run of a script.

    Attributes:
        code: the exit code of the script; 0 if the command ended it; -SIGINT after Ctrl-C or SIGTERM. Under a
            launcher, if this is 0 for the machine's first rank, but the scripts of other ranks on the machine failed,
            then the code of the lowest of these ranks.
        steps, recordings: the number of steps and the recording of each process that wrote a recording, in the order of
            their ranks.
        was_widened: whether the script was widened (got float32 where it asked for 16 bits), and failed.
    """

    code: int
    steps: list[int]
    recordings: "list[Recording]"
    was_widened: bool = False

    @property
    def is_interrupted(self) -> bool:
        """Whether Ctrl-C or SIGTERM ended the run."""
        return self.code == -signal.SIGINT


def add_script(
    parser: argparse.ArgumentParser,
    *,
    usage: str,
    has_level: bool = True,
    is_repeated: bool = True,
    has_report: bool = False,
) -> None:
    """Declare the script, and the options that change how it runs.

    Args:
        usage: the options of the command that are declared elsewhere, for the usage line.
        has_level: the command takes --opt-level.
        is_repeated: the command may run the script several times, so it needs --in-place.
        has_report: the command writes its own command line to a file, so it needs --with-arguments.
    """
    run_command.add_settings(parser, has_level=has_level)
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
    """Return the command line to write to a file. The script's arguments are left out without --with-arguments."""
    words = sys.argv[1:]
    if arguments.rest and not arguments.with_arguments:
        words = [*words[: words.index("--")], "--", "..."] if "--" in words else words
    return shlex.join(["amp-patch", *words])


def check_is_named(arguments: argparse.Namespace) -> None:
    """Report a usage error if an option has taken the script for its FILE: `--write train.py` without a script."""
    if arguments.script or arguments.module or arguments.rest:
        return
    for name, value in vars(arguments).items():
        if isinstance(value, Path) and value.suffix == ".py":
            arguments.parser.error(f"name a script, or a module with -m: {value.name} was taken for FILE of --{name}")


class ScriptRunner:
    """Runs the script that a command line names.

    Each call runs it with the settings of a `Run`. A level of the `Run` replaces the level of the command line. Lists
    of the `Run` are added to the lists of the command line.

    Reports a usage error for a script that does not exist, or options that cannot be used together.

    Args:
        arguments: the parsed arguments that `add_script` declared.
        is_quiet: hide the output of the script, unless it fails.
        is_repeated: the runs only serve the command, so they write their files to scratch folders, unless --in-place
            is given.
    """

    def __init__(self, arguments: argparse.Namespace, *, is_quiet: bool = False, is_repeated: bool = False) -> None:
        check_is_named(arguments)
        self._command = list(arguments.rest)
        if arguments.script:
            self._command.insert(0, arguments.script)
        if arguments.module:
            if arguments.script:
                arguments.parser.error(f"{arguments.script}: write arguments of the module after --")
            self._command[:0] = ["-m", arguments.module]
        if is_quiet:  # `trace --fix`, which is not quiet, checks this itself
            refuse_ranks(arguments.parser, arguments.command.name)
        if arguments.everywhere and arguments.has_level:
            run_command.check_everywhere(arguments.parser, arguments.opt_level, arguments.lists)
        run_command.check_command(arguments.parser, self._command)
        folder = Path(self._command[0])  # `amp-patch run` leaves the error to Python
        if self._command[0] != "-m" and folder.is_dir() and not (folder / "__main__.py").is_file():
            arguments.parser.error(f"{folder} is a folder without a __main__.py: name a script in it")
        check_lists(arguments.parser, "--lists", *arguments.lists)
        self._opt_level = arguments.opt_level
        self._lists = arguments.lists
        self._force = arguments.force
        self._everywhere = arguments.everywhere
        self._is_quiet = is_quiet
        self._parser = arguments.parser
        self._prog = arguments.parser.prog
        self._folders: Folders | None = None
        if is_repeated and not arguments.in_place:
            if run_command.IS_WINDOWS:
                arguments.parser.error("on Windows the script writes its files where it always does: give --in-place")
            self._folders = Folders(self._prog.split()[-1])
        self._has_noted_waiting = False
        self._last_output: list[str] = []  # the traceback of a script that failed, or else its last lines

    def __call__(self, run: "Run") -> "Recording":
        """Run the script, and return the recording of its first process.

        Raises RunFailedError if the script fails or nothing was recorded, NoRegionError if it trained without mixed
        precision, and KeyboardInterrupt after Ctrl-C.
        """
        from ..insight.runs import NO_STEP, RunFailedError

        watched = self.watch(run)
        if watched.is_interrupted:
            raise KeyboardInterrupt
        output = "".join(f"\n  {line}" for line in self._last_output)
        if not watched.recordings:
            reason = NO_STEP
            if watched.code:
                reason = f"the script ended with exit code {watched.code}"
            raise RunFailedError(f"{reason}{output}", was_widened=watched.was_widened)
        recording = watched.recordings[0]
        if watched.code:
            raise RunFailedError(
                f"the script ended with exit code {watched.code}{output}", recording, was_widened=watched.was_widened
            )
        return recording

    def watch(self, run: "Run", until: "Callable[[Recording], bool]" = lambda recording: False) -> WatchedRun:
        """Run the script, and end it soon after `until` returns True for the recording of a process.

        Under a launcher, end it also once the script of another rank of this machine has failed. Only the first rank of
        the machine returns; the others end their processes.

        Raises NoRegionError if the script trained, but never entered mixed precision that the command could change.
        """
        ranks = find_ranks()
        run_folder = tempfile.TemporaryDirectory(prefix="amp-patch-") if ranks is None else ranks.meet()
        with run_folder as folder, self._redirect(run, folder) as scratch:
            level = run.settings.opt_level or self._opt_level
            lists = [*self._lists, *run.settings.lists]
            # --everywhere casts the ops of the whole script, in runs that cast ops and need no loss scale
            has_casts = bool(lists) if level is None else get_level(level).fits_whole_script
            python_arguments, environment = run_command.prepare(
                self._command,
                opt_level=level,
                lists=lists,
                force=self._force,
                everywhere=self._everywhere and has_casts,
                needs_region=self._is_quiet and not self._everywhere,
                in_float32=run.in_float32,
                refuses_regions=self._everywhere and not has_casts,
                watch={"folder": folder, "probe": run.probe, "options": dict(run.options), "seed": run.seed},
                scratch=scratch,
            )
            log = None
            if self._is_quiet:
                log = Path(folder, "output")

            steps = run.options.get("steps") or run.options.get("last")
            counter = _StepCounter(_name_run(run, level), Path(folder, PROGRESS), steps)

            def is_over() -> bool:
                if self._is_quiet:
                    if Path(folder, WAITING).exists() and not self._has_noted_waiting:
                        counter.clear()
                        self._note_waiting()
                    counter.show()
                if any(until(recording) for _, recording in _read(folder)):
                    return True
                return ranks is not None and ranks.find_code() != 0

            try:
                code = _call([sys.executable, *python_arguments], environment, is_over, log)
            finally:
                counter.clear()
            if log is None and Path(folder, STOPPED).exists():
                print(_ENDED, file=sys.stderr)
            if ranks is not None:
                if not ranks.is_first:
                    ranks.leave(code)  # does not return
                ranks.wait(is_over=is_over())
                code = code or ranks.find_code()
            self._read_output(folder, log)
            no_region = Path(folder, NO_REGION)
            recorded, was_widened = _read(folder), Path(folder, WIDENED).exists()
            # it is no error if only some processes train in mixed precision
            if no_region.exists() and not recorded:
                raise NoRegionError(no_region.read_text(encoding="utf-8"))
        steps, recordings = [steps for steps, _ in recorded], [recording for _, recording in recorded]
        return WatchedRun(code, steps, recordings, was_widened)

    def _read_output(self, folder: str, log: Path | None) -> None:
        """Store the traceback of the script, or else its last output, in `_last_output`.

        Report a usage error if the script cannot run with the options of the command line.

        Args:
            log: the file with the output, or None.
        """
        refused, error = Path(folder, REFUSED), Path(folder, ERROR)
        if refused.exists():
            self._parser.error(refused.read_text(encoding="utf-8"))
        if error.exists():
            self._last_output = error.read_text(encoding="utf-8").splitlines()
        elif log is not None:
            self._last_output = log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL:]

    @contextlib.contextmanager
    def _redirect(self, run: "Run", folder: str) -> Iterator[dict[str, object] | None]:
        """Context manager: make the folder for the files that a run writes. The files are kept if the run has a name.

        Yields the arguments of `scratch.redirect`, or None for a run that writes its files in place.
        """
        if self._folders is None:
            yield None
            return
        # any name does for a folder that is removed at the end of the run
        root = self._folders.begin(run.name or "thrown away")
        try:
            yield {"root": root, "shared": [*find_shared(), folder], "inductor_cache": find_inductor_cache()}
        finally:
            self._folders.end(root, keep=bool(run.name))

    def print_files(self) -> None:
        """Print the folder of the kept files of repeated runs, and the files. Prints nothing if none are kept."""
        for line in self._folders.describe() if self._folders is not None else ():
            print(f"{self._prog}: {line}", file=sys.stderr)

    def _note_waiting(self) -> None:
        """Print that a quiet script takes steps without mixed precision, so it may end without a result."""
        self._has_noted_waiting = True
        print(
            f"{self._prog}: the script takes steps without mixed precision so far; waiting for its first"
            " torch.autocast or amp.initialize (Ctrl-C ends it)",
            file=sys.stderr,
        )


def _name_run(run: "Run", level: str | None) -> str:
    """Return the name of a run for the terminal."""
    if level is not None:
        return level
    if run.in_float32:
        return "float32"
    return "with a list" if run.settings.lists else "as-is"


class _StepCounter:
    """Shows on stderr how many steps a run has taken, in one line that is rewritten. Only on a terminal.

    Args:
        name: the name of the run, at the start of the line.
        file: the file with the number of steps so far. It does not exist before the first step.
        steps: the number of steps of the whole run; None if it is not known.
    """

    def __init__(self, name: str, file: Path, steps: object) -> None:
        self._name = name
        self._file = file
        self._of = f" of {steps}" if steps else ""
        self._began = time.monotonic()
        self._is_shown = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._length = 0  # of the line on the terminal

    def show(self) -> None:
        """Write the line over the one before."""
        if not self._is_shown:
            return
        taken = "0"
        with contextlib.suppress(OSError):
            taken = self._file.read_text(encoding="utf-8") or taken
        line = f"  {self._name}  step {taken}{self._of}  {time.monotonic() - self._began:.0f} s"
        self._write(line[: shutil.get_terminal_size().columns - 1])

    def clear(self) -> None:
        """Remove the line, if there is one."""
        if self._length:
            self._write("")
            print(end="\r", file=sys.stderr, flush=True)

    def _write(self, line: str) -> None:
        print(f"\r{line.ljust(self._length)}", end="", file=sys.stderr, flush=True)
        self._length = len(line)


def _read(folder: str) -> "list[tuple[int, Recording]]":
    """Return the number of steps and the recording of each process that has written a recording, sorted by rank."""
    from ..insight import Recording

    if not os.path.isdir(folder):  # the first rank has ended, and has removed it
        return []
    names = [match for path in Path(folder).iterdir() if (match := _FILE.fullmatch(path.name))]
    names.sort(key=lambda match: [int(part) for part in match.groups()])
    return [(int(match[3]), Recording.read(Path(folder, match[0]))) for match in names]


def _call(command: list[str], environment: dict[str, str], is_over: Callable[[], bool], log: Path | None = None) -> int:
    """Run a process and return its exit code. End it soon after `is_over` returns True; the code then is 0.

    The terminal sends Ctrl-C to the process too; a SIGTERM of this process is passed on to it. After either, the
    returned code is `-SIGINT`.

    Args:
        log: a file for the output of the process; None lets it write to the output of this process.
    """
    sys.stdout.flush()
    is_interrupted = False
    with contextlib.ExitStack() as stack:
        output: dict[str, Any] = {}
        if log is not None:
            output = {"stdout": stack.enter_context(log.open("wb")), "stderr": subprocess.STDOUT}
        process = stack.enter_context(subprocess.Popen(command, env=environment, **output))
        stack.callback(process.terminate)  # matters if an interrupt comes outside of the `try` below
        while True:
            try:
                code = process.wait(_POLL_SECONDS)
                break
            except KeyboardInterrupt as error:
                is_interrupted = True
                if isinstance(error, TerminatedError):
                    process.terminate()
            except subprocess.TimeoutExpired:
                if is_over():
                    code = _end(process)
                    break
    return -signal.SIGINT if is_interrupted else code


def _end(process: "subprocess.Popen[bytes]") -> int:
    """End the process of a run that is over, after a grace period for other ranks to write their recordings."""
    try:
        process.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait()
    # the command has ended the script, so its exit code says nothing about it
    return 0


def write_all(recordings: "Sequence[Recording]", path: Path) -> None:
    """Write each recording to a file: the first to `path`, the others with `.1`, `.2`, ... put before the suffix.

    On a machine of a launcher other than the first, `path` is changed by `name_for_node`.
    """
    path = name_for_node(path)
    for number, recording in enumerate(recordings):
        if number > 0:
            recording.to_jsonl(path.with_suffix(f".{number}{path.suffix}"))
        else:
            recording.to_jsonl(path)
