"""`Tape`: the calls that a script has made since its last optimizer step, so that the step can be repeated.

The tape holds the calls of models, the calls of torch's functions outside of models, and the calls of `backward`. It
does not hold calls inside of a model. If an argument was made by an earlier call on the tape, the tape stores that call
and the position of the tensor in its result (`Made`), not the tensor. Other tensors, such as batches, are stored
(`Given`).
"""

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.utils.hooks import unserializable_hook

from ...casting import cast_tree
from ..sites import Caller
from .surroundings import ModuleState, RandomState, Surroundings, read_version

_FIRST_PRUNING = 64
_MOST_CALLS = 20_000
"""A step is not repeated if more than this number of calls is left after `_prune`."""


class Kind(Enum):
    """The kinds of calls."""

    MODEL = auto()
    FUNCTION = auto()
    LOSS = auto()  # not a call: it marks a tensor as the loss
    BACKWARD = auto()


@dataclass(slots=True, eq=False)
class Call:
    """A call of a model, a function or `backward`, or the mark of a loss.

    Attributes:
        function: the model or the function; None for a backward pass or a loss.
        args, kwargs: the arguments, with `Made` and `Given` in the place of tensors.
        caller: the line of the script.
        around: the settings of the thread.
        random: the state of the generators of random numbers before the call; None for a call that draws none.
        states: the states, before the call, of the modules that the call may have changed.
        changes_first: whether the call changes its first argument in place.
        is_kept: whether the call must be repeated even if none of its results is alive: a loss, or a backward pass.
        sources: the calls on the tape that made the arguments.
        graph_sources: the items of `sources` whose results have a graph, so that a backward pass goes through them.
        is_cut: whether the graph of the result has a part that was made by code whose calls are not on the tape.
        made: for each tensor among the results, a weak reference to the tensor, and the version of the tensor.
        loss: for a loss, its tensor.
        scale: for a loss, a function that returns the loss scale.
        arrived: for a backward pass with `is_cut`: the results of models, each with the gradient that it got.
        obstacle: why the call cannot be repeated; "" if it can be.
        has_raised: whether a call of a model has raised an error. True until the call has ended.
        is_training: whether the model was in training mode during the call. The script may change the mode later.
    """

    kind: Kind
    function: Any
    caller: Caller
    around: Surroundings
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    random: RandomState | None = None
    states: list[ModuleState] = field(default_factory=list)
    changes_first: bool = False
    is_kept: bool = False
    sources: "list[Call]" = field(default_factory=list)
    graph_sources: "list[Call]" = field(default_factory=list)
    is_cut: bool = False
    made: list[tuple[Callable[[], Tensor | None], int]] = field(default_factory=list)
    loss: "Given | None" = None
    scale: Callable[[], float] | None = None
    arrived: "list[tuple[Made, Tensor]]" = field(default_factory=list)
    obstacle: str = ""
    has_raised: bool = False
    is_training: bool = True


@dataclass(slots=True, frozen=True, eq=False)
class Made:
    """A tensor that a call on the tape has made: one of the tensors in its result, by position.

    `has_graph`: whether the tensor required gradients when the call returned.
    """

    call: Call
    position: int
    has_graph: bool = True


@dataclass(slots=True, frozen=True, eq=False)
class Given:
    """A tensor that no call on the tape has made, with its version when it was used."""

    tensor: Tensor
    version: int


class Tape:
    """The calls of a step, in order.

    The calls stay on the tape after the step, because another optimizer may step with gradients of the same calls. When
    the next call is added, the tape forgets them, except those whose results may still go backward. These are set
    aside, and come back if a later call uses their results. For example, a GAN calls its generator once, for the steps
    of both optimizers.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.is_over = False  # an optimizer has stepped since the last of these calls
        self.is_too_long = False
        self._unused: dict[int, Call] = {}  # by id: earlier calls whose results may still go backward
        self._makers: dict[int, tuple[weakref.ref[Tensor], Made | Given]] = {}  # by id of the tensor
        self._next_pruning = _FIRST_PRUNING

    def end(self) -> None:
        """End the step: the next call is of the next step."""
        self.is_over = bool(self.calls) or self.is_too_long

    def clear(self) -> None:
        """Forget all calls."""
        self.calls.clear()
        self._unused.clear()
        self._makers.clear()
        self.is_over = self.is_too_long = False
        self._next_pruning = _FIRST_PRUNING

    def _begin_next(self) -> None:
        """Forget the calls of the last step, but set aside those whose results may still go backward."""
        unused = _find_unused([*self._unused.values(), *self.calls])
        makers = self._makers.copy()
        self.clear()
        self._unused = unused
        for key, (reference, named) in makers.items():
            if isinstance(named, Made) and id(named.call) in unused:
                self._makers[key] = reference, named

    def _bring_back(self, call: Call) -> None:
        """Put a call that was set aside back on the tape, after the calls that made its arguments."""
        if self._unused.pop(id(call), None) is None:
            return
        for source in call.sources:
            self._bring_back(source)
        self.calls.append(call)

    # ---- writing -----------------------------------------------------------------------------------------------------

    def add(self, call: Call, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Add a call, which has not run yet or has just run. The first call after a step begins the next step.

        A step that is too long gets no further calls.
        """
        if self.is_over:
            self._begin_next()
        call.args = tuple([self._name_in(call, value) for value in args])
        if kwargs:
            call.kwargs = {name: self._name_in(call, value) for name, value in kwargs.items()}
        if self.is_too_long:
            return
        if len(self.calls) >= self._next_pruning:
            self._prune()
        self.calls.append(call)

    def note_results(self, call: Call, results: Iterable[Tensor]) -> None:
        """Note that a call has made these tensors. A call that changes a tensor in place counts as its maker."""
        for position, tensor in enumerate(results):
            # torch.utils.swap_tensors refuses a parameter that has a weak reference
            if type(tensor) is not Tensor and isinstance(tensor, Parameter):
                call.made.append((_find_nothing, 0))
                continue
            reference = weakref.ref(tensor)
            call.made.append((reference, read_version(tensor)))
            made = Made(call, position, tensor.requires_grad)
            self._makers[id(tensor)] = reference, made
            if call.kind is Kind.MODEL and has_graph(tensor):
                # torch.save warns of hooks that it leaves out, unless they are marked
                tensor.register_hook(unserializable_hook(functools.partial(self.note_gradient, made)))

    def note_alias(self, tensor: Tensor, source: Tensor) -> None:
        """Note that `tensor` is a copy of `source` that amp has cast. A repeated step casts `source` again."""
        if tensor is source:
            return
        named = self._find(source) or Given(source, read_version(source))
        self._makers[id(tensor)] = weakref.ref(tensor), named

    def find_maker(self, tensor: Tensor) -> Made | None:
        """Return which call on the tape has made a tensor; None if none has."""
        known = self._find(tensor)
        return known if isinstance(known, Made) else None

    def _find(self, tensor: Tensor) -> Made | Given | None:
        known = self._makers.get(id(tensor))
        # the id of a tensor that is gone may belong to another tensor
        if known is None or known[0]() is not tensor:
            return None
        # an autograd.Function computed the tensor without a graph in `forward`, and then gave it a node of its own
        is_wrapped = isinstance(known[1], Made) and not known[1].has_graph and has_graph(tensor)
        return None if is_wrapped else known[1]

    def _name_in(self, call: Call, value: Any) -> Any:
        """Return an argument with `Made` and `Given` in the place of tensors."""
        if isinstance(value, Tensor):
            return self._name(call, value)
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        return cast_tree(value, functools.partial(self._name, call))

    def _name(self, call: Call, tensor: Tensor) -> "Made | Given":
        known = self._find(tensor)
        if isinstance(known, Made):
            self._bring_back(known.call)
            call.sources.append(known.call)
            if known.has_graph:
                call.graph_sources.append(known.call)
                call.is_cut |= known.call.is_cut
        elif has_graph(tensor):
            call.is_cut = True
        return known or Given(tensor, read_version(tensor))

    def note_gradient(self, made: Made, gradient: Tensor) -> None:
        """Tensor hook of a model's result: keep its gradient, if it came through code whose calls are not on the
        tape.
        """
        last = self.calls[-1] if self.calls else None
        if last is not None and last.kind is Kind.BACKWARD and last.is_cut:
            last.arrived.append((made, gradient.detach()))

    # ---- forgetting --------------------------------------------------------------------------------------------------

    def _prune(self) -> None:
        """Drop the calls whose results were freed and which no other call needs, such as calls of a validation.

        If more than `_MOST_CALLS` are left, drop them all: the step is too long.
        """
        needed: set[int] = set()
        kept: list[Call] = []
        for call in reversed(self.calls):
            if call.is_kept or id(call) in needed or any(_is_alive(call)):
                kept.append(call)
                needed.update(map(id, call.sources))
        self.calls = kept[::-1]
        self._makers = {key: known for key, known in self._makers.items() if known[0]() is not None}
        self._next_pruning = max(_FIRST_PRUNING, 2 * len(self.calls))
        if len(self.calls) > _MOST_CALLS:
            self.is_too_long = True
            self.calls.clear()
            self._makers.clear()


def _find_unused(calls: Sequence[Call]) -> dict[int, Call]:
    """Return, by id, the calls with a live graph that no backward pass has freed, and the sources of these calls."""
    live = {id(call) for call in calls if call.made and not call.has_raised and any(_has_live_graph(call))}
    if not live:
        return {}
    used: set[int] = set()
    for call in reversed(calls):
        if id(call) in used or (call.kind is Kind.BACKWARD and not _keeps_graph(call)):
            used.update(map(id, call.graph_sources))
    unused: set[int] = set()
    for call in calls:
        if not used.isdisjoint(map(id, call.graph_sources)):
            used.add(id(call))
        elif id(call) in live and id(call) not in used:
            unused.add(id(call))
    for call in reversed(calls):
        if id(call) in unused:
            unused.update(map(id, call.sources))
    return {id(call): call for call in calls if id(call) in unused}


def _keeps_graph(backward: Call) -> bool:
    """Return whether a call of `backward` has kept the graph."""
    # the third and the fourth argument are `retain_graph` and `create_graph`
    return any([*backward.args[2:4], backward.kwargs.get("retain_graph"), backward.kwargs.get("create_graph")])


def _has_live_graph(call: Call) -> Iterator[bool]:
    """Yield for each result whether it is alive and has a graph."""
    for reference, _ in call.made:
        tensor = reference()
        yield tensor is not None and has_graph(tensor)


def has_graph(tensor: Tensor) -> bool:
    """Return whether a tensor has a `grad_fn`."""
    try:
        return tensor.grad_fn is not None
    except RuntimeError:  # torch refuses to tell for a view made under no_grad whose base was changed since
        return False


def _find_nothing() -> None:
    """Stand for a weak reference to a tensor that is gone."""


def _is_alive(call: Call) -> Iterator[bool]:
    """Yield for each result whether it is alive.

    If the call changes its first argument, do the same for the results of the call that made this argument.
    """
    for reference, _ in call.made:
        yield reference() is not None
    if call.changes_first and call.sources:
        yield from _is_alive(call.sources[0])
