"""Finds the dtype in which a call of an op runs, for rules under which the arguments decide it: `promote`, `match`, ...

A *dtype finder* takes the arguments of a call, and returns the dtype to which the castable tensors in them are cast. It
returns None for a call without casts: torch then promotes dtypes, or raises an error, as usual. *Castable* dtypes are
float16, bfloat16 and float32.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..config import op_arguments
from ..dtypes import CASTABLE, dtype_name
from ..errors import OpListError
from .tensor_cast import tensors_in

DtypeFinder = Callable[[Sequence[Any], Mapping[str, Any]], torch.dtype | None]


def find_widest(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.dtype | None:
    """Return float32 if tensors among the arguments have several castable dtypes, else None.

    float16 with bfloat16 gives float32, too, as torch promotes. If there is also a float64, float8 or complex tensor,
    the result is None. Tensors of integers, and tensors in lists, do not count.
    """
    dtypes = set()
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
            dtypes.add(value.dtype)
    if len(dtypes) < 2 or not dtypes <= CASTABLE:
        return None
    return torch.float32


def follow_first(device_type: str) -> DtypeFinder:
    """For an in-place op: return a finder of the dtype of the first argument, to which the op writes."""
    return _follow(0, "input", device_type, None)


def follow_argument(function: Any, name: str, device_type: str, location: str) -> DtypeFinder:
    """Return a finder of the dtype of the argument `name` of a function. Raises OpListError if the function has no such
    argument.

    The finder raises OpListError if the argument in a call is neither a tensor nor None. It also raises it if the
    argument is a tensor of integers or bools, and the other tensors have several castable dtypes.

    Args:
        location: the place of the list entry, such as "my.yaml:3:5", for errors.
    """
    try:
        position = op_arguments.find_position(function, name)
    except OpListError as error:
        raise OpListError(f"{location}: {error}") from None
    shown = getattr(function, "__name__", str(function))

    def refuse(value: Any, values: Sequence[Any]) -> None:
        followed = f"{location}: {shown} is to run in the dtype of {name!r}"
        advice = "name an argument that is a tensor of floating-point numbers"
        if not isinstance(value, Tensor):
            raise OpListError(f"{followed}, which is a {type(value).__name__} in this call; {advice}")
        given = sorted({dtype_name(tensor.dtype) for tensor in tensors_in([*values]) if tensor.dtype in CASTABLE})
        if len(given) > 1 and not value.is_floating_point() and not value.is_complex():
            dtype = dtype_name(value.dtype)
            others = f"while the other tensors are {' and '.join(given)}"
            raise OpListError(f"{followed}, which is {dtype} in this call, {others}; {advice}")

    return _follow(position, name, device_type, refuse)


def _follow(
    position: int | None, name: str, device_type: str, refuse: Callable[[Any, Sequence[Any]], None] | None
) -> DtypeFinder:
    """Return a finder of the dtype of one argument. It returns None if a call leaves the argument out, or if the
    argument is on another type of device or has no castable dtype.

    For an argument without a castable dtype, except None, it calls `refuse` with the argument and all values of the
    call.
    """

    def find(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.dtype | None:
        value = args[position] if position is not None and len(args) > position else kwargs.get(name)
        if isinstance(value, Tensor) and value.dtype in CASTABLE:
            return value.dtype if value.device.type == device_type else None
        if value is not None and refuse is not None:
            refuse(value, (*args, *kwargs.values()))
        return None

    return find
