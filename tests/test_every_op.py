"""Every op of every shipped list, in every spelling, on tiny inputs: results and gradients are those of the same call with its arguments cast by
hand, and the floating results have the dtype that the rule says."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from op_samples import NO_SAMPLE, Sample, find_sample
from torch import Tensor, nn

import amp_patch
from amp_patch.errors import BannedOpError
from amp_patch.oplists import Spelling, load_oplists, shipped_names

pytestmark = [pytest.mark.filterwarnings("ignore:.*deprecated:UserWarning"), pytest.mark.filterwarnings("ignore:reduction. 'mean':UserWarning")]

LOWS = {"bfloat16": torch.bfloat16, "float16": torch.float16}
# How the arguments come: the dtype of the first floating tensor, and that of the others.
GIVEN = {
    "float32": lambda low: (torch.float32, torch.float32),
    "low": lambda low: (low, low),
    "low-first": lambda low: (low, torch.float32),
    "float32-first": lambda low: (torch.float32, low),
}


# Why an op is left out.
LEFT_OUT = {
    **NO_SAMPLE,
    **dict.fromkeys(("__rdiv__", "__rtruediv__"), "written in Python as reciprocal() * other, of which reciprocal is listed itself"),
}


def lists_of(name: str) -> Any:
    """What to ask `initialize` for: an overlay needs a list below it."""
    return ["float16", name] if not load_oplists(name).spellings else name


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


def make_leaves(sample: Sample, dtypes: tuple[torch.dtype, torch.dtype]) -> tuple[list[Tensor], tuple[Any, ...], dict[str, Any]]:
    """Copies that take gradients, in the order given, and the arguments made of them."""
    leaves: list[Tensor] = []

    def leaf(tensor: Tensor) -> Tensor:
        leaves.append(tensor.detach().to(dtypes[bool(leaves)], copy=True).requires_grad_(len(leaves) < sample.variables))
        return leaves[-1] * 1  # not the leaf itself, to which an in-place op must not write

    args = each(sample.args, leaf)
    return leaves, args, each(sample.kwargs, leaf)


def by_hand(kind: str, args: tuple[Any, ...], kwargs: dict[str, Any], low: torch.dtype) -> tuple[torch.dtype, tuple[Any, ...], dict[str, Any]]:
    """The dtype that a rule runs in, and the arguments cast as somebody would who writes the casts out."""
    considered = args[0] if kind == "sequence_promote" else (*args, *kwargs.values())
    dtypes = {tensor.dtype for tensor in tensors_of(considered) if tensor.is_floating_point()}
    widest = torch.float32 if torch.float32 in dtypes else low
    own = args[0].dtype if isinstance(args[0], Tensor) else torch.float32
    target = {"whitelist": low, "blacklist": torch.float32, "promote": widest, "sequence_promote": widest}.get(kind, own)
    return target, each(args, lambda tensor: tensor.to(target)), each(kwargs, lambda tensor: tensor.to(target))


def outcome(op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Tensor]) -> tuple[list[Any], list[Any]]:
    """Results and gradients of one call; gradients are None where the op has none."""
    torch.random.default_generator.manual_seed(0)  # torch.manual_seed seeds all devices, which takes longer than most of these ops
    results = op(*args, **kwargs)
    tensors = list(tensors_of(results))
    outputs = [tensor for tensor in tensors if tensor.requires_grad]
    weights = [torch.linspace(0.5, 1.5, output.numel()).reshape(output.shape).to(output.dtype) for output in outputs]
    variables = [leaf for leaf in leaves if leaf.requires_grad]
    try:
        gradients = list(torch.autograd.grad(outputs, variables, weights, allow_unused=True)) if outputs else []
    except (NotImplementedError, RuntimeError) as error:
        gradients = [type(error)]
    return [tensor.detach() for tensor in tensors] or [results], gradients


def is_same(left: Any, right: Any) -> bool:
    """Bitwise, so that nan equals nan."""
    if not isinstance(left, Tensor) or not isinstance(right, Tensor):
        return left is right or left == right
    return left.dtype is right.dtype and left.shape == right.shape and torch.allclose(left, right, rtol=0, atol=0, equal_nan=True)


def expected_of(spelling: Spelling, sample: Sample, given: tuple[torch.dtype, torch.dtype], low: torch.dtype) -> Any:
    op = getattr(spelling.owner, spelling.name)
    leaves, args, kwargs = make_leaves(sample, given)
    is_low = any(tensor.dtype is low for tensor in tensors_of(args))
    if (spelling.kind == "banned" and is_low) or (spelling.kind == "inplace_error" and next(tensors_of(args)).dtype is low):
        return BannedOpError
    target, args, kwargs = by_hand(spelling.kind, args, kwargs, low)
    return target, outcome(op, args, kwargs, leaves)


def find_fault(spelling: Spelling, sample: Sample, given: tuple[torch.dtype, torch.dtype], expected: Any) -> str | None:
    """Call the patched op as a user does; return what differs from the expectation."""
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
    if len(results) != len(wanted) or not all(map(is_same, results, wanted)):
        return "differs from the cast by hand"
    if len(gradients) != len(wanted_gradients) or not all(map(is_same, gradients, wanted_gradients)):
        return "has other gradients than the cast by hand"
    return None


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Two threads have nothing to share in a 4x4 matrix, and wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", shipped_names())
def test_every_op_has_a_sample(name: str) -> None:
    spellings = [one for one in load_oplists(name).spellings if one.name not in NO_SAMPLE]
    assert [f"{one.owner_name}.{one.name}" for one in spellings if find_sample(one.owner_name, one.name) is None] == []


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("low", LOWS.values(), ids=list(LOWS))
@pytest.mark.parametrize("name", shipped_names())
def test_every_op_runs_as_if_cast_by_hand(name: str, low: torch.dtype, given: str) -> None:
    lists = lists_of(name)
    spellings = [one for one in load_oplists(lists).spellings if one.name not in LEFT_OUT]
    calls = [(one, find_sample(one.owner_name, one.name), GIVEN[given](low)) for one in spellings]
    expected = [expected_of(*call, low) for call in calls]
    amp_patch.initialize(nn.Linear(2, 2), opt_level="O1", lists=lists, patch_torch_functions_type=low, verbosity=0)
    faults = {f"{call[0].owner_name}.{call[0].name}": find_fault(*call, wanted) for call, wanted in zip(calls, expected, strict=True)}
    amp_patch.reset()
    assert {op: fault for op, fault in faults.items() if fault} == {}


@pytest.mark.parametrize(("op", "wrong"), [("matmul", "blacklist"), ("exp", "whitelist"), ("addcmul", "blacklist")], ids=["low", "wide", "widest"])
def test_an_op_under_another_rule_than_the_list_says_is_noticed(op: str, wrong: str) -> None:
    spelling = next(one for one in load_oplists("float16").spellings if one.name == op)
    given = GIVEN["low"](torch.bfloat16)
    expected = expected_of(dataclasses.replace(spelling, kind=wrong), find_sample("torch", op), given, torch.bfloat16)
    amp_patch.initialize(nn.Linear(2, 2), opt_level="O1", lists="float16", patch_torch_functions_type=torch.bfloat16, verbosity=0)
    assert find_fault(spelling, find_sample("torch", op), given, expected)
