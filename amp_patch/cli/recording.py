"""The part of a command that runs in the process of its script. It applies op lists to torch.autocast, and
from the first session (see `session.Session`) on, it records the run with a probe (`insight.runs.Probe`).

`sitecustomize` imports this module when Python starts, so the module must not import torch before the script does.
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
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from .. import events
from ..insight.runs import Probe, Run, make_probe, observes_ops, seed_when_imported
from ..script_settings import HasRegionsError, NoRegionError, UnsuitedLevelError
from ..terminal import print_error

if TYPE_CHECKING:
    from ..insight import Recording

NO_REGION, WAITING, ERROR, PROGRESS, WIDENED = "no-region", "waiting", "error", "progress", "widened"
STOPPED, REFUSED = "stopped", "refused"
"""Names of files in the folder of the run, by which the process of the script informs the command.

NO_REGION: the error of a script that never used mixed precision, written at its end. WAITING: a note that steps were
taken without mixed precision so far. ERROR: the traceback of a script that failed. PROGRESS: the number of steps taken.
WIDENED: empty; the script failed after it got float32 where it asks for 16 bits. STOPPED: empty; a rank waits for the
command to end all ranks. REFUSED: why the script cannot run with the options of the command.
"""

_PROGRESS_SECONDS = 1.0
_LONGEST_WAIT = 60.0  # seconds that a rank waits until the command ends it; the command needs about six
_USAGE = 2  # exit code of a usage error
_TROUBLE = 1  # exit code of a script that `run --armed` has stopped
_CANNOT_BE_WATCHED = ("and mode <amp_patch", "non-infra torch dispatch mode present")
"""Parts of messages of torch for functions such as `flex_attention`, which cannot run while a dispatch mode watches."""

_USE_ARMED = (
    "amp_patch: torch cannot run this function while each op is watched. `explain`, `trace` and `compare` watch each"
    " op; `amp-patch run` and `amp-patch trace --armed` do not"
)
_SPAWN = "torch.multiprocessing.spawn"


@runtime_checkable
class Explaining(Protocol):
    """A probe that can explain exceptions: it records which dtypes, or which use of a GradScaler, caused one."""

    def note_raised(self, error: BaseException) -> object:
        """Explain an exception that ends a process of the script."""


class _ProbeStarter(events.Watcher):
    """Makes the probe when the first session is opened, and writes its recording to a file.

    Once the probe has seen enough, this object writes the recording and ends the script with SystemExit. If the script
    ends earlier, the recording is written at its exit.

    Args:
        folder: the folder of the run, which a command reads; None if no command waits for the recording.
        file: without a folder, the file for the recording; None writes none.
    """

    def __init__(self, folder: str | None, run: Run, file: str | None = None) -> None:
        self._folder = None if folder is None else Path(folder)
        self._file = None if file is None else Path(file)
        self._run = run
        self.observes_ops = observes_ops(run)
        self._probe: Probe | None = None
        self._progress_due = time.monotonic() + _PROGRESS_SECONDS

    def step_ended(self, optimizer: Any) -> None:
        """Write the number of steps into `PROGRESS`, at most once a second."""
        if self._folder is None or self._probe is None:
            return
        if time.monotonic() > self._progress_due:
            self._progress_due = time.monotonic() + _PROGRESS_SECONDS
            (self._folder / PROGRESS).write_text(str(self._probe.steps), encoding="utf-8")

    def session_opened(self, session: Any) -> None:
        """Make the probe at the first session. From then on, the probe receives all events itself."""
        if self._probe is None:
            self._probe = make_probe(self._run, self._end)
            events.watch(self._probe)
            atexit.register(self._write)
            self._probe.session_opened(session)  # this event began before the probe was watching

    def note_raised(self, error: BaseException) -> None:
        """Let the probe explain an exception that ends a process of the script."""
        if isinstance(self._probe, Explaining):
            self._probe.note_raised(error)

    def _end(self) -> None:
        """Write the recording and end the script, because the probe has seen enough."""
        self._write()
        assert self._probe is not None
        from ..reporting import find_rank  # imports torch

        if self._folder is not None and self._probe.ends_alone and find_rank() is not None:
            Path(self._folder, STOPPED).touch()
            # This rank waits: if it ended, others would wait for it for ever, and if it went on, it might overwrite a
            # checkpoint.
            time.sleep(_LONGEST_WAIT)  # the command ends all ranks meanwhile
        raise SystemExit(0 if self._folder is not None else _TROUBLE)

    def _write(self) -> None:
        """Stop the probe and write its recording, once."""
        atexit.unregister(self._write)
        probe = self._probe
        assert probe is not None
        probe.stop()
        recording = probe.recording
        if self._folder is None:
            self._write_in_place(recording)
            return
        file = self._folder / f"{recording.run.rank}-{os.getpid()}-{probe.steps}.jsonl"
        # written under another name first, because the command may read the folder at any time
        recording.to_jsonl(file.with_suffix(".part"))
        file.with_suffix(".part").replace(file)

    def _write_in_place(self, recording: "Recording") -> None:
        """Write the recording of this rank to the file that the user has named, if any. Rank 1 and higher put their
        number before the suffix. An OSError is only printed.
        """
        file, rank = self._file, recording.run.rank
        if file is None:
            return
        if rank:
            file = file.with_suffix(f".{rank}{file.suffix}")
        try:
            recording.to_jsonl(file)
        except OSError as error:
            print_error("amp-patch run", "failed", f"{file} cannot be written: {error.strerror or error}")


def take_over(*, is_first: bool, folder: str | None, marker: str | None, is_watched: bool, **options: Any) -> None:
    """Start a `Takeover` of torch.autocast as soon as torch is imported.

    Args:
        is_first: the command started this Python; False if the script did.
        folder: the folder of the run, which a command reads; None if no command waits for a recording.
        marker: the path of a file. The first process that reports how it changed the script creates it, so that the
            others stay silent. None: no process reports anything.
        is_watched: whether a probe watches the script.
        options: the options of the `Takeover`.
    """
    import wrapt

    takeovers: list[Any] = []  # empty until torch is imported

    def start(_: types.ModuleType) -> None:
        from .. import native

        if folder is not None:
            options["on_plain_step"] = _make_note(folder)
        elif marker is None:
            options["on_plain_step"] = str  # `str` does nothing with the message
        takeover = native.Takeover(**options)
        takeover.tell = functools.partial(_print_once, marker)
        native.start(takeover, is_watched=is_watched)
        takeovers.append(takeover)

    # exit handlers run in reverse order, so this one runs after the script's own
    atexit.register(_report_no_region, takeovers, os.getpid(), folder, is_first=is_first)
    if folder is None:
        sys.excepthook = _print_error_in_short
    wrapt.when_imported("torch")(start)


def _print_once(marker: str | None, line: str) -> None:
    """Print a line to stderr (stdout belongs to the script), unless a process of the run has printed one.

    Prints nothing without a marker, or on another rank than 0.
    """
    from ..reporting import find_rank  # imports torch

    if marker is None or find_rank():
        return
    with contextlib.suppress(FileExistsError):  # a process has printed
        # the marker cannot be made in a folder that is gone or not ours: then several processes may print
        with contextlib.suppress(PermissionError, FileNotFoundError):
            Path(marker).open("x").close()
        print(line, file=sys.stderr, flush=True)


def remove_marker_at_exit(marker: str) -> None:
    """Remove the marker of `take_over` when this process, the first one of the run, ends."""
    first_process = os.getpid()

    def remove() -> None:
        if os.getpid() == first_process:  # a forked process runs the exit handlers too
            Path(marker).unlink(missing_ok=True)

    atexit.register(remove)


def _make_note(folder: str) -> Callable[[str], None]:
    """Return the function that reports a step without mixed precision: in the log, and in a file for the command."""

    def note(line: str) -> None:
        from ..reporting import log_warning

        log_warning("%s", line)
        Path(folder, WAITING).write_text(line, encoding="utf-8")

    return note


def _report_no_region(takeovers: list[Any], process_id: int, folder: str | None, *, is_first: bool) -> None:
    """Report at the exit of a script that it trained without any mixed precision that the command could change.

    If there is a folder, the error goes to the file `NO_REGION`. Otherwise it is printed, and the exit code becomes 1.
    Another program that the script started keeps its exit code, because it may well train in float32; a rank of a
    launcher and a process of multiprocessing belong to the script. After an uncaught exception, nothing is reported.
    """
    has_failed = getattr(sys, "last_value", None) is not None
    if not takeovers or os.getpid() != process_id or has_failed:
        return
    try:
        takeovers[0].check_end()
    except NoRegionError as error:
        if folder is not None:
            Path(folder, NO_REGION).write_text(str(error), encoding="utf-8")
            return
        print_error("amp-patch run", "failed", str(error))
        if is_first or "RANK" in os.environ or multiprocessing.parent_process() is not None:
            _exit_with(1)


def _exit_with(code: int) -> None:
    """End the process with an exit code. An exit handler cannot set it in another way.

    The exit handlers of the script have run already, so only open files are left to be flushed.
    """
    for file in gc.get_objects():
        if issubclass(type(file), io.IOBase):
            with contextlib.suppress(Exception):
                file.flush()
    os._exit(code)


def _print_error_in_short(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
    """Excepthook: print one line if the script cannot run with the options of the command, else the usual traceback."""
    if issubclass(kind, HasRegionsError):
        print_error("amp-patch run", "error", str(error))
        sys.exit(_USAGE)  # an excepthook may set the exit code in this way
    if issubclass(kind, UnsuitedLevelError):
        print_error("amp-patch run", "failed", str(error))
    else:
        sys.__excepthook__(kind, error, trace)


def _make_excepthook(folder: str, starter: _ProbeStarter) -> Callable[..., None]:
    """Return an excepthook that prints the traceback of the script, and writes it into the file `ERROR`, shortened.

    Then the probe of `starter` explains the exception, while its frames exist. If the script cannot run with the
    options of the command, the excepthook only writes the reason into `REFUSED`. After Ctrl-C it does nothing, because
    the command itself prints a line.
    """

    def report(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        if issubclass(kind, HasRegionsError):
            Path(folder, REFUSED).write_text(str(error), encoding="utf-8")
        elif not issubclass(kind, KeyboardInterrupt):
            if any(message in str(error) for message in _CANNOT_BE_WATCHED):
                error.add_note(_USE_ARMED)
            sys.__excepthook__(kind, error, trace)
            _note_widened(folder)
            with contextlib.suppress(FileExistsError), Path(folder, ERROR).open("x", encoding="utf-8") as file:
                # the mode "x" keeps the error of the process that failed first, which may have caused the others
                file.write(_shorten(error))
            starter.note_raised(error)

    return report


def _explain_in_processes(starter: _ProbeStarter) -> None:
    """Let the probe explain exceptions that end a process of multiprocessing, which calls no excepthook."""
    original = multiprocessing.process.BaseProcess.run

    def explained(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any) -> Any:
            try:
                return function(*args)
            except Exception as error:
                starter.note_raised(error)
                raise

        return call

    def run(process: multiprocessing.process.BaseProcess) -> None:
        state = vars(process)
        # torch's target catches the exceptions of the function that it is given, so wrap that function, too
        if getattr(state.get("_target"), "__module__", "") == _SPAWN:
            function, *more = state["_args"]
            state["_args"] = explained(function), *more
        explained(original)(process)

    multiprocessing.process.BaseProcess.run = run  # type: ignore[assignment]


def _note_widened(folder: str) -> None:
    """Make the file `WIDENED` if this process got float32 where it asked for 16 bits."""
    native = sys.modules.get("amp_patch.native")
    script = None if native is None else native.find_float32_script()
    if script is not None and script.has_acted:
        Path(folder, WIDENED).touch()


def _shorten(error: BaseException) -> str:
    """Return the traceback of an error without the frames of torch and of this package.

    For an UnsuitedLevelError, return only its message.
    """
    if isinstance(error, UnsuitedLevelError):
        return str(error)  # no line of the script is at fault, but the command
    packages = [sys.modules.get("torch"), sys.modules["amp_patch"]]
    files = [package.__file__ for package in packages if package is not None and package.__file__]
    hidden = tuple(f"{os.path.dirname(file)}{os.sep}" for file in files)
    shown = traceback.TracebackException.from_exception(error)
    frames = [frame for frame in shown.stack if not frame.filename.startswith(hidden)]
    shown.stack = traceback.StackSummary.from_list(frames)
    return "".join(shown.format(chain=False))


def record(folder: str | None, probe: str, options: dict[str, Any], seed: int | None, file: str | None = None) -> None:
    """Let a probe watch this process, from its first session on, and write its recording.

    Args:
        folder: the folder of the run. The recording is written into a file in it, and so is the error of a script that
            fails. None: no command waits for the recording or the error.
        file: without a folder, the file for the recording, or None.
        probe, options: the class of the probe, as `module:Class`, and its arguments.
        seed: the seed of random, numpy and torch; None leaves them alone.
    """
    import wrapt

    starter = _ProbeStarter(folder, Run(probe, options, seed=seed), file)
    if folder is not None:
        sys.excepthook = _make_excepthook(folder, starter)
    _explain_in_processes(starter)
    wrapt.when_imported("torch")(_note_casts_of_models)
    if seed is not None:
        seed_when_imported(seed)
    events.watch(starter)


def _note_casts_of_models(_: types.ModuleType) -> None:
    """Note the lines that cast models, from the import of torch on."""
    from ..insight import note_casts

    note_casts()
