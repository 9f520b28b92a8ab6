"""A rule for a function that torch composes of other ops holds for every op inside it.

Guards: casting/wrappers, casting/replacement.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hand_casts import lows
from torch import Tensor, nn

import amp_patch as amp


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("compute", ["native", "float32"])
def test_a_mask_of_huge_negatives_masks_in_float16_and_zeroes_rows_that_are_masked_whole(compute: str) -> None:
    heads = rand(1, 2, 3, 4)
    mask = torch.tensor([[0.0, -1e9, 0.0], [0.0, 0.0, -1e9], [-1e9, -1e9, -1e9]])
    amp.initialize(nn.Linear(2, 2), opt_level="O1", compute=compute, verbosity=0)
    result = F.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask)
    amp.reset()
    expected = F.scaled_dot_product_attention(*[heads.half()] * 3, attn_mask=mask == 0)
    tolerance = 0.0 if compute == "native" else 0.01
    torch.testing.assert_close(result[..., :2, :], expected[..., :2, :], rtol=0, atol=tolerance)
    assert torch.equal(result[..., 2, :], torch.zeros(1, 2, 4, dtype=torch.float16))


@lows
def test_what_is_blacklisted_is_float32_throughout_though_torch_wrote_it_in_python(
    tmp_path: Any, low: torch.dtype
) -> None:
    """Else the products inside would be cast to low again."""
    lists = tmp_path / "wide_attention.yaml"
    lists.write_text("extends: float16\nblacklist: [multi_head_attention_forward]\n")
    module, sequence = nn.MultiheadAttention(8, 2, batch_first=True), rand(2, 3, 8)
    matrix = rand(6, 6).to(low)
    expected, factors = module(sequence, sequence, sequence), reduced(matrix.float())
    amp.initialize(module, opt_level="O1", lists=str(lists), patch_torch_functions_type=low, verbosity=0)
    result, low_factors = module(sequence, sequence, sequence), reduced(matrix)
    amp.reset()
    assert all(map(torch.equal, result, expected))
    assert all(map(torch.equal, low_factors, factors))


def reduced(matrix: Tensor) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return tuple(torch.svd_lowrank(matrix, 2))
