"""Scripts that lose nothing although they cast data, have gradients of zero, or subtract in 16 bits."""

import torch
from quiet_cases import Layer, LoRA, copy_of, draw, healthy, labels, linear, mlp, moved, waves
from quiet_healthy import classify, regress
from torch import nn
from torch.nn import functional as F

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


@healthy("bytes of a text as ids that pass through bfloat16", rounding=0.02)
def ids_of_bytes(given):
    model, ids, y = nn.Sequential(nn.Embedding(256, 8), linear(8, 2)), labels(128, 256), labels(128, 2, seed=6)
    return regress(given, model, lambda: F.cross_entropy(model(ids.to(given.low).long()).float(), y))


@healthy("a straight-through estimator, z + (code - z).detach(), under bfloat16 autocast")
def straight_through(given):
    encoder, decoder, codes = linear(8, 4), linear(4, 8), draw(16, 4, seed=9)
    model, x = nn.ModuleList([encoder, decoder]), draw(64, 8)

    def loss():
        z = encoder(x)
        nearest = codes[torch.cdist(z.detach().float(), codes).argmin(-1)].to(z.dtype)
        through = z + (nearest - z).detach()
        return F.mse_loss(decoder(through).float(), x) + F.mse_loss(z.float(), nearest.float())

    return regress(given, model, loss)


@healthy("advantages less their mean, which is near zero, in bfloat16")
def advantages_less_their_mean(given):
    policy, states, actions = linear(8, 4), draw(128, 8), labels(128, 4)
    rewards = draw(128, seed=4)

    def loss():
        advantages = rewards.to(given.low)
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-4)
        taken = policy(states).float().log_softmax(-1).gather(-1, actions[:, None])[:, 0]
        return -(taken * advantages.float()).mean()

    return regress(given, policy, loss)


@healthy("fields of a batch that hold no target: their gradients are zero under float16 autocast", low=torch.float16)
def batch_without_targets(given):
    def run(self, x):
        h = torch.relu(self.body(x))
        return self.classes(h), self.boxes(h)

    model = Layer(run, body=linear(16, 32), classes=linear(32, 4), boxes=linear(32, 4))
    x, y = draw(64, 16), labels(64, 4)
    has_box = torch.zeros(64, 1)  # no image of this batch has a box

    def loss():
        logits, boxes = model(x)
        of_boxes = (boxes.float().abs() * has_box).sum() / has_box.sum().clamp(min=1)
        return F.cross_entropy(logits.float(), y) + of_boxes

    return regress(given, model, loss)
