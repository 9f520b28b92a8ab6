"""Products of 16-bit values that are computed in float32, as matrix units compute them: operands are rounded to 16
bits, multiplied and added in float32, and the result is rounded.

On hardware without instructions for 16-bit products, all products are computed so. On a CPU with such instructions only
short attention is: its 16-bit kernels take several times as long.

The casts are ordinary casts that autograd records. Gradients are therefore rounded where they leave a product, as by a
16-bit kernel, and everything that handles casts (compilers, function transforms, double backward, checkpoints) handles
these. For backward, autograd saves the float32 operands.
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
        device_type: the only device type whose products are computed in float32.
        cache: the cache of rounded weights, or None.
        longest_attention: compute only attention in float32, and only up to this many queries times keys. None:
            compute every product in float32.

    Attributes:
        switch: on while the session is in force. It is not the switch of the casts: 16-bit values are multiplied in
            float32 in regions without casts, too.
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
        """Return whether torch's function of that name may be computed in float32."""
        if not self.takes_all:
            return name == _ATTENTION
        return op_lists.is_product(name) or op_lists.is_without_cpu_kernel(name)

    def let_go(self) -> None:
        """Drop all replacements."""
        self._replacements.clear()

    def _round(self, tensor: Tensor) -> Tensor:
        """Return a tensor as float32, rounded to the low dtype. A tensor that is never cast is returned as it is."""
        rounded = self._cast(tensor)
        if rounded.dtype is self.low:
            return self._widen(rounded)
        return rounded

    def _narrow(self, result: Any) -> Any:
        """Return a result with its float32 tensors cast to the low dtype."""
        if result.__class__ is Tensor:
            if result.dtype is torch.float32:
                return self._cast(result)
            return result
        return cast_nested(result, lambda tensor: self._cast(tensor) if tensor.dtype is torch.float32 else tensor)

    # ---- 16-bit operands ---------------------------------------------------------------------------------------------

    def plan_unlisted(self, taken: set[tuple[int, str]]) -> Iterator[Patch]:
        """Yield a patch for each product and each op without a 16-bit kernel, except `taken` (owner id, name)."""
        for owner, name in op_lists.find_float32_spellings(self.device_type):
            if self.covers(name) and (id(owner), name) not in taken:
                yield Patch(owner, name, self._run_unlisted)

    def _run_unlisted(self, original: OpFunction) -> OpFunction:
        def make() -> OpFunction:
            public = PublicOp(getattr(original, "__name__", ""), original)
            return public.lead_to(self.run_low(original, public))

        return self._replacements.get("product", original, make)

    def run_low(self, original: OpFunction, public: PublicOp = NEVER_OVERRIDDEN) -> OpFunction:
        """Compute an op in float32 if all its operands have the low dtype.

        A call runs as it was written if it has other operands, names `out` or a dtype, or has a single operand: an
        einsum of one operand is no product, and may return a view.
        """
        if self.longest_attention is not None:
            return self._run_short(original, self.longest_attention, public)
        name = getattr(original, "__name__", "")
        low, device_type, fewest = self.low, self.device_type, 2
        if op_lists.is_without_cpu_kernel(name):
            fewest = 1
        compute = self._compute(original, None)
        if name.endswith("_") and not name.endswith("__"):
            compute = self._compute_in_place(original)

        def prepare(args: tuple[Any, ...], kwargs: dict[str, Any], mode: Mode) -> PreparedCall:
            if kwargs and not _NAMED_RESULTS.isdisjoint(kwargs):
                return original, args, kwargs
            operands = 0
            for value in (*args, *kwargs.values()):
                for tensor in (value,) if isinstance(value, Tensor) else tensors_in(value):
                    if tensor.dtype is low:
                        if is_opaque(tensor) or tensor.device.type != device_type:
                            return original, args, kwargs
                        operands += 1
                    elif tensor.is_floating_point() or tensor.is_complex():
                        return original, args, kwargs
            if operands < fewest:
                return original, args, kwargs
            return compute, args, kwargs

        return replace(original, prepare, self.switch, public, torch.float32)

    def _run_short(self, original: OpFunction, longest: int, public: PublicOp) -> OpFunction:
        """Compute attention in float32 if it is short (see `Attention.is_short`). For backward it saves what
        `Attention.compute_in_float32` says.
        """
        low = self.low

        def prepare(args: tuple[Any, ...], kwargs: dict[str, Any], mode: Mode) -> PreparedCall:
            try:
                attention = Attention(*args, **kwargs)
                is_due = attention.is_short(low, longest)
            except (TypeError, AttributeError):  # wrong arguments: torch raises the error
                is_due = False
            if not is_due:
                return original, args, kwargs
            return attention.compute_in_float32, (original,), {}

        return replace(original, prepare, self.switch, public, torch.float32)

    def _compute(self, original: OpFunction, cast: TensorCast | None) -> OpFunction:
        """Return a function that applies `cast` to every tensor, widens low tensors to float32, calls `original`, and
        rounds the result.

        Products that `original` calls run unchanged: its own parts, and itself, because torch.export calls an op once
        more by its public name.
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
            if frame is not None and is_running(frame):  # a frame that is over was ended by an interrupt
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
        """Round all tensors, compute in float32, and round the result.

        A call with an opaque operand gets one cast, to the low dtype, and goes to `low`: the operand knows no other.

        Args:
            low: the op without casts.
            in_region: prepares a call of the op in a region.
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
        """Cast a tensor to the low dtype, or a weight to float32, rounded to the low dtype: its copy may be cached."""
        if tensor.__class__ is Parameter:
            return self._round_weight(tensor)
        return self._cast(tensor)
