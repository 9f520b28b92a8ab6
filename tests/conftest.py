"""Fixtures of every test: after each one, torch must be exactly as it was."""

import gc
import importlib
import sys
import textwrap
from pathlib import Path

import hypothesis
import pytest
import torch
from devices import DEVICE, IS_SIM, IS_SIM_MISSING, WHY_NOT
from fork_server import ForkServer
from ranks import Ranks
from torch_state import find_changes

import amp_patch
from amp_patch import reporting
from amp_patch.patching import search
from amp_patch.session import current

hypothesis.settings.register_profile("repository", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repository")
torch.set_num_threads(1)  # the tensors are tiny, and a process runs on each core

# Each session looks through all packages that are imported, which would take most of the time of most tests: other
# people's packages, and of ours those that hold originals on purpose, which sessions would say they cannot exchange.
LARGE_PACKAGES = {"_pytest", "hypothesis", "joblib", "matplotlib", "PIL", "pygments", "rich", "scipy", "sklearn"}
OWN = {"list_error_cases", "list_errors", "constructs", "torch_state"}
OF_USERS = search.SKIPPED_PACKAGES
PASSED_OVER = OF_USERS | LARGE_PACKAGES | OWN
PASSED_OVER_BY_CLIENTS = PASSED_OVER
HOLDING_ORIGINALS = {
    "test_wrappers",
    "test_conformance",
    "test_list_errors",
    "test_weight_cache",
}


def pytest_collection_finish() -> None:
    """Pass over what collecting has imported, but for support modules. Collections of garbage look only at what tests
    have made.
    """
    global PASSED_OVER
    files = {name: getattr(module, "__file__", None) or "" for name, module in list(sys.modules.items())}
    imported = {name for name, file in files.items() if "site-packages" in file or Path(file).name.startswith("test_")}
    PASSED_OVER |= {name.partition(".")[0] for name in imported}
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Have sessions look through the module of the test, and where real packages are tested, through these. Skip what
    was to run on a device that cannot be built: it runs on the CPU anyway.
    """
    if IS_SIM_MISSING:
        pytest.skip(WHY_NOT)
    if "clients" in item.path.parts:
        search.SKIPPED_PACKAGES = PASSED_OVER_BY_CLIENTS
        return
    if item.get_closest_marker("searches_all"):
        search.SKIPPED_PACKAGES = OF_USERS
        return
    own = item.module.__name__.partition(".")[0]
    search.SKIPPED_PACKAGES = PASSED_OVER - ({own} - HOLDING_ORIGINALS)


@pytest.fixture(autouse=True)
def torch_is_left_as_found():
    """Undo after each test, then check identity of every name in the namespaces."""
    yield
    amp_patch.reset()
    reporting.set_verbosity(0)  # what one test was told on stdout, no other is
    reporting._shown_once.clear()
    current.state.registered.clear()
    assert find_changes() == []


@pytest.fixture(autouse=True)
def tensors_are_made_on_the_device(request, torch_is_left_as_found):
    """Under `make sim`, run the tests of training, of sessions and of the stand-in on the simulated device."""
    is_meant = IS_SIM and {"training", "session", "apex"} & {*request.path.parts}
    if is_meant:
        torch.set_default_device(DEVICE)
    yield
    if is_meant:
        torch.set_default_device(None)


@pytest.fixture
def write_modules(tmp_path, monkeypatch):
    """Returns a function that writes modules, by dotted name, where they can be imported from.

    They are forgotten after the test.
    """
    monkeypatch.syspath_prepend(tmp_path)
    # a module that is rewritten within a second must not come from a cache
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    tops = set()

    def write_modules(sources):
        for name, source in sources.items():
            path = tmp_path.joinpath(*name.split("."))
            is_package = path.is_dir() or any(other.startswith(f"{name}.") for other in sources)
            path = path / "__init__.py" if is_package else path.with_suffix(".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(source))
            tops.add(name.partition(".")[0])
        importlib.invalidate_caches()

    yield write_modules
    amp_patch.reset()
    for name in [name for name in sys.modules if name.partition(".")[0] in tops]:
        del sys.modules[name]


@pytest.fixture(scope="session")
def ranks(tmp_path_factory):
    """Two processes joined by gloo: `ranks(function, *args)` returns what the function gives on each."""
    pair = Ranks(tmp_path_factory.mktemp("ranks"))
    yield pair
    pair.close()


@pytest.fixture(scope="session")
def four_ranks(tmp_path_factory):
    """Four of them, for meshes of two dimensions."""
    four = Ranks(tmp_path_factory.mktemp("four_ranks"), 4)
    yield four
    four.close()


@pytest.fixture(scope="session")
def fork_server():
    """Runs commands of `python` where torch is imported already."""
    server = ForkServer()
    yield server
    server.close()
