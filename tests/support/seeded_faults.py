"""Training scripts with a fault that was put there on purpose, for what `trace` says of them.

The line that is to be named ends in `# HERE`. A case returns a function that trains for a step; `given` is how to run
it: as it is, or with the remedy applied as it was advised.
"""

import inspect
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from training import backward, take_step

import amp_patch as amp
from amp_patch.insight import FaultRecord, format_fault, trace
from amp_patch.insight.causes import find_remedy
from amp_patch.insight.remedies import Remedy, format_entries


@dataclass(frozen=True)
class Given:
    """How a case is run: its level, list and loss scale, and whether its script is mended by hand."""

    level: str
    loss_scale: float
    lists: str | None = None
    is_mended: bool = False

    def start(self, models, compute_loss, *, lr=1e-9, optimizer=None):
        """Bring models under amp and return a function that trains for a step."""
        listed = models if isinstance(models, list) else [models]
        if optimizer is None:
            optimizer = torch.optim.SGD([one for model in listed for one in model.parameters()], lr=lr)
        options = {"opt_level": self.level, "loss_scale": self.loss_scale, "lists": self.lists, "verbosity": 0}
        amp.initialize(models, optimizer, **options)
        return lambda: take_step(compute_loss(), optimizer)

    def regress(self, model, x, **options):
        """Train a model towards zero."""
        return self.start(model, lambda: model(x).float().square().mean(), **options)  # HERE


@dataclass(frozen=True)
class Case:
    """A script: what is wrong in words, the cause that is to be told, and what helps.

    Attributes:
        helps: "list", "scale", "level", or "script" where no setting helps, but an edit of the script.
        steps: how many are looked at.
        underflow: as `trace` has it.
    """

    make: Callable[[Given], Callable[[], Any]]
    about: str
    cause: str
    helps: str
    level: str
    loss_scale: float
    steps: int
    underflow: float | None

    @property
    def name(self) -> str:
        return self.make.__name__

    @property
    def lines(self) -> set[str]:
        """The lines that may be named, as `file.py:line`."""
        for code in (self.make, Given):
            source, first = inspect.getsourcelines(code)
            marked = {first + number for number, line in enumerate(source) if line.rstrip().endswith("# HERE")}
            if marked:
                break
        return {f"seeded_faults.py:{line}" for line in marked}


CASES: dict[str, Case] = {}


def case(about, cause, helps, *, level="O1", loss_scale=128.0, steps=3, underflow=None):
    def enter(make):
        CASES[make.__name__] = Case(make, about, cause, helps, level, loss_scale, steps, underflow)
        return make

    return enter


class Layer(nn.Module):
    """A module that calls a function, with itself for what it holds."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.function(self, x)


def draw(*shape, seed=1, factor=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * factor


def linear(inputs, outputs, factor=1.0, seed=0, bias=0.0):
    layer = nn.Linear(inputs, outputs)
    with torch.no_grad():
        layer.weight.copy_(draw(outputs, inputs, seed=seed) * factor / math.sqrt(inputs))
        layer.bias.fill_(bias)
    return layer


# ---- transformers ----------------------------------------------------------------------------------------------------


@case("attention scores without the square root, with large queries and keys", "precision", "list")
def attention_scores(given):
    def attend(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        weights = torch.softmax(q @ k.transpose(-2, -1), -1)  # HERE
        return x + self.out(weights @ v)

    blocks = [Layer(attend, qkv=linear(16, 48, 150.0, seed), out=linear(16, 16, 1e-3)) for seed in range(2)]
    return given.regress(nn.Sequential(*blocks), draw(2, 6, 16))


@case("a row of attention that is fully masked", "mathematics", "script")
def masked_row(given):
    keep = torch.ones(2, 1, 6, dtype=torch.bool)
    keep[1] = given.is_mended

    def attend(self, x):
        scores = self.q(x) @ x.transpose(-2, -1)
        return torch.softmax(scores.masked_fill(~keep, -math.inf), -1) @ x  # HERE

    return given.regress(nn.Sequential(Layer(attend, q=linear(16, 16))), draw(2, 6, 16))


@case("a hand-written RMSNorm in every block that squares its input in 16 bits", "precision", "list")
def rms_norm_in_every_block(given):
    def normalise(self, x):
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)  # HERE

    def run(self, x):
        return x + self.second(self.norm(self.first(x)))

    blocks = [
        Layer(run, first=linear(16, 16, 400.0, seed), norm=Layer(normalise), second=linear(16, 16)) for seed in range(3)
    ]
    return given.regress(nn.ModuleDict({"blocks": nn.Sequential(*blocks)})["blocks"], draw(4, 16))


@case("a mask computed in 16 bits as -1e9 times zero or one, with a fully masked row", "precision", "list")
def mask_of_large_numbers(given):
    keep = torch.ones(2, 1, 6)
    keep[1] = 0

    def attend(self, x):
        scores = self.q(x) @ x.transpose(-2, -1)
        return torch.softmax(scores + (1 - keep.to(scores.dtype)) * -1e9, -1) @ x  # HERE

    return given.regress(nn.Sequential(Layer(attend, q=linear(16, 16))), draw(2, 6, 16))


@case("a residual stream that outgrows 16 bits at O2", "precision", "list", level="O2")
def residual_stream(given):
    def run(self, x):
        return x + self.inner(torch.relu(x))  # HERE

    blocks = [Layer(run, inner=linear(16, 16, 12.0, seed)) for seed in range(6)]
    return given.regress(nn.Sequential(*blocks, nn.LayerNorm(16), linear(16, 1)), draw(4, 16))


@case("a hand-written softmax, exp of shifted scores, at O3", "precision", "list", level="O3")
def softmax_by_hand(given):
    def attend(self, x):
        weights = torch.exp(self.scores(x) + 12)  # HERE
        return weights / weights.sum(-1, keepdim=True)

    layers = [Layer(attend, scores=linear(16, 16, seed=seed)) for seed in range(2)]
    return given.regress(nn.Sequential(linear(16, 16), *layers, linear(16, 1)), draw(4, 16))


# ---- generators ------------------------------------------------------------------------------------------------------


@case("a discriminator that scales its features in its own forward, next to a generator", "precision", "list")
def gan_of_two_models(given):
    def judge_it(self, x):
        return self.last(self.first(x) * 3e3)  # HERE

    generator, z = linear(8, 16, 10.0), draw(4, 8)
    judge = Layer(judge_it, first=linear(16, 16), last=linear(16, 1))
    return given.start([generator, judge], lambda: F.softplus(-judge(generator(z))).mean())


@case("a hand-written GAN loss: log(1 - D(x)), where D(x) rounds to one in 16 bits", "precision", "list")
def gan_loss(given):
    judge = nn.Sequential(linear(8, 8), linear(8, 1, 1.0, bias=10.0))
    x = draw(4, 8, factor=0.1)
    return given.start(judge, lambda: -torch.log(1 - torch.sigmoid(judge(x))).mean())  # HERE


@case("the gradient of a GAN loss: log(D(x)), where D(x) is small", "precision", "list", loss_scale=1024.0)
def gan_gradient(given):
    judge = nn.Sequential(linear(8, 8), linear(8, 1, 1.0, bias=-13.0))
    x = draw(4, 8, factor=0.1)
    return given.start(judge, lambda: -torch.log(torch.sigmoid(judge(x)) + 1e-9).mean())  # HERE


@case("two hand-written GAN losses in one step, in one of which D(x) rounds to one in 16 bits", "precision", "list")
def gan_losses_far_apart(given):
    judge = nn.Sequential(*(linear(8, 8, seed=seed) for seed in range(8)), linear(8, 1, 1e-3, bias=10.0))
    real, made = draw(4, 8), draw(4, 8, seed=2)

    def loss():
        of_made, of_real = torch.sigmoid(judge(made)), torch.sigmoid(judge(real))
        return -(torch.log(of_real + 1e-9) + torch.log(1 - of_made + 1e-9)).mean()  # HERE

    return given.start(judge, loss)


@case("the likelihood of a VAE: the gradient of a division by a variance of 1e-3", "precision", "list")
def vae_likelihood(given):
    decoder = nn.Sequential(linear(8, 8), linear(8, 16))
    x = draw(4, 8)

    def loss():
        mean, raw = decoder(x).chunk(2, -1)
        variance = torch.sigmoid(raw - 7)
        return ((x - mean) ** 2 / (2 * variance) + 0.5 * torch.log(variance)).mean()  # HERE

    return given.start(decoder, loss)


@case(
    "a GAN whose discriminator steps with the gradient left by the generator's pass",
    "precision",
    "scale",
    loss_scale=1024.0,
)
def gan_gradient_left_behind(given):
    generator, judge = linear(4, 8, 4000.0), linear(8, 1)
    of_judge, z = torch.optim.SGD(judge.parameters(), lr=1e-9), draw(16, 4)

    def loss():
        made = generator(z)
        backward(torch.tanh(judge(made.detach() / 1e4)).mean(), of_judge)
        of_judge.step()
        return judge(made).mean()  # HERE

    of_generator = torch.optim.SGD(generator.parameters(), lr=1e-9)
    options = {"opt_level": given.level, "loss_scale": given.loss_scale, "lists": given.lists, "verbosity": 0}
    amp.initialize([generator, judge], [of_generator, of_judge], **options)
    return lambda: take_step(loss(), of_generator)


@case("a VAE decoder whose input is scaled by exp(13), from a log variance of 13", "precision", "list")
def vae_decoder(given):
    def decode(self, x):
        spread = torch.exp(self.logvar(x))
        return self.decoder(spread * draw(4, 8))  # HERE

    decoder = nn.Sequential(linear(8, 8, 1e-3), linear(8, 8, 1e-3))
    model = Layer(decode, logvar=linear(8, 8, 0.1, bias=13.0), decoder=decoder)
    return given.regress(nn.Sequential(model), draw(4, 8))


@case("the KL divergence of a VAE: squares of large means outside of modules", "precision", "list")
def vae_loss(given):
    encoder = nn.Sequential(linear(8, 8, 300.0))
    x = draw(4, 8)

    def loss():
        mean = encoder(x)
        return (mean * mean).float().mean() * 1e-6  # HERE

    return given.start(encoder, loss)


@case("a coupling layer of a flow: exp of an unbounded scale", "precision", "list", level="O3")
def flow_coupling(given):
    def couple(self, x):
        a, b = x.chunk(2, -1)
        return torch.cat([a, b * torch.exp(self.scale(a)) + self.shift(a)], -1)  # HERE

    layers = [Layer(couple, scale=linear(4, 4, 0.1, bias=7.0), shift=linear(4, 4)) for _ in range(2)]
    return given.regress(nn.Sequential(*layers, nn.LayerNorm(8), linear(8, 1)), draw(4, 8))


@case("the log determinant of a flow with a scale of zero", "mathematics", "script")
def flow_determinant(given):
    def stretch(self, x):
        scale = torch.relu(self.scale) + (0.1 if given.is_mended else 0.0)
        return x * scale + torch.log(scale).sum()  # HERE

    layer = Layer(stretch, scale=nn.Parameter(torch.tensor([1.0, -1.0, 2.0, 0.5])))
    return given.regress(nn.Sequential(linear(4, 4), layer), draw(4, 4))


# ---- experts, graphs, recurrences ------------------------------------------------------------------------------------


@case("a router that divides by the load of an expert that no token chose", "mathematics", "script")
def expert_without_load(given):
    def route(self, x):
        chosen = F.one_hot(self.gate(x).argmax(-1), 4).to(x.dtype)
        load = chosen.sum(0) + (1.0 if given.is_mended else 0.0)
        return x + (chosen.T @ x / load[:, None]).mean(0)  # HERE

    layer = Layer(route, gate=linear(8, 4, 1e-3))
    with torch.no_grad():
        layer.gate.bias[1] = 5.0
    return given.regress(nn.Sequential(linear(8, 8), layer), draw(4, 8))


@case("gates divided by their sum plus 1e-9, which is zero in 16 bits", "precision", "list")
def gates_without_sum(given):
    def route(self, x):
        gates = torch.relu(self.gate(x))
        return gates / (gates.sum(-1, keepdim=True).to(gates.dtype) + 1e-9)  # HERE

    return given.regress(nn.Sequential(linear(8, 8), Layer(route, gate=linear(8, 4, bias=-30.0))), draw(4, 8))


@case("the loss of a router: log of the sum of exp, at O3", "precision", "list", level="O3")
def router_loss(given):
    def route(self, x):
        logits = self.gate(x)
        return torch.log(torch.exp(logits).sum(-1, keepdim=True)).square() * 1e-3  # HERE

    return given.regress(nn.Sequential(linear(8, 8), Layer(route, gate=linear(8, 4, 8.0, bias=8.0))), draw(4, 8))


@case("a node without neighbours: degree ** -0.5", "mathematics", "script")
def lonely_node(given):
    adjacency = torch.tensor([[0.0, 1, 1, 0], [1, 0, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0]])
    adjacency += torch.eye(4) * given.is_mended

    def pass_on(self, x):
        scale = adjacency.sum(-1).pow(-0.5)  # HERE
        return self.lin(scale[:, None] * adjacency * scale @ x)

    return given.regress(nn.Sequential(Layer(pass_on, lin=linear(8, 8))), draw(4, 8))


@case("a hub of a graph: the sum of many messages in 16 bits", "precision", "list")
def hub_of_a_graph(given):
    target = torch.zeros(64, dtype=torch.long)

    def pass_on(self, x):
        messages = self.message(x)
        return torch.zeros(4, 8, dtype=messages.dtype).index_add(0, target, messages) / 64  # HERE

    layer = Layer(pass_on, message=linear(8, 8, 1.0, bias=2e3))
    return given.regress(nn.Sequential(linear(8, 8), layer, linear(8, 1, 1e-3)), draw(64, 8))


@case("a recurrent cell whose state doubles at each of 20 steps", "precision", "list", level="O3")
def growing_state(given):
    def run(self, x):
        state = self.start(x)
        for _ in range(20):
            state = state * 2.0  # HERE
        return state * 2.0**-20

    return given.regress(nn.Sequential(Layer(run, start=linear(8, 8)), linear(8, 1)), draw(4, 8))


@case("a recurrent gradient that grows by a factor of 16 at each step", "precision", "scale", loss_scale=2.0**10)
def growing_gradient(given):
    def run(self, x):
        for _ in range(3):
            x = self.cell(x)  # HERE
        return x

    cell = nn.Linear(8, 8, bias=False)
    with torch.no_grad():
        cell.weight.copy_(torch.eye(8) * 16)
    model = nn.Sequential(Layer(run, cell=cell))
    x = draw(4, 8, factor=1e-4)
    return given.start(model, lambda: model(x).float().sum())


# ---- contrastive and focal losses ------------------------------------------------------------------------------------


@case("a contrastive loss with a temperature of 1e-5, outside of modules", "precision", "list")
def contrastive_loss(given):
    encoder = nn.Sequential(linear(8, 8))
    x = draw(8, 8)

    def loss():
        z = F.normalize(encoder(x), dim=-1)
        similar = z @ z.T / 1e-5  # HERE
        return F.cross_entropy(similar, torch.arange(8)) * 1e-5

    return given.start(encoder, loss)


@case("unit vectors: a vector of zeros divided by its norm", "mathematics", "script")
def zero_vector(given):
    x = draw(4, 8)
    x[2] = 0

    def unit(self, x):
        h = torch.relu(self.lin(x))
        return h / (h.float().norm(dim=-1, keepdim=True) + (1e-6 if given.is_mended else 0.0))  # HERE

    return given.regress(nn.Sequential(Layer(unit, lin=linear(8, 8)), linear(8, 1)), x)


@case("unit vectors of small numbers, whose squares are zero in 16 bits", "precision", "list")
def small_vectors(given):
    def unit(self, x):
        h = self.lin(x)
        return h / (h * h).sum(-1, keepdim=True).to(h.dtype).sqrt()  # HERE

    return given.regress(nn.Sequential(Layer(unit, lin=linear(8, 8, 1e-5)), linear(8, 1)), draw(4, 8))


@case("a focal loss: the gradient of (1 - p) ** 0.5 where p is one", "mathematics", "script")
def focal_loss(given):
    model = nn.Sequential(linear(8, 8), linear(8, 1, bias=40.0))
    x = draw(4, 8)

    def loss():
        p = torch.sigmoid(model(x).float())
        return ((1 - p + (1e-6 if given.is_mended else 0.0)) ** 0.5).mean()  # HERE

    return given.start(model, loss)


@case("the logarithm of probabilities that were rounded to zero", "precision", "list")
def rounded_probabilities(given):
    def predict(self, x):
        return torch.sigmoid(self.rate(x))

    model = nn.Sequential(linear(8, 8), Layer(predict, rate=linear(8, 8, bias=-25.0)))
    x = draw(4, 8)
    return given.start(model, lambda: -torch.log(model(x)).mean())  # HERE


@case("odds, p / (1 - p), where bfloat16 makes p one", "precision", "list", level="O4")
def odds(given):
    def predict(self, x):
        p = torch.sigmoid(self.rate(x))
        return p / (1 - p)  # HERE

    model = nn.Sequential(linear(8, 8), Layer(predict, rate=linear(8, 8, bias=9.0)), linear(8, 1, 1e-5))
    return given.regress(model, draw(4, 8))


@case("a learned temperature, exp(11.5), in the model's own forward at O2", "precision", "list", level="O2")
def learned_temperature(given):
    def compare(self, x):
        image, text = F.normalize(self.image(x), dim=-1), F.normalize(self.text(x), dim=-1)
        return self.temperature.exp() * image @ text.T  # HERE

    temperature = nn.Parameter(torch.tensor(11.5))
    model, x = Layer(compare, image=linear(8, 8), text=linear(8, 8), temperature=temperature), draw(4, 8)
    return given.start(model, lambda: F.cross_entropy(model(x), torch.arange(4)) * 1e-6)


# ---- statistics ------------------------------------------------------------------------------------------------------


@case("a batch norm in 16 bits over values of thousands, at O3", "precision", "list", level="O3")
def batch_norm(given):
    return given.regress(nn.Sequential(linear(8, 8, 2e3), nn.BatchNorm1d(8), linear(8, 1)), draw(16, 8))


@case("a hand-written batch norm over a constant channel, with an eps of 1e-8", "precision", "list")
def constant_channel(given):
    def normalise(self, x):
        mean = x.mean(0)
        variance = ((x - mean) * (x - mean)).mean(0)
        return (x - mean) * (variance + 1e-8).rsqrt()  # HERE

    first = linear(8, 8)
    with torch.no_grad():
        first.weight[3] = 0
    return given.regress(nn.Sequential(first, Layer(normalise), linear(8, 1)), draw(16, 8))


@case("the standard deviation of a constant: the gradient of a square root at zero", "mathematics", "script")
def deviation_of_a_constant(given):
    def normalise(self, x):
        spread = (x - x.mean(-1, keepdim=True)).square().mean(-1, keepdim=True)
        return x / ((spread + (1e-4 if given.is_mended else 0.0)).sqrt() + 1e-3)  # HERE

    x = draw(4, 8)
    x[1] = 0
    first = linear(8, 8, bias=0.0)
    return given.regress(nn.Sequential(first, Layer(normalise), linear(8, 1)), x)


@case("distances of points to themselves: the gradient of a square root at zero", "mathematics", "script")
def distances(given):
    model = nn.Sequential(linear(8, 8))
    x = draw(4, 8)

    def loss():
        z = model(x).float()
        apart = (z[:, None] - z).square().sum(-1) + (1e-6 if given.is_mended else 0.0)
        return torch.sqrt(apart).mean()  # HERE

    return given.start(model, loss)


@case("the gradient of a square root of small numbers, which are zero in 16 bits", "precision", "list")
def root_of_small_numbers(given):
    def length(self, x):
        h = self.lin(x)
        return (h * h).sqrt()  # HERE

    return given.regress(nn.Sequential(Layer(length, lin=linear(8, 8, 1e-5)), linear(8, 1)), draw(4, 8))


# ---- optimizers and scales -------------------------------------------------------------------------------------------


@case("Adam's eps of 1e-8 in 16 bits, at O3", "step", "level", level="O3")
def adam_without_masters(given):
    model = nn.Sequential(linear(8, 8), nn.ReLU(), linear(8, 1))
    return given.regress(model, draw(4, 8, factor=1e-3), optimizer=torch.optim.Adam(model.parameters(), lr=1e-3))


@case("a learning rate of 40 in bfloat16", "divergence", "script", level="O4", steps=60)
def divergence_in_bfloat16(given):
    model = nn.Sequential(linear(8, 8), linear(8, 8), linear(8, 1))
    return given.regress(model, draw(4, 8), lr=0.01 if given.is_mended else 40.0)


@case("a learning rate of 10 in float16", "divergence", "script", loss_scale=1.0, steps=60)
def divergence_in_float16(given):
    model = nn.Sequential(linear(8, 8), linear(8, 8), linear(8, 1))
    return given.regress(model, draw(4, 8), lr=0.01 if given.is_mended else 10.0)


@case("a fixed loss scale of 2**20", "precision", "scale", loss_scale=2.0**20)
def scale_too_large(given):
    model = nn.Sequential(linear(8, 32), nn.ReLU(), linear(32, 4))
    x, y = draw(8, 8), torch.arange(8) % 4
    return given.start(model, lambda: F.cross_entropy(model(x), y))  # HERE


@case("small gradients at a loss scale of 1", "precision", "scale", loss_scale=1.0, underflow=0.05)
def scale_too_small(given):
    model = nn.Sequential(linear(8, 32, bias=0.1), nn.Tanh(), linear(32, 4, bias=0.1))
    x = draw(8, 8)
    return given.start(model, lambda: model(x).float().square().mean() * 1e-6)  # HERE


# ---- data ------------------------------------------------------------------------------------------------------------


@case("a NaN in the data", "came in", "script")
def nan_in_the_data(given):
    x = draw(4, 8)
    x[2, 3] = 0.0 if given.is_mended else math.nan
    model = nn.Sequential(linear(8, 8), linear(8, 1))
    return given.start(model, lambda: model(x).float().square().mean())  # HERE


@case("an infinite target of a regression", "came in", "script")
def infinite_target(given):
    x, y = draw(4, 8), draw(4, 1)
    y[1] = 0.0 if given.is_mended else math.inf
    model = nn.Sequential(linear(8, 8), linear(8, 1))
    return given.start(model, lambda: F.mse_loss(model(x).float(), y))  # HERE


@case("features of 1e5 without normalization", "precision", "list")
def large_features(given):
    x = draw(4, 8)
    x[:, 0] = 1e5
    model = nn.Sequential(linear(8, 8, 1e-3), nn.ReLU(), linear(8, 1))
    return given.start(model, lambda: model(x).float().square().mean())  # HERE


@case("features of 1e5 that O2 casts", "precision", "list", level="O2")
def large_features_of_a_cast_model(given):
    x = draw(4, 8)
    x[:, 0] = 1e5
    model = nn.Sequential(linear(8, 8, 1e-3), nn.ReLU(), linear(8, 1))
    return given.start(model, lambda: model(x).float().square().mean())  # HERE


@case("an infinite weight in a loaded checkpoint", "came in", "script")
def infinite_weight(given):
    model = nn.Sequential(linear(8, 8), linear(8, 1))
    with torch.no_grad():
        model[1].weight[0, 2] = 0.0 if given.is_mended else math.inf
    x = draw(4, 8)
    return given.start(model, lambda: model(x).float().square().mean())  # HERE


@case("a weight of 1e5, which O2 casts", "came in", "list", level="O2")
def large_weight(given):
    model = nn.Sequential(linear(8, 8), linear(8, 1, 1e-3))
    with torch.no_grad():
        model[0].weight[0, 2] = 1e5
    x = draw(4, 8)
    return given.start(model, lambda: model(x).float().square().mean() * 1e-6)  # HERE


@case("a target distribution with zeros: t * log(t)", "mathematics", "script")
def zero_in_a_target(given):
    target = torch.tensor([[0.5, 0.5, 0.0, 0.0]]).expand(4, 4) + (1e-6 if given.is_mended else 0.0)
    model = nn.Sequential(linear(8, 8), linear(8, 4))
    x = draw(4, 8)

    def loss():
        logp = F.log_softmax(model(x).float(), -1)
        return (target * (torch.log(target) - logp)).sum(-1).mean()  # HERE

    return given.start(model, loss)


# ---- how scripts run -------------------------------------------------------------------------------------------------


@case("an overflow in a checkpointed block", "precision", "list")
def checkpointed(given):
    def inner(x):
        return torch.tanh(x * 1e5)  # HERE

    def run(self, x):
        return checkpoint(lambda h: inner(self.lin(h)), x, use_reentrant=False)

    blocks = [Layer(run, lin=linear(8, 8, 10.0, seed)) for seed in range(2)]
    return given.regress(nn.Sequential(*blocks, linear(8, 1)), draw(4, 8))


@case("an overflow in a compiled model", "precision", "list")
def compiled(given):
    def scale(self, x):
        return torch.tanh(self.lin(x) * 1e6)  # HERE

    model = nn.Sequential(linear(8, 8), Layer(scale, lin=linear(8, 8)), linear(8, 1))
    x = draw(4, 8)
    step = torch.compile(model, backend="eager")
    return given.start(model, lambda: step(x).float().square().mean())


@case("an overflow in a thread that the script starts", "precision", "list")
def in_a_thread(given):
    def scale(self, x):
        return torch.sigmoid(self.lin(x) @ x.T)  # HERE

    model = nn.Sequential(linear(8, 8), Layer(scale, lin=linear(8, 8, 3e4)), linear(4, 1))
    x = draw(4, 8)

    def compute():
        found = []
        thread = threading.Thread(target=lambda: found.append(model(x)))
        thread.start()
        thread.join()
        return found[0].float().square().mean()

    return given.start(model, compute)


@case("a teacher whose features overflow in its own forward, next to a student", "precision", "list")
def teacher_and_student(given):
    def teach(self, x):
        return self.body(x) * self.body(x)  # HERE

    teacher, student, x = Layer(teach, body=linear(8, 8, 100.0)), linear(8, 8), draw(4, 8, factor=5.0)

    def loss():
        with torch.no_grad():
            wanted = teacher(x)
        return (student(x).float() - wanted.float()).square().mean() * 1e-9

    return given.start([student, teacher], loss)


# ---- what is said of them --------------------------------------------------------------------------------------------


class Found(NamedTuple):
    """The first fault that is found in a case, what is to be tried, and the run; the first two None without a fault."""

    fault: FaultRecord | None
    remedy: Remedy | None
    text: str


def find(case, given):
    """Trace a case as it is given."""
    try:
        recording = trace(case.make(given), steps=case.steps, underflow=case.underflow, on_fault="record")
    finally:
        amp.reset()
    fault = next((one for one in recording.of(FaultRecord) if not one.is_search), None)
    if fault is None:
        return Found(None, None, "")
    return Found(fault, find_remedy(fault, recording.run), format_fault(fault, recording.run))


def as_given(case):
    return Given(case.level, case.loss_scale)


def remedied(case, remedy, folder):
    """Yield how a case is to run with its remedy, as it says; of several lists, with each."""
    given = as_given(case)
    if case.helps == "script":
        yield replace(given, is_mended=True)
    elif case.helps == "level":
        yield replace(given, level=remedy.level)
    elif case.helps == "scale":
        yield replace(given, loss_scale=remedy.scale)
    else:
        alternative = replace(remedy, regions=(), ops=remedy.alternative)
        for number, one in enumerate([remedy, alternative] if remedy.alternative else [remedy]):
            path = folder / f"{case.name}-{number}.yaml"
            path.write_text("\n".join([f"extends: {one.extends}", *format_entries(one), ""]))
            yield replace(given, lists=str(path), loss_scale=remedy.scale or given.loss_scale)


def describe(case, found):
    """Return the row of a case in the documentation."""
    remedy = found.remedy
    tried = [f"`{line}`" for line in format_entries(remedy)]
    if remedy.level:
        tried.append(f"{remedy.level}")
    if remedy.scale:
        tried.append(f"loss scale {remedy.scale:g}")
    return f"| {case.about} | {case.level} | {found.fault.cause} | {' and '.join(tried) or 'look at the script'} |"
