"""In the process of a script that a command runs: lays lists over its torch.autocast; waits for a session, and writes
what a probe has seen into a file.

Imported as Python starts, so it imports no torch before the script does.
"""

import atexit
import contextlib
import functools
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
from ..script_settings import NoRegionError
from ..terminal import print_error

NO_REGION, ERROR, PROGRESS = "no-region", "error", "progress"
"""Files in the folder of a run."""

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


def take_over(*, is_watched: bool, told: str | None, **options: Any) -> None:
    """Lay over torch.autocast, as soon as torch is imported, what a `Takeover` is told to.

    `told` is a file that the first process makes that says what was laid over what; None: no process is to say it.
    """
    import wrapt

    def start(_: types.ModuleType) -> None:
        from .. import native

        takeover = native.Takeover(**options)
        takeover.tell = functools.partial(_tell_once, told)
        native.start(takeover, is_watched=is_watched)

    if not is_watched:
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


def _print_refusal(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
    """Print what ends a script: that there is nothing to change in a line, for it is no fault of the script's."""
    if issubclass(kind, NoRegionError):
        print_error("amp-patch run", "failed", str(error))
    else:
        sys.__excepthook__(kind, error, trace)


def _make_excepthook(folder: str) -> Callable[..., None]:
    """Return what prints the traceback of what ends the script, and leaves a short one in `ERROR`; but for what the
    command says a line of: Ctrl-C, and that there is nothing to change, whose text is left in `NO_REGION`.
    """

    def tell(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        if issubclass(kind, NoRegionError):
            Path(folder, NO_REGION).write_text(str(error), encoding="utf-8")
        elif not issubclass(kind, KeyboardInterrupt):
            sys.__excepthook__(kind, error, trace)
            with contextlib.suppress(FileExistsError), Path(folder, ERROR).open("x", encoding="utf-8") as file:
                file.write(_shorten(error))  # of several processes the first: the others may have failed for it

    return tell


def _shorten(error: BaseException) -> str:
    """Return a traceback without the frames of torch and of this package: what is left is the user's."""
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
