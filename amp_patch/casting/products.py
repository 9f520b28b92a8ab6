"""Products of 16-bit values where the hardware has no instructions for them: operands rounded to 16 bits, the product
computed in float32, its result rounded, as matrix units do.

The casts of an operand, to 16 bits and back to float32, are autograd's own, and so is that of the result. Hence a
gradient is rounded where it leaves a product, as that of a 16-bit kernel is, and whatever knows casts (compilers,
function transforms, double backward, checkpoints) knows these.
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
from .compiling import is_dynamo_compiling as is_tracing
from .mode import Mode, Switch
from .overrides import NEVER_OVERRIDDEN, PublicOp, Replacements
from .saved_operands import SavedOperands, may_save_low
from .tensor_cast import cast_nested, make_plain_cast, make_test, tensors_in
from .weight_cache import WeightCache

Op = Callable[..., Any]
InRegion = Callable[[Op, tuple[Any, ...], dict[str, Any]], Any]
Beside = Callable[[Tensor, Op, tuple[Any, ...], dict[str, Any]], Any]


class Products:
    """Makes the replacements of products for one session.

    Args:
        low: the 16-bit dtype.
        device_type: the only device type whose products are computed so.
        cache: of rounded weights, or None.

    Attributes:
        switch: on while the session is in force. Not that of the casts: whether something is cast does not say how
            products of what is 16 bits already are computed.
    """

    def __init__(self, low: torch.dtype, device_type: str, cache: WeightCache | None) -> None:
        self.switch = Switch()
        self.low = low
        self.device_type = device_type
        self._replacements = Replacements()
        self._inside = threading.local()  # frame: of the product being computed in this thread
        self._is_here = make_test(device_type)
        self._cast = make_plain_cast(low, device_type)
        self._widen = make_plain_cast(torch.float32, device_type)
        round_weight = self._round if cache is None else cache.make_cast(self._round)
        # to the low dtype, but weights, which may be cached, to float32 with a value of the low dtype
        self.to_operand: TensorCast = lambda tensor: (
            round_weight(tensor) if tensor.__class__ is Parameter else self._cast(tensor)
        )

    def _round(self, tensor: Tensor) -> Tensor:
        """Return the value in the low dtype, as float32; what is not to be cast as it is."""
        rounded = self._cast(tensor)
        return self._widen(rounded) if rounded.dtype is self.low else rounded

    def narrow(self, result: Any) -> Any:
        """Return a result, or what of a nested one is float32, in the low dtype."""
        float32 = torch.float32
        if result.__class__ is Tensor:
            return self._cast(result) if result.dtype is float32 else result
        return cast_nested(result, lambda tensor: self._cast(tensor) if tensor.dtype is float32 else tensor)

    # ---- where nothing is cast ---------------------------------------------------------------------------------------

    def plan_unlisted(self, taken: set[tuple[int, str]]) -> Iterator[Patch]:
        """Yield a patch for each product, and op without a kernel, but those in `taken`: ids of owners, and names."""
        for owner, name in op_lists.find_products(self.device_type):
            if (id(owner), name) not in taken:
                yield Patch(owner, name, self._run_unlisted)

    def _run_unlisted(self, original: Op) -> Op:
        def make() -> Op:
            public = PublicOp(getattr(original, "__name__", ""), is_of_torch=True)
            public.function = function = self.run_low(original, public)
            return function

        return self._replacements.get("product", original, make)

    def run_low(self, original: Op, public: PublicOp = NEVER_OVERRIDDEN) -> Op:
        """Compute in float32 what is called with operands of the low dtype; call as it was written whatever has others,
        has only one (an einsum of one operand is no product, and may be a view), or names where or in which dtype the
        result is to be.
        """
        name = getattr(original, "__name__", "")
        if name.endswith("_") and not name.endswith("__"):
            return self._run_low_in_place(original, public)
        switch, are_low, call, has_overrides = self.switch, self._are_low, self.call, public.has_overrides
        count = 1 if op_lists.is_without_kernel(name) else 2

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if (has_overrides(args) or (kwargs and has_overrides(tuple(kwargs.values())))) and not is_tracing():
                return public.hand_over(args, kwargs)
            if switch.on and are_low(args, kwargs, count):
                return call(original, args, kwargs, _as_it_is)
            return original(*args, **kwargs)

        return wrapper

    def call(self, original: Op, args: tuple[Any, ...], kwargs: dict[str, Any], cast: TensorCast) -> Any:
        """Call with every tensor as `cast` returns it, in float32 if that is low; return the result rounded.

        What is called inside of it runs as it is: what a product is made of, and the product itself, which export calls
        by its public name once more.
        """
        if is_tracing():
            return self._call(original, args, kwargs, cast)
        inside = self._inside
        frame = getattr(inside, "frame", None)
        if frame is not None and is_running(frame):  # else an interrupt has ended that call
            return original(*args, **kwargs)
        inside.frame = sys._getframe()
        try:
            return self._call(original, args, kwargs, cast)
        finally:
            inside.frame = None

    def _call(self, original: Op, args: tuple[Any, ...], kwargs: dict[str, Any], cast: TensorCast) -> Any:
        saved, low, widen = SavedOperands() if may_save_low() else None, self.low, self._widen

        def operand(tensor: Tensor) -> Tensor:
            rounded = cast(tensor)
            if rounded.dtype is not low:
                return rounded
            wide = widen(rounded)
            if saved is not None and wide is not rounded:
                saved.add(wide, rounded)
            return wide

        operands = [
            operand(value)
            if isinstance(value, Tensor)
            else cast_nested(value, operand)
            if value.__class__ is list or value.__class__ is tuple
            else value
            for value in args
        ]
        if kwargs:
            kwargs = _cast_values(kwargs, operand)
        if not saved:
            return self.narrow(original(*operands, **kwargs))
        with saved:
            result = original(*operands, **kwargs)
        return self.narrow(result)

    def _run_low_in_place(self, original: Op, public: PublicOp) -> Op:
        switch, widen, are_low, has_overrides = self.switch, self._widen, self._are_low, public.has_overrides

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if (has_overrides(args) or (kwargs and has_overrides(tuple(kwargs.values())))) and not is_tracing():
                return public.hand_over(args, kwargs)
            if switch.on and args and are_low(args, kwargs, 2):
                target, *others = args
                wide = widen(target)
                original(wide, *[cast_nested(value, widen) for value in others], **_cast_values(kwargs, widen))
                return target.copy_(wide)
            return original(*args, **kwargs)

        return wrapper

    def _are_low(self, args: tuple[Any, ...], kwargs: dict[str, Any], count: int) -> bool:
        """Tell whether there are at least `count` tensors of the low dtype, no floating ones of another, and the call
        leaves the result to the op.
        """
        if kwargs and not _NAMED_RESULTS.isdisjoint(kwargs):
            return False
        found = 0
        low, is_here = self.low, self._is_here
        for value in (*args, *kwargs.values()) if kwargs else args:
            for tensor in (value,) if isinstance(value, Tensor) else tensors_in(value):
                if tensor.dtype is low:
                    if not is_here(tensor):
                        return False
                    found += 1
                elif tensor.is_floating_point() or tensor.is_complex():
                    return False
        return found >= count

    def whitelist(
        self, original: Op, low: Op, switch: Switch, in_region: InRegion, beside: Beside, public: PublicOp
    ) -> Op:
        """Round all tensors, compute in float32, and round the result.

        Args:
            low: the op where nothing is cast.
            switch: whether casts act.
            in_region, beside: call the op in a region, and with a tensor that is not to be cast.
            public: its public name.
        """
        call, to_operand, to_low, by_lists = self.call, self.to_operand, self._cast, Mode.BY_LISTS
        has_overrides = public.has_overrides

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if (has_overrides(args) or (kwargs and has_overrides(tuple(kwargs.values())))) and not is_tracing():
                return public.hand_over(args, kwargs)
            if not switch.on or (kwargs and kwargs.get("out") is not None):
                return low(*args, **kwargs)
            if switch.regions and switch.mode_here() is not by_lists:
                return in_region(low, args, kwargs)
            count = 0
            for value in (*args, *kwargs.values()) if kwargs else args:
                if isinstance(value, Tensor):
                    count += 1
                    if value.__class__ not in PLAIN_CLASSES and is_opaque(value):
                        return beside(value, low, args, kwargs)
                elif value.__class__ is list or value.__class__ is tuple:
                    count += sum(1 for _ in tensors_in(value))
            if count < 2 or (kwargs and "out_dtype" in kwargs):
                return low(*[cast_nested(value, to_low) for value in args], **_cast_values(kwargs, to_low))
            return call(original, args, kwargs, to_operand)

        return wrapper


def _cast_values(kwargs: dict[str, Any], cast: TensorCast) -> dict[str, Any]:
    return {name: cast_nested(value, cast) for name, value in kwargs.items()}


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


_NAMED_RESULTS = frozenset({"out", "dtype", "out_dtype"})
