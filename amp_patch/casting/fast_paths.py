"""Wrappers for the ops that models call most: each serves the common form of a call, and leaves the others to `walk`.

`walk` is the wrapper that the general rule makes of the same op; what a fast path does, it would do too.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import has_torch_function

from ..dtypes import TensorCast
from ..torch_private import count_dispatch_modes
from .compiling import is_dynamo_compiling
from .mode import Mode, Switch
from .tensor_cast import is_uncastable
from .weight_cache import ValidEntry

Op = Callable[..., Any]

_NAMES = {
    "weighted": (
        "whitelist",
        "linear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d",
    ),
    "product": ("whitelist", "matmul __matmul__ __rmatmul__ mm bmm mv"),
    "attention": ("whitelist", "scaled_dot_product_attention"),
    "normalized": ("blacklist", "layer_norm group_norm"),
    # of these only the first argument can be a tensor; not all there are, but those that models call often
    "single": (
        "blacklist",
        "softmax log_softmax softmin softplus exp expm1 log log1p sum cumsum norm rsqrt reciprocal square",
    ),
}
_BY_NAME = {(kind, name): path for path, (kind, names) in _NAMES.items() for name in names.split()}


class FastPaths:
    """Makes the fast paths of one session.

    Args:
        switch: whether the casts act.
        low: the 16-bit dtype of whitelisted ops.
        plain_cast: casts any tensor.
        to_low: the same by the entry of the cache, if there is one.
        to_low_uncached: the same for a weight without a valid entry.
        valid: the valid entries of the cache, by the parameter's id.
    """

    def __init__(
        self,
        switch: Switch,
        low: torch.dtype,
        plain_cast: TensorCast,
        to_low: TensorCast,
        to_low_uncached: TensorCast,
        valid: Mapping[int, ValidEntry],
    ) -> None:
        self._switch = switch
        self._low = low
        self._plain_cast = plain_cast
        self._to_low = to_low
        self._to_low_uncached = to_low_uncached
        self._valid = valid

    def find(self, kind: str, name: str) -> Callable[[Op, Op], Op] | None:
        """Return what makes the fast path of torch's op `name` under a rule from the op and `walk`; None if it has
        none.
        """
        path = _BY_NAME.get((kind, name))
        return None if path is None else getattr(self, path)

    def weighted(self, original: Op, walk: Op) -> Op:
        """For calls with (input, weight, bias, ...): weight and bias are looked up in the cache in place, the input is
        not.
        """
        switch, low, float32, by_lists = self._switch, self._low, torch.float32, Mode.BY_LISTS
        plain_cast, to_low_uncached, get_entry = self._plain_cast, self._to_low_uncached, self._valid.get

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if kwargs or len(args) < 2 or has_torch_function(args) or is_dynamo_compiling() or count_dispatch_modes():
                return walk(*args, **kwargs)  # a mode that only watches sees the same from there
            if not switch.on or (switch.regions and switch.mode_here() is not by_lists):
                return walk(*args)
            count = len(args)
            value, w, b = args if count == 3 else args[:3] if count > 3 else (*args, None)
            try:
                if value.dtype is not low and (value := plain_cast(value)) is args[0] and is_uncastable(value):
                    return walk(*args)
                if (dtype := w.dtype) is not low:
                    entry = get_entry(id(w)) if dtype is float32 else None
                    is_valid = entry and entry[1] == (w._version, w.data_ptr(), w.requires_grad, w.shape, w.stride())
                    w = entry[0] if is_valid else to_low_uncached(w)  # type: ignore[index]
                    if w is args[1] and is_uncastable(w):
                        return walk(*args)
                if b is not None and (dtype := b.dtype) is not low:
                    entry = get_entry(id(b)) if dtype is float32 else None
                    is_valid = entry and entry[1] == (b._version, b.data_ptr(), b.requires_grad, b.shape, b.stride())
                    b = entry[0] if is_valid else to_low_uncached(b)  # type: ignore[index]
            except AttributeError:  # not tensors: the error is torch's to raise
                return original(*args)
            if count == 3:
                return original(value, w, b)
            return original(value, w, b, *args[3:]) if count > 3 else original(value, w)

        return wrapper

    def product(self, original: Op, walk: Op) -> Op:
        """For calls with two tensors: an operand on the left that is no parameter is not looked up in the cache."""
        switch, low, by_lists = self._switch, self._low, Mode.BY_LISTS
        plain_cast, to_low = self._plain_cast, self._to_low

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if kwargs or len(args) != 2 or not switch.on or has_torch_function(args):
                return walk(*args, **kwargs)
            if switch.regions and switch.mode_here() is not by_lists:
                return walk(*args)
            left, right = args
            try:
                if left.dtype is not low:
                    left = plain_cast(left) if left.__class__ is Tensor else to_low(left)
                    if left is args[0] and is_uncastable(left):
                        return walk(*args)
                if right.dtype is not low:
                    right = to_low(right)
                    if right is args[1] and is_uncastable(right):
                        return walk(*args)
            except AttributeError:  # not tensors: the error is torch's to raise, or the other operand's to answer
                return original(*args)
            return original(left, right)

        return wrapper

    def attention(self, original: Op, walk: Op) -> Op:
        """For calls with (query, key, value, ...) that are low by themselves."""
        switch, low = self._switch, self._low

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if (
                switch.on
                and not switch.regions
                and len(args) == 3
                and kwargs.get("attn_mask") is None
                and not has_torch_function(args)
            ):
                query, key, value = args
                try:
                    is_low = query.dtype is low and key.dtype is low and value.dtype is low
                except AttributeError:
                    is_low = False
                if is_low:
                    return original(*args, **kwargs)
            return walk(*args, **kwargs)

        return wrapper

    def normalized(self, original: Op, walk: Op) -> Op:
        """For calls with (input, shape or groups, weight, bias, ...) that are float32, as most are."""
        switch, float32 = self._switch, torch.float32

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if switch.on and not switch.regions and not kwargs and len(args) > 3 and not has_torch_function(args):
                value, _, weight, bias, *_ = args
                try:
                    is_float = (
                        value.dtype is float32
                        and (weight is None or weight.dtype is float32)
                        and (bias is None or bias.dtype is float32)
                    )
                except AttributeError:
                    is_float = False
                if is_float:
                    return original(*args)
            return walk(*args, **kwargs)

        return wrapper

    def single(self, original: Op, walk: Op) -> Op:
        """For calls whose only tensor, the first argument, is float32."""
        switch, float32 = self._switch, torch.float32

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if switch.on and not switch.regions and args and not has_torch_function(args):
                try:
                    is_float = args[0].dtype is float32
                except AttributeError:
                    is_float = False
                if is_float:
                    return original(*args, **kwargs)
            return walk(*args, **kwargs)

        return wrapper
