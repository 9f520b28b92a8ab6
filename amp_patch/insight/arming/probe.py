"""`Armed` watches a run at full speed. If a step goes wrong, `Armed` repeats the step under a tracer.

The context manager `armed` does so for a block of code.
"""

import contextlib
import functools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NoReturn

from torch import Tensor
from torch.optim import Optimizer

from ... import events
from ...errors import ArgumentValueError, NonFiniteError, SessionError
from ...interrupts import UndoStack
from ...native import watch
from ...reporting import find_rank
from ...session import Session, current
from ...tables import wrap_sentences
from ...torch_dispatch import without_functions
from ...torch_private import get_backward_id, get_version
from ..fault_record import FaultRecord
from ..fault_text import describe_further, format_fault
from ..flight import describe_flight
from ..flight.sampler import Sampler
from ..misuse_record import record_misuse
from ..recorder import describe_run, make_empty_run
from ..recordings import Record, Recording
from ..runs import Probe, check_count, check_names
from ..tensors import find_largest_of
from ..tracer import Tracer
from ..trouble_record import TroubleRecord, format_trouble
from .call_watch import CallWatch
from .replay import Replay, Replayed
from .tape import Tape
from .troubles import Trouble, TroubleWatch

Then = Literal["stop", "skip", "go"]
THEN: tuple[Then, ...] = ("stop", "skip", "go")

_IS_SKIPPED: dict[Then, bool | None] = {"stop": None, "skip": True, "go": False}
"""By `then`: whether a step with trouble counts as skipped; None if the run stops before the step."""

_MOST_REPORTS = 5
"""The largest number of reports that are printed in a run."""

_MOST_REPEATED = 64
"""The most steps that are repeated in a run, apart from a step that stops the run. A repetition takes longer than a
step, and if trouble lasts, each further repetition finds the same.
"""


class Armed(Probe):
    """Keeps enough of the present step to repeat it. If it goes wrong, repeats it before the optimizer changes weights.

    Args:
        on_end: called when a step has gone wrong, with `then="stop"`.
        then: what follows a step that has gone wrong: "stop" ends the run, "skip" lets the step change no weights
            (unless it has a closure), "go" lets it run, and stops watching if it changes weights.
        every: without a dynamic loss scale, look at gradients in one step of so many: see `TroubleWatch`.
        record: record the magnitudes of modules and gradients in one step of so many; 0: in none.
        ignore: names of ops whose values are always accepted.
        tell: called with the text of each report; None: print it to stdout.
    """

    ends_alone = True
    observes_ops = False

    def __init__(
        self,
        on_end: Callable[[], None] = lambda: None,
        *,
        then: Then = "stop",
        every: int = 1,
        record: int = 50,
        ignore: Sequence[str] = (),
        tell: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(on_end)
        self._then = then
        self._ignore = tuple(ignore)
        self._tell = tell or _print
        self._session: Session | None = None
        self._tape = Tape()
        self._watch = CallWatch(self._tape, self._get_session, self._note_plain_loss)
        self._troubles = TroubleWatch(every)
        self._sampler = Sampler(record) if record else None
        self._records_so_far: list[Record] = []
        self._misuses: list[Record] = []
        self._told: set[tuple[object, ...]] = set()
        self._repeated = 0
        self._stepping: int | None = None  # id of the optimizer whose step has begun
        self._step_on_tape = 0  # the number of the step that the calls on the tape belong to, once it is over
        self._stepped: set[int] = set()  # ids of the optimizers that have stepped since the calls on the tape
        self._noted_loss: int | None = None  # id of the last loss of this step, after scaling
        self._largest_weight: float | None = None  # before the first step
        # by id of the optimizer: how often its weights had been written when its last step ended
        self._written: dict[int, int] = {}
        self._is_bad = False  # whether the step that has begun has trouble
        self._has_stepped = False  # whether this step has changed the weights already, as a step with a closure has
        self.is_over = False
        self.error = NonFiniteError("", None)

    def _records(self) -> list[Record]:
        flight = [] if self._sampler is None else self._sampler.records()
        return [*self._records_so_far, *self._misuses, *flight]

    def _get_session(self) -> Session | None:
        return self._session

    # ---- events ------------------------------------------------------------------------------------------------------

    def session_opened(self, session: Session) -> None:
        """Begin to watch a session. Called again when the session gets more models."""
        self.run = describe_run(session)
        if self.is_over:
            return
        if self._sampler is not None:
            self._sampler.attach(session.models, session)
        if self._session is session:
            return
        is_first = self._session is None
        self._session = session
        self._count += getattr(session, "steps_before", 0)
        if is_first:
            self._watch.start()
        if self._sampler is not None:
            self._sampler.begin_step(self._count)

    def loss_scaled(self, loss: Tensor, scaled_loss: Tensor) -> None:
        """Note a loss, unless it was the last one noted."""
        if self._session is None or self.is_over or id(scaled_loss) == self._noted_loss:
            return
        with without_functions():  # what runs here is no part of the step, and must not be written onto the tape
            self._note_loss(self._session, loss, scaled_loss)

    def _note_plain_loss(self, session: Session, loss: Tensor) -> None:
        """Note a tensor that goes backward, unless it was noted as a scaled loss."""
        if id(loss) != self._noted_loss:
            self._note_loss(session, loss, loss)

    def _note_loss(self, session: Session, loss: Tensor, scaled_loss: Tensor) -> None:
        self._noted_loss = id(scaled_loss)
        scaler: Any = None
        for block in session.gradients.open_blocks():  # blocks of `scale_loss`; the innermost comes last
            scaler = block.scaler
        if scaler is None and scaled_loss is not loss and session.scalers:
            scaler = session.scalers[0]
        self._watch.note_loss(session, loss, scaled_loss, (lambda: 1.0) if scaler is None else scaler.loss_scale)
        self._troubles.note_loss(loss)

    def step_begun(self, optimizer: Optimizer) -> None:
        """Judge a step, and act if it has gone wrong."""
        session = self._session
        self._stepping = id(optimizer)
        if session is None or self.is_over:
            return
        self._watch.leave()
        # the same optimizer steps again, and none of the calls before this step was seen
        if self._tape.is_over and id(optimizer) in self._stepped:
            self._tape.clear()
        if self._sampler is not None:
            self._sampler.look_at_gradients(optimizer)
        if self._largest_weight is None:
            self._largest_weight = find_largest_of(_weights_of(session, optimizer))
        trouble = self._troubles.judge(session, optimizer)
        self._is_bad = trouble is not None
        if trouble is not None:
            self._act(session, trouble, optimizer)

    def step_ended(self, optimizer: Optimizer) -> None:
        """End the step: the next call of a model is of the next step. Count the step if `StepCounter` counts it."""
        session = self._session
        if session is None or self.is_over:
            return
        if self._stepping != id(optimizer):  # a step with a closure reports only its end
            self._has_stepped = True
            self.step_begun(optimizer)
            self._has_stepped = False
            if self.is_over:
                return
        self._stepping = None
        self._written.pop(id(optimizer), None)
        if not self._is_bad:
            self._written[id(optimizer)] = _count_writes(optimizer)
        if not self._tape.is_over:
            self._step_on_tape = self._count
            self._stepped.clear()
        self._stepped.add(id(optimizer))
        self._forget_step()
        if self._is_counted(optimizer):
            if self._sampler is not None:
                self._sampler.end_step(self._count)
            self._count += 1
            if self._sampler is not None:
                # at the next call of a model: until then, the script may copy its models, or pass them to
                # torch.jit.script
                self._watch.before_next_call = functools.partial(self._sampler.begin_step, self._count)

    def misused(self, misuse: Any) -> None:
        """Record a wrong use of GradScaler or autocast."""
        self._misuses.append(record_misuse(misuse, self._count))

    def _forget_step(self) -> None:
        self._watch.end_step()
        self._troubles.end_step()
        self._noted_loss = None

    def stop(self) -> None:
        """Stop watching. First, if a loss since the last step is known to be inf or NaN, repeat the calls since that
        step, and report the loss.

        Harmless twice.
        """
        session, self._session = self._session, None
        if session is None:
            return
        bad = self._troubles.bad_loss
        if bad is not None and not self.is_over:
            self._session = session
            self._report(session, Trouble(f"the loss is {bad:g}, and no step followed", bad, False), None)
            self._session = None
        self._disarm()

    # ---- trouble -----------------------------------------------------------------------------------------------------

    def _act(self, session: Session, trouble: Trouble, optimizer: Optimizer) -> None:
        """Repeat a step with trouble, report it, and then stop, skip or go on.

        If a loss scale skips the step, and `_report` returns None, just go on.
        """
        report = self._report(session, trouble, optimizer)
        if report is None and trouble.is_skipped:
            return
        if self._then == "skip" and not trouble.is_skipped:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
        # with "go", the bad step spoils the weights, so there is nothing left to watch
        if self._then == "stop" or (self._then == "go" and not trouble.is_skipped):
            self._disarm()
        if self._then == "stop":
            self._on_end()

    def _disarm(self) -> None:
        self.is_over = True
        self._forget_step()
        self._watch.stop()
        if self._sampler is not None:
            self._sampler.detach()

    def _report(self, session: Session, trouble: Trouble, optimizer: Optimizer | None) -> str | None:
        """Repeat a step, record the results, and print a report.

        Returns the report, or "" if it is not printed (see `_print_report`). Returns None if `_MOST_REPEATED` forbids
        the repetition, or if the repetition shows no trouble: the dynamic loss scale is still on its way down.
        """
        is_search = trouble.is_skipped and trouble.loss is None
        if self._repeated >= _MOST_REPEATED and (self._then != "stop" or is_search):
            return None
        self._repeated += 1
        self._watch.is_paused = True
        if self._sampler is not None:
            self._sampler.pause()
        try:
            tracer, replayed = self._repeat(session, trouble, optimizer)
        finally:
            self._watch.is_paused = False
            if self._sampler is not None:
                self._sampler.go_on()
        differences = tuple(replayed.differences)
        if self._tape.is_over:
            differences = ("another optimizer has stepped with gradients of the same calls", *differences)
        faults, searches = tracer.faults, tracer.searches
        if is_search and searches and not faults:
            return None
        self.run = describe_run(session)
        record = TroubleRecord(
            step=self._present_step(),
            symptom=trouble.symptom,
            loss=trouble.loss,
            loss_scale=min(session.stats(wait=True).loss_scales, default=1.0),
            learning_rates=() if optimizer is None else _rates_of(optimizer),
            rank=find_rank() or 0,
            then=self._then,
            micro_batch=replayed.micro_batch if faults else None,
            micro_batches=replayed.micro_batches,
            faults=len(faults),
            differences=differences,
            obstacle=replayed.obstacle,
            has_stepped=self._has_stepped or self._tape.is_over,
            is_repeated=replayed.is_repeated,
        )
        return self._print_report(record, faults)

    def _repeat(self, session: Session, trouble: Trouble, optimizer: Optimizer | None) -> tuple[Tracer, Replayed]:
        """Repeat a step under a tracer. Return the tracer, which has stopped, and how the repetition went.

        If the last step has made weights inf or NaN, blame that step, and repeat nothing. If the step cannot be
        repeated, `Replayed.obstacle` says why.
        """
        tracer = Tracer(ignore=self._ignore)
        begin = functools.partial(
            tracer.begin_at,
            session,
            self._present_step(),
            smallest_loss=self._troubles.smallest_loss(),
            largest_weight=math.inf if self._largest_weight is None else self._largest_weight,
        )
        try:
            if self._has_stepped:
                return tracer, Replayed(obstacle="a step with a closure changes weights before anything can be seen")
            if get_backward_id() != -1:
                return tracer, Replayed(obstacle="the optimizer steps inside of the backward pass")
            if optimizer is not None and self._has_old_weights(optimizer) and _has_bad_weights(session, optimizer):
                begin()
                tracer.blame_last_step(optimizer)
                return tracer, Replayed(is_repeated=False)
            is_skipped = True if trouble.is_skipped else _IS_SKIPPED[self._then]
            replay = Replay(self._tape, session, tracer)
            with session.observing_all():
                return tracer, replay.run(begin, optimizer, is_skipped=is_skipped)
        finally:
            tracer.stop()

    def _present_step(self) -> int:
        """Return the number of the step that the calls on the tape belong to."""
        return self._step_on_tape if self._tape.is_over else self._count

    def _has_old_weights(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer has stepped, its last step had no trouble, and nothing has written its weights
        since then.
        """
        return self._written.get(id(optimizer)) == _count_writes(optimizer)

    def _print_report(self, record: TroubleRecord, faults: list[FaultRecord]) -> str:
        """Record and print trouble. Return the report.

        Do nothing and return "" if a report about the same place was printed before, or if `_MOST_REPORTS` were.
        """
        # without a fault, the symptom stands for the place
        place: tuple[object, ...] = (record.symptom,)
        if faults:
            origin = faults[0].origin
            place = (origin.site, origin.module, origin.aten)
        if place in self._told or len(self._told) >= _MOST_REPORTS:
            return ""
        self._told.add(place)
        self._records_so_far += [record, *faults]
        shown = []
        if faults:
            shown = [format_fault(faults[0], self.run), *describe_further(faults)]
        text = format_trouble(record, shown, self._describe_flight(faults))
        self.error = NonFiniteError(text, faults[0] if faults else None)
        self._tell(text)
        return text

    def _describe_flight(self, faults: list[FaultRecord]) -> list[str]:
        if self._sampler is None:
            return []
        return describe_flight(self._sampler.records(), faults[0] if faults else None)


def _count_writes(optimizer: Optimizer) -> int:
    """Return the sum of the version counters of an optimizer's weights, which torch raises at each write in place."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    return sum(map(get_version, weights))  # an inference tensor, which has none, cannot be trained


def _rates_of(optimizer: Optimizer) -> tuple[float, ...]:
    return tuple(float(group["lr"]) for group in optimizer.param_groups if "lr" in group)


def _has_bad_weights(session: Session, optimizer: Optimizer) -> bool:
    return not math.isfinite(find_largest_of(_weights_of(session, optimizer)))


def _weights_of(session: Session, optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield the parameters of an optimizer, which may be float32 masters, and the weights of the session's models."""
    for group in optimizer.param_groups:
        yield from group["params"]
    for model in session.models():
        yield from model.parameters()


def _print(text: str) -> None:
    """Print a report to stdout. A full disk or a closed pipe must not end the training."""
    with contextlib.suppress(OSError, ValueError):
        print(wrap_sentences(text), file=sys.stdout, flush=True)


@contextlib.contextmanager
def armed(*, then: Then = "stop", every: int = 1, record: int = 50, ignore: Sequence[str] = ()) -> Iterator[Recording]:
    """Train at full speed in the block. A step that goes wrong is repeated under `trace`, before its weights change.

    With a dynamic loss scale, a step has gone wrong if it is the third skipped step in a row or a later one, or if it
    is skipped at a scale below 1, unless the repetition shows that a smaller scale is enough. Without a dynamic loss
    scale, it has gone wrong if a gradient is not finite. In both cases, it has gone wrong if its loss is not finite; on
    a GPU, losses are read only without a dynamic loss scale. A report is printed to stdout.

    Args:
        then: what follows a step that has gone wrong: "stop" raises NonFiniteError from the call of `step`;
            "skip" lets this step change no weights, unless it has a closure; "go" lets it run, and stops watching if it
            changes weights.
        every: without a dynamic loss scale, look at gradients, and on a GPU at losses, in one step of so many.
        record: record the magnitudes of modules and gradients in one step of so many; 0: in none.
        ignore: names of ops whose values are always accepted, such as `masked_fill`.

    Yields a recording, which is complete when the block ends.

    Raises:
        NonFiniteError: a step has gone wrong, with "stop"; its `fault` is the first fault, or None if none was found.
        SessionError: another recording is in progress.
        ArgumentTypeError, ArgumentValueError: an argument is wrong.
    """
    check_count(every, "every")
    check_count(record, "record", 0)
    check_names(ignore, "ignore")
    if then not in THEN:
        raise ArgumentValueError(f"then={then!r} is not 'stop', 'skip' or 'go': pass one of them")
    recording = Recording(make_empty_run(), [])
    probe = Armed(lambda: _raise(probe), then=then, every=every, record=record, ignore=ignore)
    undo = UndoStack()
    if any(isinstance(watcher, Probe) for watcher in events.watchers):
        raise SessionError("another recording is in progress: leave its block first")
    undo.callback(events.watch(probe))
    try:
        if current.state.session is None or current.state.session.gives_way:
            undo.callback(watch())
        else:
            probe.session_opened(current.require())
        yield recording
    finally:
        probe.stop()
        undo.close()
        if probe.run is not None:
            recording.run, recording.records[:] = probe.run, probe.recording.records


def _raise(probe: Armed) -> NoReturn:
    raise probe.error
