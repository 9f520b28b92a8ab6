"""Trainers of others patch torch as well: what they leave is theirs."""

import importlib.util
import os
import sys

import pytest
import torchvision_kernels
from torch_state import find_changes

import amp_patch
import amp_patch.apex

CLIENTS_OF_APEX = ("transformers", "timm", "ignite")  # they look for it once, as they are imported

if any(importlib.util.find_spec(name) is not None for name in CLIENTS_OF_APEX):
    amp_patch.apex.install()
torchvision_kernels.define_missing()

OF_OTHERS = {"torch.compile replaced"}  # Lightning, as it is imported


@pytest.fixture(autouse=True)
def environment_is_left_as_found():
    """Trainers keep what they were told in variables, such as ACCELERATE_MIXED_PRECISION, and accelerate in a class;
    later ones read it.
    """
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)
    if "accelerate.state" in sys.modules:
        sys.modules["accelerate.state"].AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(autouse=True)
def torch_is_left_as_found():
    yield
    amp_patch.reset()
    assert set(find_changes()) <= OF_OTHERS
