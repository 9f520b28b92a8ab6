"""Promises of the package as a whole: names are restored, calls enter few frames, weights are never frozen, copies run
their own; and that the check of every other test can fail.
"""

import copy
import pickle
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from reference import make_batches, make_model, train_with_casts
from torch import nn
from torch_state import ORIGINALS, find_changes
from training import train

import amp_patch as amp
from amp_patch.config.op_lists import load_oplists
from amp_patch.config.shipped import shipped_names

PACKAGE = str(Path(amp.__file__).parent)


def initialize(level="O4", **options):
    model = make_model()
    optimizer = options.pop("make_optimizer", lambda p: torch.optim.SGD(p, lr=0.05))(model.parameters())
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)


def test_reset_restores_the_identity_of_every_patched_name():
    for name in ("apex", "float16", "bfloat16"):
        _model, _optimizer = initialize("O1", lists=name)
        assert len(find_changes()) > 100
        amp.reset()
        assert find_changes() == []


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
    assert count_frames(lambda: torch.relu(x)) == 0


@pytest.mark.parametrize("name", shipped_names())
def test_every_name_in_the_shipped_lists_resolves_or_is_reported(name):
    oplists = load_oplists(["float16", name] if name == "fast" else name)  # an overlay, of a few ops
    assert len(oplists.spellings) > 100
    assert [entry.op for entry in oplists.missing] == []  # on the pinned torch
    assert all(callable(getattr(spelling.owner, spelling.name)) for spelling in oplists.spellings)


OPTIMIZERS = {
    f"{kind.__name__}-{way}": lambda p, kind=kind, way=way: kind(
        p, lr=1e-2, **({way: True} if way != "loop" else {"foreach": False})
    )
    for kind in (torch.optim.SGD, torch.optim.AdamW)
    for way in ("loop", "foreach", "fused")
}


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_weights_are_never_frozen(make_optimizer):
    batches = make_batches(15)
    model, optimizer = initialize(make_optimizer=make_optimizer, compute="native")
    losses = train(model, optimizer, batches)
    amp.reset()
    reference = make_model()
    assert losses == train_with_casts(reference, make_optimizer(reference.parameters()), batches, torch.bfloat16)
    assert len(set(losses)) == len(losses)
    amp.reset()
    model, optimizer = initialize(make_optimizer=make_optimizer, compute="float32")
    losses = train(model, optimizer, batches[:1] * 5)
    assert len(set(losses)) == len(losses) and losses[-1] < losses[0]


@pytest.mark.parametrize("level", ["O1", "O5"])
def test_copies_and_pickles_of_a_bound_model_run_their_own_weights(level):
    model, _optimizer = initialize(level)
    model.eval()
    images = make_batches(1)[0][0]
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            for parameter in twin.fc.parameters():
                parameter.zero_()
            assert torch.count_nonzero(twin(images)) == 0
            assert torch.count_nonzero(model(images)) > 0
        assert isinstance(twin.fc, nn.Linear)
