"""Ops as torch dispatches them, what is known of each overload, and the same op in float32."""

import contextlib
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..casting import cast_tree
from ..dtypes import LOW_DTYPES
from ..torch_dispatch import COPIES, OVERWRITES, WITHOUT_KERNEL, clone, find_written, is_mutable
from .tensors import floating_in, tensors_in

_SILENT = frozenset({"profiler", "prim", "prims"})
_IN_BULK = ("_foreach_", "_fused_", "_amp_foreach_")
_BATCH_NORMS = frozenset(
    {"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"}
    | {"batch_norm_gather_stats", "batch_norm_gather_stats_with_counts"}
)
_LOSSES = ("nll_loss", "mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "soft_margin_loss")
_SUMMED = 2  # how torch numbers reduction="sum"
_STATISTICS = frozenset({3, 4})  # the positions that these write, which their schemas do not say
_FIRST_OUTPUT_ONLY = (  # the others are their own
    *("_scaled_dot_product_", "_flash_attention", "_efficient_attention"),
    *("_ctc_loss", "_cudnn_ctc_loss"),
)


class Overload(NamedTuple):
    """What does not change from call to call.

    Attributes:
        packet: the op that it is an overload of; `name`: of that.
        is_copy: it copies, perhaps to another dtype.
        is_silent: it computes no number: a view, or memory that is not filled.
        is_in_bulk: it works on many tensors at once, or with other processes.
        written: positions of the arguments that it writes.
        moves_statistics: it writes running statistics, which it does not return.
        is_overwriting: it reads nothing of the first, which it writes.
        has_one_output: of several outputs, the first alone is for who calls it.
    """

    packet: Any
    name: str
    is_copy: bool
    is_silent: bool
    is_in_bulk: bool
    written: frozenset[int]
    is_overwriting: bool
    moves_statistics: bool
    has_one_output: bool


@functools.cache
def find_overload(function: Any) -> Overload:
    """Return what is known of an overload."""
    packet = function.overloadpacket
    name: str = packet.__name__
    moves_statistics = name in _BATCH_NORMS
    written: frozenset[int] = frozenset()
    if is_mutable(function):
        written = find_written(function)
    elif moves_statistics:
        written = _STATISTICS
    return Overload(
        packet,
        name,
        is_copy=packet in COPIES,
        is_silent=function.namespace in _SILENT or packet in WITHOUT_KERNEL or function.is_view,
        is_in_bulk=name.startswith(_IN_BULK) or function.namespace != "aten",
        written=written,
        is_overwriting=packet in OVERWRITES,
        moves_statistics=moves_statistics,
        has_one_output=name.startswith(_FIRST_OUTPUT_ONLY),
    )


class Op(NamedTuple):
    """A call: the overload, what it was given, what it gave, and the node of the backward pass that it is part of.

    `before` has the arguments, with copies of those that the op writes and reads before, where these are wanted.
    """

    overload: Overload
    function: Any
    args: Sequence[Any]
    before: Sequence[Any]
    kwargs: dict[str, Any]
    result: Any
    node: Any

    def inputs(self) -> list[Tensor]:
        """Return the tensors that it was given."""
        found = list(tensors_in(self.args))
        return found + list(tensors_in(self.kwargs.values())) if self.kwargs else found

    def outputs(self) -> list[Tensor]:
        """Return the tensors that it gave."""
        return [self.result] if isinstance(self.result, Tensor) else list(tensors_in([self.result]))

    def floating_results(self) -> list[Tensor]:
        """Return the floating and complex tensors that it gave, and the running statistics that it moved."""
        moved = sorted(self.overload.written) if self.overload.moves_statistics else ()
        return list(floating_in([*self.outputs(), *(self.args[index] for index in moved)]))


def is_reduction(op: Op) -> bool:
    """Tell whether an op adds up what it is given, or takes its mean: a loss function does either."""
    return op.overload.name in ("sum", "mean") or op.overload.name.startswith(_LOSSES)


def find_factor(op: Op, output: Tensor) -> float:
    """Return by how much more an op multiplies what it is given than one does that takes the mean of it."""
    name, args = op.overload.name, op.args
    if name == "sum" or (name.startswith(_LOSSES) and _SUMMED in args[2:]):
        return float(args[0].numel() / output.numel())
    if name in ("mul", "div") and len(args) > 1:
        other = args[1].item() if isinstance(args[1], Tensor) and args[1].numel() == 1 else args[1]
        if isinstance(other, (int, float)) and other and math.isfinite(other):
            return abs(other) if name == "mul" else 1 / abs(other)
    return 1.0


def compute_in_float32(op: Op) -> list[Tensor]:
    """Return what an op gives for its inputs in float32, and the statistics that it moves; nothing where it cannot."""

    def cast(tensor: Tensor) -> Tensor:
        if tensor.dtype in LOW_DTYPES:
            return tensor.float()
        return clone(tensor) if op.overload.written else tensor  # the op is not to write what is the run's

    def widen(value: Any) -> Any:
        if isinstance(value, torch.Generator):
            return torch.Generator(value.device).set_state(value.get_state())
        is_low = isinstance(value, torch.dtype) and value in LOW_DTYPES
        return torch.float32 if is_low else cast_tree(value, cast)

    kwargs = {name: widen(value) for name, value in op.kwargs.items()}
    if isinstance(out := kwargs.get("out"), Tensor):
        kwargs["out"] = out.new_empty(0)
    args = [widen(value) for value in op.before]
    with random_numbers_kept(args), contextlib.suppress(RuntimeError, TypeError, NotImplementedError):
        return op._replace(args=args, kwargs=kwargs, result=op.function(*args, **kwargs)).floating_results()
    return []


def random_numbers_kept(args: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
    """Have the block leave the random numbers of the CPU and of the devices of the tensors in `args` as they are."""
    devices = {tensor.device for tensor in tensors_in(args) if tensor.device.type not in ("cpu", "meta")}
    kind = next((device.type for device in devices), "cuda")
    return torch.random.fork_rng([device.index for device in devices], device_type=kind)
