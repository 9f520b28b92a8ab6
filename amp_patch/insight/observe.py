"""`Observer`: sees every call of a listed op from above, and every op that torch dispatches from below.

A cover around each replacement that the session installed knows what was called, by which line of which list, and what
it was given; a dispatch mode below knows what the kernels got. The cover of a call is on a stack while it runs, and
autograd numbers the nodes that it makes, by which ops of the backward pass are told to the call that they are of.

No tensor is kept and none is read: a recorded run computes what it computes without.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..casting import Mode, compiling
from ..config import op_lists
from ..dtypes import CASTABLE, LOW_DTYPES
from ..events import add_watching_modes
from ..interrupts import UndoStack
from ..patching import references
from ..session import Session
from ..torch_dispatch import (
    TO_COPY,
    TorchDispatchMode,
    as_called,
    count_nodes,
    get_current_node,
    get_node_number,
    leave_mode,
)
from .faults import FaultFinder
from .folding import Folding, OpCall
from .naming import ModuleStack
from .ops import Op, compute_in_float32, find_overload
from .rules import RuleFinder, short, spelled
from .sites import Site, find_site, is_backward_of_user, is_under_checkpoint, names_dtype
from .tensors import address_of, storage_of, tensors_in


class _OfThread(threading.local):
    """What an observer knows of a thread: the calls that run, whether it sees or has paused, and how many nodes of
    autograd there were.
    """

    def __init__(self) -> None:
        self.calls: list[OpCall] = []
        self.is_below = self.is_paused = False
        self.nodes: int | None = None


class Observer:
    """Observes one session until `stop`.

    Args:
        session: whose ops are observed.
        folding: takes the calls in.
        finder: looks at what ops compute, where it is asked to.
    """

    def __init__(self, session: Session, folding: Folding, finder: FaultFinder | None = None) -> None:
        self._switch = session.switch
        self._has_casts = session.casts is not None
        self._patcher = session.patcher
        self._rules = RuleFinder(session)
        self._running = ModuleStack(session.models)
        self._folding = folding
        self.finder = finder
        if finder is not None:
            finder.watch(session, self._running)
        self._local = _OfThread()
        self._by_node: dict[int, OpCall] = {}
        self._writers: dict[int, OpCall] = {}  # of a storage, by its address: the call whose op wrote it last
        self._below = _Below(self)
        self._covers: list[Callable[..., Any]] = []
        self._undo = UndoStack()
        self.is_on = False
        self.has_seen = False  # any op

    def start(self) -> None:
        """Observe from now on, in this thread what is unlisted too."""
        self.is_on = True
        self._undo.callback(references.uncover, self._patcher, self._covers)
        self._undo.callback(self._running.close)
        self._patcher.cover(self._cover)
        self._running.open()
        self._local.is_below = True
        self._below.__enter__()

    def stop(self) -> None:
        """Leave everything as it was. Harmless twice; called in another thread than `start`, call it there again, too.

        What took hold of a cover and cannot be found calls what the cover is around.
        """
        self.is_on = False
        leave_mode(self._below)
        self._undo.close()
        self._local.is_below = False
        self.end_step()

    def pause(self) -> None:
        """See nothing of this thread until `go_on`."""
        if leave_mode(self._below):
            self._local.is_below, self._local.is_paused = False, True

    def go_on(self) -> None:
        """End a pause, if there is one."""
        if self.is_on and self._local.is_paused:
            self._local.is_below, self._local.is_paused = True, False
            self._below.__enter__()

    def end_step(self) -> None:
        """Forget what belongs to the step: nodes and storages of the next are others."""
        self._by_node.clear()
        self._writers.clear()
        if self.finder is not None:
            self.finder.end_step()

    # ---- from above --------------------------------------------------------------------------------------------------

    def _cover(self, owner: Any, name: str, replacement: Callable[..., Any]) -> Callable[..., Any] | None:
        if not self._rules.is_op(owner, name, replacement):
            return None
        op, spelling = spelled(owner, name), self._rules.find_spelling(owner, name, replacement)

        def cover(*args: Any, **kwargs: Any) -> Any:
            if not self.is_on or compiling.is_dynamo_compiling() or self._local.calls or self._local.is_paused:
                return replacement(*args, **kwargs)
            site = find_site()
            if site.by == "amp":
                return replacement(*args, **kwargs)
            calls, call = self._local.calls, OpCall(op, self._running.here(), site, self._phase(None, site))
            calls.append(call)
            try:
                self._describe(call, spelling, [*args, *kwargs.values()])
                if self._local.is_below:
                    result = replacement(*args, **kwargs)
                else:
                    with self._below:
                        result = replacement(*args, **kwargs)
                call.out = tuple(short(tensor.dtype) for tensor in tensors_in([result]))
            finally:  # a recomputation is stopped by an exception
                calls.clear()
                self._folding.count(call)
            return result

        self._covers.append(cover)
        return cover

    def _describe(self, call: OpCall, spelling: op_lists.Spelling | None, values: Sequence[Any]) -> None:
        """Enter what a call of an op is given, by which rule it is to run, and what that will have to cast."""
        module = self._running.module_here()
        call.given = tuple(short(tensor.dtype) for tensor in tensors_in(values))
        call.is_reached = self._is_reached()
        if spelling is None:
            call.rule, call.entry = self._rules.find_rule_of_unlisted(call.site, module)
            return
        mode = self._switch.mode_here()
        if mode is Mode.OFF and self._switch.autocast is not None:
            return  # outside of autocast no list says anything
        call.rule, call.entry = spelling.kind, self._rules.describe(spelling)
        call.listed = spelling.entry.op
        if mode is not Mode.BY_LISTS:
            call.region = mode.name.lower()
            if module is not None and mode is not Mode.OFF:
                rule, entry = self._rules.find_module_rule(module)
                if rule:
                    call.rule, call.entry = rule, entry
        call.target = target = self._rules.target(spelling.kind, mode)
        if target is not None:
            for tensor in tensors_in(values):
                if tensor.dtype in CASTABLE and tensor.dtype is not target:
                    call.sources.add(address_of(tensor))
            call.sources.discard(0)

    def _is_reached(self) -> bool:
        """Tell whether lists act on what this thread runs now; where the level casts the model, its rules always do."""
        return not self._has_casts or self._switch.mode_here() is not Mode.OFF

    # ---- from below --------------------------------------------------------------------------------------------------

    def note(self, op: Op) -> OpCall | None:
        """Take in one op that torch has dispatched, of this thread. Return the call that it is of."""
        self.has_seen = True
        overload, node, calls = op.overload, op.node, self._local.calls
        number = None
        count = count_nodes()
        if self._local.is_below and count != self._local.nodes:
            number = count - 1  # of the forward pass, or of a backward pass that is to have a gradient itself
        self._local.nodes = count
        if number is not None and calls:
            self._by_node[number] = calls[-1]
        if overload.is_silent:
            return None  # a view has the storage of what it is of
        inputs, outputs = op.inputs(), op.outputs()
        cast = None
        if overload.is_copy:
            cast = _find_cast(overload.packet, inputs, outputs)
        call: OpCall | None
        if calls:
            call = calls[-1]
            self._note_inside(call, cast, inputs)
        else:
            call = self._note_alone(overload.name, cast, node, inputs, outputs)
        if number is not None and call is not None:
            self._by_node[number] = call
        if call is not None:
            for tensor in outputs:
                self._writers[storage_of(tensor)] = call
        if self.finder is not None:
            self.finder.look(op, call, number)
        return call

    def note_overflow(self, op: Op) -> None:
        """Take in an op that torch refuses to run, since a number that it is given does not fit into 16 bits."""
        if self.finder is None:
            return
        low = [tensor.dtype for tensor in op.inputs() if tensor.dtype in LOW_DTYPES]
        exact = compute_in_float32(op)
        if low and exact:
            call = self.note(op._replace(result=exact[0].to(low[0])))
            if call is not None:  # the script ends before its like run the same line
                self.finder.expect(op, call, low[0], self._running.names_of_like())

    def _note_inside(self, call: OpCall, cast: tuple[Tensor, Tensor] | None, inputs: Iterable[Tensor]) -> None:
        if cast is None:
            call.ran |= {short(tensor.dtype) for tensor in inputs if tensor.is_floating_point()}
            return
        source, copy = cast
        call.casts += 1
        call.copied.add(address_of(source))
        call.cast_dtypes.add((short(source.dtype), short(copy.dtype)))
        storage = storage_of(source)
        producer = self._writers.get(storage)
        if not storage or copy.dtype is not call.target or producer is None or producer is call:
            return
        outside, between = short(copy.dtype), short(source.dtype)
        if producer.target is source.dtype and (outside, between) in producer.cast_dtypes:
            self._folding.count_undone(producer, call, outside, between)

    def _note_alone(
        self,
        name: str,
        cast: tuple[Tensor, Tensor] | None,
        node: Any,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
    ) -> OpCall | None:
        """Take in an op that no listed call made: one of the backward pass, of an optimizer, or on no list."""
        of = None
        if node is not None and not self._is_recomputing() and not is_backward_of_user(node):
            of = self._by_node.get(get_node_number(node))
        if of is not None:
            call = OpCall(of.op, of.module, of.site, "backward")
            call.rule, call.entry, call.region, call.listed = of.rule, of.entry, of.region, of.listed
            call.is_reached = of.is_reached
        else:
            site = find_site()
            if site.by == "amp":
                return None
            call = OpCall(f"aten.{name}", self._running.here(), site, self._phase(node, site))
            call.rule, call.entry = self._rules.find_rule_of_unlisted(site, self._running.module_here())
            with as_called():
                call.is_reached = self._is_reached()
            call.names_dtype = cast is not None and not site.by and names_dtype()
        call.casts = int(cast is not None)
        if not self._folding.keeps_ops:
            return call
        call.given = tuple([short(tensor.dtype) for tensor in inputs])
        call.out = tuple([short(tensor.dtype) for tensor in outputs])
        call.ran = {short(tensor.dtype) for tensor in inputs if tensor.is_floating_point()}
        if call.ran or any(tensor.is_floating_point() for tensor in outputs):
            self._folding.count(call)
        return call

    def _phase(self, node: Any, site: Site) -> str:
        if site.by == "optimizer":
            return "step"
        if node is not None or get_current_node() is not None:
            if self._local.calls or self._is_recomputing():
                return "recompute"
            return "backward"
        return "forward"

    def _is_recomputing(self) -> bool:
        """Tell whether what autograd has called is a forward: backward passes make graphs for second ones alone."""
        return torch.is_grad_enabled() and (bool(self._running.here()) or is_under_checkpoint())


class _Below(TorchDispatchMode):
    """Shows every op to an observer after it has run."""

    def __init__(self, observer: Observer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._observer = observer

    def __enter__(self) -> "_Below":
        add_watching_modes(1)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        add_watching_modes(-1)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, observer, overload = kwargs or {}, self._observer, find_overload(func)
        before = args
        if observer.finder is not None:
            before = observer.finder.prepare(overload, args)
        try:
            result = func(*args, **kwargs)
        except RuntimeError as error:
            if observer.is_on and "without overflow" in str(error):  # a number beyond float16, as of masked_fill
                observer.note_overflow(Op(overload, func, args, before, kwargs, None, get_current_node()))
            raise
        if observer.is_on:
            observer.note(Op(overload, func, args, before, kwargs, result, get_current_node()))
        return result


def _find_cast(packet: Any, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> tuple[Tensor, Tensor] | None:
    """Return what an op copied and the copy, if it is a cast from one floating dtype to another."""
    if not inputs:
        return None
    source, copy = inputs[-1], inputs[0]
    if packet is TO_COPY:
        source, copy = inputs[0], outputs[0]
    if source.dtype is copy.dtype or not source.is_floating_point() or not copy.is_floating_point():
        return None
    return source, copy
