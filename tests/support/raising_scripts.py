"""Scripts that raise because of dtypes, or because they use a GradScaler wrongly.

Each has the cause, what the report must say of it, and an edit: a line of the script and what takes its place. With the
edit, or with the list of the report, the script runs to its end.
"""

from typing import NamedTuple

HEAD = """import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
lin, x, index = nn.Linear(4, 4), torch.randn(3, 4), torch.tensor([0, 2, 1])


def low():
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        return lin(x)


"""
SCALED = """
model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
"""
AUTOCAST = 'with torch.autocast("cpu", torch.bfloat16), torch.no_grad():\n'
MIXED, UNSUPPORTED = "mixed dtypes", "unsupported dtype"
WEIGHTS, NONE, ORDER = "16-bit weights", "no gradients", "order of calls"


class Raising(NamedTuple):
    """A script that raises.

    Attributes:
        body: the script below `HEAD`.
        cause: of the record.
        told: texts of the report.
        entry: the line of a list that repairs it; "" for none.
        edit: what to replace in the script, and by what, as the report says.
    """

    body: str
    cause: str
    told: tuple[str, ...]
    entry: str = ""
    edit: tuple[str, str] = ("", "")


SCRIPTS = {
    "unpacked arguments": Raising(
        "batch = (x,)\nnn.Sequential(lin).bfloat16()(*batch)\n",
        MIXED,
        ("mat1: float32, came in as x", ".bfloat16() on the float32 tensor (mat1)"),
        "",
        ("(*batch)", "(batch[0].bfloat16())"),
    ),
    # ---- writes of 16 bits into float32 -----------------------------------------------------------------------------
    "scatter_add": Raising(
        f"{AUTOCAST}    src = lin(x)\n    out = torch.zeros(3, 4).scatter_add(0, index[:, None].expand(3, 4), src)\n",
        MIXED,
        ("src: bfloat16, made by F.linear", "whitelist", "src.float() in place of src"),
        "promote: [scatter_add]",
        ("4), src)", "4), src.float())"),
    ),
    "index_add": Raising(
        f"{AUTOCAST}    src, out = lin(x), torch.zeros(3, 4)\n    out.index_add_(0, index, src)\n",
        MIXED,
        ("out: float32, made by zeros", "src.to(out.dtype) in place of src"),
        "promote: [index_add_]",
        ("index, src)", "index, src.to(out.dtype))"),
    ),
    "index assignment": Raising(
        f"{AUTOCAST}    src, out = lin(x), torch.zeros(3, 4)\n    out[index] = src\n",
        MIXED,
        ("__setitem__", "src.to(out.dtype) in place of src"),
        "promote: [__setitem__]",
        ("= src\n", "= src.to(out.dtype)\n"),
    ),
    "index_copy": Raising(
        f"bank = torch.zeros(3, 4)\n{AUTOCAST}    bank.index_copy_(0, index, lin(x))\n",
        MIXED,
        ("bank: float32, came in as bank", "lin(x): bfloat16"),
        "promote: [index_copy_]",
        ("index, lin(x))", "index, lin(x).to(bank.dtype))"),
    ),
    "masked_scatter": Raising(
        f"{AUTOCAST}    src, out = lin(x), torch.zeros(3, 4)\n    out.masked_scatter_(out == 0, src)\n",
        MIXED,
        ("src.to(out.dtype) in place of src",),
        "promote: [masked_scatter_]",
        ("0, src)", "0, src.to(out.dtype))"),
    ),
    "out=": Raising(
        f"buffer = torch.empty(3, 3)\n{AUTOCAST}    src = lin(x)\n    torch.mm(src, src.t(), out=buffer)\n",
        MIXED,
        ("buffer: float32, came in as buffer", "src.to(buffer.dtype) in place of src"),
        "",
        ("mm(src, src.t(),", "mm(src.to(buffer.dtype), src.t().to(buffer.dtype),"),
    ),
    # ---- products ----------------------------------------------------------------------------------------------------
    "used outside of the region": Raising(
        "h = low()\nhead = nn.Linear(4, 2)\nout = head(h)\n",
        MIXED,
        ("h: bfloat16, made by F.linear", "h.float() in place of h"),
        "",
        ("head(h)", "head(h.float())"),
    ),
    "a half model": Raising(
        "model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).half()\nout = model(x)\n",
        MIXED,
        ("0.weight: float16, a weight, cast by .half()", "x: float32, came in as x", "x.half() in place of x"),
        "",
        ("model(x)", "model(x.half())"),
    ),
    "numpy data": Raising(
        "data = torch.from_numpy(np.ones((3, 4)))\nout = lin(data)\n",
        MIXED,
        ("data: float64, came in as data", "data.float() in place of data"),
        "",
        ("lin(data)", "lin(data.float())"),
    ),
    "matmul": Raising(
        "h = low()\nout = h @ torch.ones(4, 2)\n",
        MIXED,
        ("__matmul__", "h.float() in place of h"),
        "",
        ("h @", "h.float() @"),
    ),
    "attention": Raising(
        "h, key = lin(x[None]), low()[None]\nout = F.scaled_dot_product_attention(h, key, key)\n",
        MIXED,
        ("scaled_dot_product_attention", "key.float() in place of key"),
        "",
        ("(h, key, key)", "(h, key.float(), key.float())"),
    ),
    "lerp": Raising(
        "average = nn.Linear(4, 4).bfloat16()\nlow()\nwith torch.no_grad():\n"
        "    average.weight.lerp_(lin.weight, 0.1)\n",
        MIXED,
        ("cast by .bfloat16()", "lin.weight.to(average.weight.dtype) in place of lin.weight"),
        "",
        ("lerp_(lin.weight,", "lerp_(lin.weight.to(average.weight.dtype),"),
    ),
    "gradients by hand": Raising(
        "low()\nsmall = nn.Linear(4, 4).half()\nsmall.weight.grad = lin.weight.detach()\n",
        MIXED,
        ("small.weight: float16, a weight, cast by .half()",),
        "",
        (".detach()\n", ".detach().to(small.weight.dtype)\n"),
    ),
    # ---- models in 16 bits: what follows takes 16 bits, too ----------------------------------------------------------
    "a cache in float32": Raising(
        """class Cached(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.register_buffer("cache", torch.zeros(3, 4), persistent=False)

    def forward(self, y):
        self.cache[index] = self.lin(y)
        return self.lin(self.cache)


model = Cached()
model.lin.bfloat16()
with torch.no_grad():
    model(x.bfloat16())
""",
        MIXED,
        ("before this line, self.cache = self.cache.bfloat16()",),
        "",
        ("        self.cache[index]", "        self.cache = self.cache.bfloat16()\n        self.cache[index]"),
    ),
    "weights of a sum in float32": Raising(
        "model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).half()\nh = model(x.half())\n"
        "share = (h @ h.t()).float().softmax(-1)\nout = model(torch.mm(share, h))\n",
        MIXED,
        ("share: float32", "share.half() in place of share"),
        "",
        ("mm(share, h)", "mm(share.half(), h)"),
    ),
    "adapters in float32": Raising(
        """class Adapted(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base, self.down = base, nn.Linear(4, 4, bias=False)

    def forward(self, y):
        return self.base(y) + self.down(y)


model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))).half()
model[1] = Adapted(model[1])
out = model(x.half())
""",
        MIXED,
        ('with torch.autocast("cpu", dtype=torch.float16): around this line', ".half() on module 1.down"),
        "",
        ("out = model", 'with torch.autocast("cpu", dtype=torch.float16): out = model'),
    ),
    "a state of an LSTM": Raising(
        "rnn = nn.LSTM(4, 4).bfloat16()\nstart = torch.zeros(1, 4)\nout, _ = rnn(x.bfloat16(), (start, start))\n",
        MIXED,
        ("start: float32, came in as start", "start.bfloat16() in place of start"),
        "",
        ("(start, start)", "(start.bfloat16(), start.bfloat16())"),
    ),
    "attention of a module": Raising(
        "attention = nn.MultiheadAttention(4, 1).half()\ny = x.half()\nout = attention(y + torch.ones(4), y, y)\n",
        MIXED,
        ("(y + torch.ones(4)).half() in place of y + torch.ones(4)",),
        "",
        ("attention(y + torch.ones(4)", "attention((y + torch.ones(4)).half()"),
    ),
    "weights of classes": Raising(
        "small, weight = nn.Linear(4, 4).half(), torch.ones(4)\nh = small(x.half())\n"
        "loss = F.cross_entropy(h, torch.tensor([0, 1, 2]), weight=weight)\n",
        MIXED,
        ("self: float16, made by F.linear", "weight.half() in place of weight"),
        "",
        ("weight=weight", "weight=weight.half()"),
    ),
    "a loss": Raising(
        "def measure(out):\n    return nn.HuberLoss()(out, torch.zeros(3, 4))\n\n\n"
        "small = nn.Linear(4, 4).half()\nloss = measure(small(x.half()))\nloss.backward()\n",
        MIXED,
        ("the backward pass of huber_loss at script.py:16", "raised at script.py:21", "out.float() in place of out"),
        "",
        ("(out, torch", "(out.float(), torch"),
    ),
    # ---- ops and conversions without 16 bits -------------------------------------------------------------------------
    "numpy": Raising(
        "h = low()\nprint(h.numpy().sum())\n",
        UNSUPPORTED,
        ("ScalarType BFloat16", "h: bfloat16, made by F.linear", "h.float() in place of h"),
        "",
        ("h.numpy()", "h.float().numpy()"),
    ),
    "numpy of a result": Raising(
        f"{AUTOCAST}    print(lin(x).detach().cpu().numpy().sum())\n",
        UNSUPPORTED,
        ("made by F.linear", "lin(x).detach().cpu().float() in place of"),
        "",
        (".cpu().numpy()", ".cpu().float().numpy()"),
    ),
    "asarray": Raising(
        "h = low()\nprint(np.asarray(h).sum())\n",
        UNSUPPORTED,
        ("h.float() in place of h",),
        "",
        ("asarray(h)", "asarray(h.float())"),
    ),
    "inside a package": Raising(
        "h = low()\ncounts, _ = np.histogram(h, bins=4)\n",
        UNSUPPORTED,
        ("called from script.py:16", "script.py:16: h.float() in place of h"),
        "",
        ("histogram(h,", "histogram(h.float(),"),
    ),
    "svd": Raising(
        "small = lin.half()\nh = small(x.half())\nprint(torch.linalg.svd(h)[1].shape)\n",
        UNSUPPORTED,
        ("not implemented for 'Half'", "h.float() in place of h"),
        "",
        ("svd(h)", "svd(h.float())"),
    ),
    # ---- code of users -----------------------------------------------------------------------------------------------
    "a check": Raising(
        "def kernel(y):\n    if y.dtype != torch.float32:\n        raise TypeError('float32 only')\n    return y\n\n\n"
        "h = low()\nkernel(h)\n",
        UNSUPPORTED,
        ("h: bfloat16", "h.float() in place of h"),
        "",
        ("kernel(h)", "kernel(h.float())"),
    ),
    "a kernel of 16 bits": Raising(
        "def kernel(y):\n    if y.dtype not in (torch.float16, torch.bfloat16):\n"
        "        raise RuntimeError('fp16 and bf16 only')\n    return y\n\n\nlow()\nkernel(x)\n",
        UNSUPPORTED,
        ("x: float32", "x.bfloat16() in place of x"),
        "",
        ("kernel(x)", "kernel(x.bfloat16())"),
    ),
    "raised for another exception": Raising(
        "h = low()\ntry:\n    h.numpy()\nexcept TypeError:\n    raise ValueError('epoch 3')\n",
        UNSUPPORTED,
        ("ScalarType BFloat16", "h.float() in place of h"),
        "",
        ("h.numpy()", "h.float().numpy()"),
    ),
    "an assertion": Raising(
        "def kernel(y, w):\n    assert y.dtype == w.dtype, 'one dtype'\n    return y\n\n\n"
        "h, w = low(), torch.ones(4)\nkernel(h, w)\n",
        MIXED,
        ("h: bfloat16", "w: float32", "h.float() in place of h"),
        "",
        ("kernel(h, w)", "kernel(h.float(), w)"),
    ),
    "a hook in the backward pass": Raising(
        "y, h = lin(x), low().T\ny.register_hook(lambda grad: grad @ h)\ny.sum().backward()\n",
        MIXED,
        (", backward: the script raised", "__matmul__ at", "grad: float32", "h: bfloat16", "h.float() in place of h"),
        "",
        ("grad @ h", "(grad @ h.float()) @ grad"),
    ),
    "a checkpoint that casts when it runs again": Raising(
        "from torch.utils.checkpoint import checkpoint\n\nruns = []\n\n\ndef block(y):\n    w = lin.weight\n"
        "    if runs:\n        w = w.bfloat16()\n    runs.append(1)\n    return y @ w\n\n\n"
        "checkpoint(block, x.requires_grad_(), use_reentrant=True).sum().backward()\n",
        MIXED,
        (", recompute: the script raised", "__matmul__ at", "y: float32", "w.float() in place of w"),
        "",
        ("y @ w", "y @ w.float()"),
    ),
    "a backward of the user": Raising(
        """class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, w):
        ctx.save_for_backward(y, w)
        return y @ w.to(y.dtype)

    @staticmethod
    def backward(ctx, grad):
        y, w = ctx.saved_tensors
        return grad @ w.t(), None


with torch.autocast("cpu", torch.bfloat16):
    out = Product.apply(lin(x), torch.ones(4, 4))
out.float().sum().backward()
""",
        MIXED,
        ("grad: bfloat16", "grad.float() in place of grad"),
        "",
        ("return grad @", "return grad.float() @"),
    ),
    # ---- GradScaler and optimizers -----------------------------------------------------------------------------------
    "float16 weights": Raising(
        f"{SCALED}model.half()\nwith torch.autocast('cpu', torch.float16):\n    loss = model(x).float().mean()\n"
        "scaler.scale(loss).backward()\nscaler.step(optimizer)\nscaler.update()\n",
        WEIGHTS,
        ("cast by .half()", "2 of 2 parameters of SGD", "make the trained weights float32"),
        "",
        ("model.half()\n", ""),
    ),
    "gradients are gone": Raising(
        f"{SCALED}loss = model(x).mean()\nscaler.scale(loss).backward()\noptimizer.zero_grad()\n"
        "scaler.step(optimizer)\n",
        NONE,
        ("zero_grad() came after it",),
        "",
        ("optimizer.zero_grad()\n", ""),
    ),
    "a backward pass that is missing": Raising(
        f"{SCALED}loss = model(x).mean()\nscaled = scaler.scale(loss)\nscaler.step(optimizer)\n",
        NONE,
        ("its backward pass did not run", "scaler.scale(loss).backward() before"),
        "",
        ("scaler.step", "scaled.backward()\nscaler.step"),
    ),
    "a loss without a graph": Raising(
        f"{SCALED}loss = torch.tensor(model(x).mean().item(), requires_grad=True)\nscaler.scale(loss).backward()\n"
        "scaler.step(optimizer)\n",
        NONE,
        ("has no autograd graph that leads to a parameter", "without .item()"),
        "",
        ("torch.tensor(model(x).mean().item(), requires_grad=True)", "model(x).mean()"),
    ),
    "a loss that is cut off": Raising(
        f"{SCALED}parts = torch.tensor(model(x).tolist(), requires_grad=True)\nloss = parts.mean()\n"
        "scaler.scale(loss).backward()\nscaler.step(optimizer)\n",
        NONE,
        ("that leads to a parameter, so no gradient flows",),
        "",
        ("torch.tensor(model(x).tolist(), requires_grad=True)", "model(x)"),
    ),
    "a model that was copied": Raising(
        f"import copy\n{SCALED}model = copy.deepcopy(model)\nscaler.scale(model(x).mean()).backward()\n"
        "scaler.step(optimizer)\n",
        NONE,
        ("they belong to no model that was called",),
        "",
        ("model = copy.deepcopy(model)\n", ""),
    ),
    "an optimizer without a loss": Raising(
        f"{SCALED}other = torch.optim.SGD(lin.parameters(), 0.1)\nscaler.scale(model(x + lin(x).detach()).mean())"
        ".backward()\nscaler.step(optimizer)\nscaler.step(other)\nscaler.update()\n",
        NONE,
        ("does not depend on them (weight, bias)", "leave out the step of this optimizer where no loss depends"),
        "",
        ("scaler.step(other)\n", ""),
    ),
    "update without a step": Raising(
        f"{SCALED}scaler.scale(model(x).mean()).backward()\nscaler.update()\n",
        ORDER,
        ("Call scaler.update() only in iterations that call scaler.unscale_ or scaler.step",),
        "",
        ("scaler.update()\n", ""),
    ),
    "unscaled twice": Raising(
        f"{SCALED}loss = model(x).mean()\nscaler.scale(loss).backward()\nscaler.unscale_(optimizer)\n"
        "scaler.unscale_(optimizer)  # again\nscaler.step(optimizer)\n",
        ORDER,
        ("unscale_() at script.py:", "leave out script.py:"),
        "",
        ("scaler.unscale_(optimizer)  # again\n", ""),
    ),
    "no update": Raising(
        f"{SCALED}for _ in range(2):\n    loss = model(x).mean()\n    scaler.scale(loss).backward()\n"
        "    scaler.step(optimizer)\n",
        ORDER,
        ("scaler.update() once in each step, after the last scaler.step",),
        "",
        ("    scaler.step(optimizer)\n", "    scaler.step(optimizer)\n    scaler.update()\n"),
    ),
    "a loss without a scale": Raising(
        f"{SCALED}loss = model(x).mean()\nloss.backward()\nscaler.step(optimizer)\n",
        ORDER,
        ("no loss was scaled before", "scaler.scale(loss).backward()"),
        "",
        ("loss.backward()", "scaler.scale(loss).backward()"),
    ),
    "an optimizer made too early": Raising(
        """model = nn.Linear(4, 4)
optimizer = torch.optim.Adam(model.parameters(), fused=True)
model(x).mean().backward()
optimizer.step()
optimizer.zero_grad()
model.half()
model(x.half()).float().mean().backward()
optimizer.step()
""",
        MIXED,
        ("exp_avg of Adam: f32", "made after .half() at script.py:20"),
        "",
        ("model.half()\n", "model.half()\noptimizer = torch.optim.Adam(model.parameters(), fused=True)\n"),
    ),
    "an optimizer of the script": Raising(
        """class Averaging(torch.optim.SGD):
    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            z = p.detach().float()
            p.lerp_(z, 0.1)


model = nn.Linear(4, 4).bfloat16()
optimizer = Averaging(model.parameters(), 0.1)
model(x.bfloat16()).float().mean().backward()
optimizer.step()
""",
        MIXED,
        ("weights of Averaging: bf16", "script.py:20: z.to(p.dtype) in place of z"),
        "",
        ("lerp_(z,", "lerp_(z.to(p.dtype),"),
    ),
    # ---- lines that have a text twice, or arguments without names ----------------------------------------------------
    "an operand that the line has twice": Raising(
        "with torch.no_grad():\n    h = low()\n    pair = torch.mm(h, x.t()), torch.mm(h, h.t())\n",
        MIXED,
        ("torch.mm(h.float(), x.t()) in place of torch.mm(h, x.t())",),
        "",
        ("torch.mm(h, x.t())", "torch.mm(h.float(), x.t())"),
    ),
    "a state without a name": Raising(
        "lstm = nn.LSTM(4, 4).half()\nlstm(x.half(), (torch.zeros(1, 4), torch.zeros(1, 4)))\n",
        MIXED,
        ("torch.zeros(1, 4).half() in place of torch.zeros(1, 4)",),
        "",
        ("torch.zeros(1, 4)", "torch.zeros(1, 4).half()"),
    ),
    "a loss of no weights after one of weights": Raising(
        f"{SCALED}for n in range(2):\n    optimizer.zero_grad()\n"
        "    loss = torch.zeros((), requires_grad=True) if n else model(x).mean()\n"
        "    scaler.scale(loss).backward()\n    scaler.step(optimizer)\n    scaler.update()\n",
        NONE,
        ("depends on no parameter this time", "if not loss.grad_fn: continue"),
        "",
        ("    scaler.scale(loss)", "    if not loss.grad_fn:\n        continue\n    scaler.scale(loss)"),
    ),
}

UNRELATED = {
    "shapes": f"{AUTOCAST}    lin(x[:, :3])\n",
    "shapes of 16 bits": f"{AUTOCAST}    lin(x) + torch.ones(3, 5)\n",
    "an error of the user": f"{AUTOCAST}    h = lin(x)\n    raise ValueError('bad dtype of coffee')\n",
    "a key": f"{AUTOCAST}    h = lin(x)\n    {{}}['a']\n",
    "a graph used twice": "loss = lin(x).mean()\nloss.backward()\nlin(x)\nloss = low().mean()\nloss.backward()\n",
    "an index": "h = low()\nh[torch.tensor([7])]\n",
    "numpy with gradients": "h = lin(x)\nh.numpy()\n",
    "after an exception that was caught": (
        f"{AUTOCAST}    h = lin(x)\ntry:\n    h.numpy()\nexcept TypeError:\n    h @ torch.ones(3, 3)\n"
    ),
    "a dtype of integers": "h = low()\nF.nll_loss(h, torch.zeros(3))\n",
    "out of memory": "h = low()\nraise torch.OutOfMemoryError('out of memory')\n",
    "an assertion": "h = low()\nassert h.shape == (1, 1), 'shape'\n",
}
"""Scripts whose exception dtypes do not explain."""
