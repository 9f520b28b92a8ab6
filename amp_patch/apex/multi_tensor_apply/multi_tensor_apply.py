"""`MultiTensorApply`, the caller of `amp_C`'s functions."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor


class MultiTensorApply:
    """Calls `op(chunk_size, noop_flag_buffer, tensor_lists, *args)`, for a function `op` of `amp_C`.

    Scripts read `available` to find out whether Apex has its compiled `amp_C`. It is True, because `amp_patch.apex` has
    these functions, too.
    """

    available = True

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(
        self, op: Callable[..., Any], noop_flag_buffer: Tensor, tensor_lists: Sequence[Sequence[Tensor]], *args: Any
    ) -> Any:
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)
