"""Casting whatever models take and return, under the names of Apex's `apex.amp._initialize`.

Containers keep their class here.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._core import cast_tree


def to_type(dtype: torch.dtype, t: Tensor) -> Tensor:
    """Return a floating tensor in `dtype`, any other as it is."""
    return t.to(dtype) if t.is_floating_point() else t


def applier(value: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    """Return `value` with `fn` applied to every tensor in it."""
    return cast_tree(value, fn)
