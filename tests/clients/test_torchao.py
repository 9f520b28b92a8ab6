"""torchao works unmodified: emulated float8 linear layers, optimizers of 8 bits, frozen weights of int8.

Guards: casting/tensor_cast, training/groups.
"""

import pytest
import torch
from torch import nn
from training import take_step

import amp_patch as amp

pytest.importorskip("torchao", reason="needs torchao: make test-clients")

from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear
from torchao.optim import AdamW8bit
from torchao.quantization import Int8WeightOnlyConfig, quantize_

LEVELS = {"O1": {"loss_scale": 2.0**8}, "O2": {"loss_scale": 2.0**8}, "O4": {}, "O5": {}}
X = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
Y = torch.randn(16, 16, generator=torch.Generator().manual_seed(2))


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 16))


def train(model, level, kind=torch.optim.AdamW, **options):
    optimizer = kind([one for one in model.parameters() if one.requires_grad], lr=3e-3)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    losses = []
    for _ in range(5):
        loss = nn.functional.mse_loss(model(X).float(), Y)
        take_step(loss, optimizer)
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    return losses, optimizer


@pytest.fixture
def not_compiled():
    """The step of torchao's optimizers, which takes half a minute to compile."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.parametrize("level", LEVELS)
def test_float8_layers(level):
    def run(level, **options):
        model = convert_to_float8_training(make(), config=Float8LinearConfig(emulate=True))
        assert sum(isinstance(module, Float8Linear) for module in model) == 3
        losses, _ = train(model, level, **options)
        amp.reset()
        return losses

    assert run(level, **LEVELS[level]) == pytest.approx(run("O0"), rel=0.02)


@pytest.mark.parametrize("level", LEVELS)
def test_an_optimizer_of_8_bits(level, not_compiled):
    losses, optimizer = train(make(), level, AdamW8bit, **LEVELS[level])
    states = [state for state in optimizer.state.values() if type(state["exp_avg"]).__name__ == "OptimState8bit"]
    assert states and all(state["exp_avg"].codes.dtype is torch.uint8 for state in states)
    amp.reset()
    assert losses == pytest.approx(train(make(), "O0", AdamW8bit)[0], rel=0.02)


@pytest.mark.parametrize("level", LEVELS)
def test_frozen_weights_of_int8(level):
    def start():
        model = make()
        quantize_(model[2], Int8WeightOnlyConfig())
        return model.requires_grad_(False)[2].weight, model

    weight, model = start()
    model[0].requires_grad_(True)
    before = weight.qdata.clone(), weight.scale.clone()
    losses, _ = train(model, level, **LEVELS[level])
    assert model[2].weight is weight and weight.qdata.dtype is torch.int8
    assert torch.equal(weight.qdata, before[0]) and torch.equal(weight.scale, before[1])
    amp.reset()
    _, plain = start()
    plain[0].requires_grad_(True)
    assert losses == pytest.approx(train(plain, "O0")[0], rel=0.02)
