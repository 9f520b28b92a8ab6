"""`apex.optimizers.FP16_Optimizer` has the attributes that scripts of 2019 know, and reads files of each layout that it
had.

Guards: apex/optimizers/fp16_optimizer.
"""

import copy

import pytest
import torch
from torch import nn

import amp_patch as amp
from amp_patch.apex.optimizers import FP16_Optimizer, FusedAdam


class SavesFlat(FP16_Optimizer):
    """A subclass that writes and reads its files itself, as unilm's does."""

    NAMES = ("dynamic_loss_scale", "cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")

    def state_dict(self):
        state = {name: getattr(self, name) for name in self.NAMES}
        return {**state, "inner": self.optimizer.state_dict(), "flat": self.fp32_groups_flat}

    def load_state_dict(self, state):
        for name in self.NAMES:
            setattr(self, name, state[name])
        self.optimizer.load_state_dict(state["inner"])
        for current, saved in zip(self.fp32_groups_flat, state["flat"], strict=True):
            current.data.copy_(saved.data)


def make(kind=FP16_Optimizer, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)).half()
    groups = [{"params": list(layer.parameters())} for layer in model]
    inner = FusedAdam(groups, lr=0.01, bias_correction=False, max_grad_norm=1.0)
    options = options or {"dynamic_loss_scale": True}
    return model, kind(inner, **options, verbose=False)


def train(model, optimizer, steps, bad=()):
    for step in steps:
        inputs = torch.randn(3, 4, generator=torch.Generator().manual_seed(step)).half()
        loss = model(inputs).float().square().mean()
        optimizer.backward(loss * float("inf") if step in bad else loss)
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.clone() for parameter in model.parameters()]


def as_apex_saved(optimizer, layout):
    """By hand: what Apex wrote with lists of masters, or before that with one flat master for each group."""
    inner = optimizer.optimizer.state_dict()
    state = {
        "dynamic_loss_scale": True,
        "cur_scale": optimizer.cur_scale,
        "cur_iter": optimizer.cur_iter,
        "last_overflow_iter": optimizer.last_overflow_iter,
        "scale_factor": 2,
        "scale_window": 1000,
        "optimizer_state_dict": inner,
    }
    masters = [[p.detach().clone() for p in group["params"]] for group in optimizer.param_groups]
    if layout == "lists":
        return {**state, "fp32_groups": masters}
    flat_state, groups = {}, []
    for index, group in enumerate(inner["param_groups"]):
        entries = [inner["state"][key] for key in group["params"]]
        moments = {name: torch.cat([entry[name].flatten() for entry in entries]) for name in ("exp_avg", "exp_avg_sq")}
        flat_state[index] = {"step": group["step"], **moments}
        groups.append({**{key: value for key, value in group.items() if key != "step"}, "params": [index]})
    state["optimizer_state_dict"] = {"state": flat_state, "param_groups": groups}
    return {**state, "fp32_groups_flat": [torch.cat([p.flatten() for p in group]) for group in masters]}


@pytest.mark.parametrize("layout", ["own", "lists", "flat", "subclass"])
def test_files_of_every_layout_resume_bitwise(layout, tmp_path):
    model, optimizer = make(SavesFlat if layout == "subclass" else FP16_Optimizer)
    optimizer.scale_window = 4
    train(model, optimizer, range(5), bad=(1,))
    assert (optimizer.cur_iter, optimizer.last_overflow_iter, optimizer.cur_scale) == (5, 1, 2.0**15)
    saved = as_apex_saved(optimizer, layout) if layout in ("lists", "flat") else optimizer.state_dict()
    torch.save({"model": model.state_dict(), "optimizer": {**saved, "scale_window": 4}}, tmp_path / "file.pt")
    expected = train(model, optimizer, range(5, 12))
    assert optimizer.cur_scale == 2.0**17  # after 4 good steps, and 4 more
    resumed, other = make(type(optimizer))
    file = torch.load(tmp_path / "file.pt", weights_only=True)
    resumed.load_state_dict(file["model"])
    other.load_state_dict(file["optimizer"])
    assert all(torch.equal(a, b) for a, b in zip(train(resumed, other, range(5, 12)), expected, strict=True))
    assert (other.cur_scale, other.cur_iter, other.last_overflow_iter) == (2.0**17, 12, 1)


def test_an_overflow_skips_under_a_static_scale_too():
    model, optimizer = make(static_loss_scale=128.0)
    before = [parameter.clone() for parameter in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(train(model, optimizer, [0], bad=(0,)), before, strict=True))
    assert optimizer.overflow and (optimizer.cur_scale, optimizer.cur_iter) == (128.0, 1)
    train(model, optimizer, [1])
    assert not optimizer.overflow and not torch.equal(model[0].weight, before[0])


SPOILED = {
    "nothing": lambda state: {},
    "no scale": lambda state: {key: value for key, value in state.items() if key != "cur_scale"},
    "a scale that is inf": lambda state: {**state, "cur_scale": float("inf")},
    "a short group": lambda state: {**state, "fp32_groups_flat": [flat[1:] for flat in state["fp32_groups_flat"]]},
    "another optimizer's": lambda state: {
        **state,
        "optimizer_state_dict": torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1).state_dict(),
    },
}


@pytest.mark.parametrize("kind", SPOILED)
def test_wrong_files_are_refused_and_change_nothing(kind):
    model, optimizer = make()
    train(model, optimizer, range(2))
    state = as_apex_saved(optimizer, "flat")
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(amp.CheckpointError):
        optimizer.load_state_dict(SPOILED[kind](state))
    after = optimizer.state_dict()
    assert after["cur_scale"] == before["cur_scale"] and after["cur_iter"] == before["cur_iter"]
    for a, b in zip(sum(after["fp32_groups"], []), sum(before["fp32_groups"], []), strict=True):
        assert torch.equal(a, b)


def test_what_attributes_cannot_be_is_said():
    _, optimizer = make()
    with pytest.raises(amp.OptimizerError, match="always 2"):
        optimizer.scale_factor = 4
    with pytest.raises(amp.OptimizerError, match="pass it to FP16_Optimizer"):
        optimizer.dynamic_loss_scale = False
