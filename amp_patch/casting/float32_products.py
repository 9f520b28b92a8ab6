"""`Float32Products`: computes products of 16-bit values in float32, as matrix units do: operands are rounded to 16
bits, multiplied and added in float32, and the result is rounded to 16 bits. Products are matrix products, convolutions,
attention and the like (`config/product_names.py` lists them).

With `compute="float32"`, all products are computed in this way. With `compute="auto"`, the hardware decides: without
instructions for 16-bit products, all products are computed in this way; on an x86 CPU with such instructions, only
short attention is, because that is faster than torch's 16-bit kernels; on other hardware, none is.

Operands and results are rounded by ordinary casts, which autograd records. So the gradients that a product gives are
rounded, too, as with a 16-bit kernel, and compilers, function transforms, double backward and checkpoints work as with
any casts. For backward, autograd saves the float32 operands, except where `Attention` saves 16-bit values.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ..config import op_lists
from ..dtypes import PLAIN_CLASSES, TensorCast, is_opaque
from ..interrupts import is_running
from ..patching import Patch
from .attention import Attention
from .compiling import is_dynamo_compiling
from .mode import Mode, Switch
from .replacement import WITHOUT_OVERRIDES, OpFunction, PrepareCall, PreparedCall, PublicOp, Replacements, replace
from .tensor_cast import cast_arguments, cast_nested, make_plain_cast, tensors_in
from .weight_cache import WeightCache

# the keyword arguments that decide the dtype of the result
_RESULT_OPTIONS = frozenset({"out", "dtype", "out_dtype"})
_ATTENTION = "scaled_dot_product_attention"


class Float32Products:
    """Makes the functions that replace torch's products in one session.

    Args:
        low: the 16-bit dtype.
        device_type: the only device type whose products are computed in float32.
        cache: the cache of weights that are rounded to the low dtype and stored in float32, or None.
        max_scores: compute only attention in float32, if it has at most this many scores (queries times keys) for each
            head. None: compute every product in float32, and on a CPU also the ops that have no 16-bit kernel there.

    Attributes:
        switch: on while the session is in force. `OpCasts` has another switch: where that one is off, as
            in `amp.disable_casts()`, products of 16-bit values are still computed in float32.
    """

    def __init__(
        self, low: torch.dtype, device_type: str, cache: WeightCache | None, max_scores: int | None = None
    ) -> None:
        self.switch = Switch()
        self.low = low
        self.device_type = device_type
        self.max_scores = max_scores
        self._replacements = Replacements()
        # `frame`: the Python frame in which this thread computes a product; not set, or None, outside of products
        self._thread = threading.local()
        self._to_low = make_plain_cast(low, device_type)
        self._to_float32 = make_plain_cast(torch.float32, device_type)
        self._round_weight: TensorCast = self._round
        if cache is not None:
            self._round_weight = cache.make_cast(self._round)

    @property
    def covers_all(self) -> bool:
        """Whether every product is computed in float32."""
        return self.max_scores is None

    def covers(self, name: str) -> bool:
        """Return whether torch's function of that name may be computed in float32."""
        if not self.covers_all:
            return name == _ATTENTION
        return op_lists.is_product(name) or op_lists.is_without_cpu_kernel(name)

    def drop_replacements(self) -> None:
        """Forget all replacements."""
        self._replacements.clear()

    def _round(self, tensor: Tensor) -> Tensor:
        """Return a tensor rounded to the low dtype, as float32. A tensor that cannot be cast is returned unchanged."""
        rounded = self._to_low(tensor)
        if rounded.dtype is self.low:
            return self._to_float32(rounded)
        return rounded

    def _round_result(self, result: Any) -> Any:
        """Return a result with its float32 tensors cast to the low dtype."""
        if result.__class__ is Tensor:
            if result.dtype is torch.float32:
                return self._to_low(result)
            return result
        return cast_nested(result, lambda tensor: self._to_low(tensor) if tensor.dtype is torch.float32 else tensor)

    # ---- 16-bit operands ---------------------------------------------------------------------------------------------

    def plan_unlisted(self, taken: set[tuple[int, str]]) -> Iterator[Patch]:
        """Yield a patch for each name of each function for which `covers` is true, except names that other patches
        replace: `taken` holds the id of the owner and the name, such as `(id(torch), "matmul")`.
        """
        for owner, name in op_lists.find_float32_spellings(self.device_type):
            if self.covers(name) and (id(owner), name) not in taken:
                yield Patch(owner, name, self._replace_unlisted)

    def _replace_unlisted(self, original: OpFunction) -> OpFunction:
        """Return the replacement of a product that no list names. All names of a product get the same replacement."""

        def make() -> OpFunction:
            public = PublicOp(getattr(original, "__name__", ""), original)
            return public.set_replacement(self.run_low_in_float32(original, public))

        return self._replacements.get("product", original, make)

    def run_low_in_float32(self, original: OpFunction, public: PublicOp = WITHOUT_OVERRIDES) -> OpFunction:
        """Return a function that computes an op in float32 if all its floating operands have the low dtype.

        A call runs unchanged if it names `out`, `dtype` or `out_dtype`. So does a call with an operand that is opaque
        (`dtypes.is_opaque`), on another type of device, or of another floating or complex dtype. So does a call of a
        product with a single operand: an einsum of one operand multiplies nothing, and may return a view.

        With `max_scores`, the op is attention: see `_run_short_attention`.
        """
        if self.max_scores is not None:
            return self._run_short_attention(original, self.max_scores, public)
        name = getattr(original, "__name__", "")
        low, device_type, min_operands = self.low, self.device_type, 2
        if op_lists.is_without_cpu_kernel(name):
            min_operands = 1
        compute = self._make_compute(original, None)
        if name.endswith("_") and not name.endswith("__"):  # as in Tensor.addmm_
            compute = self._make_compute_in_place(original)

        def prepare(args: tuple[Any, ...], kwargs: dict[str, Any], mode: Mode) -> PreparedCall:
            if kwargs and not _RESULT_OPTIONS.isdisjoint(kwargs):
                return original, args, kwargs
            operand_count = 0
            for value in (*args, *kwargs.values()):
                for tensor in (value,) if isinstance(value, Tensor) else tensors_in(value):
                    if tensor.dtype is low:
                        if is_opaque(tensor) or tensor.device.type != device_type:
                            return original, args, kwargs
                        operand_count += 1
                    elif tensor.is_floating_point() or tensor.is_complex():
                        return original, args, kwargs
            if operand_count < min_operands:
                return original, args, kwargs
            return compute, args, kwargs

        return replace(original, prepare, self.switch, public, torch.float32)

    def _run_short_attention(self, original: OpFunction, max_scores: int, public: PublicOp) -> OpFunction:
        """Return a function that computes attention in float32 if `Attention.can_use_float32`, and otherwise calls
        `original`.
        """
        low = self.low

        def prepare(args: tuple[Any, ...], kwargs: dict[str, Any], mode: Mode) -> PreparedCall:
            try:
                attention = Attention(*args, **kwargs)
                is_short = attention.can_use_float32(low, max_scores)
            except (TypeError, AttributeError):  # wrong arguments, for which torch raises an error
                is_short = False
            if not is_short:
                return original, args, kwargs
            return attention.compute_in_float32, (original,), {}

        return replace(original, prepare, self.switch, public, torch.float32)

    def _make_compute(self, original: OpFunction, cast: TensorCast | None) -> OpFunction:
        """Return a function that applies `cast`, if given, to every tensor, converts low tensors to float32, calls
        `original`, and rounds the result.

        If `original` calls products by their patched names, these run unchanged in eager code, because the intermediate
        results of one product must not be rounded. torch.export, for example, calls `original` again by its public
        name.
        """
        low, to_float32, thread = self.low, self._to_float32, self._thread

        def convert(tensor: Tensor) -> Tensor:
            if cast is not None:
                tensor = cast(tensor)
            if tensor.dtype is low:
                return to_float32(tensor)
            return tensor

        def compute(*args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling():
                operands, kwargs = cast_arguments(args, kwargs, convert)
                return self._round_result(original(*operands, **kwargs))
            outer = getattr(thread, "frame", None)
            # A frame that is not running was ended by a Ctrl-C before its `finally`, and does not count.
            if outer is not None and is_running(outer):
                return original(*args, **kwargs)
            thread.frame = sys._getframe()
            try:
                operands, kwargs = cast_arguments(args, kwargs, convert)
                return self._round_result(original(*operands, **kwargs))
            finally:
                thread.frame = None

        return compute

    def _make_compute_in_place(self, original: OpFunction) -> OpFunction:
        """Return a function that runs an in-place op on float32 copies, and copies the result to its target. If the
        target is a keyword argument, the function calls `original` with the arguments as they are.
        """
        to_float32 = self._to_float32

        def compute(*args: Any, **kwargs: Any) -> Any:
            if not args:
                return original(**kwargs)
            widened = to_float32(args[0])
            operands, kwargs = cast_arguments(args[1:], kwargs, to_float32)
            original(widened, *operands, **kwargs)
            return args[0].copy_(widened)

        return compute

    # ---- whitelisted products ----------------------------------------------------------------------------------------

    def round_operands(
        self, original: OpFunction, low_op: OpFunction, in_region: Callable[..., PreparedCall]
    ) -> PrepareCall:
        """Return the function that prepares the calls of a whitelisted product (`PrepareCall`). A prepared call rounds
        its castable tensors to the low dtype, computes the product in float32, and rounds the result.

        Some calls go to `low_op` with tensors in the low dtype instead: a call with an opaque operand, which does not
        support a second cast, a call with fewer than two tensors, and a call with `out_dtype`. A call with `out` goes
        to `low_op` with its own tensors.

        Args:
            original: the op as torch computes it.
            low_op: the result of `run_low_in_float32` for this op.
            in_region: prepares a call in a region of mode LOW or FLOAT32: `OpCasts._in_region`.
        """
        to_low = make_plain_cast(self.low, self.device_type, takes_opaque=True)
        compute = self._make_compute(original, self.to_operand)

        def prepare(args: tuple[Any, ...], kwargs: dict[str, Any], mode: Mode) -> PreparedCall:
            if kwargs and kwargs.get("out") is not None:
                return low_op, args, kwargs
            if mode is not Mode.BY_LISTS:
                return in_region(low_op, args, kwargs, mode)
            operand_count, has_opaque = 0, False
            for value in (*args, *kwargs.values()):
                if isinstance(value, Tensor):
                    operand_count += 1
                    has_opaque |= value.__class__ not in PLAIN_CLASSES and is_opaque(value)
                elif value.__class__ is list or value.__class__ is tuple:
                    for tensor in tensors_in(value):
                        operand_count += 1
                        has_opaque |= tensor.__class__ not in PLAIN_CLASSES and is_opaque(tensor)
            # a call with one tensor multiplies nothing
            if operand_count < 2 or has_opaque or "out_dtype" in kwargs:
                return (low_op, *cast_arguments(args, kwargs, to_low))
            return compute, args, kwargs

        return prepare

    def to_operand(self, tensor: Tensor) -> Tensor:
        """Return a tensor in the low dtype. A parameter is rounded to the low dtype, but returned in float32: the cache
        holds it in this form, which needs no second cast. A tensor that cannot be cast is returned unchanged.
        """
        if tensor.__class__ is Parameter:
            return self._round_weight(tensor)
        return self._to_low(tensor)
