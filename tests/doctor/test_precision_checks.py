"""The doctor finds what 16 bits lose in real shapes of code, and is silent about the healthy neighbour of each.

Guards: doctor/value_checks, doctor/precision_checks, doctor/region_checks, doctor/flow, doctor/script.
"""

from pathlib import Path

import pytest

from amp_patch.doctor import Project, Selection

HEAD = """\
import copy
import torch
import torch.nn.functional as F
from torch import nn
"""
STEP = "loss.backward()\noptimizer.step()\n"
ADAM = "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)\n" + STEP
CAST = "torch.bfloat16"


def diagnose(tmp_path: Path, source: str) -> list[tuple[str, str, int | None]]:
    path = tmp_path / "train.py"
    path.write_text(HEAD + source)
    return [(finding.code, finding.severity, finding.line) for finding in Project([path]).diagnose(Selection(["AMP6"]))]


def marked(source: str, severity: str) -> list[tuple[str, str, int]]:
    lines = enumerate((HEAD + source).splitlines(), 1)
    return [(line.rpartition("# ")[2], severity, number) for number, line in lines if "# AMP" in line]


SURE = {
    # a model in 16 bits
    "cast-in-place": "model = Net()\nmodel.half()  # AMP601\n" + ADAM,
    "cast-in-a-chain": "model = Net().cuda().bfloat16().train()  # AMP601\n" + ADAM,
    "device-and-dtype": "model = Net()\nmodel = model.to(device, torch.bfloat16)  # AMP601\n" + ADAM,
    "dtype-in-a-variable": "dtype = torch.bfloat16\nmodel = Net().to(dtype=dtype)  # AMP601\n" + ADAM,
    "dtype-of-two-16-bit-ones": (
        "dtype = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16\n"
        "model = Net().to(dtype)  # AMP601\n" + ADAM
    ),
    "dtype-in-a-dict-of-options": (
        "options = dict(dtype=torch.bfloat16, device='cuda')\nmodel = Net(**options)  # AMP601\n" + ADAM
    ),
    "dtype-in-a-table": "TYPES = {'bf16': torch.bfloat16, 'fp32': torch.float32}\n"
    "model = Net().to(TYPES['bf16'])  # AMP601\n" + ADAM,
    "dtype-in-a-configuration": (
        "class Config:\n    dtype: torch.dtype = torch.bfloat16\ndef main(cfg):\n"
        "    model = Net().to(cfg.dtype)  # AMP601\n"
        "    optimizer = torch.optim.SGD(model.parameters())\n    optimizer.step()\n"
    ),
    "dtype-by-name": "model = Net().to(getattr(torch, 'bfloat16'))  # AMP601\n" + ADAM,
    "pretrained": "model = AutoModel.from_pretrained(name, torch_dtype=torch.bfloat16)  # AMP601\n" + ADAM,
    "pretrained-by-text": "model = AutoModel.from_pretrained(name, dtype='float16')  # AMP601\n" + ADAM,
    "default-dtype-of-the-module": "torch.set_default_dtype(torch.bfloat16)  # AMP601\ndef main():\n"
    "    model = Net()\n    optimizer = torch.optim.SGD(model.parameters())\n    optimizer.step()\n",
    "default-dtype": "torch.set_default_dtype(torch.bfloat16)  # AMP601\nmodel = Net()\n" + ADAM,
    "built-by-a-function": "def build():\n    net = Net()\n    return net.half()  # AMP601\nmodel = build()\n" + ADAM,
    "dtype-as-an-argument": "def build(dtype):\n    return Net().to(dtype)  # AMP601\n"
    "model = build(torch.half)\n" + ADAM,
    "model-as-an-argument": "def train(model):\n    optimizer = torch.optim.SGD(model.parameters())\n"
    "    optimizer.step()\n"
    "net = Net().half()  # AMP601\ntrain(net)\n",
    "attribute": "class Trainer:\n    def __init__(self):\n        self.model = Net().half()  # AMP601\n"
    "    def setup(self):\n        self.opt = torch.optim.SGD(self.model.parameters())\n",
    "prepared": "model = Net().half()  # AMP601\noptimizer = torch.optim.SGD(model.parameters())\n"
    "model, optimizer = accelerator.prepare(model, optimizer)\noptimizer.step()\n",
    "parameters-in-a-variable": "from torch.optim import AdamW\nmodel = Net().half()  # AMP601\n"
    "params = [p for p in model.parameters() if p.requires_grad]\noptimizer = AdamW([{'params': params}])\n",
    "class-of-the-script": "class Trainer:\n    def __init__(self, model):\n        self.model = model\n"
    "        self.optimizer = torch.optim.SGD(self.model.parameters())\n"
    "trainer = Trainer(Net().half())  # AMP601\n",
    "trainer-of-transformers": "from transformers import AutoModel, Trainer\n"
    "model = AutoModel.from_pretrained(name, dtype='bfloat16')  # AMP601\n"
    "trainer = Trainer(model=model, args=args)\ntrainer.train()\n",
    "lightning": "from lightning import Trainer\ntrainer = Trainer(precision='bf16-true')  # AMP601\n",
    # float16 without a scale
    "old-autocast": "from torch.cuda.amp import autocast\nwith autocast():  # AMP602\n    loss = model(x)\n" + STEP,
    "region-or-none": "ctx = torch.autocast('cuda', torch.half) if amp else nullcontext()  # AMP602\nwith ctx:\n"
    "    loss = model(x)\n" + STEP,
    "region-by-name": "region = torch.autocast('cuda', torch.half)  # AMP602\nfor x in batches:\n    with region:\n"
    "        loss = model(x)\n    loss.backward()\n    optimizer.step()\n",
    "gradients-by-phase": "with torch.set_grad_enabled(phase == 'train'):\n"
    "    with torch.autocast('cuda', torch.half):  # AMP602\n        loss = model(x)\n" + STEP,
    "region-in-a-helper": "def forward(x):\n    with torch.autocast('cuda'):  # AMP602\n        return model(x)\n"
    "def main():\n    loss = forward(x)\n    loss.backward()\n",
    "scaler-that-is-off": "from torch.amp import GradScaler as Scaler\nscaler = torch.amp.GradScaler(enabled=False)\n"
    "with torch.autocast('cuda', torch.float16):  # AMP602\n    loss = model(x)\nscaler.scale(loss).backward()\n"
    "scaler.step(optimizer)\n",
    # averages
    "average-cast-in-place": "ema = copy.deepcopy(model)\nema.half()  # AMP603\n"
    "def update():\n    for e, p in zip(ema.parameters(), model.parameters()):\n"
    "        e.mul_(0.99).add_(p, alpha=0.01)\n",
    "average-of-a-low-model": "from torch.optim.swa_utils import AveragedModel\nmodel = Net().half()  # AMP603\n"
    "ema = AveragedModel(model)\n",
    "average-by-foreach": "ema = copy.deepcopy(model).bfloat16()  # AMP603\n"
    "torch._foreach_lerp_(list(ema.parameters()), list(model.parameters()), 0.1)\n",
    "average-by-copy": "ema = copy.deepcopy(model).to(torch.bfloat16)  # AMP603\n"
    "for e, p in zip(ema.parameters(), model.parameters()):\n    e.data.copy_(0.9 * e.data + 0.1 * p.data)\n",
    # running values
    "count": "count = torch.zeros(1, dtype=torch.half)  # AMP604\nwhile True:\n    count = count + 1\n",
    "statistics": "mean = torch.zeros(8).bfloat16()  # AMP604\nfor x in batches:\n"
    "    mean.mul_(0.9).add_(x.mean(0), alpha=0.1)\n",
    "sum-of-each-epoch": "for epoch in epochs:\n    total = torch.zeros((), dtype=torch.bfloat16)  # AMP604\n"
    "    for x in batches:\n        total += x\n",
    "degrees": "degree = torch.zeros(n, dtype=torch.bfloat16)  # AMP604\nfor row in edges:\n    degree[row] += 1\n",
    "buffer": "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    "        self.register_buffer('seen', torch.zeros((), dtype=torch.bfloat16))  # AMP604\n"
    "    def forward(self, x):\n        self.seen += len(x)\n        return x\n",
    # positions
    "arange": "positions = torch.arange(n, dtype=torch.bfloat16)  # AMP605\n",
    "arange-by-name": "t = torch.arange(n, device=device)\nangles = torch.outer(t.to(torch.half), freqs)  # AMP605\n",
    "timesteps": "emb = embed(timesteps.bfloat16())  # AMP605\n",
    "timestep-from-random": "t = torch.rand(64) * 1000\ntimestep = t.to(dtype=torch.bfloat16)  # AMP605\n",
    # loops in a region
    "loop-in-a-region": "with torch.autocast('cuda', torch.bfloat16):  # AMP606\n    for x in batches:\n"
    "        loss = model(x)\n        loss.backward()\n        optimizer.step()\n",
    "loop-with-a-scaler": "with torch.cuda.amp.autocast():  # AMP606\n    for x in batches:\n"
    "        scaler.scale(model(x)).backward()\n        scaler.step(optimizer)\n",
    "loop-in-a-decorated-function": "@torch.autocast('cuda', torch.bfloat16)  # AMP606\ndef train():\n"
    "    for x in batches:\n        model(x).backward()\n        optimizer.step()\n",
    "loop-in-a-called-function": "def train():\n    while True:\n        model(x).backward()\n"
    "        optimizer.step()\n"
    "with torch.autocast('cuda', torch.bfloat16):  # AMP606\n    train()\n",
}

UNSURE = {
    "flag": "dtype = torch.bfloat16 if args.bf16 else torch.float32\nmodel = Net().to(dtype)  # AMP601\n" + ADAM,
    "unknown-in-the-other-arm": "dtype = torch.bfloat16 if args.low else pick()\nmodel = Net().to(dtype)  # AMP601\n"
    + ADAM,
    "unknown-in-a-table": "dtype = {'low': torch.bfloat16, 'auto': pick()}[args.dtype]\n"
    "model = Net().to(dtype)  # AMP601\n" + ADAM,
    "cast-under-an-if": "model = Net()\nif args.half:\n    model.half()  # AMP601\n" + ADAM,
    "default-of-an-option": "parser.add_argument('--dtype', default='bfloat16')\n"
    "model = Net().to(getattr(torch, args.dtype))  # AMP601\n" + ADAM,
    "default-dtype-under-an-if": "if args.half:\n    torch.set_default_dtype(torch.half)  # AMP601\n"
    "model = Net()\n" + ADAM,
    "argument-that-a-parser-sets": "def main(dtype='bfloat16'):\n"
    "    model = Net().to(getattr(torch, dtype))  # AMP601\n"
    "    optimizer = torch.optim.SGD(model.parameters())\n    optimizer.step()\nfire.Fire(main)\n",
    "field-that-a-parser-sets": "class Config:\n    dtype: str = 'bfloat16'\nconfig = tyro.cli(Config)\n"
    "model = Net().to(getattr(torch, config.dtype))  # AMP601\n" + ADAM,
    "running-value": "dtype = torch.float32\nif args.bf16:\n    dtype = torch.bfloat16\n"
    "total = torch.zeros((), dtype=dtype)  # AMP604\nfor x in batches:\n    total += x\n",
    "region": "dtype = {'fp16': torch.float16, 'bf16': torch.bfloat16}[args.dtype]\n"
    "with torch.autocast('cuda', dtype):  # AMP602\n    loss = model(x)\n" + STEP,
}

HEALTHY = {
    "inference": "model = Net().half()\nwith torch.no_grad():\n    model(x)\n",
    "cast-after-training": "model = Net()\n" + ADAM + "model.half()\nmodel(x)\n",
    "cast-in-another-function": "def serve():\n    model = Net().half()\ndef train():\n    model = Net()\n"
    "    optimizer = torch.optim.SGD(model.parameters())\n    optimizer.step()\n",
    "field-that-is-passed": "class Config:\n    dtype: str = 'bfloat16'\nconfig = Config(dtype='float32')\n"
    "model = Net().to(getattr(torch, config.dtype))\n" + ADAM,
    "teacher": "teacher = Net().half()\nmodel = Net()\n" + ADAM,
    "frozen-beside-a-head": "model = Net().half()\nmodel.requires_grad_(False)\nmodel.head = nn.Linear(4, 2)\n" + ADAM,
    "trained-part-in-float32": "model = Net().half()\nmodel.head.float()\n" + ADAM,
    "adapters": "from peft import get_peft_model\nmodel = AutoModel.from_pretrained(n, torch_dtype=torch.bfloat16)\n"
    "model = get_peft_model(model, config)\n" + ADAM,
    "masters-by-hand": "model = Net().half()\ncopies = [p.detach().clone().float() for p in model.parameters()]\n"
    "optimizer = torch.optim.SGD(copies)\n" + STEP,
    "trainer-that-evaluates": "from transformers import AutoModel, Trainer\n"
    "model = AutoModel.from_pretrained(name, dtype='bfloat16')\n"
    "trainer = Trainer(model=model)\ntrainer.evaluate()\n",
    "deepspeed": "import deepspeed\nmodel = Net().half()\n" + ADAM + "deepspeed.initialize(model=model)\n",
    "optimizer-of-another-package": "from torchao.optim import AdamW8bit\nmodel = Net().bfloat16()\n"
    "optimizer = AdamW8bit(model.parameters(), bf16_stochastic_round=True)\n" + STEP,
    "given-to-amp": "import amp_patch as amp\nmodel = Net().half()\noptimizer = torch.optim.SGD(model.parameters())\n"
    "model, optimizer = amp.initialize(model, optimizer, opt_level='O3')\n",
    "float32-again": "model = AutoModel.from_pretrained(n, torch_dtype=torch.bfloat16)\nmodel = model.float()\n" + ADAM,
    "default-dtype-restored": "torch.set_default_dtype(torch.half)\ny = torch.ones(2)\n"
    "torch.set_default_dtype(torch.float32)\nmodel = Net()\n" + ADAM,
    "argument-with-the-name-of-an-import": "from torch import half\ndef build(half):\n    return Net().to(half)\n"
    "model = build(device)\n" + ADAM,
    "method-named-to": "class Solver:\n    def to(self, device):\n        self.timesteps = self.timesteps.to(device)\n"
    "x = x.to(torch.bfloat16)\n",
    "bfloat16-without-a-scaler": "with torch.autocast('cuda', torch.bfloat16):\n    loss = model(x)\n" + STEP,
    "bfloat16-and-a-scaler-that-is-off": "scaler = torch.amp.GradScaler(enabled=False)\n"
    "with torch.autocast('cuda', torch.bfloat16):\n    loss = model(x)\nscaler.scale(loss).backward()\n",
    "default-of-the-cpu": "with torch.autocast('cpu'):\n    loss = model(x)\n" + STEP,
    "scaler-in-another-function": "from torch.cuda.amp import GradScaler as GS, autocast\nscale = GS()\n"
    "def forward(x):\n    with autocast():\n        return model(x)\ndef main():\n    loss = forward(x)\n"
    "    scale.scale(loss).backward()\n    scale.step(optimizer)\n",
    "scale-by-hand": "with torch.autocast('cuda', torch.float16):\n    loss = model(x)\n(loss * 1024).backward()\n",
    "evaluation": "@torch.no_grad()\ndef evaluate():\n    with torch.autocast('cuda', torch.float16):\n"
    "        return model(x)\n"
    "def main():\n    loss = model(x)\n    loss.backward()\n    evaluate()\n",
    "region-that-is-off": "with torch.autocast('cuda', torch.float16, enabled=False):\n    loss = model(x)\n" + STEP,
    "average-in-float32": "model = Net().half()\nema = copy.deepcopy(model).float()\n"
    "for e, p in zip(ema.parameters(), model.parameters()):\n    e.lerp_(p.float(), 0.1)\n",
    "reference-model": "reference = copy.deepcopy(model).half()\nfor x in batches:\n"
    "    loss = model(x) - reference(x)\n",
    "recurrent-state": "state = torch.zeros(8, dtype=torch.half)\nfor x in batches:\n"
    "    state = state + cell(x, state)\n",
    "sum-in-float32": "total = torch.zeros((), dtype=torch.float32)\nfor x in batches:\n    total += x.half()\n",
    "filled-by-rows": "out = torch.zeros(n, 8, dtype=torch.half)\nfor i in range(n):\n    out[i] = model(x[i])\n",
    "few-positions": "positions = torch.arange(64, dtype=torch.bfloat16)\n",
    "scaled-timesteps": "timesteps = timesteps / 1000\nemb = embed(timesteps.bfloat16())\n",
    "positions-in-integers": "positions = torch.arange(n)\nx = table[positions].half()\n",
    "added-once": "out = torch.zeros(n, 8, dtype=torch.half)\nfor i in range(n):\n    out[i] += noise\n",
    "half-on-an-arm-that-leaves": "def main():\n    model = Net()\n    if serve:\n        model = model.half()\n"
    "        return model(x)\n    optimizer = torch.optim.SGD(model.parameters())\n    optimizer.step()\n",
    "fabric-that-only-runs": "from lightning import Fabric\ndef load():\n    fabric = Fabric(precision='bf16-true')\n"
    "    return fabric.setup(Net())\n",
    "teacher-in-float16": "with torch.autocast('cuda'):\n    with torch.no_grad():\n        y = teacher(x)\n"
    "loss = (model(x) - y.float()).mean()\n" + STEP,
    "method-of-a-dict": "class Agent:\n    def act(self):\n        with torch.autocast('cuda', torch.bfloat16):\n"
    "            inputs = {}\n            inputs.update(x=x)\n    def update(self):\n        for x in batches:\n"
    "            loss.backward()\n            optimizer.step()\n",
    "region-in-the-loop": "for x in batches:\n    with torch.autocast('cuda', torch.bfloat16):\n"
    "        loss = model(x)\n"
    "    loss.backward()\n    optimizer.step()\n",
    "loop-without-a-cache": "with torch.autocast('cuda', torch.bfloat16, cache_enabled=False):\n    for x in batches:\n"
    "        model(x).backward()\n        optimizer.step()\n",
    "argument-with-the-name-of-an-output": "def train():\n    with torch.autocast('cuda', dtype=torch.bfloat16):\n"
    "        output = model(x)\n        loss = F.mse_loss(output, y)\n    loss.backward()\n"
    "def score(output):\n    return F.mse_loss(output, y)\n",
    "positions-scaled-by-hand": "t = torch.arange(5000.0)\nt /= 5000\nx = t.half()\n",
    "evaluation-loop-in-a-region": "with torch.no_grad(), torch.autocast('cuda'):\n    for x in batches:\n"
    "        model(x)\n",
}


@pytest.mark.parametrize("source", SURE.values(), ids=SURE)
def test_what_16_bits_lose_is_a_warning_at_its_line(source, tmp_path):
    assert diagnose(tmp_path, source) == marked(source, "warning") != []


@pytest.mark.parametrize("source", UNSURE.values(), ids=UNSURE)
def test_what_only_some_runs_lose_is_a_note_that_begins_with_if(source, tmp_path):
    assert diagnose(tmp_path, source) == marked(source, "note") != []
    (finding,) = Project([tmp_path / "train.py"]).diagnose(Selection(["AMP6"]))
    assert finding.message.startswith("if the dtype is ")


@pytest.mark.parametrize("source", HEALTHY.values(), ids=HEALTHY)
def test_a_healthy_neighbour_is_left_alone(source, tmp_path):
    assert diagnose(tmp_path, source) == []


def test_the_scripts_of_the_project_are_healthy():
    root = Path(__file__).parents[2]
    files = [*root.glob("examples/*"), *root.glob("benchmarks/*.py"), *root.glob("tests/clients/*.py")]
    scripts = [path for path in files if path.suffix in (".py", ".ipynb")]
    assert len(scripts) > 20 and Project(scripts).diagnose(Selection(["AMP6"])) == []
