"""`FaultFinder`: finds values that do not fit, the op that made each of them, and the evidence for its cause.

A value fits if it is finite. If the result of an op does not fit, its inputs are read:

* If they fit, the op itself made the inf or NaN. This is a *fault*. As evidence, the op is computed again in float32.
* If an input does not fit, and an earlier fault explains it, the op only passes the value on. That adds no fault.
* If no op that was seen made the input, the input itself is the fault, unless it may be a mask with -inf.

From a fault on, `Repair` computes the values that depend on it as if float32 had been used. With `underflow`, a result
in which 16 bits have made many zeros is a fault, too.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..casting import cast_tree
from ..dtypes import LOW_DTYPES
from ..session import Session, current
from ..torch_dispatch import clone, get_node_number, is_random
from .causes import Course, diagnose
from .fault_record import Cause, Evidence, FaultRecord, Origin, Phase, RegionKind, Value
from .folding import OpCall
from .naming import ModuleStack, name_tensors
from .ops import Input, Op, Overload, compute_in_float32, read_inputs
from .quiet.findings import Findings
from .quiet.gradients import GradientWatch
from .quiet.values import ValueWatch
from .recent import Blame, Recent
from .repair import Repair
from .rules import short
from .sites import is_backward_of_user
from .storages import Storages, is_of_scaled
from .tensors import (
    has_nan,
    is_finite,
    read_largest,
    read_largest_number,
    storage_of,
    tensors_in,
)
from .written import Written, find_trail, shorten_node

_TAKES_MASKS = ("_softmax", "_log_softmax", "_safe_softmax", "logsumexp", "_scaled_dot_product_")
"""Beginnings of the names of ops to which scripts pass masks with -inf. Some return NaN if a whole row is -inf."""


class _Output(NamedTuple):
    """A result of an op.

    Attributes:
        op: the op.
        position: the position of the result among the op's floating results.
        tensor: the result.
        written: the record of the result.
        forward: in a backward pass, the record of the forward op whose gradient is computed; None if unknown.
    """

    op: Op
    position: int
    tensor: Tensor
    written: Written
    forward: Written | None

    @property
    def has_nan(self) -> bool:
        return math.isnan(self.written.largest)


class FaultFinder:
    """Looks at the ops of a step, in order. It reads values on the host, so on a GPU the host waits for nearly each op.

    Args:
        underflow: the largest share (0 to 1) of a result that may become zero in 16 bits without a fault. Values that
            are zero in float32 do not count. None: no limit.
        ignore: names of ops, without a prefix, whose results are accepted.
        get_scale: returns the loss scale in force.
        on_fault: called after each fault.

    Attributes:
        step: the number of the step.
        faults: the faults of this step so far.
        peaks: the largest finite magnitude of 16-bit outputs in the forward pass of this step, as
            `peaks[site, op, dtype][module]`. It is inf for a line where `expect` was called.
    """

    def __init__(
        self,
        underflow: float | None,
        ignore: Iterable[str],
        get_scale: Callable[[], float],
        on_fault: Callable[[], None],
    ) -> None:
        self._underflow = underflow
        self._ignore = frozenset(ignore)
        self._get_scale = get_scale
        self._on_fault = on_fault
        self.step = 0
        self.faults: list[FaultRecord] = []
        self.storages = Storages()
        self.repair = Repair(underflow, get_scale, self.storages.is_scaled)
        self.findings = Findings()
        self.gradients = GradientWatch(self.findings)
        self.peaks: dict[tuple[str, str, str], dict[str, float]] = {}
        self._recent = Recent()
        self.values = ValueWatch(self.storages, self._recent.find, self.findings)
        self._by_node: dict[int, Written] = {}  # ops of the forward pass, by the number of their autograd node

    def watch(self, session: Session, running: ModuleStack) -> None:
        """Take names, masters and models from a session, and the running modules from a stack."""
        self._session = session
        self._running = running
        self.findings.get_models = session.models

    def end_step(self) -> None:
        """Forget the ops of the step."""
        self.storages.end_step()
        self._recent.clear()
        self._by_node.clear()
        self.values.end_step()
        self.repair = Repair(self._underflow, self._get_scale, self.storages.is_scaled)
        self.peaks.clear()

    def prepare(self, overload: Overload, args: Sequence[Any]) -> Sequence[Any]:
        """Return the arguments of an op, with copies of the tensors that the op reads and then changes in place."""
        written = overload.written
        # Foreach and fused ops, and ops that are not of aten (`is_in_bulk`), are never computed a second time, so they
        # need no copies.
        if not written or overload.is_overwriting or overload.is_in_bulk:
            return args
        # An input that is a view of a written tensor changes with it, so it is copied as well.
        targets = [args[index] for index in written if index < len(args)]
        storages = {storage_of(tensor) for tensor in tensors_in(targets)}
        copied: Sequence[Any] = cast_tree(
            args, lambda tensor: clone(tensor) if storage_of(tensor) in storages else tensor
        )
        return copied

    def look(self, op: Op, call: OpCall | None, number: int | None) -> None:
        """Look at the results of an op, and add their faults.

        `call` is the call that the op is part of; None for an op of amp_patch itself. `number` is the number of the
        autograd node that the op made; None if none is known.
        """
        overload = op.overload
        node, is_of_user, forward = "", False, None
        if op.node is not None:
            node, is_of_user = op.node.name(), is_backward_of_user(op.node)
            forward = None if is_of_user else self._by_node.get(get_node_number(op.node))
        outputs = op.floating_results()
        # An op in place that gives no floating tensor may write into the memory of one: `x.view(torch.int32).add_(1)`.
        if overload.written and not outputs:
            for tensor in op.outputs():
                self.storages.forget(tensor)
        if overload.is_in_bulk:
            self.storages.pass_on(op, node, outputs)
            return
        parents = self.storages.find_parents(op)
        if overload.has_one_output:
            outputs = outputs[:1]
        made = [self._describe(op, tensor, node, parents, call) for tensor in outputs]
        # a `backward` that the user wrote is code of the script: its ops can be made to run in float32
        if is_of_user:
            for tensor, written in zip(outputs, made, strict=True):
                written.is_low = tensor.dtype in LOW_DTYPES
        if number is not None and forward is not None:
            # With create_graph=True, a node of the backward pass belongs to the op whose gradient it computes.
            self._by_node[number] = forward
        elif number is not None and made:
            self._by_node[number] = made[0]
        is_bad = not all(math.isfinite(written.largest) for written in made)
        if is_bad or self._underflow is not None or self.repair.is_under_way:
            with current.without_casts():  # the ops below read values, and no list may act on them
                # before the checks, because `follow` drops old twins of the outputs, and a check may make new ones
                self.repair.follow(op, call, made, forward)
                for index, (tensor, written) in enumerate(zip(outputs, made, strict=True)):
                    self._check(_Output(op, index, tensor, written, forward), call)
        for tensor, written in zip(outputs, made, strict=True):
            self.storages.keep(tensor, written)
        if call is not None and made:
            self._recent.keep(op, made[0], is_backward=call.phase == "backward")
        if call is not None:
            self._look_for_quiet(op, call, outputs, made)

    def _look_for_quiet(self, op: Op, call: OpCall, outputs: Sequence[Tensor], made: Sequence[Written]) -> None:
        """Look at an op for quiet losses: values that 16 bits make wrong, but not inf or NaN."""
        with current.without_casts():
            if call.phase == "forward":
                self.values.look(op, call, made)
            elif call.phase == "backward":
                self.gradients.look(op, call, outputs, made)

    def expect(self, op: Op, call: OpCall, low: torch.dtype, modules: Iterable[str]) -> None:
        """Set the peak of an op's line to inf in these modules, for an op that torch refuses to run in 16 bits."""
        peaks = self.peaks.setdefault((call.site.place, op.overload.name, short(low)), {})
        peaks.update(dict.fromkeys(modules, math.inf))

    def enter_mask_faults(self, tensors: Iterable[Tensor]) -> None:
        """Add the faults of inputs that seemed to be masks, if their inf or NaN has reached these tensors: then they
        were no masks.
        """
        for tensor in tensors:
            known = self.storages.find(tensor)
            if known is not None and known.mask_fault is not None and not known.is_known:
                self._add_and_note(known, known.mask_fault)

    def _describe(self, op: Op, output: Tensor, node: str, parents: Sequence[Written], call: OpCall | None) -> Written:
        """Return the record of an output. Outside of the backward pass, add it to `repair.made`. For a 16-bit output in
        the forward pass of a module, update `peaks`.
        """
        written = Written(op.overload.name, node, read_largest(output), parents)
        written.size = output.untyped_storage().nbytes()
        if call is None or call.phase == "backward":
            # A gradient without parents begins the backward pass. It is taken to carry the loss scale.
            written.is_scaled = not parents or any(map(is_of_scaled, parents))
            return written
        is_low = output.dtype in LOW_DTYPES
        written.describe(op, call, self._running.module_here() is not None, is_low)
        written.summed = self.storages.compute_summed(op, output)
        self.repair.made.append(written)
        if is_low and call.phase == "forward" and call.module:
            peaks = self.peaks.setdefault((call.site.place, op.overload.name, short(output.dtype)), {})
            peak = peaks.setdefault(call.module, 0.0)
            if math.isfinite(written.largest):  # else the value may come from another module
                peaks[call.module] = max(peak, written.largest)
        return written

    def _find_name(self, storage: int) -> str:
        """Return the name of the parameter, buffer or gradient in a storage, "" for another tensor."""
        for name, tensor in name_tensors(self._session.models()):
            if storage_of(tensor) == storage:
                return name
        return ""

    def _find_master(self, storage: int) -> Tensor | None:
        """Return the float32 master of the parameter in a storage, None if there is none."""
        for model in self._session.models():
            for weight in model.parameters():
                if storage_of(weight) == storage:
                    return self._session.find_master(weight)
        return None

    # ---- values that do not fit --------------------------------------------------------------------------------------

    def _check(self, output: _Output, call: OpCall | None) -> None:
        if not math.isfinite(output.written.largest):
            self._check_nonfinite(output, call)
        elif self._underflow is not None and call is not None:
            self._check_zeros(output, call, self._underflow)

    def _check_nonfinite(self, output: _Output, call: OpCall | None) -> None:
        """Find out where an inf or NaN in an output comes from. Add a fault if it needs one: no earlier fault explains
        it, the op is not accepted, and the input seems to be no mask.
        """
        inputs = read_inputs(output.op)
        bad_inputs = [given for given in inputs if not math.isfinite(read_largest(given.tensor))]
        # for each of them, the record of the op that wrote it, or None
        sources = [self.storages.find_at(given.storage, given.tensor.nbytes) for given in bad_inputs]

        # 1. Is an input explained by an earlier fault? Then so is the output.
        explained = [source for source in sources if source is not None and source.is_known]
        if explained:
            output.written.explain_by(explained)
            return
        if call is None or self._is_accepted(output, call):
            return

        # 2. Has an input come in: is it inf or NaN although no op that was seen made it so? It is the fault, unless it
        # may be a mask. For a mask, a fault is kept with the output, and added only if the mask proves to be none.
        pairs = list(zip(bad_inputs, sources, strict=True))
        for given, source in pairs:
            if not _is_from_op(source) and not self._is_mask(given):
                self._add_came_in(output, call, given)
                return
        self._inherit_mask_fault(output, call, pairs)

        # 3. Did the op itself make NaN, or inf from finite inputs? If it made NaN from an input that seemed to be a
        # mask, and is no op that takes masks, the input is the fault.
        is_nan_made_here = output.has_nan and not any(has_nan(given.tensor) for given in bad_inputs)
        mask_fault = output.written.mask_fault
        if is_nan_made_here and mask_fault is not None and not output.op.overload.name.startswith(_TAKES_MASKS):
            self._add_and_note(output.written, mask_fault)
        elif is_nan_made_here or not bad_inputs:
            self._add_made_here(output, call, inputs)

    def _is_accepted(self, output: _Output, call: OpCall) -> bool:
        """Return whether the inf or NaN of an op is no fault: the user ignores the op, or the script has passed inf or
        NaN to it as a number, as in `masked_fill(mask, -inf)`.
        """
        if self._is_ignored(output.op, call):
            return True
        return call.phase != "backward" and _has_such_number(output.op, output.written.largest)

    def _is_ignored(self, op: Op, call: OpCall) -> bool:
        return not self._ignore.isdisjoint((op.overload.name, call.op.rpartition(".")[2]))

    def _is_mask(self, given: Input) -> bool:
        """Return whether a tensor that came in seems to be infinite on purpose."""
        if self._find_name(given.storage) and given.tensor.requires_grad:
            return False
        infinite = given.tensor[~given.tensor.isfinite()]
        return bool((infinite == -math.inf).all()) or (given.tensor.dim() == 0 and not has_nan(infinite))

    def _inherit_mask_fault(self, output: _Output, call: OpCall, bad: Sequence[tuple[Input, Written | None]]) -> None:
        """Keep with the output the fault to add if an input that seems to be a mask proves to be none."""
        for given, source in bad:
            if source is None or not _is_from_op(source):
                output.written.mask_fault = self._make_came_in(output, call, given)
            elif source.mask_fault is not None:
                output.written.mask_fault = source.mask_fault

    def _add_came_in(self, output: _Output, call: OpCall, given: Input) -> None:
        """Add a fault for an input whose inf or NaN no known op made. If the input is a weight with a finite master,
        begin a repair with the values of the master.
        """
        source = Written(self._find_name(given.storage), "", math.inf, ())
        self.storages.put(given.storage, source)
        source.explain_by_fault(len(self.faults))
        output.written.explain_by([source])
        in_float32 = None
        master = self._find_master(given.storage)
        if master is not None and master.shape == given.tensor.shape and is_finite(master):
            self.repair.begin(given.tensor, master, [output.written])
            self.repair.follow(output.op, call, [output.written], None)
            in_float32 = read_largest(master)
        self._add_and_note(source, self._make_came_in(output, call, given, in_float32))

    def _make_came_in(
        self, output: _Output, call: OpCall, given: Input, in_float32: float | None = None
    ) -> FaultRecord:
        return self._make(
            output,
            call,
            [given],
            name_value(has_nan(given.tensor)),
            in_float32=in_float32,
            parameter=self._find_name(given.storage),
            came_in=True,
        )

    def _add_made_here(self, output: _Output, call: OpCall, inputs: Sequence[Input]) -> None:
        """Add a fault for an op that made NaN, or inf from finite inputs. Begin a repair if float32 helps."""
        written, is_backward = output.written, call.phase == "backward"
        is_low = any(tensor.dtype in LOW_DTYPES for tensor in (output.tensor, *(given.tensor for given in inputs)))
        blame = self._find_blame(output, is_low=is_low)
        in_float32 = None
        if blame.exact is not None:
            in_float32 = none_if_inf(read_largest(blame.exact))
            wanted = list(blame.wanted)
            # A checkpoint runs the forward pass again. Its ops were noted when they first ran, if there was a fault.
            is_repeated = call.phase == "recompute" and bool(self.faults)
            if written.is_low and not is_repeated:
                wanted.insert(0, written)
            self.repair.begin(output.tensor, blame.exact, wanted)
            if is_backward:
                self.repair.fit_gradient(output.tensor, blame.exact, output.forward, is_scaled=written.is_scaled)
        fault = self._make(
            output,
            call,
            inputs,
            name_value(output.has_nan),
            in_float32=in_float32,
            lost=blame.lost,
            is_of_rounding=bool(blame.wanted),
            is_untested=is_low and blame.exact is None and _compute_exact(output) is None,
        )
        self._add_and_note(written, fault)

    def _find_blame(self, output: _Output, *, is_low: bool) -> Blame:
        """Return the rounding that made an output not fit: in its own op, or else in earlier ops.

        `exact` of the result is None unless float32 makes at least one inf or NaN of the output finite.
        """
        exact = _compute_exact(output) if is_low else None
        if exact is not None and is_finite(exact):
            return Blame(exact)
        blame = self._recent.find_blame(output.op, output.position)
        if blame is not None:
            self.repair.rounding += [written.culprit for written in blame.wanted if written.culprit is not None]
            return blame
        if exact is not None and not bool((exact.isfinite() & ~output.tensor.isfinite()).any()):
            exact = None
        return Blame(exact)  # also if only some values are finite: a later op may mask the others

    def _check_zeros(self, output: _Output, call: OpCall, underflow: float) -> None:
        """Add a fault if more than the share `underflow` of the values that are not zero in float32 is zero."""
        tensor, op = output.tensor, output.op
        if tensor.dtype not in LOW_DTYPES or is_random(op.function) or self._is_ignored(op, call):
            return
        exact = _compute_exact(output)
        if exact is None:
            return
        held = exact != 0
        share = int((held & (tensor == 0)).count_nonzero()) / max(int(held.count_nonzero()), 1)
        if share <= underflow:
            return
        if call.phase == "backward" and output.written.is_scaled:
            self.repair.begin(tensor, exact, ())
            self.repair.raise_scale(tensor, exact)
        else:
            self.repair.begin(tensor, None, [output.written])
        in_float32 = none_if_inf(read_largest(exact))
        self._add(self._make(output, call, read_inputs(op), Value.ZERO, in_float32=in_float32, share=share))

    def _add_and_note(self, written: Written, fault: FaultRecord) -> None:
        """Add a fault, and note that it explains the written values."""
        written.explain_by_fault(len(self.faults))
        self._add(fault)

    def _add(self, fault: FaultRecord) -> None:
        self.faults.append(fault)
        self._on_fault()

    def _make(
        self,
        output: _Output,
        call: OpCall,
        inputs: Sequence[Input],
        value: Value,
        *,
        in_float32: float | None,
        share: float | None = None,
        lost: float | None = None,
        is_of_rounding: bool = False,
        is_untested: bool = False,
        parameter: str = "",
        came_in: bool = False,
    ) -> FaultRecord:
        """Return the record of a fault. Its cause is final only at the end of the step: see `StepFaults.add_fixes`."""
        written, tensor = output.written, output.tensor
        if share is None:
            share = int((~tensor.isfinite()).count_nonzero()) / tensor.numel()
        # Some values of a backward pass carry no loss scale, such as the square that divides in the gradient of 1 / x.
        is_unscaled = call.phase == "backward" and not written.is_scaled and not came_in
        origin = Origin(
            module=call.module or None,
            op=call.op or None,
            rule=call.rule or None,
            entry=call.entry or None,
            listed=call.listed or None,
            region=RegionKind(call.region) if call.region else None,
            site=call.site.place or None,
            aten=output.op.overload.name,
            node=shorten_node(written.node) or None,
            given=tuple(short(given.tensor.dtype) for given in inputs),
            out=short(tensor.dtype),
            share=share,
            parameter=parameter or None,
            came_in=came_in,
        )
        evidence = Evidence(
            largest=max((read_largest_number(given.tensor) for given in inputs), default=0.0),
            in_float32=in_float32,
            loss_scale=1.0 if is_unscaled else self._get_scale(),
            trail=tuple(find_trail(written)),
            is_of_rounding=is_of_rounding,
            is_untested=is_untested,
            lost=lost,
        )
        fault = FaultRecord(self.step, Phase(call.phase), value, Cause.MATHEMATICS, origin=origin, evidence=evidence)
        return diagnose(fault, Course())


def _is_from_op(source: Written | None) -> bool:
    """Return whether a value that does not fit was written by an op that was seen. `source`: its record, or None."""
    return source is not None and not math.isfinite(source.largest)


def _compute_exact(output: _Output) -> Tensor | None:
    """Return an output in float32, or None if it cannot be computed."""
    results = compute_in_float32(output.op)
    if len(results) > output.position and results[output.position].shape == output.tensor.shape:
        return results[output.position]
    return None


def name_value(is_nan: bool) -> Value:
    """Return the word of records for a value that is not finite: NaN if `is_nan`, else inf."""
    return Value.NAN if is_nan else Value.INF


def none_if_inf(largest: float) -> float | None:
    """Return None for inf, else `largest`, which may be NaN."""
    return None if math.isinf(largest) else largest


def _has_such_number(op: Op, largest: float) -> bool:
    """Return whether the script passed inf to an op that gives inf, or NaN to one that gives NaN, as a plain number.

    A number inf does not count for NaN.
    """
    is_alike = math.isnan if math.isnan(largest) else math.isinf
    return any(isinstance(value, float) and is_alike(value) for value in (*op.args, *op.kwargs.values()))
