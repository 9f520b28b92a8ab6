"""`Repair`: what the rest of a step would compute if what does not fit had been computed in float32.

A remedy is tried before it is printed. From the first fault of a step on, each value that comes of it has a *twin*: the
value in float32. An op that is given a twin is computed a second time, with twins, and where its result does not fit in
16 bits either, the op belongs into float32, too. `Recent` holds the last ops of the forward pass, to tell whether
rounding to 16 bits before an op is to blame for what that op gives.
"""

import math
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..casting import cast_tree
from ..dtypes import LOW_DTYPES, PLAIN_CLASSES
from ..torch_dispatch import clone, is_random
from ..torch_private import get_version
from .folding import Call
from .ops import Op, compute_in_float32
from .rules import short
from .short_dtypes import LARGEST, TINY, find_fitting_scale
from .tensors import is_whole, read_largest, read_largest_number, storage_of, tensors_in

RECENT = 16
"""How many ops of the forward pass are kept."""

_ALIKE = 0.1

_STRICT = frozenset({"mm", "addmm", "bmm", "baddbmm", "convolution", "dot", "mv", "linear"})  # no mixed dtypes
_LOW_RULES = ("whitelist", "border of the cast", "cast_model_type", "run: low")


class Item(NamedTuple):
    """An op that has to run in float32: the module, where in the script, by which name the lists have it, and whether a
    list can name it.
    """

    module: str
    is_in_module: bool
    op: str
    listed: str
    aten: str
    site: str
    rule: str


def make_item(op: str, call: Call, is_in_module: bool) -> Item:
    """Return a call as an item; `op`: the name of what torch ran."""
    return Item(call.module, is_in_module, call.op, call.listed, op, call.site.place, call.rule)


class Twins:
    """Float32 values in the place of those that were computed, by the storages that hold them."""

    def __init__(self) -> None:
        self._flat: dict[int, tuple[weakref.ref[Any], Tensor, int]] = {}

    def __bool__(self) -> bool:
        return bool(self._flat)

    def find(self, tensor: Tensor) -> Tensor | None:
        """Return the twin of a tensor: a view, of the same shape and strides; None without one."""
        if not self._flat or type(tensor) not in PLAIN_CLASSES or not storage_of(tensor):
            return None
        known = self._flat.get(id(tensor.untyped_storage()))
        if known is None or known[2] != tensor.element_size():
            return None
        flat: Tensor = known[1]
        return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def put(self, tensor: Tensor, value: Tensor) -> None:
        """Take the float32 values in the place of those of a tensor, of the same shape."""
        if type(tensor) not in PLAIN_CLASSES or not storage_of(tensor) or tensor.is_complex():
            return
        known = self.find(tensor)
        if known is None:
            known = self._make(tensor)
        known.copy_(value)

    def drop(self, tensor: Tensor) -> None:
        """Forget the twin of a tensor that was overwritten."""
        if self.find(tensor) is not None and is_whole(tensor):
            del self._flat[id(tensor.untyped_storage())]

    def compute(self, op: Op, before: Sequence[Any]) -> list[Tensor]:
        """Return what an op gives for twins in float32, as `compute_in_float32`, beside which see for `before`."""

        def take(tensor: Tensor) -> Tensor:
            twin = self.find(tensor)
            return tensor if twin is None else clone(twin)

        args = [
            cast_tree(given, take) if any(self.find(one) is not None for one in tensors_in([given])) else earlier
            for given, earlier in zip(op.args, before, strict=True)
        ]
        kwargs = {name: cast_tree(value, take) for name, value in op.kwargs.items()}
        return compute_in_float32(op._replace(kwargs=kwargs), args)

    def _make(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        key, size = id(storage), tensor.element_size()
        everything = tensor.detach().as_strided((storage.nbytes() // size,), (1,), 0)
        flat: Tensor = clone(everything.float())

        def forget(_: Any) -> None:
            self._flat.pop(key, None)

        self._flat[key] = weakref.ref(storage, forget), flat, size
        return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


class Repair:
    """Follows what comes of the faults of one step.

    `underflow` is the share of a gradient that may become zero, None for any.

    Attributes:
        items: the ops of the forward pass that do not fit, those of faults among them, or whose gradients fit under no
            loss scale.
        rounding: those of them that made zeros of what float32 holds: the same lines do so in other modules.
        scale: the largest loss scale, a power of two, under which the gradients fit that come of a fault; None: no
            gradient did not fit.
        wanted: the smallest under which no more of these gradients becomes zero than may; None: none does.
        beyond: the line of an op that gives what float32 does not hold either, "" without one.
    """

    def __init__(self, underflow: float | None) -> None:
        self._underflow = underflow
        self._twins = Twins()
        self.items: list[Item] = []
        self.rounding: list[Item] = []
        self.scale: float | None = None
        self.wanted: float | None = None
        self.beyond = ""

    @property
    def is_under_way(self) -> bool:
        """Whether there is anything to follow."""
        return bool(self._twins)

    def begin(self, output: Tensor, exact: Tensor | None, items: Sequence[Item]) -> None:
        """Take in a fault: an output, what it is in float32, and what has to run in float32 for it to be that."""
        self._add(items)
        if exact is not None and exact.shape == output.shape:
            self._twins.put(output, exact)

    def follow(self, op: Op, before: Sequence[Any], call: Call | None, loss_scale: float, is_in_module: bool) -> None:
        """Compute what an op would give, and judge whether that fits."""
        given = [(tensor, twin) for tensor in op.inputs() if (twin := self._twins.find(tensor)) is not None]
        if op.overload.is_overwriting and op.inputs():
            target = op.inputs()[0]
            given = [pair for pair in given if pair[0] is not target]
        outputs = op.floating_results()
        if not given or op.overload.is_in_bulk:
            for tensor in outputs:
                self._twins.drop(tensor)
            return
        results = self._twins.compute(op, before)
        if len(results) != len(outputs):
            return
        pairs = [pair for pair in zip(outputs, results, strict=True) if pair[0].shape == pair[1].shape]
        if call is not None:
            self._judge(op, call, given, pairs, loss_scale, is_in_module)
        for tensor, result in pairs:
            self._twins.put(tensor, result)

    def _judge(
        self,
        op: Op,
        call: Call,
        given: Sequence[tuple[Tensor, Tensor]],
        outputs: Sequence[tuple[Tensor, Tensor]],
        loss_scale: float,
        is_in_module: bool,
    ) -> None:
        wide = [tensor for tensor, twin in given if _is_too_large((tensor, twin))]  # these would have come as float32
        low = [pair for pair in outputs if pair[0].dtype in LOW_DTYPES]
        too_large = [pair for pair in low if _is_too_large(pair)]
        if call.phase == "backward":
            item = make_item(op.overload.name, call, bool(call.module))
            for tensor, result in too_large:
                self._lower_scale(tensor, result, loss_scale, item)
            for tensor, result in low:
                self.raise_scale(tensor, result, loss_scale)
            return
        if call.phase == "recompute":  # of what has been judged in the forward pass
            return
        item = make_item(op.overload.name, call, is_in_module)
        is_held_low = call.rule in _LOW_RULES or call.region == "low"
        if op.overload.name in _STRICT and call.rule != "blacklist":
            is_held_low |= any(tensor.dtype in LOW_DTYPES for tensor in op.inputs())
        is_given_low = is_held_low and any(tensor.dtype in LOW_DTYPES for tensor in wide)
        is_low = bool(too_large) and (is_held_low or op.overload.is_copy or not wide)
        if is_given_low or is_low:
            self._add([item])
        if not self.beyond and any(map(_is_beyond, (result for _, result in outputs))):
            is_deliberate = any(isinstance(one, float) and math.isinf(one) for one in (*op.args, *op.kwargs.values()))
            floating = (tensor for tensor in op.inputs() if tensor.is_floating_point())
            twins = (tensor if (twin := self._twins.find(tensor)) is None else twin for tensor in floating)
            if not is_deliberate and not any(map(_is_beyond, twins)):
                self.beyond = f"{call.op} at {call.site.place}"

    def _lower_scale(self, tensor: Tensor, result: Tensor, loss_scale: float, item: Item | None = None) -> None:
        """Have the scale be so small that a gradient fits; where none does, what it is of has to run in float32."""
        largest = read_largest_number(result)
        fitting = find_fitting_scale(short(tensor.dtype), loss_scale, largest)
        if fitting < 1 and item is not None:
            self._add([item])
            return
        self.scale = fitting if self.scale is None else min(self.scale, fitting)

    def raise_scale(self, tensor: Tensor, exact: Tensor, loss_scale: float) -> None:
        """Have the scale be so large that no more of a gradient is zero in 16 bits than may be."""
        sizes = exact[exact != 0].abs().flatten()
        if self._underflow is None or not sizes.numel():
            return
        smallest = float(sizes.kthvalue(int(self._underflow * (sizes.numel() - 1)) + 1).values)
        needed = loss_scale * 2.0 ** math.ceil(math.log2(2 * TINY[short(tensor.dtype)] / smallest))
        if needed > loss_scale:
            self.wanted = max(needed, self.wanted or needed)
            self._lower_scale(tensor, exact, loss_scale)

    def _add(self, items: Sequence[Item]) -> None:
        self.items += [one for one in dict.fromkeys(items) if one not in self.items]


def _is_too_large(pair: tuple[Tensor, Tensor]) -> bool:
    """Tell whether a value does not fit in the 16 bits that the script has it in."""
    tensor, twin = pair
    limit = LARGEST.get(short(tensor.dtype), LARGEST["f16"])
    return read_largest_number(twin) > limit


def _is_beyond(value: Tensor) -> bool:
    return value.numel() > 0 and not math.isfinite(read_largest(value))


class _Kept(NamedTuple):
    op: Op
    before: Sequence[Any]
    versions: tuple[int, ...]
    results: list[Tensor]
    call: Call
    is_in_module: bool


class Recent:
    """The last ops of the forward pass."""

    def __init__(self) -> None:
        self._kept: deque[_Kept] = deque(maxlen=RECENT)

    def clear(self) -> None:
        """Forget all."""
        self._kept.clear()

    def add(self, op: Op, before: Sequence[Any], call: Call, is_in_module: bool) -> None:
        """Keep an op, without the graph that it is part of."""
        args = [_detach(one) for one in op.args]
        earlier = args if before is op.args else [_detach(one) for one in before]
        kwargs = {name: _detach(one) for name, one in op.kwargs.items()}
        op = op._replace(args=args, kwargs=kwargs, result=_detach(op.result))
        self._kept.append(_Kept(op, earlier, _versions(earlier), op.floating_results(), call, is_in_module))

    def explain(
        self, op: Op, before: Sequence[Any], number: int, fits: Callable[[Tensor], bool]
    ) -> tuple[Tensor | None, list[Item]]:
        """Compute an op again, and what it comes of, all in float32.

        Returns the result, and those ops before it that gave 16 bits, as few as give that result: within a tenth.
        None and nothing if it does not fit.
        """
        ancestors = [] if is_random(op.function) else self._find_ancestors(op)
        exact, items = self._replay(ancestors, op, before, number)
        if exact is None or not ancestors or not fits(exact):
            return None, []
        for length in range(1, len(ancestors)):
            result, fewer = self._replay(ancestors[-length:], op, before, number)
            if result is not None and fits(result) and read_largest(result - exact) <= _ALIKE * read_largest(exact):
                return result, fewer
        return exact, items

    @staticmethod
    def _replay(
        ancestors: Sequence[_Kept], op: Op, before: Sequence[Any], number: int
    ) -> tuple[Tensor | None, list[Item]]:
        twins, items = Twins(), list[Item]()
        for kept in ancestors:
            if is_random(kept.op.function) or _versions(kept.before) != kept.versions:
                continue
            results = twins.compute(kept.op, kept.before)
            for tensor, result in zip(kept.results, results, strict=False):
                if tensor.shape == result.shape:
                    twins.put(tensor, result)
            is_low = any(tensor.dtype in LOW_DTYPES for tensor in kept.results)
            if is_low and (not items or kept.call.rule in _LOW_RULES or kept.op.overload.is_copy):
                items.append(make_item(kept.op.overload.name, kept.call, kept.is_in_module))
                # others are in float32 if the first is
        results = twins.compute(op, before)
        return results[number] if len(results) > number else None, items

    def _find_ancestors(self, op: Op) -> list[_Kept]:
        """Return the ops that an op comes of, in order."""
        wanted = {storage_of(tensor) for tensor in op.inputs()}
        found: list[_Kept] = []
        for kept in reversed(self._kept):
            if wanted & {storage_of(tensor) for tensor in kept.results}:
                found.insert(0, kept)
                wanted |= {storage_of(tensor) for tensor in kept.op.inputs()}
        return found


def _detach(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    return cast_tree(value, Tensor.detach) if isinstance(value, (list, tuple)) else value


def _versions(values: Sequence[Any]) -> tuple[int, ...]:
    return tuple(0 if tensor.is_inference() else get_version(tensor) for tensor in tensors_in(values))
