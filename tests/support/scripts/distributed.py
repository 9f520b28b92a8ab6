"""Two processes, each with its half of the batches: synchronized BatchNorm, apex's DistributedDataParallel, one rank
whose gradients overflow.
"""

import argparse
import os

import torch
import torch.nn as nn
import torch.nn.functional as F
from apex import amp
from apex.parallel import DistributedDataParallel, convert_syncbn_model

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", default=int(os.environ.get("LOCAL_RANK", 0)), type=int)
parser.add_argument("--opt-level", default="O2")
parser.add_argument("--steps", default=4, type=int)
parser.add_argument("--overflow-at", default=-1, type=int)
parser.add_argument("--out", default="out.pt")
args = parser.parse_args()

world_size = int(os.environ.get("WORLD_SIZE", 1))
if world_size > 1:
    if torch.cuda.is_available():
        torch.cuda.set_device(args.local_rank)
    torch.distributed.init_process_group(backend="nccl" if torch.cuda.is_available() else "gloo", init_method="env://")
device = "cuda" if torch.cuda.is_available() else "cpu"

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
)
if world_size > 1:
    model = convert_syncbn_model(model)
model = model.to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level)
if world_size > 1:
    model = DistributedDataParallel(model)

losses, skipped = [], []
for step in range(args.steps):
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(8, 2, 4, 4, generator=generator).chunk(world_size)[args.local_rank].to(device)
    targets = torch.randint(3, (8,), generator=generator).chunk(world_size)[args.local_rank].to(device)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(images), targets)
    if step == args.overflow_at and args.local_rank == world_size - 1:
        loss = loss * 1e30
    usual = optimizer.step
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    skipped.append(optimizer.step is not usual)
    optimizer.step()
    losses.append(loss.item())
weights = getattr(model, "module", model).state_dict()
torch.save(
    {"losses": losses, "weights": weights, "skipped": skipped, "amp": amp.state_dict()}, f"{args.out}.{args.local_rank}"
)
if world_size > 1:
    torch.distributed.destroy_process_group()
