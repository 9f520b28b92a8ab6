"""Every public op of the running torch is known, and each one that multiplies has a rule.

If a test here fails with a new torch, run `tools/find_products.py` with it, and give each product that it finds a rule.

Guards: tools/find_products.py, tools/torch_products.yaml, lists/float16.yaml, lists/bfloat16.yaml.
"""

import find_products
import pytest
import torch
import torch.nn.functional as F
from torch_state import VERSION

import amp_patch as amp
from amp_patch.config.explain import explain_op
from amp_patch.config.op_lists import load_oplists
from amp_patch.config.op_rules import OpRule

CONTENT = find_products.read_file()
WITHOUT_RULE = {op for names in find_products.WITHOUT_RULE.values() for op in names.split()}


def test_every_public_op_of_torch_is_known() -> None:
    """As a product, or as another op."""
    unknown = set(find_products.list_ops()) - CONTENT["products"].keys() - set(CONTENT["others"])
    assert sorted(unknown) == [], "run tools/find_products.py with this torch"


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_every_product_has_a_rule(name: str) -> None:
    lists = load_oplists(name)
    without = []
    for op in CONTENT["products"].keys() & set(find_products.list_ops()):
        if op in WITHOUT_RULE or op in find_products.MADE_OF_LISTED:
            continue
        rulings = explain_op(op, lists).rulings
        if any(ruling.kind is OpRule.UNLISTED for ruling in rulings):
            without.append(op)
    assert sorted(without) == []


@pytest.mark.parametrize(
    ("op", "kernel"),
    [
        ("affine_grid", "aten::bmm"),
        ("torch.sparse.mm", "aten::addmm"),
        pytest.param(
            *("torch.nn.attention.flex_attention.flex_attention", "flex_attention"),
            marks=pytest.mark.skipif(VERSION < (2, 11), reason="dispatch modes of this torch see no higher-order ops"),
        ),
    ],
)
def test_the_tool_finds_products(op: str, kernel: str) -> None:
    assert kernel in find_products.find_products([op])[op]


@pytest.mark.parametrize("op", ["relu", "softmax", "cat", "torch.fft.rfft"])
def test_the_tool_finds_no_products_in_other_ops(op: str) -> None:
    assert find_products.find_products([op]) == {op: []}


@pytest.mark.skipif(VERSION < (2, 13), reason="this torch has no linear_cross_entropy")
def test_a_product_that_is_made_of_listed_ops_runs_by_their_rules() -> None:
    hidden, weight, target = torch.randn(6, 8), torch.randn(5, 8), torch.tensor([0, 1, 2, 3, 4, 0])
    expected = F.cross_entropy((hidden.bfloat16() @ weight.bfloat16().t()).float(), target)
    with amp.session("O4", device="cpu", compute="native"):
        assert torch.equal(F.linear_cross_entropy(hidden, weight, target), expected)
        assert torch.equal(F.linear_cross_entropy(hidden.bfloat16(), weight, target), expected)
