"""Questions about tensors, and casts, under the names of Apex's `apex.amp.utils`.

Dtypes are compared, not names of types.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ...dtypes import CASTABLE
from .._core import cast_tree


def is_cuda_enabled() -> bool:
    """Tell whether torch was built with CUDA."""
    return torch.version.cuda is not None


def get_cuda_version() -> tuple[int, ...]:
    """Return the CUDA version torch was built with; empty without one."""
    return tuple(int(part) for part in (torch.version.cuda or "").split(".") if part)


def is_nested(x: object) -> bool:
    """Tell whether `x` is a list or a tuple."""
    return isinstance(x, (list, tuple))


def is_fp_tensor(x: object) -> bool:
    """Tell whether `x` is a floating tensor, or a list or tuple of nothing else."""
    if isinstance(x, (list, tuple)):
        return all(is_fp_tensor(item) for item in x)
    return isinstance(x, Tensor) and x.is_floating_point()


def type_string(x: Tensor) -> str:
    """Return the last part of the tensor's type, such as "HalfTensor"."""
    return str(x.type()).rpartition(".")[2]


def collect_fp_tensor_types(args: Iterable[Any], kwargs: dict[str, Any]) -> set[str]:
    """Return the types of all floating tensors among arguments, those in lists and tuples included."""
    found: set[str] = set()
    for value in (*args, *kwargs.values()):
        if isinstance(value, (list, tuple)):
            found |= collect_fp_tensor_types(value, {})
        elif is_fp_tensor(value):
            found.add(type_string(value))
    return found


def maybe_half(x: Any, name: str = "", verbose: bool = False) -> Any:
    """Return `x` with its float32 and 16-bit tensors in float16."""
    return cast_tree(x, lambda tensor: tensor.half() if tensor.dtype in CASTABLE else tensor)


def maybe_float(x: Any, name: str = "", verbose: bool = False) -> Any:
    """Return `x` with its 16-bit tensors in float32."""
    return cast_tree(x, lambda tensor: tensor.float() if tensor.dtype in CASTABLE else tensor)


def casted_args(cast_fn: Callable[[Any], Any], args: Iterable[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Return the positional arguments cast, and cast the keyword arguments in place."""
    kwargs.update({name: cast_fn(value) for name, value in kwargs.items()})
    return [cast_fn(value) for value in args]


def as_inplace(fns: Iterable[str]) -> Iterable[str]:
    """Yield the names of the in-place twins."""
    return (name + "_" for name in fns)


def has_func(mod: Any, fn: str) -> bool:
    """Tell whether `mod` has an attribute `fn`."""
    return fn in mod if isinstance(mod, dict) else hasattr(mod, fn)
