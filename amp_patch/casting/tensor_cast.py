"""Functions that cast a single tensor, the arguments of an op, and the inputs and outputs of a model.

A dtype is *castable* if it is float16, bfloat16 or float32. A tensor is *opaque* if its class stores values of such a
dtype in a form of its own, as quantized weights do (`dtypes.is_opaque`). Opaque tensors are not cast, unless a function
says so.
"""

import copy
import dataclasses
import operator
import types
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from ..dtypes import CASTABLE, PLAIN_CLASSES, TensorCast, is_opaque

_COMPRESSED = frozenset({torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc})

_CONVERSIONS = {torch.float16: Tensor.half, torch.bfloat16: Tensor.bfloat16, torch.float32: Tensor.float}


def get_conversion(dtype: torch.dtype) -> TensorCast:
    """Return the method that casts any tensor to a castable dtype, in less time than `Tensor.to`."""
    return _CONVERSIONS[dtype]


def make_device_test(device_type: str) -> Callable[[Tensor], bool]:
    """Return a function that returns whether a tensor is on a device of this type."""
    # attrgetter takes no Python frame, and `device.type` is slow: to read this string takes a tenth of a cast's time
    if device_type in ("cpu", "cuda"):
        return operator.attrgetter(f"is_{device_type}")
    return lambda tensor: tensor.device.type == device_type


def is_compressed(tensor: Tensor) -> bool:
    """Return whether a tensor is compressed sparse (such as CSR), float32 and on a CPU.

    torch has no 16-bit products of such tensors on CPUs, so whitelisted ops on them run in float32.
    """
    return tensor.is_cpu and tensor.layout in _COMPRESSED and tensor.dtype is torch.float32


def make_plain_cast(
    dtype: torch.dtype, device_type: str, *, is_for_kernels: bool = False, takes_opaque: bool = False
) -> TensorCast:
    """Return a function that casts tensors of castable dtypes on one type of device to `dtype`, and returns opaque and
    all other tensors as they are.

    A tensor that has that dtype already is returned without a call of torch, because a tracer would record the call.

    Args:
        is_for_kernels: the result goes to 16-bit kernels. Tensors that have no such kernels are returned as they are
            (see `is_compressed`).
        takes_opaque: also cast opaque tensors, by their own methods.
    """
    on_cpu, on_cuda = device_type == "cpu", device_type == "cuda"
    checks_layout, strided = is_for_kernels and on_cpu, torch.strided
    convert = get_conversion(dtype)

    def cast(tensor: Tensor) -> Tensor:
        given_dtype = tensor.dtype
        if given_dtype is dtype or given_dtype not in CASTABLE:
            return tensor
        is_plain = tensor.__class__ in PLAIN_CLASSES  # reading attributes of a subclass may run its own, slow code
        if not is_plain and not takes_opaque and is_opaque(tensor):
            return tensor
        # `device.type` only for other devices than CPUs and CUDA, because it is slow: see `make_device_test`
        if not (tensor.is_cpu if on_cpu else tensor.is_cuda if on_cuda else tensor.device.type == device_type):
            return tensor
        if is_plain and checks_layout and tensor.layout is not strided and is_compressed(tensor):
            return tensor
        return convert(tensor)

    return cast


# ---- the arguments of an op ------------------------------------------------------------------------------------------


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a list or tuple, also in nested ones. Yield nothing for any other value, even a tensor."""
    if value.__class__ is list or value.__class__ is tuple:
        for item in value:
            if isinstance(item, Tensor):
                yield item
            else:
                yield from tensors_in(item)


def cast_nested(value: Any, cast: TensorCast) -> Any:
    """Cast a tensor, or the tensors in a list or tuple, also in nested ones. Return any other value as it is.

    If no item of a list changes, the list itself is returned, because the op may write to it.
    """
    if isinstance(value, Tensor):
        return cast(value)
    if value.__class__ is not list and value.__class__ is not tuple:
        return value
    items = [cast_nested(item, cast) for item in value]
    if all(map(operator.is_, items, value)):
        return value
    return value.__class__(items)


def cast_arguments(args: tuple[Any, ...], kwargs: dict[str, Any], cast: TensorCast) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a call with all tensors in them cast.

    `cast_nested` could do all of this, but would take a Python frame for each argument.
    """
    cast_args = list(args)
    for index, value in enumerate(args):
        if isinstance(value, Tensor):
            cast_args[index] = cast(value)
        elif value.__class__ is list or value.__class__ is tuple:
            cast_args[index] = cast_nested(value, cast)
    cast_kwargs = kwargs.copy()
    for name, value in kwargs.items():
        if isinstance(value, Tensor):
            cast_kwargs[name] = cast(value)
        elif value.__class__ is list or value.__class__ is tuple:
            cast_kwargs[name] = cast_nested(value, cast)
    return cast_args, cast_kwargs


# ---- inputs and outputs of models ------------------------------------------------------------------------------------


def cast_tree(value: Any, cast: Callable[[Any], Any], kind: type | tuple[type, ...] = Tensor) -> Any:
    """Return `value` with every tensor in it replaced by `cast(tensor)`.

    It looks into lists, tuples, named tuples, sets, dataclasses and mappings, and into those inside them. A container
    whose items all stay the same objects is returned itself, so that a model can still fill a container of its caller.
    A generator always becomes a new generator, which yields the cast items. If an item changes:

    * A list, mutable mapping or dataclass is copied, and the copy gets the cast items.
    * For a tuple, set or immutable mapping, its class is called with the cast items.
    * If that fails, a list, tuple or set is returned as it is, and the error of a mapping or dataclass is raised.

    All other objects, such as modules, arrays and text, are returned as they are. With another `kind`, objects of that
    class are replaced instead of tensors.
    """
    if isinstance(value, kind):
        return cast(value)
    if value is None or isinstance(value, (str, bytes, bool, int, float, torch.nn.Module, torch.Size)):
        return value
    if isinstance(value, (tuple, list, set, frozenset)):
        items = [cast_tree(item, cast, kind) for item in value]
        if all(map(operator.is_, items, value)):
            return value
        return _rebuild(value, items)
    if isinstance(value, Mapping):
        return _cast_mapping(value, cast, kind)
    if isinstance(value, types.GeneratorType):
        return (cast_tree(item, cast, kind) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _cast_dataclass(value, cast, kind)
    return value


def _rebuild(value: Any, items: list[Any]) -> Any:
    """Return a container like `value` that holds `items`, or `value` itself if its class cannot make one."""
    kind = type(value)
    if kind in (tuple, list, set, frozenset):
        return kind(items)
    try:
        if isinstance(value, list):
            result: Any = copy.copy(value)
            list.clear(result)
            list.extend(result, items)
        elif hasattr(kind, "_make"):  # a named tuple
            result = kind._make(items)
        else:
            result = kind(items)
        # a class with another constructor may have made something else of the items
        holds_items = type(result) is kind and sorted(map(id, result)) == sorted(map(id, items))
    except Exception:  # the class may be the user's, and may raise anything
        return value
    if holds_items:
        return result
    return value


def _find_changed(
    values: Mapping[Any, Any], cast: Callable[[Any], Any], kind: type | tuple[type, ...]
) -> dict[Any, Any]:
    """Return the cast values of a mapping, by their keys. Values that the cast does not change are left out."""
    changed = {}
    for key, value in values.items():
        result = cast_tree(value, cast, kind)
        if result is not value:
            changed[key] = result
    return changed


def _cast_mapping(
    value: Mapping[Any, Any], cast: Callable[[Any], Any], kind: type | tuple[type, ...]
) -> Mapping[Any, Any]:
    changed = _find_changed(value, cast, kind)
    if not changed:
        return value
    if type(value) is dict:
        return {**value, **changed}
    if not isinstance(value, MutableMapping):
        # such as types.MappingProxyType, which can be filled only when it is made
        return type(value)({**value, **changed})  # type: ignore[call-arg]
    result = copy.copy(value)
    if not isinstance(value, dict):  # a class with a dict in it, which its copy may share with the original
        for name, inner in vars(result).items():
            if isinstance(inner, MutableMapping):
                setattr(result, name, copy.copy(inner))
    for key, item in changed.items():
        result[key] = item
    return result


def _cast_dataclass(value: Any, cast: Callable[[Any], Any], kind: type | tuple[type, ...]) -> Any:
    fields = {}
    for field in dataclasses.fields(value):
        if hasattr(value, field.name):
            fields[field.name] = getattr(value, field.name)
    changed = _find_changed(fields, cast, kind)
    if not changed:
        return value
    try:
        result = copy.copy(value)
    except dataclasses.FrozenInstanceError:  # raised with slots: copy.copy sets them one by one
        result = object.__new__(type(value))
        changed = {**fields, **changed}
    for name, item in changed.items():
        object.__setattr__(result, name, item)  # works for frozen dataclasses too
    return result
