"""Functions of torch that published packages keep are replaced for a session where they are, and restored exactly.

Guards: patching/references.
"""

import copy
import functools
import io
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_patch as amp

activations = pytest.importorskip("transformers.activations")
zoedepth = pytest.importorskip("transformers.models.zoedepth.modeling_zoedepth")
norm = pytest.importorskip("timm.layers.norm")

X = torch.ones(2, 4, dtype=torch.bfloat16)


@pytest.fixture
def lists(tmp_path):
    path = tmp_path / "lists.yaml"
    path.write_text("extends: bfloat16\nblacklist: [gelu, softmax, rms_norm]\n")
    return path


def read():
    """What each place holds: a layer, a partial of a layer, a default argument, a global."""
    tanh = activations.ACT2FN["gelu_pytorch_tanh"]
    return {
        "layer": activations.gelu.act,
        "default": zoedepth.LogBinomialSoftmax.__init__.__defaults__,
        "global": norm.rms_norm,
        "partial": tanh.act.func if isinstance(tanh.act, functools.partial) else tanh.act,
    }


def test_each_place_is_exchanged_and_given_back(lists):
    before = read()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="some objects hold patched functions")
        model = nn.Sequential(activations.ACT2FN["gelu"], activations.ACT2FN["gelu_pytorch_tanh"])
        amp.initialize(model, opt_level="O4", lists=lists, verbosity=0)
    during = read()
    assert during["layer"] is during["partial"] is F.gelu is not before["layer"]
    assert during["default"][-1] is torch.softmax and during["default"] != before["default"]
    assert during["global"] is F.rms_norm is not before["global"]
    assert model[0](X).dtype is model[1](X).dtype is activations.gelu(X).dtype is torch.float32
    copies = [copy.deepcopy(model)]
    amp.reset()
    assert read() == before
    assert model[0](X).dtype is model[1](X).dtype is torch.bfloat16
    stream = io.BytesIO()
    torch.save(copies[0], stream)
    stream.seek(0)
    assert torch.equal(torch.load(stream, weights_only=False)(X), model(X))
