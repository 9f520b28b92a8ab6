"""`Recorder`: records the ops of some steps of a training. `recording` records a block, `explain` a function.

A *session* is what `amp.initialize` opens. For a script without it, amp_patch opens a `NativeSession`.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .. import events
from ..errors import SessionError
from ..hardware import name_kind
from ..interrupts import UndoStack
from ..native import AS_IS, Misuse, NativeSession, find_float32_script, watch
from ..reporting import find_rank
from ..session import Session, current
from .faults import FaultFinder
from .folding import Folding
from .misuse_record import MisuseRecord, record_misuse
from .naming import find_prefixes
from .observe import Observer
from .quiet.watch import QuietWatch
from .raised import Scene, explain_raised
from .raised_record import RaisedRecord
from .raised_text import format_raised
from .recordings import Record, Recording
from .records import RunRecord, StepRecord
from .rules import short
from .runs import Probe, check_count, check_function
from .scaler_errors import ScalerErrors


class Recorder(Probe):
    """Records the steps from `first` up to, but not including, `last`, counted over all sessions that are opened.

    Args:
        first, last: numbers of steps, counted from 0. If `last` is None, steps are recorded until `stop`.
        on_end: called when the last of these steps has ended. If the first session is opened only after these steps,
            called when the session's first step ends.
        counts_before: whether to count the steps that a script took before its session was opened.
    """

    def __init__(
        self,
        first: int = 0,
        last: int | None = None,
        on_end: Callable[[], None] = lambda: None,
        *,
        counts_before: bool = True,
    ) -> None:
        super().__init__(on_end)
        self._counts_before = counts_before
        self._first = first
        self._last = last
        self._folding = Folding()
        self._finder: FaultFinder | None = None
        self._quiet: QuietWatch | None = None
        self._session: Session | None = None
        self._observer: Observer | None = None
        self._observers: list[Observer] = []  # all so far: each has to be stopped in its own thread
        self._steps: list[StepRecord] = []
        self._before: Folding | None = None  # the ops of the step before `first`, shown only if it raises an exception
        self._scalers = ScalerErrors()
        self._raised: list[RaisedRecord] = []
        self._misuses: list[MisuseRecord] = []
        self.is_in_block = False  # set by `in_block`: stop for good when a session of amp.initialize closes
        self._has_lost_session = False

    def _records(self) -> list[Record]:
        folding = self._folding
        if self._raised and self._before is not None:
            folding = self._before
        return [*folding.make_op_records(), *folding.make_undone_records(), *self._steps, *self._raised, *self._misused]

    @property
    def _misused(self) -> list[MisuseRecord]:
        """The misuses that led to no exception, or to one that has no record."""
        return [*self._misuses, *self._scalers.refusals]

    @property
    def is_recording(self) -> bool:
        """Whether this step is recorded."""
        return self._observer is not None and self._before is None

    def session_opened(self, session: Session) -> None:
        """Observe a session if its next step, or the step after that, is to be recorded.

        Called again when the session gets more models. Then only `run` is updated.
        """
        self.run = describe_run(session)
        if self._session is session:
            return
        self._session = session
        if isinstance(session, NativeSession) and self._counts_before:
            self._count += session.steps_before
            if self._finder is not None:
                self._finder.step = self._count
        self.stop()
        if self._is_in_window() or self._is_before_window():
            self._observe(session)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Context manager: do not record the ops that this thread runs in the block."""
        with contextlib.nullcontext() if self._observer is None else self._observer.paused():
            yield

    def note_raised(self, error: BaseException) -> RaisedRecord | None:
        """Explain an exception that has left the script, and return its record.

        Returns None if neither dtypes nor a GradScaler explain the exception, if nothing is observed, or if an earlier
        exception has a record.
        """
        observer, session = self._observer, self._session
        if observer is None or session is None or self._raised:
            return None
        observer.pause()  # to explain an exception, its call runs again: these ops are not the script's
        record = explain_raised(error, Scene(session, observer, self._scalers, self._count))
        observer.go_on()
        if record is not None:
            self._raised.append(record)
        return record

    def session_closing(self, session: Session) -> None:
        """Stop recording, since the observer wraps patches that the session is about to remove.

        If `in_block` is in use and the session is one of `amp.initialize`, later sessions are not recorded either.
        """
        super().session_closing(session)
        self._session = None
        if self.is_in_block and not session.gives_way:
            self._has_lost_session = True
            self.leave_block()

    def check_seen(self) -> None:
        """Raise SessionError if the function that ran in the block ran no op, or ended the session."""
        if self._has_lost_session:
            raise SessionError(
                "step ended the session, for example with a call of amp.initialize: pass a function that trains for one"
                " step, with objects that amp.initialize returned before. insight.compare and insight.tune take"
                " functions that call amp.initialize"
            )
        if not any(observer.has_seen for observer in self._observers):
            raise SessionError(
                "step called no model and ran no op under amp.initialize, so there is nothing to record: pass a"
                " function that trains for one step (forward, backward, optimizer.step())"
            )

    def leave_block(self) -> None:
        """Stop, and receive no more events. It may be called twice."""
        self.stop()
        if self in events.watchers:
            events.watchers.remove(self)

    def loss_scaled(self, loss: Tensor, scaled_loss: Tensor) -> None:
        """Note a loss. Also end the pause that `step_begun` began, if an exception left the step before its end."""
        if self._observer is not None:
            self._observer.go_on()
            self._scalers.note_loss(loss)

    def step_begun(self, optimizer: Optimizer) -> None:
        """Pause, since the many small ops of optimizers are of no interest."""
        if self._observer is not None:
            self._observer.pause()

    def step_ended(self, optimizer: Optimizer) -> None:
        """Count a step, and record its end if it is one of the steps to record.

        With several optimizers, only some steps count (see `StepCounter`). Begins or stops observing as the next step
        requires it. Calls `on_end` after the last step to record.
        """
        if self._observer is not None:
            self._observer.go_on()
        if not self._is_counted(optimizer):
            return
        session = current.require()
        self.run = describe_run(session)  # once more: a script's 16-bit dtype is known only after its first region
        if self._is_in_window():
            is_at_hand = session.device_type == "cpu"  # on a GPU, reading whether the step was skipped would wait
            with self.looking_away():
                skipped = session.is_skipped(optimizer) if is_at_hand else None
                scales = session.stats(wait=is_at_hand).loss_scales
            self._steps.append(StepRecord(self._folding.step, skipped, scales))
            self._folding.step += 1
        self._count += 1
        if self._observer is not None:
            self._observer.end_step()
        if self._is_in_window():
            if self._observer is None or self._before is not None:
                self._observe(session)
        elif self._is_before_window():
            self._observe(session)
        elif self._observer is not None or self._is_late():
            self.stop()
            self._on_end()

    def misused(self, misuse: Misuse) -> None:
        """Record a wrong use of GradScaler or autocast."""
        self._misuses.append(record_misuse(misuse, self._count))

    def refused(self, misuse: Misuse, error: BaseException) -> None:
        """Note why GradScaler has raised an exception."""
        self._scalers.note_refusal(misuse, self._count)

    @contextlib.contextmanager
    def looking_away(self) -> Iterator[None]:
        """Context manager: do not look at the ops of the block, which are not the script's."""
        if self._observer is None:
            yield
            return
        self._observer.pause()
        try:
            yield
        finally:
            self._observer.go_on()

    def stop(self) -> None:
        """Stop recording. It may be called twice."""
        self._observer = None
        for observer in self._observers:
            observer.stop()

    def _is_in_window(self) -> bool:
        return self._first <= self._count and (self._last is None or self._count < self._last)

    def _is_before_window(self) -> bool:
        """Return whether this step is the one before `first`.

        It is observed, too: most scripts that raise an exception do so in step 0, and `amp-patch explain` records step
        1 by default.
        """
        return self._count == self._first - 1

    def _is_late(self) -> bool:
        """Return whether the session was opened only after the last step to record."""
        return self._last is not None and self._last <= self._count and not self._steps

    def _observe(self, session: Session) -> None:
        earlier = self._observer
        self.stop()
        self._before = Folding() if self._is_before_window() else None
        self._observer = Observer(session, self._before or self._folding, self._finder, self._quiet)
        if earlier is not None:
            self._observer.origins = earlier.origins
        self._observers.append(self._observer)
        self._observer.start()


def describe_run(session: Session) -> RunRecord:
    """Return the record of the run of a session."""
    low, oplists = session.policy.low_dtype, session.oplists
    steps_before, needs_scaler, script_low = 0, False, ""
    if isinstance(session, NativeSession):
        low, steps_before, needs_scaler = session.seen_low, session.steps_before, session.needs_scaler
        if session.script_low is not None:
            script_low = short(session.script_low)
    float32_script = find_float32_script()
    name, digest = "", ""
    lists: tuple[str, ...] = ()
    if low is not None:
        name = short(low)
    if oplists is not None:
        lists, digest = tuple(map(str, oplists.names)), oplists.digest
    return RunRecord(
        torch=torch.__version__,
        device=session.device_type,
        opt_level=session.policy.opt_level or "",
        low=name,
        lists=lists,
        digest=digest,
        rank=find_rank() or 0,
        is_native=isinstance(session, NativeSession),
        prefixes=find_prefixes(session.models()),
        steps_before=steps_before,
        needs_scaler=needs_scaler,
        script_low=script_low,
        not_widened=() if float32_script is None else tuple(float32_script.not_widened),
        is_timed=float32_script is None or float32_script.is_timed,
        hardware=name_kind(session.device_type),
        threads=torch.get_num_threads(),
    )


def make_empty_run() -> RunRecord:
    """Return the record of a run in which no session is open yet."""
    return RunRecord(torch.__version__, "", AS_IS, "", (), "", find_rank() or 0, is_native=True)


@contextlib.contextmanager
def recording() -> Iterator[Recording]:
    """Record the ops that run in the block, with or without a session or `torch.autocast`.

    Ops in the step of an optimizer are left out, unless the step has a closure, or the optimizer was not passed to the
    `amp.initialize` that is in force. In other threads, only ops on a list of amp or of torch.autocast are recorded.
    The recording is complete when the block ends, even after an exception. Blocks cannot be nested. Results of eager
    code are bitwise the same as without a recording; code of torch.compile runs uncompiled. If dtypes or a GradScaler
    explain an exception that leaves the block, the explanation is added to it as a note.

    Raises:
        SessionError: another recording is in progress.
    """
    recorder = Recorder()
    recording = Recording(make_empty_run(), [])
    with in_block(recorder):
        try:
            yield recording
        except Exception as error:
            note_raised(recorder, error)  # before its records are copied
            raise
        finally:
            if recorder.run is not None:
                recording.run, recording.records[:] = recorder.run, recorder.recording.records


@contextlib.contextmanager
def in_block(recorder: Recorder) -> Iterator[None]:
    """Let a recorder watch the session that is in force, or a script without a session, until the block ends.

    If an Exception leaves the block, its explanation, if there is one, is added to it as a note. Raises SessionError if
    another block is open.
    """
    undo = UndoStack()
    if any(isinstance(watcher, Recorder) and watcher.is_in_block for watcher in events.watchers):
        raise SessionError("another recording is in progress: leave its block first")
    recorder.is_in_block = True
    undo.callback(recorder.leave_block)
    try:
        events.watch(recorder)
        if current.state.session is None or current.state.session.gives_way:
            undo.callback(watch())
        else:
            recorder.session_opened(current.require())
        yield
    except Exception as error:
        note_raised(recorder, error)
        raise
    finally:
        try:
            undo.close()
        except BaseException:  # such as KeyboardInterrupt: undo the rest
            undo.close()
            raise


def note_raised(recorder: Recorder, error: Exception) -> None:
    """Explain an exception in a note, which Python prints below its traceback, if there is an explanation."""
    raised = recorder.note_raised(error)
    if raised is not None:
        error.add_note(format_raised(raised, recorder.run))


def explain(step: Callable[[], Any], *, steps: int = 1, warmup: int = 1) -> Recording:
    """Call `step` `warmup` times, then `steps` times while recording, and return the recording.

    `step` is a function without arguments that trains for one step: forward, backward, `optimizer.step()`. The first
    step may do what later steps do not, such as create lazy parameters, so it is left out by default. `print` shows the
    recording in the format of `amp-patch explain`. If `step` raises an exception that dtypes or a GradScaler explain,
    the explanation is added to it as a note.

    Raises ArgumentTypeError or ArgumentValueError for wrong arguments, and SessionError if `step` runs no ops, if it
    ends the session by calling `initialize`, or if another recording is in progress.
    """
    check_function(step, "step")
    check_count(steps, "steps")
    check_count(warmup, "warmup", 0)
    with in_block(Recorder()):  # not recorded, but an exception is explained: most steps that raise do so at once
        for _ in range(warmup):
            step()
    recorder = Recorder()
    with in_block(recorder):
        for _ in range(steps):
            step()
    recorder.check_seen()
    return recorder.recording
