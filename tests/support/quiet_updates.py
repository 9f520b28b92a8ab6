"""Scripts whose optimizer changes 16-bit weights by less than half their spacing."""

import torch
from gpt import make_gpt
from quiet_cases import LOST, Layer, LoRA, case, draw, labels, linear, mlp, moved
from torch import nn
from torch.nn import functional as F

import amp_patch as amp


def classify(model, x, y, given):
    """A function that returns the loss of a classifier."""
    return lambda: F.cross_entropy(model(x.to(given.low)).float(), y)


WEIGHTS = ("weight", "bias")


# ---- optimizers ------------------------------------------------------------------------------------------------------


@case("a language model fine-tuned in .bfloat16() by AdamW with a learning rate of 1e-5", LOST, WEIGHTS, rounding=0.15)
def finetuned_language_model(given):
    model = make_gpt(width=32, tokens=40)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    tokens = labels(8 * 17, 40).view(8, 17)
    batch, following = tokens[:, :-1], tokens[:, 1:].flatten()
    return given.start(model, optimizer, lambda: F.cross_entropy(model(batch).flatten(0, 1).float(), following))


@case("an image classifier in bfloat16 under Adam with foreach=True", LOST, WEIGHTS, rounding=0.15)
def classifier_under_foreach(given):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), linear(8 * 36, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-5, foreach=True)
    return given.start(model, optimizer, classify(model, draw(16, 3, 8, 8), labels(16, 4), given))


@case("a network in bfloat16 under AdamW with fused=True", LOST, WEIGHTS, rounding=0.15)
def network_under_fused(given):
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    return given.start(model, optimizer, classify(model, draw(64, 16), labels(64, 4), given))


@case("a convolutional network in bfloat16 under SGD with momentum", LOST, WEIGHTS, steps=4)
def convolutions_under_momentum(given):
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), linear(128, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, nesterov=True)
    return given.start(model, optimizer, classify(model, draw(32, 1, 8, 8), labels(32, 4), given))


@case("a regression in .half() under SGD with foreach=False", LOST, WEIGHTS, low=torch.float16)
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


@case("a policy in bfloat16 under RMSprop", LOST, WEIGHTS, rounding=0.15)
def policy_under_rmsprop(given):
    model = nn.Sequential(linear(8, 32), nn.Tanh(), linear(32, 4))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=7e-6)
    states, actions, returns = draw(128, 8), labels(128, 4), draw(128, seed=3)

    def loss():
        taken = model(states.to(given.low)).float().log_softmax(-1).gather(-1, actions[:, None])[:, 0]
        return -(taken * returns).mean()

    return given.start(model, optimizer, loss)


@case("a network in bfloat16 under Adafactor with a learning rate of 5e-4", LOST, WEIGHTS, rounding=0.15)
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


@case("a network in bfloat16 under an optimizer of the user: Lion", LOST, WEIGHTS, rounding=0.25, lost=0.5)
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
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
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


@case("the end of a cosine schedule in bfloat16: the last learning rates change nothing", LOST, WEIGHTS, steps=8)
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


@case("a network at O3 with a learning rate of 1e-5: no masters", LOST, WEIGHTS, low=torch.float16)
def network_at_o3(given):
    model, x, y = mlp(), draw(64, 16), labels(64, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    weights = list(model.parameters())
    if given.is_float32:
        return lambda: given.descend(F.cross_entropy(model(x), y), optimizer), moved(weights)
    amp.initialize(model, optimizer, opt_level="O2" if given.is_mended else "O3", loss_scale=128.0, verbosity=0)
    if given.is_mended:
        weights = list(amp.master_params(optimizer))
    return lambda: given.take(F.cross_entropy(model(x).float(), y), optimizer), moved(weights)


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


@case("gradients of micro-batches summed in bfloat16, a long one before 120 short ones", LOST, "bias", steps=2, proof=1)
def micro_batches(given):
    model = linear(4, 2).to(given.kept)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x = draw(256 + 120, 4).to(given.kept)

    def step():
        optimizer.zero_grad()
        for micro in x.split([256] + [1] * 120):
            loss = (model(micro).float() + 1.0).sum() / 512
            loss.backward()
        optimizer.step()
        return loss

    return step, lambda: model.bias.grad
