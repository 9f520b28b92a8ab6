"""`Tracer`: looks for the first value that does not fit, through the steps of a run; `trace` does so for a function."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer

from ..errors import ArgumentValueError, NonFiniteError
from ..reporting import find_rank, warn
from ..session import Session
from ..torch_dispatch import get_current_node
from ..training import unscaling
from .fault_text import format_fault
from .faults import FaultFinder, name_value
from .folding import Folding
from .recorder import Recorder, in_block
from .records import FaultRecord, Record, Recording
from .remedies import CASTS, IN_FORWARD, place
from .rules import short
from .runs import check_count, check_function, check_names
from .short_dtypes import LARGEST
from .tensors import find_largest_of, has_nan
from .written import Item

_NEAR = 8.0  # a sibling's value is near to what does not fit if it is smaller by no more than this
_GROWN_LOSS, _GROWN_WEIGHTS = 1e3, 30.0  # grown by such a factor, training has diverged
_REPEATED = 20  # a script that leaves out a loss that is not finite would go on for ever
_FEW = 16  # so many terms of a sum are no reason for large gradients
_LITTLE = 256.0  # a loss scale that leaves little room for small gradients
_UNUSED = "unused"  # in gradients that no optimizer has stepped by yet: a discriminator's, in its generator's pass
_LARGE = 1e15  # nothing that trains has such values


@dataclass
class _Growth:
    """How a loss, or the largest weight, has grown in a run."""

    base: float = math.inf
    last: float = 0.0

    def is_beyond(self, factor: float) -> bool:
        return self.last > factor * max(self.base, 1e-3)


class Tracer(Recorder):
    """Looks at steps `first` up to and without `last`, or up to the first that has a fault.

    A dynamic loss scale that is too large, whose step is skipped, is no fault: it is on its way down.

    Args:
        first, last, on_end: as of `Recorder`.
        underflow, ignore: as of `FaultFinder`.
        counts_skipped: whether `last` counts steps that were skipped; else one more is looked at for each.
        keeps_steps: whether the recording has a record for each step that was looked at.
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
        self._searched: list[FaultRecord] = []
        self._unused: list[FaultRecord] = []
        self._looked_for: int | None = None  # id of the optimizer whose gradients were looked at for a step under way
        self._loss = _Growth()  # since it was smallest
        self._largest_weight = _Growth()  # since the first step
        self._are_weights_finite = False
        self._scale: float | None = None  # of the last `scale_loss` block
        self._begin_step()

    def _begin_step(self) -> None:
        self._is_loss_seen = self._is_loss_bad = self._is_scaled = False
        self._gradients: list[str] = []
        self._are_gradients_bad = False  # those of the optimizer that steps
        self._mended: list[bool] = []  # of each gradient that was bad: whether float32 mends it
        self._skips: list[bool] = []  # of the optimizers whose gradients were bad
        self._of = 0
        self._is_lost = False  # a gradient would not be finite in float32 either
        self._summed = 1.0  # how many times larger a loss is than the mean of its terms
        self._fitting: float | None = None  # the loss scale under which all gradients fit
        self._reaching: dict[str, set[int]] = {"loss": set(), "gradients": set(), "others": set()}

    @property
    def _watched(self) -> Session:
        assert self._session is not None
        return self._session

    def _records(self) -> list[Record]:
        """Return the faults so far, those that are no search for a loss scale first."""
        steps = self._steps if self._keeps_steps else []
        return [*self._faults, *self._finder.faults, *self._searched, *steps]

    @property
    def faults(self) -> list[FaultRecord]:
        """Those of the steps that have ended."""
        return list(self._faults)

    def loss_scaled(self, loss: Tensor, scaled_loss: Tensor) -> None:
        """Look at a loss."""
        super().loss_scaled(loss, scaled_loss)
        if not self.is_recording:
            return
        self._is_loss_seen = self._is_scaled = True
        self._scale = None
        for block in self._watched.gradients.open_blocks():  # the innermost last
            self._scale = block.scaler.known_scale
        assert self._observer is not None
        self._observer.pause()  # to look is no op of the script's
        size = find_largest_of([loss])
        self._observer.go_on()
        if math.isfinite(size):
            self._loss.base = min(self._loss.base, size)
            self._loss.last = size
        else:
            self._is_loss_bad = True
            self._finder.let_in([loss])
        self._reaching["loss"] |= self._finder.find_faults([loss])
        self._summed = max(self._summed, self._finder.find_summed(loss))

    def values_scaled(self) -> None:
        """From now on, gradients in this step may be scaled."""
        self._is_scaled = True

    def _see_fault(self) -> None:
        """Mark a fault in a gradient that the forward pass takes under torch.autocast. End where the same op has given
        a fault again and again, and no loss: the script steps by finite ones.
        """
        first, last = self._finder.faults[0], self._finder.faults[-1]
        if last.phase == "backward" and not self._is_scaled and self._watched.gives_way:
            self._finder.faults[-1] = replace(last, region=IN_FORWARD)
        if self._is_loss_seen or not self.is_recording:
            return
        times = sum(_place_of(one) == _place_of(first) for one in self._finder.faults)
        if times > _REPEATED:
            self._on_end()

    def step_begun(self, optimizer: Optimizer) -> None:
        """Look at the gradients."""
        super().step_begun(optimizer)
        self._looked_for = id(optimizer)
        if self.is_recording:
            self._look_at_gradients([one for group in optimizer.param_groups for one in group["params"]])
            self._look_at_size(optimizer)

    def step_ended(self, optimizer: Optimizer) -> None:
        """Say of the faults of a step what came of them, and end if there is one."""
        if self._looked_for != id(optimizer):  # a step with a closure does not tell of its beginning
            self.step_begun(optimizer)
        self._looked_for = None
        is_skipped = self._watched.is_skipped(optimizer)
        if self.is_recording and not is_skipped:
            self._look_at_weights(optimizer)
        if self._are_gradients_bad:
            self._skips.append(is_skipped)
        if self._is_counted(optimizer) and self.is_recording:
            self._finish_faults(all(self._skips or [is_skipped]))
            if is_skipped and not self._counts_skipped and self._last is not None:
                self._last += 1
        super().step_ended(optimizer)
        self._finder.step = self._count
        if self._faults and self.is_recording:
            self._last = 0
            self.stop()
            self._on_end()

    def _look_at_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Look at the gradients that an optimizer steps by, and at what is left in other gradients of the models."""
        bad = unscaling.find_nonfinite(parameters)
        self._gradients += self._watched.names_of(bad)
        self._are_gradients_bad = bool(bad)
        self._mended += [one.grad is not None and self._finder.repair.holds(one.grad) for one in bad]
        gradients = [one.grad for one in parameters if one.grad is not None]
        self._of += len(gradients)
        self._is_lost |= any(one.grad is not None and self._finder.repair.loses(one.grad) for one in bad)
        self._reaching["gradients"] |= self._finder.find_faults(gradients)
        held = {id(one) for one in gradients}
        others = [one.grad for one in self._weights_of_models() if one.grad is not None and id(one.grad) not in held]
        self._reaching["others"] |= self._finder.find_faults(others)

    def _look_at_size(self, optimizer: Optimizer) -> None:
        size = find_largest_of(self._weights_of(optimizer))
        self._are_weights_finite = math.isfinite(size)
        if self._are_weights_finite:
            if math.isinf(self._largest_weight.base):
                self._largest_weight.base = size
            self._largest_weight.last = size

    def _weights_of(self, optimizer: Optimizer) -> Iterator[Tensor]:
        """Yield what an optimizer steps by, and the weights of models, of which it may hold masters."""
        for group in optimizer.param_groups:
            yield from group["params"]
        yield from self._weights_of_models()

    def _weights_of_models(self) -> Iterator[Tensor]:
        for model in self._watched.models():
            yield from model.parameters()

    def _look_at_weights(self, optimizer: Optimizer) -> None:
        """Enter a fault if a step has made weights that do not fit, of weights and gradients that do."""
        if not self._are_weights_finite or self._gradients or self._finder.faults:
            return
        self._look_at_size(optimizer)
        if self._are_weights_finite:
            return
        bad = next(weight for weight in self._weights_of(optimizer) if not bool(weight.detach().isfinite().all()))
        (name,) = self._watched.names_of([bad])
        master = self._watched.find_master(bad)
        group = _find_group(optimizer, bad)
        fault = FaultRecord(
            step=self._finder.step,
            phase="step",
            value=name_value(has_nan(bad)),
            cause="step",
            module=name.rpartition(".")[0],
            op=type(optimizer).__name__,
            out=short(bad.dtype),
            parameter=name,
            share=int((~bad.detach().isfinite()).sum()) / bad.numel(),
            in_float32=math.inf if master is None else find_largest_of([master]),
            eps=_read_number(group, "eps"),
            lr=_read_number(group, "lr"),
        )
        self._finder.faults.append(fault)

    def _finish_faults(self, is_skipped: bool | None) -> None:
        found, self._finder.faults = self._finder.faults, []
        if not found and self._gradients:
            found = self._unused or [self._make_unseen()]
        facts: dict[str, Any] = {"gradients": tuple(self._gradients), "of": self._of, "skipped": is_skipped}
        self._unused = []
        done: list[FaultRecord] = []
        for number, fault in enumerate(self._add_remedies(found)):
            fault = replace(fault, rank=find_rank() or 0, reach=self._find_reach(number, fault), **facts)
            if fault.reach == _UNUSED:
                self._unused.append(replace(fault, reach=""))
            elif not _is_harmless(replace(fault, cause=found[number].cause)):  # also if it is large: a constant, say
                done.append(fault)
        if not all(self._is_search(fault) for fault in done):
            self._faults += sorted(done, key=self._ends_by_itself)  # the scale comes down, and another remains
        elif done:
            summed = self._summed if self._is_of_sum(_LITTLE) else 0.0
            self._searched.append(replace(done[0], is_search=True, summed=summed))
        self._begin_step()

    def stop(self) -> None:
        """Look no more. What was found in a step that did not end is judged by its loss and gradients, if it came so
        far: a script may change its weights by hand, or end between two steps.
        """
        if not self.is_recording:
            return
        trained = [(weight, weight.grad) for weight in self._weights_of_models() if weight.grad is not None]
        if self._finder.faults and self._is_loss_seen and trained:
            self._gradients, self._of = [], 0  # of all optimizers
            unused = self._reaching["others"]
            used = [weight for weight, grad in trained if unused.isdisjoint(self._finder.find_faults([grad]))]
            self._look_at_gradients(used)
            self._finish_faults(None)
        else:
            self._finder.faults = self._add_remedies(self._finder.faults)
        super().stop()

    def _add_remedies(self, faults: Sequence[FaultRecord]) -> list[FaultRecord]:
        """Enter into the faults of a step what would have made its values fit: all of them need the same."""
        if not faults:
            return []
        needs = self._finder.repair.find_needs()
        items = list(needs.items)
        for item in needs.items:
            items += [item._replace(module=module) for module in self._find_siblings(item)]
        lines = tuple(dict.fromkeys(item.site for item in needs.items if item.site))
        facts = self._place(items)
        beyond = self._finder.repair.beyond or (self._finder.repair.beyond_backward if self._is_lost else "")
        facts.update(beyond=beyond, is_scale_enough=needs.is_scale_enough, lines=lines)
        self._fitting = needs.fitting
        done: list[FaultRecord] = []
        for number, fault in enumerate(faults):
            own = dict(facts, scale=needs.scale)
            if fault.value == "zero":
                own["scale"] = needs.scale_of_zeros
            elif fault.phase == "backward" and self._is_of_sum(1.0):
                own.update(summed=self._summed, scale=needs.fitting)
            if fault.cause == "came in" and fault.parameter and fault.in_float32 == math.inf:
                own |= self._place([_of_weight(fault)])
            is_mended = bool(self._mended) and all(self._mended) and number in self._reaching["gradients"]
            if fault.cause == "mathematics" and is_mended:
                own["cause"] = "precision"
            if self._has_diverged(fault):
                own["cause"] = "divergence"
            done.append(replace(fault, **own))
        return done

    def _is_of_sum(self, scale: float) -> bool:
        """Tell whether the gradients of the step fit under no larger loss scale because the loss is a sum."""
        fitting = self._fitting
        return fitting is not None and fitting <= scale and self._summed >= _FEW and self._summed * fitting >= 1

    def _ends_by_itself(self, fault: FaultRecord) -> bool:
        """Tell whether a fault, taken alone, is one of a dynamic loss scale that is too large."""
        is_dynamic = any(scaler.is_dynamic for scaler in self._watched.scalers)
        if not is_dynamic or fault.phase != "backward" or fault.is_of_rounding or fault.value == "zero":
            return False
        return fault.in_float32 <= LARGEST.get(fault.out, 0.0) * fault.loss_scale

    def _place(self, items: Sequence[Item]) -> dict[str, Any]:
        """Return the fields of a fault that say which ops and modules are to be in float32."""
        return place(items, self._watched.models(), has_lists=self._watched.oplists is not None)

    def _find_siblings(self, item: Item) -> list[str]:
        """Return the modules in which the same line gives values that nearly do not fit, or rounds as it did in one."""
        found: list[str] = []
        for (site, aten, dtype), peaks in self._finder.peaks.items():
            if (site, aten) != (item.site, item.aten):
                continue
            is_of_rounding = item in self._finder.repair.rounding
            for module, largest in peaks.items():
                if is_of_rounding or largest > LARGEST[dtype] / _NEAR:
                    found.append(module)
        return found

    def _has_diverged(self, fault: FaultRecord) -> bool:
        """Tell whether training has diverged: a wider range would only put the end off."""
        if fault.value == "zero" or fault.cause == "came in" or fault.phase == "backward":
            return False
        is_constant = fault.aten in CASTS  # the least number of float32, say
        if fault.out == "bf16" and fault.cause == "precision" and fault.in_float32 > _LARGE and not is_constant:
            return True  # what is beyond bfloat16 is beyond float32, or nearly so: no rounding made it
        if fault.step == 0:
            return False
        if self._loss.is_beyond(_GROWN_LOSS) or self._largest_weight.is_beyond(_GROWN_WEIGHTS):
            return True
        return fault.cause == "mathematics" and fault.largest > _LARGE

    def _find_reach(self, number: int, fault: FaultRecord) -> str:
        """Return what came of a fault; of all, if it was not seen of which of them the loss and the gradients come."""
        if fault.cause == "step":
            return "weights"
        for reach, is_bad in (("gradients", bool(self._gradients)), ("loss", self._is_loss_bad)):
            if is_bad and number in (self._reaching[reach] or (number,)):
                return reach
        return _UNUSED if number in self._reaching["others"] else "swallowed"

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
        """Tell whether a step was skipped over a dynamic loss scale that is too large, or may be: what other code than
        torch's ops wrote into a gradient is only known to be wrong once the scale is as low as it goes.
        """
        bounds = [scaler.min_loss_scale or 0.0 for scaler in self._watched.scalers if scaler.is_dynamic]
        if not bounds or not fault.skipped or fault.phase != "backward" or fault.loss_scale <= 1:
            return False
        lowest = max(1.0, min(bounds))
        is_unseen = fault.cause == "came in" and not (fault.aten and fault.parameter)
        is_above_one = self._fitting is None or self._fitting > 1  # at 1, nothing is left for small gradients
        fits = (fault.scale or 0.0) >= lowest and is_above_one
        return fits or (is_unseen and fault.loss_scale > lowest)

    def _get_scale(self) -> float:
        """Return the scale of the last block; before one, or with a GradScaler, the scale of the session. There is none
        for a gradient that the forward pass takes of what is not scaled.
        """
        if not self._is_scaled and get_current_node() is not None:
            return 1.0
        if self._scale is None:
            return next(iter(self._watched.stats(wait=False).loss_scales), 1.0)
        return self._scale


def _place_of(fault: FaultRecord) -> tuple[str, str, str]:
    return fault.site, fault.module, fault.aten


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


def _of_weight(fault: FaultRecord) -> Item:
    """Return the module that a weight came in as part of."""
    return Item(fault.module, bool(fault.module), fault.op, fault.listed, fault.aten, fault.site, "weights")


def _is_harmless(fault: FaultRecord) -> bool:
    """Tell whether a fault is the script's own, and comes to nothing: the logarithm of a mask, say. A run in float32
    has it too, and the same loss and gradients.
    """
    is_datum = fault.cause == "came in" and not fault.parameter and not {"f16", "bf16"} & {*fault.given}
    is_of_rounding = fault.is_of_rounding and fault.phase == "backward"
    return (is_datum or is_of_rounding or fault.cause == "mathematics") and fault.reach == "swallowed"


@contextlib.contextmanager
def tracing(
    *, underflow: float | None = None, ignore: Sequence[str] = (), keeps_steps: bool = False
) -> Iterator[Tracer]:
    """Look at all ops that run in the block, as `recording` records them; the tracer has what was found.

    The values that ops compute are read, and nothing is changed. On a GPU each op is waited for. Raises SessionError
    where a recording is under way.
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
        underflow: the largest share of an op's values, from 0 to 1, that may be zero in 16 bits but not in float32.
            None: no limit.
        ignore: names of ops whose values are always accepted, such as `masked_fill`.
        on_fault: "raise" raises NonFiniteError; "record" returns the recording, and suppresses errors that the step
            raises because of the fault. Either way the step has run, so weights may hold inf or NaN: make the model
            anew before you train on.

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
            except Exception as raised:  # often of the values that are looked for
                error = raised
            if error is not None or tracer.faults:
                break
    if error is None and not tracer.faults:
        tracer.check_seen()
    recording = tracer.recording
    del tracer  # a notebook keeps the error, with what this function holds, which is not to be a model
    faults = [fault for fault in recording.of(FaultRecord) if not fault.is_search]
    if faults and on_fault == "raise":
        raise NonFiniteError(format_fault(faults[0], recording.run), faults[0]) from error
    if error is not None and not faults:
        raise error
    if error is not None:
        warn(f"the step that has the fault ended with {type(error).__name__}: {error}")
    return recording
