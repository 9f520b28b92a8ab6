"""Training scripts that are broken, each in its own way, for `amp-patch doctor --fix` to make run."""

_HEAD = """\
import warnings

import torch
import torch.nn.functional as F
from torch import nn

{}

warnings.simplefilter("error")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = [(torch.randn(4, 8), torch.randn(4, 1)) for _ in range(4)]
start = [parameter.detach().clone() for parameter in model.parameters()]
trained = model
"""
_CHECK = """
import amp_patch

amp_patch.reset()
twin = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
torch.nn.utils.vector_to_parameters(torch.cat([one.flatten() for one in start]), twin.parameters())
steps = torch.optim.SGD(twin.parameters(), lr=0.1)
for images, target in batches:
    steps.zero_grad()
    F.mse_loss(twin(images), target).backward()
    steps.step()
ends = [[one.float() for one in trained.parameters()], list(twin.parameters())]
torch.testing.assert_close(*ends, atol=2e-3, rtol=1e-2)
assert all((one != before).any() for one, before in zip(ends[0], start))
"""
_OURS, _APEXS = "import amp_patch as amp", "from apex import amp"
_SETUP = 'model, optimizer = amp.initialize(model, optimizer, opt_level="O1", loss_scale=128.0)\n'
_LOOP = """\
for images, target in batches:
    optimizer.zero_grad()
    loss = F.mse_loss(model(images), target)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
"""


def _ours(body: str) -> str:
    return _HEAD.format(_OURS) + body + _CHECK


def _apexs(imports: str, body: str) -> str:
    return _HEAD.format(imports) + body + _CHECK


BROKEN = {
    "misspelt-names": _ours(
        'model, optimizer = amp.initialise(model, optimizer, opt_level="o1", loss_scale=128.0)\n'
        + _LOOP.replace("scale_loss(", "scaleloss(")
    ),
    "apex-misspelt-import": _apexs(
        "from apex.amp import intialize, scale_loss\nfrom apex.optimisers import FusedSGD",
        "optimizer = FusedSGD(model.parameters(), lr=0.1)\n"
        'model, optimizer = intialize(model, optimizer, opt_level="01", loss_scale=128.0)\n'
        + _LOOP.replace("amp.", ""),
    ),
    "wrapper-before-initialize": _ours(
        "wrapped = True\nif wrapped:\n    model = nn.DataParallel(model)\n" + _SETUP + _LOOP
    ),
    "half-before-initialize": _ours("model = model.train().half()\nmodel.to(dtype=torch.bfloat16)\n" + _SETUP + _LOOP),
    "native-amp-beside-amp": _ours(
        "scaler = torch.amp.GradScaler('cpu')\n" + _SETUP + "for images, target in batches:\n"
        "    optimizer.zero_grad()\n"
        "    with torch.autocast('cpu'):\n"
        "        output = model(images)\n"
        "        loss = F.mse_loss(output.float(), target)\n"
        "    scaler.scale(loss).backward()\n"
        "    scaler.unscale_(optimizer)\n"
        "    nn.utils.clip_grad_norm_(model.parameters(), 20.0)\n"
        "    scaler.step(optimizer)\n"
        "    scaler.update()\n"
    ),
    "unscaled-loss": _ours(
        _SETUP + _LOOP.replace("scaled_loss.backward", "loss.backward").replace(" as scaled_loss", "")
    ),
    "no-scale-loss": _ours(
        _SETUP.replace("128.0", '{"init": 128}').replace("model, optimizer =", "model, stepper =")
        + "def train(stepper):\n"
        "    for step, (images, target) in enumerate(batches):\n"
        "        if step:\n"
        "            stepper.zero_grad()\n"
        "        loss = F.mse_loss(model(images), target)\n"
        "        (loss).backward(\n"
        "            retain_graph=False)  # all\n"
        "        if step >= 0:\n"
        "            stepper.step()\n"
        "        if step < 0:\n"
        "            scheduler.step(step)\n\n\n"
        "train(stepper)\n"
    ),
    "all-in-the-block": _ours(
        _SETUP
        + _LOOP.replace(
            "    optimizer.step()\n",
            "        nn.utils.clip_grad_norm_(\n"
            "            model.parameters(),  # all\n"
            "            20.0,\n"
            "        )\n"
            "        # and now\n"
            "        optimizer.step()\n",
        )
    ),
    "backward-after-the-block": _ours(_SETUP + _LOOP.replace("        scaled_loss", "        pass\n    scaled_loss")),
    "apex-checkpoint": _apexs(
        _APEXS,
        'amp.load_state_dict({"loss_scaler0": {"loss_scale": 64.0, "unskipped": 3}})\n'
        'model, optimizer = amp.initialize(model, optimizer, opt_level="O2")\n'
        + _LOOP
        + 'torch.save({\n    "model": model.state_dict(),\n    "optimizer": optimizer.state_dict(),\n}, '
        '"checkpoint.pt")\n'
        'assert torch.load("checkpoint.pt")["amp"]["loss_scaler0"]["loss_scale"] == 64.0\n',
    ),
    "resume-without-amp": _ours(
        _SETUP.replace("128.0", '{"init": 128}') + 'checkpoint = {"optimizer": optimizer.state_dict()}\n'
        'checkpoint["amp"] = {"loss_scaler0": {"loss_scale": 32.0, "unskipped": 0}}\n'
        'optimizer.load_state_dict(checkpoint["optimizer"])\n'
        "assert amp.stats().loss_scales == (32.0,)\n" + _LOOP
    ),
    "two-losses": _ours(_SETUP + _LOOP.replace("(loss, optimizer)", "(loss, optimizer, loss_id=1)")),
}
"""Each fails, or trains to something else, as it is."""
