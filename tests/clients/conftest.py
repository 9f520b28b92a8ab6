"""Trainers of others patch torch as well: what they leave is theirs."""

import importlib.util

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
def torch_is_left_as_found():
    yield
    amp_patch.reset()
    assert set(find_changes()) <= OF_OTHERS
