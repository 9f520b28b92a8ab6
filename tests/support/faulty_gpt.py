"""Transformers with a fault of range or precision seeded into named places, and the lists under which it shows."""

import math

import torch
import torch.nn.functional as F
from torch import nn
from training import take_step

import amp_patch as amp

LOW = "extends: float16\nwhitelist: [exp, sum, square, mean, rsqrt, cumsum, sin]\n"
"""A list under which faults of these ops show."""


class Norm(nn.Module):
    """RMS norm written out; `large` multiplies what it squares, which leaves the result as it is."""

    def __init__(self, width, large):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.large = large

    def forward(self, x):
        x = x * self.large
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True)) * self.weight


class Attention(nn.Module):
    """Softmax written out; `shift` is added to what is exponentiated, which leaves the weights as they are."""

    def __init__(self, width, shift):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.shift = shift

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = (q @ k.transpose(-2, -1)).float() / math.sqrt(q.shape[-1]) + self.shift
        weights = torch.exp(scores)
        return self.out((weights / weights.sum(-1, keepdim=True)).to(v.dtype) @ v)


class Position(nn.Module):
    """Adds sines of positions that are summed up; they are large where `step` is."""

    def __init__(self, width, step):
        super().__init__()
        self.scale = nn.Linear(width, width)
        self.step = step

    def forward(self, x):
        x = self.scale(x)
        return x + torch.sin(torch.cumsum(torch.ones_like(x) * self.step, 1))


class Block(nn.Module):
    def __init__(self, width, large, shift):
        super().__init__()
        self.n1 = Norm(width, large)
        self.attn = Attention(width, shift)
        self.n2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        x = x + self.attn(self.n1(x))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class FaultyGPT(nn.Module):
    """Blocks of which some norms (`square`) or attention (`exp`) overflow float16; positions that it rounds away."""

    def __init__(self, width=16, layers=3, square=(), exp=(), cumsum=False):
        super().__init__()
        self.embedding = nn.Embedding(20, width)
        self.pos = Position(width, 300.17 if cumsum else 0.3)
        self.blocks = nn.ModuleList(
            Block(width, 2000.0 if i in square else 1.0, 12.0 if i in exp else 0.0) for i in range(layers)
        )
        self.head = nn.Linear(width, 20)

    def forward(self, tokens):
        x = self.pos(self.embedding(tokens))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_training(level="O1", batches=4, make_model=FaultyGPT, lists=None, **options):
    """A function without arguments that trains a faulty transformer."""

    def train():
        torch.manual_seed(0)
        model = make_model(**options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        scale = 128.0 if level == "O1" else None
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, lists=lists, loss_scale=scale, verbosity=0)
        for _ in range(batches):
            tokens = torch.randint(20, (4, 9))
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            take_step(loss, optimizer)

    return train
