"""Runs a training under a *probe*, which watches it and makes a recording.

The training is a function here; `amp_patch.cli.scripts` runs scripts.

Importing this module does not import torch: the script that runs imports it.
"""

import abc
import contextlib
import importlib
import random
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from .. import events
from ..errors import ArgumentTypeError, ArgumentValueError, SessionError
from ..script_settings import Settings, in_force
from ..step_counter import StepCounter
from .recordings import Record, Recording
from .records import RunRecord

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ..session import Session


@dataclass(frozen=True, slots=True)
class Run:
    """A run to make. JSON can hold all of it.

    Attributes:
        probe: the class that watches, as `module:name` within `insight`.
        options: the arguments of the probe.
        settings: settings that override the script's own.
        seed: the seed of random, numpy and torch when the run begins; None leaves them alone.
        name: the name of the folder that keeps the files which a script writes; "" keeps none.
        in_float32: whether the script gets float32 where it asks for a 16-bit dtype.
    """

    probe: str
    options: Mapping[str, Any] = field(default_factory=dict)
    settings: Settings = Settings()
    seed: int | None = None
    name: str = ""
    in_float32: bool = False


class Probe(events.Watcher, abc.ABC):
    """Base class of watchers of a run. It counts steps as `StepCounter` does.

    Args:
        on_end: called when the probe has seen enough. In a run, it raises an exception that ends the run.
    """

    ends_alone: ClassVar[bool] = False
    """Whether the probe of one process may have seen enough while other processes of the run go on."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end
        self._count = 0
        self._counter = StepCounter()
        self._answered = -1, False  # the number of an event, and whether its step counts
        self.run: RunRecord | None = None

    @property
    def recording(self) -> Recording:
        """The records so far. Raises SessionError if no session was opened."""
        if self.run is None:
            raise SessionError("nothing was recorded: no model was called, and amp.initialize was not either")
        return Recording(self.run, list(self._records()))

    @property
    def steps(self) -> int:
        """The number of steps so far."""
        return self._count

    def session_closing(self, session: "Session") -> None:
        """Stop, since the next session has other optimizers and patches."""
        self.stop()
        self._counter.forget()

    @abc.abstractmethod
    def stop(self) -> None:
        """Stop watching. Harmless twice."""

    @abc.abstractmethod
    def _records(self) -> Iterable[Record]:
        """Return the records so far, without the record of the run."""

    def _is_counted(self, optimizer: "Optimizer") -> bool:
        """Return whether the step that has ended counts. May be called several times for a step."""
        if self._answered[0] != events.event_count.value:
            self._answered = events.event_count.value, self._counter.note(optimizer)
        return self._answered[1]


Runner = Callable[[Run], Recording]
"""Makes a run, and returns the recording of its probe. A run that fails may raise RunFailedError."""


class RunFailedError(SessionError):
    """A run ended before its probe had seen enough.

    Attributes:
        recording: the records until then; None without any.
        was_widened: whether the script got float32 where it asked for 16 bits, which may be why it failed.
    """

    def __init__(self, message: str, recording: Recording | None = None, *, was_widened: bool = False) -> None:
        super().__init__(message)
        self.recording = recording
        self.was_widened = was_widened


NO_STEP = "the script took no step"
"""The beginning of the error of a script that ends without an error, and without a recording."""

_OF_DTYPES = re.compile(
    r"dtype|data type|scalar type|float|fp16|bf16|half|double|autocast|precision|scaler|kernel|memory|alloc"
    r"|exit code (-9|137)\b",  # killed, mostly for its memory
    re.IGNORECASE,
)


def may_depend_on_dtype(error: RunFailedError) -> bool:
    """Return whether a training that failed in one precision may run in another: the error is about dtypes, kernels,
    loss scales or memory.

    Of its text, only the message and the line that raised the error are read, because other lines often name dtypes.
    """
    _, frame, end = str(error).rpartition('File "')
    text = end.partition("\n")[2] if frame else end
    return _OF_DTYPES.search(text) is not None


def observes_ops(run: Run) -> bool:
    """Return whether the probe may observe the ops of any step. An armed run observes only repeated steps."""
    return not run.probe.startswith("arming.")


def make_probe(run: Run, on_end: Callable[[], None]) -> Probe:
    """Return the probe that a run names."""
    module, _, name = run.probe.partition(":")
    made: Probe = getattr(importlib.import_module(f".{module}", __package__), name)(on_end=on_end, **run.options)
    return made


def seed_when_imported(seed: int) -> None:
    """Seed random, and numpy and torch now or as soon as they are imported."""
    import wrapt  # imported here, since it takes a quarter of the time of --help

    random.seed(seed)
    wrapt.when_imported("numpy")(lambda numpy: numpy.random.seed(seed % 2**32))
    wrapt.when_imported("torch")(lambda torch: torch.manual_seed(seed))


class _EnoughSeenError(BaseException):
    """Leaves the function that trains. It is no Exception, so `except Exception` does not catch it."""


def check_function(function: object, name: str) -> None:
    """Raise ArgumentTypeError unless `function` can be called. A common mistake is to pass the result of a call."""
    if not callable(function):
        raise ArgumentTypeError(
            f"{name} must be a function without arguments, not {type(function).__name__}: pass the function itself, and"
            " not its result"
        )


def check_count(number: object, name: str, least: int = 1) -> None:
    """Raise ArgumentTypeError unless `number` is a whole number, and ArgumentValueError if it is below `least`."""
    if not isinstance(number, int):
        raise ArgumentTypeError(f"{name}={number!r} is not a whole number: pass {least} or more")
    if number < least:
        raise ArgumentValueError(f"{name}={number!r} must be at least {least}: pass {least} or more")


def check_names(names: object, name: str) -> None:
    """Raise ArgumentTypeError for a string: each of its letters would be taken for a name."""
    if isinstance(names, str):
        raise ArgumentTypeError(f"{name}={names!r} must be a sequence of names: write {name}=[{names!r}]")


class FunctionRunner:
    """Runs a function without arguments that makes its model, opens a session or enters `torch.autocast`, and trains.

    A session that the function leaves open is closed. Raises ArgumentTypeError if `train` cannot be called, and
    SessionError if a session is in force, or if `amp_patch.native` is installed or in use.
    """

    def __init__(self, train: Callable[[], object]) -> None:
        from .. import native  # imports torch
        from ..session import current

        check_function(train, "train")
        native.check_not_installed()
        if current.state.session is not None:
            raise SessionError("a session is in force, and a run opens one of its own: call amp.reset() first")
        self._train = train

    def __call__(self, run: Run) -> Recording:
        """Run the function once, until the probe has seen enough.

        Exceptions of the function propagate; but once the function has got float32 where it asked for 16 bits,
        RunFailedError is raised from them. Raises SessionError if the function neither opens a session nor enters
        `torch.autocast`. Steps before the session, or before the first region, are not watched.
        """
        from .. import native  # imports torch
        from ..session import current

        probe = make_probe(run, self._leave)
        takeover = native.Takeover(
            run.settings.opt_level, run.settings.lists, needs_region=True, in_float32=run.in_float32
        )
        with contextlib.ExitStack() as undo:
            # The last callback runs first: the probe stops before the session closes.
            undo.callback(current.reset)
            undo.callback(native.start(takeover, is_watched=True))
            undo.callback(events.watch(probe))
            undo.callback(probe.stop)
            undo.callback(setattr, in_force, "settings", in_force.settings)
            in_force.settings = run.settings
            if run.seed is not None:
                seed_when_imported(run.seed)
            try:
                self._train()
                takeover.check_end()
            except _EnoughSeenError:
                pass
            except Exception as error:
                script = native.find_float32_script()
                if script is None or not script.has_acted:
                    raise
                reason = f"{type(error).__name__}: {error}".partition("\n")[0]
                raise RunFailedError(reason, was_widened=True) from error
        return probe.recording

    def _leave(self) -> None:
        raise _EnoughSeenError
