"""Scripts that lose updates: a weight, an average or a count in 16 bits is changed by less than half its spacing."""

import math

import torch
from gpt import make_gpt
from quiet_cases import LOST, Layer, case, copy_of, draw, linear, moved
from torch import nn
from torch.nn import functional as F
from torch.optim import swa_utils


def mlp(inputs=16, width=32, outputs=4, seed=0):
    return nn.Sequential(linear(inputs, width, seed=seed), nn.GELU(), linear(width, outputs, seed=seed + 1))


def classify(model, x, y, given):
    """A function that returns the loss of a classifier."""
    return lambda: F.cross_entropy(model(x.to(given.low)).float(), y)


def labels(count, classes, seed=5):
    return torch.randint(classes, (count,), generator=torch.Generator().manual_seed(seed))


# ---- optimizers ------------------------------------------------------------------------------------------------------


@case("a language model fine-tuned in .bfloat16() by AdamW with a learning rate of 1e-5", LOST, "weight", rounding=0.15)
def finetuned_language_model(given):
    model = make_gpt(width=32, tokens=40)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    tokens = labels(8 * 17, 40).view(8, 17)
    batch, following = tokens[:, :-1], tokens[:, 1:].flatten()
    return given.start(model, optimizer, lambda: F.cross_entropy(model(batch).flatten(0, 1).float(), following))


@case("an image classifier in bfloat16 under Adam with foreach=True", LOST, "weight", rounding=0.15)
def classifier_under_foreach(given):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), linear(8 * 36, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-5, foreach=True)
    return given.start(model, optimizer, classify(model, draw(16, 3, 8, 8), labels(16, 4), given))


@case("a network in bfloat16 under AdamW with fused=True", LOST, "weight", rounding=0.15)
def network_under_fused(given):
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    return given.start(model, optimizer, classify(model, draw(64, 16), labels(64, 4), given))


@case("a convolutional network in bfloat16 under SGD with momentum", LOST, "weight", steps=4)
def convolutions_under_momentum(given):
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), linear(128, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, nesterov=True)
    return given.start(model, optimizer, classify(model, draw(32, 1, 8, 8), labels(32, 4), given))


@case("a regression in .half() under SGD with foreach=False", LOST, "weight", low=torch.float16)
def regression_in_half(given):
    model, x = mlp(outputs=1), draw(64, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=2e-5, foreach=False)
    return given.start(model, optimizer, lambda: (model(x.to(given.low)).float()[:, 0] - x[:, 0]).square().mean())


@case("the table of a recommender in bfloat16 under Adagrad", LOST, ("users.weight", "films.weight"), steps=4)
def recommender_under_adagrad(given):
    def score(self, pairs):
        return (self.users(pairs[:, 0]) * self.films(pairs[:, 1])).float().sum(-1) / 4

    model = Layer(score, users=nn.Embedding(50, 16), films=nn.Embedding(80, 16))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=2e-3)
    pairs, rating = torch.stack([labels(64, 50), labels(64, 80, seed=6)], 1), draw(64)
    return given.start(model, optimizer, lambda: F.mse_loss(model(pairs), rating))


@case("a policy in bfloat16 under RMSprop", LOST, "weight", rounding=0.15)
def policy_under_rmsprop(given):
    model = nn.Sequential(linear(8, 32), nn.Tanh(), linear(32, 4))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=7e-6)
    states, actions, returns = draw(128, 8), labels(128, 4), draw(128, seed=3)

    def loss():
        taken = model(states.to(given.low)).float().log_softmax(-1).gather(-1, actions[:, None])[:, 0]
        return -(taken * returns).mean()

    return given.start(model, optimizer, loss)


@case("a matrix factorised by Adafactor in bfloat16, with a learning rate of 5e-4", LOST, "weight", rounding=0.15)
def network_under_adafactor(given):
    model = mlp(width=64)
    optimizer = torch.optim.Adafactor(model.parameters(), lr=5e-4)
    return given.start(model, optimizer, classify(model, draw(64, 16), labels(64, 4), given))


class Lion(torch.optim.Optimizer):
    """Lion, as scripts write it: the sign of a mixed momentum."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                momentum = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
                direction = momentum.mul(0.9).add(weight.grad, alpha=0.1).sign_()
                weight.add_(direction, alpha=-group["lr"])
                momentum.lerp_(weight.grad, 0.01)


@case("a network in bfloat16 under an optimizer of the user: Lion", LOST, "weight", rounding=0.25, lost=0.5)
def network_under_lion(given):
    model = mlp()
    optimizer = Lion(model.parameters(), lr=1e-5)
    return given.start(model, optimizer, classify(model, draw(64, 16), labels(64, 4), given))


@case("SGD written by hand under no_grad, in bfloat16: p -= lr * p.grad", LOST)
def descent_by_hand(given):
    model, x, y = mlp().to(given.kept), draw(64, 16), labels(64, 4)

    def step():
        with given.mixed():
            loss = F.cross_entropy(model(x.to(given.kept)).float(), y)
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 1e-3 * p.grad  # HERE
        return loss

    return step, moved(model)


@case("SGD written by hand through .data, in bfloat16: p.data.add_", LOST)
def descent_through_data(given):
    model = nn.LSTM(8, 16, batch_first=True).to(given.kept)
    x = draw(8, 10, 8)

    def step():
        with given.mixed():
            loss = (model(x.to(given.kept))[0].float().sum(-1) - x[..., 0]).square().mean()
        model.zero_grad()
        loss.backward()
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-2e-4)  # HERE
        return loss

    return step, moved(model)


class LoRA(nn.Module):
    """A frozen float32 layer and two trained factors in another dtype."""

    def __init__(self, base, rank, dtype):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Parameter(draw(rank, base.in_features, seed=7, factor=0.25).to(dtype))
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank, dtype=dtype))

    def forward(self, x):
        return self.base(x) + (x.to(self.lora_a.dtype) @ self.lora_a.T @ self.lora_b.T).to(x.dtype)


@case("LoRA factors in bfloat16 beside a float32 base", LOST, "lora_a", steps=6, proof=12, rounding=0.15)
def lora_factors(given):
    model = nn.Sequential(LoRA(linear(16, 32), 4, given.kept), nn.GELU(), LoRA(linear(32, 4), 4, given.kept))
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    x, y = draw(64, 16), labels(64, 4)
    return (
        lambda: given.descend(F.cross_entropy(model(x), y), optimizer),
        moved([weight for weight in trained if weight.shape[0] == 4 and weight.shape[1] > 4]),
    )


@case("a float32 model whose head was loaded in bfloat16", LOST, "head.weight", rounding=0.15)
def head_in_bfloat16(given):
    def run(self, x):
        return self.head(torch.relu(self.body(x)).to(self.head.weight.dtype)).float()

    model = Layer(run, body=linear(16, 32), head=linear(32, 4).to(given.kept))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    x, y = draw(64, 16), labels(64, 4)
    return lambda: given.descend(F.cross_entropy(model(x), y), optimizer), moved(model.head)


@case("weight decay that is never applied in bfloat16, while the gradient part is kept", LOST, "table.weight", steps=4)
def weight_decay(given):
    model = Layer(lambda self, rows: self.head(self.table(rows)), table=nn.Embedding(400, 8), head=linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    rows, y = labels(32, 20), labels(32, 2, seed=6)
    run, _ = given.start(model, optimizer, lambda: F.cross_entropy(model(rows).float(), y))
    weight = optimizer.param_groups[0]["params"][0]  # the master, if there is one
    unused = moved([weight])
    return run, lambda: unused().view(400, 8)[20:]


@case("Adam's second moment in bfloat16: it never falls after a spike", LOST, "exp_avg_sq", steps=5, rounding=0.15)
def second_moment(given):
    model = linear(16, 4, 0.01).to(given.kept)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, betas=(0.9, 0.999))
    x, y, factors = draw(64, 16), labels(64, 4), iter([100.0])
    spike = []

    def step():
        factor = next(factors, 0.01)
        with given.mixed():
            loss = factor * F.cross_entropy(model(x.to(given.kept)).float(), y)
        given.descend(loss, optimizer)
        if not spike:
            spike.append(moved([optimizer.state[weight]["exp_avg_sq"] for weight in model.parameters()]))
        return loss

    return step, lambda: spike[0]()


@case("the end of a cosine schedule in bfloat16: the last learning rates change nothing", LOST, "weight", steps=8)
def end_of_a_schedule(given):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    optimizer.param_groups[0]["initial_lr"] = 0.5
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2000, last_epoch=1990)
    run, measure = given.start(model, optimizer, classify(model, draw(64, 16), labels(64, 4), given))

    def step():
        loss = run()
        schedule.step()
        return loss

    return step, measure


@case("the temperature of an actor-critic, a bfloat16 scalar under Adam", LOST)
def entropy_temperature(given):
    actor, states = linear(8, 4), draw(64, 8)
    log_alpha = torch.tensor(1.0, dtype=given.kept, requires_grad=True)
    optimizer = torch.optim.Adam([log_alpha], lr=3e-4)

    def step():
        logp = actor(states).log_softmax(-1).detach()
        entropy = -(logp.exp() * logp).sum(-1)
        loss = (log_alpha.float().exp() * (entropy - 0.5)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()  # HERE
        return loss

    return step, moved([log_alpha])


@case("gradients of 600 micro-batches that are summed in bfloat16", LOST, "bias", steps=2, proof=1)
def micro_batches(given):
    model = linear(4, 2).to(given.kept)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x = draw(600, 4).to(given.kept)

    def step():
        optimizer.zero_grad()
        for micro in x.split(1):
            loss = (model(micro).float() + 1.0).sum() / 600
            loss.backward()
        optimizer.step()
        return loss

    return step, lambda: model.bias.grad


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


# ---- statistics and counts -------------------------------------------------------------------------------------------


@case("running statistics of a batch norm in a .bfloat16() model with a momentum of 0.001", LOST, "running_", steps=6)
def running_statistics(given):
    net = nn.Sequential(linear(8, 16, bias=1.0), nn.BatchNorm1d(16, momentum=0.001), nn.ReLU(), linear(16, 2))
    net.to(given.low)
    if given.is_mended:
        net[1].float()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    x, y = draw(64, 8), labels(64, 2)

    def step():
        h = net[0]((x * 2 + 1).to(given.low)).to(net[1].weight.dtype)
        logits = net[3](torch.relu(net[1](h)).to(given.low))
        return given.descend(F.cross_entropy(logits.float(), y), optimizer)

    return step, moved([net[1].running_var])


@case("the observations' mean and variance in float16, moved by 1/n", LOST, "obs_mean", low=torch.float16, steps=4)
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
