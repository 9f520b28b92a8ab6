"""In the process of a script that a command runs: lays lists over its torch.autocast; waits for a session, and writes
what a probe has seen into a file.

Imported as Python starts, so it imports no torch before the script does.
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
"""Files in the folder of a run: what it was refused for at its end, that it takes steps without mixed precision so far,
what it failed with, and how many steps have ended.
"""

_TOLD_SECONDS = 1.0


class _Waiting(events.Watcher):
    """Makes a probe when the first session is opened, and writes its file when it has seen enough, or the process ends
    before. The script ends with that, by SystemExit.
    """

    def __init__(self, folder: str, run: Run) -> None:
        self._folder = Path(folder)
        self._run = run
        self._probe: Probe | None = None
        self._due = time.monotonic() + _TOLD_SECONDS

    def step_ended(self, optimizer: Any) -> None:
        """Leave in `PROGRESS`, now and then, how many steps have ended."""
        if self._probe is not None and time.monotonic() > self._due:
            self._due = time.monotonic() + _TOLD_SECONDS
            (self._folder / PROGRESS).write_text(str(self._probe.steps), encoding="utf-8")

    def session_opened(self, session: Any) -> None:
        """Hand over to a probe, which is told of everything from then on."""
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
            return  # the others would wait for this one for ever: the command ends them all
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
    """Lay over torch.autocast, as soon as torch is imported, what a `Takeover` is told to.

    Args:
        is_first: whether this is the Python that the command started, and not one that the script started.
        folder: that of a watched run, else None.
        told: a file that the first process makes that says what was laid over what; None: no process is to say it.
        options: those of a `Takeover`.
    """
    import wrapt

    taken: list[Any] = []

    def start(_: types.ModuleType) -> None:
        from .. import native

        if folder is not None:
            options["on_plain_step"] = _make_note(folder)
        elif told is None:
            options["on_plain_step"] = str  # says nothing
        takeover = native.Takeover(**options)
        takeover.tell = functools.partial(_tell_once, told)
        native.start(takeover, is_watched=folder is not None)
        taken.append(takeover)

    atexit.register(_end, taken, os.getpid(), folder, is_first=is_first)  # first of all, so it is called last
    if folder is None:
        sys.excepthook = _print_refusal
    wrapt.when_imported("torch")(start)


def _tell_once(told: str | None, line: str) -> None:
    """Print a line to stderr, unless another process of the run has printed one: stdout is the script's."""
    from ..reporting import find_rank  # imports torch

    if told is None or find_rank():
        return
    with contextlib.suppress(FileExistsError):
        with contextlib.suppress(PermissionError, FileNotFoundError):  # of a folder that is not for this process
            Path(told).open("x").close()
        print(line, file=sys.stderr, flush=True)


def forget_told(told: str) -> None:
    """Remove the file of `take_over` when this process ends, which is the first one of the run."""
    pid = os.getpid()

    def forget() -> None:
        if os.getpid() == pid:  # and not a fork
            Path(told).unlink(missing_ok=True)

    atexit.register(forget)


def _make_note(folder: str) -> Callable[[str], None]:
    """Return what says of a step that it is one without mixed precision: also to a command that shows nothing else."""

    def note(line: str) -> None:
        from ..reporting import say_loudly

        say_loudly("%s", line)
        Path(folder, WAITING).write_text(line, encoding="utf-8")

    return note


def _end(taken: list[Any], process_id: int, folder: str | None, *, is_first: bool) -> None:
    """Refuse at its end a script that has trained and had no mixed precision to change, with exit code 1.

    One that failed by itself has said why. Of a Python that the script started, a launcher wants the exit code; another
    may well train in float32.
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
    """End the process as it would by itself now, but with this exit code: after all exit handlers, so files remain."""
    for one in gc.get_objects():
        if issubclass(type(one), io.IOBase):
            with contextlib.suppress(Exception):
                one.flush()
    os._exit(code)


def _print_refusal(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
    """Print what ends a script: in a line that it cannot be changed as asked, for it is no fault of the script's."""
    if issubclass(kind, UnsuitedLevelError):
        print_error("amp-patch run", "failed", str(error))
    else:
        sys.__excepthook__(kind, error, trace)


def _make_excepthook(folder: str) -> Callable[..., None]:
    """Return what prints the traceback of what ends the script, and leaves a short one in `ERROR`: of a level that the
    script cannot have, the message alone. Of Ctrl-C the command says a line.
    """

    def tell(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        if not issubclass(kind, KeyboardInterrupt):
            sys.__excepthook__(kind, error, trace)
            with contextlib.suppress(FileExistsError), Path(folder, ERROR).open("x", encoding="utf-8") as file:
                file.write(_shorten(error))  # of several processes the first: the others may have failed for it

    return tell


def _shorten(error: BaseException) -> str:
    """Return a traceback without the frames of torch and of this package: what is left is the user's."""
    if isinstance(error, UnsuitedLevelError):
        return str(error)
    packages = [sys.modules.get("torch"), sys.modules["amp_patch"]]
    hidden = tuple(f"{os.path.dirname(one.__file__)}{os.sep}" for one in packages if one is not None and one.__file__)
    found = traceback.TracebackException.from_exception(error)
    frames = [frame for frame in found.stack if not frame.filename.startswith(hidden)]
    found.stack = traceback.StackSummary.from_list(frames)
    return "".join(found.format(chain=False))


def record(folder: str, probe: str, options: dict[str, Any], seed: int | None) -> None:
    """Watch this process by a probe, and write what it has seen into a file in `folder`."""
    sys.excepthook = _make_excepthook(folder)
    if seed is not None:
        seed_when_imported(seed)
    events.watch(_Waiting(folder, Run(probe, options, seed=seed)))
