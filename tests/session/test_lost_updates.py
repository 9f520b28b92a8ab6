"""`initialize` warns once of trained 16-bit weights that an optimizer steps on without masters, and of nothing else.

Guards: session/bindings, config/levels.
"""

import warnings

import pytest
import torch
from torch import nn

import amp_patch as amp
from amp_patch.config import levels

LEVELS = [level.name for level in levels.read_levels()]
WITH_MASTERS = " or ".join(level.name for level in levels.read_levels() if level.has_masters)


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def get_warnings(*args: object, **options: object) -> list[str]:
    """The warnings of one `initialize` about lost updates."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        amp.initialize(*args, verbosity=0, **options)
    return [str(warning.message) for warning in caught if "updates" in str(warning.message)]


@pytest.mark.parametrize("level", levels.read_levels(), ids=lambda level: level.name)
def test_a_level_is_warned_of_if_it_loses_small_updates(level):
    model = make_model()
    told = get_warnings(model, torch.optim.SGD(model.parameters()), opt_level=level.name)
    assert len(told) == (not level.keeps_small_updates)
    for message in told:
        assert "6 weights in 16 bits (0.weight, 0.bias, 1.weight, ...)" in message
        assert f"Use {WITH_MASTERS}" in message


@pytest.mark.parametrize("level", LEVELS)
def test_16_bit_weights_of_another_model_are_warned_of_where_they_get_no_masters(level):
    model, other = make_model(), nn.Linear(3, 3, bias=False).bfloat16()
    told = get_warnings(model, torch.optim.SGD([*model.parameters(), *other.parameters()]), opt_level=level)
    gets_masters = next(known.has_masters for known in levels.read_levels() if known.name == level)
    assert len(told) == (not gets_masters)
    if level in ("O0", "O1", "O4"):
        assert "1 weight in 16 bits (parameter of shape (3, 3))" in told[0] and ".float()" in told[0]


def test_several_optimizers_have_one_warning_and_a_second_call_has_none():
    model = make_model()
    optimizers = [
        torch.optim.SGD(model[0].parameters()),
        torch.optim.Adagrad(model[1:].parameters()),
    ]
    (told,) = get_warnings(model, optimizers, opt_level="O3")
    assert "SGD and Adagrad" in told
    assert get_warnings(model, optimizers, opt_level="O3") == []


@pytest.mark.parametrize("kept", ["frozen", "float32 by override", "no optimizer", "masters by override"])
def test_weights_that_lose_nothing_are_not_warned_of(kept):
    model = make_model()
    options = {
        "float32 by override": {"cast_model_type": "float32"},
        "masters by override": {"master_weights": True},
    }.get(kept, {})
    if kept == "frozen":
        model.requires_grad_(False)
    optimizer = None if kept == "no optimizer" else torch.optim.SGD(model.parameters())
    assert get_warnings(model, optimizer, opt_level="O3", **options) == []


class Rounding(torch.optim.SGD):
    """An optimizer with a step of its own, which may round stochastically."""

    def step(self, closure=None):
        return super().step(closure)


def test_optimizers_with_a_step_of_their_own_are_not_judged():
    model = make_model()
    assert get_warnings(model, Rounding(model.parameters()), opt_level="O3") == []
