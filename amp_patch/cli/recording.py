"""Runs in the process of a script that a command has started: applies lists, waits for a session, records with a probe.

It is imported when Python starts, so it imports no torch before the script does.
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

NO_REGION, WAITING, ERROR, PROGRESS, WIDENED = "no-region", "waiting", "error", "progress", "widened"
"""Files in the folder of a run: why it was refused at its end; a note that its steps have no mixed precision so far;
its error; the number of steps that have ended; and a note that it failed with float32 where it asks for 16 bits.
"""

_TOLD_SECONDS = 1.0


class _Waiting(events.Watcher):
    """Makes a probe when the first session is opened. Writes its file once it has seen enough, or the process ends.

    A probe that has seen enough ends the script with SystemExit.
    """

    def __init__(self, folder: str, run: Run) -> None:
        self._folder = Path(folder)
        self._run = run
        self._probe: Probe | None = None
        self._due = time.monotonic() + _TOLD_SECONDS

    def step_ended(self, optimizer: Any) -> None:
        """Write the number of steps into `PROGRESS`, at most once a second."""
        if self._probe is not None and time.monotonic() > self._due:
            self._due = time.monotonic() + _TOLD_SECONDS
            (self._folder / PROGRESS).write_text(str(self._probe.steps), encoding="utf-8")

    def session_opened(self, session: Any) -> None:
        """Make the probe, which receives all events from now on."""
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
            return  # other ranks would wait for this one for ever, so the command ends them all
        raise SystemExit(0)

    def _write(self) -> None:
        atexit.unregister(self._write)
        probe = self._probe
        assert probe is not None
        probe.stop()
        recording = probe.recording
        file = self._folder / f"{recording.run.rank}-{os.getpid()}-{probe.steps}.jsonl"
        # renamed when it is complete, because the command reads the folder at any time
        recording.to_jsonl(file.with_suffix(".part"))
        file.with_suffix(".part").replace(file)


def take_over(*, is_first: bool, folder: str | None, told: str | None, **options: Any) -> None:
    """Start a `Takeover` of torch.autocast as soon as torch is imported.

    Args:
        is_first: whether the command started this Python, and not the script.
        folder: the folder of a watched run, else None.
        told: the path of a file that the first process makes which reports the takeover; None: no process reports it.
        options: the options of the `Takeover`.
    """
    import wrapt

    taken: list[Any] = []

    def start(_: types.ModuleType) -> None:
        from .. import native

        if folder is not None:
            options["on_plain_step"] = _make_note(folder)
        elif told is None:
            options["on_plain_step"] = str  # a function that does nothing
        takeover = native.Takeover(**options)
        takeover.tell = functools.partial(_tell_once, told)
        native.start(takeover, is_watched=folder is not None)
        taken.append(takeover)

    atexit.register(_end, taken, os.getpid(), folder, is_first=is_first)  # registered first, so it is called last
    if folder is None:
        sys.excepthook = _print_refusal
    wrapt.when_imported("torch")(start)


def _tell_once(told: str | None, line: str) -> None:
    """Print a line to stderr, unless another process of the run has. stdout belongs to the script."""
    from ..reporting import find_rank  # imports torch

    if told is None or find_rank():
        return
    with contextlib.suppress(FileExistsError):
        with contextlib.suppress(PermissionError, FileNotFoundError):  # the folder belongs to another user or is gone
            Path(told).open("x").close()
        print(line, file=sys.stderr, flush=True)


def forget_told(told: str) -> None:
    """Remove the file of `take_over` when this process, the first one of the run, ends."""
    pid = os.getpid()

    def forget() -> None:
        if os.getpid() == pid:  # a fork runs the exit handlers, too
            Path(told).unlink(missing_ok=True)

    atexit.register(forget)


def _make_note(folder: str) -> Callable[[str], None]:
    """Return the function that reports a step without mixed precision, also to a command that hides the output."""

    def note(line: str) -> None:
        from ..reporting import log_warning

        log_warning("%s", line)
        Path(folder, WAITING).write_text(line, encoding="utf-8")

    return note


def _end(taken: list[Any], process_id: int, folder: str | None, *, is_first: bool) -> None:
    """Exit with code 1 if the script has trained without any mixed precision to change.

    A script that failed has reported why. A Python that the script started gets the exit code only under a launcher or
    multiprocessing; others may well train in float32.
    """
    if not taken or os.getpid() != process_id or getattr(sys, "last_value", None) is not None:
        return
    try:
        taken[0].check_end()
    except NoRegionError as error:
        if folder is not None:
            Path(folder, NO_REGION).write_text(str(error), encoding="utf-8")
            return
        print_error("amp-patch run", "failed", str(error))
        if is_first or "RANK" in os.environ or multiprocessing.parent_process() is not None:
            _exit_with(1)


def _exit_with(code: int) -> None:
    """End the process with an exit code. All exit handlers have run, so open files only need to be flushed."""
    for file in gc.get_objects():
        if issubclass(type(file), io.IOBase):
            with contextlib.suppress(Exception):
                file.flush()
    os._exit(code)


def _print_refusal(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
    """Print the exception that ends a script: only a line if amp cannot change the script as asked."""
    if issubclass(kind, UnsuitedLevelError):
        print_error("amp-patch run", "failed", str(error))
    else:
        sys.__excepthook__(kind, error, trace)


def _make_excepthook(folder: str) -> Callable[..., None]:
    """Return the hook that prints the traceback of a script that fails, and writes a short one into `ERROR`.

    After Ctrl-C it does nothing, since the command prints a line.
    """

    def report(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        if not issubclass(kind, KeyboardInterrupt):
            sys.__excepthook__(kind, error, trace)
            _note_widened(folder)
            with contextlib.suppress(FileExistsError), Path(folder, ERROR).open("x", encoding="utf-8") as file:
                file.write(_shorten(error))  # only the first process that fails: others may fail because of it

    return report


def _note_widened(folder: str) -> None:
    """Make the file `WIDENED` if this process got float32 where it asked for 16 bits."""
    native = sys.modules.get("amp_patch.native")
    script = None if native is None else native.find_float32_script()
    if script is not None and script.has_acted:
        Path(folder, WIDENED).touch()


def _shorten(error: BaseException) -> str:
    """Return a traceback without the frames of torch and of this package."""
    if isinstance(error, UnsuitedLevelError):
        return str(error)  # no line of the script is at fault
    packages = [sys.modules.get("torch"), sys.modules["amp_patch"]]
    files = [package.__file__ for package in packages if package is not None and package.__file__]
    hidden = tuple(f"{os.path.dirname(file)}{os.sep}" for file in files)
    shown = traceback.TracebackException.from_exception(error)
    frames = [frame for frame in shown.stack if not frame.filename.startswith(hidden)]
    shown.stack = traceback.StackSummary.from_list(frames)
    return "".join(shown.format(chain=False))


def record(folder: str, probe: str, options: dict[str, Any], seed: int | None) -> None:
    """Let a probe watch this process, and write its recording into a file in `folder`."""
    sys.excepthook = _make_excepthook(folder)
    if seed is not None:
        seed_when_imported(seed)
    events.watch(_Waiting(folder, Run(probe, options, seed=seed)))
