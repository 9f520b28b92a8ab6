"""flex_attention runs as under torch.autocast, in eager mode and compiled, also if it was compiled before a session.

Guards: casting/op_patches, session/torch_patches, config/torch_modules.
"""

import contextlib
import importlib
import sys

import pytest
import torch
from torch_state import VERSION

import amp_patch as amp

NAME = "torch.nn.attention.flex_attention"
LOW = torch.bfloat16
Q, K, V = torch.randn(3, 1, 2, 32, 16, generator=torch.Generator().manual_seed(3))
BIAS = torch.randn(32, generator=torch.Generator().manual_seed(4))
GIVEN = {
    "float32": (Q, K, V),
    "normalized q and k": (Q, K, V.to(LOW)),  # as after a norm that runs in float32
    "low": (Q.to(LOW), K.to(LOW), V.to(LOW)),
}
by_autocast = pytest.mark.skipif(VERSION < (2, 11), reason="autocast of this torch leaves flex_attention alone")

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@pytest.fixture
def flex():
    """The module of flex_attention, which is not imported after the test."""
    with imported() as module:
        yield module


@contextlib.contextmanager
def imported():
    try:
        yield importlib.import_module(NAME)
    finally:
        amp.reset()
        sys.modules.pop(NAME, None)
        vars(torch.nn.attention).pop("flex_attention", None)


def score(score, batch, head, query, key):
    return score + BIAS[key] * 0.5


def causal(batch, head, query, key):
    return query >= key


@torch.no_grad()
def run(flex, attend):
    """The results for each given dtype, with and without a score function and a mask."""
    mask = flex.create_block_mask(causal, None, None, 32, 32, device="cpu")
    return [
        attend(*GIVEN["float32"], score_mod=score, block_mask=mask),
        attend(*GIVEN["normalized q and k"]),
        attend(*GIVEN["low"], score_mod=score),
    ]


def is_equal(results, expected):
    return all(one.dtype is LOW and torch.equal(one, other) for one, other in zip(results, expected, strict=True))


@by_autocast
def test_it_runs_as_under_autocast(flex):
    attend = flex.flex_attention
    compiled_early = torch.compile(attend, backend="eager")
    with torch.autocast("cpu", LOW):
        expected = run(flex, attend)
    for level, lists in [("O4", None), ("O1", "autocast-cpu")]:
        options = {"patch_torch_functions_type": LOW, "lists": lists} if lists else {}
        with amp.session(level, device="cpu", **options):
            assert is_equal(run(flex, flex.flex_attention), expected)
            if not lists:
                assert is_equal(run(flex, torch.compile(flex.flex_attention, backend="eager")), expected)
                # compiled before the session, as scripts do when they are imported
                assert is_equal(run(flex, compiled_early), expected)
    assert flex.flex_attention is attend and not hasattr(attend, "__wrapped__")
    assert type(flex.flex_attention_hop).__name__ == "FlexAttentionHOP"


def test_operands_of_several_dtypes_run_low(flex):
    """Also where torch itself raises an error, as before torch 2.11."""
    expected = flex.flex_attention(*GIVEN["low"])
    with amp.session("O4", device="cpu"):
        for given in GIVEN.values():
            assert torch.equal(flex.flex_attention(*given), expected)


@pytest.mark.parametrize("name", ["flex_attention", f"{NAME}.flex_attention"])
def test_a_list_can_have_it_in_float32(flex, name, tmp_path):
    path = tmp_path / "lists.yaml"
    path.write_text(f"extends: bfloat16\nblacklist: [{name}]\n")
    expected = flex.flex_attention(*(tensor.float() for tensor in GIVEN["low"]))
    with amp.session("O4", device="cpu", lists=path):
        assert torch.equal(flex.flex_attention(*GIVEN["low"]), expected)


@pytest.mark.parametrize("given", ["normalized q and k", "float32"])
def test_q_and_k_can_follow_v(flex, given, tmp_path):
    path = tmp_path / "lists.yaml"
    path.write_text("extends: bfloat16\nmatch: [{op: flex_attention, like: value}]\n")
    q, k, v = GIVEN[given]
    expected = flex.flex_attention(q.to(v.dtype), k.to(v.dtype), v)
    with amp.session("O4", device="cpu", lists=path):
        assert torch.equal(flex.flex_attention(q, k, v), expected)


def test_scores_of_an_op_on_no_list_keep_their_dtype(flex, tmp_path):
    path = tmp_path / "lists.yaml"
    path.write_text("extends: bfloat16\nneutral: [flex_attention]\n")
    expected = flex.flex_attention(*GIVEN["float32"])
    with amp.session("O4", device="cpu", lists=path):
        assert torch.equal(flex.flex_attention(*GIVEN["float32"]), expected)


def test_it_is_patched_when_it_is_imported():
    assert NAME not in sys.modules
    with amp.session("O4", device="cpu"), imported() as flex:
        assert amp.is_patched(flex, "flex_attention")
        assert flex.flex_attention(*GIVEN["normalized q and k"]).dtype is LOW


@by_autocast
def test_a_region_without_casts_leaves_it_alone(flex):
    expected = flex.flex_attention(*GIVEN["float32"])
    with amp.session("O4", device="cpu"), amp.disable_casts():
        assert torch.equal(flex.flex_attention(*GIVEN["float32"]), expected)


@pytest.mark.skipif(VERSION >= (2, 11), reason="this torch has no backward pass of flex_attention on a CPU")
def test_gradients_in_eager_mode_are_those_of_low_operands(flex):
    def find_gradients(attend, dtype):
        leaves = [tensor.clone().requires_grad_() for tensor in GIVEN["float32"]]
        attend(*(leaf.to(dtype) for leaf in leaves)).float().sum().backward()
        return [leaf.grad for leaf in leaves]

    expected = find_gradients(flex.flex_attention, LOW)
    with amp.session("O4", device="cpu", compute="native"):
        gradients = find_gradients(flex.flex_attention, torch.float32)
    assert all(torch.equal(one, other) for one, other in zip(gradients, expected, strict=True))
