"""`Recent`: keeps the last ops of a step, and finds those whose rounding made a later result not fit into 16 bits."""

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..casting import cast_tree
from ..torch_dispatch import get_node_number, is_random
from ..torch_private import get_version
from .ops import Op
from .rules import short
from .short_dtypes import TINY
from .tensors import is_finite, read_largest, storage_of, tensors_in
from .twins import Twins
from .written import Written

_FEWEST = 16  # this many ops of the forward pass are kept however large they are
_LARGEST = 2**28  # the most bytes of the results of the ops of the forward pass that are kept
_ALIKE = 0.1  # the largest relative difference between two results that count as equal in `find_blame`


class _Kept(NamedTuple):
    """An op that was kept.

    Attributes:
        op: the op, whose tensors are detached from the graph.
        versions: the version counters of its inputs. If they have changed, the inputs were overwritten since.
        results: its floating results.
        written: the record of the first result.
    """

    op: Op
    versions: tuple[int, ...]
    results: list[Tensor]
    written: Written

    @property
    def size(self) -> int:
        return sum(tensor.nbytes for tensor in self.results)


class Blame(NamedTuple):
    """The rounding that made a result not fit.

    Attributes:
        exact: the result in float32. None if it is not known, or if no inf or NaN of the result is finite in float32.
        wanted: the records of the earlier ops that have to run in float32 so that the result fits.
        lost: an argument of one of these ops, such as an eps, that is zero in 16 bits; None if there is none.
    """

    exact: Tensor | None
    wanted: Sequence[Written] = ()
    lost: float | None = None


class Recent:
    """Keeps the last ops of the forward pass, and all ops of the running node of the backward pass."""

    def __init__(self) -> None:
        self._forward: deque[_Kept] = deque()
        self._of_node: list[_Kept] = []
        self._node: int | None = None
        self._size = 0

    def clear(self) -> None:
        """Forget all ops."""
        self._forward.clear()
        self._of_node.clear()
        self._size = 0

    def keep(self, op: Op, written: Written, *, is_backward: bool) -> None:
        """Keep an op, without its graph."""
        # Of the backward pass, only the ops of the running node are kept, to save memory.
        node = get_node_number(op.node) if is_backward and op.node is not None else None
        if node != self._node:
            self._of_node.clear()
            self._node = node
        args = [_detach(value) for value in op.args]
        before = args if op.before is op.args else [_detach(value) for value in op.before]
        kwargs = {name: _detach(value) for name, value in op.kwargs.items()}
        op = op._replace(args=args, before=before, kwargs=kwargs, result=_detach(op.result), node=None)
        kept = _Kept(op, _versions(before), op.floating_results(), written)
        if is_backward:
            self._of_node.append(kept)
            return
        self._forward.append(kept)
        self._size += kept.size
        while self._size > _LARGEST and len(self._forward) > _FEWEST:
            self._size -= self._forward.popleft().size

    def find(self, written: Written) -> Op | None:
        """Return the op of the forward pass that was kept with `written`; None if it is no longer kept."""
        return next((kept.op for kept in reversed(self._forward) if kept.written is written), None)

    def find_blame(self, op: Op, index: int) -> Blame | None:
        """Return the `Blame` of earlier ops whose rounding makes the result `index` of an op not fit; None without any.

        First run in float32 all kept ops that the op depends on, and then the op. If its result is finite, rounding is
        to blame. Then search these ops, the last ones first, for a few that in float32 give about the same result.
        """
        ancestors = [] if is_random(op.function) else self._find_ancestors(op)
        exact = _replay(ancestors, op, index)
        if exact is None or not ancestors or not is_finite(exact):
            return None

        def is_enough(ops: Sequence[_Kept]) -> bool:
            result = _replay(ops, op, index)
            if result is None or not is_finite(result):
                return False
            return read_largest(result - exact) <= _ALIKE * read_largest(exact)

        # Take twice as many of the last ops until they suffice. Then leave out each that is not needed.
        length = 1
        while length < len(ancestors) and not is_enough(ancestors[-length:]):
            length *= 2
        needed = ancestors[-length:]
        for kept in list(needed):
            fewer = [remaining for remaining in needed if remaining is not kept]
            if is_enough(fewer):
                needed = fewer
        wanted = [kept for kept in needed if kept.written.is_low]
        if not wanted:
            return None
        lost = [number for kept in wanted for number in _find_lost(kept)]
        return Blame(exact, [kept.written for kept in wanted], lost[-1] if lost else None)

    def _find_ancestors(self, op: Op) -> list[_Kept]:
        """Return the kept ops that an op depends on, in order."""
        wanted = {storage_of(tensor) for tensor in op.inputs()}
        ancestors: list[_Kept] = []
        for kept in reversed([*self._forward, *self._of_node]):
            if wanted & {storage_of(tensor) for tensor in kept.results}:
                ancestors.append(kept)
                wanted |= {storage_of(tensor) for tensor in kept.op.inputs()}
        return ancestors[::-1]


def _replay(ancestors: Sequence[_Kept], op: Op, index: int) -> Tensor | None:
    """Run the ancestors of an op in float32, and then the op. Return its result `index`; None if the op cannot run.

    Ancestors that cannot be repeated keep the results that they had.
    """
    twins = Twins()
    for kept in ancestors:
        # a random op would draw other numbers, and an input that was overwritten holds other values
        if is_random(kept.op.function) or _versions(kept.op.before) != kept.versions:
            continue
        results = twins.compute(kept.op)
        for tensor, result in zip(kept.results, results, strict=False):
            if tensor.shape == result.shape:
                twins.put(tensor, result)
    results = twins.compute(op)
    return results[index] if len(results) > index else None


def _find_lost(kept: _Kept) -> list[float]:
    """Return the magnitudes of an op's positional float arguments that round to zero in its first result's dtype."""
    tiny = TINY.get(short(kept.results[0].dtype), 0.0)
    numbers = (abs(value) for value in kept.op.args if isinstance(value, float))
    return [number for number in numbers if 0 < number <= tiny]


def _detach(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    return cast_tree(value, Tensor.detach) if isinstance(value, (list, tuple)) else value


def _versions(values: Sequence[Any]) -> tuple[int, ...]:
    return tuple(0 if tensor.is_inference() else get_version(tensor) for tensor in tensors_in(values))
