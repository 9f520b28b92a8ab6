"""`applier`, the only name that scripts import from Apex's `apex.amp._initialize`."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .._core import cast_tree


def applier(value: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    """Return `value` with `fn` applied to every tensor in it. Containers keep their class."""
    return cast_tree(value, fn)
