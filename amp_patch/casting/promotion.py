"""Rules by which the dtypes of the arguments decide: the widest among them, or that of what is written to."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..dtypes import CASTABLE, LOW_DTYPES
from .compiling import is_dynamo_compiling as is_tracing
from .mode import Switch
from .overrides import NEVER_OVERRIDDEN, PublicOp
from .tensor_cast import cast_nested, make_plain_cast

Op = Callable[..., Any]


class Promotions:
    """Makes the replacements of ops under these rules.

    Args:
        switch: whether the casts act.
        device_type: the only device type whose tensors are cast.
    """

    def __init__(self, switch: Switch, device_type: str) -> None:
        self.switch = switch
        self.device_type = device_type
        self.to_float = make_plain_cast(torch.float32, device_type)

    def promote(self, original: Op, public: PublicOp = NEVER_OVERRIDDEN) -> Op:
        """Run in the widest dtype among the arguments.

        With a float64 or complex argument torch's own rule (or error) stands.
        """
        switch, widen, has_overrides = self.switch, self._widen, public.has_overrides

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if (has_overrides(args) or (kwargs and has_overrides(tuple(kwargs.values())))) and not is_tracing():
                return public.hand_over(args, kwargs)
            if switch.on and (not switch.regions or switch.is_on_here()):
                if kwargs:
                    if kwargs.get("out") is None:
                        values = widen((*args, *kwargs.values()))
                        return original(*values[: len(args)], **dict(zip(kwargs, values[len(args) :], strict=True)))
                    return original(*args, **kwargs)
                dtype = None
                for value in args:
                    if isinstance(value, Tensor):
                        if dtype is None:
                            dtype = value.dtype
                        elif value.dtype is not dtype:
                            return original(*widen(args))
            return original(*args, **kwargs)

        return wrapper

    def sequence_promote(self, original: Op, public: PublicOp = NEVER_OVERRIDDEN) -> Op:
        """Run in the widest dtype among the tensors of the first argument, a sequence."""
        switch, widen, has_overrides = self.switch, self._widen, public.has_overrides

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            tensors = args[0] if args else kwargs.get("tensors")
            is_sequence = tensors.__class__ in (list, tuple)
            if (has_overrides(args) or (is_sequence and has_overrides(tensors))) and not is_tracing():  # type: ignore[arg-type]
                return public.hand_over(args, kwargs)
            if is_sequence and switch.on and (not switch.regions or switch.is_on_here()) and kwargs.get("out") is None:
                if args:
                    return original(widen(tensors), *args[1:], **kwargs)
                return original(**{**kwargs, "tensors": widen(tensors)})
            return original(*args, **kwargs)

        return wrapper

    def match_self(self, original: Op, public: PublicOp = NEVER_OVERRIDDEN) -> Op:
        """Run in place in the dtype of the first argument; the other tensors are cast to it."""
        switch, device_type, has_overrides = self.switch, self.device_type, public.has_overrides

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if (has_overrides(args) or (kwargs and has_overrides(tuple(kwargs.values())))) and not is_tracing():
                return public.hand_over(args, kwargs)
            if switch.on and (not switch.regions or switch.is_on_here()):
                target = target_of(args, kwargs)
                if isinstance(target, Tensor) and target.dtype in CASTABLE and target.device.type == device_type:
                    cast = make_plain_cast(target.dtype, device_type)
                    kwargs = {
                        name: cast_nested(value, cast) for name, value in kwargs.items()
                    }  # the target has the dtype, and stays itself
                    return original(*[cast_nested(value, cast) for value in args], **kwargs)
            return original(*args, **kwargs)

        return wrapper

    def _widen(self, values: Any) -> Any:
        """Return `values` with all castable tensors in their widest dtype; as they are, if one is float64 or complex or
        none differs.
        """
        dtypes = {
            value.dtype
            for value in values
            if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
        }
        if len(dtypes) < 2 or not dtypes <= CASTABLE:
            return values
        return [
            self.to_float(value) if isinstance(value, Tensor) and value.dtype in LOW_DTYPES else value
            for value in values
        ]


def target_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what an in-place op works on: its first argument, which torch's functions call `input`."""
    return args[0] if args else kwargs.get("input")
