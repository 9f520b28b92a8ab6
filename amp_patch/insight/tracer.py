"""`Tracer`: looks for the first *fault* of a run: a value that does not fit into its dtype, such as inf. `trace` runs a
function under a tracer.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer

from ..errors import ArgumentValueError, NonFiniteError
from ..reporting import warn
from ..session import Session
from ..torch_dispatch import get_current_node, leave_mode
from ..training import unscaling
from .fault_record import Cause, Effect, Evidence, FaultRecord, Origin, Phase, RegionKind, Value
from .fault_text import format_fault
from .faults import FaultFinder, name_value, none_if_inf
from .folding import Folding
from .quiet.watch import QuietWatch
from .raised_record import RaisedRecord
from .recorder import Recorder, describe_run, in_block, note_raised
from .recordings import Record, Recording
from .rules import short
from .runs import check_count, check_function, check_names
from .step_faults import SeenInStep, StepFaults
from .tensors import find_largest_of, has_nan

_GROWN_LOSS, _GROWN_WEIGHTS = 1e3, 30.0
"""A training has diverged if its loss, or its largest weight, has grown to more than this many times its old value."""
_REPEATED = 20
"""A run ends if the op of its first fault has given more faults than this before any loss went backward."""


@dataclass
class _Growth:
    """How a loss, or the largest weight, has grown in a run: from `base` (inf if unknown) to `last`."""

    base: float = math.inf
    last: float = 0.0

    def is_beyond(self, factor: float) -> bool:
        """Return whether `last` is more than `factor` times `base`. A base below 1e-3 counts as 1e-3."""
        return self.last > factor * max(self.base, 1e-3)


class Tracer(Recorder):
    """Looks at the steps from `first` up to, but not including, `last`, or up to the first step that has a fault.

    A step that is skipped because a dynamic loss scale is still too large counts as a step without a fault.

    Args:
        first, last, on_end: as for `Recorder`.
        underflow, ignore: as for `FaultFinder`.
        counts_skipped: whether `last` counts skipped steps. If False, each skipped step moves `last` on by one.
        keeps_steps: whether the recording has a record for each step.
    """

    ends_alone = True

    def __init__(
        self,
        first: int = 0,
        last: int | None = None,
        on_end: Callable[[], None] = lambda: None,
        *,
        underflow: float | None = None,
        ignore: Sequence[str] = (),
        counts_skipped: bool = True,
        keeps_steps: bool = False,
    ) -> None:
        super().__init__(first, last, on_end)
        self._counts_skipped = counts_skipped
        self._keeps_steps = keeps_steps
        self._folding = Folding(keeps_ops=False)  # there may be many steps
        self._finder: FaultFinder = FaultFinder(underflow, ignore, self._get_scale, self._see_fault)
        self._faults: list[FaultRecord] = []
        self._searches: list[FaultRecord] = []  # the first fault of each step that a too large scale skipped
        self._unused: list[FaultRecord] = []  # faults in gradients that an optimizer may use in its next step
        self._has_stepped = False  # while `step_begun` is called late, for a step that is over: see `step_ended`
        self._stepping: int | None = None  # id of the optimizer whose step has begun
        self._loss = _Growth()  # from the smallest loss to the last one
        self._largest_weight = _Growth()  # from the first step to the last one
        self._are_weights_finite = False
        self._scale: float | None = None  # the loss scale of the last `scale_loss` block
        self._seen = SeenInStep()
        self._quiet: QuietWatch = QuietWatch(lambda: self._watched, self._find_module)

    @property
    def _watched(self) -> Session:
        assert self._session is not None
        return self._session

    def _records(self) -> list[Record]:
        """Return all records so far, the faults first."""
        steps = self._steps if self._keeps_steps else []
        return [
            *self._faults,
            *self._finder.faults,
            *self._searches,
            *self._quiet.records(),
            *self._finder.findings.records(),
            *self._misused,
            *steps,
            *self._raised,
        ]

    @property
    def faults(self) -> list[FaultRecord]:
        """The complete faults. Faults of a step that has not ended are left out."""
        return list(self._faults)

    @property
    def searches(self) -> list[FaultRecord]:
        """The first fault of each step that was skipped while a dynamic loss scale was, or may have been, too large."""
        return list(self._searches)

    def loss_scaled(self, loss: Tensor, scaled_loss: Tensor) -> None:
        """Note whether a loss is finite, how it has grown, and which faults have reached it."""
        super().loss_scaled(loss, scaled_loss)
        if not self.is_recording:
            return
        self._seen.is_loss_seen = self._seen.is_scaled = True
        self._scale = None
        for block in self._watched.gradients.open_blocks():  # the innermost comes last, and its scale stays
            self._scale = block.scaler.known_scale
        assert self._observer is not None
        self._observer.pause()  # the ops below are not the script's
        size = find_largest_of([loss])
        self._observer.go_on()
        if math.isfinite(size):
            # growth is measured from the smallest loss so far
            self._loss.base = min(self._loss.base, size)
            self._loss.last = size
        else:
            self._seen.is_loss_bad = True
            self._finder.enter_mask_faults([loss])
        self._seen.reaching_loss |= self._finder.storages.find_faults([loss])
        self._seen.summed = max(self._seen.summed, self._finder.storages.find_summed(loss))

    def values_scaled(self) -> None:
        """Note that gradients of this step may carry the loss scale from now on."""
        self._seen.is_scaled = True

    def _see_fault(self) -> None:
        """Called for each new fault. End the run if there are too many and still no loss.

        A script that skips losses that are not finite may run for ever without a step. So count the faults of the op
        that had the first one, as long as no loss goes backward.
        """
        first, last = self._finder.faults[0], self._finder.faults[-1]
        # A backward op before any loss means that the forward pass calls torch.autograd.grad. In a script without
        # `amp.initialize` (`gives_way`), torch.autocast casts the ops of this gradient, and op lists do not reach them.
        if last.is_in_backward and not self._seen.is_scaled and self._watched.gives_way:
            marked = replace(last.origin, region=RegionKind.GRADIENT_IN_FORWARD)
            self._finder.faults[-1] = replace(last, origin=marked)
        if self._seen.is_loss_seen or not self.is_recording:
            return
        times = sum(_place_of(fault) == _place_of(first) for fault in self._finder.faults)
        if times > _REPEATED:
            self._on_end()

    def step_begun(self, optimizer: Optimizer) -> None:
        """Look at the gradients and the weights before the optimizer uses them."""
        super().step_begun(optimizer)
        self._stepping = id(optimizer)
        if self.is_recording:
            self._look_at_gradients([weight for group in optimizer.param_groups for weight in group["params"]])
            self._look_at_size(optimizer)
            self._quiet.begin_step(optimizer, has_stepped=self._has_stepped)

    def step_ended(self, optimizer: Optimizer) -> None:
        """Finish the faults of the step, and end the run if there are any."""
        if self._stepping != id(optimizer):  # some steps with a closure report only their end
            self._has_stepped = True
            self.step_begun(optimizer)
            self._has_stepped = False
        self._stepping = None
        if self.is_recording:
            self._quiet.end_step(optimizer, self._count + 1)
        is_skipped = self._watched.is_skipped(optimizer)
        if self.is_recording and not is_skipped:
            self._look_at_weights(optimizer)
        if self._seen.are_gradients_bad:
            self._seen.skips.append(is_skipped)
        if self._is_counted(optimizer) and self.is_recording:
            self._finish_faults(all(self._seen.skips or [is_skipped]))
            if is_skipped and not self._counts_skipped and self._last is not None:
                self._last += 1
        super().step_ended(optimizer)
        self._finder.step = self._finder.findings.step = self._count
        self._quiet.set_step(self._count)
        if self._faults and self.is_recording:
            # No session that opens later is to be observed.
            self._last = 0
            self.stop()
            self._on_end()

    # ---- a step that is repeated -------------------------------------------------------------------------------------

    def begin_at(self, session: Session, step: int, *, smallest_loss: float, largest_weight: float) -> None:
        """Look at the ops of one step, as if all earlier steps had been looked at.

        Args:
            step: the number of the step, from 0.
            smallest_loss: the smallest loss so far; inf if unknown.
            largest_weight: the largest magnitude of a weight at the start; inf if unknown.
        """
        self._count = self._finder.step = self._finder.findings.step = step
        self._quiet.set_step(step)
        self._loss.base, self._largest_weight.base = smallest_loss, largest_weight
        self.run = describe_run(session)
        self._session = session
        self._observe(session)

    def set_scale(self, scale: float) -> None:
        """Set the loss scale of the loss that goes backward next."""
        self._scale = scale

    @property
    def fault_count(self) -> int:
        """The number of faults in this step so far. Some of these faults may prove harmless."""
        return len(self._finder.faults)

    def blame_last_step(self, optimizer: Optimizer) -> None:
        """Add a fault of the previous step: the optimizer has written weights that do not fit."""
        self._finder.step -= 1
        self._finder.faults = [self._make_of_step(optimizer)]
        self._finish_faults(None)

    def judge_step(self, optimizer: Optimizer | None, *, is_skipped: bool | None) -> None:
        """Complete the faults of a repeated step.

        Args:
            optimizer: its gradients are looked at; it takes no step. None ends the run instead, as `stop` does.
            is_skipped: whether the step was skipped; None if that is not known.
        """
        if optimizer is None:
            self.stop()
            return
        super().step_begun(optimizer)
        self._look_at_gradients([weight for group in optimizer.param_groups for weight in group["params"]])
        self._look_at_size(optimizer)
        self._finish_faults(is_skipped)

    # ---- gradients and weights ---------------------------------------------------------------------------------------

    def _look_at_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Look at the gradients that an optimizer uses, and at the gradients of other parameters of the models."""
        seen, finder = self._seen, self._finder
        bad = unscaling.find_nonfinite(parameters)
        bad_gradients = [weight.grad for weight in bad if weight.grad is not None]
        seen.gradients += self._watched.names_of(bad)
        seen.are_gradients_bad = bool(bad)
        seen.mended += map(finder.repair.holds, bad_gradients)
        seen.is_lost |= any(map(finder.repair.loses, bad_gradients))
        finder.gradients.check_step(parameters, self._watched.names_of)
        gradients = [weight.grad for weight in parameters if weight.grad is not None]
        seen.total += len(gradients)
        seen.reaching_gradients |= finder.storages.find_faults(gradients)
        used = {id(gradient) for gradient in gradients}
        others = [weight.grad for weight in self._weights_of_models() if weight.grad is not None]
        unused = [gradient for gradient in others if id(gradient) not in used]
        seen.reaching_unused |= finder.storages.find_faults(unused)

    def _look_at_size(self, optimizer: Optimizer) -> None:
        size = find_largest_of(self._weights_of(optimizer))
        self._are_weights_finite = math.isfinite(size)
        if self._are_weights_finite:
            if math.isinf(self._largest_weight.base):
                self._largest_weight.base = size
            self._largest_weight.last = size

    def _weights_of(self, optimizer: Optimizer) -> Iterator[Tensor]:
        """Yield the parameters of an optimizer, which may be master weights, and the parameters of the models."""
        for group in optimizer.param_groups:
            yield from group["params"]
        yield from self._weights_of_models()

    def _weights_of_models(self) -> Iterator[Tensor]:
        for model in self._watched.models():
            yield from model.parameters()

    def _look_at_weights(self, optimizer: Optimizer) -> None:
        """Add a fault if weights do not fit after a step, although weights and gradients fitted before it."""
        # anything that did not fit before the step is the reason, and not the step
        if not self._are_weights_finite or self._seen.gradients or self._finder.faults:
            return
        self._look_at_size(optimizer)
        if not self._are_weights_finite:
            self._finder.faults.append(self._make_of_step(optimizer))

    def _make_of_step(self, optimizer: Optimizer) -> FaultRecord:
        """Return the fault of a step of an optimizer after which a weight does not fit."""
        bad = next(weight for weight in self._weights_of(optimizer) if not bool(weight.detach().isfinite().all()))
        (name,) = self._watched.names_of([bad])
        master = self._watched.find_master(bad)
        group = _find_group(optimizer, bad)
        origin = Origin(
            module=name.rpartition(".")[0] or None,
            op=type(optimizer).__name__,
            out=short(bad.dtype),
            parameter=name or None,
            share=int((~bad.detach().isfinite()).sum()) / bad.numel(),
        )
        evidence = Evidence(
            in_float32=None if master is None else none_if_inf(find_largest_of([master])),
            eps=_read_number(group, "eps"),
            lr=_read_number(group, "lr"),
        )
        value = name_value(has_nan(bad))
        return FaultRecord(self._finder.step, Phase.STEP, value, Cause.STEP, origin=origin, evidence=evidence)

    def _finish_faults(self, is_skipped: bool | None) -> None:
        """Complete the faults of a step, and begin the next."""
        faults, self._finder.faults = self._finder.faults, []
        if not faults and self._seen.gradients:
            # The gradients may be from an earlier step in which no optimizer used them. Then the faults of that step
            # explain them.
            faults = self._unused or [self._make_unseen()]
        finished = self._step_faults().finish(faults, is_skipped=is_skipped)
        self._faults += finished.faults
        self._searches += finished.searches
        # the effect of these faults is not known until an optimizer uses the gradients
        self._unused = [replace(fault, effect=Effect()) for fault in finished.unused]
        self._seen = SeenInStep()

    def note_raised(self, error: BaseException) -> RaisedRecord | None:
        """Like `Recorder.note_raised`, but return None for a number that does not fit if a fault on the same line
        explains it. torch raises "value cannot be converted to type ... without overflow" for such a number.
        """
        leave_mode(self._quiet)  # an exception in an optimizer's step leaves this mode on
        record = super().note_raised(error)
        if record is not None and record.cause.is_of_scaler:
            # GradScaler raises for wrong calls, never for an overflow, so faults in gradients do not explain this
            self._finder.faults = [fault for fault in self._finder.faults if not fault.is_in_backward]
        if record is not None and "without overflow" in record.message:
            sites = [fault.origin.site for fault in (*self._faults, *self._finder.faults)]
            if record.site in sites:  # the fault says which number does not fit
                self._raised.remove(record)
                return None
        return record

    def _is_before_window(self) -> bool:
        return False  # unlike a plain `Recorder`, a tracer observes no step before `first`

    def _find_module(self) -> str:
        return "" if self._observer is None else self._observer.find_module()

    def _step_faults(self) -> StepFaults:
        has_grown = self._loss.is_beyond(_GROWN_LOSS) or self._largest_weight.is_beyond(_GROWN_WEIGHTS)
        return StepFaults(self._watched, self._finder, self._seen, has_grown=has_grown)

    def stop(self) -> None:
        """Stop looking. Complete the faults of a step that has not ended, by its loss and gradients so far.

        A step does not end if the script ends within it, or changes its weights without an optimizer.
        """
        if not self.is_recording:
            super().stop()
            leave_mode(self._quiet)
            return
        trained = [(weight, weight.grad) for weight in self._weights_of_models() if weight.grad is not None]
        if self._finder.faults and self._seen.is_loss_seen and trained:
            self._seen.gradients, self._seen.total = [], 0  # `_look_at_gradients` fills these again
            unused, storages = self._seen.reaching_unused, self._finder.storages
            used = [weight for weight, gradient in trained if unused.isdisjoint(storages.find_faults([gradient]))]
            self._look_at_gradients(used)
            self._finish_faults(None)
        else:
            self._finder.faults = self._step_faults().add_fixes(self._finder.faults)
        self._quiet.end_step(None, self._count)
        super().stop()

    def _make_unseen(self) -> FaultRecord:
        """Return the record of a gradient that is not finite although no op that was seen made it so."""
        return FaultRecord(
            self._count,
            Phase.BACKWARD,
            Value.INF_OR_NAN,
            Cause.CAME_IN,
            origin=Origin(parameter=self._seen.gradients[0], came_in=True),
            evidence=Evidence(loss_scale=self._get_scale()),
        )

    def _get_scale(self) -> float:
        """Return the loss scale of the last `scale_loss` block. Without one, return the scale of the session, such as
        the scale of a GradScaler.

        Return 1 for torch.autograd.grad in a forward pass, before the loss is scaled.
        """
        if not self._seen.is_scaled and get_current_node() is not None:
            return 1.0
        if self._scale is None:
            return next(iter(self._watched.stats(wait=False).loss_scales), 1.0)
        return self._scale


def _place_of(fault: FaultRecord) -> tuple[str | None, ...]:
    return fault.origin.site, fault.origin.module, fault.origin.aten


def _find_group(optimizer: Optimizer, tensor: Tensor) -> dict[str, Any]:
    """Return the parameter group that holds a tensor, else the first."""
    for group in optimizer.param_groups:
        if any(held is tensor for held in group["params"]):
            return group
    first: dict[str, Any] = optimizer.param_groups[0]
    return first


def _read_number(group: dict[str, Any], name: str) -> float | None:
    value = group.get(name)
    if value is None:
        return None
    return float(value)


@contextlib.contextmanager
def tracing(
    *, underflow: float | None = None, ignore: Sequence[str] = (), keeps_steps: bool = False
) -> Iterator[Tracer]:
    """Context manager: look at the ops that run in the block. The tracer that it yields has the faults.

    Most ops in the steps of optimizers are left out. The values of the ops are read, and nothing is changed. On a GPU
    the host waits for each op. Raises SessionError if a recording is in progress.
    """
    tracer = Tracer(underflow=underflow, ignore=ignore, keeps_steps=keeps_steps)
    with in_block(tracer):
        yield tracer


def trace(
    step: Callable[[], Any],
    *,
    steps: int = 1,
    underflow: float | None = None,
    ignore: Sequence[str] = (),
    on_fault: Literal["raise", "record"] = "raise",
) -> Recording:
    """Call `step` until a value does not fit into its dtype, and say which op produced the value.

    `print` shows the returned recording: the faults, or the number of steps in which every value fits.

    Args:
        step: a function without arguments that trains for one step: forward, backward, `optimizer.step()`.
        steps: the largest number of calls.
        underflow: the largest share, from 0 to 1, of an op's values that may become zero in 16 bits. Values that are
            zero in float32 do not count. None: no limit.
        ignore: names of ops whose values are accepted, such as `masked_fill`.
        on_fault: what follows a fault: "raise" raises NonFiniteError, "record" returns the recording. An error that
            `step` raises propagates if there is no fault; with "record", only if the recording does not explain it. In
            each case the step has run, so weights may hold inf or NaN: make the model anew before you train on.

    Raises:
        NonFiniteError: a value does not fit; its `fault` is the record.
        SessionError: `step` runs no ops, it ends the session by calling `initialize`, or another recording is in
            progress.
        ArgumentTypeError, ArgumentValueError: an argument is wrong.
    """
    check_function(step, "step")
    check_count(steps, "steps")
    check_names(ignore, "ignore")
    if underflow is not None and not (isinstance(underflow, (int, float)) and 0 <= underflow <= 1):
        raise ArgumentValueError(f"underflow={underflow!r} is a share of values: pass a number from 0 to 1, or None")
    if on_fault not in ("raise", "record"):
        raise ArgumentValueError(f"on_fault={on_fault!r} is neither 'raise' nor 'record': pass one of them")
    error: Exception | None = None
    with tracing(underflow=underflow, ignore=ignore, keeps_steps=True) as tracer:
        for _ in range(steps):
            try:
                step()
            except Exception as raised:  # often because of the fault
                error = raised
                note_raised(tracer, raised)
            if error is not None or tracer.faults:
                break
    if error is None and not tracer.faults:
        tracer.check_seen()
    recording = tracer.recording
    del tracer  # a notebook keeps the error and the locals of this frame, and the tracer holds models
    faults = recording.faults
    if faults and on_fault == "raise":
        raise NonFiniteError(format_fault(faults[0], recording.run), faults[0]) from error
    if error is not None and not faults and (on_fault == "raise" or not recording.raised):
        raise error
    if error is not None and faults:
        warn(f"the step that has the fault ended with {type(error).__name__}: {error}")
    return recording
