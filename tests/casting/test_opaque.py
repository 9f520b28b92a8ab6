"""Tensors that answer calls with code of their own, such as quantized weights, get no call under amp that they do not
get under torch.autocast, and levels that cast the model leave them alone.

Guards: casting/tensor_cast, casting/wrappers, training/model.
"""

import contextlib
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import amp_patch as amp
from amp_patch.dtypes import is_castable, is_opaque

CALLS = []
TO_COPY = torch.ops.aten._to_copy.default


class Answering(Tensor):
    """Answers functions, and has the rest done by torch."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        CALLS.append((func.__name__, len(args), *sorted(kwargs or {})))
        return super().__torch_function__(func, types, args, kwargs or {})


class Quantised(Tensor):
    """int8 values and a scale, shown as a tensor of `dtype`. Answers what torch makes of functions, casts too."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, values, scale, dtype):
        return Tensor._make_wrapper_subclass(
            cls, values.shape, dtype=dtype, device=values.device, dispatch_device=True, dispatch_layout=True
        )

    def __init__(self, values, scale, dtype):
        self.values, self.scale = values, scale

    def widen(self):
        return (self.values.float() * self.scale).to(self.dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        CALLS.append(str(func))
        if func is torch.ops.prim.device.default:
            return torch.device("cpu")
        if func is torch.ops.prim.layout.default:
            return torch.strided
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0].values, args[0].scale, args[0].dtype)
        if func is TO_COPY and cls is Quantised:
            return cls(args[0].values, args[0].scale, kwargs["dtype"])
        return func(*tree_map(lambda arg: arg.widen() if isinstance(arg, cls) else arg, args), **(kwargs or {}))


class Melting(Quantised):
    """A cast makes a plain tensor of it; it knows nothing else."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.mm.default, torch.ops.aten.t.default, torch.ops.aten.addmm.default):
            raise NotImplementedError(f"{func} of a weight that was not cast")
        return super().__torch_dispatch__(func, types, args, kwargs)


def quantised(shape, kind=Quantised, dtype=torch.float32):
    values = torch.randint(-127, 128, shape, generator=torch.Generator().manual_seed(0), dtype=torch.int8)
    return kind(values, 0.01, dtype)


MAKE = {
    "functions": lambda *shape: quantised(shape).widen().as_subclass(Answering),
    "dispatch": lambda *shape: quantised(shape),
    "melts": lambda *shape: quantised(shape, Melting),
}
X, W = torch.linspace(-1, 1, 16).view(4, 4), torch.linspace(0, 1, 16).view(4, 4)
OPS = {
    "linear": lambda make: F.linear(X, make(4, 4)),
    "bias": lambda make: F.linear(X, W, make(4)),
    "input": lambda make: F.linear(make(4, 4), W),
    "@": lambda make: X @ make(4, 4),
    "addmm": lambda make: torch.addmm(X, W, make(4, 4)),
    "bmm": lambda make: torch.bmm(X[None], make(1, 4, 4)),
    "conv": lambda make: F.conv1d(X[None], make(4, 4, 1)),
    "multi_dot": lambda make: torch.linalg.multi_dot([X, W, make(4, 4)]),
    "softmax": lambda make: F.softmax(make(4, 4), -1),
    "sum": lambda make: make(4, 4).sum(),
    "cat": lambda make: torch.cat([X, make(4, 4)]),
    "layer_norm": lambda make: F.layer_norm(X, (4,), make(4)),
    "pow": lambda make: make(4, 4) ** 2,
}


def record(op, make):
    CALLS.clear()
    result = op(make)
    calls = Counter(CALLS)
    with torch._C.DisableTorchFunctionSubclass():
        return calls, result.dtype, type(result)


@pytest.mark.parametrize("compute", ["native", "float32"])
@pytest.mark.parametrize(("level", "low"), [("O1", torch.float16), ("O4", torch.bfloat16)])
@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_the_calls_are_those_under_autocast(make, level, low, compute):
    with torch.autocast("cpu", low):
        expected = {name: record(op, make) for name, op in OPS.items()}
    with amp.session(level, device="cpu", compute=compute):
        for name, op in OPS.items():
            calls, *result = record(op, make)
            assert calls <= expected[name][0] and result == list(expected[name][1:]), name


class ByTable(Tensor):
    """What it does is in tables by class, as in torchao; it knows nothing else, no attribute either."""

    TABLES = {}

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return cls.TABLES[cls][func](*args, **(kwargs or {}))


def by_table(x, weight, bias=None):
    with torch._C.DisableTorchFunctionSubclass():
        return F.linear(x, weight.as_subclass(Tensor), bias)


ByTable.TABLES[ByTable] = {F.linear: by_table}


class Layer(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.register_parameter("weight", None)
        with torch._C.DisableTorchFunctionSubclass():
            self._parameters["weight"] = weight

    def forward(self, x):
        return F.linear(x, self.weight)


def train(model, level=None, **options):
    """Two steps, by amp or by torch.autocast; returns the losses."""
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    if level is not None:
        amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    region = torch.autocast("cpu", torch.bfloat16) if level is None else contextlib.nullcontext()
    losses = []
    for _ in range(2):
        with region:
            loss = model(X).float().square().mean()
        if level is None:
            loss.backward()
        else:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def make_model(weight):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), Layer(weight), nn.Linear(4, 2))


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_a_weight_that_knows_one_function_is_asked_nothing_else(level):
    def start():
        return make_model(W.clone().as_subclass(ByTable))

    losses = train(start(), level, compute="native")
    amp.reset()
    assert F.linear in ByTable.TABLES[ByTable]
    assert losses == (train(start()) if level == "O4" else pytest.approx(train(start()), rel=0.05))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["shown as float32", "shown as bfloat16"])
@pytest.mark.parametrize("level", ["O1", "O5"])
def test_a_quantised_weight_stays_what_it_is(level, dtype):
    weight = quantised((4, 4), dtype=dtype)
    model, values = make_model(weight), weight.values.clone()
    CALLS.clear()
    train(model, level)
    assert model[1].weight is weight and weight.dtype is dtype and torch.equal(weight.values, values)
    assert (str(TO_COPY) in CALLS) == (level == "O1")  # for one op, as under torch.autocast
    amp.reset()
    assert model[1].weight is weight and weight.dtype is dtype


def test_what_counts_as_opaque():
    weight = quantised((4, 4))
    assert is_opaque(weight) and not is_castable(weight)

    class OwnParameter(nn.Parameter):
        pass

    for tensor in (
        torch.ones(2),
        nn.Parameter(torch.ones(2)),
        OwnParameter(torch.ones(2)),
        torch.ones(2, dtype=torch.int8),
    ):
        assert not is_opaque(tensor)
    assert is_castable(OwnParameter(torch.ones(2)))
