"""`FaultFinder`: the first value that does not fit: what op made it, out of what, and why.

A value fits where it is finite. What an op is given is looked at only where what it gives does not fit: an op whose
inputs are finite is where the fault is, and whether the same op on the same inputs in float32 is finite says why.
Values that do not fit are followed through the storages that ops write, so that each fault is told once.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..casting import cast_tree
from ..dtypes import LOW_DTYPES
from ..session import current
from ..torch_dispatch import clone, is_random
from .folding import Call
from .naming import ModuleStack
from .ops import Op, Overload, compute_in_float32
from .records import FaultRecord
from .repair import Item, Recent, Repair, make_item
from .rules import short
from .short_dtypes import TINY
from .tensors import floating_in, has_nan, is_whole, read_largest, read_largest_number, storage_of, tensors_in

TRAIL = 6
"""How many ops before a fault are told."""

_DELIBERATE, _KNOWN = "deliberate", "known"
_LOOK_BACK = 64  # ops before a fault, in which a number that was lost is looked for


class _Written:
    """What is known of the op that wrote a storage last: the largest magnitude that it gave, whether it wrote the whole
    of it, and whether what does not fit in it is deliberate, or known already: of which faults, by their numbers, it
    it then comes. `lost` is a number that the op was given, and that is zero in its 16 bits; `rounded` are the ops that
    made zeros of what float32 holds.
    """

    __slots__ = (
        *("faults", "is_old", "is_whole", "largest", "lost", "name", "node", "op", "parents", "rounded", "size"),
        "status",
    )

    def __init__(self, op: str, node: str, largest: float, parents: "Sequence[_Written]") -> None:
        self.op = op
        self.node = node
        self.largest = largest
        self.parents = parents
        self.faults: frozenset[int] = frozenset()
        self.is_whole = False
        self.is_old = False  # of the step before
        self.size = 0  # of the storage, in bytes
        self.status = ""
        self.name = ""  # of a parameter that came in so, where amp's own op copied it
        self.lost = 0.0
        self.rounded: Sequence[Item] = ()


class _Input(NamedTuple):
    """A floating tensor as an op was given it, and the address of its storage."""

    tensor: Tensor
    storage: int


class FaultFinder:
    """Looks at every op, in their order. Reads values on the host: on a GPU, each op is waited for.

    Args:
        underflow: the share of values, from 0 to 1, that may become zero in 16 bits and are not in float32; None: any.
        ignore: ops, by the last part of their name, whose values may be what they are.
        find_name: the name of the parameter or buffer in a storage, "" for another.
        find_exact: the float32 master of the parameter in a storage, None for another.
        get_scale: the loss scale in force.
    """

    def __init__(
        self,
        underflow: float | None,
        ignore: Iterable[str],
        find_name: Callable[[int], str],
        find_exact: Callable[[int], Tensor | None],
        get_scale: Callable[[], float],
    ) -> None:
        self._underflow = underflow
        self._ignore = frozenset(ignore)
        self._find_name = find_name
        self._find_exact = find_exact
        self._get_scale = get_scale
        self._written: dict[int, _Written] = {}
        self.step = 0
        self.faults: list[FaultRecord] = []
        self.repair = Repair(underflow)
        self.running: ModuleStack | None = None
        self.peaks: dict[tuple[str, str, str], dict[str, float]] = {}  # by site, op and dtype: of each module
        self._recent = Recent()
        self._true_zeros: set[str] = set()  # lines that give zeros in float32, too

    def end_step(self) -> None:
        """Forget storages, those of the next step are others; but for one step more what is known not to fit: gradients
        and losses may be looked at when the step has ended.
        """
        kept = {
            storage: known for storage, known in self._written.items() if known.status == _KNOWN and not known.is_old
        }
        for known in kept.values():
            known.is_old, known.parents, known.faults = True, (), frozenset()
        self._written = kept
        self._recent.clear()
        self.repair = Repair(self._underflow)
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

    def look(self, op: Op, before: Sequence[Any], call: Call | None) -> None:
        """Look at what an op gave. `before`: what `prepare` returned; `call`: what it is part of, None: of amp."""
        overload = op.overload
        node = "" if op.node is None else op.node.name()
        outputs = op.floating_results()
        if overload.written and not outputs:  # but integers, which floating tensors may share their memory with
            for tensor in op.outputs():
                self._written.pop(storage_of(tensor), None)
        if overload.is_in_bulk:
            self._pass_on(op, node, outputs)
            return
        is_in_module = self._is_in_module()
        if self.repair.is_under_way:
            with current.without_casts():
                self.repair.follow(op, before, call, self._get_scale(), is_in_module)
        given = self._written.get
        parents = [known for tensor in op.inputs() if (known := given(storage_of(tensor))) is not None]
        for number, tensor in enumerate(outputs[:1] if overload.has_one_output else outputs):
            written = _Written(overload.name, node, self._find_largest(op, tensor), parents)
            written.size = tensor.untyped_storage().nbytes()
            written.is_whole = written.size == tensor.nbytes
            if call is not None and tensor.dtype in LOW_DTYPES:
                self._note_low(op, tensor, written, call, is_in_module)
            if not math.isfinite(written.largest):
                with current.without_casts():
                    self._judge(op, before, number, tensor, written, call)
            elif self._underflow is not None and call is not None:
                with current.without_casts():
                    self._judge_zeros(op, before, number, tensor, written, call)
            self._keep(storage_of(tensor), written)
        if call is not None and outputs and call.phase in ("forward", "recompute"):
            if overload.name == "sqrt" and not self.faults:
                self._look_for_lost_zeros(op, before, call)
            self._recent.add(op, before, call, is_in_module)

    def _is_in_module(self) -> bool:
        return self.running is not None and self.running.module_here() is not None

    def _note_low(self, op: Op, output: Tensor, written: _Written, call: Call, is_in_module: bool) -> None:
        """Take down what 16 bits make of numbers in the script, and how large what it computes becomes."""
        numbers = [abs(one) for one in op.args if isinstance(one, float)]
        lost = [one for one in numbers if 0 < one <= TINY[short(output.dtype)]]
        if lost:
            written.lost = max(lost)
            written.rounded = (make_item(op.overload.name, call, is_in_module),)
        if call.phase == "forward" and call.module:
            peaks = self.peaks.setdefault((call.site.place, op.overload.name, short(output.dtype)), {})
            largest = written.largest if math.isfinite(written.largest) else 0.0  # which may come of another module
            peaks[call.module] = max(peaks.get(call.module, 0.0), largest)

    def _look_for_lost_zeros(self, op: Op, before: Sequence[Any], call: Call) -> None:
        """Find out which ops have made a zero of what a root is drawn of: its gradient will be infinite."""
        values = op.floating_results()[0]
        if call.site.place in self._true_zeros or bool(values.all()):
            return
        with current.without_casts():
            exact, items = self._recent.explain(op, before, 0, lambda tensor: bool(tensor.all()))
        if exact is None:
            self._true_zeros.add(call.site.place)
        else:
            self._written[storage_of(values)].rounded = items

    def _find_largest(self, op: Op, output: Tensor) -> float:
        """Return the largest magnitude of an output: of 16-bit values in a wider dtype, that of what they are copied
        from, if it is known.
        """
        if op.overload.is_copy and output.dtype not in LOW_DTYPES:
            source = op.inputs()[-1 if op.overload.is_overwriting else 0]
            known = self._written.get(storage_of(source)) if source.dtype in LOW_DTYPES and is_whole(source) else None
            if known is not None and known.is_whole and math.isfinite(known.largest):
                return known.largest
        return read_largest(output)

    def _keep(self, storage: int, written: _Written) -> None:
        earlier = None if written.is_whole else self._written.get(storage)
        if earlier is not None and not math.isfinite(earlier.largest):  # and may lie beside what was written
            if math.isfinite(written.largest):
                return
            written.faults |= earlier.faults
            written.status = _KNOWN if earlier.status == _KNOWN else written.status
        self._written[storage] = written

    def _pass_on(self, op: Op, node: str, outputs: Sequence[Tensor]) -> None:
        """Take in an op that is not looked at."""
        inputs = list(floating_in(op.inputs()))
        known = [one for tensor in inputs if (one := self._written.get(storage_of(tensor))) and one.status == _KNOWN]
        faults = frozenset().union(*(one.faults for one in known))
        for tensor in (*inputs, *outputs):
            self._written.pop(storage_of(tensor), None)
            if known:
                self._written[storage_of(tensor)] = written = _Written(op.overload.name, node, math.inf, known)
                written.status, written.faults, written.size = _KNOWN, faults, tensor.untyped_storage().nbytes()

    def find_faults(self, tensors: Iterable[Tensor]) -> set[int]:
        """Return the numbers of the faults that what does not fit in some tensors comes of, as far as that was seen."""
        known = (self._written.get(storage_of(tensor)) for tensor in tensors)
        return set().union(*(one.faults for one in known if one is not None))

    @staticmethod
    def _read_inputs(op: Op, before: Sequence[Any]) -> list[_Input]:
        given, copies = [*op.args, *op.kwargs.values()], [*before, *op.kwargs.values()]
        if op.overload.is_overwriting:
            given, copies = given[1:], copies[1:]
        elif (out := op.kwargs.get("out")) is not None:
            given, copies = [one for one in given if one is not out], [one for one in copies if one is not out]
        pairs = zip(floating_in(given), floating_in(copies), strict=True)
        return [_Input(copy, storage_of(tensor)) for tensor, copy in pairs]

    def _judge(
        self,
        op: Op,
        before: Sequence[Any],
        number: int,
        output: Tensor,
        written: _Written,
        call: Call | None,
    ) -> None:
        """Find out what made an output that does not fit, and enter a fault if that is told first here."""
        inputs = self._read_inputs(op, before)
        bad = [one for one in inputs if not math.isfinite(read_largest(one.tensor))]
        known = [self._find_known(one) for one in bad]
        if sources := [one for one in known if one is not None and one.status == _KNOWN]:
            written.status, written.faults = _KNOWN, frozenset().union(*(one.faults for one in sources))
            return
        is_backward = call is not None and call.phase == "backward"
        if (_has_such_number(op, written.largest) and not is_backward) or self._is_ignored(op, call):
            written.status = _DELIBERATE
            return
        strangers = [
            one
            for one, origin in zip(bad, known, strict=True)
            if (origin is None or origin.name or math.isfinite(origin.largest)) and not self._is_mask(one)
        ]
        if strangers:
            self._let_in(op, strangers[0], output, written, call)
        elif bad and not (math.isnan(written.largest) and not any(has_nan(one.tensor) for one in bad)):
            written.status = _DELIBERATE
        elif call is not None:
            written.status, written.faults = _KNOWN, frozenset({len(self.faults)})
            kind = "nan" if math.isnan(written.largest) else "inf"
            has_low = any(tensor.dtype in LOW_DTYPES for tensor in (output, *(one.tensor for one in inputs)))
            exact = compute_in_float32(op, before) if has_low else []  # else it was
            alike = exact[number : number + 1] if len(exact) > number and exact[number].shape == output.shape else exact
            beyond = max(map(read_largest, alike), default=math.inf, key=_by_fit)
            cause = "precision" if math.isfinite(beyond) else "mathematics"
            repaired = alike[0] if alike and cause == "precision" else None
            items = [make_item(op.overload.name, call, self._is_in_module())] if output.dtype in LOW_DTYPES else []
            if call.phase == "recompute" and self.faults:
                items = []
            lost, rounding = 0.0, list[Item]()
            if cause == "mathematics":
                lost, rounding = self._find_rounding(written)
                if call.phase != "backward":
                    repaired, rounding = self._recent.explain(op, before, number, _is_finite)
                if rounding:
                    cause, items = "precision", [*rounding, *items]
                    beyond = math.inf if repaired is None else read_largest(repaired)
            if cause == "precision" and (call.phase != "backward" or rounding):
                self.repair.begin(output, repaired, items)
                self.repair.rounding += rounding
            elif cause == "precision":
                self.repair.begin(output, repaired, ())
            facts = {"cause": cause, "value": kind, "in_float32": beyond, "lost": lost if rounding else 0.0}
            self._enter(op, inputs, output, written, call, **facts)

    @staticmethod
    def _find_rounding(written: _Written) -> tuple[float, list[Item]]:
        """Return the latest number that was lost on the way to an output, and the ops that made zeros there."""
        looked_at, items = list(written.parents), list[Item]()
        lost = 0.0
        for one in looked_at:  # which grows
            if one.rounded:
                lost = lost or one.lost
                items += one.rounded
            elif len(looked_at) < _LOOK_BACK:
                looked_at += [parent for parent in one.parents if parent not in looked_at]
        return lost, items

    def _find_known(self, one: _Input) -> _Written | None:
        """Return what is known of an input; of the step before, if its memory has not become another's since."""
        known = self._written.get(one.storage)
        return known if known is None or not known.is_old or known.size == one.tensor.nbytes else None

    def _is_ignored(self, op: Op, call: Call | None) -> bool:
        names = {op.overload.name, call.op.rpartition(".")[2] if call is not None else ""}
        return bool(names & self._ignore)

    def _is_mask(self, one: _Input) -> bool:
        """Tell whether a tensor that came in is one of those that are infinite by intention: a mask, a constant."""
        if self._find_name(one.storage) and one.tensor.requires_grad:
            return False
        infinite = one.tensor[~one.tensor.isfinite()]
        return bool((infinite == -math.inf).all()) or (one.tensor.dim() == 0 and not has_nan(infinite))

    def _let_in(self, op: Op, stranger: _Input, output: Tensor, written: _Written, call: Call | None) -> None:
        origin = self._written.get(stranger.storage)
        name = (origin.name if origin is not None else "") or self._find_name(stranger.storage)
        if call is None:  # copied by amp itself: to be told of where it is used
            written.name = name or "(data)"
            return
        known = _Written(name, "", math.inf, ())
        written.status = known.status = _KNOWN
        written.faults = known.faults = frozenset({len(self.faults)})
        self._written[stranger.storage] = known
        facts: dict[str, Any] = {"value": "nan" if has_nan(stranger.tensor) else "inf", "parameter": name}
        exact = self._find_exact(stranger.storage) if name else None
        if exact is not None and exact.shape == stranger.tensor.shape and _is_finite(exact):
            self.repair.begin(stranger.tensor, exact, [make_item(op.overload.name, call, self._is_in_module())])
            self.repair.follow(op, op.args, call, self._get_scale(), self._is_in_module())
            facts["in_float32"] = read_largest(exact)
        self._enter(op, [stranger], output, written, call, cause="came in", **facts)

    def _judge_zeros(
        self, op: Op, before: Sequence[Any], number: int, output: Tensor, written: _Written, call: Call
    ) -> None:
        """Enter a fault if more of an output is zero than may be, and is not in float32."""
        if output.dtype not in LOW_DTYPES or is_random(op.function) or self._is_ignored(op, call):
            return
        exact = compute_in_float32(op, before)
        if len(exact) <= number or exact[number].shape != output.shape:
            return
        held = exact[number] != 0
        share = int((held & (output == 0)).count_nonzero()) / max(int(held.count_nonzero()), 1)
        assert self._underflow is not None
        if share > self._underflow:
            facts = {"value": "zero", "in_float32": read_largest(exact[number]), "share": share}
            if call.phase == "backward":
                self.repair.begin(output, exact[number], ())
                self.repair.raise_scale(output, exact[number], self._get_scale())
            else:
                self.repair.begin(output, None, [make_item(op.overload.name, call, self._is_in_module())])
            self._enter(op, self._read_inputs(op, before), output, written, call, cause="precision", **facts)

    def _enter(
        self, op: Op, inputs: Sequence[_Input], output: Tensor, written: _Written, call: Call, **facts: Any
    ) -> None:
        share = facts.pop("share", None)
        if share is None:
            share = int((~output.isfinite()).count_nonzero()) / output.numel()  # means may be on a list
        fault = FaultRecord(
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
            share=share,
            largest=max((read_largest_number(one.tensor) for one in inputs), default=0.0),
            loss_scale=self._get_scale(),
            trail=tuple(_trail(written)),
            **facts,
        )
        self.faults.append(fault)


def _is_finite(tensor: Tensor) -> bool:
    return math.isfinite(read_largest(tensor))


def _by_fit(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _has_such_number(op: Op, largest: float) -> bool:
    """Tell whether an op was given a number like what it gives: inf, or NaN, which comes of inf by mistake alone."""
    numbers = [one for one in (*op.args, *op.kwargs.values()) if isinstance(one, float)]
    return any(map(math.isnan if math.isnan(largest) else math.isinf, numbers))


def _trail(written: _Written) -> Iterator[tuple[str, float]]:
    """Yield the ops that led to one, the latest first: of several that it read, the one of the largest magnitude."""
    for _ in range(TRAIL):
        if not written.parents:
            return
        written = max(written.parents, key=lambda one: _by_fit(one.largest))
        node = written.node.rpartition("::")[2]  # of a Function of the user's, its class
        yield f"{written.op} in {node}" if node else written.op, written.largest
