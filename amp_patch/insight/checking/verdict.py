"""`judge`: the promises of a contract that a training breaks, causes before their effects.

Importing this does not import torch.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ...tables import count_of
from ..op_constants import strip_spelling
from .bands import find_difference, find_relative
from .contract import Contract, ContractOp, ModuleRecord, Numbers, StepsRecord, unpack
from .op_differences import Moved, OpDifferences, find_differences, is_cast
from .upgrades import Upgrade

ALIKE = 0.5
"""Two scripts with a smaller part of equal calls are not the same script."""

GROWN = 2.0
"""An error against float32 that grew by this factor is named."""


class Break(NamedTuple):
    """A promise that does not hold.

    Attributes:
        kind: "precision", "rule", "cast", "constant", "optimizer", "ops", "start", "output", "gradient", "update",
            "lost", "steps", "skipped", "scale", "loss" or "norm"; "region" for a script that uses no mixed precision
            any more.
        text: the promise, and how the run differs from it.
        site: the line of the script, `file.py:line`; "" if none is known.
    """

    kind: str
    text: str
    site: str = ""

    def as_json(self) -> dict[str, str]:
        """Return the fields as JSON can hold them."""
        return {"kind": self.kind, "text": self.text, "site": self.site}


@dataclass(slots=True)
class Verdict:
    """The result of a check.

    Attributes:
        breaks: the promises that do not hold, causes before their effects.
        notes: differences that break no promise, and promises that were not judged.
        differences: how the ops differ.
    """

    breaks: list[Break] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    differences: OpDifferences = field(default_factory=OpDifferences)

    @property
    def holds(self) -> bool:
        """Whether no promise is broken."""
        return not self.breaks

    def as_json(self) -> dict[str, Any]:
        """Return the result as JSON can hold it."""
        return {"holds": self.holds, "breaks": [each.as_json() for each in self.breaks], "notes": self.notes}


def judge(contract: Contract, now: Contract) -> Verdict:
    """Return which promises of a contract do not hold in `now`, another measurement of the training.

    Ops and optimizers are judged on any hardware; numbers only if the contract has bands for this kind of hardware.
    """
    verdict = Verdict()
    ops = contract.ops, now.ops
    if contract.about.device != now.about.device:
        # ops on no list are named after kernels, which differ between devices
        ops = _only_listed(ops[0]), _only_listed(ops[1])
        verdict.notes.append(
            f"made on {contract.about.device}, checked on {now.about.device}: only ops on lists are compared"
        )
    verdict.differences = differences = find_differences(*ops)
    verdict.breaks.extend(_judge_ops(contract, now, differences))
    verdict.breaks.extend(_judge_optimizers(contract, now))
    (own,) = now.numbers.values()
    promised = contract.numbers.get(own.hardware.name)
    result = "no promised number left its band"
    if promised is None:
        result = "the numbers that would tell whether this matters are not judged"
        known = ", ".join(sorted(contract.numbers)) or "no hardware"
        verdict.notes.append(
            f"numbers are not judged: the contract has noise for {known}, and this is {own.hardware.name};"
            " --update adds it"
        )
    elif promised.hardware.problem:
        verdict.notes.append(f"numbers are not judged: {promised.hardware.problem}")
    else:
        verdict.breaks.extend(_judge_numbers(promised, own, (contract.ops, now.ops)))
    # Without numbers, only the ops tell. But on other hardware, an op may have another kernel.
    _report_ops(verdict, result, is_break=promised is not None and bool(promised.hardware.problem))
    unpromised = sum(not op.is_promised for op in contract.ops)
    if unpromised:
        verdict.notes.append(f"{count_of(unpromised, 'op')} of the contract not promised: equal runs had other calls")
    return verdict


def _only_listed(ops: Sequence[ContractOp]) -> list[ContractOp]:
    return [op for op in ops if not op.op.startswith("aten.")]


# ---- ops -------------------------------------------------------------------------------------------------------------


def _judge_ops(contract: Contract, now: Contract, differences: OpDifferences) -> Iterator[Break]:
    upgrade = Upgrade(contract.about.torch, now.about.torch, now.about.device)

    def describe(pair: Moved) -> str:
        return f"{_name_op(pair.after)}: {describe_move(pair)}{upgrade.describe(pair.after)}"

    # Causes first: calls with another rule, then casts of the script, then calls that get the results of both.
    for pair in (pair for pair in differences.moved if pair.has_other_dtypes and _is_decided(pair)):
        yield Break(
            "precision", f"{_name_op(pair.after)}: {describe_move(pair)}{upgrade.describe(pair.after)}", pair.after.site
        )
    for op in differences.casts:
        verb = "appeared" if op in differences.appeared else "vanished"
        yield Break("cast", f"{_name_op(op)}: a cast from {op.given[-1]} to {op.out[0]} {verb}", op.site)
    for pair in (pair for pair in differences.moved if pair.has_other_dtypes and not _is_decided(pair)):
        yield Break(
            "precision", f"{_name_op(pair.after)}: {describe_move(pair)}{upgrade.describe(pair.after)}", pair.after.site
        )
    for pair in (pair for pair in differences.moved if not pair.has_other_dtypes):
        yield Break(
            "rule", f"{_name_op(pair.after)}: {describe_move(pair)}{upgrade.describe(pair.after)}", pair.after.site
        )
    for pair in differences.changed:
        text = f"{_name_op(pair.after)}: {list_constants(pair.before)} -> {list_constants(pair.after)}"
        yield Break("constant", text, pair.after.site)


def _is_decided(pair: Moved) -> bool:
    """Return whether other dtypes of an op are no effect of another op: its rule differs, or its arguments do not."""
    return pair.before.rule != pair.after.rule or pair.before.given == pair.after.given


def _name_op(op: ContractOp) -> str:
    return f"{op.op} in {op.module}" if op.module else op.op


def describe_move(pair: Moved) -> str:
    """Return how the dtypes and the rule of an op differ."""
    before, after = pair
    parts = []
    if pair.has_other_dtypes:
        parts.append(f"{describe_dtypes(before)}, now {describe_dtypes(after)}")
    if before.rule != after.rule:
        parts.append(f"rule: {_describe_rule(before)} -> {_describe_rule(after)}")
    elif pair.has_other_dtypes and before.given != after.given:
        parts.append("its arguments have other dtypes")
    return "; ".join(parts)


def describe_dtypes(op: ContractOp) -> str:
    """Return the dtypes of the arguments and of the result of an op."""
    return f"{', '.join(op.given) or '()'} -> {', '.join(op.out) or '()'}"


def _describe_rule(op: ContractOp) -> str:
    if not op.rule:
        return "none"
    return f"{op.rule} ({op.entry})" if op.entry else op.rule


def list_constants(op: ContractOp) -> str:
    """Return the constants among the arguments of an op."""
    return ", ".join(op.constants) or "none"


def _report_ops(verdict: Verdict, result: str, *, is_break: bool) -> None:
    """Add the ops that only one run has: as a note with the result for numbers, or as a broken promise.

    They break a promise if `is_break`, or if what they may cause is broken: numbers, and dtypes of arguments of other
    ops. They come before that.
    """
    differences = verdict.differences
    texts = [
        f"{_name_op(op)} ({op.site}) {verb}" + (f", {op.calls} calls" if op.calls > 1 else "")
        for verb, ops in (("vanished", differences.vanished), ("appeared", differences.appeared))
        for op in ops
        if not is_cast(op)
    ]
    if not texts:
        return
    shown = "; ".join(texts[:6]) + (f"; and {len(texts) - 6} more" if len(texts) > 6 else "")
    causes = sum(pair.has_other_dtypes and _is_decided(pair) for pair in differences.moved) + len(differences.casts)
    has_effects = any(pair.has_other_dtypes and not _is_decided(pair) for pair in differences.moved)
    has_numbers = any(each.kind in _OF_NUMBERS for each in verdict.breaks)
    if not (is_break or has_effects or has_numbers):
        verdict.notes.append(f"other ops, and {result}: {shown}")
        return
    of_ops = sum(each.kind in _OF_OPS for each in verdict.breaks)
    place = causes if has_effects else of_ops
    sites = [op.site for op in (*differences.appeared, *differences.vanished) if op.site and not is_cast(op)]
    verdict.breaks.insert(place, Break("ops", f"other ops: {shown}", sites[0] if sites else ""))


_OF_OPS = ("precision", "rule", "cast", "constant", "optimizer")
_OF_NUMBERS = ("start", "output", "gradient", "update", "loss", "norm")


# ---- optimizers ------------------------------------------------------------------------------------------------------


def _judge_optimizers(contract: Contract, now: Contract) -> Iterator[Break]:
    before = {(each.number, each.group): each for each in contract.optimizers}
    after = {(each.number, each.group): each for each in now.optimizers}
    for key in sorted(before.keys() | after.keys()):
        old, new = before.get(key), after.get(key)
        name = f"optimizer {key[0]}, group {key[1]}" if len(before) > 1 else "the optimizer"
        if old is None or new is None:
            yield Break("optimizer", f"{name} {'vanished' if new is None else 'appeared'}")
        elif old.type != new.type:
            yield Break("optimizer", f"{name}: {old.type} -> {new.type}")
        else:
            was, settings = (dict(text.split("=", 1) for text in each.settings) for each in (old, new))
            # a release of torch may add a setting
            changed = [name for name in was if name in settings and was[name] != settings[name]]
            for setting in changed:
                text = f"{name} ({new.type}): {setting} {was[setting]} -> {settings[setting]}"
                yield Break("optimizer", text)


# ---- numbers ---------------------------------------------------------------------------------------------------------


def _judge_numbers(
    promised: Numbers, now: Numbers, ops: tuple[Sequence[ContractOp], Sequence[ContractOp]]
) -> Iterator[Break]:
    pairs = [pair for pair in _match_modules(promised.modules, now.modules) if _is_comparable(*pair, *ops)]
    scale = promised.curve("loss scale")
    starts_equal = scale is None or _find_break(scale, now.curve(scale.name)) != 0
    if scale is not None and not starts_equal:  # a setting: only later, the scale depends on gradients
        yield from _judge_curve(scale, now.curve(scale.name))
    kinds = (
        ("start", "weights", "before the first step, its weights are off by"),
        ("output", "output", "its first output is off by"),
        ("gradient", "gradient", "its first gradients are off by"),
        ("update", "update", "its first update is off by"),
    )
    for kind, name, text in kinds:
        ordered = pairs if kind in ("start", "output") else pairs[::-1]  # gradients come from the last module first
        for old, new in ordered:
            off, band = _find_off(old, new, name), getattr(old, f"{name}_band")
            if off is not None and band is not None and off > band:
                size = "a number that is not finite" if not math.isfinite(off) else f"{off:.2g}"
                error = _describe_error(old, new) if kind == "output" else ""
                yield Break(kind, f"{_name_module(new)}: {text} {size}, and {band:.2g} was promised{error}")
    yield from _judge_lost(promised, now)
    yield from _judge_length(promised, now)
    for curve in promised.curves:
        if curve is not scale or starts_equal:
            yield from _judge_curve(curve, now.curve(curve.name))
    for old, new in pairs:
        for name, what in (("last_gradient", "gradient"), ("last_update", "update")):
            off, band = find_difference(getattr(old, name), getattr(new, name)), getattr(old, f"{name}_band")
            if off is not None and band is not None and off > band:
                text = f"in the last step, its {what} has a norm that is off by {off:.2g}, and {band:.2g} was promised"
                yield Break("norm", f"{_name_module(new)}: {text}")


def _name_module(module: ModuleRecord) -> str:
    return f"{module.module} ({module.type})" if module.type else module.module


def _find_off(old: ModuleRecord, new: ModuleRecord, name: str) -> float | None:
    if name == "update":
        return find_difference(old.update, new.update)
    return find_relative(unpack(getattr(old, f"of_{name}")), unpack(getattr(new, f"of_{name}")))


def _describe_error(old: ModuleRecord, new: ModuleRecord) -> str:
    if old.error is None or new.error is None or new.error <= GROWN * old.error:
        return ""
    return f"; its error against float32 grew from {old.error:.2g} to {new.error:.2g}"


def _match_modules(old: Sequence[ModuleRecord], new: Sequence[ModuleRecord]) -> list[tuple[ModuleRecord, ModuleRecord]]:
    """Return pairs of modules that belong together, in the order of the first.

    These are modules of the same name with equal numbers, then those with equal numbers: in a `Sequential` that was
    split or joined, a name may belong to another module now. Of the rest, modules of the same name, and then modules of
    the same type in the same order, belong together.
    """
    partners: dict[str, ModuleRecord] = {}
    left = {module.module: module for module in new}
    for module in old:
        if module.module in left and _has_equal_numbers(module, left[module.module]):
            partners[module.module] = left.pop(module.module)
    rules: tuple[Callable[[ModuleRecord, ModuleRecord], bool], ...] = (
        _has_equal_numbers,
        lambda module, candidate: candidate.module == module.module,
        lambda module, candidate: candidate.type == module.type,
    )
    for belongs in rules:
        for module in old:
            if module.module in partners:
                continue
            partner = next((candidate for candidate in left.values() if belongs(module, candidate)), None)
            if partner is not None:
                partners[module.module] = left.pop(partner.module)
    return [(module, partners[module.module]) for module in old if module.module in partners]


def _has_equal_numbers(old: ModuleRecord, new: ModuleRecord) -> bool:
    """Return whether the weights and the first output are within their bands. False if none is promised."""
    judged = [(_find_off(old, new, name), getattr(old, f"{name}_band")) for name in ("weights", "output")]
    offs = [(off, band) for off, band in judged if off is not None and band is not None]
    return bool(offs) and all(off <= band for off, band in offs)


def _is_comparable(
    old: ModuleRecord, new: ModuleRecord, before: Sequence[ContractOp], after: Sequence[ContractOp]
) -> bool:
    """Return whether numbers of two modules tell something.

    The first output of a module without weights may be of another call, if the script has come to call it elsewhere,
    or less often.
    """
    return bool(old.of_weights) or _count_ops(old.module, before) == _count_ops(new.module, after)


def _count_ops(module: str, ops: Sequence[ContractOp]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for op in ops:
        if op.module == module:
            counts[strip_spelling(op.op)] += op.calls
    return counts


def _judge_lost(promised: Numbers, now: Numbers) -> Iterator[Break]:
    old, new = promised.hardware, now.hardware
    if new.kept is not None and (old.kept is None or new.kept < old.kept / GROWN):
        was = "no update was lost" if old.kept is None else f"{1 - old.kept:.0%} were lost"
        yield Break("lost", f"{1 - new.kept:.0%} of the updates of {new.kept_worst} are lost; {was} before")


def _judge_curve(promised: StepsRecord, now: StepsRecord | None) -> Iterator[Break]:
    """Yield the first number of a step that left its band."""
    step = _find_break(promised, now)
    if step is None or now is None:
        return
    kind = {"loss": "loss", "loss scale": "scale", "skipped": "skipped"}.get(promised.name, "norm")
    value, band = promised.values[step], promised.bands[step]
    if kind == "skipped":
        yield Break(kind, f"step {step + 1} is{'' if now.values[step] else ' not'} skipped; {_was_skipped(value)}")
    else:
        text = f"is {now.values[step]:.6g}, and {value:.6g} ± {band:.2g} was promised"
        yield Break(kind, f"the {promised.name} of step {step + 1} {text}")


def _was_skipped(value: float) -> str:
    return "it was before" if value else "it was not before"


def _find_break(promised: StepsRecord, now: StepsRecord | None) -> int | None:
    """Return the first step of both trainings whose number left its band; None without any."""
    values: Sequence[float] = now.values if now is not None else ()
    # a shorter training is reported by `_judge_length`
    for step, (value, band, current) in enumerate(zip(promised.values, promised.bands, values, strict=False)):
        if band is not None and not abs(current - value) <= band:
            return step
    return None


def _judge_length(promised: Numbers, now: Numbers) -> Iterator[Break]:
    """Yield whether the training took fewer steps than promised."""
    for curve in promised.curves:
        present = now.curve(curve.name)
        taken = len(present.values) if present is not None else 0
        if taken < len(curve.values):
            yield Break("steps", f"the training took {count_of(taken, 'step')}, and {len(curve.values)} were promised")
            return


def is_other_script(contract: Contract, now: Contract) -> bool:
    """Return whether the contract is of another script: another name, and few equal calls of ops."""
    if contract.about.script == now.about.script:
        return False
    return find_differences(_without_dtypes(contract.ops), _without_dtypes(now.ops)).part < ALIKE


def _without_dtypes(ops: Sequence[ContractOp]) -> list[ContractOp]:
    return [replace(op, given=(), out=(), rule="", constants=()) for op in ops]
