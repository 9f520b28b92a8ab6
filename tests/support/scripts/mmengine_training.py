"""mmengine's wrapper around apex.amp: accumulation, clipping, and a checkpoint that is loaded before amp is
initialized.
"""

import argparse

import mmengine.model
import torch
from mmengine.optim import ApexOptimWrapper
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--opt-level", default="O1")
parser.add_argument("--out", default="out.pt")
args = parser.parse_args()


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, ApexOptimWrapper(
        optimizer=optimizer, opt_level=args.opt_level, accumulative_counts=2, clip_grad={"max_norm": 0.5}, verbosity=0
    )


def train(model, wrapper, steps):
    wrapper.initialize_count_status(model, 0, 2 * len(steps))
    losses = []
    for step in steps:
        for part in (0, 1):
            generator = torch.Generator().manual_seed(2 * step + part)
            inputs, targets = torch.randn(4, 4, generator=generator), torch.randint(3, (4,), generator=generator)
            with wrapper.optim_context(model):
                loss = nn.functional.cross_entropy(model(inputs), targets)
            wrapper.update_params(loss)
            losses.append(loss.item())
    return losses


model, wrapper = build()
losses = train(model, wrapper, range(3))
saved = {"model": model.state_dict(), "optimizer": wrapper.state_dict()}
torch.save(saved, "mmengine.pt")
rest = train(model, wrapper, range(3, 5))
weights = {name: value.clone() for name, value in model.state_dict().items()}

saved = torch.load("mmengine.pt")
resumed, wrapper = build()
resumed.load_state_dict(saved["model"])
wrapper.load_state_dict(saved["optimizer"])
again = train(resumed, wrapper, range(3, 5))
print("mmengine", mmengine.__version__)
torch.save(
    {"losses": losses + rest, "again": losses + again, "weights": weights, "resumed": resumed.state_dict()}, args.out
)
