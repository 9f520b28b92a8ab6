"""`AmpPrecision` trains, clips, accumulates and resumes under Lightning, unmodified: `lightning` and
`pytorch_lightning`.

Guards: integrations/lightning.
"""

import importlib
import logging
import sys

import pytest
import torch
from torch import nn

import amp_patch as amp

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
pytestmark = pytest.mark.filterwarnings("ignore:.*(num_workers|log_every_n_steps|weights_only).*")
OURS = "amp_patch.integrations.lightning"


@pytest.fixture(params=["lightning.pytorch", "pytorch_lightning"])
def kit(request, monkeypatch):
    """The package, a LightningModule of it, and the plugin as a process gets it that has imported no other package."""
    package = pytest.importorskip(request.param, reason=f"needs {request.param}: make test-clients")
    for other in {"lightning.pytorch", "pytorch_lightning"} - {request.param}:
        monkeypatch.delitem(sys.modules, other, raising=False)
    monkeypatch.delitem(sys.modules, OURS, raising=False)
    monkeypatch.setattr("amp_patch.integrations.lightning", None, raising=False)
    plugin = importlib.import_module(OURS).AmpPrecision
    assert issubclass(plugin, package.plugins.Precision)
    yield package, type("Net", (Net, package.LightningModule), {}), plugin
    del sys.modules[OURS]


class Net:
    """Calls its parts directly, and has a parameter of its own."""

    def __init__(self, spike=None):
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.head = nn.Linear(16, 2)
        self.shift = nn.Parameter(torch.zeros(2))
        self.spike, self.seen, self.norms, self.rates = spike, 0, [], []

    def training_step(self, batch, index):
        x, y = batch
        loss = nn.functional.mse_loss(self.head(self.encoder(x)) + self.shift, y)
        self.seen += 1
        return loss * float("inf") if self.seen - 1 == self.spike else loss

    def on_before_optimizer_step(self, optimizer):
        norms = [one.grad.float().norm() for one in amp.master_params(optimizer)]
        self.norms.append(torch.stack(norms).norm().item())

    def on_train_batch_end(self, *_):
        self.rates.append(self.optimizers().param_groups[0]["lr"])

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01, eps=1e-4)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def make_loader():
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(12, 8, generator=generator), torch.randn(12, 2, generator=generator)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=2)


def fit(kit, level, epochs, folder, resume_from=None, spike=None, accumulate=1, **options):
    package, kind, plugin = kit
    net = kind(spike)
    trainer = package.Trainer(
        max_epochs=epochs,
        plugins=[] if level is None else [plugin(level, verbosity=0, **options)],
        gradient_clip_val=0.5,
        accumulate_grad_batches=accumulate,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=folder,
    )
    trainer.fit(net, make_loader(), ckpt_path=resume_from)
    trainer.save_checkpoint(folder / f"{epochs}.ckpt")
    weights = [value.clone() for value in net.state_dict().values()]
    amp.reset()
    return weights, net


LEVELS = {"O1": {"loss_scale": {"init": 2.0**10}}, "O2": {"loss_scale": {"init": 2.0**10}}, "O4": {}, "O5": {}}


@pytest.mark.parametrize(("level", "accumulate"), [("O1", 1), ("O2", 2), ("O4", 2), ("O5", 1)])
def test_it_trains_clips_accumulates_and_resumes(kit, level, accumulate, tmp_path):
    plain, plain_net = fit(kit, None, 2, tmp_path / "plain", accumulate=accumulate)
    weights, net = fit(kit, level, 2, tmp_path, accumulate=accumulate, **LEVELS[level])
    assert net.rates == plain_net.rates and net.norms == pytest.approx(plain_net.norms, rel=0.1)
    for one, other in zip(weights, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=0.1, atol=0.05)
    fit(kit, level, 1, tmp_path, accumulate=accumulate, **LEVELS[level])
    again, _ = fit(kit, level, 2, tmp_path, tmp_path / "1.ckpt", accumulate=accumulate, **LEVELS[level])
    assert all(map(torch.equal, again, weights))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_skipped_step_runs_the_closure_once_and_no_schedule(kit, level, tmp_path):
    weights, net = fit(kit, level, 1, tmp_path, spike=2, loss_scale={"init": 2.0**10})
    assert net.seen == 6 and all(bool(weight.isfinite().all()) for weight in weights)
    assert net.rates == pytest.approx([0.009, 0.0081, 0.0081, 0.00729, 0.006561, 0.0059049])
    saved = torch.load(tmp_path / "1.ckpt", weights_only=False)
    state = next(value for key, value in saved.items() if key.startswith("AmpPrecision"))
    assert state["loss_scaler0"]["loss_scale"] == 2.0**9
    assert {weight.dtype for weight in weights} <= {torch.float32, torch.int64}
