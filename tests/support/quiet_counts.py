"""Scripts that lose updates beside those of weights: averages of weights, statistics and counts in 16 bits."""

import math

import torch
from quiet_cases import LOST, Layer, case, copy_of, draw, labels, linear, mlp, moved
from torch import nn
from torch.nn import functional as F
from torch.optim import swa_utils

# ---- averages of weights ---------------------------------------------------------------------------------------------


def averaged(given, update):
    """Train a model in float32 and let `update(averages, weights)` average its weights after each step."""
    model, x, y = mlp(), draw(64, 16), labels(64, 4)
    average = copy_of(model, given.kept)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step():
        with given.autocast():
            loss = F.cross_entropy(model(x), y)
        given.descend(loss, optimizer)
        with torch.no_grad():
            for e, p in zip(average.parameters(), model.parameters(), strict=True):
                update(e, p.to(e.dtype))
        return loss

    return step, moved(average)


@case("an average of weights in bfloat16 by mul_ and add_", LOST, rounding=0.2)
def average_by_mul_and_add(given):
    return averaged(given, lambda e, p: e.mul_(0.9995).add_(p, alpha=0.0005))  # HERE


@case("an average of weights in float16 by lerp_", LOST, low=torch.float16)
def average_by_lerp(given):
    return averaged(given, lambda e, p: e.lerp_(p, 0.0001))  # HERE


@case("an average of weights in bfloat16 by sub_", LOST, rounding=0.2)
def average_by_sub(given):
    return averaged(given, lambda e, p: e.sub_((1 - 0.999) * (e - p)))  # HERE


@case("a momentum encoder in bfloat16 by copy_", LOST, rounding=0.2)
def average_by_copy(given):
    return averaged(given, lambda e, p: e.data.copy_(0.999 * e.data + 0.001 * p.data))  # HERE


@case("an average of a state_dict in bfloat16 that is bound anew at each step", LOST, rounding=0.2)
def average_bound_anew(given):
    model, x, y = mlp(), draw(64, 16), labels(64, 4)
    ema = {name: value.to(given.kept, copy=True) for name, value in model.state_dict().items()}
    start = {name: value.float() for name, value in ema.items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step():
        with given.autocast():
            loss = F.cross_entropy(model(x), y)
        given.descend(loss, optimizer)
        for name, value in model.state_dict().items():
            ema[name] = 0.999 * ema[name] + 0.001 * value.to(ema[name].dtype)  # HERE
        return loss

    return step, lambda: torch.cat([(ema[name].float() - start[name]).flatten() for name in ema])


@case("torch's AveragedModel of a bfloat16 model", LOST, steps=4)
def average_by_swa_utils(given):
    model, x, y = mlp(), draw(64, 16), labels(64, 4)
    model.to(given.low)
    average = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9995)).to(given.kept)
    average.update_parameters(model)  # the first is a copy
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def step():
        loss = given.descend(F.cross_entropy(model(x.to(given.low)).float(), y), optimizer)
        average.update_parameters(copy_of(model, given.kept))  # HERE
        return loss

    return step, moved(average.module)


@case("an average of weights in bfloat16 by `torch._foreach_lerp_`", LOST, rounding=0.2)
def average_of_all_at_once(given):
    model, x, y = mlp(), draw(64, 16), labels(64, 4)
    average = copy_of(model, given.kept)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step():
        with given.autocast():
            loss = F.cross_entropy(model(x), y)
        given.descend(loss, optimizer)
        weights = [p.detach().to(given.kept) for p in model.parameters()]
        torch._foreach_lerp_(list(average.parameters()), weights, 0.001)  # HERE
        return loss

    return step, moved(average)


# ---- statistics and counts -------------------------------------------------------------------------------------------


@case("running statistics of a batch norm in bfloat16 with a momentum of 0.001", LOST, "running_", steps=6)
def running_statistics(given):
    norm = nn.BatchNorm1d(16, momentum=0.001, affine=False).to(given.kept)

    def run(self, x):
        h = self.norm(self.first(x).to(given.kept))
        return self.last(torch.relu(h).float())

    net = Layer(run, first=linear(8, 16, bias=1.0), norm=norm, last=linear(16, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    x, y = draw(64, 8) * 2 + 1, labels(64, 2)

    def step():
        with given.autocast():
            loss = F.cross_entropy(net(x).float(), y)
        return given.descend(loss, optimizer)

    return step, moved([norm.running_var])


@case("the observations' mean and variance in float16, moved by 1/n", LOST, "obs_", low=torch.float16, steps=4)
def observation_statistics(given):
    policy = linear(6, 2)
    policy.register_buffer("obs_mean", torch.full((6,), 3.0, dtype=given.kept))
    policy.register_buffer("obs_var", torch.ones(6, dtype=given.kept))
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
    count = [200_000]

    def step():
        obs = draw(64, 6, seed=count[0]) + 6
        count[0] += 64
        with torch.no_grad():
            policy.obs_mean += ((obs.mean(0) - policy.obs_mean.float()) * (64 / count[0])).to(given.kept)
            policy.obs_var.lerp_(obs.var(0).to(given.kept), 64 / count[0])
        scaled = (obs - policy.obs_mean.float()) / (policy.obs_var.float().sqrt() + 1e-5)
        return given.descend(policy(scaled).square().mean(), optimizer)

    return step, moved([policy.obs_mean])


@case("tokens counted in bfloat16, in place", LOST)
def token_count(given):
    model = nn.Sequential(nn.Embedding(32, 16), linear(16, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.tensor(4096.0, dtype=given.kept)
    start = tokens.clone()
    batch = labels(8, 32)

    def step():
        loss = given.descend(F.cross_entropy(model(batch), (batch + 1) % 32), optimizer)
        tokens.add_(batch.numel())  # HERE
        return loss

    return step, lambda: tokens.float() - start


@case("the sum of losses in float16, bound anew at each step", LOST, low=torch.float16, steps=4)
def loss_total(given):
    model, x, y = mlp(), draw(64, 16), labels(64, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    start = torch.tensor(3000.0, dtype=given.kept)  # of the steps before, from a checkpoint
    total = [start]

    def step():
        with given.mixed():
            losses = F.cross_entropy(model(x), y, reduction="none")
        loss = given.descend(losses.mean() / 2, optimizer)
        total[0] = total[0] + loss.detach().to(given.kept)  # HERE
        return loss

    return step, lambda: total[0].float() - start.float()


@case("the degrees of a graph in bfloat16 by index_add_ of ones: a hub has no more than 256 neighbours", LOST)
def degree_of_a_hub(given):
    layer = linear(8, 8)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    x = draw(500, 8)
    target = torch.cat([torch.zeros(450, dtype=torch.long), torch.arange(50)])
    seen = []

    def step():
        ones = torch.ones(500, dtype=given.kept)
        degree = torch.zeros(50, dtype=given.kept).index_add_(0, target, ones)  # HERE
        summed = torch.zeros(50, 8).index_add(0, target, layer(x))
        seen[:] = [degree]
        return given.descend((summed / degree[:, None]).square().mean(), optimizer)

    return step, lambda: seen[0][:1]


@case("a histogram of actions in bfloat16 by scatter_add_, kept over steps", LOST, steps=4)
def histogram_of_actions(given):
    policy = linear(8, 4)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
    histogram = torch.full((4,), 512.0, dtype=given.kept)
    states = draw(4, 8)

    def step():
        logits = policy(states)
        taken = logits.argmax(-1).remainder(4)
        bonus = histogram.float().rsqrt()[taken]
        histogram.scatter_add_(0, torch.arange(4), torch.ones(4, dtype=given.kept))  # HERE
        return given.descend(-(logits.log_softmax(-1).gather(1, taken[:, None])[:, 0] * bonus).mean(), optimizer)

    return step, lambda: histogram.float() - 512


@case("visits of states counted in bfloat16 by index_put_ with accumulate", LOST, steps=5)
def visits_of_states(given):
    value = nn.Embedding(16, 1)
    optimizer = torch.optim.SGD(value.parameters(), lr=0.1)
    visits = torch.zeros(16, dtype=given.kept)
    states = torch.cat([torch.zeros(100, dtype=torch.long), labels(28, 16)])

    def step():
        visits.index_put_((states,), torch.ones(128, dtype=given.kept), accumulate=True)  # HERE
        bonus = (visits[states].float() + 1).rsqrt()
        return given.descend((value(states)[:, 0] - bonus).square().mean(), optimizer)

    return step, lambda: visits[:1]


@case("the sizes of the clusters of a codebook in bfloat16, a buffer, with a decay of 0.999", LOST, "cluster_size")
def codebook_sizes(given):
    encoder, codes = linear(8, 4), draw(16, 4, seed=9)
    encoder.register_buffer("cluster_size", torch.full((16,), 20.0, dtype=given.kept))
    optimizer = torch.optim.Adam(encoder.parameters(), lr=1e-3)
    x = draw(64, 8)
    start = encoder.cluster_size.float().clone()

    def step():
        z = encoder(x)
        nearest = torch.cdist(z.detach(), codes).argmin(-1)
        sizes = F.one_hot(nearest, 16).sum(0).to(given.kept)
        encoder.cluster_size.mul_(0.999).add_(sizes, alpha=0.001)
        return given.descend((z - codes[nearest]).square().mean(), optimizer)

    return step, lambda: encoder.cluster_size.float() - start


@case("a learning rate in a bfloat16 tensor that is multiplied by 0.999 at each step", LOST, steps=6)
def learning_rate_tensor(given):
    model, x, y = mlp(), draw(64, 16), labels(64, 4)
    lr = torch.tensor(math.sqrt(0.01), dtype=given.kept)
    start = lr.float().clone()

    def step():
        with given.autocast():
            loss = F.cross_entropy(model(x), y)
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= lr.float() * p.grad
            lr.mul_(0.999)  # HERE
        return loss

    return step, lambda: lr.float() / start - 1


@case("uses of a memory's rows in bfloat16: usage[rows] += 1", LOST, steps=4)
def usage_of_a_memory(given):
    memory, x = draw(32, 8), draw(8, 8)
    model = linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    usage = torch.full((32,), 300.0, dtype=given.kept)  # from a checkpoint

    def step():
        similar = model(x) @ memory.T
        rows = torch.arange(8) * 4
        usage[rows] += 1  # HERE
        weights = (similar - (usage / usage.sum()).float()).softmax(-1)
        return given.descend((weights @ memory - x).square().mean(), optimizer)

    return step, lambda: usage.float() - 300


class Meter(nn.Module):
    """A layer that counts what it has seen in a buffer."""

    def __init__(self, dtype):
        super().__init__()
        self.layer = linear(8, 4)
        self.register_buffer("frames_seen", torch.tensor(100_000.0, dtype=dtype))

    def forward(self, x):
        self.frames_seen = self.frames_seen + x.shape[0]
        return self.layer(x)


@case("frames counted by a buffer in bfloat16 that is bound anew", LOST, "frames_seen", steps=4)
def frames_of_a_buffer(given):
    model, x = nn.Sequential(Meter(given.kept), nn.Tanh(), linear(4, 1)), draw(64, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    start = model[0].frames_seen.float().clone()
    return (
        lambda: given.descend(model(x).square().mean(), optimizer),
        lambda: model[0].frames_seen.float() - start,
    )


@case("the sum of rewards in bfloat16 by torch.add with out=", LOST, steps=4)
def sum_of_rewards(given):
    policy, states = linear(8, 4), draw(16, 8)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
    returned = torch.full((16,), 500.0, dtype=given.kept)

    def step():
        logp = policy(states).log_softmax(-1)
        reward = logp.detach().exp().amax(-1).to(given.kept)
        torch.add(returned, reward, out=returned)  # HERE
        return given.descend(-(logp.amax(-1) * reward).float().mean(), optimizer)

    return step, lambda: returned.float() - 500
