"""Runs in the process of a script: applies lists to its torch.autocast, and records its session into a file.

Imported when Python starts, so it imports torch only after the script has.
"""

import atexit
import contextlib
import functools
import gc
import io
import multiprocessing
import os
import sys
import time
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import events
from ..insight.runs import Probe, Run, make_probe, seed_when_imported
from ..script_settings import NoRegionError, UnsuitedLevelError
from ..terminal import print_error

NO_REGION, WAITING, ERROR, PROGRESS = "no-region", "waiting", "error", "progress"
"""Files in the folder of a run: the reason for refusing it at its end; a note that it steps without mixed precision so
far; the error that ended it; the number of steps that have ended.
"""

_PROGRESS_SECONDS = 1.0


class _Waiting(events.Watcher):
    """Makes a probe when the first session is opened, and writes its recording when it is complete or the process ends.

    A complete recording ends the script by SystemExit.
    """

    def __init__(self, folder: str, run: Run) -> None:
        self._folder = Path(folder)
        self._run = run
        self._probe: Probe | None = None
        self._due = time.monotonic() + _PROGRESS_SECONDS

    def step_ended(self, optimizer: Any) -> None:
        """Write the number of steps to `PROGRESS`, at most once a second."""
        if self._probe is not None and time.monotonic() > self._due:
            self._due = time.monotonic() + _PROGRESS_SECONDS
            (self._folder / PROGRESS).write_text(str(self._probe.steps), encoding="utf-8")

    def session_opened(self, session: Any) -> None:
        """Make the probe, which watches from then on."""
        if self._probe is None:
            self._probe = make_probe(self._run, self._end)
            events.watch(self._probe)
            atexit.register(self._write)
            self._probe.session_opened(session)

    def _end(self) -> None:
        self._write()
        assert self._probe is not None
        from ..reporting import find_rank  # imports torch

        if self._probe.ends_alone and find_rank() is not None:
            return  # the other ranks would wait for this one for ever: the command ends all of them
        raise SystemExit(0)

    def _write(self) -> None:
        atexit.unregister(self._write)
        probe = self._probe
        assert probe is not None
        probe.stop()
        recording = probe.recording
        file = self._folder / f"{recording.run.rank}-{os.getpid()}-{probe.steps}.jsonl"
        recording.to_jsonl(file.with_suffix(".part"))
        file.with_suffix(".part").replace(file)


def take_over(*, is_first: bool, folder: str | None, told: str | None, **options: Any) -> None:
    """Install a `Takeover` as soon as torch is imported.

    Args:
        is_first: this is the Python that the command started, and not one that the script started.
        folder: the folder of a watched run, else None.
        told: a file that the first process makes before it prints what was changed; None: nothing is printed.
        options: the arguments of the `Takeover`.
    """
    import wrapt

    installed: list[Any] = []

    def start(_: types.ModuleType) -> None:
        from .. import native

        if folder is not None:
            options["on_plain_step"] = _make_note(folder)
        elif told is None:
            options["on_plain_step"] = str  # prints nothing
        takeover = native.Takeover(**options)
        takeover.tell = functools.partial(_tell_once, told)
        native.start(takeover, is_watched=folder is not None)
        installed.append(takeover)

    atexit.register(_end, installed, os.getpid(), folder, is_first=is_first)  # registered first, so called last
    if folder is None:
        sys.excepthook = _print_refusal
    wrapt.when_imported("torch")(start)


def _tell_once(told: str | None, line: str) -> None:
    """Print a line to stderr, unless another process of the run has. stdout belongs to the script."""
    from ..reporting import find_rank  # imports torch

    if told is None or find_rank():
        return
    with contextlib.suppress(FileExistsError):
        with contextlib.suppress(PermissionError, FileNotFoundError):  # the folder is not for this process
            Path(told).open("x").close()
        print(line, file=sys.stderr, flush=True)


def forget_told(told: str) -> None:
    """Remove the file `told` when this process ends. Called in the first process of a run."""
    pid = os.getpid()

    def forget() -> None:
        if os.getpid() == pid:  # not in a fork
            Path(told).unlink(missing_ok=True)

    atexit.register(forget)


def _make_note(folder: str) -> Callable[[str], None]:
    """Return a function that warns of steps without mixed precision, in the script and in the command."""

    def note(line: str) -> None:
        from ..reporting import say_loudly

        say_loudly("%s", line)
        Path(folder, WAITING).write_text(line, encoding="utf-8")

    return note


def _end(installed: list[Any], process_id: int, folder: str | None, *, is_first: bool) -> None:
    """Fail with exit code 1 at the end of a script that has trained without mixed precision, if it was to be changed.

    A script that failed by itself has printed its error. In a Python that the script started, only launchers need the
    exit code; other processes may train in float32 on purpose.
    """
    if not installed or os.getpid() != process_id or getattr(sys, "last_value", None) is not None:
        return
    try:
        installed[0].check_end()
    except NoRegionError as error:
        if folder is not None:
            Path(folder, NO_REGION).write_text(str(error), encoding="utf-8")
            return
        print_error("amp-patch run", "failed", str(error))
        if is_first or "RANK" in os.environ or multiprocessing.parent_process() is not None:
            _exit_with(1)


def _exit_with(code: int) -> None:
    """End the process with an exit code. All other exit handlers have run; open files are flushed here."""
    for file in gc.get_objects():
        if issubclass(type(file), io.IOBase):
            with contextlib.suppress(Exception):
                file.flush()
    os._exit(code)


def _print_refusal(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
    """Print the error that ends a script. A level that does not fit is no fault of the script, so it is one line."""
    if issubclass(kind, UnsuitedLevelError):
        print_error("amp-patch run", "failed", str(error))
    else:
        sys.__excepthook__(kind, error, trace)


def _make_excepthook(folder: str) -> Callable[..., None]:
    """Return an excepthook that prints the traceback, and writes a short one to `ERROR` for the command.

    The command itself reports Ctrl-C.
    """

    def print_and_write(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        if not issubclass(kind, KeyboardInterrupt):
            sys.__excepthook__(kind, error, trace)
            with contextlib.suppress(FileExistsError), Path(folder, ERROR).open("x", encoding="utf-8") as file:
                file.write(_shorten(error))  # of the first process only: others may have failed because of it

    return print_and_write


def _shorten(error: BaseException) -> str:
    """Return a traceback without the frames of torch and of this package. Of an unsuited level, the message alone."""
    if isinstance(error, UnsuitedLevelError):
        return str(error)
    packages = [sys.modules.get("torch"), sys.modules["amp_patch"]]
    files = [package.__file__ for package in packages if package is not None and package.__file__]
    hidden = tuple(f"{os.path.dirname(file)}{os.sep}" for file in files)
    short = traceback.TracebackException.from_exception(error)
    frames = [frame for frame in short.stack if not frame.filename.startswith(hidden)]
    short.stack = traceback.StackSummary.from_list(frames)
    return "".join(short.format(chain=False))


def record(folder: str, probe: str, options: dict[str, Any], seed: int | None) -> None:
    """Let a probe watch this process, and write its recording to a file in `folder`."""
    sys.excepthook = _make_excepthook(folder)
    if seed is not None:
        seed_when_imported(seed)
    events.watch(_Waiting(folder, Run(probe, options, seed=seed)))
