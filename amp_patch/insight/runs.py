"""Runs of a training that a probe watches: of a function here, as `amp_patch.cli.scripts` does of a script.

Imports no torch: a script is to do that itself.
"""

import abc
import contextlib
import importlib
import random
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
    """One run that is asked for; all of it can be written as JSON.

    Attributes:
        probe: the class that watches, as `module:name` within `insight`.
        options: its arguments.
        settings: what is laid over the script's own call of `initialize`.
        seed: of random, numpy and torch as the run begins; None: as they are.
        name: of the folder in which what a script writes is kept, if it does not write in place; "": it is not kept.
    """

    probe: str
    options: Mapping[str, Any] = field(default_factory=dict)
    settings: Settings = Settings()
    seed: int | None = None
    name: str = ""


class Probe(events.Watcher, abc.ABC):
    """What watches a run, and counts its steps, as `StepCounter` does.

    Args:
        on_end: called when it has seen enough; that does not return.
    """

    ends_alone: ClassVar[bool] = False
    """Whether one process of several may have seen enough while the others go on."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end
        self._count = 0
        self._counter = StepCounter()
        self._answered = -1, False  # at which event it was asked last whether a step counts, and the answer
        self.run: RunRecord | None = None

    @property
    def recording(self) -> Recording:
        """What there is so far. Raises SessionError where there was no session."""
        if self.run is None:
            raise SessionError("nothing was recorded: no model was called, and amp.initialize was not either")
        return Recording(self.run, list(self._records()))

    @property
    def steps(self) -> int:
        """How many steps have ended."""
        return self._count

    def session_closing(self, session: "Session") -> None:
        """Stop: the next session has optimizers and patches of its own."""
        self.stop()
        self._counter.forget()

    @abc.abstractmethod
    def stop(self) -> None:
        """Watch no more. Harmless twice."""

    @abc.abstractmethod
    def _records(self) -> Iterable[Record]:
        """Return the records so far, after that of the run."""

    def _is_counted(self, optimizer: "Optimizer") -> bool:
        """Tell whether the step that has ended is counted. Asked once or more for each step."""
        if self._answered[0] != events.number.value:
            self._answered = events.number.value, self._counter.note(optimizer)
        return self._answered[1]


Runner = Callable[[Run], Recording]
"""Runs a training as asked and returns what its probe recorded. Raises RunFailedError."""


class RunFailedError(SessionError):
    """A run ended before its probe had seen all. `recording` is what it had seen, None for nothing."""

    def __init__(self, message: str, recording: Recording | None = None) -> None:
        super().__init__(message)
        self.recording = recording


def make_probe(run: Run, on_end: Callable[[], None]) -> Probe:
    """Return the watcher that a run asks for."""
    module, _, name = run.probe.partition(":")
    made: Probe = getattr(importlib.import_module(f".{module}", __package__), name)(on_end=on_end, **run.options)
    return made


def seed_when_imported(seed: int) -> None:
    """Seed random, and numpy and torch now or as soon as they are imported."""
    import wrapt  # a quarter of the time that help takes

    random.seed(seed)
    wrapt.when_imported("numpy")(lambda numpy: numpy.random.seed(seed % 2**32))
    wrapt.when_imported("torch")(lambda torch: torch.manual_seed(seed))


class _EnoughSeenError(BaseException):
    """Leaves the function that trains; nothing that handles errors handles it."""


def check_function(function: object, name: str) -> None:
    """Raise ArgumentTypeError unless this can be called: most often it was."""
    if not callable(function):
        raise ArgumentTypeError(
            f"{name} must be a function without arguments, not {type(function).__name__}: pass the function itself, and"
            " not what it returns"
        )


def check_count(number: object, name: str, least: int = 1) -> None:
    """Raise ArgumentTypeError for what is not a whole number, and ArgumentValueError for too small a one."""
    if not isinstance(number, int):
        raise ArgumentTypeError(f"{name}={number!r} is not a whole number: pass {max(least, 1)} or more")
    if number < least:
        raise ArgumentValueError(f"{name}={number!r} must be at least {least}: pass {max(least, 1)} or more")


def check_names(names: object, name: str) -> None:
    """Raise ArgumentTypeError for text in the place of a sequence of names, of which each letter would be one."""
    if isinstance(names, str):
        raise ArgumentTypeError(f"{name}={names!r} must be a sequence of names: write {name}=[{names!r}]")


class FunctionRunner:
    """Runs a function without arguments that trains: it makes its model, calls `amp.initialize` and takes steps.

    The session that it leaves is closed. Raises SessionError if a session is in force.
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
        """Run it once, up to the step with which the probe has seen enough. What it raises before leaves, too.

        Raises SessionError if the function opens no session and enters no `torch.autocast`. Steps before the first of
        these are not watched.
        """
        from .. import native  # imports torch
        from ..session import current

        probe = make_probe(run, self._leave)
        takeover = native.Takeover(run.settings.opt_level, run.settings.lists, needs_region=True)
        with contextlib.ExitStack() as undo:
            undo.callback(current.reset)
            undo.callback(native.start(takeover, is_watched=True))
            undo.callback(events.watch(probe))
            undo.callback(probe.stop)
            undo.callback(setattr, in_force, "settings", in_force.settings)
            in_force.settings = run.settings
            if run.seed is not None:
                seed_when_imported(run.seed)
            with contextlib.suppress(_EnoughSeenError):
                self._train()
                takeover.check_end()
        return probe.recording

    def _leave(self) -> None:
        raise _EnoughSeenError
