"""The doctor finds GradScalers that are used wrongly, and is silent about the healthy neighbours in public scripts.

Guards: doctor/scaler_checks, doctor/gradient_checks, doctor/scaler_flow, doctor/checkpoint_checks.
Guards: doctor/region_checks, doctor/update_checks.
"""

from pathlib import Path

import pytest

from amp_patch.doctor import Project, Selection

HEAD = "import torch\nfrom torch.nn.utils import clip_grad_norm_\nscaler = torch.amp.GradScaler()\n"
CLIP = "clip_grad_norm_(model.parameters(), 1.0)"
STEP = "scaler.step(optimizer)\nscaler.update()\n"
GO = "scaler.scale(loss).backward()\n"


def diagnose(tmp_path: Path, source: str) -> list[tuple[str, int | None]]:
    path = tmp_path / "train.py"
    path.write_text(HEAD + source)
    found = Project([path]).diagnose(Selection(["AMP7", "AMP504", "AMP505"]))
    return [(finding.code, finding.line) for finding in found if finding.severity != "note"]


def marked(source: str) -> list[tuple[str, int]]:
    lines = enumerate((HEAD + source).splitlines(), 1)
    return [(line.rpartition("# ")[2], number) for number, line in lines if "# AMP" in line]


WRONG = {
    "clip-before-unscale": f"{GO}{CLIP}  # AMP701\nscaler.unscale_(optimizer)\n{STEP}",
    "clip-in-both-arms": f"if fp16:\n    {GO}    {CLIP}  # AMP701\n    scaler.step(optimizer)\n    scaler.update()\n"
    f"else:\n    loss.backward()\n    {CLIP}\n    optimizer.step()\n",
    "clip-after-the-arms": f"if fp16:\n    {GO}else:\n    loss.backward()\nif limit:\n    {CLIP}  # AMP701\n"
    "if fp16:\n    scaler.step(optimizer)\n    scaler.update()\nelse:\n    optimizer.step()\n",
    "clip-after-a-loop-that-breaks": f"while True:\n    {GO}    break\n{CLIP}  # AMP701\n{STEP}",
    "clip-of-a-named-loss": f"scaled = scaler.scale(loss)\nscaled.backward()\n{CLIP}  # AMP701\n{STEP}",
    "unscaled-loss-in-a-loop": "for x in loader:\n    loss = f(x)\n    loss.backward()  # AMP702\n"
    "    scaler.step(optimizer)\n    scaler.update()\n",
    "own-step": f"{GO}optimizer.step()  # AMP703\nscaler.update()\n",
    "own-step-by-another-name": "opt = torch.optim.AdamW(model.parameters())\n"
    f"{GO}opt.step()  # AMP703\nscaler.update()\n",
    "unscale-in-two-places": f"{GO}scaler.unscale_(optimizer)\nlog()\nif limit:\n"
    f"    scaler.unscale_(optimizer)  # AMP704\n    {CLIP}\n{STEP}",
    "no-update": f"while True:\n    {GO}    scaler.step(optimizer)  # AMP705\n",
    "update-for-each": f"{GO}scaler.step(first)\nscaler.update()\nscaler.step(second)  # AMP706\nscaler.update()\n",
    "half": "model = Net().half()\noptimizer = torch.optim.SGD(model.parameters())\n"
    f"{GO}scaler.step(optimizer)  # AMP707\nscaler.update()\n",
    "clip-in-a-method": "class T:\n    def backward(self, loss):\n        scaler.scale(loss).backward()\n"
    f"    def clip(self):\n        {CLIP}\n    def step(self):\n        scaler.step(optimizer)\n"
    f"        scaler.update()\n"
    "    def train(self):\n        for x in loader:\n            self.backward(f(x))\n"
    "            self.clip()  # AMP701\n"
    "            self.step()\n",
    "clamp-by-hand": f"{GO}for p in model.parameters():\n    p.grad.data.clamp_(-1, 1)  # AMP701\n{STEP}",
    "clip-of-timm": f"{GO}dispatch_clip_grad(model.parameters(), 0.1, mode='agc')  # AMP701\n{STEP}",
    "norm-in-a-function": "def norm_of(model):\n    return sum(p.grad.norm(2).item() ** 2 for p in ps)\n"
    f"{GO}log(norm_of(model))  # AMP711\n{STEP}",
    "norm-of-a-stack": f"{GO}norms = [torch.norm(p.grad.detach()) for p in model.parameters()]  # AMP711\n{STEP}",
    "histogram": f"{GO}for n, p in named:\n    writer.add_histogram(n, p.grad, i)  # AMP711\n{STEP}",
    "penalty": "grads = torch.autograd.grad(scaler.scale(out.sum()), x, create_graph=True)[0]  # AMP711\n"
    f"loss = loss + (grads.norm() - 1) ** 2\n{GO}{STEP}",
    "unscale-in-each-micro-batch": f"for i, x in enumerate(loader):\n    {GO}    scaler.unscale_(optimizer)  # AMP704\n"
    "    if (i + 1) % 4 == 0:\n        scaler.step(optimizer)\n        scaler.update()\n",
    "unscale-where-it-clips": f"for i, x in enumerate(loader):\n    {GO}    if args.clip:\n"
    "        scaler.unscale_(optimizer)  # AMP704\n"
    "    if (i + 1) % 4 == 0:\n        scaler.step(optimizer)\n        scaler.update()\n",
    "update-in-each-micro-batch": f"for i, x in enumerate(loader):\n    {GO}    if (i + 1) % 4 == 0:\n"
    "        scaler.step(optimizer)\n    scaler.update()  # AMP712\n",
    "update-in-a-loop-over-optimizers": f"{GO}for opt in optimizers:\n    scaler.step(opt)  # AMP706\n"
    "    scaler.update()\n",
    "no-update-of-an-attribute": "class T:\n    def __init__(self):\n        self.scaler = torch.amp.GradScaler()\n"
    "    def step(self, loss):\n        self.scaler.scale(loss).backward()\n"
    "        self.scaler.step(self.opt)  # AMP705\n",
    "zeroed-by-the-model": f"optimizer = torch.optim.SGD(model.parameters())\n{GO}model.zero_grad()  # AMP708\n{STEP}",
    "zeroed": f"{GO}optimizer.zero_grad()  # AMP708\n{STEP}",
}

RIGHT = {
    "fused-steps-take-float16": "model = Net().half()\noptimizer = torch.optim.SGD(model.parameters(), fused=True)\n"
    f"{GO}{STEP}",
    "clip-in-a-method-that-unscales": "class T:\n    def backward(self, loss):\n        scaler.scale(loss).backward()\n"
    f"    def clip(self):\n        scaler.unscale_(optimizer)\n        {CLIP}\n"
    "    def step(self):\n        scaler.step(optimizer)\n        scaler.update()\n"
    "    def train(self):\n        self.backward(loss)\n        self.clip()\n        self.step()\n",
    "norm-divided-by-the-scale": f"{GO}norm = p.grad.norm() / scaler.get_scale()\n{STEP}",
    "look-for-inf": f"{GO}bad = not torch.isfinite(p.grad.sum())\ndead = p.grad.abs().sum() == 0\n{STEP}",
    "average-by-hand": f"{GO}p.grad.data.mul_(1 / world)\np.grad /= world\n{STEP}",
    "norm-after-unscale": f"{GO}scaler.unscale_(optimizer)\nnorm = p.grad.norm()\n{STEP}",
    "norm-after-the-step": f"{GO}{STEP}writer.add_histogram('grad', p.grad, i)\n",
    "clip-that-is-given-the-scaler": f"{GO}clip_gradients(model, scaler, 1.0)\n{STEP}",
    "penalty-divided": "grads = torch.autograd.grad(scaler.scale(out.sum()), x, create_graph=True)[0]\n"
    f"penalty = (grads / scaler.get_scale()).norm()\n{GO}{STEP}",
    "two-tests-of-one-kind": f"for i, x in enumerate(loader):\n    {GO}    if (i + 1) % 4 == 0:\n"
    "        scaler.unscale_(optimizer)\n"
    "    if (i + 1) % 4 == 0:\n        scaler.step(optimizer)\n        scaler.update()\n",
    "a-test-with-a-name": f"for i, x in enumerate(loader):\n    {GO}    last = (i + 1) % 4 == 0\n    if last:\n"
    "        scaler.unscale_(optimizer)\n"
    "    if (i + 1) % 4 == 0:\n        scaler.step(optimizer)\n        scaler.update()\n",
    "accumulation": f"for i, x in enumerate(loader):\n    {GO}    if (i + 1) % 4 == 0:\n"
    f"        scaler.unscale_(optimizer)\n"
    f"        {CLIP}\n        scaler.step(optimizer)\n        scaler.update()\n",
    "zeroed-after-unscale": f"{GO}scaler.unscale_(optimizer)\nif too_large:\n    optimizer.zero_grad()\n    {STEP}",
    "clip-on-the-other-arm": f"if fp16:\n    {GO}    scaler.step(optimizer)\n    scaler.update()\nelse:\n"
    f"    loss.backward()\n    {CLIP}\n    optimizer.step()\n",
    "clip-unless-fp16": f"if fp16:\n    {GO}else:\n    loss.backward()\nif not fp16:\n    {CLIP}\n{STEP}",
    "clip-after-an-early-return": f"def train():\n    if fp16:\n        {GO}        scaler.step(optimizer)\n"
    f"        return\n    loss.backward()\n    {CLIP}\n    optimizer.step()\ndef end():\n    scaler.update()\n",
    "unscaled-if-clipped": f"{GO}if limit:\n    scaler.unscale_(optimizer)\n    {CLIP}\n{STEP}",
    "limit-times-scale": f"{GO}clip_grad_norm_(model.parameters(), scaler.get_scale())\n{STEP}",
    "norm-only": f"{GO}clip_grad_norm_(model.parameters(), float('inf'))\n{STEP}",
    "optional-scaler": "if scaler is None:\n    loss.backward()\nelse:\n    scaler.scale(loss).backward()\n"
    "if scaler is None:\n    optimizer.step()\nelse:\n    scaler.step(optimizer)\n    scaler.update()\n",
    "check-before-training": f"probe.backward()\nfor x in loader:\n    {GO}    scaler.step(optimizer)\n"
    "    scaler.update()\n",
    "discriminator-without-scaler": f"loss_d.backward()\noptimizer_d.step()\n{GO}{STEP}",
    "unscaled-then-own-step": f"{GO}scaler.unscale_(optimizer)\noptimizer.step()\nscaler.update()\n",
    "gan-with-two-updates": f"scaler.scale(loss_d).backward()\nscaler.step(opt_d)\nscaler.update()\n{GO}{STEP}",
    "unscale-two-optimizers": f"{GO}scaler.unscale_(first)\nscaler.unscale_(second)\n"
    "scaler.step(first)\nscaler.step(second)\nscaler.update()\n",
    "update-elsewhere": "engine = Engine(scaler)\nwhile True:\n    scaler.scale(loss).backward()\n"
    "    scaler.step(optimizer)\n",
    "scaled-in-another-function": "def amp():\n    loss = scaler.scale(f(x))\n    loss.backward()\n"
    "    scaler.step(optimizer)\n    scaler.update()\n"
    "def plain():\n    loss = f(x)\n    loss.backward()\n    optimizer.step()\n",
    "object-that-holds-the-scaler": "trainer = Trainer(torch.amp.GradScaler())\nfor x in loader:\n"
    "    f(x).backward()\n    trainer.step(x)\n",
    "data-scaler": "scaler = StandardScaler()\nloss.backward()\nscaler.fit(x)\noptimizer.step()\n",
    "state-copied-in-memory": f"{GO}{STEP}optimizer.load_state_dict(optimizer.state_dict())\n",
    "half-for-serving": f"model = Net()\noptimizer = torch.optim.SGD(model.parameters())\n{GO}{STEP}model.half()\n",
    "scaler-in-the-checkpoint": f"{GO}{STEP}torch.save([optimizer.state_dict(), scaler.state_dict()], path)\n",
}


@pytest.mark.parametrize("source", [pytest.param(source, id=name) for name, source in WRONG.items()])
def test_a_wrong_use_is_found_at_its_line(source, tmp_path) -> None:
    assert diagnose(tmp_path, source) == marked(source) != []


@pytest.mark.parametrize("source", [pytest.param(source, id=name) for name, source in RIGHT.items()])
def test_a_correct_use_is_left_alone(source, tmp_path) -> None:
    assert diagnose(tmp_path, source) == []


def test_a_scaler_that_is_off_is_left_alone(tmp_path) -> None:
    path = tmp_path / "train.py"
    path.write_text(HEAD.replace("GradScaler()", "GradScaler(enabled=False)") + f"{GO}{CLIP}\n{STEP}")
    assert Project([path]).diagnose(Selection(["AMP7"])) == []
