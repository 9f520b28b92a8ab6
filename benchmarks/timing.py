"""What the benchmarks share: interleaved repeats, medians, a table.

Two things timed one after the other differ by whatever the machine did meanwhile. So candidates take turns, each round
in another order, and a ratio is the median of the ratios within the rounds, not the ratio of two medians.
"""

import platform
import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Samples:
    """One value for each round, in the order of the rounds; the unit is the caller's."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, as a fraction of the median: the noise to weigh a difference
        against.
        """
        if len(self.values) < 2 or not self.median:
            return 0.0
        low, _, high = statistics.quantiles(self.values, n=4, method="inclusive")
        return (high - low) / 2 / abs(self.median)

    def ratio(self, other: "Samples") -> float:
        """The median over the rounds of this value over the other's."""
        return statistics.median(mine / theirs for mine, theirs in zip(self.values, other.values, strict=True))

    def difference(self, other: "Samples") -> float:
        """The median over the rounds of this value less the other's."""
        return statistics.median(mine - theirs for mine, theirs in zip(self.values, other.values, strict=True))


def interleave(candidates: Mapping[str, Callable[[], float]], rounds: int, seed: int = 0) -> dict[str, Samples]:
    """Call every candidate once a round, in a shuffled order; each returns its own measurement, and sets up and tears
    down by itself.
    """
    shuffler = random.Random(seed)
    values: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name in shuffler.sample(list(candidates), len(candidates)):
            values[name].append(candidates[name]())
    return {name: Samples(tuple(taken)) for name, taken in values.items()}


def synchronize(device: torch.device) -> None:
    """Wait for the work of an accelerator; the CPU has none waiting."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def get_allocator(device: torch.device) -> Any:
    """Return the module of a device whose allocator knows its peak, such as torch.cuda; None on the CPU and MPS."""
    module = None if device.type == "cpu" else torch.get_device_module(device)
    return module if hasattr(module, "max_memory_allocated") else None


def format_table(columns: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """Aligned text: the first `left` columns to the left, the others to the right."""
    lines = [tuple(columns), *(tuple(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(columns))]
    text = [
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    return "\n".join([text[0], "  ".join("-" * width for width in widths), *text[1:]])


def environment(device: torch.device, **about: object) -> str:
    """Return a line with what a reader needs to place the numbers: versions, processor or GPU, threads, and more."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{device.type} ({platform.machine()}, {torch.backends.cpu.get_cpu_capability()})"
    facts = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": name,
        "threads": torch.get_num_threads(),
        **about,
    }
    return ", ".join(f"{key} {value}" for key, value in facts.items())
