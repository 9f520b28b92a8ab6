"""Tensors are grouped as one kernel takes them, and copies between groups are those of each pair.

Guards: multi_tensor.
"""

import pytest
import torch
from torch import Tensor

from amp_patch.multi_tensor import copy_, group


def tensors_of(*dtypes: torch.dtype, device: str = "cpu") -> list[Tensor]:
    return [torch.full((2,), float(index), dtype=dtype, device=device) for index, dtype in enumerate(dtypes)]


def indices(row: list[Tensor], whole: list[Tensor]) -> list[int]:
    return [next(index for index, other in enumerate(whole) if other is tensor) for tensor in row]


def test_a_group_is_of_one_dtype_in_each_row_and_keeps_the_order() -> None:
    full, low, wide = torch.float32, torch.bfloat16, torch.float64
    first, second = tensors_of(full, low, full, full, low), tensors_of(low, low, full, low, wide)
    groups = group(first, iter(second))
    assert [indices(row, first) for row, _ in groups] == [[0, 3], [1], [2], [4]]
    assert [indices(row, second) for _, row in groups] == [[0, 3], [1], [2], [4]]


def test_a_group_is_on_one_device() -> None:
    row = [*tensors_of(torch.float32), *tensors_of(torch.float32, device="meta"), *tensors_of(torch.float32)]
    assert [indices(members, row) for (members,) in group(row)] == [[0, 2], [1]]


def test_nothing_is_in_no_group() -> None:
    assert group([], []) == group([]) == []


def test_rows_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        group(tensors_of(torch.float32), [])


def test_copies_between_dtypes_are_those_of_each_pair_even_in_inference_mode() -> None:
    targets = [target.requires_grad_() for target in tensors_of(torch.float32, torch.bfloat16, torch.float32)]
    sources = [source + 1.5 for source in tensors_of(torch.bfloat16, torch.float32, torch.bfloat16)]
    with torch.inference_mode():
        copy_(group(targets, sources))
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(target.detach(), source.to(target.dtype))
        assert target.is_leaf and target.requires_grad
