"""Calls of patched ops enter few frames; and the check of every test that torch is restored can fail.

Guards: casting/replacement, casting/wrappers, tests/support/torch_state.py.
"""

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from reference import make_model
from torch_state import ORIGINALS, find_changes

import amp_patch as amp

PACKAGE = str(Path(amp.__file__).parent)


def initialize(level="O4", **options):
    model = make_model()
    optimizer = options.pop("make_optimizer", lambda p: torch.optim.SGD(p, lr=0.05))(model.parameters())
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)


@pytest.mark.parametrize("damage", ["replace", "delete", "shadow"])
def test_the_check_of_identity_can_fail(damage, monkeypatch):
    if damage == "replace":
        monkeypatch.setattr(torch, "matmul", lambda *args: None)
    elif damage == "delete":
        monkeypatch.delattr(torch, "matmul")
    else:  # an inherited name left behind as the wrapper of a closed session
        _model, _optimizer = initialize()
        left_behind = torch.Tensor.__matmul__
        amp.reset()
        assert ("Tensor", "__matmul__") not in ORIGINALS
        monkeypatch.setattr(torch.Tensor, "__matmul__", left_behind, raising=False)
    assert find_changes() != []
    monkeypatch.undo()
    assert find_changes() == []


def count_frames(call):
    """The number of Python frames of the package that one call enters."""
    frames = []

    def trace(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            frames.append(frame.f_code.co_name)

    call()  # warm: copies of weights are made
    sys.setprofile(trace)
    try:
        call()
    finally:
        sys.setprofile(None)
    return len(frames)


def test_a_patched_op_enters_one_frame_and_one_more_for_each_parameter():
    model, _optimizer = initialize(compute="native")
    x = torch.randn(2, model.fc.in_features).bfloat16()
    images = torch.randn(2, 1, 8, 8).bfloat16()
    assert count_frames(lambda: F.linear(x, model.fc.weight, model.fc.bias)) == 1
    assert count_frames(lambda: F.conv2d(images, model.conv1.weight, None, 1, 1)) == 1
    assert count_frames(lambda: F.linear(x, weight=model.fc.weight, bias=model.fc.bias)) <= 4
    assert count_frames(lambda: x[:, :10] @ model.fc.weight) == 2
    assert count_frames(lambda: x @ x.t()) == 1
    assert count_frames(lambda: torch.exp(torch.ones(2))) == 1
    assert count_frames(lambda: torch.logsumexp(torch.ones(2), 0)) == 1
    assert count_frames(lambda: torch.layer_norm(torch.ones(2, 4), (4,), torch.ones(4), None)) == 1
    assert count_frames(lambda: torch.exp(x)) == 2  # the wrapper, and the rule, which casts
    assert count_frames(lambda: torch.relu(x)) == 0
