"""DeepSpeed's engine with an `amp` section in its configuration: accumulation by delayed unscaling, clipping, a
checkpoint.
"""

import argparse

import deepspeed
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--opt-level", default="O1")
parser.add_argument("--out", default="out.pt")
args = parser.parse_args()

# else it compiles, for a minute and more, the collectives of several processes on one machine
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
config = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "amp": {"enabled": True, "opt_level": args.opt_level, "loss_scale": 256.0},
}
engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
losses = []
for step in range(5):
    for part in (0, 1):
        generator = torch.Generator().manual_seed(2 * step + part)
        inputs, targets = torch.randn(4, 4, generator=generator), torch.randint(3, (4,), generator=generator)
        loss = nn.functional.cross_entropy(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
engine.save_checkpoint("checkpoints")
weights = {name: value.clone() for name, value in engine.module.state_dict().items()}
engine.load_checkpoint("checkpoints")
print("deepspeed", deepspeed.__version__)
torch.save({"losses": losses, "weights": weights}, args.out)
