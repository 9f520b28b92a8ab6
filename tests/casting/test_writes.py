"""Ops that write values of one dtype into a tensor of another: `x[index] = values` in all its forms, and the ops
behind it. The tensor keeps its dtype, what is not written keeps its bits, and gradients come back in the dtype of the
values.

Guards: casting/wrappers, config/op_names, lists/float16.yaml, lists/bfloat16.yaml.
"""

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from list_files import write_list
from torch import Tensor, nn

import amp_patch as amp
from amp_patch import native

LOW, FLOAT = torch.bfloat16, torch.float32
PICKED, MASK = torch.tensor([0, 2]), torch.tensor([True, False, True, False])
LEVELS = {"O1": torch.float16, "O4": torch.bfloat16}
levels = pytest.mark.parametrize(("level", "low"), LEVELS.items(), ids=list(LEVELS))

INDEXES: dict[str, Any] = {
    # copies into a view
    "int": 1,
    "slice": slice(1, 3),
    "ellipsis": Ellipsis,
    "none": None,
    "ints": (1, 2),
    "slices": (slice(None), slice(0, 2)),
    "a tensor with one number": torch.tensor(1),
    # index_put_
    "tensor": PICKED,
    "mask": MASK,
    "a mask of all": torch.arange(12).view(4, 3) % 2 == 0,
    "list": [0, 2],
    "a list of bools": [True, False, True, False],
    "range": range(2),
    "array": np.array([0, 2]),
    "True": True,
    "a slice and a tensor": (slice(None), PICKED),
    "an ellipsis and a mask": (Ellipsis, torch.tensor([True, False, True])),
    "a tensor, None and an int": (PICKED, None, 1),
    "two tensors": (PICKED, torch.tensor([1, 0])),
}
indexes = pytest.mark.parametrize("index", INDEXES.values(), ids=list(INDEXES))


def make(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Values that 16 bits cannot hold."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


def assign(index: Any, target: Tensor, values: Tensor) -> list[Tensor]:
    """Return the target after `x[index] = values`, and the gradients of both."""
    x = target.clone()
    version, address = x._version, x.data_ptr()
    x[index] = values
    assert x._version > version and x.data_ptr() == address
    gradients = torch.autograd.grad(x.float().square().sum(), [target, values])
    return [x.detach(), *gradients]


@levels
@indexes
@pytest.mark.parametrize("is_low_target", [False, True], ids=["float32", "low"])
def test_values_of_another_dtype_are_cast_to_that_of_the_target(
    level: str, low: torch.dtype, index: Any, is_low_target: bool
) -> None:
    dtype, given = (low, FLOAT) if is_low_target else (FLOAT, low)
    target = make((4, 3), dtype)
    values = make(target[index].shape, given, seed=1)
    written, of_target, of_values = assign(index, target, values.detach().to(dtype).requires_grad_())
    with amp.session(level, device="cpu"):
        results = assign(index, target, values)
    assert [result.dtype for result in results] == [dtype, dtype, given]
    for result, expected in zip(results, [written, of_target, of_values.to(given)], strict=True):
        assert torch.equal(result, expected)


def outcome(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except Exception as error:
        return type(error), str(error)


@indexes
def test_what_is_never_cast_is_left_to_torch(index: Any) -> None:
    def give_all() -> list[Any]:
        results = []
        for dtype in (FLOAT, LOW, torch.float64, torch.int64, torch.complex64, torch.bool):
            for value in (torch.float64, torch.int64, torch.complex64, torch.bool, None, 2, 0.3, np.float64(0.3)):
                x = torch.ones(4, 3, dtype=dtype)
                if isinstance(value, torch.dtype):
                    value = torch.ones_like(x[index], dtype=value)
                elif value is None:
                    value = np.full(x[index].shape, 0.3)

                def write(x: Tensor = x, value: Any = value) -> str:
                    x[index] = value
                    return f"{x.dtype} {x.tolist()}"

                results.append(outcome(write))
        return results

    expected = give_all()
    with amp.session("O4", device="cpu"):
        assert give_all() == expected


def write_low(x: Tensor) -> Tensor:
    x = x.clone()
    x[PICKED] = torch.full((2, 3), 0.3, dtype=LOW)
    return x


def test_torch_is_as_before_outside_of_sessions_and_where_casts_are_off() -> None:
    x = torch.rand(4, 3)
    before = Tensor.__setitem__
    with amp.session("O4", device="cpu"):
        assert amp.is_patched(Tensor, "__setitem__")
        write_low(x)
        with amp.disable_casts(), pytest.raises(RuntimeError, match="Index put requires"):
            write_low(x)
    assert Tensor.__setitem__ is before and "__setitem__" not in vars(Tensor)
    with pytest.raises(RuntimeError, match="Index put requires"):
        write_low(x)


def test_a_usual_assignment_takes_one_frame() -> None:
    x, row, frames = torch.rand(4, 3), torch.rand(3), 0

    def count(frame: Any, event: str, argument: object) -> None:
        nonlocal frames
        frames += event == "call"

    with amp.session("O4", device="cpu"):
        sys.setprofile(count)
        try:
            x[0] = 1.0
            x[1:] = row
            x[:, 0] = 2
            x[PICKED] = row
        finally:
            sys.setprofile(None)
    assert frames == 4


def test_overrides_get_the_public_name_before_the_cast() -> None:
    seen = []

    class Recorded(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is Tensor.__setitem__:
                seen.append(args[2].dtype)
            return super().__torch_function__(func, types, args, kwargs or {})

    low = torch.full((2, 3), 0.3, dtype=LOW)
    with amp.session("O4", device="cpu"):
        for kinds in ((Recorded, Tensor, Tensor), (Tensor, Recorded, Tensor), (Tensor, Tensor, Recorded)):
            x, index, values = (
                tensor.as_subclass(kind) for tensor, kind in zip((torch.zeros(4, 3), PICKED, low), kinds, strict=True)
            )
            x[(index,)] = values
            assert seen.pop() is LOW and not seen
            assert torch.equal(x.as_subclass(Tensor)[PICKED], low.float())


def test_function_transforms_see_the_cast() -> None:
    x, values = torch.rand(5, 4, 3), torch.rand(5, 2, 3).to(LOW)

    def write(x: Tensor, values: Tensor) -> Tensor:
        x = x.clone()
        x[PICKED] = values
        return x

    expected = torch.func.vmap(write)(x, values.float())
    with amp.session("O4", device="cpu"):
        assert torch.equal(torch.func.vmap(write)(x, values), expected)
        gradient = torch.func.grad(lambda values: write(x[0], values).square().sum())(values[0])
    assert gradient.dtype is LOW and torch.equal(gradient, 2 * values[0])


def fill(values: Tensor) -> list[Tensor]:
    """Write values [2, 3] into a float32 tensor, by every op that does."""
    buffer, rows = torch.full((4, 3), 1 / 3), torch.tensor([[0, 1, 2], [2, 1, 0]])
    in_place = [buffer.clone() for _ in range(10)]
    in_place[0][PICKED] = values
    in_place[1].index_put_((PICKED,), values, accumulate=True)
    in_place[2].index_add_(0, PICKED, values)
    in_place[3].index_copy_(0, PICKED, values)
    in_place[4].index_reduce_(0, PICKED, values, "prod")
    in_place[5].scatter_(0, rows, values)
    in_place[6].scatter_add_(0, index=rows, src=values)
    in_place[7].scatter_reduce_(0, rows, values, "sum")
    in_place[8].masked_scatter_(MASK[:, None], values)
    in_place[9].put_(rows, values)
    return [
        *in_place,
        torch.index_put(buffer, (PICKED,), values),
        torch.index_add(buffer, 0, PICKED, values),
        buffer.index_copy(0, PICKED, values),
        buffer.index_reduce(0, PICKED, values, "amax"),
        torch.scatter(buffer, 0, rows, values),
        buffer.scatter_add(0, rows, src=values),
        buffer.scatter_reduce(0, rows, values, "amax"),
        torch.masked_scatter(buffer, MASK[:, None], values),
        buffer.put(rows, values),
        buffer.index_fill(0, PICKED, values.sum()),
        buffer.masked_fill(MASK[:, None], values.sum()),
        torch.where(MASK[:, None], buffer, values.sum()),
        torch.select_scatter(buffer, values[0], 0, 1),
        torch.slice_scatter(buffer, values, 0, 1, 3),
        torch.diagonal_scatter(buffer, values[0]),
    ]


@pytest.mark.parametrize("by_takeover", [False, True], ids=["session", "takeover"])
@levels
def test_results_of_layers_go_into_float32_buffers(level: str, low: torch.dtype, by_takeover: bool) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(3, 3), torch.rand(2, 3)
    with contextlib.ExitStack() as stack:
        if by_takeover:
            stack.enter_context(native.install(level))
            stack.enter_context(torch.autocast("cpu", low))
        else:
            stack.enter_context(amp.session(level, device="cpu"))
        values = layer(x)
        assert values.dtype is low
        results = fill(values)
    leaf = values.detach().float().requires_grad_()
    for result, expected in zip(results, fill(leaf), strict=True):
        assert result.dtype is FLOAT and torch.equal(result, expected)
        gradient = torch.autograd.grad(result.square().sum(), values, retain_graph=True)[0]
        wanted = torch.autograd.grad(expected.square().sum(), leaf, retain_graph=True)[0]
        assert gradient.dtype is low and torch.equal(gradient, wanted.to(low))


# ---- lists -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["index_put", "index_put_", "__setitem__", "torch.Tensor.__setitem__"])
def test_a_list_may_name_it_by_each_name(tmp_path: Path, op: str) -> None:
    x = torch.rand(4, 3)
    for text in (
        f"whitelist: [linear, {op}]",
        f"{{whitelist: [linear], blacklist: [{op}]}}",
        f"{{whitelist: [linear], promote: [{op}]}}",
    ):
        with amp.session("O4", device="cpu", lists=write_list(tmp_path, text)):
            assert write_low(x).dtype is FLOAT
    lists = write_list(tmp_path, f"extends: bfloat16\nneutral: [{op}]")
    with amp.session("O4", device="cpu", lists=lists), pytest.raises(RuntimeError, match="Index put requires"):
        write_low(x)


def test_a_list_may_refuse_it(tmp_path: Path) -> None:
    x, lists = torch.rand(4, 3), write_list(tmp_path, "extends: bfloat16\nbanned: [__setitem__]")
    with amp.session("O4", device="cpu", lists=lists), pytest.raises(amp.BannedOpError):
        write_low(x)
