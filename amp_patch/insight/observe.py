"""`Observer`: sees the calls of listed ops from above, and the ops that torch dispatches from below.

From above, a *cover* around each op that the session patched sees a call: its name, its arguments, and the line of the
list that decides. From below, a dispatch mode sees the ops that run while the call lasts, with the tensors that their
kernels get.

An op of the backward pass belongs to the call whose gradient it computes. Autograd numbers its nodes: the observer
notes which nodes a call makes, and a backward op knows the number of its node.

The observer keeps no tensor. A `FaultFinder` and a `QuietWatch` read values of tensors, and change none.
"""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..casting import Mode, compiling
from ..config import op_lists
from ..dtypes import CASTABLE, LOW_DTYPES
from ..interrupts import UndoStack
from ..patching import references
from ..session import Session
from ..torch_dispatch import (
    TO_COPY,
    count_nodes,
    get_current_node,
    get_node_number,
    leave_mode,
    restore_caller_state,
)
from .faults import FaultFinder
from .folding import Folding, OpCall
from .naming import ModuleStack
from .op_constants import find_constants
from .ops import Op, compute_in_float32, find_overload
from .origins import Origins
from .quiet.watch import QuietWatch
from .rules import RuleFinder, short, spelled
from .sites import Site, find_site, is_backward_of_user, is_under_checkpoint, names_dtype
from .tensors import address_of, storage_of, tensors_in
from .watching import WatchingMode


class _ThreadState(threading.local):
    """The state of an observer in one thread.

    Attributes:
        calls: a list with the listed call that runs; empty if none runs.
        is_below: whether the dispatch mode is on outside of listed calls, too. In other threads than the one that
            started the observer, it is on in listed calls only.
        is_paused: whether `pause` has turned the mode off.
        nodes: how many autograd nodes this thread had made at the last op; None before the first.
    """

    def __init__(self) -> None:
        self.calls: list[OpCall] = []
        self.is_below = self.is_paused = False
        self.nodes: int | None = None


class FailedIn(NamedTuple):
    """Where an op ran that raised an exception.

    Attributes:
        forward: in a backward pass, the call of the forward pass whose gradient was computed. None if that is unknown,
            and in a forward pass.
        is_reached: whether lists and rules for modules act there.
    """

    forward: OpCall | None
    is_reached: bool


class Observer:
    """Observes one session until `stop`.

    Args:
        session: the session whose ops are observed.
        folding: counts the calls.
        finder: looks at the values that ops compute; None: nothing does.
        quiet: looks at the changes of 16-bit tensors; None: nothing does.
    """

    def __init__(
        self,
        session: Session,
        folding: Folding,
        finder: FaultFinder | None = None,
        quiet: QuietWatch | None = None,
    ) -> None:
        self._switch = session.switch
        self._has_casts = session.casts is not None
        self._patcher = session.patcher
        self._rules = RuleFinder(session)
        self._running = ModuleStack(session.models)
        self._folding = folding
        self.finder = finder
        self.quiet = quiet
        if finder is not None:
            finder.watch(session, self._running)
        self._local = _ThreadState()
        self._by_node: dict[int, OpCall] = {}
        self._writers: dict[int, OpCall] = {}  # by the address of a storage: the call that wrote it last
        self.origins = Origins()
        self._below = _Below(self)
        self._covers: list[Callable[..., Any]] = []
        self._undo = UndoStack()
        self.is_on = False
        self.has_seen = False  # whether an op was seen
        self.failed_in: FailedIn | None = None  # the op that raised last

    def start(self) -> None:
        """Observe from now on: listed ops in all threads, and other ops in this one."""
        self.is_on = True
        self._undo.callback(references.uncover, self._patcher, self._covers)
        self._undo.callback(self._running.close)
        self._patcher.cover(self._cover)
        self._running.open()
        self._local.is_below = True
        self._below.__enter__()

    def stop(self) -> None:
        """Remove all covers and the dispatch mode. Harmless twice.

        Only the thread that called `start` can remove the mode. If another thread has called `stop`, the thread that
        called `start` has to call it, too. A cover that the script still holds only calls the function that it covers.
        """
        self.is_on = False
        leave_mode(self._below)
        self._undo.close()
        self._local.is_below = False
        self.end_step()

    def pause(self) -> None:
        """Stop observing this thread, the one that called `start`, until `go_on`."""
        if leave_mode(self._below):
            self._local.is_below, self._local.is_paused = False, True

    def go_on(self) -> None:
        """End a pause, if there is one."""
        if self.is_on and self._local.is_paused:
            self._local.is_below, self._local.is_paused = True, False
            self._below.__enter__()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Context manager: pause during the block. An outer pause goes on after it."""
        was_below = self._local.is_below
        self.pause()
        try:
            yield
        finally:
            if was_below:
                self.go_on()

    def find_module(self) -> str:
        """Return the name of the innermost module that is running in this thread: see `ModuleStack.here`."""
        return self._running.here()

    def end_step(self) -> None:
        """Forget the nodes and storages of the step."""
        self._by_node.clear()
        self._writers.clear()
        self.origins.end_step()
        if self.finder is not None:
            self.finder.end_step()

    # ---- from above --------------------------------------------------------------------------------------------------

    def _cover(self, owner: Any, name: str, replacement: Callable[..., Any]) -> Callable[..., Any] | None:
        if not self._rules.is_op(owner, name, replacement):
            return None
        op, spelling = spelled(owner, name), self._rules.find_spelling(owner, name, replacement)

        def cover(*args: Any, **kwargs: Any) -> Any:
            # Only the outermost listed call is recorded: F.linear, and not the addmm that it calls.
            if not self.is_on or compiling.is_dynamo_compiling() or self._local.calls or self._local.is_paused:
                return replacement(*args, **kwargs)
            site = find_site()
            if site.by == "amp":  # amp_patch makes this call itself, for loss scales or masters
                return replacement(*args, **kwargs)
            calls, call = self._local.calls, OpCall(op, self._running.here(), site, self._phase(None, site))
            calls.append(call)
            try:
                self._describe(call, spelling, [*args, *kwargs.values()])
                call.constants = find_constants(op, args, kwargs, replacement)
                if self._local.is_below:
                    result = replacement(*args, **kwargs)
                else:  # torch keeps dispatch modes for each thread
                    with self._below:
                        result = replacement(*args, **kwargs)
                call.out = tuple(short(tensor.dtype) for tensor in tensors_in([result]))
            finally:  # torch.utils.checkpoint ends a recomputation by an exception once it has all it needs
                calls.clear()
                self._folding.count(call)
            return result

        self._covers.append(cover)
        return cover

    def _describe(self, call: OpCall, spelling: op_lists.Spelling | None, values: Sequence[Any]) -> None:
        """Note the arguments of a call, the rule that decides, and the tensors that this rule casts."""
        module = self._running.module_here()
        call.given = tuple(short(tensor.dtype) for tensor in tensors_in(values))
        call.is_reached = self._is_reached()
        if spelling is None:
            call.rule, call.entry = self._rules.find_rule_of_unlisted(call.site, module)
            return
        mode = self._switch.mode_here()
        if mode is Mode.OFF and self._switch.autocast is not None:
            return  # lists do not act outside of autocast
        call.rule, call.entry = spelling.rule, self._rules.describe(spelling)
        call.listed = spelling.entry.op
        if mode is not Mode.BY_LISTS:
            call.region = mode.name.lower()
            if module is not None and mode is not Mode.OFF:
                rule, entry = self._rules.find_module_rule(module)
                if rule:
                    call.rule, call.entry = rule, entry
        call.target = target = self._rules.target(spelling.rule, mode)
        if target is not None:
            for tensor in tensors_in(values):
                if tensor.dtype in CASTABLE and tensor.dtype is not target:
                    call.sources.add(address_of(tensor))
            call.sources.discard(0)  # the address of a tensor that has none

    def _is_reached(self) -> bool:
        """Return whether lists, or rules for modules, act in this thread now.

        Always True at an opt_level that casts no ops.
        """
        return not self._has_casts or self._switch.mode_here() is not Mode.OFF

    # ---- from below --------------------------------------------------------------------------------------------------

    def note(self, op: Op) -> OpCall | None:
        """Note an op that torch has dispatched in this thread. Return its call.

        Returns None for an op that amp_patch itself runs, and for one that computes nothing.
        """
        self.has_seen = True
        overload, calls = op.overload, self._local.calls
        number = None
        count = count_nodes()
        if self._local.is_below and count != self._local.nodes:
            number = count - 1  # the number of the node that the op has made
        self._local.nodes = count
        if number is not None and calls:
            self._by_node[number] = calls[-1]
        if overload.is_silent:
            if self.origins.is_of_interest(overload):
                self.origins.note(calls[-1] if calls else self._make_call(op), (), op.outputs())
            return None  # it has computed no value
        inputs, outputs = op.inputs(), op.outputs()
        cast = None
        if overload.is_copy:
            cast = _find_cast(overload.packet, inputs, outputs)
        call: OpCall | None
        if calls:
            call = calls[-1]
            self._note_inside(call, cast, inputs)
        else:
            call = self._note_alone(op, cast, inputs, outputs)
        if number is not None and call is not None:
            self._by_node[number] = call
        if call is not None:
            if not overload.is_copy:
                call.widened = self._find_widened(call, inputs)
            self.origins.note(call, inputs, outputs)
            for tensor in outputs:
                self._writers[storage_of(tensor)] = call
        if self.finder is not None:
            self.finder.look(op, call, number)
        return call

    def _find_widened(self, call: OpCall, inputs: Sequence[Tensor]) -> OpCall | None:
        """Return the call whose cast makes `call` compute in float32, as in `OpCall.widened`, or None.

        For an op that casts no input itself, it is None if an input is float32 without such a cast: the op would then
        compute in float32 in any case.
        """
        if call.has_widened():
            return call
        if call.target is not None or call.phase == "backward":
            return None
        widened = None
        for tensor in inputs:
            if tensor.dtype is not torch.float32 or not tensor.dim():  # a 0-dim tensor widens no other
                continue
            writer = self._writers.get(storage_of(tensor))
            if writer is None or writer.widened is None:
                return None
            widened = widened or writer.widened
        return widened

    def note_failure(self, node: Any) -> None:
        """Note that an op has raised an exception. `node`: the autograd node that ran it; None in a forward pass."""
        forward = None
        if node is not None and not is_backward_of_user(node):
            forward = self._by_node.get(get_node_number(node))
        with restore_caller_state():
            self.failed_in = FailedIn(forward, self._is_reached())

    def name_module(self, module: Any) -> str | None:
        """Return the name of a module of the models in reports; None for another object."""
        return self._running.find_name(module)

    def _make_call(self, op: Op) -> OpCall:
        """Return a call that stands for an op that ran outside of listed calls, such as `torch.empty`."""
        site = find_site()
        return OpCall(f"aten.{op.overload.name}", self._running.here(), site, self._phase(op.node, site))

    def note_overflow(self, op: Op) -> None:
        """Note an op that torch refuses to run because a number among its arguments does not fit into 16 bits."""
        if self.finder is None:
            return
        low = [tensor.dtype for tensor in op.inputs() if tensor.dtype in LOW_DTYPES]
        exact = compute_in_float32(op)
        if low and exact:
            call = self.note(op._replace(result=exact[0].to(low[0])))
            if call is not None:
                # other modules of the same class would fail here, too, but the script may end before they run
                self.finder.expect(op, call, low[0], self._running.names_of_same_class())

    def _note_inside(self, call: OpCall, cast: tuple[Tensor, Tensor] | None, inputs: Iterable[Tensor]) -> None:
        """Note an op that a listed call runs. `cast`: the source and the copy, if the op is a cast."""
        if cast is None:
            call.ran |= {short(tensor.dtype) for tensor in inputs if tensor.is_floating_point()}
            return
        source, copy = cast
        call.casts += 1
        call.copied.add(address_of(source))
        # casts of weights to 16 bits are left out: see `OpCall.cast_dtypes`
        if not (isinstance(source, nn.Parameter) and copy.dtype in LOW_DTYPES):
            call.cast_dtypes.add((short(source.dtype), short(copy.dtype)))
        # Does this call cast back what the op before has cast? Count a pair of casts that undo each other.
        storage = storage_of(source)
        producer = self._writers.get(storage)
        if not storage or copy.dtype is not call.target or producer is None or producer is call:
            return
        outside, between = short(copy.dtype), short(source.dtype)
        producer = producer.widened or producer
        if producer.target in (source.dtype, None) and (outside, between) in producer.cast_dtypes:
            self._folding.count_undone(producer, call, outside, between)

    def _note_alone(
        self, op: Op, cast: tuple[Tensor, Tensor] | None, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> OpCall | None:
        """Note an op outside of listed calls: an op of the backward pass, of an optimizer, or on no list.

        Return its call; None for an op that amp_patch itself runs.
        """
        node, forward = op.node, None
        if node is not None and not self._is_recomputing() and not is_backward_of_user(node):
            forward = self._by_node.get(get_node_number(node))
        if forward is not None:
            call = OpCall(forward.op, forward.module, forward.site, "backward")
            call.rule, call.entry, call.region = forward.rule, forward.entry, forward.region
            call.listed, call.is_reached = forward.listed, forward.is_reached
        else:
            site = find_site()
            if site.by == "amp":
                return None
            call = OpCall(f"aten.{op.overload.name}", self._running.here(), site, self._phase(node, site))
            call.rule, call.entry = self._rules.find_rule_of_unlisted(site, self._running.module_here())
            with restore_caller_state():
                call.is_reached = self._is_reached()
            call.names_dtype = cast is not None and not site.by and names_dtype()
            call.constants = find_constants(call.op, op.args, op.kwargs)
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
        """Return the phase in which an op runs: see `OpRecord.phase`."""
        if site.by == "optimizer":
            return "step"
        if node is not None or get_current_node() is not None:
            if self._local.calls or self._is_recomputing():
                return "recompute"
            return "backward"
        return "forward"

    def _is_recomputing(self) -> bool:
        """Return whether autograd seems to run a forward pass again, for a checkpoint.

        Gradients are enabled then. In a backward pass itself, they are enabled only with create_graph=True.
        """
        return torch.is_grad_enabled() and (bool(self._running.here()) or is_under_checkpoint())


class _Below(WatchingMode):
    """Shows each op to an observer after it ran, and to the `FaultFinder` and the `QuietWatch` also before."""

    def __init__(self, observer: Observer) -> None:
        super().__init__()
        self._observer = observer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Keep the names func, args and kwargs: `failing_call` reads them from the traceback of an exception.
        kwargs, observer, overload, node = kwargs or {}, self._observer, find_overload(func), get_current_node()
        before, site = args, None
        if observer.finder is not None:
            before = observer.finder.prepare(overload, args)
        if observer.quiet is not None:
            site = observer.quiet.prepare(overload, args, kwargs)
        try:
            result = func(*args, **kwargs)
        except RuntimeError as error:
            observer.note_failure(node)
            if observer.is_on and "without overflow" in str(error):  # masked_fill(mask, -1e9) in float16
                observer.note_overflow(Op(overload, func, args, before, kwargs, None, node))
            raise
        if observer.is_on:
            op = Op(overload, func, args, before, kwargs, result, node)
            observer.note(op)
            if observer.quiet is not None:
                observer.quiet.note(op, site)
        return result


def _find_cast(packet: Any, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> tuple[Tensor, Tensor] | None:
    """Return the source and the copy of a cast from one floating dtype to another; None for another op."""
    if not inputs:
        return None
    source, copy = inputs[-1], inputs[0]  # of `copy.copy_(source)`
    if packet is TO_COPY:
        source, copy = inputs[0], outputs[0]
    if source.dtype is copy.dtype or not source.is_floating_point() or not copy.is_floating_point():
        return None
    return source, copy
