"""Every op of every shipped list, in every spelling, gives the results and gradients of the same call with its
arguments cast by hand, in the dtype of its rule: to the bit with native products, and up to rounding with products in
float32.

Guards: casting/wrappers, casting/float32_products, config/product_names, lists/*.yaml.
"""

from typing import Any

import pytest
import torch
from hand_casts import GIVEN, expected_of, find_fault, is_close, is_same, lows
from op_samples import NO_SAMPLE, find_sample
from torch import nn
from torch_state import VERSION

import amp_patch
from amp_patch.config.op_lists import Spelling, load_oplists
from amp_patch.config.shipped import shipped_names

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:.*{what}:UserWarning")
    for what in ("deprecated", "in beta", "reduction. 'mean'")
]

# Why an op is left out.
LEFT_OUT = {
    **NO_SAMPLE,
    **dict.fromkeys(
        ("__rdiv__", "__rtruediv__"), "written in Python as reciprocal() * other, of which reciprocal is listed itself"
    ),
}


# Those that raise an error, which says what to call instead.
REMOVED = {
    f"{owner}.{name}" for owner in ("torch", "torch.Tensor") for name in ("cholesky", "qr") if VERSION >= (2, 14)
}

OVERLAYS = ("fast",)


def lists_of(name: str, low: torch.dtype) -> Any:
    """What to ask `initialize` for: an overlay goes over the default list of the dtype."""
    return [str(low).removeprefix("torch."), name] if name in OVERLAYS else name


@pytest.mark.parametrize("name", shipped_names())
def test_every_op_has_a_sample(name: str) -> None:
    spellings = [one for one in load_oplists(name).spellings if one.name not in NO_SAMPLE]
    assert [f"{one.owner_name}.{one.name}" for one in spellings if find_sample(one.owner_name, one.name) is None] == []


EXPECTED: dict[tuple[Any, ...], Any] = {}


def find_expected(spelling: Spelling, *call: Any) -> Any:
    """`expected_of`, once for all lists that have the op under the same rule."""
    key = (spelling.owner_name, spelling.name, spelling.rule, *call[1:])
    if key not in EXPECTED:
        EXPECTED[key] = expected_of(spelling, *call)
    return EXPECTED[key]


@pytest.mark.slow
@lows
@pytest.mark.parametrize(
    ("name", "compute"), [*((name, "native") for name in shipped_names()), ("float16", "float32"), ("apex", "float32")]
)
def test_every_op_runs_as_if_cast_by_hand(name: str, compute: str, low: torch.dtype) -> None:
    lists = lists_of(name, low)
    spellings = [one for one in load_oplists(lists).spellings if one.name not in LEFT_OUT]
    spellings = [one for one in spellings if f"{one.owner_name}.{one.name}" not in REMOVED]
    calls = {
        (f"{one.owner_name}.{one.name}", given): (one, find_sample(one.owner_name, one.name), dtypes(low))
        for one in spellings
        for given, dtypes in GIVEN.items()
    }
    expected = {key: find_expected(*call, low) for key, call in calls.items()}
    options = {"lists": lists, "patch_torch_functions_type": low, "compute": compute}
    amp_patch.initialize(nn.Linear(2, 2), opt_level="O1", verbosity=0, **options)
    is_equal = is_same if compute == "native" else is_close
    faults = {key: find_fault(*call, expected[key], is_equal) for key, call in calls.items()}
    amp_patch.reset()
    assert {key: fault for key, fault in faults.items() if fault} == {}
