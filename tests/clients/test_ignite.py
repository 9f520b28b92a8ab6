"""`create_supervised_trainer(amp_mode="apex")` of pytorch-ignite, unmodified, trains with the stand-in.

Guards: apex/amp/*.
"""

import pytest
import torch
from torch import nn

import amp_patch

pytest.importorskip("ignite", reason="needs pytorch-ignite: make test-clients")

from apex import amp  # the stand-in, from conftest.py
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import Checkpoint, DiskSaver
from ignite.metrics import Loss


def make_batches():
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(4, 6, generator=generator), torch.randn(4, 2, generator=generator)) for _ in range(6)]


class State:
    """What ignite's checkpoints ask of what they hold, of amp."""

    state_dict = staticmethod(lambda: amp.state_dict())
    load_state_dict = staticmethod(lambda state: amp.load_state_dict(state))


def train(level, folder, epochs, resume_from=None, seed=0, **options):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if level is not None:
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    mode = None if level is None else "apex"
    trainer = create_supervised_trainer(model, optimizer, nn.MSELoss(), amp_mode=mode, gradient_accumulation_steps=2)
    losses = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: losses.append(engine.state.output))
    kept = {"trainer": trainer, "model": model, "optimizer": optimizer} | ({} if level is None else {"amp": State})
    saver = Checkpoint(kept, DiskSaver(str(folder), require_empty=False), n_saved=None)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, saver)
    if resume_from is not None:
        Checkpoint.load_objects(kept, torch.load(resume_from, weights_only=True))
    trainer.run(make_batches(), max_epochs=epochs)
    evaluator = create_supervised_evaluator(model, {"loss": Loss(nn.MSELoss())})
    metric = evaluator.run(make_batches()).metrics["loss"]
    weights = [value.clone() for value in model.state_dict().values()]
    amp_patch.reset()
    return losses, metric, weights


LEVELS = {"O0": {}, "O1": {"loss_scale": 2.0**8}, "O2": {"loss_scale": 2.0**8}, "O1-dynamic": {}, "O2-dynamic": {}}


@pytest.mark.parametrize("level", LEVELS)
def test_it_trains_evaluates_and_resumes(level, tmp_path):
    name = level.partition("-")[0]
    plain_losses, plain_metric, _ = train(None, tmp_path / "plain", 2)
    losses, metric, weights = train(name, tmp_path, 2, **LEVELS[level])
    assert losses == (plain_losses if level == "O0" else pytest.approx(plain_losses, abs=0.05))
    assert metric == (plain_metric if level == "O0" else pytest.approx(plain_metric, abs=0.05))
    assert losses[-1] < losses[0]
    (checkpoint,) = tmp_path.glob("checkpoint_6.pt")
    again, metric_again, weights_again = train(name, tmp_path, 2, checkpoint, seed=1, **LEVELS[level])
    assert again == losses[6:] and metric_again == metric
    assert all(map(torch.equal, weights_again, weights))
