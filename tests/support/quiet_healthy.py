"""Scripts that train in 16 bits as they should: what a careless detector cries wolf at. More: quiet_healthy_data.py."""

import torch
from gpt import make_gpt
from quiet_cases import Layer, Seen, copy_of, draw, gradients_of, healthy, labels, linear, mlp, moved
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import amp_patch as amp


def regress(given, model, compute_loss, optimizer=None):
    """Train a float32 model on a loss that is computed under torch.autocast. Measures the gradients."""
    if optimizer is None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step():
        with given.autocast():
            loss = compute_loss()
        return given.descend(loss, optimizer)

    return step, gradients_of(model)


def classify(given, model, lr=1e-3):
    """Train a classifier of 64 points under torch.autocast."""
    x, y = draw(64, 16), labels(64, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    return regress(given, model, lambda: F.cross_entropy(model(x).float(), y), optimizer)


# ---- mixed precision as it should be ---------------------------------------------------------------------------------


def in_session(given, level):
    """Train a language model at a level."""
    model = make_gpt(width=16, tokens=40)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    if not given.is_float32:
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    tokens = labels(8 * 17, 40).view(8, 17)

    def step():
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
        return given.descend(loss, optimizer) if given.is_float32 else given.take(loss, optimizer)

    return step


@healthy("a language model at O1", low=torch.float16)
def session_at_o1(given):
    return in_session(given, "O1")


@healthy("a language model at O2: float32 masters, and a learning rate of 1e-5", low=torch.float16)
def session_at_o2(given):
    return in_session(given, "O2")


@healthy("a language model at O4")
def session_at_o4(given):
    return in_session(given, "O4")


@healthy("a language model at O5: float32 masters, and a learning rate of 1e-5")
def session_at_o5(given):
    return in_session(given, "O5")


@healthy("a network under bfloat16 autocast with a learning rate of 1e-5")
def autocast_in_bfloat16(given):
    return classify(given, mlp(), lr=1e-5)


def with_scaler(given, init_scale):
    model, x, y = mlp(), draw(64, 16), labels(64, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=3, enabled=not given.is_float32)

    def step():
        optimizer.zero_grad()
        with given.autocast():
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss

    return step


@healthy("a network under float16 autocast with a GradScaler whose scale grows", low=torch.float16, steps=8)
def autocast_with_scaler(given):
    return with_scaler(given, 2.0**12)


@healthy("a GradScaler that searches its scale from 2**24 down", low=torch.float16, steps=10)
def scaler_that_searches(given):
    return with_scaler(given, 2.0**24)


@healthy("a recomputed block under bfloat16 autocast")
def recomputed_block(given):
    def run(self, x):
        return x + checkpoint(self.inner, x, use_reentrant=False)

    return classify(given, nn.Sequential(Layer(run, inner=mlp(16, 32, 16)), linear(16, 4)))


# ---- weights, averages and counts in 16 bits that are kept -----------------------------------------------------------


@healthy("a .bfloat16() model under Adam with a learning rate of 0.02, whose updates are kept", rounding=0.15)
def large_updates(given):
    model = mlp().to(given.low)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02, betas=(0.9, 0.95))
    x, y = draw(64, 16).to(given.low), labels(64, 4)
    return lambda: given.descend(F.cross_entropy(model(x).float(), y), optimizer), moved(model)


@healthy("a .bfloat16() model whose warmup begins with a learning rate of zero", rounding=0.15)
def warmup_from_zero(given):
    model = mlp().to(given.low)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: min(count, 1.0))
    x, y = draw(64, 16).to(given.low), labels(64, 4)

    def step():
        loss = given.descend(F.cross_entropy(model(x).float(), y), optimizer)
        schedule.step()
        return loss

    return step, moved(model)


@healthy("a perceptron in bfloat16 that has converged: the loss and all gradients are zero")
def converged_perceptron(given):
    model = linear(8, 1).to(given.low)
    x = draw(64, 8).to(given.low)
    with torch.no_grad():
        y = model(x).sign()
        model.weight.mul_(64)
        model.bias.mul_(64)
        x = x[model(x).abs()[:, 0] > 2]
        y = model(x).sign()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return lambda: given.descend(F.relu(1 - y * model(x)).float().mean(), optimizer), moved(model)


@healthy("SGD that has converged under bfloat16 autocast: small residuals are left", rounding=0.15)
def converged_descent(given):
    model = nn.Sequential(linear(8, 4, bias=0.5))
    x = draw(64, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        target = model(x) + 0.1 * draw(64, 4, seed=4)
    return regress(given, model, lambda: F.mse_loss(model(x).float(), target), optimizer)


@healthy("an average of weights in float32 of a .bfloat16() model", steps=4, rounding=0.15)
def average_in_float32(given):
    model, x, y = mlp().to(given.low), draw(64, 16).to(given.low), labels(64, 4)
    average = copy_of(model, torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def step():
        loss = given.descend(F.cross_entropy(model(x).float(), y), optimizer)
        with torch.no_grad():
            for e, p in zip(average.parameters(), model.parameters(), strict=True):
                e.lerp_(p.float(), 0.001)
        return loss

    return step, moved(average)


@healthy("a target network in bfloat16 that is copied hard every two steps", steps=5)
def target_copied_hard(given):
    model, x = mlp(8, 32, 1), draw(64, 8)
    target = copy_of(model, given.low)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    count = [0]

    def step():
        with given.autocast(), torch.no_grad():
            goal = x[:, :1] + 0.9 * target(x.to(given.low)).float()
        with given.autocast():
            loss = F.mse_loss(model(x).float(), goal)
        given.descend(loss, optimizer)
        count[0] += 1
        if count[0] % 2 == 0:
            target.load_state_dict(model.state_dict())
        return loss

    return step


@healthy("a batch norm in float32 in a .bfloat16() model, with a momentum of 0.001", rounding=0.02, steps=5)
def batch_norm_in_float32(given):
    net = nn.Sequential(linear(8, 16), nn.BatchNorm1d(16, momentum=0.001), nn.ReLU(), linear(16, 2))
    net.to(given.low)
    net[1].float()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02, betas=(0.9, 0.95))
    x, y = (draw(64, 8) * 2 + 1).to(given.low), labels(64, 2)

    def step():
        h = net[1](net[0](x).float()).relu()
        return given.descend(F.cross_entropy(net[3](h.to(given.low)).float(), y), optimizer)

    return step, moved([net[1].running_var])


@healthy("counts of experts' tokens in bfloat16 that stay below 256", steps=3)
def small_counts(given):
    gate, x, seen = linear(8, 4), draw(64, 8), Seen()

    def loss():
        chosen = gate(x).argmax(-1)
        load = torch.zeros(4, dtype=given.low).index_add_(0, chosen, torch.ones(64, dtype=given.low))
        seen.keep(load)
        return (gate(x).float().softmax(-1).mean(0) * load.float() / 64).sum() * 4

    return regress(given, gate, loss)


@healthy("masters in float32 that a script keeps by hand beside a .bfloat16() model", steps=5, rounding=0.1)
def masters_by_hand(given):
    model, x, y = mlp().to(given.low), draw(64, 16).to(given.low), labels(64, 4)
    masters = [weight.detach().float().clone() for weight in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.01)

    def step():
        loss = F.cross_entropy(model(x).float(), y)
        model.zero_grad()
        loss.backward()
        for master, weight in zip(masters, model.parameters(), strict=True):
            master.grad = weight.grad.float()
        optimizer.step()
        with torch.no_grad():
            for master, weight in zip(masters, model.parameters(), strict=True):
                weight.copy_(master)
        return loss

    return step, moved(masters)


@healthy("gradients of four micro-batches that are summed in bfloat16", rounding=0.05)
def few_micro_batches(given):
    model = mlp().to(given.low)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02, betas=(0.9, 0.95))
    x, y = draw(64, 16).to(given.low), labels(64, 4)

    def step():
        optimizer.zero_grad()
        for micro, targets in zip(x.split(16), y.split(16), strict=True):
            loss = F.cross_entropy(model(micro).float(), targets) / 4
            loss.backward()
        optimizer.step()
        return loss

    return step, gradients_of(model)


@healthy("running statistics in bfloat16 with the default momentum of 0.1", rounding=0.02)
def batch_norm_of_large_momentum(given):
    net = nn.Sequential(linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), linear(16, 2)).to(given.low)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02, betas=(0.9, 0.95))
    x, y = (draw(64, 8) * 3 + 1).to(given.low), labels(64, 2)
    measure = moved([net[1].running_var])
    return lambda: given.descend(F.cross_entropy(net(x).float(), y), optimizer), measure


@healthy("a .bfloat16() model whose updates are kept in compensations, as of Kahan's sum", steps=6, rounding=0.1)
def compensated_updates(given):
    model, x, y = mlp().to(given.low), draw(64, 16).to(given.low), labels(64, 4)
    weights = list(model.parameters())
    rests = [torch.zeros_like(weight) for weight in weights]

    def step():
        loss = F.cross_entropy(model(x).float(), y)
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for weight, rest in zip(weights, rests, strict=True):
                rest.add_(weight.grad, alpha=-1e-2)
                before = weight.clone()
                weight.add_(rest)
                rest.add_(before.sub_(weight))
        return loss

    of_weights, of_rests = moved(weights), moved(rests)
    return step, lambda: of_weights() + of_rests()


@healthy("a .bfloat16() model whose updates are rounded at random, so that their mean is kept", steps=4)
def updates_rounded_at_random(given):
    model, x, y = mlp().to(given.low), draw(64, 16).to(given.low), labels(64, 4)

    def step():
        loss = F.cross_entropy(model(x).float(), y)
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for weight in model.parameters():
                wanted = weight.float() - 0.02 * weight.grad.float()
                if not given.is_float32:
                    # bfloat16 is the upper half of float32: a random lower half carries into it.
                    bits = wanted.view(torch.int32) + torch.randint(2**16, wanted.shape, dtype=torch.int32)
                    wanted = (bits & -(2**16)).view(torch.float32)
                weight.copy_(wanted)
        return loss

    return step


# ---- regions of autocast ---------------------------------------------------------------------------------------------


@healthy("an epoch inside one region of autocast without a cache", steps=2)
def epoch_without_cache(given):
    model, x, y = mlp(), draw(64, 16), labels(64, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def step():
        with torch.autocast("cpu", torch.bfloat16, enabled=not given.is_float32, cache_enabled=False):
            for _ in range(4):
                loss = given.descend(F.cross_entropy(model(x).float(), y), optimizer)
        return loss

    return step, moved(model)


@healthy("four micro-batches and then the step in one region of autocast")
def step_at_the_end_of_a_region(given):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x, y = draw(64, 16), labels(64, 4)

    def step():
        with given.autocast():
            optimizer.zero_grad()
            for micro, targets in zip(x.split(16), y.split(16), strict=True):
                loss = F.cross_entropy(model(micro).float(), targets) / 4
                loss.backward()
            optimizer.step()
        return loss

    return step, moved(model)


@healthy("a model that is trained after another one in one region of autocast")
def models_in_turn_in_a_region(given):
    first, second = mlp(), mlp(seed=3)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in (first, second)]
    x, y = draw(64, 16), labels(64, 4)

    def step():
        with given.autocast():
            for model, optimizer in zip((first, second), optimizers, strict=True):
                loss = given.descend(F.cross_entropy(model(x).float(), y), optimizer)
        return loss

    return step, moved([*first.parameters(), *second.parameters()])
