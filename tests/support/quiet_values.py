"""Scripts whose values collapse when they become 16 bits wide, and scripts whose differences cancel in 16 bits."""

import math

import torch
from quiet_cases import CANCELLED, COLLAPSED, Layer, Seen, case, draw, labels, linear, mlp, waves
from torch import nn
from torch.nn import functional as F


def regress(given, model, compute_loss, lr=1e-3):
    """Train a float32 model on a loss that is computed under torch.autocast."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)

    def step():
        with given.autocast():
            loss = compute_loss()
        return given.descend(loss, optimizer)

    return step


# ---- collapsed values ------------------------------------------------------------------------------------------------


@case("positions of 600 tokens that are cast to bfloat16 before their sines", COLLAPSED, lost=0.1, rounding=0.02)
def positions(given):
    model, x, seen = linear(16, 1), draw(2, 600, 16), Seen()

    def loss():
        position = torch.arange(600).to(given.kept)  # HERE
        h = x + seen.keep(waves(position, 16))
        return model(h).float().square().mean()

    return regress(given, model, loss), seen.read


class Denoiser(nn.Module):
    """Predicts noise from a noisy sample and the embedding of its timestep."""

    def __init__(self):
        super().__init__()
        self.time = nn.Sequential(linear(32, 32), nn.SiLU(), linear(32, 32))
        self.first, self.last = linear(16, 32), linear(32, 16)

    def forward(self, x, embedding):
        return self.last(F.silu(self.first(x) + self.time(embedding)))


@case("integer timesteps of a diffusion that are cast to the sample's dtype", COLLAPSED, lost=0.1, rounding=0.02)
def integer_timesteps(given):
    model, x, noise, seen = Denoiser(), draw(64, 16), draw(64, 16, seed=2), Seen()
    timesteps = labels(64, 1000)

    def loss():
        sample = x + noise
        embedding = seen.keep(waves(timesteps.to(given.kept), 32))  # HERE
        return F.mse_loss(model(sample, embedding).float(), noise)

    return regress(given, model, loss), seen.read


@case("timesteps of a flow, from 0 to 1000, cast to bfloat16 before their embedding", COLLAPSED, lost=0.1)
def flow_timesteps(given):
    model, x, noise, seen = Denoiser(), draw(128, 16), draw(128, 16, seed=2), Seen()

    def loss():
        t = torch.sigmoid(draw(128, seed=3))
        timestep = (t * 1000).to(given.kept)  # HERE
        noisy = torch.lerp(x, noise, t[:, None])
        return F.mse_loss(model(noisy, seen.keep(waves(timestep, 32))).float(), noise - x)

    return regress(given, model, loss), seen.read


@case("an arange of 1000 positions in bfloat16", COLLAPSED, lost=0.1, rounding=0.02)
def arange_in_bfloat16(given):
    model, x, seen = nn.Conv1d(8, 1, 3, padding=1), draw(2, 1000, 8), Seen()

    def loss():
        position = torch.arange(1000, dtype=given.kept)  # HERE
        h = x + seen.keep(waves(position, 8))
        return model(h.transpose(1, 2)).float().square().mean()

    return regress(given, model, loss), seen.read


@case("a rotary embedding whose frequencies .bfloat16() casts, over 800 positions", COLLAPSED)
def rotary_frequencies(given):
    def rotate(self, x):
        t = torch.arange(x.shape[-2], dtype=self.inv_freq.dtype)  # HERE
        angles = torch.outer(t, self.inv_freq)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

    def attend(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        seen.keep(self.rotary(torch.ones_like(q)))
        return x + F.scaled_dot_product_attention(self.rotary(q), self.rotary(k), v)

    seen, rotary = Seen(), Layer(rotate)
    frequencies = 10_000.0 ** (-torch.arange(4) / 4)
    rotary.register_buffer("inv_freq", frequencies)
    model = Layer(attend, qkv=linear(8, 24), rotary=rotary).to(given.low)
    if given.is_mended:
        rotary.inv_freq = frequencies
    x = draw(1, 800, 8).to(given.low)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return lambda: given.descend(model(x).float().square().mean(), optimizer), seen.read


@case("Fourier features of coordinates on a grid of 1024 that is cast to bfloat16", COLLAPSED, lost=0.1)
def fourier_features(given):
    model, seen = mlp(20, 32, 3), Seen()
    grid = torch.arange(1024) / 1024 + 1 / 2048
    image = torch.stack([torch.sin(20 * grid), grid, torch.cos(9 * grid)], -1)

    def loss():
        coordinates = grid.to(given.kept)  # HERE
        angles = coordinates.float()[:, None] * (math.pi * 2.0 ** torch.arange(10))
        features = seen.keep(torch.cat([angles.sin(), angles.cos()], -1))
        return F.mse_loss(model(features).float(), image)

    return regress(given, model, loss), seen.read


@case("position ids as the cumulative sum of a bfloat16 mask", COLLAPSED, lost=0.1, rounding=0.02)
def cumulative_positions(given):
    model, table, seen = linear(8, 1), nn.Embedding(704, 8), Seen()
    mask = torch.ones(2, 700, dtype=torch.long)
    mask[1, :100] = 0  # padded on the left

    def loss():
        ids = mask.to(given.kept).cumsum(-1) - 1  # HERE
        ids = seen.keep(ids).clamp(min=0).long()
        return model(table(ids)).float().square().mean()

    model.table = table
    return regress(given, model, loss), lambda: table(seen.read().clamp(min=0).long())


@case("token ids that pass through a bfloat16 batch", COLLAPSED, lost=0.5)
def token_ids(given):
    model, ids, seen = nn.Sequential(nn.Embedding(5000, 8), linear(8, 2)), labels(128, 5000), Seen()
    extra = draw(128, 3)
    y = labels(128, 2, seed=6)

    def loss():
        batch = torch.cat([ids[:, None].to(given.kept), extra.to(given.kept)], -1)  # HERE
        tokens = batch[:, 0].long()
        seen.keep(model[0](tokens))
        return F.cross_entropy(model(tokens).float(), y)

    return regress(given, model, loss), seen.read


@case("a sliding window of attention made from bfloat16 positions", COLLAPSED, lost=0.3)
def sliding_window(given):
    def attend(self, x):
        position = torch.arange(x.shape[1], dtype=given.kept)  # HERE
        distance = position[:, None] - position
        visible = seen.keep((distance >= 0) & (distance < 4))
        q, k, v = self.qkv(x).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible)

    seen = Seen()
    model, x = Layer(attend, qkv=linear(8, 24)), draw(1, 500, 8)
    return regress(given, model, lambda: model(x).float().square().mean()), seen.read


@case("a table of relative positions whose distances are bucketed in bfloat16", COLLAPSED, lost=0.1)
def relative_positions(given):
    table, x, seen = nn.Embedding(600, 2), draw(1, 600, 8), Seen()
    model = linear(8, 2)
    model.table = table

    def loss():
        index = torch.arange(600)
        distance = (index[:, None] - index).clamp(min=0).to(given.kept)  # HERE
        bucket = seen.keep(torch.bucketize(distance.float(), torch.arange(1.0, 600.0)))
        scores = (x[0] @ x[0].T)[..., None] + table(bucket.long())
        return model(scores.softmax(1)[..., 0] @ x[0]).float().square().mean()

    return regress(given, model, loss), lambda: table(seen.read().long())


@case("torch.set_default_dtype(bfloat16), and an arange after it", COLLAPSED, lost=0.1)
def default_dtype(given):
    model, x, seen = linear(8, 1), draw(1, 700, 8), Seen()

    def loss():
        before = torch.get_default_dtype()
        torch.set_default_dtype(given.kept)
        try:
            position = torch.arange(0.0, 700.0)  # HERE
        finally:
            torch.set_default_dtype(before)
        h = x + seen.keep(waves(position, 8))
        return model(h).float().square().mean()

    return regress(given, model, loss), seen.read


@case("the noise levels of a diffusion by a linspace in bfloat16", COLLAPSED, low=torch.bfloat16, lost=0.1)
def noise_levels(given):
    model, x, noise, seen = mlp(17, 32, 16), draw(64, 16), draw(64, 16, seed=2), Seen()
    steps = labels(64, 1000)

    def loss():
        betas = torch.linspace(0.9, 1.0, 1000, dtype=given.kept)  # HERE
        sigma = betas[steps][:, None].float()
        seen.keep(betas.float().diff())
        return F.mse_loss(model(torch.cat([x + sigma * noise, sigma], -1)).float(), noise)

    return regress(given, model, loss), seen.read


@case("coordinates that autocast casts for the first layer of a network of sines", COLLAPSED, lost=0.1)
def network_of_sines(given):
    def run(self, x):
        if given.is_mended:
            with torch.autocast("cpu", enabled=False):
                return torch.sin(30 * self.first(x))
        return torch.sin(30 * self.first(x).float())  # HERE

    seen, first = Seen(), linear(1, 32, 6.0)
    model = nn.Sequential(Layer(run, first=first), linear(32, 1))
    model[0].register_forward_hook(lambda module, args, output: seen.keep(output))
    grid = (torch.arange(1024) / 512 - 1)[:, None]
    return regress(given, model, lambda: F.mse_loss(model(grid).float(), torch.sin(9 * grid))), seen.read


# ---- cancelled differences -------------------------------------------------------------------------------------------


def log_probabilities(logits, tokens):
    return logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]


@case("PPO: the ratio of probabilities whose old logarithms were stored in bfloat16", CANCELLED, steps=3, lost=0.3)
def ratio_of_a_rollout(given):
    policy, states = mlp(16, 32, 64), draw(128, 16)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
    actions, advantages, seen = labels(128, 64), draw(128, seed=4), Seen()
    with torch.no_grad():
        old = log_probabilities(policy(states), actions).to(given.kept)

    def step():
        logp = log_probabilities(policy(states), actions).to(given.kept)
        ratio = torch.exp(logp - old)  # HERE
        seen.keep(ratio.float() - 1)
        clipped = ratio.clamp(0.8, 1.2)
        return given.descend(-torch.min(ratio * advantages, clipped * advantages).mean(), optimizer)

    return step, seen.read


@case("GRPO: the ratio of log-softmaxes over a large vocabulary in bfloat16", CANCELLED, lost=0.4)
def ratio_of_a_vocabulary(given):
    policy = nn.Sequential(nn.Embedding(64, 16), linear(16, 2048, 0.1))
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.05)
    tokens, following, seen = labels(64, 64), labels(64, 2048, seed=6), Seen()
    advantages = draw(64, seed=4)
    old = []

    def step():
        with given.autocast():
            logits = policy(tokens)
        logp = log_probabilities(logits.to(given.kept), following)
        if not old:
            old.append(logp.detach())
        ratio = torch.exp(logp - old[0])  # HERE
        seen.keep(ratio.float() - 1)
        return given.descend(-(ratio.float() * advantages).mean(), optimizer)

    return step, seen.read


@case("DPO: log-probabilities summed over a response in bfloat16, and their difference", CANCELLED, lost=0.3)
def preference_margin(given):
    policy = nn.Sequential(nn.Embedding(64, 16), linear(16, 256, 0.3))
    reference = nn.Sequential(nn.Embedding(64, 16), linear(16, 256, 0.3))
    reference.load_state_dict(policy.state_dict())
    with torch.no_grad():
        policy[1].weight.add_(draw(256, 16, seed=8, factor=0.003))
    prompts = labels(16 * 48, 64).view(16, 48)
    chosen, rejected, seen = labels(768, 256, seed=6).view(16, 48), labels(768, 256, seed=7).view(16, 48), Seen()

    def summed(model, answers):
        return log_probabilities(model(prompts).to(given.kept), answers).sum(-1)

    def loss():
        with torch.no_grad():
            of_reference = summed(reference, chosen) - summed(reference, rejected)
        margin = summed(policy, chosen) - summed(policy, rejected) - of_reference  # HERE
        return -F.logsigmoid(0.1 * seen.keep(margin).float()).mean()

    # Without a region: on a GPU, autocast computes log_softmax in float32.
    optimizer = torch.optim.SGD(policy.parameters(), lr=1e-4)
    return lambda: given.descend(loss(), optimizer), seen.read


@case("temperatures in kelvin that are standardised in bfloat16", CANCELLED, lost=0.2, rounding=0.02)
def standardised_readings(given):
    model, seen = mlp(6, 16, 1), Seen()
    readings = 288 + draw(64, 6) * 1.5

    def loss():
        x = readings.to(given.kept)
        x = (x - x.mean(0)) / x.std(0)  # HERE
        return model(seen.keep(x)).float().square().mean()

    return regress(given, model, loss), seen.read


@case("a hand-written norm: images of low contrast less their mean, in bfloat16", CANCELLED, lost=0.1, rounding=0.02)
def images_less_their_mean(given):
    def normalise(self, x):
        x = x.to(given.kept)
        return seen.keep((x - x.mean((2, 3), keepdim=True)) / 4)  # HERE

    seen = Seen()
    images = (201 + draw(8, 3, 8, 8) * 1.5).round().clamp(0, 255).to(torch.uint8)
    model = nn.Sequential(Layer(normalise), nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), linear(144, 2))
    y = labels(8, 2)
    return regress(given, model, lambda: F.cross_entropy(model(images).float(), y)), seen.read


@case("a variance as E[x^2] - E[x]^2 in bfloat16", CANCELLED, lost=0.3)
def variance_of_squares(given):
    def normalise(self, x):
        x = x.to(given.kept)
        variance = (x * x).mean(-1, keepdim=True) - x.mean(-1, keepdim=True) ** 2  # HERE
        seen.keep(variance)
        return (x - x.mean(-1, keepdim=True)) * (variance.clamp(min=0) + 1.0).rsqrt()

    seen = Seen()
    model = nn.Sequential(linear(16, 16, bias=12.0), Layer(normalise), linear(16, 1))
    x = draw(32, 16)
    return regress(given, model, lambda: model(x).float().square().mean()), seen.read


@case("distances of near points as a^2 + b^2 - 2ab in float16", CANCELLED, low=torch.float16, lost=0.2)
def pairwise_distances(given):
    encoder, seen = linear(8, 16), Seen()
    optimizer = torch.optim.SGD(encoder.parameters(), lr=1e-3)
    x = torch.cat([draw(1, 8, factor=6.0) + draw(16, 8, seed=2, factor=0.02) for _ in range(2)])
    x[16:] += draw(16, 8, seed=3, factor=0.02)

    def step():
        with given.autocast():
            z = encoder(x)
        z = z.to(given.kept)
        squares = (z * z).sum(-1)
        distance = squares[:, None] + squares - 2 * z @ z.T  # HERE
        seen.keep(distance[:16, 16:])
        return given.descend((distance.float().clamp(min=0) + 0.01).sqrt().mean(), optimizer)

    return step, seen.read


@case("one less the cosine of two views that are nearly alike, in bfloat16", CANCELLED, lost=0.2, rounding=0.15)
def distance_of_views(given):
    encoder, seen = mlp(16, 32, 32), Seen()
    x = draw(32, 16)
    near = x + draw(32, 16, seed=2, factor=0.08)

    def loss():
        online, target = (F.normalize(encoder(view).float(), dim=-1) for view in (x, near))
        cosine = (online.to(given.kept) * target.to(given.kept)).sum(-1)
        return seen.keep(1 - cosine).float().mean()  # HERE

    return regress(given, encoder, loss), seen.read


@case("a derivative as (f(x + h) - f(x)) / h in float16", CANCELLED, low=torch.float16, lost=0.2, rounding=0.05)
def finite_difference(given):
    field, seen = nn.Sequential(linear(1, 32), nn.Tanh(), linear(32, 1, bias=4.0)), Seen()
    optimizer = torch.optim.SGD(field.parameters(), lr=1e-3)
    x = torch.linspace(1, 2, 32)[:, None]

    def step():
        u, moved = field(x).to(given.kept), field(x + 1e-3).to(given.kept)
        slope = (moved - u) / 1e-3  # HERE
        return given.descend((seen.keep(slope).float() + u.float()).square().mean(), optimizer)

    return step, seen.read


@case("the logarithm of one plus a small rate, in bfloat16", CANCELLED, lost=0.3)
def logarithm_of_one_plus(given):
    model, x, seen = linear(8, 4, bias=-6.5), draw(64, 8, factor=0.2), Seen()

    def loss():
        rate = model(x).exp().to(given.kept)
        return seen.keep(torch.log(1 + rate)).float().mean()  # HERE

    return regress(given, model, loss), seen.read


@case("the opacity of thin samples, 1 - exp(-density * delta), in bfloat16", CANCELLED, lost=0.3)
def opacity_of_thin_samples(given):
    field, points, seen = mlp(8, 16, 1), draw(64, 8), Seen()

    def loss():
        depth = F.softplus(field(points)).to(given.kept) * 0.002
        opacity = 1 - torch.exp(-depth)  # HERE
        return (seen.keep(opacity).float() - 0.01).square().mean()

    return regress(given, field, loss), seen.read
