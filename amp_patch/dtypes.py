"""Names of dtypes, and tests of whether a tensor may be cast."""

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from .errors import PolicyError, did_you_mean
from .torch_private import disabled_torch_dispatch, get_local_tensor

LOW_DTYPES = frozenset({torch.float16, torch.bfloat16})
"""The 16-bit dtypes to which a session may cast."""

CASTABLE = frozenset({torch.float16, torch.bfloat16, torch.float32})
"""The dtypes of tensors that may be cast, and the dtypes to which they may be cast.

float64, complex, integer, float8 and quantized tensors stay as they are.
"""

PLAIN_CLASSES = (Tensor, torch.nn.Parameter)
"""The classes of most tensors. Tensors of exactly these classes are never opaque (see `is_opaque`).

This is a tuple because Dynamo of torch 2.6 cannot look a class up in a frozenset.
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
"""The names that users may give for a dtype, also with `torch.` in front."""

TensorCast = Callable[[Tensor], Tensor]


def parse_dtype(value: object, argument: str) -> torch.dtype:
    """Return the dtype that `value` means: a torch.dtype, or a name such as "bfloat16" or "torch.bfloat16".

    Raises PolicyError for anything but float16, bfloat16 and float32. The error names `argument`.
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
    """Return the float32 number nearest to a number. Beyond the range of float32, this is inf or -inf."""
    return ctypes.c_float(number).value


def is_castable(tensor: Tensor) -> bool:
    """Return whether `tensor` is float16, bfloat16 or float32, and not opaque."""
    return tensor.dtype in CASTABLE and not is_opaque(tensor)


def is_opaque(tensor: Tensor) -> bool:
    """Return whether a tensor must not be cast although it has a castable dtype, such as quantized weights of torchao.

    Such a tensor reports a castable dtype, and stores its values in another form. Its class handles every op itself
    (`__torch_dispatch__`), so a cast may return anything. Tensors whose class handles no op, such as a subclass of
    Parameter, are not opaque. Of torch's own classes, only two have opaque tensors: DTensors whose local tensor is
    opaque, and semi-structured sparse tensors, which cannot be cast.
    """
    kind = type(tensor)
    if kind in PLAIN_CLASSES or tensor.dtype not in CASTABLE:
        return False
    for base in kind.__mro__:
        if vars(base).get("__torch_dispatch__", disabled_torch_dispatch) is not disabled_torch_dispatch:
            is_of_torch = base.__module__.partition(".")[0] == "torch"
            if not is_of_torch or issubclass(kind, torch.sparse.SparseSemiStructuredTensor):
                return True
            local = get_local_tensor(tensor)
            return isinstance(local, Tensor) and is_opaque(local)
    return False
