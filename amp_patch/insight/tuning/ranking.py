"""`Ranking`: ranks modules and ops by how much they need float32, from the recording of a run in float32."""

import math
from collections.abc import Iterable, Iterator, Sequence

from ..recordings import Recording
from ..records import CheckedStepRecord, LowOpRecord, ModulesRecord, SketchRecord
from ..short_dtypes import EPS, LARGEST, spell_out
from .entries import ListEntry, fold_siblings, prune
from .float32_run import WHOLE_MODEL

ROUNDING = 8
"""An op is an *outlier* if its error is more than this multiple of the 16-bit dtype's `EPS`."""

LOWERED = 4.0
"""The factor between the loss scales that are tried after an overflow."""


class Ranking:
    """Makes list entries from the recording of a `Float32Run`, which has the error that each op would have in 16 bits.

    Args:
        units: "modules", "ops" or "both", as in `TuneOptions`. With "both", an op in a submodule gives an entry for the
            submodule, and any other listed op an entry for the op.
    """

    def __init__(self, reference: Recording, units: str) -> None:
        self._units = units
        self._low = reference.run.low  # the 16-bit dtype, "f16" or "bf16"
        self._ops = reference.of(LowOpRecord)
        self._existing: set[str] = set()  # the names of all modules
        self._ran: set[str] = set()  # the names of modules that ran
        for record in reference.of(ModulesRecord):
            self._existing.update(record.names)
            self._ran.update(record.ran)
        steps = reference.of(CheckedStepRecord)
        # the largest dynamic scale of the script; 0 if it has none
        self._loss_scale = max((step.loss_scale for step in steps if step.is_dynamic), default=0.0)
        self._gradients = reference.of(SketchRecord)

    def find_forced(self) -> list[ListEntry]:
        """Return the entries that keep in float32 the ops that overflow in 16 bits. There is none for the whole model.

        Modules whose names differ only in numbers may share an entry (see `fold_siblings`).
        """
        modules: list[ListEntry] = []
        ops: list[ListEntry] = []
        for op in filter(_overflows, self._ops):
            entry = self._make_entry(op)
            if entry is None or entry.name == WHOLE_MODEL:
                continue
            if entry.kind == "module":
                modules.append(entry)
            else:
                ops.append(entry)
        return [*fold_siblings((entry.name for entry in prune(modules)), self._existing), *dict.fromkeys(ops)]

    def rank(self, forced: Sequence[ListEntry]) -> list[ListEntry]:
        """Return entries for the ops that `forced` does not keep in float32, the most promising first.

        First come entries for outliers, the largest error first. Then come entries for ops in the modules of outliers:
        their results may be the cause of the error. All others come last. Ties are broken by the number of modules
        (fewest first), then by the effect of the rounding on the loss (largest first).

        Args:
            forced: the result of `find_forced`.
        """
        ops_by_entry: dict[ListEntry, list[LowOpRecord]] = {}
        for op in self._ops:
            entry = self._make_entry(op)
            # an entry for the whole model keeps everything in float32: the search tries that by itself
            if entry is None or entry.name == WHOLE_MODEL or entry in forced:
                continue
            if not any(wider.covers(entry) or wider.matches(entry.name) for wider in forced):
                ops_by_entry.setdefault(entry, []).append(op)

        modules_of_outliers = {op.module for op in self._ops if self._find_outlying_error(op)}

        def key(entry: ListEntry) -> tuple[float, bool, int, float]:
            ops = ops_by_entry[entry]
            error = max(map(self._find_outlying_error, ops))
            is_in_module_of_outlier = any(op.module in modules_of_outliers for op in ops)
            return -error, not is_in_module_of_outlier, self.count_modules([entry]), -sum(op.effect for op in ops)

        return sorted(ops_by_entry, key=key)

    def _find_outlying_error(self, op: LowOpRecord) -> float:
        """Return the error of an op if it is larger than rounding explains, else 0."""
        error = max(op.error, op.gradient_error, op.backward_error)
        if error <= ROUNDING * EPS.get(self._low, 0.0):
            return 0.0
        return error

    def find_everything(self, entries: Iterable[ListEntry]) -> list[ListEntry]:
        """Return entries that keep in float32 as much as is possible with these units.

        `entries`: the entries that `find_forced` and `rank` have returned.
        """
        ops = [entry for entry in entries if entry.kind == "op"]
        if self._units == "ops":
            return ops
        return [ListEntry("module", WHOLE_MODEL), *ops]

    def count_modules(self, entries: Iterable[ListEntry]) -> int:
        """Return the number of modules that ran and that `entries` keep in float32, plus the number of op entries."""
        all_entries = list(entries)
        module_entries = [entry for entry in all_entries if entry.kind == "module"]
        kept_modules = [name for name in self._ran if any(_keeps_module(entry, name) for entry in module_entries)]
        return len(kept_modules) + len(all_entries) - len(module_entries)

    def find_loss_scale(self, forced: Sequence[ListEntry]) -> float | None:
        """Return the largest power of 2 as a loss scale at which no gradient overflows, with room for later steps.

        Gradients of ops that overflow, or that `forced` keeps in float32, do not count. Returns None if the script has
        no dynamic scale, or if the gradients fit, with this room, at the script's scale.
        """
        magnitudes = [
            op.gradient for op in self._ops if not _overflows(op) and not any(_keeps_op(entry, op) for entry in forced)
        ]
        for gradient in self._gradients:
            module = gradient.parameter.rpartition(".")[0]
            if not any(_keeps_module(entry, module) for entry in forced):
                magnitudes.append(gradient.largest)
        return self._lower(max(magnitudes, default=0.0), self._loss_scale)

    def find_scale_of_loss(self, scale: float | None) -> float | None:
        """Return the largest power of 2 as a loss scale at which the gradient of the loss itself fits.

        This gradient is 1, times the scale, so float16 does not hold it at 2**16. The room and None are as in
        `find_loss_scale`. If `scale` is given, it takes the place of the script's scale.
        """
        return self._lower(1.0, scale or self._loss_scale)

    def find_lower_scales(self, scale: float | None) -> Iterator[float]:
        """Yield loss scales to try after an overflow at `scale`, by default the script's. None of them is below 1.

        The first one is the result of `find_scale_of_loss`, unless that is None. Yields none if `scale` is None and
        the script has no dynamic scale.
        """
        # The result of `find_loss_scale` may be too large: it depends on the gradients that the run in float32 shows,
        # and the script may have clipped these.
        lower_scale = self.find_scale_of_loss(scale) or (scale or self._loss_scale) / LOWERED
        while lower_scale >= 1:
            yield lower_scale
            lower_scale /= LOWERED

    def _lower(self, largest: float, scale: float) -> float | None:
        """Return the largest power of 2 as a scale at which a gradient fits whose magnitude is `largest` at scale 1.

        Returns None if the gradient fits at `scale`, or if the script has no dynamic scale.
        """
        # half of the largest number leaves room for later steps
        limit = LARGEST.get(self._low, math.inf) / 2
        if not self._loss_scale or largest * scale <= limit:
            return None
        return float(2.0 ** math.floor(math.log2(limit / largest)))

    def find_reason(self, entry: ListEntry) -> str:
        """Return the reason for an entry: an op that overflows, or else the op with the largest error.

        Return "" if no op that was measured shows why the entry is needed.
        """
        kept = [op for op in self._ops if _keeps_op(entry, op)]
        if not kept:
            return ""
        low = spell_out(self._low)
        for op in kept:
            if op.overflow:
                return f"{op.op}: {_percent(op.overflow)} of its results overflow {low}"
        for op in filter(_overflows, kept):
            return f"{op.op}: {_percent(op.overflow_in)} of its inputs overflow {low}"
        op = max(kept, key=lambda op: max(op.error, op.gradient_error, op.backward_error))
        if not self._find_outlying_error(op):
            return ""
        if op.backward_error > max(op.error, op.gradient_error):
            return f"{op.op}: its backward pass is off by {op.backward_error:.2g} in {low}"
        if op.gradient_error > op.error:
            return f"{op.op}: its gradients lose {op.gradient_error:.2g} in {low}"
        return f"{op.op}: its results are off by {op.error:.2g} in {low}"

    def find_hint(self) -> str:
        """Return advice about listed ops outside of all modules; "" if there are none, or if `units` includes ops."""
        if self._units != "modules":
            return ""
        outside = sorted({op.op for op in self._ops if op.module == "" and op.is_listed})
        if not outside:
            return ""
        return f"; {', '.join(outside)} run outside of all modules: add --units both"

    def _make_entry(self, op: LowOpRecord) -> ListEntry | None:
        """Return the entry that keeps an op in float32, or None if no entry of these `units` can."""
        has_module = op.module not in ("", WHOLE_MODEL)
        by_op = self._units == "ops" or (self._units == "both" and not has_module)
        if by_op and op.is_listed:
            return ListEntry("op", op.op)
        if not by_op and op.module:
            return ListEntry("module", op.module)
        return None


def _overflows(op: LowOpRecord) -> bool:
    """Return whether a result or an input of an op overflows. Inputs count only for a listed op, which casts them."""
    return op.overflow > 0.0 or (op.is_listed and op.overflow_in > 0.0)


def _keeps_module(entry: ListEntry, name: str) -> bool:
    """Return whether an entry keeps a module in float32, by its own name or the name of a module around it."""
    return entry.matches(name) or entry.covers(ListEntry("module", name))


def _keeps_op(entry: ListEntry, op: LowOpRecord) -> bool:
    """Return whether an entry keeps an op in float32, by its name or its module."""
    if entry.kind == "op":
        return op.op == entry.name
    return bool(op.module) and _keeps_module(entry, op.module)


def _percent(share: float) -> str:
    if share == 1:
        return "all"
    if share >= 0.995:  # "1e+02 %" otherwise
        return "over 99 %"
    return f"{100 * share:.2g} %"
