"""Bytes of one training step at its peak, and what they are, in every mode.

    python benchmarks/memory.py --workload gpt-256,resnet

What is counted is what tensors asked of torch's allocator: on an accelerator by its
allocator, such as `torch.cuda.max_memory_allocated`, on the CPU by
adding up the allocations and releases that torch's profiler records, in order. Both are exact and repeat from run to
run, which the resident size of a process does not: that one holds the libraries, what the C library keeps for reuse,
and the moment before a model was cast. The batch is not counted.
"""

import argparse
import contextlib
import gc
import os  # isort: split

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # read by torch as it loads: the profiler says nothing of itself

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from timing import environment, format_table, get_allocator
from torch import Tensor
from training import AUTOCAST, SPLIT, WORKLOADS, Size, Workload, add_options, parse_options, prepared

import amp_patch as amp

COLUMNS = ("workload", "mode", "weights", "masters", "optimizer", "saved", "gradients", "peak", "in", "ratio", "to")
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
        saved: what forward leaves for backward: activations, and low copies of weights.
        gradients: what the backward passes leave.
        peak: the most that was live in a step.
        peak_phase: when that was.
    """

    weights: int
    masters: int
    optimizer: int
    saved: int
    gradients: int
    peak: int
    peak_phase: str
    low: torch.dtype | None


class AllocatorMeter:
    """Asks the allocator of an accelerator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._allocator = get_allocator(device)
        self._start = self._allocator.memory_allocated(device)
        self._phases: list[Phase] = []

    def mark(self, name: str) -> None:
        """End a phase, and begin the next."""
        torch.accelerator.synchronize(self._device)
        live = self._allocator.memory_allocated(self._device)
        peak = self._allocator.max_memory_allocated(self._device)
        self._phases.append(Phase(name, live - self._start, peak - self._start))
        self._allocator.reset_peak_memory_stats(self._device)

    def phases(self) -> list[Phase]:
        return self._phases


class CpuMeter:
    """Adds up what the profiler has recorded; complete once the profiler has ended."""

    def __init__(self, profile: torch.profiler.profile) -> None:
        self._profile = profile

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
def metered(device: torch.device) -> Iterator[AllocatorMeter | CpuMeter]:
    """A meter for the device. What an earlier mode has left in cycles is freed before, not in the middle."""
    gc.collect()
    if get_allocator(device) is not None:
        yield AllocatorMeter(device)
        return
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        yield CpuMeter(profile)


def measure(mode: str, workload: Workload, device: torch.device, fused: bool, micro_batches: int = 1) -> Footprint:
    """Warm up, and measure the phases of one step: those of its last micro-batch, where it has several."""

    def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), fused=fused)

    torch.manual_seed(0)
    losses = workload.micro_batches(micro_batches)
    with metered(device) as meter, prepared(mode, workload.build, make_optimizer, device) as trainer:
        for _ in range(WARMUP):
            trainer.step(losses)
        trainer.optimizer.zero_grad()
        trainer.forward(losses[0])  # drops what a mode keeps from the step to the next pass, which is not counted
        meter.mark("start")
        for compute in losses[:-1]:
            trainer.backward(trainer.forward(compute), is_last=False)
        meter.mark("before")
        loss = trainer.forward(losses[-1])
        meter.mark("forward")
        trainer.backward(loss, is_last=True)
        del loss
        meter.mark("backward")
        trainer.update()
        meter.mark("update")
        owned = [*trainer.model.parameters(), *trainer.model.buffers()]
        stepped = list(amp.master_params(trainer.optimizer))
        weights = count_bytes(owned)
        masters = count_bytes([*owned, *stepped]) - weights
        if mode in SPLIT:
            masters //= 2  # to ask a split master for its memory gives it its upper half
        states = [value for state in trainer.optimizer.state.values() for value in state.values()]
        optimizer = count_bytes(value for value in states if isinstance(value, Tensor))
        low = trainer.low
    start, before, forward, backward, update = meter.phases()
    highest = max(forward, backward, update, key=lambda phase: phase.peak)
    saved = forward.live - before.live
    gradients = backward.live - start.live
    return Footprint(weights, masters, optimizer, saved, gradients, highest.peak, highest.name, low)


def count_bytes(tensors: Iterable[Tensor]) -> int:
    """The size of the memory behind the tensors, each piece once."""
    plain: list[Tensor] = []
    for tensor in tensors:
        if hasattr(tensor, "__tensor_flatten__"):  # a state of 8 bits, with its scales
            plain += [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        else:
            plain.append(tensor)
    storages = [tensor.untyped_storage() for tensor in plain]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def table_rows(name: str, footprints: Mapping[str, Footprint]) -> list[list[str]]:
    """One row for each mode, in millions of bytes."""
    autocast = {dtype: mode for mode, dtype in AUTOCAST.items() if mode in footprints}
    first = next(iter(autocast.values()), None)
    rows = []
    for mode, found in footprints.items():
        to = autocast.get(found.low, first)
        ratio = "-" if to is None else f"{found.peak / footprints[to].peak:.3f}"
        parts = (found.weights, found.masters, found.optimizer, found.saved, found.gradients, found.peak)
        rows.append([name, mode, *(f"{part / 1e6:.2f}" for part in parts), found.peak_phase, ratio, to or "-"])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Bytes of a training step in every mode.")
    add_options(parser, workloads="gpt-256,mlp,resnet")
    parsed = parse_options(parser)
    size = Size(parsed.batch, parsed.sequence)
    rows = []
    for name in parsed.workload:
        torch.manual_seed(0)
        workload = WORKLOADS[name](size, parsed.device)
        found = {mode: measure(mode, workload, parsed.device, parsed.fused) for mode in parsed.modes}
        rows += table_rows(name, found)
    print(environment(parsed.device, optimizer="AdamW, fused" if parsed.fused else "AdamW"), "millions of bytes\n")
    print(format_table(COLUMNS, rows, left=2))


if __name__ == "__main__":
    main()
