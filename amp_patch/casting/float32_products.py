"""Products of 16-bit values that are computed in float32: operands rounded to 16 bits, the product computed in float32,
its result rounded, as matrix units do. That is every product where the hardware has no instructions for them, and on a
CPU that has them short attention, whose 16-bit kernels take several times as long there.

The casts of an operand, to 16 bits and back to float32, are autograd's own, and so is that of the result. Hence a
gradient is rounded where it leaves a product, as that of a 16-bit kernel is, and whatever knows casts (compilers,
function transforms, double backward, checkpoints) knows these. For backward, autograd saves the float32 operands.
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
from .replacement import NEVER_OVERRIDDEN, OpFunction, PrepareCall, PreparedCall, PublicOp, Replacements, replace
from .tensor_cast import cast_arguments, cast_nested, make_plain_cast, tensors_in
from .weight_cache import WeightCache

_NAMED_RESULTS = frozenset({"out", "dtype", "out_dtype"})
_ATTENTION = "scaled_dot_product_attention"


class Float32Products:
    """Makes the replacements of products for one session.

    Args:
        low: the 16-bit dtype.
        device_type: the only device type whose products are computed so.
        cache: of rounded weights, or None.
        longest_attention: compute nothing but attention in float32, and that only up to so many queries times keys;
            None: compute every product so.

    Attributes:
        switch: on while the session is in force. Not that of the casts: whether something is cast does not say how
            products of what is 16 bits already are computed.
    """

    def __init__(
        self, low: torch.dtype, device_type: str, cache: WeightCache | None, longest_attention: int | None = None
    ) -> None:
        self.switch = Switch()
        self.low = low
        self.device_type = device_type
        self.longest_attention = longest_attention
        self._replacements = Replacements()
        self._inside = threading.local()  # frame: of the product being computed in this thread
        self._cast = make_plain_cast(low, device_type)
        self._widen = make_plain_cast(torch.float32, device_type)
        self._round_weight: TensorCast = self._round
        if cache is not None:
            self._round_weight = cache.make_cast(self._round)

    @property
    def takes_all(self) -> bool:
        """Whether every product is computed in float32."""
        return self.longest_attention is None

    def covers(self, name: str) -> bool:
        """Tell whether torch's function of that name may be computed in float32."""
        if not self.takes_all:
            return name == _ATTENTION
        return op_lists.is_product(name) or op_lists.is_without_kernel(name)

    def let_go(self) -> None:
        """Hold no replacement any more."""
        self._replacements.clear()

    def _round(self, tensor: Tensor) -> Tensor:
        """Return the value in the low dtype, as float32; what is not to be cast as it is."""
        rounded = self._cast(tensor)
        if rounded.dtype is self.low:
            return self._widen(rounded)
        return rounded

    def _narrow(self, result: Any) -> Any:
        """Return a result, or what of a nested one is float32, in the low dtype."""
        if result.__class__ is Tensor:
            if result.dtype is torch.float32:
                return self._cast(result)
            return result
        return cast_nested(result, lambda tensor: self._cast(tensor) if tensor.dtype is torch.float32 else tensor)

    # ---- where nothing is cast ---------------------------------------------------------------------------------------

    def plan_unlisted(self, taken: set[tuple[int, str]]) -> Iterator[Patch]:
        """Yield a patch for each product, and op without a kernel, but those in `taken`: ids of owners, and names."""
        for owner, name in op_lists.find_products(self.device_type):
            if self.covers(name) and (id(owner), name) not in taken:
                yield Patch(owner, name, self._run_unlisted)

    def _run_unlisted(self, original: OpFunction) -> OpFunction:
        def make() -> OpFunction:
            public = PublicOp(getattr(original, "__name__", ""), original)
            return public.lead_to(self.run_low(original, public))

        return self._replacements.get("product", original, make)

    def run_low(self, original: OpFunction, public: PublicOp = NEVER_OVERRIDDEN) -> OpFunction:
        """Compute in float32 what is called with operands of the low dtype. Whatever has others, has only one (an
        einsum of one operand is no product, and may be a view), or names where or in which dtype the result is to be,
        runs as it was written.
        """
        if self.longest_attention is not None:
            return self._run_short(original, self.longest_attention, public)
        name = getattr(original, "__name__", "")
        low, device_type, count = self.low, self.device_type, 2
        if op_lists.is_without_kernel(name):
            count = 1
        compute = self._compute(original, None)
        if name.endswith("_") and not name.endswith("__"):
            compute = self._compute_in_place(original)

        def prepare(args: tuple[Any, ...], kwargs: dict[str, Any], mode: Mode) -> PreparedCall:
            if kwargs and not _NAMED_RESULTS.isdisjoint(kwargs):
                return original, args, kwargs
            found = 0
            for value in (*args, *kwargs.values()):
                for tensor in (value,) if isinstance(value, Tensor) else tensors_in(value):
                    if tensor.dtype is low:
                        if is_opaque(tensor) or tensor.device.type != device_type:
                            return original, args, kwargs
                        found += 1
                    elif tensor.is_floating_point() or tensor.is_complex():
                        return original, args, kwargs
            if found < count:
                return original, args, kwargs
            return compute, args, kwargs

        return replace(original, prepare, self.switch, public, torch.float32)

    def _run_short(self, original: OpFunction, longest: int, public: PublicOp) -> OpFunction:
        """Compute attention in float32 if all its operands are low, it is short, and it has neither a dropout nor a
        mask that is added. What it saves for backward is 16 bits, as of the 16-bit kernel: also its result.
        """
        low = self.low

        def prepare(args: tuple[Any, ...], kwargs: dict[str, Any], mode: Mode) -> PreparedCall:
            try:
                attention = Attention(*args, **kwargs)
                is_due = attention.is_short(low, longest)
            except (TypeError, AttributeError):  # wrong arguments: the error is torch's to raise
                is_due = False
            if not is_due:
                return original, args, kwargs
            return attention.compute_in_float32, (original,), {}

        return replace(original, prepare, self.switch, public, torch.float32)

    def _compute(self, original: OpFunction, cast: TensorCast | None) -> OpFunction:
        """Return `original` with every tensor as `cast` returns it, in float32 if that is low, and the result rounded.

        What is called inside of it runs as it is: what a product is made of, and the product itself, which export calls
        by its public name once more.
        """
        low, widen, inside = self.low, self._widen, self._inside

        def operand(tensor: Tensor) -> Tensor:
            if cast is not None:
                tensor = cast(tensor)
            if tensor.dtype is low:
                return widen(tensor)
            return tensor

        def compute(*args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling():
                operands, kwargs = cast_arguments(args, kwargs, operand)
                return self._narrow(original(*operands, **kwargs))
            frame = getattr(inside, "frame", None)
            if frame is not None and is_running(frame):  # else an interrupt has ended that call
                return original(*args, **kwargs)
            inside.frame = sys._getframe()
            try:
                operands, kwargs = cast_arguments(args, kwargs, operand)
                return self._narrow(original(*operands, **kwargs))
            finally:
                inside.frame = None

        return compute

    def _compute_in_place(self, original: OpFunction) -> OpFunction:
        widen = self._widen

        def compute(*args: Any, **kwargs: Any) -> Any:
            if not args:  # a call that names its target
                return original(**kwargs)
            wide = widen(args[0])
            others, kwargs = cast_arguments(args[1:], kwargs, widen)
            original(wide, *others, **kwargs)
            return args[0].copy_(wide)

        return compute

    # ---- whitelisted products ----------------------------------------------------------------------------------------

    def round_operands(
        self, original: OpFunction, low: OpFunction, in_region: Callable[..., PreparedCall]
    ) -> PrepareCall:
        """Round all tensors, compute in float32, and round the result. An opaque operand is asked for no more than one
        cast, to the low dtype: what comes of it is computed as `low` does.

        Args:
            low: the op where nothing is cast.
            in_region: how the op is called in a region.
        """
        to_low = make_plain_cast(self.low, self.device_type, takes_opaque=True)
        compute = self._compute(original, self.to_operand)

        def prepare(args: tuple[Any, ...], kwargs: dict[str, Any], mode: Mode) -> PreparedCall:
            if kwargs and kwargs.get("out") is not None:
                return low, args, kwargs
            if mode is not Mode.BY_LISTS:
                return in_region(low, args, kwargs, mode)
            count, is_opaque_here = 0, False
            for value in (*args, *kwargs.values()):
                if isinstance(value, Tensor):
                    count += 1
                    is_opaque_here |= value.__class__ not in PLAIN_CLASSES and is_opaque(value)
                elif value.__class__ is list or value.__class__ is tuple:
                    for tensor in tensors_in(value):
                        count += 1
                        is_opaque_here |= tensor.__class__ not in PLAIN_CLASSES and is_opaque(tensor)
            if count < 2 or is_opaque_here or "out_dtype" in kwargs:
                return (low, *cast_arguments(args, kwargs, to_low))
            return compute, args, kwargs

        return prepare

    def to_operand(self, tensor: Tensor) -> Tensor:
        """Cast to the low dtype; a weight, which may be cached, to float32 with a value of the low dtype."""
        if tensor.__class__ is Parameter:
            return self._round_weight(tensor)
        return self._cast(tensor)
