"""Trainers of others patch torch as well: what they leave is theirs."""

import importlib.util

import pytest
from torch_state import find_changes

import amp_patch
import amp_patch.apex

if importlib.util.find_spec("transformers") is not None:  # it looks for apex once, as it is imported
    amp_patch.apex.install()

OF_OTHERS = {"torch.compile replaced"}  # Lightning, as it is imported


@pytest.fixture(autouse=True)
def torch_is_left_as_found():
    yield
    amp_patch.reset()
    assert set(find_changes()) <= OF_OTHERS
