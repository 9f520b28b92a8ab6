"""The errors that justify `fast.yaml` and `paper.yaml` are measured again on small tensors, and the measure can tell
good kernels from bad ones.

Guards: lists/fast.yaml, lists/paper.yaml, tools/list_errors.py, tools/list_error_cases.py.
"""

from collections.abc import Callable

import list_errors
import pytest
import torch
import torch.nn.functional as F
from hand_casts import lows
from list_errors import MEASURED, MOST, measure
from torch import Tensor, nn
from torch_state import VERSION

import amp_patch
from amp_patch.config.op_lists import load_oplists

SIZES = (16, 256)
pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:UserWarning")


def taken_off(name: str) -> list[str]:
    """The ops that a list takes off float16's blacklist: to no list, or to the whitelist."""
    before = {
        (one.owner_name, one.name): one.entry.op for one in load_oplists("float16").spellings if one.rule == "blacklist"
    }
    over = load_oplists(["float16", name] if name == "fast" else name).spellings
    after = {(one.owner_name, one.name) for one in over if one.rule == "blacklist"}
    return sorted({op for spelling, op in before.items() if spelling not in after})


FAST = taken_off("fast")


def test_what_fast_takes_off() -> None:
    elementwise = {"log", "log1p", "log2", "log10", "acos", "asin", "erfinv", "softplus"}
    normalizing = {"softmax", "softmin", "group_norm"} | ({"rms_norm"} if VERSION >= (2, 13) else set())
    assert set(FAST) == elementwise | normalizing


@lows
def test_what_fast_takes_off_is_safe_in_low(low: torch.dtype) -> None:
    for op in FAST:
        errors = measure(op, low, SIZES)
        assert errors.is_safe, errors
        assert errors.low > 0 and errors.low_gradient > 0


def test_what_paper_takes_off_computes_in_float32_and_stays_in_range() -> None:
    for op in sorted({*taken_off("paper")} & {*MEASURED}):
        errors = measure(op, torch.float16, SIZES)
        assert errors.low <= MOST and not errors.out_of_range and not errors.problem, errors


def test_under_fast_a_normalization_in_low_keeps_its_dtype_whatever_its_weights() -> None:
    module, value = nn.GroupNorm(2, 8), torch.randn(2, 8).bfloat16()
    amp_patch.initialize(module, opt_level="O4", lists=["bfloat16", "fast"], verbosity=0)
    assert (module(value).dtype, value.softmax(1).dtype, value.float().softmax(1).dtype) == (
        torch.bfloat16,
        torch.bfloat16,
        torch.float32,
    )


@lows
def test_weights_of_normalization_layers_have_exact_gradients_under_fast(low: torch.dtype) -> None:
    """Their gradients are sums over all rows, which CPUs accumulate in 16 bits for layer_norm."""
    if VERSION < (2, 13):
        pytest.skip("rms_norm of this torch rounds several times")
    torch.manual_seed(0)
    rows = torch.randn(4096, 64).to(low)
    upstream = (torch.randn(4096, 64) / 8).to(low)

    def find_error(norm: Callable[..., Tensor]) -> float:
        gradients = []
        for dtype in (low, torch.float64):
            weight = torch.ones(64, dtype=dtype, requires_grad=True)
            norm(rows.to(dtype), weight).backward(upstream.to(dtype))
            assert weight.grad is not None
            gradients.append(weight.grad.double())
        error = (gradients[0] - gradients[1]).norm() / gradients[1].norm()
        return float(error) / (torch.finfo(low).eps / 2)

    assert {"rms_norm", "group_norm"} <= {*FAST}
    assert find_error(lambda x, weight: F.rms_norm(x, (64,), weight)) <= MOST
    assert find_error(lambda x, weight: F.group_norm(x, 8, weight)) <= MOST
    assert find_error(lambda x, weight: F.layer_norm(x, (64,), weight)) > MOST


# ---- the measure -----------------------------------------------------------------------------------------------------


def test_every_blacklisted_op_is_measured_or_said_to_be_left_out() -> None:
    assert list_errors.unmeasured() == []


def test_an_op_that_is_worse_in_low_is_not_safe() -> None:
    for op, low, flaw in [
        ("log_softmax", torch.bfloat16, "low"),
        ("prod", torch.bfloat16, "low"),
        ("pow", torch.bfloat16, "low"),
        ("cosine_similarity", torch.float16, "low"),
        ("logsumexp", torch.bfloat16, "low_gradient"),
        ("exp", torch.float16, "out_of_range"),
        ("sum", torch.float16, "out_of_range"),
        ("norm", torch.float16, "out_of_range"),
        ("cdist", torch.bfloat16, "problem"),
    ]:
        errors = measure(op, low, (256, 65536) if op in ("sum", "norm") else SIZES)
        assert not errors.is_safe
        assert bool(getattr(errors, flaw)) and (flaw not in ("low", "low_gradient") or getattr(errors, flaw) > MOST)
