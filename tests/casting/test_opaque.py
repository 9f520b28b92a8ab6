"""Weights that quantisation libraries keep in a form of their own are left alone, at every level, and the model still
runs.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import amp_patch as amp
from amp_patch.dtypes import is_castable, is_opaque

LEVELS = ["O1", "O5"]
CASTS = []


class Quantised(Tensor):
    """int8 values and a scale, shown as a tensor of `dtype`: what quantisation libraries make of a weight.

    Notes whenever it is cast.
    """

    @staticmethod
    def __new__(cls, values, scale, dtype):
        return Tensor._make_wrapper_subclass(cls, values.shape, dtype=dtype, device=values.device)

    def __init__(self, values, scale, dtype):
        self.values, self.scale = values, scale

    def widen(self):
        return (self.values.float() * self.scale).to(self.dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0].values, args[0].scale, args[0].dtype)
        if func is torch.ops.aten._to_copy.default:
            CASTS.append(kwargs)
        return func(*[arg.widen() if isinstance(arg, cls) else arg for arg in args], **(kwargs or {}))


class QuantisedLinear(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        values = torch.randint(-127, 128, (4, 4), generator=torch.Generator().manual_seed(0), dtype=torch.int8)
        self.weight = nn.Parameter(Quantised(values, 0.01, dtype), requires_grad=False)

    def forward(self, x):
        return F.linear(x, self.weight)


def make_model(dtype):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), QuantisedLinear(dtype), nn.Linear(4, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["shown as float32", "shown as bfloat16"])
@pytest.mark.parametrize("level", LEVELS)
def test_a_quantised_weight_is_neither_cast_nor_changed(level, dtype):
    CASTS.clear()
    model = make_model(dtype)
    weight, values = model[1].weight, model[1].weight.values.clone()
    optimizer = torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    for _ in range(2):
        with amp.scale_loss(model(torch.ones(3, 4)).float().square().mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert model[1].weight is weight and weight.dtype is dtype and torch.equal(weight.values, values)
    assert CASTS == []
    amp.reset()
    assert model[1].weight is weight and weight.dtype is dtype


def test_what_counts_as_opaque():
    quantised = make_model(torch.float32)[1].weight
    assert is_opaque(quantised) and not is_castable(quantised)

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
