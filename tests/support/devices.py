"""The accelerator that tests run on: `cuda` where there is one; in a process with AMP_PATCH_DEVICE=sim (`make sim`) the
simulated one, which is the default accelerator of its process for good.
"""

import contextlib
import os
import shutil
import warnings

import pytest
import torch

IS_SIM_ASKED_FOR = os.environ.get("AMP_PATCH_DEVICE") == "sim"


def _find() -> tuple[str, str]:
    """The device type, or "" and why there is none."""
    if IS_SIM_ASKED_FOR:
        if shutil.which("g++") is None:
            return "", "no g++ here to build the simulated device"
        import simdev  # noqa: F401  (registers the device)

        return "sim", ""
    if torch.cuda.is_available():
        return "cuda", ""
    return "", "needs an accelerator: `make sim` simulates one"


DEVICE, WHY_NOT = _find()
IS_SIM = DEVICE == "sim"
IS_SIM_MISSING = IS_SIM_ASKED_FOR and not IS_SIM

if IS_SIM:

    class Generator(torch._C.Generator):
        """One of the default device where nothing else is said: tensors are made there, too."""

        def __new__(cls, device=None):
            return super().__new__(cls, device or torch.empty(0).device)

    torch.Generator = Generator

requires_device = pytest.mark.skipif(not DEVICE, reason=WHY_NOT)


def requires_cpu(reason):
    """Mark a test of training or sessions that the simulated device cannot run, and say why."""
    return pytest.mark.skipif(IS_SIM, reason=reason)


requires_sim = pytest.mark.skipif(not IS_SIM, reason=WHY_NOT or "counts what the simulated device does")


@contextlib.contextmanager
def no_sync():
    """Raise where the host would wait for the device, which is far behind if it is simulated."""
    if IS_SIM:
        import simdev

        with simdev.lag(10**6), simdev.no_sync():
            yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextlib.contextmanager
def syncs():
    """Yield a list, which has an item for each time the host has waited for the device when the block has ended."""
    found = []
    if IS_SIM:
        import simdev

        with simdev.lag(10**6), simdev.count() as counts:
            yield found
        found += [None] * counts.syncs
        return
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield found
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found += [None for warning in caught if "synchroniz" in str(warning.message)]
