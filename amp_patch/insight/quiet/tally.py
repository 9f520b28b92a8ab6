"""`Tally`: the stored and the true changes of 16-bit tensors, added up by the code that makes them."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..quiet_record import QuietCause, QuietRecord
from ..rules import short

LOST = 0.5
"""A tensor loses if its stored change along the true one is less than this."""

RECENT, FEW = 16, 3
"""The number of last steps that show whether a tensor has come to rest, and the fewest that do."""

CONVERGED = 16
"""Changes whose |true|^2 is smaller than the largest by more than this factor are not judged by themselves."""

WEIGHT_DECAY = "weight decay"


@dataclass(frozen=True, slots=True)
class Source:
    """The code that changes a tensor.

    Attributes:
        site, op, module: the line of the script, the op, and the module that runs.
        optimizer: the class of the optimizer whose step runs; "" outside of steps.
        role: "weights", or the name of a state of the optimizer, or "gradients" that are summed; "" for other tensors.
    """

    site: str
    op: str
    optimizer: str = ""
    role: str = ""
    module: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """Equal for changes that are reported together."""
        if self.role:
            return self.optimizer, self.role
        return self.site, ""


@dataclass(frozen=True, slots=True)
class Change:
    """How a tensor changed in one step.

    Attributes:
        along: <stored, true>, of the stored and the true change.
        true: |true|^2.
        changed, kept: the number of elements whose true change is not zero, and of these whose stored one is not.
    """

    along: float
    true: float
    changed: int
    kept: int

    def __add__(self, other: "Change") -> "Change":
        return Change(
            self.along + other.along, self.true + other.true, self.changed + other.changed, self.kept + other.kept
        )

    @property
    def descent(self) -> float:
        """The stored change along the true one: 1 is whole, 0 is nothing."""
        return self.along / self.true

    @property
    def share(self) -> float:
        """The share of elements whose change is not lost."""
        return self.kept / self.changed


NOTHING = Change(0.0, 0.0, 0, 0)


def compare_change(before: Tensor, stored: Tensor, exact: Tensor) -> Change | None:
    """Return how a tensor changed, and how it would have in float32; None if it would not. Waits for the device."""
    true, done = exact.double() - before.double(), stored.double() - before.double()
    fits = true.isfinite() & done.isfinite()
    true, done = torch.where(fits, true, 0.0), torch.where(fits, done, 0.0)
    is_changed = true != 0
    sums = torch.stack(
        [(true * done).sum(), (true * true).sum(), is_changed.sum(), (is_changed & (done != 0)).sum()]
    ).tolist()
    if not sums[2] or not sums[1]:
        return None
    return Change(sums[0], sums[1], int(sums[2]), int(sums[3]))


@dataclass
class _OfTensor:
    """The changes of one tensor.

    Attributes:
        total: of all steps.
        recent: of the last steps, with their numbers.
        largest: the largest |true|^2 of a step.
        first, lost: the first step that lost, and the number of such steps.
        looked: the number of steps.
    """

    total: Change = NOTHING
    recent: deque[Change] = field(default_factory=lambda: deque(maxlen=RECENT))
    largest: float = 0.0
    first: int = -1
    lost: int = 0
    looked: int = 0

    def add(self, step: int, change: Change) -> None:
        """Add the change of a step."""
        self.total += change
        self.recent.append(change)
        self.largest = max(self.largest, change.true)
        self.looked += 1
        if change.descent < LOST:
            self.lost += 1
            if self.first < 0:
                self.first = step

    def find_lost(self) -> Change | None:
        """Return the sum of changes that shows a loss: of all steps, or of the last ones; None if neither does."""
        if self.total.descent < LOST:
            return self.total
        # Changes that have become much smaller are those of a training that has converged.
        relevant = [change for change in self.recent if change.true >= self.largest / CONVERGED]
        if len(relevant) < FEW:
            return None
        recent = sum(relevant, NOTHING)
        return recent if recent.descent < LOST else None


class Tally:
    """Adds up changes by their source and tensor."""

    def __init__(self) -> None:
        self._sources: dict[tuple[str, str], tuple[Source, str]] = {}  # with the dtype
        self.tensors: dict[tuple[str, str], dict[tuple[str, int], _OfTensor]] = {}

    def add(self, step: int, source: Source, change: Change, name: str, number: int, dtype: torch.dtype) -> None:
        """Count a change of a tensor. Its number tells it from others if it has no name."""
        self._sources.setdefault(source.key, (source, short(dtype)))
        tensors = self.tensors.setdefault(source.key, {})
        tensors.setdefault((name, 0 if name else number), _OfTensor()).add(step, change)

    def add_decay(self, step: int, optimizer: str, site: str, tensor: Tensor, name: str) -> None:
        """Count a weight decay that changes no element of a tensor."""
        source = Source(site, "mul_", optimizer, WEIGHT_DECAY)
        self.add(step, source, Change(0.0, 1.0, tensor.numel(), 0), name, id(tensor.untyped_storage()), tensor.dtype)

    def records(self) -> list[QuietRecord]:
        """Return a record for each source that loses changes of at least one tensor."""
        return list(self._find_lost())

    def _find_lost(self) -> Iterator[QuietRecord]:
        for key, (source, dtype) in self._sources.items():
            tensors = self.tensors[key]
            lost = {name: found for name, each in tensors.items() if (found := each.find_lost()) is not None}
            if not lost:
                continue
            together = sum(lost.values(), NOTHING)
            worst, _ = max(lost, key=lambda name: lost[name].changed - lost[name].kept)
            yield QuietRecord(
                QuietCause.LOST_UPDATE,
                step=min(tensors[name].first for name in lost),
                steps=max(tensors[name].lost for name in lost),
                looked=max(tensors[name].looked for name in lost),
                tensor=worst or None,
                tensors=len(lost),
                of=len(tensors),
                module=source.module or None,
                op=source.optimizer or source.op,
                role=source.role or None,
                site=source.site or None,
                dtype=dtype,
                kept=together.share,
                descent=together.descent,
            )
