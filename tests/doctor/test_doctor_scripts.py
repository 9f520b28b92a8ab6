"""The doctor on whole scripts: it finds each of the planted faults and nothing else, has nothing to say of the sound
script, and that one trains.

A planted fault replaces some text of the sound script by another, whose marked lines are those that must be reported.
"""

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from diagnosing import diagnose_files

from amp_patch.doctor.coverage import Coverage
from amp_patch.doctor.findings import Finding

# ---- images, at a level of the user's choice -------------------------------------------------------------------------

IMAGES = '''\
"""Train a small residual network on images."""

import argparse
import os

import torch
import torch.nn as nn
import torch.nn.functional as F

import amp_patch as amp

parser = argparse.ArgumentParser()
parser.add_argument("--opt-level", type=str, default="O2")
parser.add_argument("--loss-scale", type=str, default=None)
parser.add_argument("--keep-batchnorm-fp32", type=str, default=None)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--clip", type=float, default=1.0)
parser.add_argument("--parallel", action="store_true")
parser.add_argument("--checkpoint", default="checkpoint.pt")
args = parser.parse_args()


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x):
        return F.relu(x + self.norm(self.conv(x)))


class Net(nn.Module):
    def __init__(self, classes=10):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.Sequential(Block(8), Block(8))
        self.head = nn.Linear(8, classes)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean(dim=(2, 3)))


def batches(count, device):
    for _ in range(count):
        yield torch.randn(4, 3, 8, 8, device=device), torch.randint(0, 10, (4,), device=device)


def train(model, optimizer, scheduler, device):
    model.train()
    for images, target in batches(3, device):
        loss = F.cross_entropy(model(images), target)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), args.clip)
        optimizer.step()
    scheduler.step()
    return loss.item()


@torch.no_grad()
def validate(model, device):
    model.eval()
    hits = [(model(images).argmax(dim=1) == target).float().mean() for images, target in batches(1, device)]
    return torch.stack(hits).mean().item()


def save(model, optimizer, epoch):
    weights = (model.module if args.parallel else model).state_dict()
    state = {"epoch": epoch, "model": weights, "optimizer": optimizer.state_dict(), "amp": amp.state_dict()}
    torch.save(state, args.checkpoint)


def main():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = Net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    model, optimizer = amp.initialize(
        model,
        optimizer,
        opt_level=args.opt_level,
        keep_batchnorm_fp32=args.keep_batchnorm_fp32,
        loss_scale=args.loss_scale,
    )
    start = 0
    if os.path.exists(args.checkpoint):
        checkpoint = torch.load(args.checkpoint)
        start = checkpoint["epoch"]
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        amp.load_state_dict(checkpoint["amp"])
    if args.parallel:
        model = nn.DataParallel(model)
    for epoch in range(start, args.epochs):
        loss = train(model, optimizer, scheduler, device)
        print(f"epoch {epoch}: loss {loss:.3f}, accuracy {validate(model, device):.2f}")
        save(model, optimizer, epoch + 1)


if __name__ == "__main__":
    main()
'''

IMAGE_FAULTS = [
    (
        "import amp_patch as amp\n",
        "import amp_patch as amp\nfrom apex.contrib.optimizers import DistributedFusedAdam  # AMP102\n",
    ),
    ('"--opt-level", type=str, default="O2")', '"--opt-level", type=str, default="o2")  # AMP201'),
    (
        "        loss = F.cross_entropy(model(images), target)\n",
        "        loss = F.cross_entropy(model(images.half()), target)  # AMP207\n",
    ),
    ("            scaled_loss.backward()\n", "            loss.backward()  # AMP301\n"),
    (', "amp": amp.state_dict()}\n', "}  # AMP501\n"),
    (
        "        optimizer.step()\n    scheduler.step()\n",
        "        optimizer.step()\n        scheduler.step()  # AMP309\n",
    ),
    (
        "    model, optimizer = amp.initialize(\n",
        (
            "    if args.parallel:\n"
            "        model = nn.DataParallel(model)  # AMP203\n"
            "    model, optimizer = amp.initialize(\n"
        ),
    ),
    (
        '        optimizer.load_state_dict(checkpoint["optimizer"])\n',
        '        optimizer.load_state_dict(checkpoint["optimizer"])  # AMP502\n',
    ),
    (
        (
            '        amp.load_state_dict(checkpoint["amp"])\n'
            "    if args.parallel:\n"
            "        model ="
            " nn.DataParallel(model)\n"
        ),
        "",
    ),
]

# ---- text, at O1, with two losses and switches -----------------------------------------------------------------------

TEXT = '''\
"""Fine-tune a small encoder: a masked-word loss and a sentence loss, with gradient accumulation."""

import argparse
import contextlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.functional import cross_entropy

import amp_patch as amp

ACTIVATIONS = {"relu": F.relu, "gelu": F.gelu, "softplus": lambda x: F.softplus(x)}


class Encoder(nn.Module):
    def __init__(self, words=50, width=16, activation="softplus"):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, 2 * width)
        self.outer = nn.Linear(2 * width, width)
        self.words = nn.Linear(width, words)
        self.sentence = nn.Linear(width, 1)
        self.act = ACTIVATIONS[activation]

    def forward(self, tokens):
        x = self.embed(tokens)
        x = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
        x = x + self.outer(self.act(self.inner(x)))
        return self.words(x), self.sentence(x.mean(dim=1)).squeeze(1)


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fp16", action="store_true")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--resume")
    parser.add_argument("--save", default="text.pt")
    return parser.parse_args()


def make_optimizer(model):
    decayed = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-3)


def backward(args, losses, optimizer):
    for index, loss in enumerate(losses):
        if args.fp16:
            with amp.scale_loss(loss, optimizer, loss_id=index) as scaled:
                scaled.backward(retain_graph=index == 0)
        else:
            loss.backward(retain_graph=index == 0)


def main():
    args = parse()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = Encoder().to(device)
    optimizer = make_optimizer(model)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)
    criterion = nn.BCEWithLogitsLoss()
    if args.fp16:
        model, optimizer = amp.initialize(model, optimizer, opt_level="O1", num_losses=2)
    if args.resume:
        state = torch.load(args.resume)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        if args.fp16:
            amp.load_state_dict(state["amp"])
    for step in range(args.steps):
        tokens = torch.randint(0, 50, (2, 6), device=device)
        label = torch.randint(0, 2, (2,), device=device).float()
        with contextlib.nullcontext():
            words, sentence = model(tokens)
        of_words = cross_entropy(words.flatten(0, 1), tokens.flatten()) / args.accumulate
        losses = [of_words, criterion(sentence, label) / args.accumulate]
        backward(args, losses, optimizer)
        if (step + 1) % args.accumulate == 0:
            params = amp.master_params(optimizer) if args.fp16 else model.parameters()
            torch.nn.utils.clip_grad_norm_(params, 1.0)
            optimizer.step()
            if not getattr(optimizer, "step_was_skipped", False):
                scheduler.step()
            optimizer.zero_grad()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if args.fp16:
        state["amp"] = amp.state_dict()
    torch.save(state, args.save)
    print(f"last losses: {', '.join(f'{loss.item():.3f}' for loss in losses)}")


if __name__ == "__main__":
    main()
'''

TEXT_FAULTS = [
    ("        else:\n            loss.backward(", "        loss.backward(  # AMP303\n            "),
    (
        "            with amp.scale_loss(loss, optimizer, loss_id=index) as scaled:\n",
        (
            "            with amp.scale_loss(loss, optimizer, loss_id=1) as scaled:  # AMP310\n"
            "                torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)  # AMP305\n"
            "                optimizer.step()  # AMP304\n"
        ),
    ),
    ("    model = Encoder().to(device)\n", "    model = Encoder()\n"),
    (
        'opt_level="O1", num_losses=2)\n',
        'opt_level="O1", num_losses=1)\n    model.to(device)  # AMP208\n',
    ),
    ("nn.BCEWithLogitsLoss()", "nn.BCELoss()  # AMP402"),
    ("        with contextlib.nullcontext():", "        with torch.autocast(device.type):  # AMP307"),
    (
        '            if not getattr(optimizer, "step_was_skipped", False):\n                scheduler.step()\n',
        "            scheduler.step()  # AMP309\n",
    ),
]

SCRIPTS = {"images": (IMAGES, IMAGE_FAULTS), "text": (TEXT, TEXT_FAULTS)}


def diagnose(source: str, tmp_path: Path) -> list[Finding]:
    path = tmp_path / "script.py"
    path.write_text(source)
    return diagnose_files([path], Coverage(tmp_path / "no-stand-in"))


def plant(source: str, faults: list[tuple[str, str]]) -> str:
    for sound, faulty in faults:
        assert source.count(sound) == 1, sound
        source = source.replace(sound, faulty)
    compile(source, "script.py", "exec")
    return source


def marked(source: str) -> list[tuple[str, int]]:
    return [
        (code, number) for number, line in enumerate(source.splitlines(), 1) for code in re.findall(r"# (AMP\d+)", line)
    ]


@pytest.mark.parametrize("name", SCRIPTS)
def test_planted_faults_are_found_each_at_its_line_and_nothing_else(name: str, tmp_path: Path) -> None:
    source = plant(*SCRIPTS[name])
    assert [(finding.code, finding.line) for finding in diagnose(source, tmp_path)] == marked(source)


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_sound_script_has_no_findings(name: str, tmp_path: Path) -> None:
    assert diagnose(SCRIPTS[name][0], tmp_path) == []


@pytest.mark.parametrize(
    ("name", "options", "resuming"),
    [
        pytest.param("images", ["--opt-level", "O5"], [], id="images-O5"),
        pytest.param("images", ["--opt-level", "O1", "--parallel"], ["--epochs", "3"], id="images-O1-resumed"),
        pytest.param("text", ["--fp16"], ["--fp16", "--resume", "text.pt"], id="text-O1-resumed"),
        pytest.param("text", [], ["--resume", "text.pt"], id="text-without-amp"),
    ],
)
def test_the_sound_script_trains(
    name: str,
    options: list[str],
    resuming: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPTS[name][0])
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    for extra in ([], resuming) if resuming else ([],):
        monkeypatch.setattr(sys, "argv", ["script.py", *options, *extra])
        runpy.run_path(str(path), run_name="__main__")
        assert "loss" in capsys.readouterr().out
