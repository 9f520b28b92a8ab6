"""Fixtures of the tests of devices; those of commands are those of `tests/cli`."""

import pytest
import torch
from devices import DEVICE

from tests.cli.conftest import run_command, run_scripts, warm_server  # noqa: F401


@pytest.fixture
def on_device():
    """Make tensors on the device where nothing else is said."""
    torch.set_default_device(DEVICE)
    yield
    torch.set_default_device(None)
