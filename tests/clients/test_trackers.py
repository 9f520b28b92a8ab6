"""A `Tracker` logs steps and skips to a function, to TensorBoard, and to objects that log as Weights & Biases does.

Guards: integrations/trackers.
"""

import json
import types

import pytest
import torch
from torch import nn
from training import backward

import amp_patch as amp
from amp_patch.integrations.trackers import Tracker


def train(track, level, steps=6, spike=None, **options):
    """The norms of the true gradients, as an O0 run has them."""
    torch.manual_seed(0)
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    amp.initialize(net, optimizer, opt_level=level, verbosity=0, **options)
    for step in range(1, steps + 1):
        inputs = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
        loss = net(inputs).float().square().mean() * (float("inf") if step == spike else 1.0)
        backward(loss, optimizer)
        track(optimizer)
        optimizer.step()
        optimizer.zero_grad()
    track.flush()
    amp.reset()


def true_norms(steps):
    found = []
    torch.manual_seed(0)
    net = nn.Linear(4, 2)
    for step in steps:
        net.zero_grad()
        net(torch.randn(3, 4, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        found.append(torch.stack([parameter.grad.norm() for parameter in net.parameters()]).norm().item())
    return found


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_every_other_step_to_a_function(level):
    entries = []
    options = {"loss_scale": {"init": 2.0**8}} if level in ("O1", "O2") else {}
    train(Tracker(lambda *entry: entries.append(entry), every=2), level, **options)
    norms = [value for tag, value, _ in entries if tag == "amp/grad_norm"]
    assert norms == pytest.approx(true_norms((2, 4, 6)), rel=0.02)
    assert [step for tag, _, step in entries if tag == "amp/loss_scale"] == [2, 4, 6]
    assert {value for tag, value, _ in entries if tag == "amp/loss_scale"} == {2.0**8 if options else 1.0}


def test_the_norm_covers_sparse_and_complex_gradients():
    table, wave = nn.Embedding(5, 2, sparse=True), nn.Parameter(torch.ones(2, dtype=torch.complex64))
    optimizer = torch.optim.SGD([*table.parameters(), wave], lr=0.0)
    amp.initialize(table, optimizer, opt_level="O1", loss_scale=8.0, verbosity=0)
    # row 1 is read twice, so its gradient is (2, 2); the gradient of `wave` is (3, 3)
    backward(table(torch.tensor([1, 1, 2])).sum() + 3 * wave.real.sum(), optimizer)
    entries = {}
    track = Tracker(lambda tag, value, step: entries.update({tag: value}), every=1)
    track(optimizer)
    track.flush()
    assert entries["amp/grad_norm"] == pytest.approx((4 + 4 + 1 + 1 + 9 + 9) ** 0.5)


def test_the_norm_covers_float64_gradients():
    net = nn.Linear(2, 1).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    net(torch.ones(1, 2).double()).sum().backward()
    amp.initialize(net, optimizer, opt_level="O0", verbosity=0)
    entries = {}
    track = Tracker(lambda tag, value, step: entries.update({tag: value}), every=1)
    track(optimizer)
    track.flush()
    assert entries["amp/grad_norm"] == pytest.approx(3**0.5)


def test_a_skipped_step_is_seen():
    entries = []
    options = {"loss_scale": {"init": 2.0**8}}
    train(Tracker(lambda *entry: entries.append(entry), every=1), "O2", spike=2, **options)
    assert [value for tag, value, _ in entries if tag == "amp/steps_skipped"] == [0, 0, 1, 1, 1, 1]
    assert [value for tag, value, _ in entries if tag == "amp/loss_scale"] == [256, 256, 128, 128, 128, 128]


class Run:
    def __init__(self):
        self.logged = []

    def log(self, values, step):
        self.logged.append((values, step))


def test_what_logs_as_weights_and_biases_does():
    run = Run()
    train(Tracker(run, every=3), "O4", num_losses=2)
    assert [step for values, step in run.logged if "amp/loss_scale_1" in values] == [3, 6]


def test_tensorboard(tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard", reason="needs tensorboard: make test-clients")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with tensorboard.SummaryWriter(str(tmp_path)) as writer:
        train(Tracker(writer, every=2), "O4")
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [event.step for event in events.Scalars("amp/loss_scale")] == [2, 4, 6]
    assert [event.value for event in events.Scalars("amp/grad_norm")] == pytest.approx(true_norms((2, 4, 6)), rel=0.02)


def read_wandb(path):
    """The rows of a run's file: records of LevelDB's log format, in blocks of 32768 bytes, after a header of 7."""
    from wandb.proto import wandb_internal_pb2

    data, at, record, rows = path.read_bytes(), 7, b"", {}
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # no room for the head of a piece
            at += 32768 - at % 32768
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        record += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole one, or the last piece of one
            found = wandb_internal_pb2.Record.FromString(record)
            if found.WhichOneof("record_type") == "history":
                items = found.history.item
                row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
                rows[row["_step"]] = {key: value for key, value in row.items() if key.startswith("amp/")}
            record = b""
    return rows


def test_weights_and_biases(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="needs wandb: make test-clients")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb.init(project="amp_patch", dir=tmp_path) as run:
        train(Tracker(run, every=2), "O2", spike=3, loss_scale={"init": 2.0**8})
    wandb.teardown()  # ends the process that writes the file
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    rows = read_wandb(path)
    assert list(rows) == [2, 4, 6]
    assert [row["amp/loss_scale"] for row in rows.values()] == [256, 128, 128]
    assert [row["amp/steps_skipped"] for row in rows.values()] == [0, 1, 1]
    assert [row["amp/grad_norm"] for row in rows.values()] == pytest.approx(true_norms((2, 4, 6)), rel=0.02)


@pytest.mark.parametrize("make_target", [lambda run: run, lambda run: types.SimpleNamespace(run=run, log=run.log)])
def test_an_entry_for_a_step_before_the_current_one_of_a_run_is_added_to_that(make_target):
    logged = []
    run = types.SimpleNamespace(step=5, log=lambda numbers, **how: logged.append((numbers, how)))
    train(Tracker(make_target(run), every=2), "O4")
    numbers, how = logged[0]
    assert (numbers["amp/step"], how) == (2, {"commit": False})
    assert logged[-1][1] == {"step": 6}


@pytest.mark.parametrize("arguments", [(object(),), (print, 0)], ids=["target", "every"])
def test_what_is_no_tracker(arguments):
    with pytest.raises(amp.ArgumentTypeError):
        Tracker(*arguments)
