"""`Repair`: what the rest of a step would compute if what does not fit had been computed in float32.

A remedy is tried before it is printed. From the first fault of a step on, each value that comes of it has a *twin*: the
value in float32. An op that is given a twin is computed a second time, with twins, and where its result does not fit in
16 bits either, the op belongs into float32, too. Where a gradient does not fit, so does the op of the forward pass that
it is the gradient of: its output has the dtype of the gradient.
"""

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..casting import cast_tree
from ..config import op_lists
from ..dtypes import LOW_DTYPES, PLAIN_CLASSES
from ..torch_dispatch import clone
from .folding import Call
from .ops import Op, compute_in_float32
from .rules import short
from .short_dtypes import LARGEST, TINY
from .tensors import is_finite, is_whole, read_largest_number, storage_of, tensors_in
from .written import Item, Written, find_named


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

    def compute(self, op: Op) -> list[Tensor]:
        """Return what an op gives for twins in float32, as `compute_in_float32`."""

        def take(tensor: Tensor) -> Tensor:
            twin = self.find(tensor)
            return tensor if twin is None else clone(twin)

        args = [
            cast_tree(given, take) if any(self.find(one) is not None for one in tensors_in([given])) else earlier
            for given, earlier in zip(op.args, op.before, strict=True)
        ]
        kwargs = {name: cast_tree(value, take) for name, value in op.kwargs.items()}
        return compute_in_float32(op._replace(before=args, kwargs=kwargs))

    def _make(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        key, size = id(storage), tensor.element_size()
        everything = tensor.detach().as_strided((storage.nbytes() // size,), (1,), 0)
        flat: Tensor = clone(everything.float())

        def forget(_: Any) -> None:
            self._flat.pop(key, None)

        self._flat[key] = weakref.ref(storage, forget), flat, size
        return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


class Needs(NamedTuple):
    """What would have made the values of a step fit.

    Attributes:
        items: the ops that have to run in float32.
        scale: the largest loss scale, a power of two, under which the other gradients fit that come of a fault; None:
            the scale has no part in it. It may be below 1 where no op can run in float32 instead.
        is_scale_enough: whether that scale is enough without the ops.
        fitting: the largest loss scale under which all gradients fit, without the ops; None: all fit, or none does.
        scale_of_zeros: the one under which no more of the gradients is zero than may be; None: none is.
    """

    items: list[Item]
    scale: float | None
    is_scale_enough: bool
    fitting: float | None
    scale_of_zeros: float | None


class Repair:
    """Follows what comes of the faults of one step.

    `underflow` is the share of a gradient that may become zero, None for any.

    Attributes:
        made: what the ops of the forward pass gave, in order.
        rounding: those that made zeros of what float32 holds: the same lines do so in other modules.
        beyond: the line of an op that gives what float32 does not hold either, "" without one.
        beyond_backward: the same of the backward pass, where it may be masked later.
    """

    def __init__(
        self, underflow: float | None, get_scale: Callable[[], float], is_scaled: Callable[[Tensor], bool]
    ) -> None:
        self._underflow = underflow
        self._get_scale = get_scale
        self._is_scaled = is_scaled
        self._twins = Twins()
        self._gradients: list[tuple[Written, float]] = []  # of which op, and the largest scale under which it fits
        self._of_none = math.inf  # the largest scale under which those fit for which no op could give float32
        self._scale: float | None = None
        self._fitting = math.inf
        self._wanted: set[Written] = set()
        self.made: list[Written] = []
        self.rounding: list[Item] = []
        self._wanted_scale: float | None = None  # the smallest under which no more of the gradients is zero than may be
        self.beyond = ""
        self.beyond_backward = ""

    @property
    def is_under_way(self) -> bool:
        """Whether there is anything to follow."""
        return bool(self._twins)

    def holds(self, tensor: Tensor) -> bool:
        """Tell whether a tensor would be finite in float32, as far as that was followed."""
        twin = self._twins.find(tensor)
        return twin is not None and not _is_beyond(twin)

    def loses(self, tensor: Tensor) -> bool:
        """Tell whether a tensor would not be finite in float32 either, as far as that was followed."""
        twin = self._twins.find(tensor)
        return not self.rounding and twin is not None and _is_beyond(twin)  # what rounding made zero has no twin

    def begin(self, output: Tensor, exact: Tensor | None, wanted: Sequence[Written]) -> None:
        """Take in a fault: an output, what it is in float32, and what has to give float32 for it to be that."""
        self._wanted.update(wanted)
        if exact is not None and exact.shape == output.shape:
            self._twins.put(output, exact)

    def follow(self, op: Op, call: Call | None, made: Sequence[Written], of: Written | None) -> None:
        """Compute what an op would give, and judge whether that fits.

        `made` is what is known of its outputs, `of` the op of the forward pass whose backward it is part of, None where
        that is not known.
        """
        given = [(tensor, twin) for tensor in op.inputs() if (twin := self._twins.find(tensor)) is not None]
        if op.overload.is_overwriting and op.inputs():
            target = op.inputs()[0]
            given = [pair for pair in given if pair[0] is not target]
        outputs = op.floating_results()
        if not given or op.overload.is_in_bulk:
            for tensor in outputs:
                self._twins.drop(tensor)
            return
        results = self._twins.compute(op)
        if len(results) != len(outputs):
            return
        pairs = [pair for pair in zip(outputs, results, strict=True) if pair[0].shape == pair[1].shape]
        if call is not None and call.phase == "backward":
            self._judge_gradients(given, pairs, of, [one.is_scaled for one in made])
            low = [one for one in op.inputs() if one.dtype in LOW_DTYPES]
            is_exact = all(self._twins.find(one) is not None for one in low)  # else rounding may be to blame
            if not self.beyond_backward and is_exact and self._goes_beyond(op, pairs):
                self.beyond_backward = f"the backward pass of {call.op.removeprefix('aten.')} at {call.site.place}"
        elif call is not None and call.phase != "recompute":  # of what has been judged in the forward pass
            self._judge(op, call, given, pairs, made)
        for tensor, result in pairs:
            self._twins.put(tensor, result)

    def _judge(
        self,
        op: Op,
        call: Call,
        given: Sequence[tuple[Tensor, Tensor]],
        outputs: Sequence[tuple[Tensor, Tensor]],
        made: Sequence[Written],
    ) -> None:
        is_given_low = any(pair[0].dtype in LOW_DTYPES and _is_too_large(pair) for pair in given)
        is_low = any(pair[0].dtype in LOW_DTYPES and _is_too_large(pair) for pair in outputs)
        self._wanted.update(one for one in made if (is_low and one.is_low) or (is_given_low and one.is_held_low))
        if not self.beyond and self._goes_beyond(op, outputs):
            self.beyond = f"{call.op} at {call.site.place}"

    def _goes_beyond(self, op: Op, outputs: Sequence[tuple[Tensor, Tensor]]) -> bool:
        """Tell whether an op gives what float32 does not hold, of what it holds, and not by intention."""
        if not any(_is_beyond(result) for _, result in outputs):
            return False
        if any(isinstance(one, float) and math.isinf(one) for one in (*op.args, *op.kwargs.values())):
            return False
        floating = (tensor for tensor in op.inputs() if tensor.is_floating_point())
        twins = (tensor if (twin := self._twins.find(tensor)) is None else twin for tensor in floating)
        return not any(map(_is_beyond, twins))

    def _judge_gradients(
        self,
        given: Sequence[tuple[Tensor, Tensor]],
        outputs: Sequence[tuple[Tensor, Tensor]],
        of: Written | None,
        are_scaled: Sequence[bool],
    ) -> None:
        for tensor, twin in given:
            if self._is_scaled(tensor):
                self.judge_gradient(tensor, twin, of, is_scaled=True)
        for (tensor, result), is_scaled in zip(outputs, are_scaled, strict=False):
            self.judge_gradient(tensor, result, of, is_scaled=is_scaled)
            if tensor.dtype in LOW_DTYPES and is_scaled:
                self.raise_scale(tensor, result)

    def judge_gradient(self, gradient: Tensor, exact: Tensor, of: Written | None, *, is_scaled: bool) -> None:
        """Where a value of the backward pass does not fit in 16 bits: have the scale be so small that it does, if it
        goes with the scale, or `of` give float32.
        """
        if gradient.dtype not in LOW_DTYPES or not _is_too_large((gradient, exact)):
            return
        fitting = 0.0
        if is_scaled:
            fitting = self._lower_scale(gradient, exact)
        elif of is None or not of.is_low:
            return
        if of is not None and of.is_low:
            self._gradients.append((of, fitting))
        else:
            self._of_none = min(self._of_none, fitting)

    def _lower_scale(self, gradient: Tensor, exact: Tensor) -> float:
        """Have the scale be the largest power of two under which a gradient fits, if that is not below 1; return it."""
        room = LARGEST[short(gradient.dtype)] / read_largest_number(exact)
        fitting = 2.0 ** math.floor(math.log2(self._get_scale() * room))
        self._fitting = min(self._fitting, fitting)
        if fitting >= 1:
            self._scale = fitting if self._scale is None else min(self._scale, fitting)
        return fitting

    def raise_scale(self, tensor: Tensor, exact: Tensor) -> None:
        """Have the scale be so large that no more of a gradient is zero in 16 bits than may be."""
        sizes = exact[exact != 0].abs().flatten()
        if self._underflow is None or not sizes.numel():
            return
        smallest = float(sizes.kthvalue(int(self._underflow * (sizes.numel() - 1)) + 1).values)
        loss_scale = self._get_scale()
        needed = loss_scale * 2.0 ** math.ceil(math.log2(2 * TINY[short(tensor.dtype)] / smallest))
        if needed > loss_scale:
            self._wanted_scale = max(needed, self._wanted_scale or needed)
            self._lower_scale(tensor, exact)

    def find_needs(self) -> Needs:
        """Return what the step needs. Ops whose gradients do not fit are to run in float32 if that costs little; where
        products are among them, a smaller scale is better, if there is one.
        """
        forward = find_named(self.made, self._wanted)
        unscalable = {of for of, fitting in self._gradients if fitting < 1}
        is_scale_enough = self._scale is not None and not forward and not unscalable and self._of_none >= 1
        items = find_named(self.made, self._wanted | {of for of, _ in self._gradients})
        scale = self._scale
        if any(_is_product(item) for item in items if item not in forward):
            items = find_named(self.made, self._wanted | unscalable)
        elif not is_scale_enough:
            scale = None
        if self._of_none < 1 and not items:
            scale, is_scale_enough = self._of_none, True
        scale_of_zeros = self._wanted_scale
        if scale_of_zeros is not None and scale is not None:
            scale_of_zeros = min(scale_of_zeros, scale)
        fitting = None if forward or math.isinf(self._fitting) else self._fitting
        return Needs(items, scale, is_scale_enough, fitting, scale_of_zeros)


def _is_product(item: Item) -> bool:
    return any(map(op_lists.is_product, (item.op.rpartition(".")[2], item.aten)))


def _is_too_large(pair: tuple[Tensor, Tensor]) -> bool:
    """Tell whether a value does not fit in the 16 bits that the script has it in."""
    tensor, twin = pair
    limit = LARGEST.get(short(tensor.dtype), LARGEST["f16"])
    return read_largest_number(twin) > limit


def _is_beyond(value: Tensor) -> bool:
    return value.numel() > 0 and not is_finite(value)
