"""Dtypes by name, which tensors may be cast, and casting whatever a model takes or returns."""

import copy
import dataclasses
import types
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from .errors import PolicyError, did_you_mean

LOW_DTYPES = frozenset({torch.float16, torch.bfloat16})
"""The 16-bit dtypes a session may run in."""

CASTABLE = frozenset({torch.float16, torch.bfloat16, torch.float32})
"""The dtypes that are ever cast. float64, complex, integer, float8 and quantised tensors pass through, which is
torch.autocast's rule too.
"""

PLAIN_CLASSES = frozenset({Tensor, torch.nn.Parameter})
"""Most tensors are of one of these, and none of these is opaque."""

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


def is_castable(tensor: Tensor, device_type: str | None = None) -> bool:
    """Tell whether `tensor` is float16, bfloat16 or float32, not opaque, and, if a device type is given, lives on such
    a device.
    """
    if tensor.dtype not in CASTABLE or tensor.is_quantized or is_opaque(tensor):
        return False
    return device_type is None or tensor.device.type == device_type


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
        if (
            vars(base).get("__torch_dispatch__", torch._C._disabled_torch_dispatch_impl)
            is not torch._C._disabled_torch_dispatch_impl
        ):
            inner = getattr(tensor, "_local_tensor", None)
            is_of_torch = base.__module__.partition(".")[0] == "torch" and not issubclass(
                kind, torch.sparse.SparseSemiStructuredTensor
            )
            return not is_of_torch or (isinstance(inner, Tensor) and is_opaque(inner))
    return False


def cast_tree(value: Any, cast: TensorCast) -> Any:
    """Return `value` with every tensor in it replaced by `cast(tensor)`.

    Lists, tuples, named tuples, sets, dataclasses and mappings keep their class (a mapping or dataclass is copied, then
    filled). A value in which nothing changes is returned itself, so a model that fills a container of its caller still
    does. A generator becomes a generator of cast values. Modules, arrays, strings and every other object pass through
    untouched.
    """
    if isinstance(value, Tensor):
        return cast(value)
    if value is None or isinstance(value, (str, bytes, bool, int, float, torch.nn.Module, torch.Size)):
        return value
    if isinstance(value, tuple):
        items = [cast_tree(item, cast) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)._make(items) if hasattr(value, "_make") else type(value)(items)
    if isinstance(value, (list, set, frozenset)):
        items = [cast_tree(item, cast) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(items)
    if isinstance(value, Mapping):
        return _cast_mapping(value, cast)
    if isinstance(value, types.GeneratorType):
        return (cast_tree(item, cast) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _cast_dataclass(value, cast)
    return value


def _cast_mapping(value: Mapping[Any, Any], cast: TensorCast) -> Mapping[Any, Any]:
    changed = {key: new for key, old in value.items() if (new := cast_tree(old, cast)) is not old}
    if not changed:
        return value
    if type(value) is dict:
        return {**value, **changed}
    if not isinstance(
        value, MutableMapping
    ):  # such as types.MappingProxyType: nothing but its own constructor can fill it
        return type(value)({**value, **changed})  # type: ignore[call-arg]
    result = copy.copy(value)
    if not isinstance(value, dict):  # the copy of a mapping of the user's own shares the dict inside with the original
        for name, inner in vars(result).items():
            if isinstance(inner, MutableMapping):
                setattr(result, name, copy.copy(inner))
    for key, new in changed.items():
        result[key] = new
    return result


def _cast_dataclass(value: Any, cast: TensorCast) -> Any:
    fields = {
        field.name: getattr(value, field.name) for field in dataclasses.fields(value) if hasattr(value, field.name)
    }
    changed = {name: new for name, old in fields.items() if (new := cast_tree(old, cast)) is not old}
    if not changed:
        return value
    try:
        result = copy.copy(value)
    except dataclasses.FrozenInstanceError:  # slots of its own: copy sets them one by one
        result = object.__new__(type(value))
        changed = {**fields, **changed}
    for name, new in changed.items():
        object.__setattr__(result, name, new)  # works for frozen dataclasses too
    return result
