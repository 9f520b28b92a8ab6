"""Checkpoint and resume is bitwise, with every level, optimizer and order of load calls.

Guards: saving, session/session, training/groups, training/loss_scaler, training/model_hooks.
"""

import pytest
import torch
import torch.nn.functional as F
from reference import make_batches, make_model
from training import backward

import amp_patch as amp

OPTIMIZERS = {  # an eps of 1e-8 is 0 in the float16 of O3
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=3e-3, eps=1e-4, amsgrad=True),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=3e-3, eps=1e-4, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=3e-3, eps=1e-4, fused=True),
}


def train(model, optimizer, scheduler, batches):
    losses = []
    for images, targets in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), targets)
        backward(loss, optimizer)
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
        optimizer.step()
        if not optimizer.step_was_skipped:
            scheduler.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("level", "kind", "loaded_before"),
    [
        ("O0", "sgd", ()),
        ("O1", "adam", ("optimizer",)),
        ("O2", "sgd-fused", ("model", "optimizer")),
        ("O3", "sgd", ("model",)),
        ("O4", "adamw-fused", ("model", "optimizer")),
        ("O5", "adamw-foreach", ()),
        ("O5", "adam", ("optimizer",)),
    ],
)
def test_the_next_steps_are_those_of_the_uninterrupted_run(level, kind, loaded_before, tmp_path):
    batches = make_batches(10, size=8)

    def start(before_initialize=lambda *_: None):
        model = make_model(3, width=4)
        optimizer = OPTIMIZERS[kind](model.parameters())
        before_initialize(model, optimizer)
        amp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
        return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)

    model, optimizer, scheduler = start()
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 64.0, "unskipped": 1993}})
    train(model, optimizer, scheduler, batches[:3])
    names = ("model", "optimizer", "scheduler", "amp")
    for name, source in zip(names, (model, optimizer, scheduler, amp), strict=True):
        torch.save(source.state_dict(), tmp_path / name)
    expected = train(model, optimizer, scheduler, batches[3:]), amp.state_dict()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    amp.reset()

    saved = {name: torch.load(tmp_path / name, weights_only=True) for name in names}

    def load(model, optimizer, parts):
        for part, source in (("model", model), ("optimizer", optimizer)):
            if part in parts:
                source.load_state_dict(saved[part])

    model, optimizer, scheduler = start(lambda *sources: load(*sources, loaded_before))
    load(model, optimizer, {"model", "optimizer"} - {*loaded_before})
    scheduler.load_state_dict(saved["scheduler"])
    amp.load_state_dict(saved["amp"])
    assert (train(model, optimizer, scheduler, batches[3:]), amp.state_dict()) == expected
    assert expected[1]["loss_scaler0"]["loss_scale"] == 128.0  # it grew on the way
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
