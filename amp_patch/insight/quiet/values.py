"""`ValueWatch`: finds values in forward passes that 16 bits make useless: positions and times with too few digits, and
differences of nearly equal values.

It measures some values, and estimates the error of others:

* A *root* is a value without gradient that the script casts to 16 bits, or makes in 16 bits, as `torch.arange` does.
  The root, and the values that are computed from it, are computed a second time in float32. They are *followed*.
* A *coarse* value has 16 bits, or was computed from such a value by an op that keeps relative errors. Its rounding
  error is estimated from its size and the 16-bit dtype.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...dtypes import LOW_DTYPES
from ...torch_dispatch import TO_COPY, is_random
from ..folding import OpCall
from ..ops import Op, run_in_float32
from ..quiet_record import QuietCause
from ..storages import Storages
from ..tensors import storage_of
from ..twins import Twins
from ..written import Culprit, Written
from .findings import Findings, Place, place_of, place_of_culprit

LARGEST_ROOT, LARGEST_RESULT = 2**20, 2**22
"""A root with more elements than `LARGEST_ROOT` is not followed. Neither are the results of an op if they have more
elements together than `LARGEST_RESULT`.
"""

DISTINCT = 0.75
"""Evenly spaced values are reported if at most this share of them stays distinct in 16 bits."""

WRONG = 0.1
"""Sines and cosines are reported if their relative error is larger than this."""

MISMATCHED = 0.01
"""Integers and results of comparisons are reported if more than this share of them differs from those in float32."""

DROWNED = 0.06
"""A difference is lost in rounding if the rounding error of its operands is larger than this times the difference.

Measured on the scripts of tests/support/quiet_faults.py: at least 0.18 where it is lost, at most 0.015 elsewhere.
"""

UNLIKE = 0.25
"""A result is reported if its relative error is larger than this. The exact result is computed by running the ops just
before it in float32, too.
"""

_ROUNDING = 0.2
"""The relative rounding error of a 16-bit value (root mean square) is about this times `torch.finfo(dtype).eps`."""

_NEAR = 4.0
"""A difference is examined only if it is at least this many times smaller than its operands, or if their size is not
known.
"""

_MAKERS = frozenset({"arange", "linspace", "logspace", "cumsum", "range"})
"""Ops whose 16-bit results are followed: ranges and running sums."""

_FOLLOWED = frozenset(
    {"_to_copy", "clone", "index", "index_select", "gather", "cat", "stack", "repeat", "select_scatter", "cumsum"}
    | {"bmm", "mm", "slice", "expand", "roll", "flip", "repeat_interleave"}
)
"""Ops through which values are followed, besides pointwise ops and ops with integer results.

A product of matrices is followed only if its inner dimension is 1, so that it sums nothing.
"""

_WAVES = frozenset({"sin", "cos"})
_SIZES = frozenset({"abs", "pow", "sign", "linalg_vector_norm", "norm", "sgn"})
"""Ops that usually read only the size or the sign of a difference."""

_UNCHANGING = frozenset({"neg", "_to_copy", "clone"})
"""Ops whose result is as inexact as their input. The op that reads the result shows whether this does harm."""

_DIFFERENCES = frozenset({"sub", "add", "rsub"})
_KEEPS_COARSE = frozenset(
    {"_to_copy", "mul", "div", "neg", "gather", "index", "index_select", "cat", "clone", "bmm", "mm"}
)
"""Ops that make coarse values of coarse inputs: they keep relative errors about as they are."""

_MOST_OPS = 8
"""Of the ops that computed the angle of a sine, at most this many are searched for the one that rounded the angle."""


class _Root(NamedTuple):
    """The place of the op that made a root, and its 16-bit dtype."""

    place: Place
    dtype: torch.dtype


class _Difference(NamedTuple):
    """A difference that is lost in rounding. It is reported once it does harm to an op that reads it.

    Attributes:
        place, dtype: the op that computed the difference, and the 16-bit dtype of the rounding.
        error: the rounding error of the operands, as a part of the difference.
        operands: addresses of the storages of the operands.
        are_shapes_equal: whether all operands have the shape of the difference.
    """

    place: Place
    dtype: torch.dtype
    error: float
    operands: frozenset[int]
    are_shapes_equal: bool


class ValueWatch:
    """Looks at the ops of forward passes.

    Args:
        storages: knows the `Written` of each storage: the record of the op that wrote it last.
        find_op: returns the op of a `Written`, or None if the op is no longer kept.
        findings: receives what is found.
    """

    def __init__(self, storages: Storages, find_op: Callable[[Written], Op | None], findings: Findings) -> None:
        self._storages = storages
        self._find_op = find_op
        self._findings = findings
        self._exact = Twins()
        self._roots: dict[int, _Root] = {}  # by the id of the storage of a followed value
        # The 16-bit dtype of coarse values that have another dtype themselves, by the id of their `Written`.
        self._coarse: dict[int, torch.dtype] = {}
        self._differences: dict[int, _Difference] = {}  # by the id of the `Written` of the result

    def end_step(self) -> None:
        """Forget the values of the step."""
        self._exact = Twins()
        self._roots.clear()
        self._coarse.clear()
        self._differences.clear()

    def look(self, op: Op, call: OpCall, made: Sequence[Written]) -> None:
        """Look at an op of a forward pass. `made` has the `Written`s of its floating results."""
        if not all(map(storage_of, (*op.inputs(), *op.outputs()))):  # a tensor is empty, or hides its values
            return
        is_root = self._begin(op, call)
        if not is_root:
            self._follow(op, call)
        name = op.overload.name.rstrip("_")
        if self._differences:
            self._judge_differences(op, name, made)
        if name in _WAVES:
            self._check_phase(op, call)
        elif name in _DIFFERENCES and made:
            self._check_difference(op, call, made[0])
        elif name == "log" and made and (dtype := self._find_coarse(op.inputs()[0])) is not None:
            self._check_unrounded(op, call, dtype)
        if name in _KEEPS_COARSE:
            self._pass_on_coarse(op, made)

    # ---- values that collapse ----------------------------------------------------------------------------------------

    def _begin(self, op: Op, call: OpCall) -> bool:
        """Begin to follow the result of an op if it is a root. Return whether it is.

        Report a root if few of its evenly spaced values stay distinct: see `DISTINCT`.
        """
        outputs = op.outputs()
        if len(outputs) != 1 or outputs[0].dtype not in LOW_DTYPES or not 1 < outputs[0].numel() <= LARGEST_ROOT:
            return False
        is_cast = op.overload.packet is TO_COPY and call.op.startswith("aten.")  # by the script, not by a list
        if not (is_cast or op.overload.name in _MAKERS):
            return False
        if any(tensor.requires_grad or self._exact.find(tensor) is not None for tensor in op.inputs()):
            return False
        exact = op.args[0] if is_cast else _make_in_float32(op)
        if exact is None or exact.shape != outputs[0].shape or exact.dtype in LOW_DTYPES or exact.is_complex():
            return False
        place = place_of(call)
        self._put(outputs[0], exact.detach().double().float(), _Root(place, outputs[0].dtype))
        share = _find_distinct(exact.detach(), outputs[0])
        if share is not None and share <= DISTINCT:
            self._findings.add(QuietCause.COLLAPSED, place, outputs[0].dtype, kept=share)
        return True

    def _put(self, tensor: Tensor, exact: Tensor, root: _Root) -> None:
        if storage_of(tensor):
            self._exact.put(tensor, exact)
            self._roots[id(tensor.untyped_storage())] = root

    def _find_root(self, op: Op) -> _Root | None:
        for tensor in op.inputs():
            if self._exact.find(tensor) is not None:
                return self._roots.get(id(tensor.untyped_storage()))
        return None

    def _follow(self, op: Op, call: OpCall) -> None:
        """Compute the results of an op on followed values in float32, too. Report integers and comparisons that are
        wrong.
        """
        root = self._find_root(op)
        if root is None:
            return
        outputs = op.outputs()
        if (
            any(tensor.requires_grad for tensor in op.inputs())
            or sum(each.numel() for each in outputs) > LARGEST_RESULT
        ):
            return
        is_integral = all(not tensor.is_floating_point() for tensor in outputs)
        if not is_integral and not op.overload.is_pointwise and op.overload.name.rstrip("_") not in _FOLLOWED:
            return
        if _adds_up(op):
            return
        run = self._exact.run(op)
        if run is None:
            return
        for tensor, exact in zip(outputs, run.outputs(), strict=False):
            if tensor.shape != exact.shape:
                continue
            self._put(tensor, exact, root)
            if not tensor.is_floating_point() and tensor.numel():
                share = _find_mismatch(tensor, exact)
                if share > MISMATCHED:
                    self._findings.add(QuietCause.COLLAPSED, root.place, root.dtype, error=share, used=call.site.place)

    def _check_phase(self, op: Op, call: OpCall) -> None:
        """Report a sine or cosine whose angle has too few digits. The error is measured if the angle is followed, and
        estimated if it is coarse.
        """
        (angle,), root = op.inputs()[:1], self._find_root(op)
        result = op.outputs()[0]
        exact = self._exact.find(result)
        if root is not None and exact is not None:
            error = _relative(result, exact)
            if error > WRONG:
                self._findings.add(QuietCause.COLLAPSED, root.place, root.dtype, error=error, used=call.site.place)
            return
        dtype = self._find_coarse(angle)
        if dtype is None or _is_simple(angle):
            return
        error = _ROUNDING * torch.finfo(dtype).eps * _size(angle) / max(_size(result), 1e-30)
        if error > WRONG:
            culprit = self._find_rounding(angle)
            place = place_of(call) if culprit is None else place_of_culprit(culprit)
            self._findings.add(QuietCause.COLLAPSED, place, dtype, error=error, used=call.site.place, culprit=culprit)

    def _find_rounding(self, tensor: Tensor) -> Culprit | None:
        """Return the op that rounded the values of a coarse tensor; None if no op is known.

        Search the ops that computed the tensor, the latest first.
        """
        known = self._storages.find(tensor)
        culprit = None
        for _ in range(_MOST_OPS):
            if known is None or known.culprit is None:
                break
            culprit, known = known.culprit, self._find_coarse_input(known)
        return culprit

    def _find_coarse_input(self, written: Written) -> Written | None:
        """Return the record of the coarse input from which a result has its errors.

        Return None if the op itself may have rounded, or if it is no longer kept.
        """
        op = self._find_op(written)
        if op is None or op.overload.name not in _KEEPS_COARSE or _adds_up(op):
            return None
        for tensor in op.inputs():
            if self._find_coarse(tensor) is not None and not (tensor.dtype in LOW_DTYPES and _is_simple(tensor)):
                return self._storages.find(tensor)
        return None

    # ---- differences -------------------------------------------------------------------------------------------------

    def _find_coarse(self, tensor: Tensor) -> torch.dtype | None:
        """Return the 16-bit dtype by which the values of a tensor are coarse. None if they are not."""
        if tensor.dtype in LOW_DTYPES:
            return tensor.dtype
        known = self._storages.find(tensor)
        return None if known is None else self._coarse.get(id(known))

    def _pass_on_coarse(self, op: Op, made: Sequence[Written]) -> None:
        """Mark the results of an op as coarse if an input is. Exact 16-bit inputs (`_is_simple`) do not count."""
        if _adds_up(op):
            return
        for tensor in op.inputs():
            dtype = self._find_coarse(tensor)
            if dtype is not None and not (tensor.dtype in LOW_DTYPES and _is_simple(tensor)):
                self._coarse.update((id(written), dtype) for written in made)
                return

    def _check_difference(self, op: Op, call: OpCall, written: Written) -> None:
        """Look at a sum or difference. The rounding errors of its operands may be a large part of it: see `DROWNED`."""
        operands = [tensor for tensor in op.inputs() if tensor.is_floating_point()]
        dtypes = [self._find_coarse(tensor) for tensor in operands]
        dtype = next((each for each in dtypes if each is not None), None)
        # `UpdateWatch` looks at updates of tensors, such as x.add_(y) or torch.add(x, y, alpha=a).
        if dtype is None or "alpha" in op.kwargs or (op.overload.written and not torch.is_grad_enabled()):
            return
        if len(operands) == 1 or not written.largest:
            if written.largest * _NEAR <= abs(_number_in(op)):
                self._check_unrounded(op, call, dtype)
            return
        sources = [self._storages.find(tensor) for tensor in operands]
        largest = max((known.largest for known in sources if known is not None), default=0.0)
        is_known = all(known is not None for known in sources)
        if is_known and written.largest * _NEAR > largest:
            return
        roundings = [0.0]
        for tensor, coarse in zip(op.before_inputs(), dtypes, strict=False):
            if coarse is not None and not _is_simple(tensor):
                roundings.append(_ROUNDING * torch.finfo(coarse).eps * _size(tensor))
        self._note_difference(op, call, dtype, math.hypot(*roundings), written)

    def _check_unrounded(self, op: Op, call: OpCall, dtype: torch.dtype) -> None:
        """Report a result that would be another if the ops just before it did not round, as in 1 - exp(-x) and
        log(1 + x).
        """
        twins = Twins()
        for tensor in op.inputs():
            self._widen(tensor, twins, 2)
        exact = twins.compute(op) if twins else []
        result = op.outputs()[0]
        if not exact or exact[0].shape != result.shape or not exact[0].count_nonzero():
            return
        error = _relative(result, exact[0])
        place = place_of(call)
        if error <= UNLIKE:
            self._findings.pass_over(QuietCause.CANCELLED, place)
        elif self._find_rounding_left(op, twins) <= UNLIKE * _size(exact[0]):
            self._findings.add(QuietCause.CANCELLED, place, dtype, error=error)
        # otherwise nothing is known: the rounding errors that are left are too large compared with the result

    def _find_rounding_left(self, op: Op, twins: Twins) -> float:
        """Return the rounding error that the inputs of an op still have in `twins`. `_widen` has removed none from an
        input without a twin, or with a twin of equal values.
        """
        roundings = [0.0]
        for tensor in op.inputs():
            dtype, twin = self._find_coarse(tensor), twins.find(tensor)
            is_widened = twin is not None and not torch.equal(twin, tensor.float())
            if dtype is not None and not is_widened and not _is_simple(tensor):
                roundings.append(_ROUNDING * torch.finfo(dtype).eps * _size(tensor))
        return math.hypot(*roundings)

    def _widen(self, tensor: Tensor, twins: Twins, depth: int) -> None:
        """Store in `twins` the values that a tensor would have in float32. The op that made the tensor, and ops up to
        `depth` levels before it, are computed again.
        """
        known = self._storages.find(tensor)
        op = None if known is None else self._find_op(known)
        if op is None or is_random(op.function) or op.overload.written:
            return
        if depth:
            for given in op.inputs():
                self._widen(given, twins, depth - 1)
        results = twins.compute(op)
        for made, exact in zip(op.floating_results(), results, strict=False):
            if made.shape == exact.shape:
                twins.put(made, exact)

    def _note_difference(self, op: Op, call: OpCall, dtype: torch.dtype, rounding: float, written: Written) -> None:
        """Note a difference if it is lost in rounding. `rounding`: the rounding error of its operands."""
        size = _size(op.outputs()[0])
        place = place_of(call)
        if not math.isfinite(size) or not math.isfinite(rounding):  # `FaultFinder` reports inf and NaN
            return
        if not size or rounding <= DROWNED * size:
            self._findings.pass_over(QuietCause.CANCELLED, place)
            return
        operands = [tensor for tensor in op.inputs() if tensor.is_floating_point()]
        self._differences[id(written)] = _Difference(
            place,
            dtype,
            rounding / size,
            frozenset(map(storage_of, operands)),
            all(tensor.shape == op.outputs()[0].shape for tensor in operands),
        )

    def _judge_differences(self, op: Op, name: str, made: Sequence[Written]) -> None:
        """Report the differences lost in rounding that an op reads, except where this does no harm.

        It does no harm to a distance of tensors of one shape, such as (x - y).abs(), which is about 0 in any case, or
        to x + (y - x), which is about y in any case.
        """
        for tensor in op.inputs():
            known = self._storages.find(tensor)
            lost = None if known is None else self._differences.get(id(known))
            if lost is None:
                continue
            if made and (name in _UNCHANGING or (name == "add" and math.isfinite(_number_in(op)))):
                self._differences[id(made[0])] = lost
                continue
            is_distance = lost.are_shapes_equal and name in _SIZES and not (name == "pow" and _number_in(op) < 1)
            is_added_back = name == "add" and any(storage_of(given) in lost.operands for given in op.inputs())
            if not is_distance and not is_added_back:
                del self._differences[id(known)]
                self._findings.add(QuietCause.CANCELLED, lost.place, lost.dtype, error=lost.error)


def _adds_up(op: Op) -> bool:
    """Return whether an op is a product of matrices in which several terms are summed."""
    return op.overload.name in ("bmm", "mm") and op.args[0].shape[-1] != 1


def _number_in(op: Op) -> float:
    """Return the first number among the arguments of an op; inf without one."""
    return next((float(value) for value in op.args if isinstance(value, (int, float))), math.inf)


def _make_in_float32(op: Op) -> Tensor | None:
    """Return the result of an op of `_MAKERS` with dtype=torch.float32; None if it cannot run so."""
    run = run_in_float32(op._replace(kwargs={**op.kwargs, "dtype": torch.float32}))
    return None if run is None else next(iter(run.outputs()), None)


def _find_distinct(exact: Tensor, stored: Tensor) -> float | None:
    """Return the share of evenly spaced values that stay distinct. None if they are not evenly spaced, or if there are
    fewer than 16 distinct ones.
    """
    values = exact.double().unique()
    if values.numel() < 16:
        return None
    gaps = values.diff()
    if not bool(values.isfinite().all()) or float(gaps.max()) > 1.01 * float(gaps.min()):
        return None
    return float(stored.unique().numel()) / float(values.numel())


def _find_mismatch(tensor: Tensor, exact: Tensor) -> float:
    """Return the share of elements that differ. For a mask, it is relative to the number of its rarer value."""
    count, differing = tensor.numel(), int((tensor != exact).sum())
    if tensor.dtype is torch.bool:
        held = int(exact.sum())
        count = min(held, count - held) or count
    return differing / count


def _relative(tensor: Tensor, exact: Tensor) -> float:
    difference, whole = tensor.double() - exact.double(), exact.double()
    fits = difference.isfinite() & whole.isfinite()
    size = float(torch.linalg.vector_norm(whole[fits]))
    return float(torch.linalg.vector_norm(difference[fits])) / size if size else 0.0


def _size(tensor: Tensor) -> float:
    """Return the root mean square of a tensor."""
    values = tensor.detach().float()
    return float(values.square().mean().sqrt()) if values.numel() else 0.0


def _is_simple(tensor: Tensor) -> bool:
    """Return whether values have at most four significant bits, as small integers and masks do. Checks a sample.

    Such values are taken to have no rounding error in 16 bits.
    """
    values = tensor.detach().reshape(-1)
    mantissa, _ = torch.frexp(values[:: max(1, values.numel() // 256)].float())
    return bool((mantissa * 16 == (mantissa * 16).round()).all())
