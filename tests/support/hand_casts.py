"""Calls made the way somebody writes mixed precision out by hand, to compare patched calls with: results, dtypes and
gradients.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from op_samples import Sample
from torch import Tensor

from amp_patch.config.op_lists import Spelling
from amp_patch.errors import BannedOpError

LOWS = {"bfloat16": torch.bfloat16, "float16": torch.float16}
lows = pytest.mark.parametrize("low", LOWS.values(), ids=list(LOWS))
# How the arguments come: the dtype of the first floating tensor, and that of the others.
GIVEN = {
    "float32": lambda low: (torch.float32, torch.float32),
    "low": lambda low: (low, low),
    "low-first": lambda low: (low, torch.float32),
    "float32-first": lambda low: (torch.float32, low),
}


def tensors_of(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from tensors_of(value)


def each(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Apply a function to the floating tensors in lists, tuples and dicts."""
    if isinstance(value, Tensor):
        return function(value) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {name: each(item, function) for name, item in value.items()}
    return type(value)(each(item, function) for item in value) if type(value) in (list, tuple) else value


def make_leaves(
    sample: Sample, dtypes: tuple[torch.dtype, torch.dtype]
) -> tuple[list[Tensor], tuple[Any, ...], dict[str, Any]]:
    """Copies that take gradients, in the order given, and the arguments made of them."""
    leaves: list[Tensor] = []

    def leaf(tensor: Tensor) -> Tensor:
        leaves.append(
            tensor.detach().to(dtypes[bool(leaves)], copy=True).requires_grad_(len(leaves) < sample.variables)
        )
        return leaves[-1] * 1  # not the leaf itself, to which an in-place op must not write

    args = each(sample.args, leaf)
    return leaves, args, each(sample.kwargs, leaf)


def by_hand(
    kind: str, args: tuple[Any, ...], kwargs: dict[str, Any], low: torch.dtype
) -> tuple[torch.dtype, tuple[Any, ...], dict[str, Any]]:
    """The dtype that a rule runs in, and the arguments cast as somebody would who writes the casts out."""
    considered = args[0] if kind == "sequence_promote" else (*args, *kwargs.values())
    dtypes = {tensor.dtype for tensor in tensors_of(considered) if tensor.is_floating_point()}
    widest = torch.float32 if torch.float32 in dtypes else low
    own = args[0].dtype if isinstance(args[0], Tensor) else torch.float32
    target = {"whitelist": low, "blacklist": torch.float32, "promote": widest, "sequence_promote": widest}.get(
        kind, own
    )
    return target, each(args, lambda tensor: tensor.to(target)), each(kwargs, lambda tensor: tensor.to(target))


def outcome(
    op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Tensor]
) -> tuple[list[Any], list[Any]]:
    """Results and gradients of one call; gradients are None where the op has none."""
    torch.random.default_generator.manual_seed(
        0
    )  # torch.manual_seed seeds all devices, which takes longer than most of these ops
    results = op(*args, **kwargs)
    if op is torch.Tensor.__setitem__:  # returns None
        results = args[0]
    tensors = list(tensors_of(results))
    outputs = [tensor for tensor in tensors if tensor.requires_grad]
    weights = [torch.linspace(0.5, 1.5, output.numel()).reshape(output.shape).to(output.dtype) for output in outputs]
    variables = [leaf for leaf in leaves if leaf.requires_grad]
    try:
        gradients = list(torch.autograd.grad(outputs, variables, weights, allow_unused=True)) if outputs else []
    except (NotImplementedError, RuntimeError) as error:
        gradients = [type(error)]
    return [tensor.detach() for tensor in tensors] or [results], gradients


def is_same(left: Any, right: Any, tolerance: float = 0.0) -> bool:
    """Bitwise unless a tolerance is given, nan equal to nan, through lists and tuples."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        if left.dtype is not right.dtype or left.shape != right.shape or left.layout is not right.layout:
            return False
        return torch.allclose(left.to_dense(), right.to_dense(), rtol=tolerance, atol=tolerance, equal_nan=True)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(is_same, left, right, itertools.repeat(tolerance)))
    return left is right or bool(left == right)


def is_close(left: Any, right: Any) -> bool:
    """As `is_same`, but values of 16-bit products may be a few roundings apart: kernels add in different orders."""
    return is_same(left, right, tolerance=4 * torch.finfo(torch.bfloat16).eps)


def expected_of(spelling: Spelling, sample: Sample, given: tuple[torch.dtype, torch.dtype], low: torch.dtype) -> Any:
    op = getattr(spelling.owner, spelling.name)
    leaves, args, kwargs = make_leaves(sample, given)
    is_low = any(tensor.dtype is low for tensor in tensors_of(args))
    if spelling.rule == "banned" and is_low:
        return BannedOpError
    target, args, kwargs = by_hand(spelling.rule, args, kwargs, low)
    return target, outcome(op, args, kwargs, leaves)


def find_fault(
    spelling: Spelling,
    sample: Sample,
    given: tuple[torch.dtype, torch.dtype],
    expected: Any,
    is_equal: Callable[[Any, Any], bool] = is_same,
) -> str | None:
    """Call the patched op as a user does; return what differs from the expectation, by `is_equal`."""
    leaves, args, kwargs = make_leaves(sample, given)
    try:
        results, gradients = outcome(getattr(spelling.owner, spelling.name), args, kwargs, leaves)
    except Exception as error:
        return None if expected is BannedOpError and isinstance(error, BannedOpError) else f"raised {error!r}"
    if expected is BannedOpError:
        return "was not refused"
    target, (wanted, wanted_gradients) = expected
    floating = [result.dtype for result in results if isinstance(result, Tensor) and result.is_floating_point()]
    if set(floating) - {target}:
        return f"gave {floating}, not {target}"
    if not is_equal(results, wanted):
        return "differs from the cast by hand"
    if not is_equal(gradients, wanted_gradients):
        return "has other gradients than the cast by hand"
    return None
