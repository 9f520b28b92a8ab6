"""`Repair`: tries remedies for values that do not fit into 16 bits.

A value that does not fit gets a *twin* if possible: the value in float32. An op whose inputs have twins is computed a
second time, with the twins, and its results get twins, too. If a twin is too large for 16 bits, its op has to run in
float32 as well.

A value that does not fit is a *fault*, unless a fault in the values that it was computed from explains it.

If a gradient does not fit, there are two remedies: a smaller loss scale, or float32 for the op of the forward pass
whose gradient it is.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from ..config import op_lists
from ..dtypes import LOW_DTYPES
from .folding import OpCall
from .ops import Op
from .rules import short
from .short_dtypes import LARGEST, TINY
from .tensors import is_finite, read_largest_number
from .twins import Twins
from .written import Culprit, Written, find_culprits

_Pair = tuple[Tensor, Tensor]  # a tensor and its twin


class Needs(NamedTuple):
    """The changes that make the values of a step fit.

    Attributes:
        culprits: the ops that have to run in float32.
        scale: a smaller loss scale, a power of two, under which gradients fit; None if `find_needs` chooses none. It is
            below 1 only if there are no culprits.
        is_scale_enough: whether all gradients fit under `scale` even if the culprits stay in 16 bits.
        fitting: the largest loss scale under which all gradients fit if the culprits stay in 16 bits. None if no
            gradient bounds the scale, or if values of the forward pass do not fit.
        scale_of_zeros: the smallest loss scale under which few enough gradients are zero (see `underflow` of `Repair`),
            or `scale` if that is smaller. None if the present scale is large enough.
    """

    culprits: list[Culprit]
    scale: float | None
    is_scale_enough: bool
    fitting: float | None
    scale_of_zeros: float | None


class Repair:
    """Computes the values that depend on the faults of one step again, in float32.

    Args:
        underflow: the largest share of a gradient that may become zero in 16 bits; None: no limit.
        get_scale: returns the loss scale in force.
        is_scaled: returns whether a tensor carries the loss scale.

    Attributes:
        made: the `Written` records of the results of the forward pass, in order.
        rounding: ops whose rounding to 16 bits made a later result not fit.
        beyond: the first op of the forward pass whose result is not finite in float32 either, with its line; "" if
            there is none.
        beyond_backward: the same for the backward pass. It need not matter there: a later op may mask the result.
    """

    def __init__(
        self, underflow: float | None, get_scale: Callable[[], float], is_scaled: Callable[[Tensor], bool]
    ) -> None:
        self._underflow = underflow
        self._get_scale = get_scale
        self._is_scaled = is_scaled
        self._twins = Twins()
        self._wanted: set[Written] = set()  # results that have to be float32
        # Gradients that do not fit, and would if an op of the forward pass ran in float32: the record of this op, and
        # the largest loss scale under which the gradient fits while the op stays in 16 bits.
        self._repairable: list[tuple[Written, float]] = []
        # The largest loss scale under which all other gradients that do not fit would fit.
        self._scale_of_others = math.inf
        self._scale: float | None = None  # the smallest scale of 1 or more that `_lower_scale` has returned
        self._fitting = math.inf  # the smallest scale that `_lower_scale` has returned
        self._scale_of_zeros: float | None = None  # the smallest scale under which few enough gradients are zero
        self.made: list[Written] = []
        self.rounding: list[Culprit] = []
        self.beyond = ""
        self.beyond_backward = ""

    @property
    def is_under_way(self) -> bool:
        """Whether any value has a twin."""
        return bool(self._twins)

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor has a twin that is finite."""
        twin = self._twins.find(tensor)
        return twin is not None and not _is_beyond(twin)

    def loses(self, tensor: Tensor) -> bool:
        """Return whether the twin of a tensor shows that the tensor is not finite in float32 either."""
        twin = self._twins.find(tensor)
        # Rounding may have made zeros that have no twins. Then a twin with inf or NaN proves nothing.
        return not self.rounding and twin is not None and _is_beyond(twin)

    def begin(self, output: Tensor, exact: Tensor | None, wanted: Sequence[Written]) -> None:
        """Begin at a fault: give a twin to the tensor that does not fit, and note the results that have to be float32.

        Args:
            output: the tensor that does not fit.
            exact: its values in float32, which become its twin. None if they are not known.
            wanted: the results that have to be float32 so that the output has the values `exact`.
        """
        self._wanted.update(wanted)
        if exact is not None and exact.shape == output.shape:
            self._twins.put(output, exact)

    def follow(self, op: Op, call: OpCall | None, made: Sequence[Written], forward: Written | None) -> None:
        """If inputs of an op have twins, compute it with the twins. Note the change that makes its results fit.

        Args:
            made: the records of the op's outputs.
            forward: in a backward pass, the record of the forward op whose gradient is computed, or None.
        """
        given = self._find_given_twins(op)
        outputs = op.floating_results()
        is_followed = bool(given) and not op.overload.is_in_bulk
        results = self._twins.compute(op) if is_followed else []  # also [] if the op cannot run in float32
        if not is_followed or len(results) != len(outputs):
            for tensor in outputs:
                # the op has overwritten the output, so an old twin does not belong to its values
                self._twins.drop(tensor)
            return
        pairs = [pair for pair in zip(outputs, results, strict=True) if pair[0].shape == pair[1].shape]
        if call is not None and call.phase == "backward":
            self._follow_backward(op, call, given, pairs, made, forward)
        elif call is not None and call.phase != "recompute":  # a recomputation repeats ops that were noted before
            self._follow_forward(op, call, given, pairs, made)
        for tensor, result in pairs:
            self._twins.put(tensor, result)

    def _find_given_twins(self, op: Op) -> list[_Pair]:
        """Return the inputs that have twins, with the twins. An output that the op overwrites unread is no input."""
        given = [(tensor, twin) for tensor in op.inputs() if (twin := self._twins.find(tensor)) is not None]
        if op.overload.is_overwriting and op.inputs():
            target = op.inputs()[0]
            given = [pair for pair in given if pair[0] is not target]
        return given

    def _follow_forward(
        self, op: Op, call: OpCall, given: Sequence[_Pair], outputs: Sequence[_Pair], made: Sequence[Written]
    ) -> None:
        """Note an op of the forward pass if its result, or an input, does not fit into 16 bits."""
        is_input_too_large = any(pair[0].dtype in LOW_DTYPES and _is_too_large(pair) for pair in given)
        is_output_too_large = any(pair[0].dtype in LOW_DTYPES and _is_too_large(pair) for pair in outputs)
        for written in made:
            # An input that is too large will be float32. An op that casts it back to 16 bits has to be changed, too.
            if (is_output_too_large and written.is_low) or (is_input_too_large and written.is_held_low):
                self._wanted.add(written)
        if not self.beyond and self._goes_beyond(op, outputs):
            self.beyond = f"{call.op} at {call.site.place}"

    def _follow_backward(
        self,
        op: Op,
        call: OpCall,
        given: Sequence[_Pair],
        outputs: Sequence[_Pair],
        made: Sequence[Written],
        forward: Written | None,
    ) -> None:
        for tensor, twin in given:
            if self._is_scaled(tensor):
                self.fit_gradient(tensor, twin, forward, is_scaled=True)
        for (tensor, result), written in zip(outputs, made, strict=False):
            self.fit_gradient(tensor, result, forward, is_scaled=written.is_scaled)
            if tensor.dtype in LOW_DTYPES and written.is_scaled:
                self.raise_scale(tensor, result)
        low = [tensor for tensor in op.inputs() if tensor.dtype in LOW_DTYPES]
        # an input without a twin is rounded, and its rounding may be the reason
        is_exact = all(self._twins.find(tensor) is not None for tensor in low)
        if not self.beyond_backward and is_exact and self._goes_beyond(op, outputs):
            self.beyond_backward = f"the backward pass of {call.op.removeprefix('aten.')} at {call.site.place}"

    def _goes_beyond(self, op: Op, outputs: Sequence[_Pair]) -> bool:
        """Return whether the result of an op is not finite in float32, although its inputs are, and no number among its
        arguments is inf.
        """
        if not any(_is_beyond(result) for _, result in outputs):
            return False
        if any(isinstance(value, float) and math.isinf(value) for value in (*op.args, *op.kwargs.values())):
            return False
        floating = (tensor for tensor in op.inputs() if tensor.is_floating_point())
        twins = (tensor if (twin := self._twins.find(tensor)) is None else twin for tensor in floating)
        return not any(map(_is_beyond, twins))

    def fit_gradient(self, gradient: Tensor, exact: Tensor, forward: Written | None, *, is_scaled: bool) -> None:
        """Note the change that makes a value of the backward pass fit: a smaller loss scale, or `forward` in float32.

        `is_scaled`: whether the value carries the loss scale. If not, no loss scale helps.
        """
        if gradient.dtype not in LOW_DTYPES or not _is_too_large((gradient, exact)):
            return
        fitting = 0.0
        if is_scaled:
            fitting = self._lower_scale(gradient, exact)
        elif forward is None or not forward.is_low:
            return
        if forward is not None and forward.is_low:
            self._repairable.append((forward, fitting))
        else:
            self._scale_of_others = min(self._scale_of_others, fitting)

    def _lower_scale(self, gradient: Tensor, exact: Tensor) -> float:
        """Return the largest power of two that is a loss scale under which a gradient fits. Note it as a bound."""
        # Gradients grow linearly with the loss scale.
        room = LARGEST[short(gradient.dtype)] / read_largest_number(exact)
        fitting = 2.0 ** math.floor(math.log2(self._get_scale() * room))
        self._fitting = min(self._fitting, fitting)
        if fitting >= 1:
            self._scale = fitting if self._scale is None else min(self._scale, fitting)
        return fitting

    def raise_scale(self, tensor: Tensor, exact: Tensor) -> None:
        """Note the smallest loss scale under which few enough elements of a gradient are zero in 16 bits, if it is
        larger than the present scale.
        """
        sizes = exact[exact != 0].abs().flatten()
        if self._underflow is None or not sizes.numel():
            return
        # The allowed share of the gradient may round to zero; the smallest value beyond this share may not.
        smallest = float(sizes.kthvalue(int(self._underflow * (sizes.numel() - 1)) + 1).values)
        loss_scale = self._get_scale()
        needed = loss_scale * 2.0 ** math.ceil(math.log2(2 * TINY[short(tensor.dtype)] / smallest))
        if needed > loss_scale:
            self._scale_of_zeros = max(needed, self._scale_of_zeros or needed)
            # The same gradient bounds the scale from above.
            self._lower_scale(tensor, exact)

    def find_needs(self) -> Needs:
        """Return the changes that make the values of the step fit.

        For gradients that do not fit, the remedy is float32 for ops of the forward pass; a smaller loss scale is
        returned with it if the scale alone would be enough. If one of these ops is a product, such as a matrix
        product or a convolution, it is slow in float32. Then the remedy is a smaller loss scale, except for gradients
        that need one below 1.
        """
        of_forward = find_culprits(self.made, self._wanted)  # ops whose own results do not fit
        all_culprits = find_culprits(self.made, self._wanted | {written for written, _ in self._repairable})
        # ops whose gradients fit under no scale of 1 or more
        beyond_scales = {written for written, fitting in self._repairable if fitting < 1}
        is_scale_enough = (
            self._scale is not None and not of_forward and not beyond_scales and self._scale_of_others >= 1
        )
        needs_slow_product = any(_is_product(culprit) for culprit in all_culprits if culprit not in of_forward)
        if needs_slow_product:
            culprits, scale = find_culprits(self.made, self._wanted | beyond_scales), self._scale
        else:
            culprits, scale = all_culprits, self._scale if is_scale_enough else None
        if self._scale_of_others < 1 and not culprits:  # no other remedy is left than a scale below 1
            scale, is_scale_enough = self._scale_of_others, True
        scale_of_zeros = self._scale_of_zeros
        if scale_of_zeros is not None and scale is not None:
            scale_of_zeros = min(scale_of_zeros, scale)
        fitting = None if of_forward or math.isinf(self._fitting) else self._fitting
        return Needs(culprits, scale, is_scale_enough, fitting, scale_of_zeros)


def _is_product(culprit: Culprit) -> bool:
    return any(map(op_lists.is_product, (culprit.op.rpartition(".")[2], culprit.aten)))


def _is_too_large(pair: _Pair) -> bool:
    """Return whether the twin of a tensor is too large for the tensor's dtype; for float16 if the tensor is wider."""
    tensor, twin = pair
    limit = LARGEST.get(short(tensor.dtype), LARGEST["f16"])
    return read_largest_number(twin) > limit


def _is_beyond(value: Tensor) -> bool:
    """Return whether a value is not finite in float32."""
    return value.numel() > 0 and not is_finite(value)
