"""Trainers that write torch.autocast themselves, unmodified: explained, traced, and run with a list over autocast's."""

import logging
import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from amp_patch import insight, native
from amp_patch.insight.fault_record import FaultRecord
from amp_patch.insight.tracer import tracing

SEED = 300.0
"""What the seeded module multiplies by: the product of two such values does not fit in float16."""


class Block(nn.Module):
    """A layer with a product whose range is that of `factor` squared, and a result of the usual size."""

    def __init__(self, factor):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.factor = factor

    def forward(self, x):
        x = self.inner(x) * self.factor
        return torch.softmax(x @ x.transpose(-2, -1), -1) @ x / self.factor


class Net(nn.Module):
    def __init__(self, factor=1.0):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.block, self.head = nn.Linear(8, 8), Block(factor), nn.Linear(8, 2)

    def forward(self, x, labels=None):
        logits = self.head(self.block(self.first(x)))
        return logits if labels is None else {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def make_data():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(32, 4, 8, generator=generator)
    return [{"x": one, "labels": (one[:, 0] > 0).long()} for one in x]


def by_accelerate(net, dtype, folder):
    accelerate = pytest.importorskip("accelerate", reason="needs accelerate: make test-clients")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    loader = torch.utils.data.DataLoader(make_data(), batch_size=8)
    model, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    for batch in loader:
        loss = model(**batch)["loss"]
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def by_transformers(net, dtype, folder):
    transformers = pytest.importorskip("transformers", reason="needs transformers: make test-clients")
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        bf16=True,
        use_cpu=True,
        report_to=[],
        max_steps=4,
        per_device_train_batch_size=8,
        save_strategy="no",
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    transformers.Trainer(model=net, args=arguments, train_dataset=make_data()).train()


def by_lightning(net, dtype, folder):
    lightning = pytest.importorskip("lightning.pytorch", reason="needs lightning: make test-clients")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net

        def training_step(self, batch, index):
            return self.net(**batch)["loss"]

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(
        precision="bf16-mixed",
        accelerator="cpu",
        max_steps=4,
        enable_model_summary=False,
        default_root_dir=folder,
        **options,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(make_data(), batch_size=8))


def by_hand(net, dtype, folder):
    """As most scripts do; it alone has float16 on a CPU."""
    optimizer, scaler = torch.optim.SGD(net.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=64.0)
    for batch in torch.utils.data.DataLoader(make_data(), batch_size=8):
        with torch.autocast("cpu", dtype):
            loss = net(**batch)["loss"]
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


TRAINERS: dict[str, Callable] = {
    "Accelerate": by_accelerate,
    "transformers": by_transformers,
    "Lightning": by_lightning,
    "by hand": by_hand,
}
PREFIX = {"Lightning": "net."}
pytestmark = [
    pytest.mark.parametrize("name", TRAINERS),
    pytest.mark.filterwarnings("ignore"),
]


def train(name, folder, factor=1.0, dtype=torch.bfloat16):
    net = Net(factor)
    torch.manual_seed(0)
    TRAINERS[name](net, dtype, folder)
    return [weight.detach().clone() for weight in net.parameters()]


def test_recording_is_neutral_and_knows_rules_and_modules(name, tmp_path):
    expected = train(name, tmp_path)
    with insight.recording() as recording:
        weights = train(name, tmp_path)
    assert all(map(torch.equal, weights, expected))
    assert (recording.run.low, len(recording.steps)) == ("bf16", 4)
    rows = {op.module: op for op in recording.ops if op.op == "F.linear" and op.phase == "forward"}
    assert {f"{PREFIX.get(name, '')}{module}" for module in ("first", "block.inner", "head")} <= rows.keys()
    for row in rows.values():
        assert (row.rule, row.ran, row.entry.partition(":")[0]) == ("whitelist", ("bf16",), "autocast-cpu.yaml")
    with tracing() as tracer:
        assert all(map(torch.equal, train(name, tmp_path), expected))
    assert tracer.faults == []


def test_a_list_changes_what_it_names(name, tmp_path):
    expected = train(name, tmp_path)
    with native.install(lists="autocast-cpu"):
        assert all(map(torch.equal, train(name, tmp_path), expected))
    (tmp_path / "mine.yaml").write_text(f'modules: [{{match: "{PREFIX.get(name, "")}block", run: float32}}]\n')
    with native.install(lists=tmp_path / "mine.yaml"), insight.recording() as recording:
        train(name, tmp_path)
    ran = {op.module: op.ran for op in recording.ops if op.op == "F.linear" and op.phase == "forward"}
    assert ran[f"{PREFIX.get(name, '')}block.inner"] == ("f32",)
    assert ran[f"{PREFIX.get(name, '')}head"] == ("bf16",)


def test_a_seeded_fault_is_traced_and_repaired(name, tmp_path):
    """In bfloat16 what does not fit is larger still."""
    factor, dtype = (SEED, torch.float16) if name == "by hand" else (1e20, torch.bfloat16)
    with tracing() as tracer:
        train(name, tmp_path, factor, dtype)
    fault = tracer.recording.of(FaultRecord)[0]
    assert fault.aten in ("bmm", "mm") and fault.module == f"{PREFIX.get(name, '')}block"
    assert re.match(r"test_autocast_trainers\.py:\d+$", fault.site)
    if dtype is torch.bfloat16:
        assert fault.cause == "mathematics"  # float32 has no more range
        return
    text = insight.format_fault(fault, tracer.recording.run)
    assert "amp-patch run --lists fix.yaml" in text
    advised = re.search(r"modules: \[.*?\](?= |$)", text, re.MULTILINE)
    (tmp_path / "fix.yaml").write_text(advised[0])
    with native.install(lists=tmp_path / "fix.yaml"), tracing() as tracer:
        train(name, tmp_path, factor, dtype)
    assert tracer.faults == []
