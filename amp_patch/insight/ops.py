"""Ops as torch dispatches them: the properties of each overload, and how to compute an op in float32."""

import contextlib
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..casting import cast_tree
from ..dtypes import LOW_DTYPES
from ..torch_dispatch import (
    ALIASES,
    COMPUTES_NOTHING,
    COPIES,
    OVERWRITES,
    clone,
    find_written,
    get_argument_names,
    is_mutable,
)
from .tensors import floating_in, storage_of, tensors_in

_SILENT = frozenset({"profiler", "prim", "prims"})  # namespaces whose ops are not looked at
_IN_BULK = ("_foreach_", "_amp_foreach_", "_fused_adagrad", "_fused_adam", "_fused_sgd")  # not _fused_rms_norm
_BATCH_NORMS = frozenset(
    {"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"}
    | {"batch_norm_gather_stats", "batch_norm_gather_stats_with_counts"}
)
_LOSSES = ("nll_loss", "mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "soft_margin_loss")
_SUMMED = 2  # the number of reduction="sum" in torch
# positions of the arguments that batch norms write, although their schemas do not say so
_STATISTICS = frozenset({3, 4})
_FIRST_OUTPUT_ONLY = (  # their other outputs are for their own backward
    *("_scaled_dot_product_", "_flash_attention", "_efficient_attention"),
    *("_ctc_loss", "_cudnn_ctc_loss"),
)


class Overload(NamedTuple):
    """The properties of an op that are the same in each call.

    Attributes:
        packet, name: the op that this is an overload of, and its name.
        is_copy: whether it copies, perhaps to another dtype.
        is_silent: whether it computes no numbers, like a view or an op that makes an empty tensor, or belongs to a
            namespace in `_SILENT`.
        is_alias: whether its result may have the storage of an argument.
        is_in_bulk: whether it is an op on lists of tensors, as optimizers use, or not one of `aten`, such as an op
            between processes.
        written: positions of the arguments that it writes.
        is_overwriting: whether it only writes its first argument, and does not read it.
        moves_statistics: whether it writes running statistics, which it does not return.
        has_one_output: whether the caller uses only the first of its outputs. The backward pass uses the others.
        is_pointwise: whether torch tags it as an op on single elements.
    """

    packet: Any
    name: str
    is_copy: bool
    is_silent: bool
    is_alias: bool
    is_in_bulk: bool
    written: frozenset[int]
    is_overwriting: bool
    moves_statistics: bool
    has_one_output: bool
    is_pointwise: bool


@functools.cache
def find_overload(function: Any) -> Overload:
    """Return the properties of an overload."""
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
        is_silent=function.namespace in _SILENT or packet in COMPUTES_NOTHING or function.is_view,
        is_alias=function.is_view or packet in ALIASES,
        is_in_bulk=name.startswith(_IN_BULK) or function.namespace != "aten",
        written=written,
        is_overwriting=packet in OVERWRITES,
        moves_statistics=moves_statistics,
        has_one_output=name.startswith(_FIRST_OUTPUT_ONLY) and not name.endswith("_backward"),
        is_pointwise=torch.Tag.pointwise in function.tags,
    )


class Op(NamedTuple):
    """One call of an op.

    Attributes:
        overload, function: the properties of the op, and the function that torch dispatches.
        args, kwargs, result: its arguments, by position and by name, and its result.
        before: the same as `args`. But with a `FaultFinder`, tensors that the op reads and then writes are copies from
            before the call, unless the op is in bulk.
        node: the node of the backward pass that it is part of; None in a forward pass.
    """

    overload: Overload
    function: Any
    args: Sequence[Any]
    before: Sequence[Any]
    kwargs: dict[str, Any]
    result: Any
    node: Any

    def inputs(self) -> list[Tensor]:
        """Return the tensors among its arguments."""
        return [*tensors_in(self.args), *tensors_in(self.kwargs.values())]

    def before_inputs(self) -> list[Tensor]:
        """Return the tensors among its arguments, those by position as in `before`."""
        return [*tensors_in(self.before), *tensors_in(self.kwargs.values())]

    def outputs(self) -> list[Tensor]:
        """Return the tensors in its result."""
        return [self.result] if isinstance(self.result, Tensor) else list(tensors_in([self.result]))

    def floating_results(self) -> list[Tensor]:
        """Return the floating tensors in its result (see `floating_in`), and the running statistics that it wrote."""
        moved = sorted(self.overload.written) if self.overload.moves_statistics else ()
        return list(floating_in([*self.outputs(), *(self.args[index] for index in moved)]))


class Input(NamedTuple):
    """A floating input of an op.

    Attributes:
        tensor: the values that the op read: the input itself, or a copy from before the op wrote it.
        storage: the address of the storage of the input itself.
    """

    tensor: Tensor
    storage: int


def read_inputs(op: Op) -> list[Input]:
    """Return the floating tensors that an op has read."""
    given, copies = [*op.args, *op.kwargs.values()], [*op.before, *op.kwargs.values()]
    if op.overload.is_overwriting:
        given, copies = given[1:], copies[1:]
    elif (out := op.kwargs.get("out")) is not None:
        given, copies = [value for value in given if value is not out], [value for value in copies if value is not out]
    pairs = zip(floating_in(given), floating_in(copies), strict=True)
    return [Input(copy, storage_of(tensor)) for tensor, copy in pairs]


def is_reduction(op: Op) -> bool:
    """Return whether an op is `sum`, `mean` or a loss function, whatever its `reduction`."""
    return op.overload.name in ("sum", "mean") or op.overload.name.startswith(_LOSSES)


def find_factor(op: Op, output: Tensor) -> float:
    """Return how many times larger the output of an op is than the mean of its input.

    For a sum, it is the number of terms. For `mul` and `div` with a number x, it is |x| and 1 / |x|. It is 1 for other
    ops, and if x is 0, inf or NaN.
    """
    name, args = op.overload.name, op.args
    if name == "sum" or (name.startswith(_LOSSES) and _find_reduction(op) == _SUMMED):
        # nll_loss picks a value for each label: the terms are as many as labels, not as values
        terms = args[1] if name.startswith("nll_loss") else args[0]
        return float(terms.numel() / output.numel())
    if name in ("mul", "div") and len(args) > 1:
        factor = args[1].item() if isinstance(args[1], Tensor) and args[1].numel() == 1 else args[1]
        if isinstance(factor, (int, float)) and factor and math.isfinite(factor):
            return abs(factor) if name == "mul" else 1 / abs(factor)
    return 1.0


def _find_reduction(op: Op) -> int | None:
    """Return the number of the argument `reduction` of a loss function; None if it is not passed."""
    arguments = dict(zip(get_argument_names(op.function), op.args, strict=False)) | op.kwargs
    return arguments.get("reduction")


def run_in_float32(op: Op) -> Op | None:
    """Run an op with its 16-bit inputs cast to float32. Return this run; None if the op raises an error."""

    def cast(tensor: Tensor) -> Tensor:
        if tensor.dtype in LOW_DTYPES:
            return tensor.float()
        return clone(tensor) if op.overload.written else tensor  # the op must not write tensors of the run

    def widen(value: Any) -> Any:
        if isinstance(value, torch.Generator):
            # A copy, so the run's own draws stay the same.
            return torch.Generator(value.device).set_state(value.get_state())
        is_low = isinstance(value, torch.dtype) and value in LOW_DTYPES
        return torch.float32 if is_low else cast_tree(value, cast)

    kwargs = {name: widen(value) for name, value in op.kwargs.items()}
    if isinstance(out := kwargs.get("out"), Tensor):
        kwargs["out"] = out.new_empty(0)  # torch resizes it, and the tensor of the run stays as it is
    args = [widen(value) for value in op.before]
    with random_numbers_kept(args), contextlib.suppress(RuntimeError, TypeError, NotImplementedError):
        return op._replace(args=args, kwargs=kwargs, result=op.function(*args, **kwargs))
    return None


def compute_in_float32(op: Op) -> list[Tensor]:
    """Run an op with its 16-bit inputs cast to float32. Return its floating results; [] if the op raises an error."""
    run = run_in_float32(op)
    return [] if run is None else run.floating_results()


def random_numbers_kept(args: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
    """Context manager: restore the random number generators of the CPU and the devices of `args` after the block."""
    devices = {tensor.device for tensor in tensors_in(args) if tensor.device.type not in ("cpu", "meta")}
    kind = next((device.type for device in devices), "cuda")
    return torch.random.fork_rng([device.index for device in devices], device_type=kind)
