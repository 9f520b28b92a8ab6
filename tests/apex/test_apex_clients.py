"""Libraries that build on apex.amp, unmodified, over the stand-in. Seen to work: mmengine(-lite) 0.10.7; DeepSpeed
0.17.6.

DeepSpeed 0.18.9 refuses its own amp mode (an assertion in its backward hook), and 0.19 has none. On the CPU it takes no
float16 gradients, so O2 is run there in bfloat16.
"""

import contextlib
import functools
import importlib.metadata
import socket
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from apex_training import state_of_a_new_process  # noqa: F401 - a fixture
from fork_server import ForkServer
from torch import nn

import amp_patch.apex
from amp_patch.apex import amp

SCRIPTS = Path(__file__).resolve().parent.parent / "support" / "scripts"


def version_of(*distributions):
    for name in distributions:
        try:
            return tuple(int(part) for part in importlib.metadata.version(name).split(".")[:2])
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


needs_mmengine = pytest.mark.skipif(
    version_of("mmengine-lite", "mmengine") is None, reason="mmengine-lite is not installed"
)
needs_deepspeed = pytest.mark.skipif(
    version_of("deepspeed") is None or version_of("deepspeed") >= (0, 18), reason="no deepspeed below 0.18 is installed"
)


pytestmark = pytest.mark.slow

AFTERWARDS = {
    "mmengine.optim": "",
    # else it compiles, for a minute and more, the collectives of several processes on one machine
    "deepspeed": 'deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False',
}


@pytest.fixture(scope="module")
def serve():
    """Makes, for each library, a process that has imported it under the stand-in, as the scripts import it."""
    with contextlib.ExitStack() as servers:

        @functools.cache
        def start(library):
            setup = (
                f"import amp_patch.apex\nwith amp_patch.apex.install():\n    import {library}\n{AFTERWARDS[library]}"
            )
            server = ForkServer(setup, DS_ACCELERATOR="cpu")
            servers.callback(server.close)
            return server

        yield start


def run_script(server, name, *arguments, cwd, before=(), **environment):
    command = ["-m", "amp_patch", "run", *before, SCRIPTS / name, *arguments]
    done = server.run(*command, cwd=cwd, **environment)
    assert done.returncode == 0, done.stderr
    return torch.load(cwd / "out.pt")


def train_by_hand(level, *, loss_scale=None, delayed):
    """What both libraries do: two passes for each step, each loss halved, the gradients clipped to a norm of 0.5."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=loss_scale, verbosity=0)
    losses = []
    for step in range(5):
        for part in (0, 1):
            generator = torch.Generator().manual_seed(2 * step + part)
            inputs, targets = torch.randn(4, 4, generator=generator), torch.randint(3, (4,), generator=generator)
            loss = F.cross_entropy(model(inputs), targets)
            with amp.scale_loss(loss / 2, optimizer, delay_unscale=delayed and part == 0) as scaled_loss:
                scaled_loss.backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return losses, model.state_dict()


def assert_equal(left, right):
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


@needs_mmengine
@pytest.mark.xdist_group("mmengine")
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_mmengines_wrapper(level, tmp_path, serve):
    result = run_script(serve("mmengine.optim"), "mmengine_training.py", "--opt-level", level, cwd=tmp_path)
    losses, weights = train_by_hand(level, delayed=False)
    assert result["losses"] == losses == result["again"]
    assert_equal(result["weights"], weights)
    assert_equal(result["resumed"], weights)


@needs_deepspeed
@pytest.mark.xdist_group("deepspeed")
@pytest.mark.parametrize(("level", "instead"), [("O1", None), ("O2", "O5")])
def test_deepspeeds_amp_section(level, instead, tmp_path, serve):
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = str(probe.getsockname()[1])
    one = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": port,
    }
    before = [] if instead is None else ["--opt-level", instead]
    server = serve("deepspeed")
    result = run_script(server, "deepspeed_training.py", "--opt-level", level, cwd=tmp_path, before=before, **one)
    with amp_patch.apex.install(opt_level=instead):
        losses, weights = train_by_hand(level, loss_scale=256.0, delayed=True)
    assert result["losses"] == losses
    assert_equal(result["weights"], weights)
