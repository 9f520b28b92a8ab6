"""The doctor's checks: each finds its fault at its line, and leaves what only looks like it alone."""

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from diagnosing import diagnose_files

from amp_patch.doctor import coverage, levels
from amp_patch.doctor.files import find_files
from amp_patch.doctor.findings import Finding
from amp_patch.doctor.rules import sorted_rules
from amp_patch.doctor.script import Script

FAULT = "# FAULT"
HEAD = """
import torch
import torch.nn as nn
import torch.nn.functional as F
import amp_patch as amp

"""


@pytest.fixture
def standin(tmp_path: Path) -> coverage.Coverage:
    """A stand-in for apex in miniature."""
    package = tmp_path / "standin"
    files = {
        "__init__.py": "from . import amp\n",
        "amp/__init__.py": (
            "from amp_patch.api import *\n"
            "from . import handle\n"
            "from ._amp_state import _amp_state\n"
            "def init(enabled=True):\n"
            "    inner = 1\n"
        ),
        "amp/_amp_state.py": "class State: ...\n_amp_state = State()\nmaybe_print = print\n",
        "amp/handle.py": "disable_casts = 1\n",
        "optimizers/__init__.py": (
            "from .fused import *\ntry:\n    from .lamb import FusedLAMB\nexcept ImportError:\n    FusedLAMB = None\n"
        ),
        "optimizers/fused.py": (
            "__all__ = ['FusedAdam']\nclass FusedAdam:\n    def step(self): ...\nclass FusedSGD: ...\n"
        ),
        "optimizers/lamb.py": "class FusedLAMB: ...\n",
        "parallel.py": "def __getattr__(name):\n    return {'DistributedDataParallel': 1}[name]\n",
        "_gone.py": (
            '_GONE = {"apex.contrib": "extras", "apex.contrib.xentropy": "a fused loss: use " "F.cross_entropy"}\n'
        ),
        "amp_C.py": "def multi_tensor_scale(): ...\n",
    }
    for name, text in files.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    return coverage.Coverage(package)


Diagnose = Callable[..., list[Finding]]


@pytest.fixture
def diagnose(tmp_path: Path, standin: coverage.Coverage) -> Diagnose:
    """Write scripts to files and return the findings in all of them."""

    def run(*sources: str, **named: str) -> list[Finding]:
        scripts = {f"script{index or ''}": source for index, source in enumerate(sources)}
        files = {f"{name}.py": source for name, source in {**scripts, **named}.items()}
        for name, source in files.items():
            (tmp_path / name).write_text(textwrap.dedent(source), encoding="utf-8")
        return diagnose_files([tmp_path / name for name in files], standin)

    return run


def places(findings: list[Finding]) -> list[tuple[str, int | None]]:
    return [(finding.code, finding.line) for finding in findings]


def marked_lines(source: str) -> list[int]:
    return [number for number, line in enumerate(textwrap.dedent(source).splitlines(), 1) if FAULT in line]


LOOP = """
for x, y in loader:
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
"""


def setup(level: str = "O1", arguments: str = "") -> str:
    return f'model, optimizer = amp.initialize(model, optimizer, opt_level="{level}"{arguments})\n'


TAKEN = "amp.initialize(model, optimizer, opt_level=args.opt_level)"

POSITIVE = {
    # ---- imports
    "AMP102-import": ("error", "from apex.contrib.xentropy import SoftmaxCrossEntropyLoss  # FAULT"),
    "AMP102-name-in-module": ("error", "from apex.optimizers import FusedSGD  # FAULT"),
    "AMP102-method-is-no-member": ("error", "from apex.optimizers import step  # FAULT"),
    "AMP102-local-is-no-member": ("error", "from apex.amp import inner  # FAULT"),
    "AMP102-star": ("error", "from apex.RNN import *  # FAULT"),
    "AMP102-extension": ("error", "import fused_layer_norm_cuda  # FAULT"),
    "AMP102-of-amp-patch": ("error", "import amp_patch as amp\namp.init()  # FAULT"),
    "AMP102-import-of-amp-patch": ("error", "from amp_patch import initialise  # FAULT"),
    "AMP102-of-module": (
        "error",
        "from apex import amp\namp.handle.disable_casts()\namp.handle.enable_casts()  # FAULT",
    ),
    "AMP102-in-module": ("error", "from apex.amp._amp_state import loss_scalers  # FAULT"),
    "AMP102-handler-itself": ("error", "try:\n    import fast\nexcept ImportError:\n    import apex.RNN  # FAULT"),
    "AMP102-with-fallback": (
        "note",
        "try:\n    from apex.optimizers import FusedNovoGrad  # FAULT\nexcept ImportError:\n    FusedNovoGrad = None",
    ),
    # ---- setup
    "AMP201-lower-case": ("error", HEAD + 'amp.initialize(model, optimizer, opt_level="o1")  # FAULT'),
    "AMP201-zero": ("error", HEAD + 'LEVEL = "01"\namp.initialize(model, optimizer, opt_level=LEVEL)  # FAULT'),
    "AMP201-positional": ("error", HEAD + 'amp.initialize(model, optimizer, True, "02")  # FAULT'),
    "AMP201-default": (
        "error",
        HEAD + 'parser.add_argument("--opt-level", default="o2")  # FAULT\n'
        "amp.initialize(model, optimizer,"
        " opt_level=args.opt_level)",
    ),
    "AMP201-choices": (
        "error",
        HEAD + 'parser.add_argument("--fp16_opt_level", default="O1", choices=["O1", "0O"])  # FAULT\n'
        "amp.initialize(model, optimizer, opt_level=args.fp16_opt_level)",
    ),
    "AMP201-apex": ("error", "from apex import amp\namp.initialize(model, optimizer, opt_level='O4')  # FAULT"),
    "AMP201-apex-default": (
        "error",
        (
            "from apex import amp\n"
            'parser.add_argument("--opt-level", default="O5")  # FAULT\n'
            "amp.initialize(model,"
            " optimizer, opt_level=args.opt_level)"
        ),
    ),
    "AMP203-ddp": (
        "error",
        HEAD + "model = nn.parallel.DistributedDataParallel(model, device_ids=[0])  # FAULT\n" + setup(),
    ),
    "AMP203-if": (
        "error",
        HEAD + "if args.gpus > 1:\n    model = nn.DataParallel(model).cuda()  # FAULT\nif args.fp16:\n    " + setup(),
    ),
    "AMP203-inside": ("error", HEAD + "model = amp.initialize(nn.DataParallel(Net()))  # FAULT"),
    "AMP203-apex": (
        "error",
        (
            "from apex.parallel import DistributedDataParallel as DDP\n"
            "from amp_patch import initialize\n"
            "def main(model, optimizer):\n"
            "    model = DDP(model)  # FAULT\n"
            "    initialize([model], [optimizer])"
        ),
    ),
    "AMP204-after": ("error", HEAD + setup() + "torch.jit.script(model).save('model.pt')  # FAULT"),
    "AMP206-half": ("error", HEAD + "model.half()  # FAULT\n" + setup("O2")),
    "AMP206-chain": ("error", HEAD + "model = Net().cuda().half()  # FAULT\n" + setup("O1")),
    "AMP206-to": ("error", HEAD + "model = model.to(device, dtype=torch.bfloat16)  # FAULT\n" + setup("O5")),
    "AMP207-input": ("warning", HEAD + setup("O4") + "model(x.half())  # FAULT"),
    "AMP207-to": ("warning", HEAD + setup("O4") + "x = x.to(torch.float16)  # FAULT"),
    "AMP207-model-after": ("warning", HEAD + setup("O4") + "model.half()  # FAULT"),
    "AMP208": ("error", HEAD + "model = Net()\n" + setup("O4") + "model.to(device)  # FAULT"),
    "AMP208-cuda": ("error", HEAD + "model = models.ResNet(10)\n" + setup("O4") + "model = model.cuda()  # FAULT"),
    # ---- the loop
    "AMP301": (
        "error",
        HEAD + setup() + "with amp.scale_loss(loss, optimizer) as scaled_loss:\n    loss.backward()  # FAULT",
    ),
    "AMP301-unbound": (
        "error",
        HEAD + setup() + "with amp.scale_loss(loss, optimizer):\n    (loss / 4).backward(retain_graph=True)  # FAULT",
    ),
    "AMP302": (
        "error",
        HEAD
        + setup()
        + "with amp.scale_loss(loss, optimizer) as scaled_loss:\n    pass\nscaled_loss.backward()  # FAULT",
    ),
    "AMP303": ("warning", HEAD + setup() + "loss.backward()  # FAULT"),
    "AMP303-second-loss": (
        "warning",
        HEAD
        + setup("O2")
        + "with amp.scale_loss(a, optimizer) as scaled:\n    scaled.backward()\nself.loss_b.backward()  # FAULT",
    ),
    "AMP303-scale-unknown": (
        "warning",
        HEAD + setup("O4", ", loss_scale=args.loss_scale") + "loss.backward()  # FAULT",
    ),
    "AMP303-after-the-loop": (
        "warning",
        HEAD + setup() + "for a in b:\n"
        "    if on:\n"
        "        with amp.scale_loss(a, optimizer) as c:\n"
        "            c.backward()\n"
        "        continue\n" + "a.backward()  # FAULT",
    ),
    "AMP303-made-in-place": ("warning", HEAD + setup() + "F.mse_loss(model(x), y).backward()  # FAULT"),
    "AMP304": (
        "warning",
        HEAD + setup() + "with amp.scale_loss(loss, optimizer) as scaled_loss:\n"
        "    scaled_loss.backward()\n"
        "    optimizer.step()  # FAULT",
    ),
    "AMP305": (
        "error",
        HEAD + setup() + "with amp.scale_loss(loss, optimizer) as scaled_loss:\n"
        "    scaled_loss.backward()\n"
        "    torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)  # FAULT",
    ),
    "AMP307-autocast": ("warning", HEAD + setup("O4") + 'with torch.autocast("cuda"):  # FAULT\n    model(x)'),
    "AMP307-scaler": (
        "error",
        HEAD + "from torch.cuda.amp import GradScaler\nscaler = GradScaler()  # FAULT\n" + setup(),
    ),
    "AMP307-same-flag": (
        "error",
        HEAD + "if args.fp16:\n    " + setup() + "if args.fp16:\n    scaler = torch.amp.GradScaler()  # FAULT",
    ),
    "AMP308": ("warning", HEAD + setup("O4") + 'with torch.autocast("cuda", enabled=False):  # FAULT\n    model(x)'),
    "AMP308-by-position": ("warning", HEAD + setup() + "with torch.cuda.amp.autocast(False):  # FAULT\n    model(x)"),
    "AMP309": ("note", HEAD + setup() + LOOP + "    scheduler.step()  # FAULT"),
    "AMP310": (
        "error",
        HEAD
        + setup(arguments=", num_losses=2")
        + "with amp.scale_loss(loss, optimizer, loss_id=2) as scaled:  # FAULT\n    scaled.backward()",
    ),
    "AMP310-default": (
        "error",
        HEAD + setup() + "with amp.scale_loss(loss, optimizer, 1) as scaled:  # FAULT\n    scaled.backward()",
    ),
    "AMP312": ("note", HEAD + setup() + "g, = torch.autograd.grad(out.sum(), x, create_graph=True)  # FAULT"),
    # ---- functions
    "AMP402": ("warning", HEAD + setup("O4") + "loss = F.binary_cross_entropy(p, y)  # FAULT"),
    "AMP402-module": ("warning", HEAD + "criterion = nn.BCELoss()  # FAULT\n" + setup("O5")),
    "AMP402-apex": (
        "warning",
        "import torch\nfrom apex import amp\ncriterion = torch.nn.BCELoss()  # FAULT\n" + setup(),
    ),
    # ---- checkpoints
    "AMP501": (
        "warning",
        HEAD
        + setup()
        + 'torch.save({\n    "model": model.state_dict(),\n    "optimizer": optimizer.state_dict(),  # FAULT\n}, path)',
    ),
    "AMP502": ("warning", HEAD + setup() + 'optimizer.load_state_dict(checkpoint["optimizer"])  # FAULT'),
    "AMP503": ("error", HEAD + 'amp.load_state_dict(checkpoint["amp"])  # FAULT\n' + setup()),
}


@pytest.mark.parametrize(
    ("name", "severity", "source"), [pytest.param(name, *case, id=name) for name, case in POSITIVE.items()]
)
def test_a_fault_is_found_at_its_line_and_nothing_else(
    name: str, severity: str, source: str, diagnose: Diagnose
) -> None:
    findings = [finding for finding in diagnose(source) if finding.code != "AMP101"]
    assert places(findings) == [(name[:6], line) for line in marked_lines(source)]
    assert [finding.severity for finding in findings] == [severity]
    assert all(finding.advice for finding in findings)


NEGATIVE = {
    "AMP102-members": "import amp_patch\nfrom amp_patch import amp, initialize\namp_patch.stats().steps.bit_length()",
    "AMP102-relative": "from .apex import nothing\nfrom . import apex\napex.transformer.x()",
    "AMP102-own-name": "import torch\napex = 3\nprint(apex.real)",
    "AMP102-object-under-a-modules-name": (
        "from apex import amp\n"
        "from apex.amp import _amp_state\n"
        "amp._amp_state.loss_scalers[0]._unskipped\n"
        "_amp_state.verbosity\n"
        "amp.__dict__.keys()"
    ),
    "AMP102-one-of-two": (
        "try:\n    from apex import amp\nexcept ImportError:\n    from torch.cuda import amp\n"
        + "\n".join(f"amp.x{number}()" for number in range(20))
    ),
    "AMP201-apex-or-not": (
        "try:\n    from apex import amp\nexcept ImportError:\n    import amp_patch as amp\n" + setup("O4")
    ),
    "AMP201-bound-again": (
        HEAD + 'LEVEL = "o1"\nfor LEVEL in levels:\n    amp.initialize(model, optimizer, opt_level=LEVEL)'
    ),
    "AMP201-argument": HEAD + 'LEVEL = "o1"\ndef main(LEVEL):\n    amp.initialize(model, optimizer, opt_level=LEVEL)',
    "AMP201-known": HEAD + 'LEVEL = "O3"\namp.initialize(model, optimizer, opt_level=LEVEL)',
    "AMP201-own-presets": HEAD + 'amp.initialize(model, optimizer, opt_level="Careful", presets="my.yaml")',
    "AMP201-run-time": HEAD + 'LEVEL = "o1"\nLEVEL = LEVEL.upper()\namp.initialize(model, optimizer, opt_level=LEVEL)',
    "AMP201-own-default": (
        HEAD
        + 'parser.add_argument("--opt-level", default="O5")\namp.initialize(model, optimizer, opt_level=args.opt_level)'
    ),
    **{
        f"AMP201-{name}": f'{HEAD}parser.add_argument("--opt-level", {option})\n{use}'
        for name, option, use in [
            ("number", "type=int, default=1", TAKEN),
            ("built", "default=1", TAKEN.replace("args.opt_level", "f'O{args.opt_level}'")),
            ("converted", 'default="o1"', f"{TAKEN[:-1]}.upper())"),
            ("converted-before", 'default="o1"', f"args.opt_level = fix(args)\n{TAKEN}"),
            ("none", 'default="none"', f"if args.opt_level != 'none':\n    {TAKEN}"),
            ("not-taken", 'default="o1"', setup()),
        ]
    },
    "AMP201-other-option": 'parser.add_argument("--opt-level", default="o2")',
    "AMP203-after": HEAD + setup("O4") + "model = nn.parallel.DistributedDataParallel(model)",
    "AMP203-other-arm": HEAD + "if args.plain:\n    model = nn.DataParallel(model)\nelse:\n    " + setup("O4"),
    "AMP203-left-before": (
        HEAD
        + "def main():\n    if args.plain:\n        model = nn.DataParallel(model)\n        return train(model)\n    "
        + setup("O4")
    ),
    "AMP203-unwrapped": HEAD + "model = nn.DataParallel(model)\nmodel = model.module\n" + setup("O4"),
    "AMP203-other-model": HEAD + "teacher = nn.DataParallel(teacher)\n" + setup("O4"),
    "AMP203-other-function": HEAD + "def evaluate(model):\n    model = nn.DataParallel(model)\n\n" + setup("O4"),
    "AMP204-reset": HEAD + setup("O4") + "amp.reset()\ntorch.jit.script(model)",
    "AMP204-part": (
        HEAD
        + "post = torch.jit.script(post)\n"
        + setup("O4")
        + "torch.jit.trace(model, x)\nmodel = torch.compile(model)"
    ),
    "AMP206-level": HEAD + "model.half()\n" + setup("O3"),
    "AMP206-widened": HEAD + "model.half()\nload(model)\nmodel.float()\n" + setup("O0"),
    "AMP207-without-amp": "import torch\nmodel = model.half()\nmodel(x.half())",
    "AMP207-other-arm": HEAD + "if args.amp:\n    " + setup("O4") + "else:\n    model = model.half()",
    "AMP207-handler": HEAD + "try:\n    " + setup("O4") + "except RuntimeError:\n    model = model.half()",
    "AMP207-flag": (
        HEAD + "if args.amp:\n    " + setup("O4") + "for x in loader:\n    if not args.amp:\n        x = x.half()"
    ),
    "AMP207-float32": HEAD + setup("O0") + "export(x.half())",
    "AMP207-other-half": HEAD + setup("O4") + "first = text.half(0)\nx = x.to(torch.float32)\nw = x.to(w.dtype)",
    "AMP208-moved-before": HEAD + "model = Net()\nmodel.cuda()\n" + setup("O4") + "model.cuda()",
    "AMP208-made-there": HEAD + "model = Net().to(device)\n" + setup("O4") + "model.to(device)",
    "AMP208-made-of-what-is-there": HEAD + "model = Wrap(Net().to(device))\n" + setup("O4") + "model.to(device)",
    "AMP208-made-elsewhere": HEAD + "model = build(args)\n" + setup("O4") + "model.to(device)",
    "AMP208-to-cpu": HEAD + "model = Net()\n" + setup("O4") + 'model.to("cpu")\nmodel.to(torch.channels_last)',
    "AMP301-derived": (
        HEAD + setup() + "with amp.scale_loss(loss, optimizer) as scaled:\n"
        "    part = scaled / 4\n"
        "    part.backward()\n"
        "    scaled.sum().backward()"
    ),
    "AMP301-same-name": HEAD + setup() + "with amp.scale_loss(loss, optimizer) as loss:\n    loss.backward()",
    "AMP301-nested": (
        HEAD
        + setup(arguments=", num_losses=2")
        + "with amp.scale_loss(a, optimizer) as sa, amp.scale_loss(b, optimizer, loss_id=1) as sb:\n"
        "    sa.backward()\n"
        "    sb.backward()"
    ),
    "AMP302-renewed": (
        HEAD + setup() + "with amp.scale_loss(a, optimizer) as scaled:\n"
        "    scaled.backward()\n"
        "with amp.scale_loss(b, optimizer) as scaled:\n"
        "    scaled.backward()"
    ),
    "AMP302-made-anew": (
        HEAD
        + setup()
        + "with amp.scale_loss(loss, optimizer) as loss:\n    loss.backward()\nloss = amp.scale(loss)\nloss.backward()"
    ),
    "AMP303-else": (
        HEAD + "if args.fp16:\n    " + setup() + "if args.fp16:\n"
        "    with amp.scale_loss(loss, optimizer) as scaled:\n"
        "        scaled.backward()\n"
        "else:\n"
        "    loss.backward()"
    ),
    "AMP303-flag-in-other-function": (
        HEAD + "def prepare():\n"
        "    if args.fp16:\n"
        "        amp.initialize(model, optimizer)\n\n"
        "def train():\n"
        "    if not args.fp16:\n"
        "        loss.backward()"
    ),
    "AMP303-return": (
        HEAD + setup() + "def f():\n"
        "    if on:\n"
        "        with amp.scale_loss(a, optimizer) as b:\n"
        "            b.backward()\n"
        "        return\n"
        "    a.backward()"
    ),
    "AMP303-continue": (
        HEAD + setup() + "for a in b:\n"
        "    if on:\n"
        "        with amp.scale_loss(a, optimizer) as c:\n"
        "            c.backward()\n"
        "        continue\n"
        "    a.backward()"
    ),
    "AMP303-no-scaling": HEAD + setup("O4") + "loss.backward()",
    "AMP303-static-one": HEAD + setup("O1", ", loss_scale=1") + "loss.backward()",
    "AMP303-engines": (
        HEAD
        + setup()
        + "engine.backward(loss)\nself.backward()\nscaler.scale(loss).backward()\namp.scale(loss).backward()"
    ),
    **{
        f"AMP303-{name}": HEAD + setup() + source
        for name, source in {
            "exit-stack": "scaled = stack.enter_context(amp.scale_loss(loss, optimizer))\nscaled.backward()",
            "exit-stacks": (
                "parts = [stack.enter_context(amp.scale_loss(one, optimizer)) for one in losses]\n"
                "for index, part in enumerate(parts):\n    part.backward()"
            ),
            "appended": "for one in losses:\n    self.parts.append(amp.scale(one))\nself.parts[0].backward()",
            "loop": "for one in [amp.scale(loss)]:\n    one.backward()",
            "comprehension": "[one.backward() for one in map(amp.scale, losses)]",
            "made-of-it": "a = amp.scale(loss)\nb = a / 2\nc = b + 1\nc.backward()",
            "attribute": (
                "class Trainer:\n"
                "    def step(self):\n"
                "        with amp.scale_loss(self.loss, self.optimizer) as self.scaled:\n"
                "            self.back()\n"
                "    def back(self):\n"
                "        self.scaled.backward()"
            ),
            "passed-in-a-block": (
                "def back(loss):\n    (loss / 2).backward()\n"
                "with amp.scale_loss(loss, optimizer) as scaled:\n    back(scaled)"
            ),
            "passed-to-a-method": (
                "class Trainer:\n    def back(self, loss):\n        loss.backward()\nTrainer().back(amp.scale(loss))"
            ),
        }.items()
    },
    "AMP304-after": HEAD + setup() + LOOP,
    "AMP304-others": (
        HEAD + setup() + "with amp.scale_loss(loss, optimizer) as scaled:\n"
        "    scaled.backward()\n"
        "    profiler.step()\n"
        "optimizer.step()"
    ),
    "AMP305-no-scaling": (
        HEAD + setup("O5") + "with amp.scale_loss(loss, optimizer) as s:\n"
        "    s.backward()\n"
        "    nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1)"
    ),
    "AMP307-other-arm": (
        HEAD
        + 'if args.impl == "apex":\n    '
        + setup("O4")
        + "elif args.impl == 'native':\n    scaler = torch.cuda.amp.GradScaler()"
    ),
    "AMP307-other-value": (
        HEAD
        + 'if args.impl == "apex":\n    '
        + setup("O4")
        + "if args.impl == 'native':\n    scaler = torch.cuda.amp.GradScaler()"
    ),
    "AMP307-other-flag": (
        HEAD + "if args.apex:\n    " + setup("O4") + "if args.native:\n    scaler = torch.cuda.amp.GradScaler()"
    ),
    "AMP307-switch": HEAD + setup("O4") + 'with torch.autocast("cuda", enabled=args.native):\n    model(x)',
    "AMP307-other-class": (
        HEAD + "class A:\n"
        "    def step(self):\n"
        "        with amp.scale_loss(self.a, self.optimizer) as s:\n"
        "            s.backward()\n\n" + "class B:\n    scaler = torch.cuda.amp.GradScaler()"
    ),
    **{
        f"AMP307-{name}": HEAD + setup() + source
        for name, source in {
            "autocast-by-position": 'with torch.autocast("cuda", torch.float16, args.on):\n    model(x)',
            "cuda-autocast-by-position": "with torch.cuda.amp.autocast(args.on):\n    model(x)",
            "cpu-autocast-by-position": "with torch.cpu.amp.autocast(args.on):\n    model(x)",
            "scaler-by-position": 'torch.amp.GradScaler("cuda", 65536.0, 2.0, 0.5, 2000, False)',
            "cuda-scaler-by-position": "torch.cuda.amp.GradScaler(65536.0, 2.0, 0.5, 2000, False)",
            "keywords": "scaler = torch.amp.GradScaler(**options)",
            "arguments": "scaler = torch.amp.GradScaler(*options)",
            "either-position": (
                "try:\n    from torch import autocast\nexcept ImportError:\n    from torch.cuda.amp import autocast\n"
                'with autocast("cuda"):\n    model(x)'
            ),
        }.items()
    },
    "AMP307-amp-off": (
        HEAD + "ON = False\n" + setup("O1", ", enabled=ON") + "scaler = torch.amp.GradScaler()\n"
        'with torch.autocast("cuda"):\n    model(x)'
    ),
    "AMP307-no-patches": HEAD + setup("O2") + 'with torch.autocast("cuda"):\n    model(x)',
    "AMP308-no-patches": HEAD + setup("O5") + 'with torch.autocast("cuda", enabled=False):\n    model(x)',
    "AMP309-epoch": (
        HEAD + setup() + "for epoch in range(9):\n    for x in loader:\n        optimizer.step()\n    scheduler.step()"
    ),
    "AMP309-asked": HEAD + setup() + LOOP + "    if not optimizer.step_was_skipped:\n        scheduler.step()",
    "AMP309-else": (
        HEAD
        + "if args.amp:\n    "
        + setup()
        + "for x in loader:\n    optimizer.step()\n    if not args.amp:\n        scheduler.step()"
    ),
    "AMP309-static": HEAD + setup("O4") + LOOP + "    scheduler.step()",
    "AMP310-in-range": (
        HEAD
        + setup(arguments=", num_losses=2")
        + "with amp.scale_loss(loss, optimizer, loss_id=1) as s:\n    s.backward()"
    ),
    "AMP310-unknown": (
        HEAD
        + setup(arguments=", num_losses=n")
        + "with amp.scale_loss(loss, optimizer, loss_id=4) as s:\n    s.backward()"
    ),
    "AMP312-scaled": HEAD + setup() + "g = amp.unscale(torch.autograd.grad(amp.scale(out), x, create_graph=True))",
    "AMP312-no-graph": HEAD + setup() + "g = torch.autograd.grad(out, x, create_graph=False)",
    "AMP402-logits": (
        HEAD + setup("O4") + "loss = F.binary_cross_entropy_with_logits(x, y)\ncriterion = nn.BCEWithLogitsLoss()"
    ),
    "AMP402-widened": HEAD + setup("O4") + "loss = F.binary_cross_entropy(p.float(), y)",
    "AMP402-float32": HEAD + setup("O0") + "loss = F.binary_cross_entropy(p, y)",
    "AMP402-without-amp": "import torch\nloss = torch.nn.BCELoss()",
    "AMP501-saved": HEAD + setup() + 'torch.save({"optimizer": optimizer.state_dict(), "amp": amp.state_dict()}, path)',
    "AMP501-weights": HEAD + setup() + "torch.save(model.state_dict(), path)",
    "AMP501-static": HEAD + setup("O4") + "torch.save(optimizer.state_dict(), path)",
    "AMP502-loaded": HEAD + setup() + "optimizer.load_state_dict(c[0])\namp.load_state_dict(c[1])",
    "AMP502-weights": HEAD + setup() + "model.load_state_dict(torch.load(path))",
    "AMP503-after": HEAD + setup() + "optimizer.load_state_dict(c[0])\namp.load_state_dict(c[1])",
    "AMP503-other-function": HEAD + "def resume():\n    amp.load_state_dict(c)\n\ndef main():\n    " + setup(),
}


@pytest.mark.parametrize("source", [pytest.param(source, id=name) for name, source in NEGATIVE.items()])
def test_what_only_looks_like_a_fault_is_left_alone(source: str, diagnose: Diagnose) -> None:
    assert [
        (finding.code, finding.line, finding.message) for finding in diagnose(source) if finding.code != "AMP101"
    ] == []


def test_every_rule_of_scripts_has_a_positive_and_a_near_miss() -> None:
    codes = {rule.code for rule in sorted_rules() if rule.find is not None} - {"AMP101"}
    assert {name[:6] for name in POSITIVE} == codes
    assert {name[:6] for name in NEGATIVE} == codes


# ---- apex ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        "from apex import amp",
        "import apex",
        "from apex.amp import initialize, scale_loss, _amp_state, init",
        "from apex.amp._amp_state import maybe_print",
        "import apex.amp._amp_state",
        "import apex.amp as amp",
        "from apex.optimizers import FusedAdam, FusedLAMB",
        "from apex.optimizers.fused import FusedSGD",
        "from apex.parallel import DistributedDataParallel as DDP",
        "import amp_C",
        "from amp_C import multi_tensor_scale",
    ],
)
def test_a_covered_import_is_a_note_with_the_way_to_run_it(line: str, diagnose: Diagnose) -> None:
    (finding,) = diagnose(line)
    assert (finding.code, finding.severity, finding.line) == ("AMP101", "note", 1)
    assert "amp-patch run" in finding.advice
    assert ("import amp_patch as amp" in finding.advice) is ("apex.amp" in finding.message)


def test_a_relative_import_is_none_of_apexs(diagnose: Diagnose) -> None:
    assert diagnose("from .apex import amp\nfrom ..apex.amp import initialize\nfrom . import amp_C\n") == []


def test_names_are_followed_through_aliases_and_chains(diagnose: Diagnose) -> None:
    source = (
        "import apex\n"
        "from apex import amp\n"
        "my = amp\n"
        "my.master_params(o)\n"
        "amp._amp_state.x()\n"
        "my.register_rnn()\n"
        "apex.optimizers.FusedX(p)\n"
    )
    assert places(diagnose(source)) == [("AMP101", 1), ("AMP101", 2), ("AMP102", 6), ("AMP102", 7)]


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("apex.contrib.xentropy.SoftmaxCrossEntropyLoss", "a fused loss: use F.cross_entropy"),
        ("apex.contrib.xentropy2", "extras"),
        ("apex.RNN", None),
    ],
)
def test_a_part_that_is_gone_is_advised_upon_as_the_standin_does(
    name: str, advice: str | None, diagnose: Diagnose, standin: coverage.Coverage
) -> None:
    assert standin.advice(name) == advice
    (finding,) = diagnose(f"import {name}\n")
    assert (advice or "look in today's torch") in finding.advice


@pytest.mark.parametrize(
    ("source", "fix"),
    [
        ("from apex.amp import intialize", "Did you mean 'initialize'?"),
        ("from apex.optimizers import FusedAdamm", "Did you mean 'FusedAdam'?"),
        ("from apex.contrib.optimizers import FP16_Optimiser", "Did you mean 'FP16_Optimizer'?"),
        ("from apex import optimisers", "Did you mean 'optimizers'?"),
        ("from apex.optimisers import FusedAdam", "Did you mean 'optimizers'?"),
        ("import apex.paralell", "Did you mean 'parallel'?"),
        ("from amp_patch import initialise", "Did you mean 'initialize'?"),
        ("from apex.contrib.optimizers.distributed_fused_adam import DistributedFusedAdam", "fully_shard"),
        ("from apex.amp import zzz", "look in today's torch"),
    ],
)
def test_a_misspelt_name_is_told_the_right_one(source: str, fix: str, tmp_path: Path) -> None:
    """By the stand-in that is installed, not the small one of the other tests."""
    path = tmp_path / "script.py"
    path.write_text(source + "\n")
    (finding,) = diagnose_files([path], coverage.get_coverage())
    assert finding.code == "AMP102" and fix in finding.advice


def test_without_a_standin_nothing_is_covered(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text("import apex\nfrom apex import amp\n")
    assert places(diagnose_files([path], coverage.Coverage(tmp_path / "absent"))) == [("AMP102", 1), ("AMP102", 2)]


# ---- several files ---------------------------------------------------------------------------------------------------


def test_files_that_an_amp_script_imports_are_judged_by_its_level(diagnose: Diagnose) -> None:
    train = HEAD + "from net import Net\n" + setup("O4")
    net = "from ops import project\n"
    ops = "import torch\ncriterion = torch.nn.BCELoss()\n"
    assert places(diagnose(train=train, net=net, ops=ops)) == [("AMP402", 2)]
    assert places(diagnose(train=train.replace("O4", "O0"), net=net, ops=ops)) == []
    assert places(diagnose(train=train.replace("from net", "from nets"), net=net, ops=ops)) == []


def test_a_file_without_initialize_takes_the_levels_of_those_with_it(diagnose: Diagnose) -> None:
    engine = (
        HEAD + "def step(model, optimizer, loss):\n"
        "    with amp.scale_loss(loss, optimizer) as scaled_loss:\n"
        "        scaled_loss.backward()\n"
        "        nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
        "    torch.save(amp.state_dict(), path)\n"
    )
    assert places(diagnose(train=HEAD + setup("O4"), engine=engine)) == []
    assert places(diagnose(train=HEAD + setup("O2"), engine=engine)) == [("AMP305", 10)]
    assert places(diagnose(engine)) == [("AMP305", 10)]


def test_directories_are_walked_without_what_is_not_the_users(tmp_path: Path) -> None:
    wanted = ["a.py", "models/net.py"]
    passed_over = [".git/x.py", "env/lib/y.py", "__pycache__/z.py", "build/b.py", "notes.txt"]
    for name in [*wanted, *passed_over]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "env" / "pyvenv.cfg").write_text("")
    (tmp_path / "loop").symlink_to(tmp_path, target_is_directory=True)
    assert find_files([tmp_path, tmp_path / "a.py"]) == [tmp_path / name for name in wanted]


# ---- reading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "place", "said"),
    [
        pytest.param(b"x = 1\nif x\n", (2, 5), "cannot be parsed", id="syntax"),
        pytest.param(b"print 'python 2'\n", (1, 1), "cannot be parsed", id="python-2"),
        pytest.param(b"\x89PNG\r\n\x1a\n\x00\x00", (1, 1), "", id="binary"),
        pytest.param(b"x = '\xe9'\n", (1, 1), "", id="latin-1-undeclared"),
        pytest.param(b"# coding: klingon\n", (1, 1), "klingon", id="unknown-encoding"),
        pytest.param(b"x = " + b"(" * 5000 + b")" * 5000, (1, 1), "", id="too-deep"),
    ],
)
def test_what_cannot_be_read_is_one_finding(
    content: bytes, place: tuple[int, int], said: str, tmp_path: Path, standin: coverage.Coverage
) -> None:
    path = tmp_path / "script.py"
    path.write_bytes(content)
    (finding,) = diagnose_files([path], standin)
    assert (finding.code, finding.severity) == ("AMP001", "error")
    assert said in finding.message
    if said == "cannot be parsed":
        assert (finding.line, finding.column) == place


@pytest.mark.parametrize(
    "expression",
    ["(" + "+".join(["a"] * 900) + ")", "a" + ".b" * 900, "a" + ".b()" * 900],
    ids=["sum", "attributes", "calls"],
)
def test_what_is_nested_too_deeply_to_be_judged_is_one_finding(expression: str, diagnose: Diagnose) -> None:
    findings = diagnose(HEAD + setup() + f"{expression}.backward()\n")
    assert [(finding.code, finding.severity) for finding in findings] == [("AMP001", "error")]
    assert "nested too deeply" in findings[0].message


def test_a_file_that_vanishes_is_one_finding(tmp_path: Path, standin: coverage.Coverage) -> None:
    (finding,) = diagnose_files([tmp_path / "gone.py"], standin)
    assert finding.code == "AMP001" and "cannot be read" in finding.message


@pytest.mark.parametrize(
    "content", [b"", b"# only a comment", b"# coding: latin-1\nx = '\xe9'\n", b"\xef\xbb\xbfx = 1\n", b"x = '\\d'\n"]
)
def test_odd_but_sound_files_have_no_findings(
    content: bytes, tmp_path: Path, standin: coverage.Coverage, recwarn: pytest.WarningsRecorder
) -> None:
    path = tmp_path / "script.py"
    path.write_bytes(content)
    assert diagnose_files([path], standin) == []
    assert len(recwarn) == 0


def test_columns_count_characters_and_lines_are_pythons(diagnose: Diagnose) -> None:
    (finding,) = diagnose(HEAD + setup("O4") + "'é\f'; x.half()")
    assert (finding.line, finding.column) == (8, 7)


def test_nothing_of_a_script_is_run(diagnose: Diagnose, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    diagnose(f"open({str(trace)!r}, 'w')\nimport net\n", net=f"open({str(trace)!r}, 'w')\n")
    assert not trace.exists()


# ---- silencing -------------------------------------------------------------------------------------------------------

LATE_HALF = HEAD + setup("O4") + "y = model(\n    x.half(){}\n)\n"


@pytest.mark.parametrize(
    ("comment", "expected"),
    [
        pytest.param("  # amp-patch: ignore[AMP207]", [], id="code"),
        pytest.param("  # amp-patch: ignore[AMP305, AMP207] because", [], id="several"),
        pytest.param("  # amp-patch: ignore", [], id="every-code"),
        pytest.param("  # amp-patch: ignore[AMP208]", ["AMP207"], id="another-code"),
        pytest.param("  # amp-patch: ignore[AMP401, AMP207]", [], id="retired-code"),
        pytest.param("  # noqa: E501, AMP207", [], id="noqa-code"),
        pytest.param("  # noqa", [], id="noqa"),
        pytest.param("  # noqa: E501,F401", ["AMP207"], id="noqa-of-others"),
        pytest.param("  # noqa: AMP2077", ["AMP002", "AMP207"], id="noqa-unknown-code"),
        pytest.param("  # amp-patch: ignore[]", ["AMP207"], id="no-code"),
        pytest.param("  # amp-patch: ignore[AMP207, HALF]", ["AMP002"], id="unknown-code"),
        pytest.param(" if '# amp-patch: ignore' else x", ["AMP207"], id="in-a-string"),
    ],
)
def test_a_comment_silences_its_codes_on_its_line(comment: str, expected: list[str], diagnose: Diagnose) -> None:
    assert [finding.code for finding in diagnose(LATE_HALF.format(comment))] == expected


def test_a_comment_on_any_line_of_a_call_silences_it_and_on_the_next_does_not(diagnose: Diagnose) -> None:
    call = HEAD + setup("O4") + "nn.utils.clip_grad_norm_(\n    x.to(\n        torch.half,{}\n    ),{}\n)\n"
    assert diagnose(call.format("  # amp-patch: ignore[AMP207]", "")) == []
    assert places(diagnose(call.format("", "  # amp-patch: ignore[AMP207]"))) == []
    assert places(diagnose(call.format("", "") + "# amp-patch: ignore[AMP207]\n")) == [("AMP207", 9)]


# ---- levels ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
def test_expectations_are_those_of_the_preset(level: str, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(HEAD + setup(level))
    expected = levels.expect([Script(str(path), path.read_text())])
    assert expected.may_patch is (level in ("O1", "O4"))
    assert expected.may_use_low is (level != "O0")
    assert expected.may_skip is expected.may_scale is (level in ("O1", "O2"))
    assert expected.takes_low_model is (level == "O3")
