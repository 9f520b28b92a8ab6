"""What replaces a listed op: one plain function per op and rule, chosen when it is installed.

Each has the same shape: if casts act in this thread, cast the arguments that need it, then call the original. An
argument already in the right dtype costs one `dtype is` test. As in torch.autocast, a call with an explicit `out=`
(and, for float32 ops, `dtype=`) runs as it was written.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..config import op_lists
from ..dtypes import LOW_DTYPES, TensorCast
from ..errors import BannedOpError
from .bodies import run_in_region, run_uncast
from .compiling import is_dynamo_compiling as is_tracing
from .fast_paths import FastPaths, Op
from .mode import Mode, Switch
from .overrides import NEVER_OVERRIDDEN, PublicOp, Replacements
from .products import Products
from .promotion import Promotions, target_of
from .tensor_cast import cast_nested, is_uncastable, make_plain_cast
from .weight_cache import WeightCache

# Python functions of torch that call products, which would cast to low again what these were to compute in float32.
_COMPOSED = frozenset({"svd_lowrank", "pca_lowrank", "linear_cross_entropy", "multi_head_attention_forward"})


class OpCasts(Promotions):
    """Makes the replacements for one session.

    Args:
        switch: whether the casts act.
        low: the 16-bit dtype of whitelisted ops.
        device_type: the only device type whose tensors are cast, such as "cuda".
        cache: the cache of low-precision weights, or None to cast weights at each use.
        in_float32: computes products in float32, or None to leave them to the kernels of the low dtype.
        casts_inside: run the bodies of listed functions that are not of torch by their rule, too.
    """

    def __init__(
        self,
        switch: Switch,
        low: torch.dtype,
        device_type: str,
        cache: WeightCache | None,
        in_float32: Products | None = None,
        *,
        casts_inside: bool = True,
    ) -> None:
        super().__init__(switch, device_type)
        self.low = low
        self.in_float32 = in_float32
        self.casts_inside = casts_inside
        if in_float32 is not None:
            cache = None  # its copies are for products
        plain = make_plain_cast(low, device_type, is_for_kernels=in_float32 is None)
        self.to_low = plain if cache is None else cache.make_cast(plain)
        uncached = plain if cache is None else cache.make_cast_uncached(plain)
        self._fast_paths = FastPaths(switch, low, plain, self.to_low, uncached, {} if cache is None else cache.valid)
        self._replacements = Replacements()

    def wrap(self, kind: str, original: Op) -> Op:
        """Return the replacement of `original` under the rule `kind`: the same one wherever `original` is found."""
        return self._replacements.get(kind, original, lambda: self._wrap(kind, original))

    def _wrap(self, kind: str, original: Op) -> Op:
        is_torchs = _is_torchs(original)
        if self.casts_inside and not is_torchs and kind in ("whitelist", "blacklist"):
            mode, cast = (Mode.LOW, self.to_low) if kind == "whitelist" else (Mode.FLOAT32, self.to_float)
            return run_in_region(original, mode, cast, self.switch)
        # a user's function of that name may take anything
        name = getattr(original, "__name__", "") if is_torchs else ""
        public = PublicOp(name, is_of_torch=is_torchs)
        public.function = function = self._choose(kind, original, name, public)
        return function

    def _choose(self, kind: str, original: Op, name: str, public: PublicOp) -> Op:
        if self.in_float32 is not None and (op_lists.is_product(name) or op_lists.is_without_kernel(name)):
            low = self.in_float32.run_low(original)
            if kind == "whitelist" and op_lists.is_product(name):
                return self.in_float32.whitelist(original, low, self.switch, self._in_region, self._beside, public)
            original = low
        inner = run_uncast(original, self.switch) if kind == "blacklist" and name in _COMPOSED else original
        make: Callable[[Op, PublicOp], Op] = getattr(self, kind)  # each rule has the method of its name
        general = make(inner, public)
        if (make_fast_path := self._fast_paths.find(kind, name)) is not None:
            return make_fast_path(original, general)
        if kind in ("whitelist", "blacklist") and (position := _position_of_inplace(original)) is not None:
            return _honouring_inplace(original, general, position)
        return general

    def whitelist(self, original: Op, public: PublicOp = NEVER_OVERRIDDEN) -> Op:
        """Run in the low dtype."""
        return self._cast_all(original, public, self.low, self.to_low, honours_dtype=False)

    def blacklist(self, original: Op, public: PublicOp = NEVER_OVERRIDDEN) -> Op:
        """Run in float32, unless the call names a dtype."""
        return self._cast_all(original, public, torch.float32, self.to_float, honours_dtype=True)

    def _cast_all(
        self, original: Op, public: PublicOp, dtype: torch.dtype, cast: TensorCast, *, honours_dtype: bool
    ) -> Op:
        """Run in `dtype`, to which `cast` casts a tensor. With `honours_dtype`, a call that names a dtype runs as
        written.
        """
        switch, in_region, by_lists, beside = self.switch, self._in_region, Mode.BY_LISTS, self._beside
        dtype_class, has_overrides = torch.dtype if honours_dtype else None, public.has_overrides

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if (has_overrides(args) or (kwargs and has_overrides(tuple(kwargs.values())))) and not is_tracing():
                return public.hand_over(args, kwargs)
            if switch.on and (not switch.regions or switch.mode_here() is by_lists):
                given = kwargs
                if kwargs:
                    if kwargs.get("out") is not None or (honours_dtype and kwargs.get("dtype") is not None):
                        return original(*args, **kwargs)
                    kwargs = dict(kwargs)
                    for name, value in given.items():
                        if isinstance(value, Tensor):
                            if value.dtype is not dtype:
                                kwargs[name] = cast(value)
                                if kwargs[name] is value and is_uncastable(value):
                                    return beside(value, original, args, given)
                        elif isinstance(value, (list, tuple)):
                            kwargs[name] = cast_nested(value, cast)
                cast_args: Any = None  # Dynamo of torch 2.6 cannot tell whether two tuples are one
                for index, value in enumerate(args):
                    if isinstance(value, Tensor):
                        if value.dtype is not dtype:
                            if cast_args is None:
                                cast_args = list(args)
                            cast_args[index] = cast(value)
                            if cast_args[index] is value and is_uncastable(value):
                                return beside(value, original, args, given)
                    elif (kind := value.__class__) is dtype_class:
                        return original(*args, **given)
                    elif (kind is list or kind is tuple) and value and value[0].__class__ is not int:
                        if cast_args is None:
                            cast_args = list(args)
                        cast_args[index] = cast_nested(value, cast)
                return original(*(args if cast_args is None else cast_args), **kwargs)
            return in_region(original, args, kwargs) if switch.on else original(*args, **kwargs)

        return wrapper

    def _in_region(self, original: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op of either list where a region decides for both."""
        mode = self.switch.mode_here()
        if mode is Mode.OFF or kwargs.get("out") is not None:
            return original(*args, **kwargs)
        cast = self.to_low if mode is Mode.LOW else self.to_float
        if mode is Mode.LOW and self.in_float32 is None:
            for value in (*args, *kwargs.values()):
                if isinstance(value, Tensor) and is_uncastable(value):
                    return self._beside(value, original, args, kwargs)
        return original(
            *[cast_nested(value, cast) for value in args],
            **{name: cast_nested(value, cast) for name, value in kwargs.items()},
        )

    def _beside(self, uncastable: Tensor, original: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op of either list on a tensor that is not to be cast: in the dtype that it shows, to which the others
        are cast.
        """
        cast = make_plain_cast(uncastable.dtype, self.device_type)
        return original(
            *[cast_nested(value, cast) for value in args],
            **{name: cast_nested(value, cast) for name, value in kwargs.items()},
        )

    def inplace_error(self, original: Op, public: PublicOp = NEVER_OVERRIDDEN) -> Op:
        """Refuse to run in place on a 16-bit tensor; cast the other arguments to float32 otherwise."""
        switch, device_type, in_float = self.switch, self.device_type, self.blacklist(original)
        has_overrides = public.has_overrides
        name = getattr(original, "__name__", str(original))

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if (has_overrides(args) or (kwargs and has_overrides(tuple(kwargs.values())))) and not is_tracing():
                return public.hand_over(args, kwargs)
            if switch.on and (not switch.regions or switch.is_on_here()):
                target = target_of(args, kwargs)
                if _is_low(target, device_type):
                    raise BannedOpError(
                        f"{name} runs in float32 by the op lists, and cannot do so in place on a {target.dtype} tensor."
                        f" Call {name.removesuffix('_')} instead, or cast the tensor with .float() first."
                    )
            return in_float(*args, **kwargs)

        return wrapper

    def banned(self, original: Op, public: PublicOp = NEVER_OVERRIDDEN) -> Op:
        """Refuse to run on any 16-bit tensor."""
        switch, device_type, has_overrides = self.switch, self.device_type, public.has_overrides
        name = getattr(original, "__name__", str(original))

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if (has_overrides(args) or (kwargs and has_overrides(tuple(kwargs.values())))) and not is_tracing():
                return public.hand_over(args, kwargs)
            if switch.on and (not switch.regions or switch.is_on_here()):
                for value in (*args, *kwargs.values()):
                    if _is_low(value, device_type):
                        raise BannedOpError(
                            f"{name} is banned on {value.dtype} tensors by the op lists: its result or gradient may"
                            " leave the range. For binary_cross_entropy use"
                            " torch.nn.functional.binary_cross_entropy_with_logits, which takes in the sigmoid; or"
                            " cast the inputs with .float(), or move the op to the blacklist."
                        )
            return original(*args, **kwargs)

        return wrapper


def _is_torchs(original: Op) -> bool:
    """Tell whether a function is of torch: methods of tensors name no module."""
    module = getattr(original, "__module__", None)
    return (
        issubclass(Tensor, getattr(original, "__objclass__", ()))
        if module is None
        else module.partition(".")[0] == "torch"
    )


def _position_of_inplace(original: Op) -> int | None:
    """Return where a function takes the flag `inplace`, or None if it takes none."""
    code = getattr(original, "__code__", None)
    names = code.co_varnames[: code.co_argcount] if code is not None else ()
    return names.index("inplace") if "inplace" in names else None


def _honouring_inplace(original: Op, cast: Op, position: int) -> Op:
    """A call with `inplace=True` runs as it was written: a cast copy is not what it is to change."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("inplace") or (len(args) > position and args[position]):
            return original(*args, **kwargs)
        return cast(*args, **kwargs)

    return wrapper


def _is_low(value: Any, device_type: str) -> bool:
    return isinstance(value, Tensor) and value.dtype in LOW_DTYPES and value.device.type == device_type
