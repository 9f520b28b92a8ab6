"""What a reference run says of modules and ops: which must be in float32, and which to try next."""

import math
from collections.abc import Iterable, Sequence

from ..recordings import Recording
from ..records import CheckedStepRecord, LowOpRecord, ModulesRecord, SketchRecord
from ..short_dtypes import EPS, LARGEST, spell_out
from .entries import ListEntry, fold, prune
from .float32_run import WHOLE_MODEL

ROUNDING = 8
"""A result, or a gradient, that is off by so many times the rounding error of its dtype is tried before others."""


class Ranking:
    """Entries for modules, ops, or both, from what a `Float32Run` has recorded.

    Both means modules where an op runs in a part of the model, and ops in the model's own forward and outside of it.
    """

    def __init__(self, reference: Recording, units: str) -> None:
        self._units = units
        self._low = reference.run.low
        self._ops = reference.of(LowOpRecord)
        self._existing: set[str] = set()
        self._ran: set[str] = set()
        for record in reference.of(ModulesRecord):
            self._existing.update(record.names)
            self._ran.update(record.ran)
        steps = reference.of(CheckedStepRecord)
        self._loss_scale = max((step.loss_scale for step in steps if step.is_dynamic), default=0.0)
        self._gradients = reference.of(SketchRecord)

    def find_forced(self) -> list[ListEntry]:
        """Return entries for what overflows; one for all of a row of siblings if all of them do."""
        modules: list[ListEntry] = []
        ops: list[ListEntry] = []
        for one in filter(_overflows, self._ops):
            entry = self._entry(one)
            if entry is None or entry.name == WHOLE_MODEL:
                continue
            if entry.kind == "module":
                modules.append(entry)
            else:
                ops.append(entry)
        return [*fold((entry.name for entry in prune(modules)), self._existing), *dict.fromkeys(ops)]

    def rank(self, forced: Sequence[ListEntry]) -> list[ListEntry]:
        """Return entries for the rest: first what loses more than rounding explains, then what runs beside that, since
        the loss may come of what it was given; then by what its rounding does to the loss.
        """
        by_entry: dict[ListEntry, list[LowOpRecord]] = {}
        for one in self._ops:
            entry = self._entry(one)
            if entry is None or entry.name == WHOLE_MODEL or entry in forced:
                continue
            if not any(other.covers(entry) or other.matches(entry.name) for other in forced):
                by_entry.setdefault(entry, []).append(one)

        beside = {one.module for one in self._ops if self._find_outlying(one)}

        def key(entry: ListEntry) -> tuple[float, bool, int, float]:
            ops = by_entry[entry]
            outlying = max(map(self._find_outlying, ops))
            is_beside = any(one.module in beside for one in ops)
            return -outlying, not is_beside, self.count_modules([entry]), -sum(one.effect for one in ops)

        return sorted(by_entry, key=key)

    def _find_outlying(self, one: LowOpRecord) -> float:
        """Return the error of an op that loses more than rounding explains, or 0."""
        error = max(one.error, one.gradient_error)
        if error <= ROUNDING * EPS.get(self._low, 0.0):
            return 0.0
        return error

    def find_everything(self, entries: Iterable[ListEntry]) -> list[ListEntry]:
        """Return entries for all that there is, given those known."""
        ops = [entry for entry in entries if entry.kind == "op"]
        if self._units == "ops":
            return ops
        return [ListEntry("module", WHOLE_MODEL), *ops]

    def count_modules(self, entries: Iterable[ListEntry]) -> int:
        """Return how many modules that ran are in float32 by entries; an op counts as one."""
        given = list(entries)
        modules = [entry for entry in given if entry.kind == "module"]
        covered = [name for name in self._ran if any(_is_in(name, entry) for entry in modules)]
        return len(covered) + len(given) - len(modules)

    def find_loss_scale(self, forced: Sequence[ListEntry]) -> float | None:
        """Return the largest power of 2 by which no gradient overflows, of results and of parameters that are not
        forced, if the script begins with more and has a dynamic scale.
        """
        rest = [one.gradient for one in self._ops if not _overflows(one) and self._entry(one) not in forced]
        for one in self._gradients:
            if not any(_is_in(one.parameter.rpartition(".")[0], entry) for entry in forced):
                rest.append(one.largest)
        return self._lower(max(rest, default=0.0), self._loss_scale)

    def find_scale_of_loss(self, scale: float | None) -> float | None:
        """Return the same for the gradient of the loss, which is 1: in float16 it overflows at a scale of 2**16."""
        return self._lower(1.0, scale or self._loss_scale)

    def _lower(self, largest: float, scale: float) -> float | None:
        limit = LARGEST.get(self._low, math.inf) / 2
        if not self._loss_scale or largest * scale <= limit:
            return None
        return float(2.0 ** math.floor(math.log2(limit / largest)))

    def find_reason(self, entry: ListEntry) -> str:
        """Return the reason for an entry: the first op that overflows, or else the one that loses most."""
        mine = [one for one in self._ops if _is_of(one, entry)]
        if not mine:
            return "what runs here, other than ops that can be told by themselves"
        low = spell_out(self._low)
        for one in mine:
            if one.overflow:
                return f"{one.op}: {_percent(one.overflow)} of its results overflow {low}"
        for one in filter(_overflows, mine):
            return f"{one.op}: {_percent(one.overflow_in)} of what it is given overflows {low}"
        one = max(mine, key=lambda one: max(one.error, one.gradient_error))
        if one.gradient_error > one.error:
            return f"{one.op}: its gradients lose {one.gradient_error:.2g} in {low}"
        return f"{one.op}: its results are off by {one.error:.2g} in {low}"

    def find_hint(self) -> str:
        """Return what to do about ops that the units asked for cannot reach, or an empty string."""
        if self._units != "modules":
            return ""
        outside = sorted({one.op for one in self._ops if one.module == "" and one.is_listed})
        if not outside:
            return ""
        return f"; {', '.join(outside)} run outside of all modules: add --units both"

    def _entry(self, one: LowOpRecord) -> ListEntry | None:
        """Return what would keep an op in float32, or None if nothing of the kind would."""
        has_module = one.module not in ("", WHOLE_MODEL)
        by_op = self._units == "ops" or (self._units == "both" and not has_module)
        if by_op and one.is_listed:
            return ListEntry("op", one.op)
        if not by_op and one.module:
            return ListEntry("module", one.module)
        return None


def _overflows(one: LowOpRecord) -> bool:
    """Tell whether an op overflows by itself. One that is on no list runs in float32 where it is given that."""
    return one.overflow > 0.0 or (one.is_listed and one.overflow_in > 0.0)


def _is_in(name: str, entry: ListEntry) -> bool:
    return entry.matches(name) or entry.covers(ListEntry("module", name))


def _is_of(one: LowOpRecord, entry: ListEntry) -> bool:
    if entry.kind == "op":
        return one.op == entry.name
    return bool(one.module) and _is_in(one.module, entry)


def _percent(share: float) -> str:
    if share >= 0.995:
        return "all"
    return f"{100 * share:.2g} %"
