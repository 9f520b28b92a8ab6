"""Fixtures of every test: after each one, torch must be exactly as it was."""

import sys

import hypothesis
import pytest
import torch
from torch_state import find_changes

import amp_patch
from amp_patch.patching import references

hypothesis.settings.register_profile("repository", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repository")
torch.set_num_threads(1)  # the tensors are tiny, and a process runs on each core

# Tables of ops to be tested hold originals on purpose, where sessions would say, in every other test, that they cannot
# exchange them.
references._PASSED_OVER |= {
    "list_errors",
    "test_wrappers",
    "test_conformance",
    "test_list_errors",
    "test_state_machine",
    "test_weight_cache",
}


@pytest.fixture(autouse=True)
def torch_is_left_as_found():
    """Undo after each test, then check identity of every name in the namespaces."""
    yield
    amp_patch.reset()
    sys.modules["amp_patch.session.current"].state.registered.clear()
    assert find_changes() == []
