"""Scripts that lose nothing in 16 bits, next to those that do: what a careless detector cries wolf at."""

import torch
from gpt import make_gpt
from quiet_cases import Layer, copy_of, draw, gradients_of, healthy, linear, moved
from quiet_updates import LoRA, labels, mlp
from quiet_values import Seen, waves
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
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    x, y = draw(64, 16).to(given.low), labels(64, 4)
    return lambda: given.descend(F.cross_entropy(model(x).float(), y), optimizer), moved(model)


@healthy("a .bfloat16() model whose warmup begins with a learning rate of zero", rounding=0.15)
def warmup_from_zero(given):
    model = mlp().to(given.low)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
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
    net = nn.Sequential(linear(8, 16, bias=1.0), nn.BatchNorm1d(16, momentum=0.001), nn.ReLU(), linear(16, 2))
    net.to(given.low)
    net[1].float()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
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
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    x, y = draw(64, 16).to(given.low), labels(64, 4)

    def step():
        optimizer.zero_grad()
        for micro, targets in zip(x.split(16), y.split(16), strict=True):
            loss = F.cross_entropy(model(micro).float(), targets) / 4
            loss.backward()
        optimizer.step()
        return loss

    return step, gradients_of(model)


# ---- caches, queues and data -----------------------------------------------------------------------------------------


@healthy("a cache of keys and values in bfloat16 that is written a token at a time")
def cache_of_keys(given):
    def attend(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        if torch.is_grad_enabled():
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        keys, values = (torch.zeros(2, 12, 16, dtype=given.low) for _ in range(2))
        outputs = []
        for token in range(12):
            keys[:, token] = k[:, token]
            values[:, token].copy_(v[:, token])
            scores = q[:, token : token + 1] @ keys[:, : token + 1].to(q.dtype).transpose(1, 2) / 4
            outputs.append(scores.softmax(-1).to(given.low) @ values[:, : token + 1])
        return torch.cat(outputs, 1)

    model, x = nn.Sequential(Layer(attend, qkv=linear(16, 48)), linear(16, 1)), draw(2, 12, 16)

    def loss():
        with torch.no_grad():
            generated = model(x).float()
        return (model(x).float() - 0.5 * generated - 1).square().mean()

    return regress(given, model, loss)


@healthy("a queue of keys in bfloat16, as of MoCo, whose rows are replaced", steps=5)
def queue_of_keys(given):
    encoder, x = linear(16, 8), draw(8, 16)
    queue = F.normalize(draw(32, 8, seed=6), dim=-1).to(given.low)
    pointer = [0]

    def loss():
        q = F.normalize(encoder(x).float(), dim=-1)
        k = F.normalize(encoder(x + 0.1).float(), dim=-1).detach()
        logits = torch.cat([(q * k).sum(-1, keepdim=True), q @ queue.clone().float().T], -1) / 0.5
        queue[pointer[0] : pointer[0] + 8] = k.to(given.low)
        pointer[0] = (pointer[0] + 8) % 32
        return F.cross_entropy(logits, torch.zeros(8, dtype=torch.long))

    return regress(given, encoder, loss)


@healthy("positions below 200 and a mask, cast to bfloat16", rounding=0.02)
def short_positions(given):
    model, x = linear(16, 1), draw(2, 200, 16)
    lengths = torch.tensor([150, 200])

    def loss():
        position = torch.arange(200).to(given.low)
        mask = (torch.arange(200) < lengths[:, None]).to(given.low)
        h = model(x + waves(position, 16))[..., 0]
        return (h * mask).float().square().sum() / mask.float().sum()

    return regress(given, model, loss)


@healthy("arange(200) in bfloat16, and a causal mask of it", rounding=0.02)
def short_arange(given):
    def attend(self, x):
        position = torch.arange(200, dtype=given.low)
        q, k, v = self.qkv(x).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=position[:, None] >= position)

    model, x = Layer(attend, qkv=linear(8, 24)), draw(1, 200, 8)
    return regress(given, model, lambda: model(x).float().square().mean())


@healthy("images of bytes that are cast to bfloat16", rounding=0.02)
def images_of_bytes(given):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), linear(144, 2)).to(given.low)
    images, y = labels(8 * 3 * 64, 256).view(8, 3, 8, 8).to(torch.uint8), labels(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return lambda: given.descend(F.cross_entropy(model(images.to(given.low) / 255).float(), y), optimizer)


@healthy("sound in 16-bit integers that is cast to bfloat16", rounding=0.02)
def sound_of_integers(given):
    model = nn.Sequential(nn.Conv1d(1, 4, 9, stride=4), nn.ReLU(), nn.Flatten(), linear(4 * 498, 2))
    sound, y = (draw(4, 1, 2000) * 6000).clamp(-32768, 32767).to(torch.int16), labels(4, 2)
    return regress(given, model, lambda: F.cross_entropy(model(sound.to(given.low) / 32768).float(), y))


@healthy("images of 12 bits that are cast to float16", low=torch.float16, rounding=0.02)
def images_of_12_bits(given):
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), linear(4 * 900, 2))
    images, y = labels(4 * 1024, 4096).view(4, 1, 32, 32).to(torch.int16), labels(4, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=not given.is_float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step():
        optimizer.zero_grad()
        with given.autocast():
            loss = F.cross_entropy(model(images.to(given.low) / 4095), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    return step


@healthy("features drawn from a normal distribution that are cast to bfloat16", rounding=0.02)
def drawn_features(given):
    model, x = mlp(64, 32, 1).to(given.low), draw(256, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return lambda: given.descend((model(x.to(given.low)).float() - x[:, :1]).square().mean(), optimizer)


# ---- gradients that are rightly zero ---------------------------------------------------------------------------------


@healthy("units of a ReLU that are dead under float16 autocast", low=torch.float16)
def dead_units(given):
    model = nn.Sequential(linear(16, 32), nn.ReLU(), linear(32, 4))
    with torch.no_grad():
        model[0].bias[:24] = -20.0
    return classify(given, model)


@healthy("a table of which most rows are unused under float16 autocast", low=torch.float16)
def unused_rows(given):
    model = nn.Sequential(nn.Embedding(1000, 8), linear(8, 4))
    rows, y = labels(32, 10), labels(32, 4, seed=6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return regress(given, model, lambda: F.cross_entropy(model(rows).float(), y), optimizer)


@healthy("LoRA factors in float32 whose second is zero at first", low=torch.float16, steps=2)
def lora_from_zero(given):
    model = nn.Sequential(LoRA(linear(16, 32), 4, torch.float32), nn.GELU(), LoRA(linear(32, 4), 4, torch.float32))
    return classify(given, model)


@healthy("adaptive norms whose modulation is zero at first")
def modulation_from_zero(given):
    def run(self, x):
        shift, scale, gate = self.modulate(F.silu(condition)).chunk(3, -1)
        return x + gate * self.inner(self.norm(x) * (1 + scale) + shift)

    condition = draw(64, 8, seed=3)
    modulate = linear(8, 48, 0.0)
    block = Layer(run, modulate=modulate, norm=nn.LayerNorm(16, elementwise_affine=False), inner=mlp(16, 32, 16))
    return classify(given, nn.Sequential(block, linear(16, 4)))


@healthy("a frozen body in bfloat16 below a head in float32")
def frozen_body(given):
    body, head = mlp(16, 32, 32).to(given.low).requires_grad_(False), linear(32, 4)
    x, y = draw(64, 16), labels(64, 4)
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-5)
    return lambda: given.descend(F.cross_entropy(head(body(x.to(given.low)).float()), y), optimizer)


# ---- differences and sums that are as good as 16 bits are ------------------------------------------------------------


@healthy("a softmax written as exp(x - max) in bfloat16")
def softmax_by_hand(given):
    def attend(self, x):
        scores = self.scores(x)
        weights = torch.exp(scores - scores.amax(-1, keepdim=True))
        return weights / weights.sum(-1, keepdim=True)

    model = nn.Sequential(linear(16, 16), Layer(attend, scores=linear(16, 16, 2.0)), linear(16, 4)).to(given.low)
    optimizer, x, y = torch.optim.SGD(model.parameters(), lr=0.5), draw(64, 16).to(given.low), labels(64, 4)
    return lambda: given.descend(F.cross_entropy(model(x).float(), y), optimizer)


@healthy("a squared error written by hand, close to convergence, under bfloat16 autocast", rounding=0.1)
def squared_error_by_hand(given):
    model, x = mlp(16, 32, 4), draw(64, 16)
    with torch.no_grad():
        target = model(x) * 1.15

    def loss():
        difference = model(x) - target
        return (difference * difference).mean()

    return regress(given, model, loss)


@healthy("a residual stream in bfloat16 with small branches")
def residual_stream(given):
    def run(self, x):
        return x + self.inner(x)

    blocks = [Layer(run, inner=mlp(16, 32, 16, seed=seed)) for seed in range(4)]
    with torch.no_grad():
        for block in blocks:
            block.inner[2].weight.mul_(0.02)
    model = nn.Sequential(*blocks, linear(16, 4)).to(given.low)
    optimizer, x, y = torch.optim.SGD(model.parameters(), lr=0.5), draw(64, 16).to(given.low), labels(64, 4)
    return lambda: given.descend(F.cross_entropy(model(x).float(), y), optimizer)


@healthy("the divergence of two policies in float32, from logits in bfloat16")
def divergence_in_float32(given):
    policy, x = mlp(16, 32, 8), draw(64, 16)
    reference = copy_of(mlp(16, 32, 8, seed=5))

    def loss():
        logp = policy(x).float().log_softmax(-1)
        with torch.no_grad():
            old = reference(x).float().log_softmax(-1)
        return (logp.exp() * (logp - old)).sum(-1).mean()

    return regress(given, policy, loss)


@healthy("a rotary embedding whose tables are made in float32 and rounded to bfloat16")
def rotary_tables(given):
    def attend(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        angles = torch.arange(600.0)[:, None] * 10_000.0 ** (-torch.arange(4) / 4)
        cos, sin = angles.cos().to(given.low), angles.sin().to(given.low)

        def rotate(t):
            a, b = t.chunk(2, -1)
            return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

        return x + F.scaled_dot_product_attention(rotate(q), rotate(k), v)

    model, x = Layer(attend, qkv=linear(8, 24)).to(given.low), draw(1, 600, 8).to(given.low)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return lambda: given.descend(model(x).float().square().mean(), optimizer)


@healthy("dropout under bfloat16 autocast", rounding=0.1)
def dropout(given):
    def drop(self, x):
        # of a fixed seed, as the float32 run must drop the same
        kept = torch.rand(x.shape, generator=torch.Generator().manual_seed(3)) > 0.3
        return x * kept.to(x.dtype) / 0.7

    model = nn.Sequential(linear(16, 32), nn.ReLU(), nn.Dropout(0.0), Layer(drop), linear(32, 4))
    return classify(given, model)


@healthy("gradients that are clipped to a norm of 0.01 under bfloat16 autocast")
def clipped_gradients(given):
    model, x, y = mlp(), draw(64, 16), labels(64, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        with given.autocast():
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        return loss

    return step, moved(model)


@healthy("a ratio of probabilities in float32 from a bfloat16 policy's rollout", rounding=0.1)
def ratio_in_float32(given):
    policy, states = mlp(16, 32, 8), draw(128, 16)
    actions, advantages = labels(128, 8), draw(128, seed=4)
    with torch.no_grad(), given.autocast():
        old = policy(states).float().log_softmax(-1).gather(-1, actions[:, None])

    def loss():
        logp = policy(states).float().log_softmax(-1).gather(-1, actions[:, None])
        ratio = (logp - old).exp()
        return -(ratio[:, 0] * advantages).mean()

    return regress(given, policy, loss)
