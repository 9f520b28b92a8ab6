"""`Tracer`: looks for the first value that does not fit, through the steps of a run; `trace` does so for a function."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import ArgumentValueError, NonFiniteError
from ..reporting import find_rank
from .fault_text import find_scale, format_fault
from .faults import FaultFinder
from .folding import Folding
from .naming import name_tensors
from .recorder import Recorder, in_block
from .records import FaultRecord, Record, Recording
from .runs import check_count, check_function, check_names
from .tensors import storage_of

_KEPT = 100  # faults that a dynamic loss scale answers for


class Tracer(Recorder):
    """Looks at steps `first` up to and without `last`, or up to the first that has a fault.

    A dynamic loss scale that is too large, whose step is skipped, is no fault: it is on its way down.

    Args:
        first, last, on_end: as of `Recorder`.
        underflow, ignore: as of `FaultFinder`.
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
    ) -> None:
        super().__init__(first, last, on_end)
        self._folding = Folding(keeps_ops=False)  # there may be many steps
        self._finder: FaultFinder = FaultFinder(underflow, ignore, self._find_name, self._get_scale)
        self._faults: list[FaultRecord] = []
        self._searched: list[FaultRecord] = []
        self._looked_for: int | None = None  # id of the optimizer whose gradients were looked at for a step under way
        self._begin_step()

    def _begin_step(self) -> None:
        self._is_loss_bad = False
        self._gradients: list[str] = []
        self._of = 0
        self._reaching: dict[str, set[int]] = {"loss": set(), "gradients": set()}

    def _records(self) -> list[Record]:
        """Return the faults so far, those that are no search for a loss scale first."""
        return [*self._faults, *self._finder.faults, *self._searched]

    @property
    def faults(self) -> list[FaultRecord]:
        """Those of the steps that have ended."""
        return list(self._faults)

    def loss_scaled(self, loss: Tensor, scaled_loss: Tensor) -> None:
        """Look at a loss."""
        super().loss_scaled(loss, scaled_loss)
        if self.is_recording:
            self._is_loss_bad |= not bool(torch.isfinite(loss.detach()).all())
            self._reaching["loss"] |= self._finder.find_faults([loss])

    def step_begun(self, optimizer: Optimizer) -> None:
        """Look at the gradients, and at nothing that looking computes."""
        super().step_begun(optimizer)
        self._look_at_gradients(optimizer)

    def step_ended(self, optimizer: Optimizer) -> None:
        """Say of the faults of a step what came of them, and end if there is one."""
        if self._looked_for != id(optimizer):  # a step with a closure does not tell of its beginning
            self.step_begun(optimizer)
        self._looked_for = None
        if self._is_counted(optimizer) and self.is_recording:
            self._finish_faults(self._session is not None and self._session.is_skipped(optimizer))
        super().step_ended(optimizer)
        self._finder.step = self._count
        if self._faults and self.is_recording:
            self._last = 0
            self.stop()
            self._on_end()

    def _look_at_gradients(self, optimizer: Optimizer) -> None:
        self._looked_for = id(optimizer)
        if not self.is_recording or self._session is None:
            return
        self._gradients += self._session.find_nonfinite_gradients(optimizer)
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        gradients = [one.grad for one in parameters if one.grad is not None]
        self._of += len(gradients)
        self._reaching["gradients"] |= self._finder.find_faults(gradients)

    def _finish_faults(self, is_skipped: bool) -> None:
        found, self._finder.faults = self._finder.faults, []
        if not found and self._gradients:
            found = [self._make_unseen()]
        facts: dict[str, Any] = {"gradients": tuple(self._gradients), "of": self._of, "skipped": is_skipped}
        done = [
            replace(fault, rank=find_rank() or 0, reach=self._find_reach(number), **facts)
            for number, fault in enumerate(found)
        ]
        done = sorted((fault for fault in done if not _is_harmless(fault)), key=_is_aside)
        if done and all(self._is_search(fault) for fault in done):
            self._searched += [replace(done[0], is_search=True)] if len(self._searched) < _KEPT else []
        else:
            self._faults += done
        self._begin_step()

    def _find_reach(self, number: int) -> str:
        """Return what came of a fault; of all, if it was not seen of which of them the loss and the gradients come."""
        for reach, is_bad in (("gradients", bool(self._gradients)), ("loss", self._is_loss_bad)):
            if is_bad and number in (self._reaching[reach] or (number,)):
                return reach
        return "swallowed"

    def _make_unseen(self) -> FaultRecord:
        """Return the record of a gradient that nothing which was seen made what it is."""
        return FaultRecord(
            step=self._count,
            phase="backward",
            value="inf or NaN",
            cause="came in",
            parameter=self._gradients[0],
            loss_scale=self._get_scale(),
        )

    def _is_search(self, fault: FaultRecord) -> bool:
        assert self._session is not None
        is_dynamic = any(scaler.is_dynamic for scaler in self._session.scalers)
        return bool(is_dynamic and fault.skipped and (find_scale(fault) or 0.0) >= 1.0)

    def _find_name(self, storage: int) -> str:
        models: list[nn.Module] = [] if self._session is None else self._session.models()
        return next((name for name, tensor in name_tensors(models) if storage_of(tensor) == storage), "")

    def _get_scale(self) -> float:
        return max(self._session.stats(wait=False).loss_scales, default=1.0) if self._session is not None else 1.0


def _is_harmless(fault: FaultRecord) -> bool:
    """Tell whether a fault is the script's own, and comes to nothing: the logarithm of a mask, say. A run in float32
    has it too, and the same loss and gradients.
    """
    is_datum = fault.cause == "came in" and not fault.parameter and not {"f16", "bf16"} & {*fault.given}
    return (is_datum or fault.cause == "mathematics") and fault.reach == "swallowed"


def _is_aside(fault: FaultRecord) -> bool:
    """Tell whether a fault is in gradients that nobody steps by: those of the discriminator in a generator's pass."""
    return fault.phase == "backward" and fault.reach == "swallowed"


@contextlib.contextmanager
def tracing(*, underflow: float | None = None, ignore: Sequence[str] = ()) -> Iterator[Tracer]:
    """Look at all ops that run in the block, as `recording` records them; the tracer has what was found.

    The values that ops compute are read, and nothing is changed. On a GPU each op is waited for. Raises SessionError
    where a recording is under way.
    """
    tracer = Tracer(underflow=underflow, ignore=ignore)
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
    """Call `step` so many times, or until a value does not fit, and say where that came from.

    `step` is a function without arguments that trains for one step: forward, backward, `optimizer.step()`.

    Args:
        step: is called.
        steps: how often at most.
        underflow: the share of values, from 0 to 1, of an op in 16 bits that may be zero where float32 holds them;
            None: all.
        ignore: names of ops whose values may be what they are, such as `masked_fill`.
        on_fault: what to do about one; with "record", what the step raises over it is not raised.

    Raises:
        NonFiniteError: a value does not fit; its `fault` is the record.
        SessionError: nothing was seen to run, or a recording is under way.
        ArgumentTypeError, ArgumentValueError: an argument is none of these.
    """
    check_function(step, "step")
    check_count(steps, "steps")
    check_names(ignore, "ignore")
    if underflow is not None and not (isinstance(underflow, (int, float)) and 0 <= underflow <= 1):
        raise ArgumentValueError(f"underflow={underflow!r} is a share of values: pass a number from 0 to 1, or None")
    if on_fault not in ("raise", "record"):
        raise ArgumentValueError(f"on_fault={on_fault!r} is neither 'raise' nor 'record': pass one of them")
    error: Exception | None = None
    with tracing(underflow=underflow, ignore=ignore) as tracer:
        for _ in range(steps):
            try:
                step()
            except Exception as raised:  # often of the values that are looked for
                error = raised
            if error is not None or tracer.faults:
                break
    recording = tracer.recording
    faults = [fault for fault in recording.of(FaultRecord) if not fault.is_search]
    if faults and on_fault == "raise":
        raise NonFiniteError(format_fault(faults[0], recording.run), faults[0]) from error
    if error is not None and not faults:
        raise error
    return recording
