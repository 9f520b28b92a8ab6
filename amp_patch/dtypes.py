"""Dtypes by name, and which tensors may be cast."""

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from .errors import PolicyError, did_you_mean
from .torch_private import disabled_torch_dispatch, get_local_tensor

LOW_DTYPES = frozenset({torch.float16, torch.bfloat16})
"""The 16-bit dtypes a session may run in."""

CASTABLE = frozenset({torch.float16, torch.bfloat16, torch.float32})
"""The dtypes that are ever cast. float64, complex, integer, float8 and quantised tensors pass through, which is
torch.autocast's rule too.
"""

PLAIN_CLASSES = (Tensor, torch.nn.Parameter)
"""Most tensors are of one of these, and none of these is opaque. A tuple, since Dynamo of torch 2.6 cannot look for a
class in a frozenset.
"""

_BY_NAME = {
    "float16": torch.float16,
    "half": torch.float16,
    "fp16": torch.float16,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float32": torch.float32,
    "float": torch.float32,
    "fp32": torch.float32,
}

DTYPE_WORDS = tuple(_BY_NAME)
"""The words that name a dtype to train in."""

TensorCast = Callable[[Tensor], Tensor]


def parse_dtype(value: object, argument: str) -> torch.dtype:
    """Return the dtype that `value` (a torch.dtype or a name such as "bfloat16" or "torch.bfloat16") means.

    Raises PolicyError, naming `argument`, for anything but float16, bfloat16 and float32.
    """
    if isinstance(value, torch.dtype):
        if value in CASTABLE:
            return value
    elif isinstance(value, str) and value.removeprefix("torch.") in _BY_NAME:
        return _BY_NAME[value.removeprefix("torch.")]
    raise PolicyError(
        f"{argument}={value!r} is not a dtype to train in (float16, bfloat16, float32).{did_you_mean(value, _BY_NAME)}"
    )


def dtype_name(dtype: torch.dtype | None) -> str:
    """Return `bfloat16` for torch.bfloat16, and `-` for None."""
    return "-" if dtype is None else str(dtype).removeprefix("torch.")


def round_to_float32(number: float) -> float:
    """Return the nearest number that float32 has; inf, with the sign of the number, beyond its range."""
    return ctypes.c_float(number).value


def is_castable(tensor: Tensor) -> bool:
    """Tell whether `tensor` is float16, bfloat16 or float32, and not opaque."""
    return tensor.dtype in CASTABLE and not is_opaque(tensor)


def is_opaque(tensor: Tensor) -> bool:
    """Tell whether `tensor` shows a castable dtype, but keeps its values in another form, as the weights of
    quantisation libraries do.

    Such classes answer every operation themselves (`__torch_dispatch__`), a cast by what they like. Those that torch
    defines, such as DTensor, are cast like plain tensors, unless they wrap an opaque one or are sparse weights, which
    know no cast. So is any class that answers none itself, as subclasses of Parameter do.
    """
    kind = type(tensor)
    if kind in PLAIN_CLASSES or tensor.dtype not in CASTABLE:
        return False
    for base in kind.__mro__:
        if vars(base).get("__torch_dispatch__", disabled_torch_dispatch) is not disabled_torch_dispatch:
            inner = get_local_tensor(tensor)
            is_of_torch = base.__module__.partition(".")[0] == "torch" and not issubclass(
                kind, torch.sparse.SparseSemiStructuredTensor
            )
            return not is_of_torch or (isinstance(inner, Tensor) and is_opaque(inner))
    return False
