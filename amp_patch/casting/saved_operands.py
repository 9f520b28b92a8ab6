"""What autograd keeps of a product that is computed in float32: its operands in 16 bits, widened again for backward."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..torch_private import (
    are_saved_tensors_hooks_enabled,
    get_saved_tensors_hooks,
    get_tracing_state,
    get_version,
    peek_interpreter_stack,
    pop_saved_tensors_hooks,
    push_saved_tensors_hooks,
)
from .compiling import is_compiling, is_dynamo_compiling


class _Packed(NamedTuple):
    """Stands for a float32 tensor with the values of `low`, laid out as given."""

    low: Tensor
    version: int
    size: torch.Size
    stride: tuple[int, ...]


class SavedOperands:
    """A `with` block around one product: of the operands given to `add`, the 16-bit originals are kept for backward.

    An original that is changed in place before backward raises RuntimeError there, as the kernel of its dtype would.
    """

    __slots__ = ("_lows",)

    def __init__(self) -> None:
        self._lows: dict[int, Tensor] = {}  # by the address of the float32 operand, which lives as long as the block

    def add(self, wide: Tensor, low: Tensor) -> None:
        """Have `low` kept in place of `wide`, its copy in float32."""
        self._lows[wide.data_ptr()] = low

    def __enter__(self) -> "SavedOperands":
        push_saved_tensors_hooks(self._pack, _unpack)
        return self

    def __exit__(self, *_: object) -> None:
        pop_saved_tensors_hooks()

    def _pack(self, tensor: Tensor) -> object:
        low = self._lows.get(tensor.data_ptr()) if tensor.dtype is torch.float32 else None
        if low is None or tensor.numel() != low.numel() or not _is_dense(low):
            return tensor
        return _Packed(low, get_version(low), tensor.size(), tensor.stride())


def _is_dense(tensor: Tensor) -> bool:
    """Tell whether a float32 copy has the same strides: then any view of the copy is the same view of the tensor."""
    return tensor.layout is torch.strided and (
        tensor.is_contiguous() or tensor.stride() == torch.empty_like(tensor, device="meta").stride()
    )


def _unpack(packed: object) -> Tensor:
    if not isinstance(packed, _Packed):
        assert isinstance(packed, Tensor)
        return packed
    if get_version(packed.low) != packed.version:
        raise RuntimeError(
            f"one of the variables needed for gradient computation has been modified by an inplace operation: a"
            f" {packed.low.dtype} tensor of shape {tuple(packed.low.shape)}, which a product took, is at version"
            f" {get_version(packed.low)}; expected version {packed.version} instead"
        )
    low = packed.low.detach()
    if low.size() != packed.size or low.stride() != packed.stride:
        low = low.as_strided(packed.size, packed.stride)
    return low.to(torch.float32)


def may_save_low() -> bool:
    """Tell whether a graph is recorded, by nobody who looks at what it saves himself: other hooks, such as those of
    checkpoints, function transforms and tracers.
    """
    return (
        not is_dynamo_compiling()
        and torch.is_grad_enabled()
        and get_saved_tensors_hooks(True) is None
        and peek_interpreter_stack() is None
        and not get_tracing_state()
        and not is_compiling()  # nor any other compiler
        and are_saved_tensors_hooks_enabled()
    )
