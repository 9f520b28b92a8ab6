"""Libraries that build on apex.amp work unmodified with the stand-in. Seen to work: mmengine(-lite) 0.10.7 and
DeepSpeed 0.17.6.

DeepSpeed 0.18.9 refuses its own amp mode (an assertion in its backward hook), and 0.19 has none. On the CPU it takes no
float16 gradients, so O2 runs there in bfloat16.

Guards: apex/amp/*.
"""

import importlib.metadata
import socket
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from apex_training import state_of_a_new_process  # noqa: F401 - a fixture
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


pytestmark = pytest.mark.slow


def run_script(server, name, *, cwd, before=(), **environment):
    command = ["-m", "amp_patch", "run", *before, SCRIPTS / name, "--opt-level", "O2"]
    done = server.run(*command, cwd=cwd, **environment)
    assert done.returncode == 0, done.stderr
    return torch.load(cwd / "out.pt")


def train_by_hand(*, loss_scale=None, delayed):
    """What both libraries do: two passes for each step, each loss halved, the gradients clipped to a norm of 0.5."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", loss_scale=loss_scale, verbosity=0)
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


@pytest.mark.skipif(version_of("mmengine-lite", "mmengine") is None, reason="mmengine-lite is not installed")
def test_mmengines_wrapper(tmp_path, fork_server):
    result = run_script(fork_server, "mmengine_training.py", cwd=tmp_path)
    losses, weights = train_by_hand(delayed=False)
    assert result["losses"] == losses == result["again"]
    assert_equal(result["weights"], weights)
    assert_equal(result["resumed"], weights)


@pytest.mark.skipif(
    version_of("deepspeed") is None or version_of("deepspeed") >= (0, 18), reason="no deepspeed below 0.18 is installed"
)
def test_deepspeeds_amp_section(tmp_path, fork_server):
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = str(probe.getsockname()[1])
    one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    before = ["--opt-level", "O5"]
    result = run_script(fork_server, "deepspeed_training.py", cwd=tmp_path, before=before, DS_ACCELERATOR="cpu", **one)
    with amp_patch.apex.install(opt_level="O5"):
        losses, weights = train_by_hand(loss_scale=256.0, delayed=True)
    assert result["losses"] == losses
    assert_equal(result["weights"], weights)
