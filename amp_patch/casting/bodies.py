"""Functions that are no ops of torch, on the whitelist or the blacklist: their arguments are cast, and so is what the
ops in their body get, as under `torch.amp.custom_fwd(cast_inputs=...)`.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch

from ..dtypes import TensorCast
from . import compiling
from .mode import Mode, Switch
from .tensor_cast import cast_nested, tensors_in


def run_in_region(original: Callable[..., Any], mode: Mode, cast: TensorCast, switch: Switch) -> Callable[..., Any]:
    """Return `original` with the tensors in its arguments cast by `cast`, run in a region of that mode.

    The innermost function decides: whatever region it is called in, its body runs as its own rule says, unless casts
    are off there. A call that names `out`, or a dtype where float32 is the rule, runs as it was written.
    """
    honours_dtype = mode is Mode.FLOAT32

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not switch.is_on_here() or kwargs.get("out") is not None:
            return original(*args, **kwargs)
        if honours_dtype and any(isinstance(value, torch.dtype) for value in (*args, kwargs.get("dtype"))):
            return original(*args, **kwargs)
        args = tuple([_cast(value, cast) for value in args])
        kwargs = {name: _cast(value, cast) for name, value in kwargs.items()}
        if not compiling.is_dynamo_compiling():
            with switch.region(mode):
                return original(*args, **kwargs)
        compiling.write_regions_into_graphs()
        switch.enter_traced(mode)
        try:
            return original(*args, **kwargs)
        finally:
            switch.leave_traced()

    return wrapper


def run_uncast(original: Callable[..., Any], switch: Switch) -> Callable[..., Any]:
    """Return `original` run with the casts off, as are all the functions that it calls."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with switch.region(Mode.OFF):
            return original(*args, **kwargs)

    return wrapper


def _cast(value: Any, cast: TensorCast) -> Any:
    """Cast a tensor, or those in a list or tuple; what holds nothing to cast arrives as itself, to be written to."""
    if isinstance(value, torch.Tensor):
        return cast(value)
    result = cast_nested(value, cast)
    return value if all(map(operator.is_, tensors_in(result), tensors_in(value))) else result
