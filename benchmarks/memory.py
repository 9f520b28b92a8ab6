"""Bytes of one training step at its peak, and what they are, in every mode.

    python benchmarks/memory.py --workload gpt-256,resnet --json memory.json --plot memory.png

What is counted is what tensors asked of torch's allocator: on CUDA by `torch.cuda.max_memory_allocated`, on the CPU by
adding up the allocations and releases that torch's profiler records, in order. Both are exact and repeat from run to
run, which the resident size of a process does not: that one holds the libraries, what the C library keeps for reuse,
and the moment before a model was cast. The batch is not counted.
"""

import argparse
import contextlib
import gc
import os  # isort: split

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # read by torch as it loads: the profiler says nothing of itself

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from modes import AUTOCAST, MODES, Trainer, default_modes, prepared
from plots import add_option, save_stacks
from timing import environment, format_table, write_json
from torch import Tensor
from workloads import WORKLOADS, Size, Workload

import amp_patch as amp

COLUMNS = (
    "workload",
    "mode",
    "weights",
    "masters",
    "optimizer",
    "links",
    "copies",
    "activations",
    "gradients",
    "peak",
    "in",
    "ratio",
    "to",
)
WARMUP = 2
PREFIX = "memory benchmark: "


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of the measured step: how many bytes were live at its end, and at most within it."""

    name: str
    live: int
    peak: int


@dataclass(frozen=True, slots=True)
class Footprint:
    """One mode's bytes.

    Attributes:
        weights: parameters and buffers of the model.
        masters: what the optimizer steps on in their place.
        optimizer: its state.
        links: what else stays from one step to the next; low copies of weights, where they stay.
        copies: low copies of weights that the backward pass needs, links or not.
        activations: everything else that it needs, without the batch.
        gradients: after the backward pass.
        peak: the most that was live in a step.
        peak_phase: when that was.
    """

    weights: int
    masters: int
    optimizer: int
    links: int
    copies: int
    activations: int
    gradients: int
    peak: int
    peak_phase: str
    low: str | None


class CudaMeter:
    """Asks the allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = torch.cuda.memory_allocated(device)
        self._phases: list[Phase] = []

    def mark(self, name: str) -> None:
        """End a phase, and begin the next."""
        torch.cuda.synchronize(self._device)
        live, peak = torch.cuda.memory_allocated(self._device), torch.cuda.max_memory_allocated(self._device)
        self._phases.append(Phase(name, live - self._start, peak - self._start))
        torch.cuda.reset_peak_memory_stats(self._device)

    def phases(self) -> list[Phase]:
        return self._phases


class CpuMeter:
    """Adds up what the profiler has recorded; complete once its `with` block is left."""

    def __init__(self) -> None:
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)

    def __enter__(self) -> "CpuMeter":
        self._profile.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._profile.__exit__(*exception)

    def mark(self, name: str) -> None:
        """End a phase, and begin the next."""
        with torch.profiler.record_function(PREFIX + name):
            pass

    def phases(self) -> list[Phase]:
        results = self._profile.profiler.kineto_results  # the only place that has single allocations in order
        live = peak = 0
        phases = []
        for event in sorted(results.events(), key=lambda event: event.start_ns()):
            if event.name() == "[memory]":
                live += event.nbytes()
                peak = max(peak, live)
            elif event.name().startswith(PREFIX):
                phases.append(Phase(event.name().removeprefix(PREFIX), live, peak))
                peak = live
        return phases


@contextlib.contextmanager
def metered(device: torch.device) -> Iterator[CudaMeter | CpuMeter]:
    """A meter for the device. What an earlier mode has left in cycles is freed before, not in the middle."""
    gc.collect()
    if device.type == "cuda":
        yield CudaMeter(device)
        return
    with CpuMeter() as meter:
        yield meter


def measure(mode: str, workload: Workload, device: torch.device, micro_batches: int, fused: bool) -> Footprint:
    """Warm up, take the parts of one step apart, and measure the phases of another."""

    def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), fused=fused)

    torch.manual_seed(0)
    losses = workload.micro_batches(micro_batches)
    with metered(device) as meter, prepared(mode, workload.build, make_optimizer, device) as trainer:
        saved = SavedForBackward(trainer, workload)
        with saved:
            loss = trainer.forward(losses[0])
        del loss
        for _ in range(WARMUP):
            trainer.step(losses)
        trainer.optimizer.zero_grad()
        meter.mark("before")
        for number, compute in enumerate(losses, start=1):
            loss = trainer.forward(compute)
            meter.mark("forward")
            trainer.backward(loss / len(losses), is_last=number == len(losses))
            del loss
            meter.mark("backward")
        stepped = get_stepped(trainer)
        gradients = count_bytes(
            tensor.grad for tensor in (*trainer.model.parameters(), *stepped) if tensor.grad is not None
        )
        trainer.update()
        meter.mark("update")
        owned = [*trainer.model.parameters(), *trainer.model.buffers()]
        weights, state = count_bytes(owned), count_bytes(_tensors_in(trainer.optimizer.state.values()))
        masters = count_bytes([*owned, *stepped]) - weights
        low = str(trainer.low).removeprefix("torch.") if trainer.low else None
    phases = meter.phases()
    links = phases[0].live - weights - masters - state
    highest = max(phases[1:], key=lambda phase: phase.peak)
    return Footprint(
        weights, masters, state, links, saved.copies, saved.activations, gradients, highest.peak, highest.name, low
    )


def get_stepped(trainer: Trainer) -> list[Tensor]:
    """What the optimizer steps on: masters, where there are masters."""
    return list(amp.master_params(trainer.optimizer))


def count_bytes(tensors: Iterable[Tensor]) -> int:
    """The size of the memory behind the tensors, each piece once."""
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def _tensors_in(values: Iterable[object]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Mapping):
            yield from _tensors_in(value.values())


class SavedForBackward(torch.autograd.graph.saved_tensors_hooks):
    """Counts what one forward pass saves, as low copies of weights and as activations."""

    def __init__(self, trainer: Trainer, workload: Workload) -> None:
        super().__init__(self._note, lambda tensor: tensor)
        self.copies = self.activations = 0
        self._weights = list(trainer.model.parameters())
        counted = (*self._weights, *trainer.model.buffers(), *get_stepped(trainer), workload.inputs, workload.targets)
        self._seen = {tensor.untyped_storage().data_ptr() for tensor in counted}

    def _note(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            if self._is_copy(tensor):
                self.copies += storage.nbytes()
            else:
                self.activations += storage.nbytes()
        return tensor.detach()  # an output that its own node saves would keep the graph alive

    def _is_copy(self, tensor: Tensor) -> bool:
        """Tell whether the memory behind a tensor holds a weight, rounded."""
        if tensor.dtype not in (torch.float16, torch.bfloat16):
            return False
        held = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
        return any(
            weight.numel() == held.numel() and torch.equal(_flat(weight).to(held.dtype), held)
            for weight in self._weights
        )


def _flat(weight: Tensor) -> Tensor:
    """A weight's values in the order in which they are in memory."""
    return weight.detach().as_strided((weight.numel(),), (1,))


def table_rows(name: str, footprints: Mapping[str, Footprint]) -> list[list[str]]:
    """One row for each mode, in millions of bytes."""
    rows = []
    autocast = {str(dtype).removeprefix("torch."): mode for mode, dtype in AUTOCAST.items() if mode in footprints}
    for mode, found in footprints.items():
        to = autocast.get(found.low or "", next(iter(autocast.values()), ""))
        ratio = f"{found.peak / footprints[to].peak:.3f}" if to else "-"
        parts = (
            found.weights,
            found.masters,
            found.optimizer,
            found.links,
            found.copies,
            found.activations,
            found.gradients,
            found.peak,
        )
        rows.append([name, mode, *(f"{part / 1e6:.2f}" for part in parts), found.peak_phase, ratio, to or "-"])
    return rows


def get_parts(found: Footprint) -> dict[str, float]:
    """What the peak consists of, in millions of bytes."""
    parts = {
        "weights": found.weights,
        "masters": found.masters,
        "optimizer state": found.optimizer,
        "copies of weights": max(found.copies, found.links),
        "activations": found.activations,
    }
    rest = found.peak - sum(parts.values())  # gradients and temporaries, less what is free again by then
    return {name: value / 1e6 for name, value in (*parts.items(), ("rest of the peak", max(rest, 0)))}


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Bytes of a training step in every mode.")
    parser.add_argument(
        "--workload", default="gpt-256,mlp,resnet", help=f"of {', '.join(WORKLOADS)}; default: %(default)s"
    )
    parser.add_argument("--modes", help=f"of {', '.join(MODES)}; default: all, but no float16 on the CPU")
    parser.add_argument(
        "--micro-batches", type=int, default=1, help="into how many parts the batch is split (default: %(default)s)"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    parser.add_argument("--batch", type=int, help="rows of a step; default: the workload's")
    parser.add_argument("--sequence", type=int, help="tokens of a row")
    parser.add_argument("--image", type=int, help="pixels of a side")
    parser.add_argument("--fused", action="store_true", help="fused AdamW, in every mode")
    parser.add_argument("--json", type=Path, help="write the bytes into this file")
    add_option(parser)
    parsed = parser.parse_args(arguments)
    parsed.modes = parsed.modes.split(",") if parsed.modes else default_modes(torch.device(parsed.device))
    parsed.workload = parsed.workload.split(",")
    for option, allowed in (("workload", tuple(WORKLOADS)), ("modes", MODES)):
        if unknown := sorted(set(getattr(parsed, option)) - set(allowed)):
            parser.error(f"--{option}: {', '.join(unknown)} is not one of {', '.join(allowed)}")
    return parsed


def main(arguments: Sequence[str] | None = None) -> None:
    parsed = parse_arguments(arguments)
    device = torch.device(parsed.device)
    size = Size(parsed.batch, parsed.sequence, parsed.image)
    found: dict[str, dict[str, Footprint]] = {}
    for name in parsed.workload:
        torch.manual_seed(0)
        workload = WORKLOADS[name](size, device)
        found[name] = {
            mode: measure(mode, workload, device, parsed.micro_batches, parsed.fused) for mode in parsed.modes
        }
    machine = {
        **environment(device),
        "optimizer": "AdamW, fused" if parsed.fused else "AdamW",
        "micro_batches": parsed.micro_batches,
    }
    print(", ".join(f"{key} {value}" for key, value in machine.items()) + "; millions of bytes", end="\n\n")
    rows = [row for name, footprints in found.items() for row in table_rows(name, footprints)]
    print(format_table(COLUMNS, rows, left=2))
    report = {
        name: {mode: asdict(footprint) for mode, footprint in footprints.items()} for name, footprints in found.items()
    }
    write_json(parsed.json, {"environment": machine, "workloads": report})
    panels = {
        name: {mode: get_parts(footprint) for mode, footprint in footprints.items()}
        for name, footprints in found.items()
    }
    save_stacks(parsed.plot, "Memory of one training step at its peak", "millions of bytes", panels)


if __name__ == "__main__":
    main()
