"""Casting whatever models take and return, under the name that it has in Apex's `apex.amp._initialize`.

Containers keep their class here.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .._core import cast_tree


def applier(value: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    """Return `value` with `fn` applied to every tensor in it."""
    return cast_tree(value, fn)
