"""`FaultFinder`: the first value that does not fit: what op made it, out of what, and why.

A value fits where it is finite. What an op is given is looked at only where what it gives does not fit: an op whose
inputs are finite is where the fault is, and whether the same op on the same inputs in float32 is finite says why.
Values that do not fit are followed through the storages that ops write, so that each fault is told once.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..casting import cast_tree
from ..dtypes import LOW_DTYPES
from ..session import Session, current
from ..torch_dispatch import clone, get_node_number, is_random
from .folding import Call
from .naming import ModuleStack, is_backward_of_user, name_tensors
from .ops import Op, Overload, compute_in_float32, find_factor, is_reduction
from .recent import Blame, Recent
from .records import FaultRecord
from .repair import Repair
from .rules import short
from .tensors import (
    floating_in,
    has_nan,
    is_finite,
    is_whole,
    read_largest,
    read_largest_number,
    storage_of,
    tensors_in,
)
from .written import Written

TRAIL = 6
"""How many ops before a fault are told."""

_TAKES_MASKS = ("_softmax", "_log_softmax", "_safe_softmax", "logsumexp", "_scaled_dot_product_")
"""Ops that are given -inf by intention; NaN where all of a row is."""
_SEEDS = ("ones_like", "full_like")
"""Ops that make the gradient with which a backward pass begins."""


class _Input(NamedTuple):
    """A floating tensor as an op was given it, and the address of its storage."""

    tensor: Tensor
    storage: int


class FaultFinder:
    """Looks at every op, in their order. Reads values on the host: on a GPU, each op is waited for.

    Args:
        underflow: the share of values, from 0 to 1, that may become zero in 16 bits and are not in float32; None: any.
        ignore: ops, by the last part of their name, whose values may be what they are.
        get_scale: returns the loss scale in force.
        on_fault: called after each fault.
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
        self._written: dict[int, Written] = {}
        self.step = 0
        self.faults: list[FaultRecord] = []
        self.repair = Repair(underflow, get_scale, self._is_scaled)
        self.peaks: dict[tuple[str, str, str], dict[str, float]] = {}  # by site, op and dtype: of each module
        self._recent = Recent()
        self._by_node: dict[int, Written] = {}  # of the forward pass

    def watch(self, session: Session, running: ModuleStack) -> None:
        """Look at the ops of a session from now on."""
        self._session = session
        self._running = running

    def end_step(self) -> None:
        """Forget storages, those of the next step are others; but for one step more what is known not to fit: gradients
        and losses may be looked at when the step has ended.
        """
        self._written = {key: one for key, one in self._written.items() if one.is_known and not one.is_old}
        for known in self._written.values():
            known.is_old, known.parents, known.faults = True, (), frozenset()
        self._recent.clear()
        self._by_node.clear()
        self.repair = Repair(self._underflow, self._get_scale, self._is_scaled)
        self.peaks.clear()

    def prepare(self, overload: Overload, args: Sequence[Any]) -> Sequence[Any]:
        """Return the arguments with copies of those whose memory the op is about to write, and reads before."""
        written = overload.written
        if not written or overload.is_overwriting or overload.is_in_bulk:
            return args
        targets = [args[index] for index in written if index < len(args)]
        storages = {storage_of(tensor) for tensor in tensors_in(targets)}
        copied: Sequence[Any] = cast_tree(
            args, lambda tensor: clone(tensor) if storage_of(tensor) in storages else tensor
        )
        return copied

    def look(self, op: Op, call: Call | None, number: int | None) -> None:
        """Look at what an op gave.

        `call` is what the op is part of, None: of amp; `number` that of the node that it made in the graph of the
        backward pass, None for none.
        """
        overload = op.overload
        node, of, is_of_user = "", None, False
        if op.node is not None:
            node, is_of_user = op.node.name(), is_backward_of_user(op.node)
            if not is_of_user:
                of = self._by_node.get(get_node_number(op.node))
        outputs = op.floating_results()
        if overload.written and not outputs:  # but integers, which floating tensors may share their memory with
            for tensor in op.outputs():
                self._written.pop(storage_of(tensor), None)
        if overload.is_in_bulk:
            self._pass_on(op, node, outputs)
            return
        parents = [known for tensor in op.inputs() if (known := self._written.get(storage_of(tensor))) is not None]
        if overload.has_one_output:
            outputs = outputs[:1]
        made = [self._describe(op, tensor, node, parents, call) for tensor in outputs]
        if is_of_user:  # whose lines can be changed
            for tensor, written in zip(outputs, made, strict=True):
                written.is_low = tensor.dtype in LOW_DTYPES
        if number is not None and of is not None:
            self._by_node[number] = of
        elif number is not None and made:
            self._by_node[number] = made[0]
        looks_at_zeros = self._underflow is not None
        is_bad = not all(math.isfinite(written.largest) for written in made)
        if is_bad or looks_at_zeros or self.repair.is_under_way:
            with current.without_casts():
                self.repair.follow(op, call, made, of)
                for index, (tensor, written) in enumerate(zip(outputs, made, strict=True)):
                    if not math.isfinite(written.largest):
                        self._judge(op, index, tensor, written, call, of)
                    elif looks_at_zeros and call is not None:
                        self._judge_zeros(op, index, tensor, written, call)
        for tensor, written in zip(outputs, made, strict=True):
            self._keep(tensor, written)
        if call is not None and made:
            self._recent.add(op, made[0], is_backward=call.phase == "backward")

    def expect(self, op: Op, call: Call, low: torch.dtype, modules: Iterable[str]) -> None:
        """Have a line give in other modules what it gave in one, although they have not run."""
        peaks = self.peaks.setdefault((call.site.place, op.overload.name, short(low)), {})
        peaks.update(dict.fromkeys(modules, math.inf))

    def _describe(self, op: Op, output: Tensor, node: str, parents: Sequence[Written], call: Call | None) -> Written:
        """Return what is known of an output; take down which op of the forward pass gave 16 bits, and how large."""
        written = Written(op.overload.name, node, read_largest(output), parents)
        written.size = output.untyped_storage().nbytes()
        if call is None or call.phase == "backward":
            known = [one for one in parents if one.is_scaled or one.op in _SEEDS]
            written.is_scaled = bool(known) or not parents
            return written
        is_low = output.dtype in LOW_DTYPES
        written.describe(op, call, self._running.module_here() is not None, is_low)
        written.summed = self._find_summed(op, output)
        self.repair.made.append(written)
        if is_low and call.phase == "forward" and call.module:
            peaks = self.peaks.setdefault((call.site.place, op.overload.name, short(output.dtype)), {})
            peak = peaks.setdefault(call.module, 0.0)
            if math.isfinite(written.largest):  # else it may come of another module
                peaks[call.module] = max(peak, written.largest)
        return written

    def _is_scaled(self, tensor: Tensor) -> bool:
        known = self._written.get(storage_of(tensor))
        return known is None or known.is_scaled or known.op in _SEEDS

    def _find_summed(self, op: Op, output: Tensor) -> float:
        """Return how many times larger an output is than the mean of its terms."""
        found = 1.0
        for tensor in op.inputs():
            known = self._written.get(storage_of(tensor))
            if known is not None and known.summed > 1 and (tensor.numel() == output.numel() or is_reduction(op)):
                found = max(found, known.summed)
        return found * find_factor(op, output) if found > 1 or is_reduction(op) else found

    def find_summed(self, tensor: Tensor) -> float:
        """Return how many times larger a loss is than the mean of its terms."""
        known = self._written.get(storage_of(tensor))
        return 1.0 if known is None else known.summed

    def _keep(self, output: Tensor, written: Written) -> None:
        storage = storage_of(output)
        earlier = self._written.get(storage)
        if earlier is not None and not is_whole(output) and not math.isfinite(earlier.largest):
            # what does not fit may lie beside what was written
            if math.isfinite(written.largest):
                return
            written.faults |= earlier.faults
            written.is_known |= earlier.is_known
        self._written[storage] = written

    def _pass_on(self, op: Op, node: str, outputs: Sequence[Tensor]) -> None:
        """Take in an op that is not looked at."""
        inputs = list(floating_in(op.inputs()))
        known = [one for tensor in inputs if (one := self._written.get(storage_of(tensor))) and one.is_known]
        for tensor in (*inputs, *outputs):
            self._written.pop(storage_of(tensor), None)
            if known:
                self._written[storage_of(tensor)] = written = Written(op.overload.name, node, math.inf, known)
                written.come_of(known)
                written.size = tensor.untyped_storage().nbytes()

    def find_faults(self, tensors: Iterable[Tensor]) -> set[int]:
        """Return the numbers of the faults that what does not fit in some tensors comes of, as far as that was seen."""
        known = (self._written.get(storage_of(tensor)) for tensor in tensors)
        return set().union(*(one.faults for one in known if one is not None))

    def _judge(
        self, op: Op, number: int, output: Tensor, written: Written, call: Call | None, of: Written | None
    ) -> None:
        """Find out what made an output that does not fit, and enter a fault if that is told first here."""
        inputs = _read_inputs(op)
        bad = [one for one in inputs if not math.isfinite(read_largest(one.tensor))]
        known = [self._find_known(one) for one in bad]
        if sources := [one for one in known if one is not None and one.is_known]:
            written.come_of(sources)
            return
        if call is None or self._is_ignored(op, call):
            return
        if _has_such_number(op, written.largest) and call.phase != "backward":
            return
        strangers = [
            one
            for one, origin in zip(bad, known, strict=True)
            if (origin is None or math.isfinite(origin.largest)) and not self._is_mask(one)
        ]
        is_made_here = math.isnan(written.largest) and not any(has_nan(one.tensor) for one in bad)
        if strangers:
            self._let_in(op, strangers[0], output, written, call)
            return
        for one, origin in zip(bad, known, strict=True):
            if origin is None or math.isfinite(origin.largest):
                written.let_in = self._make_let_in(op, one, output, written, call)
            elif origin.let_in is not None:
                written.let_in = origin.let_in
        if is_made_here and written.let_in is not None and not op.overload.name.startswith(_TAKES_MASKS):
            self._enter_let_in(written)
        elif is_made_here or not bad:
            written.is_known, written.faults = True, frozenset({len(self.faults)})
            is_low = any(tensor.dtype in LOW_DTYPES for tensor in (output, *(one.tensor for one in inputs)))
            blame = self._find_reason(op, number, output, is_low=is_low)
            in_float32 = math.inf
            if blame.exact is not None:
                in_float32 = read_largest(blame.exact)
                wanted = list(blame.wanted)
                if written.is_low and not (call.phase == "recompute" and self.faults):
                    wanted.insert(0, written)
                self.repair.begin(output, blame.exact, wanted)
                if call.phase == "backward":
                    self.repair.judge_gradient(output, blame.exact, of, is_scaled=written.is_scaled)
            facts: dict[str, Any] = {"in_float32": in_float32, "lost": blame.lost}
            facts["cause"] = "precision" if math.isfinite(in_float32) else "mathematics"
            facts |= {"value": name_value(math.isnan(written.largest)), "is_of_rounding": bool(blame.wanted)}
            self._enter(self._make(op, inputs, output, written, call, **facts))

    def let_in(self, tensors: Iterable[Tensor]) -> None:
        """Enter the faults of what came in and reaches some tensors: it was no mask."""
        for tensor in tensors:
            known = self._written.get(storage_of(tensor))
            if known is not None and known.let_in is not None and not known.is_known:
                self._enter_let_in(known)

    def _enter_let_in(self, written: Written) -> None:
        assert written.let_in is not None
        written.is_known, written.faults = True, frozenset({len(self.faults)})
        self._enter(written.let_in)

    def _find_reason(self, op: Op, number: int, output: Tensor, *, is_low: bool) -> Blame:
        """Compute an op in float32, if it was not; where that does not fit either, without the rounding of the ops
        before it. There is nothing exact where float32 fits nowhere more than the output does.
        """
        exact = _compute_exact(op, number, output) if is_low else None
        if exact is not None and is_finite(exact):
            return Blame(exact)
        blame = self._recent.explain(op, number)
        if blame is not None:
            self.repair.rounding += [one.item for one in blame.wanted if one.item is not None]
            return blame
        if exact is not None and not bool((exact.isfinite() & ~output.isfinite()).any()):
            exact = None
        return Blame(exact)  # what is left may be masked later

    def _find_name(self, storage: int) -> str:
        """Return the name of the parameter or buffer in a storage, "" for another."""
        for name, tensor in name_tensors(self._session.models()):
            if storage_of(tensor) == storage:
                return name
        return ""

    def _find_master(self, storage: int) -> Tensor | None:
        """Return the float32 master of the parameter in a storage, None for another."""
        for model in self._session.models():
            for weight in model.parameters():
                if storage_of(weight) == storage:
                    return self._session.find_master(weight)
        return None

    def _find_known(self, one: _Input) -> Written | None:
        """Return what is known of an input; of the step before, if its memory has not become another's since."""
        known = self._written.get(one.storage)
        if known is not None and known.is_old and known.size != one.tensor.nbytes:
            return None
        return known

    def _is_ignored(self, op: Op, call: Call) -> bool:
        return not self._ignore.isdisjoint((op.overload.name, call.op.rpartition(".")[2]))

    def _is_mask(self, one: _Input) -> bool:
        """Tell whether a tensor that came in is one of those that are infinite by intention: a mask, a constant."""
        if self._find_name(one.storage) and one.tensor.requires_grad:
            return False
        infinite = one.tensor[~one.tensor.isfinite()]
        return bool((infinite == -math.inf).all()) or (one.tensor.dim() == 0 and not has_nan(infinite))

    def _let_in(self, op: Op, stranger: _Input, output: Tensor, written: Written, call: Call) -> None:
        name = self._find_name(stranger.storage)
        self._written[stranger.storage] = known = Written(name, "", math.inf, ())
        known.is_known, known.faults = True, frozenset({len(self.faults)})
        written.come_of([known])
        facts: dict[str, Any] = {}
        exact = self._find_master(stranger.storage)
        if exact is not None and exact.shape == stranger.tensor.shape and is_finite(exact):
            self.repair.begin(stranger.tensor, exact, [written])
            self.repair.follow(op, call, [written], None)
            facts["in_float32"] = read_largest(exact)
        self._enter(self._make_let_in(op, stranger, output, written, call, **facts))

    def _make_let_in(
        self, op: Op, stranger: _Input, output: Tensor, written: Written, call: Call, **facts: Any
    ) -> FaultRecord:
        facts |= {"value": name_value(has_nan(stranger.tensor)), "parameter": self._find_name(stranger.storage)}
        return self._make(op, [stranger], output, written, call, cause="came in", **facts)

    def _judge_zeros(self, op: Op, number: int, output: Tensor, written: Written, call: Call) -> None:
        """Enter a fault if more of an output is zero than may be, and is not in float32."""
        if output.dtype not in LOW_DTYPES or is_random(op.function) or self._is_ignored(op, call):
            return
        exact = _compute_exact(op, number, output)
        if exact is None:
            return
        held = exact != 0
        share = int((held & (output == 0)).count_nonzero()) / max(int(held.count_nonzero()), 1)
        assert self._underflow is not None
        if share > self._underflow:
            facts = {"value": "zero", "in_float32": read_largest(exact), "share": share}
            if call.phase == "backward" and written.is_scaled:
                self.repair.begin(output, exact, ())
                self.repair.raise_scale(output, exact)
            else:
                self.repair.begin(output, None, [written])
            self._enter(self._make(op, _read_inputs(op), output, written, call, cause="precision", **facts))

    def _enter(self, fault: FaultRecord) -> None:
        self.faults.append(fault)
        self._on_fault()

    def _make(
        self, op: Op, inputs: Sequence[_Input], output: Tensor, written: Written, call: Call, **facts: Any
    ) -> FaultRecord:
        if "share" not in facts:
            facts["share"] = int((~output.isfinite()).count_nonzero()) / output.numel()
        is_unscaled = call.phase == "backward" and not written.is_scaled and facts["cause"] != "came in"
        return FaultRecord(
            step=self.step,
            phase=call.phase,
            aten=op.overload.name,
            node=written.node.rpartition("::")[2],
            module=call.module,
            op=call.op,
            rule=call.rule,
            entry=call.entry,
            listed=call.listed,
            region=call.region,
            site=call.site.place,
            given=tuple(short(one.tensor.dtype) for one in inputs),
            out=short(output.dtype),
            largest=max((read_largest_number(one.tensor) for one in inputs), default=0.0),
            loss_scale=1.0 if is_unscaled else self._get_scale(),
            trail=tuple(_trail(written)),
            **facts,
        )


def _read_inputs(op: Op) -> list[_Input]:
    """Return the floating tensors that an op read, as they were before it, and where they are."""
    given, copies = [*op.args, *op.kwargs.values()], [*op.before, *op.kwargs.values()]
    if op.overload.is_overwriting:
        given, copies = given[1:], copies[1:]
    elif (out := op.kwargs.get("out")) is not None:
        given, copies = [one for one in given if one is not out], [one for one in copies if one is not out]
    pairs = zip(floating_in(given), floating_in(copies), strict=True)
    return [_Input(copy, storage_of(tensor)) for tensor, copy in pairs]


def _compute_exact(op: Op, number: int, output: Tensor) -> Tensor | None:
    """Return an output in float32, None where that cannot be computed."""
    results = compute_in_float32(op)
    if len(results) > number and results[number].shape == output.shape:
        return results[number]
    return None


def name_value(is_nan: bool) -> str:
    """Return how records call a value that does not fit."""
    return "nan" if is_nan else "inf"


def _by_fit(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _has_such_number(op: Op, largest: float) -> bool:
    """Tell whether an op was given a number like what it gives: inf, or NaN, which comes of inf by mistake alone."""
    is_alike = math.isnan if math.isnan(largest) else math.isinf
    return any(isinstance(one, float) and is_alike(one) for one in (*op.args, *op.kwargs.values()))


def _trail(written: Written) -> Iterator[tuple[str, float]]:
    """Yield the ops that led to one, the latest first: of several that it read, the one of the largest magnitude."""
    for _ in range(TRAIL):
        if not written.parents:
            return
        written = max(written.parents, key=lambda one: _by_fit(one.largest))
        node = written.node.rpartition("::")[2]  # of a Function of the user's, its class
        yield f"{written.op} in {node}" if node else written.op, written.largest
