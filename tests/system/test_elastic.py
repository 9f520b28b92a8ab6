"""Under torchrun's launcher: a rank is killed, all are started again and go on bit by bit; and who says what."""

import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from training import backward

import amp_patch as amp

SCRIPT = Path(__file__).parent.parent / "support" / "scripts" / "elastic.py"
pytestmark = pytest.mark.xdist_group("ranks")


def train_here(rank, folder, steps):
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        from elastic import train
    finally:
        del sys.path[0]
    return train(folder, steps)


def test_killed_and_started_again_it_ends_with_the_same_weights(ranks, fork_server, tmp_path):
    for name in ("killed", "straight"):
        (tmp_path / name).mkdir()
    done = fork_server.run(SCRIPT, tmp_path / "killed", 6, 3, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    straight = ranks(train_here, tmp_path / "straight", 6)
    for rank, expected in enumerate(straight):
        found = torch.load(tmp_path / "killed" / f"out.pt.{rank}")
        assert found["first"] == 3 and found["amp"] == expected["amp"]
        assert all(map(torch.equal, found["weights"], expected["weights"]))


def tell(rank):
    """What a rank prints, and warns of, in training that overflows, at levels with and without a skip."""
    import contextlib
    import io

    with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(io.StringIO()) as printed:
        warnings.simplefilter("always")
        for scale in ("dynamic", 8.0):
            net = nn.Linear(4, 2)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            amp.initialize(net, optimizer, opt_level="O2", loss_scale=scale)
            backward(net(torch.full((2, 4), float("inf"))).float().sum(), optimizer)
            optimizer.step()
            amp.reset()
    return printed.getvalue(), [str(one.message) for one in caught]


def test_rank_0_speaks_and_each_rank_names_its_faults(ranks):
    (printed, warned), (printed_there, warned_there) = ranks(tell)
    assert printed.count("Gradient overflow") == 1 and "O2" in printed and printed_there == ""
    assert len(warned) == len(warned_there) == 1
    assert warned[0].startswith("rank 0: non-finite gradients under a static")
    assert warned_there[0] == warned[0].replace("rank 0", "rank 1")
