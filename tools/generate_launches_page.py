"""Launches, casts and waits of one training step in every mode, counted on the simulated device of the tests: numbers
that need no GPU, and are the same on every machine.

    python tools/generate_launches_page.py            print docs/launches.md
    python tools/generate_launches_page.py --write    write it

g++ builds the device when it is first used.
"""

import argparse
import contextlib
import functools
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

import simdev  # noqa: E402

import amp_patch as amp  # noqa: E402
from benchmarks.training import WORKLOADS, Autocast, Loss, Size, Trainer, Workload, prepared  # noqa: E402

PAGE = ROOT / "docs" / "launches.md"
DEVICE = torch.device("sim")
WARMUP = 2
BEHIND = 1_000_000  # launches that the device is behind: nothing has arrived before somebody waits for it
MODELS = {"gpt-64": ("GPT", Size(4, 8)), "resnet-8": ("conv net", Size(1)), "mlp-64": ("mlp", Size(1))}
OPTIMIZERS = {
    "plain": {"foreach": False, "fused": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
MODES = ("O0", "autocast-float16", "O1", "O2", "O3", "autocast-bfloat16", "O4", "O5")
RIVALS = {"O1": "autocast-float16", "O2": "autocast-float16", "O4": "autocast-bfloat16", "O5": "autocast-bfloat16"}
COLUMNS = [("gpt-64", "plain"), *((name, kind) for name in MODELS for kind in ("foreach", "fused"))]
WAYS = ("one loss", "four micro-batches", "two losses", "clipping")


@dataclass(frozen=True, slots=True)
class Counted:
    """One step.

    Attributes:
        launches: in forward, in backward passes (with all of `scale_loss`), and in the update.
        waits: of the host, in the same three.
        casts: kernels that copy one tensor to another dtype.
        foreach_copies: kernels that copy many.
    """

    launches: tuple[int, int, int]
    waits: tuple[int, int, int]
    casts: int
    foreach_copies: int

    @property
    def total(self) -> int:
        return sum(self.launches)


class Meter:
    """Counts what is done in the phases of a step."""

    def __init__(self) -> None:
        self._counts: dict[str, list[simdev.Counts]] = {"forward": [], "backward": [], "update": []}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        with simdev.count() as counts:
            yield
        self._counts[name].append(counts)

    def result(self) -> Counted:
        phases = self._counts.values()
        records = [record for found in phases for counts in found for record in counts.records]
        return Counted(
            launches=tuple(sum(counts.launches for counts in found) for found in phases),
            waits=tuple(sum(counts.syncs for counts in found) for found in phases),
            casts=sum(_is_cast(record) for record in records),
            foreach_copies=sum(record.op.startswith("aten::_foreach_copy_") for record in records),
        )


def _is_cast(record: simdev.Record) -> bool:
    return record.op == "aten::copy_" and record.kind == "launch" and record.dtype != record.result_dtype


def take_step(trainer: Trainer, losses: list[Loss], way: str, meter: Meter) -> None:
    """One step: of one loss, of four losses that are accumulated, of two that are scaled one by one, or clipped."""
    trainer.optimizer.zero_grad()
    for number, compute in enumerate(losses, start=1):
        with meter.phase("forward"):
            loss = trainer.forward(compute)
            loss = loss / len(losses) if len(losses) > 1 else loss
        with meter.phase("backward"):
            trainer.backward(loss, is_last=way == "two losses" or number == len(losses))
    with meter.phase("update"):
        if way == "clipping":
            _clip(trainer)
        trainer.update()


def _clip(trainer: Trainer) -> None:
    if isinstance(trainer, Autocast):
        trainer._scaler.unscale_(trainer.optimizer)
    torch.nn.utils.clip_grad_norm_(amp.master_params(trainer.optimizer), 1.0)


@functools.cache
def _make_workload(name: str) -> Workload:
    torch.manual_seed(0)
    return WORKLOADS[name](MODELS[name][1], DEVICE)


@functools.cache
def count(name: str, mode: str, optimizer: str, way: str = "one loss") -> Counted:
    """Count one step of a workload of `MODELS` in one of `MODES`, with an AdamW of `OPTIMIZERS`, in one of `WAYS`."""
    workload = _make_workload(name)
    losses = workload.micro_batches({"four micro-batches": 4, "two losses": 2}.get(way, 1))

    def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), eps=1e-4, **OPTIMIZERS[optimizer])

    torch.manual_seed(0)
    with simdev.lag(BEHIND), prepared(mode, workload.build, make_optimizer, DEVICE) as trainer:
        for _ in range(WARMUP):
            take_step(trainer, losses, way, Meter())
        meter = Meter()
        take_step(trainer, losses, way, meter)
        return meter.result()


# ---- the page --------------------------------------------------------------------------------------------------------

HEAD = """\
# Launches and waits

`tools/generate_launches_page.py` writes this page. It counts on a simulated device, which runs torch's CPU kernels and
rejects what a GPU rejects. A launch is one op on the device, such as a product, a cast of a tensor, or a `_foreach_` or
fused op on many tensors. A wait is a moment in which the host does nothing until the device has caught up.

**These are counts, not times.** The launches show how much work the host does for a step, which limits small models on
a GPU. The waits show whether the host ever stops queuing work. The counts do not show how long a kernel takes.

Each figure is one step of AdamW after two warm-up steps, on a device that lags far behind the host. GPT has 4 blocks
and {gpt} parameters, the conv net has 6 residual blocks with BatchNorm and {resnet} parameters, and the mlp has 5
layers and {mlp} parameters. Attention is one launch. autocast in float16 uses `GradScaler`.
The version of torch is {torch}.
"""

BOUND = """
No level can save what a step in float32 launches: {} to {} of the launches of autocast in float16, with a foreach or
fused optimizer. The share is largest for the conv net, which has few weights for its number of ops, so autocast casts
little. O1 and O4 save the casts of weights in the forward pass. The gradient of each weight is still cast to float32 by
its own launch."""


def make_page() -> str:
    """Return the page."""
    sizes = {name.partition("-")[0]: len(list(_make_workload(name).build().parameters())) for name in MODELS}
    version = torch.__version__.partition("+")[0]
    parts = [
        HEAD.format(torch=version, **sizes),
        "## Launches of a step\n",
        *_table(["", *(f"{MODELS[name][0]}, {kind}" for name, kind in COLUMNS)], _launch_rows()),
        "\nAs ratios to autocast in the same dtype:\n",
        *_table(["", *(f"{MODELS[name][0]}, {kind}" for name, kind in COLUMNS)], _ratio_rows()),
        BOUND.format(*_find_bounds()),
        "\n## By phase\n",
        "This table is for GPT with the fused AdamW. Backward includes all of `scale_loss`. A cast copies one tensor to"
        " another\ndtype, and a foreach copy copies many.\n",
        *_table(["", "forward", "backward", "update", "casts", "foreach copies"], _phase_rows()),
        "\n## Waits\n",
        "If an optimizer cannot skip a step on the device, the host has to decide: under a dynamic loss scale, its step"
        " waits\nonce, as with `GradScaler`. With a fused optimizer, or under a static scale, nothing waits. Waits in a"
        " step of GPT:\n",
        *_table(["", *OPTIMIZERS], _wait_rows()),
        "\n## Accumulating, several losses, clipping\n",
        "Launches in a step of GPT with the fused AdamW, compared to a step with one loss:\n",
        *_table(["", *WAYS], _way_rows()),
    ]
    return "\n".join(parts) + "\n"


def _table(head: list[str], rows: Iterable[list[object]]) -> list[str]:
    lines = [head, ["---"] * len(head), *([str(cell) for cell in row] for row in rows)]
    return [f"| {' | '.join(line)} |" for line in lines]


def _launch_rows() -> Iterator[list[object]]:
    for mode in MODES:
        yield [mode, *(count(name, mode, kind).total for name, kind in COLUMNS)]


def _ratio_rows() -> Iterator[list[object]]:
    for mode in RIVALS:
        yield [mode, *(f"{ratio(name, mode, kind):.2f}" for name, kind in COLUMNS)]


def ratio(name: str, mode: str, optimizer: str) -> float:
    """Return the launches of a level as a part of those of autocast."""
    return count(name, mode, optimizer).total / count(name, RIVALS[mode], optimizer).total


def _find_bounds() -> list[str]:
    """Return the smallest and the largest part of the launches of autocast that a step in float32 has."""
    columns = [(name, kind) for name, kind in COLUMNS if kind != "plain"]
    parts = [count(name, "O0", kind).total / count(name, RIVALS["O1"], kind).total for name, kind in columns]
    return [f"{min(parts):.2f}", f"{max(parts):.2f}"]


def _phase_rows() -> Iterator[list[object]]:
    for mode in MODES:
        found = count("gpt-64", mode, "fused")
        yield [mode, *found.launches, found.casts, found.foreach_copies]


def _wait_rows() -> Iterator[list[object]]:
    for mode in MODES:
        yield [mode, *(sum(count("gpt-64", mode, kind).waits) for kind in OPTIMIZERS)]


def _way_rows() -> Iterator[list[object]]:
    for mode in MODES:
        yield [mode, *(count("gpt-64", mode, "fused", way).total for way in WAYS)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write docs/launches.md instead of printing it")
    page = make_page()
    if parser.parse_args().write:
        PAGE.write_text(page, encoding="utf-8")
    else:
        print(page)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
