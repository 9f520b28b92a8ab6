"""DistributedDataParallel that saves after each step and goes on from what was saved, under torchrun's launcher, which
starts all ranks again when one dies.

    elastic.py FOLDER STEPS DIES_AT
"""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.nn.parallel import DistributedDataParallel

import amp_patch as amp


def train(folder, steps, dies_at=None):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, eps=1e-4)
    amp.initialize(net, optimizer, opt_level="O2", loss_scale={"init": 2.0**8, "growth_interval": 2}, verbosity=0)
    saved, first = folder / "checkpoint.pt", 0
    if saved.exists():
        checkpoint = torch.load(saved)
        net.load_state_dict(checkpoint["net"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        amp.load_state_dict(checkpoint["amp"])
        first = checkpoint["step"] + 1
    parallel = DistributedDataParallel(net)
    for step in range(first, steps):
        inputs = torch.randn(4, 4, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
        with amp.scale_loss(parallel(inputs).float().square().mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == dies_at and dist.get_rank() == 1 and first == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()  # a step that not all have finished is not saved
        if dist.get_rank() == 0:
            state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()}
            torch.save({**state, "step": step}, folder / "new.pt")
            os.replace(folder / "new.pt", saved)
    found = {"weights": [one.detach().clone() for one in amp.master_params(optimizer)], "amp": amp.state_dict()}
    del parallel
    amp.reset()
    return {**found, "first": first}


def run_rank(folder, steps, dies_at):
    """What torchrun starts, and starts again."""
    store = f"file://{folder}/store{os.environ['TORCHELASTIC_RESTART_COUNT']}"
    dist.init_process_group("gloo", init_method=store, rank=int(os.environ["RANK"]), world_size=2)
    torch.save(train(folder, steps, dies_at), folder / f"out.pt.{dist.get_rank()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    folder, steps, dies_at = sys.argv[1:]
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=1,
        start_method="fork",
        monitor_interval=0.1,
    )
    elastic_launch(config, run_rank)(Path(folder), int(steps), int(dies_at))
