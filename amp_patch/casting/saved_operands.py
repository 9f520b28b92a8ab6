"""What autograd saves of a product that is computed in float32: its operands in 16 bits, widened again for backward."""

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
    """Stands for a tensor that autograd saves: the tensor itself, or a float32 copy of `saved` laid out as given."""

    saved: Tensor  # without a graph: that of a result would lead back here
    version: int
    size: torch.Size | None = None
    stride: tuple[int, ...] = ()


class SavedOperands:
    """A `with` block around one product: of the operands given to `add`, the 16-bit originals are saved for backward.

    What is changed in place before backward, original or not, raises RuntimeError there, as it does without the block.
    """

    __slots__ = ("_lows",)

    def __init__(self) -> None:
        self._lows: dict[int, tuple[Tensor, Tensor]] = {}  # and float32 operands, by the address of the latter

    def __bool__(self) -> bool:
        return bool(self._lows)

    def add(self, wide: Tensor, low: Tensor) -> None:
        """Have `low` saved in place of `wide`, its copy in float32, if it is a plain tensor of the same layout."""
        if wide.__class__ is Tensor and wide.layout is torch.strided and not wide.is_nested and _is_dense(low):
            self._lows[wide.data_ptr()] = low, wide

    def __enter__(self) -> "SavedOperands":
        push_saved_tensors_hooks(self._pack, _unpack)
        return self

    def __exit__(self, *_: object) -> None:
        pop_saved_tensors_hooks()
        self._lows.clear()  # autograd holds this object

    def _pack(self, tensor: Tensor) -> _Packed:
        if tensor.dtype is torch.float32 and tensor.layout is torch.strided and not tensor.is_nested:
            low, _ = self._lows.get(tensor.data_ptr(), (None, None))
            if low is not None and tensor.numel() == low.numel():
                return _Packed(low.detach(), get_version(low), tensor.size(), tensor.stride())
        return _Packed(tensor.detach(), get_version(tensor))


def _is_dense(tensor: Tensor) -> bool:
    """Tell whether a float32 copy has the same strides: then any view of the copy is the same view of the tensor."""
    return tensor.is_contiguous() or tensor.stride() == torch.empty_like(tensor, device="meta").stride()


def _unpack(packed: _Packed) -> Tensor:
    saved, version, size, stride = packed
    if get_version(saved) != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation:"
            f" [{saved.dtype} {list(saved.shape)}], an operand or result of a product, is at version"
            f" {get_version(saved)}; expected version {version} instead"
        )
    if size is None:
        return saved
    if saved.size() != size or saved.stride() != stride:
        saved = saved.as_strided(size, stride)
    return saved.to(torch.float32)


def _are_no_hooks_set() -> bool:
    """Tell whether nobody looks at what autograd saves, after taking away what an interrupted product has left."""
    hooks = get_saved_tensors_hooks(True)
    while hooks and isinstance(getattr(hooks[0], "__self__", None), SavedOperands):
        pop_saved_tensors_hooks()
        hooks = get_saved_tensors_hooks(True)
    return hooks is None


def may_save_low() -> bool:
    """Tell whether a graph is recorded, by nobody who looks at what it saves himself: other hooks, such as those of
    checkpoints, function transforms and tracers. Asked outside of products only.
    """
    return (
        not is_dynamo_compiling()
        and torch.is_grad_enabled()
        and _are_no_hooks_set()
        and peek_interpreter_stack() is None
        and not get_tracing_state()
        and not is_compiling()  # nor any other compiler
        and are_saved_tensors_hooks_enabled()
    )
