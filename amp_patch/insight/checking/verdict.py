"""`judge`: the promises of a contract that a training breaks, causes before their effects.

A contract is a file that promises how a training computes. The *band* of a promised number is how far the number may
be off. Importing this module does not import torch.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ...tables import count_of
from ..numbers_record import OptimizerRecord
from ..op_constants import strip_spelling
from ..short_dtypes import count_equal
from .bands import compare_norms, compare_sketches
from .contract import Contract, ContractOp, ModuleRecord, Numbers, StepsRecord, unpack
from .op_differences import Moved, OpDifferences, find_differences, is_cast
from .upgrades import Upgrade

LEAST_EQUAL = 0.5
"""A script whose name is not the one in the contract counts as another script if it has less than this share of its
calls of ops in common with the contract. The dtypes of the calls do not matter.
"""

GROWN = 2.0
"""If an output has left its band, and its error against float32 has grown by more than this factor, a diff of two
contracts says so. A check does not measure this error.
"""

MOST_LOST = 2.0
"""A training may lose up to this multiple of the share of updates that it lost when the contract was made."""


class Break(NamedTuple):
    """A broken promise of a contract.

    Attributes:
        kind: "precision", "rule", "cast", "constant", "optimizer", "ops", "start", "output", "gradient", "update",
            "lost", "steps", "skipped", "scale", "loss" or "norm"; "region" for a script that uses no mixed precision
            any more.
        text: how the run differs from the promise.
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
        breaks: the broken promises, causes before their effects.
        notes: lines about differences that break no promise, and about promises that were not judged.
        differences: the differences between the ops.
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
        return {"holds": self.holds, "breaks": [broken.as_json() for broken in self.breaks], "notes": self.notes}


def judge(contract: Contract, now: Contract) -> Verdict:
    """Return which promises of a contract are broken in `now`, a later run of the training on one kind of hardware.

    Ops and optimizers are judged on any hardware. Numbers are judged only if the contract promises some for this kind.
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
    verdict.breaks.extend(judge_optimizers(contract, now))
    (measured,) = now.numbers.values()
    promised = contract.numbers.get(measured.hardware.name)
    result = "no promised number left its band"
    if promised is None:
        result = "the numbers that would tell whether this matters are not judged"
        known = ", ".join(sorted(contract.numbers)) or "no hardware"
        verdict.notes.append(
            f"numbers are not judged: the contract has bands for {known}, and this is {measured.hardware.name};"
            " --update adds it"
        )
    elif promised.hardware.problem:
        verdict.notes.append(f"numbers are not judged: {promised.hardware.problem}")
    else:
        verdict.breaks.extend(_judge_numbers(promised, measured, (contract.ops, now.ops)))
    # If the contract knows this hardware but promises no numbers, an op that only one run has breaks the contract,
    # because nothing else shows its effect. On unknown hardware it does not: an op may have another kernel there.
    _report_other_ops(verdict, result, is_break=promised is not None and bool(promised.hardware.problem))
    unpromised = sum(not op.is_promised for op in contract.ops)
    if unpromised:
        verdict.notes.append(
            f"{count_of(unpromised, 'op')} of the contract not promised: equal runs differ in their calls"
        )
    return verdict


def _only_listed(ops: Sequence[ContractOp]) -> list[ContractOp]:
    return [op for op in ops if not op.op.startswith("aten.")]


# ---- ops -------------------------------------------------------------------------------------------------------------


def _judge_ops(contract: Contract, now: Contract, differences: OpDifferences) -> Iterator[Break]:
    """Yield a broken promise for each op with other dtypes, another rule or other constants.

    Also yield one for each cast that only one run has.
    """
    upgrade = Upgrade(contract.about.torch, now.about.torch, now.about.device)

    def describe(pair: Moved) -> str:
        return f"{_name_op(pair.after)}: {describe_move(pair)}{upgrade.describe(pair.after)}"

    with_other_dtypes = [pair for pair in differences.moved if pair.has_other_dtypes]
    # causes first: ops that cause their other dtypes, and casts of the script; then ops that got dtypes from these
    for pair in with_other_dtypes:
        if _is_cause(pair):
            yield Break("precision", describe(pair), pair.after.site)
    for op in filter(is_cast, differences.vanished):
        site = differences.sites.get(op.site, "")
        place = "" if site else f"; it was at {op.site}"
        yield Break("cast", f"{_name_op(op)}: a cast from {op.given[-1]} to {op.out[0]} vanished{place}", site)
    for op in filter(is_cast, differences.appeared):
        yield Break("cast", f"{_name_op(op)}: a cast from {op.given[-1]} to {op.out[0]} appeared", op.site)
    for pair in with_other_dtypes:
        if not _is_cause(pair):
            yield Break("precision", describe(pair), pair.after.site)
    for pair in differences.moved:
        if not pair.has_other_dtypes:
            yield Break("rule", describe(pair), pair.after.site)
    for pair in differences.changed:
        text = f"{_name_op(pair.after)}: {list_constants(pair.before)} -> {list_constants(pair.after)}"
        yield Break("constant", text, pair.after.site)


def _is_cause(pair: Moved) -> bool:
    """Return whether an op causes its other dtypes: its rule differs, or its arguments have the same dtypes as before.

    Otherwise, ops before it have given it arguments in other dtypes.
    """
    return pair.before.rule != pair.after.rule or pair.before.given == pair.after.given


def _name_op(op: ContractOp) -> str:
    """Return "F.linear in head", or "F.linear" for an op outside of modules."""
    return f"{op.op} in {op.module}" if op.module else op.op


def describe_move(pair: Moved) -> str:
    """Return the differences of a pair of `OpDifferences.moved`: "f32 -> f32, now f16 -> f16; rule: ... -> ..."."""
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
    """Return the dtypes of an op's arguments and result, such as "f16, f32 x 3 -> f16". "()" stands for no tensors."""
    return f"{', '.join(count_equal(op.given)) or '()'} -> {', '.join(count_equal(op.out)) or '()'}"


def _describe_rule(op: ContractOp) -> str:
    if not op.rule:
        return "none"
    return f"{op.rule} ({op.entry})" if op.entry else op.rule


def list_constants(op: ContractOp) -> str:
    """Return the constants among the arguments of an op, or "none"."""
    return ", ".join(op.constants) or "none"


def _report_other_ops(verdict: Verdict, result: str, *, is_break: bool) -> None:
    """Add the ops that only one run has, except casts, to a verdict: as a note, or as a broken promise before its
    effects.

    These ops are a broken promise in three cases: `is_break` is True, a number is out of its band, or an op got
    arguments in other dtypes. In the last two cases, they may be the cause.

    Args:
        verdict: has the broken promises about ops, optimizers and numbers already.
        result: what the numbers say, for the note.
    """
    differences = verdict.differences
    texts: list[str] = []
    sites: dict[str, list[str]] = {"appeared": [], "vanished": []}  # lines of the present script
    for verb, ops in (("vanished", differences.vanished), ("appeared", differences.appeared)):
        for op in ops:
            if is_cast(op):  # `_judge_ops` has reported casts
                continue
            site = op.site if verb == "appeared" else differences.sites.get(op.site, "")
            sites[verb].append(site)
            calls = f", {op.calls} calls" if op.calls > 1 else ""
            texts.append(f"{_name_op(op)} ({site or f'was at {op.site}'}) {verb}{calls}")
    if not texts:
        return
    shown = "; ".join(texts[:6]) + (f"; and {len(texts) - 6} more" if len(texts) > 6 else "")
    with_other_dtypes = [pair for pair in differences.moved if pair.has_other_dtypes]
    cause_count = sum(map(_is_cause, with_other_dtypes)) + len(differences.casts)
    has_effect_on_dtypes = not all(map(_is_cause, with_other_dtypes))
    has_effect_on_numbers = any(broken.kind in _KINDS_OF_NUMBERS for broken in verdict.breaks)
    if not (is_break or has_effect_on_dtypes or has_effect_on_numbers):
        verdict.notes.append(f"other ops, and {result}: {shown}")
        return
    # `_judge_ops` has put the causes of other dtypes first; the effects on dtypes and then on numbers come after them
    place = cause_count
    if not has_effect_on_dtypes:
        place = sum(broken.kind in _KINDS_OF_SETTINGS for broken in verdict.breaks)
    known_sites = [site for site in (*sites["appeared"], *sites["vanished"]) if site]
    verdict.breaks.insert(place, Break("ops", f"other ops: {shown}", known_sites[0] if known_sites else ""))


_KINDS_OF_SETTINGS = ("precision", "rule", "cast", "constant", "optimizer")
"""Kinds of `Break` about ops and optimizers. They come before the kinds about numbers."""

_KINDS_OF_NUMBERS = ("start", "output", "gradient", "update", "lost", "skipped", "scale", "loss", "norm")
"""Kinds of `Break` about numbers, except for "steps"."""


# ---- optimizers ------------------------------------------------------------------------------------------------------


def judge_optimizers(contract: Contract, now: Contract) -> Iterator[Break]:
    """Yield a broken promise for each parameter group that only one run has, or whose optimizer has another class now.
    For the other groups, yield one for each setting whose value has changed.
    """
    before = {(record.number, record.group): record for record in contract.optimizers}
    after = {(record.number, record.group): record for record in now.optimizers}
    keys = sorted(before.keys() | after.keys())
    for number, group in keys:
        old, new = before.get((number, group)), after.get((number, group))
        name = f"optimizer {number}, group {group}" if len(keys) > 1 else "the optimizer"
        if old is None or new is None:
            yield Break("optimizer", f"{name} {'vanished' if new is None else 'appeared'}")
        elif old.type != new.type:
            yield Break("optimizer", f"{name}: {old.type} -> {new.type}")
        else:
            old_settings, new_settings = _parse_settings(old), _parse_settings(new)
            for setting, old_value in old_settings.items():
                # a setting that only one of the two runs has may be from another release of torch
                new_value = new_settings.get(setting, old_value)
                if new_value != old_value:
                    yield Break("optimizer", f"{name} ({new.type}): {setting} {old_value} -> {new_value}")


def _parse_settings(record: OptimizerRecord) -> dict[str, str]:
    """Return the settings of a parameter group by name, such as {"lr": "0.001"}."""
    return dict(text.split("=", 1) for text in record.settings)


# ---- numbers ---------------------------------------------------------------------------------------------------------


def _judge_numbers(
    promised: Numbers, now: Numbers, ops: tuple[Sequence[ContractOp], Sequence[ContractOp]]
) -> Iterator[Break]:
    """Yield the broken promises about numbers, causes before effects.

    If a number has a value for each step, only the first step with a value out of its band is reported. `ops`: the ops
    of the contract, and the ops of the run.
    """
    pairs = [pair for pair in _match_modules(promised.modules, now.modules) if _is_comparable(*pair, *ops)]
    scale = promised.curve("loss scale")
    starts_equal = scale is None or _find_break(scale, now.curve(scale.name)) != 0
    # another scale in the first step is a setting, and so a cause; in a later step it is an effect
    if scale is not None and not starts_equal:
        yield from _judge_curve(scale, now.curve(scale.name))
    kinds = (
        ("start", "weights", "before the first step, its weights are off by"),
        ("output", "output", "its first output is off by"),
        ("gradient", "gradient", "its first gradients are off by"),
        ("update", "update", "its first update is off by"),
    )
    for kind, name, text in kinds:
        # the backward pass computes the gradients of the last module first
        in_order = pairs if kind in ("start", "output") else pairs[::-1]
        for old, new in in_order:
            difference, band = _compare_number(old, new, name), getattr(old, f"{name}_band")
            if difference is not None and band is not None and difference > band:
                size = "a number that is not finite" if not math.isfinite(difference) else f"{difference:.2g}"
                error = _describe_error(old, new) if kind == "output" else ""
                yield Break(kind, f"{_name_module(new)}: {text} {size}, and {band:.2g} was promised{error}")
    yield from _judge_lost(promised, now)
    yield from _judge_length(promised, now)
    curves = [curve for curve in promised.curves if curve is not scale or starts_equal]
    first_breaks = [(_find_break(curve, now.curve(curve.name)), curve) for curve in curves]
    # The earliest first; in one step, the order of the curves, in which causes come first. With several optimizers,
    # norms have more values than losses, so a step is compared by its place in the curve, from 0 to 1.
    broken = [(step / len(curve.values), curve) for step, curve in first_breaks if step is not None]
    for _, curve in sorted(broken, key=lambda pair: pair[0]):
        yield from _judge_curve(curve, now.curve(curve.name))
    for old, new in pairs:
        for name, what in (("last_gradient", "gradient"), ("last_update", "update")):
            difference, band = compare_norms(getattr(old, name), getattr(new, name)), getattr(old, f"{name}_band")
            if difference is not None and band is not None and difference > band:
                text = f"in the last step, its {what} has a norm that is off by {difference:.2g}"
                yield Break("norm", f"{_name_module(new)}: {text}, and {band:.2g} was promised")


def _name_module(module: ModuleRecord) -> str:
    return f"{module.module} ({module.type})" if module.type else module.module


def _compare_number(old: ModuleRecord, new: ModuleRecord, name: str) -> float | None:
    """Return the relative difference of the "weights", "output", "gradient" or "update" of a module.

    None if `old` has no "update". For the other names, None if neither module has the number.
    """
    if name == "update":
        return compare_norms(old.update, new.update)
    return compare_sketches(unpack(getattr(old, f"of_{name}")), unpack(getattr(new, f"of_{name}")))


def _describe_error(old: ModuleRecord, new: ModuleRecord) -> str:
    """Return a text if the error of an output against float32 has grown by more than `GROWN`, else ""."""
    if old.error is None or new.error is None or new.error <= GROWN * old.error:
        return ""
    return f"; its error against float32 grew from {old.error:.2g} to {new.error:.2g}"


def _match_modules(old: Sequence[ModuleRecord], new: Sequence[ModuleRecord]) -> list[tuple[ModuleRecord, ModuleRecord]]:
    """Return each module of `old` that has a partner in `new`, with its partner, in the order of `old`.

    Partners are, in this order: modules of the same name with equal numbers; modules with equal numbers, because in a
    `Sequential` that was split or joined, a name such as "3" may belong to another module now; modules of the same
    name; modules of the same type, in order.
    """

    def has_same_name(module: ModuleRecord, candidate: ModuleRecord) -> bool:
        return candidate.module == module.module

    def has_same_type(module: ModuleRecord, candidate: ModuleRecord) -> bool:
        return candidate.type == module.type

    partners: dict[str, ModuleRecord] = {}
    candidates = {module.module: module for module in new}
    for module in old:
        if module.module in candidates and _has_equal_numbers(module, candidates[module.module]):
            partners[module.module] = candidates.pop(module.module)
    for are_partners in (_has_equal_numbers, has_same_name, has_same_type):
        for module in old:
            if module.module in partners:
                continue
            partner = next((candidate for candidate in candidates.values() if are_partners(module, candidate)), None)
            if partner is not None:
                partners[module.module] = candidates.pop(partner.module)
    return [(module, partners[module.module]) for module in old if module.module in partners]


def _has_equal_numbers(old: ModuleRecord, new: ModuleRecord) -> bool:
    """Return whether the weights and the first output are within their bands, as far as they can be compared.

    False if neither can be compared.
    """
    compared = [(_compare_number(old, new, name), getattr(old, f"{name}_band")) for name in ("weights", "output")]
    judged = [(difference, band) for difference, band in compared if difference is not None and band is not None]
    return bool(judged) and all(difference <= band for difference, band in judged)


def _is_comparable(
    old: ModuleRecord, new: ModuleRecord, before: Sequence[ContractOp], after: Sequence[ContractOp]
) -> bool:
    """Return whether it makes sense to compare the numbers of a module in two runs, with the ops of both.

    It makes no sense if the module has no weights, such as an activation, and its ops differ: the script may call it at
    other places now, so its first calls in the two runs may not correspond.
    """
    return bool(old.of_weights) or _count_ops(old.module, before) == _count_ops(new.module, after)


def _count_ops(module: str, ops: Sequence[ContractOp]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for op in ops:
        if op.module == module:
            counts[strip_spelling(op.op)] += op.calls
    return counts


def _judge_lost(promised: Numbers, now: Numbers) -> Iterator[Break]:
    """Yield a broken promise if rounding loses more of the changes of 16-bit tensors than `MOST_LOST` allows."""
    old, new = promised.hardware, now.hardware
    if new.kept is None:
        return
    lost = 1 - new.kept
    lost_before = 0.0 if old.kept is None else 1 - old.kept
    if lost > MOST_LOST * lost_before:
        before = "none" if old.kept is None else f"{lost_before:.0%}"
        text = f"{lost:.0%} of the changes of 16-bit tensors are lost, most in {new.kept_worst}; {before} before"
        yield Break("lost", text)


def _judge_curve(promised: StepsRecord, now: StepsRecord | None) -> Iterator[Break]:
    """Yield a broken promise for the first step whose number has left its band, if there is one."""
    step = _find_break(promised, now)
    if step is None or now is None:
        return
    kind = {"loss": "loss", "loss scale": "scale", "skipped": "skipped"}.get(promised.name, "norm")
    value, band = promised.values[step], promised.bands[step]
    if kind == "skipped":
        yield Break(kind, f"step {step} is{'' if now.values[step] else ' not'} skipped; {_was_skipped(value)}")
    else:
        text = f"is {now.values[step]:.6g}, and {value:.6g} ± {band:.2g} was promised"
        yield Break(kind, f"the {promised.name} of {promised.noun} {step} {text}")


def _was_skipped(value: float) -> str:
    return "it was before" if value else "it was not before"


def _find_break(promised: StepsRecord, now: StepsRecord | None) -> int | None:
    """Return the first step that both trainings took and whose number has left its band; None without one."""
    values: Sequence[float] = now.values if now is not None else ()
    # a shorter training is reported by `_judge_length`
    for step, (value, band, current) in enumerate(zip(promised.values, promised.bands, values, strict=False)):
        if band is not None and not abs(current - value) <= band:
            return step
    return None


def _judge_length(promised: Numbers, now: Numbers) -> Iterator[Break]:
    """Yield a broken promise if the training took fewer steps than promised."""
    for curve in promised.curves:
        present = now.curve(curve.name)
        taken = len(present.values) if present is not None else len(curve.values)
        if taken < len(curve.values):
            yield Break("steps", f"the training took {count_of(taken, 'step')}, and {len(curve.values)} were promised")
            return


def is_other_script(contract: Contract, now: Contract) -> bool:
    """Return whether the contract is of another script: another name, and few equal calls of ops."""
    if contract.about.script == now.about.script:
        return False
    return find_differences(_without_dtypes(contract.ops), _without_dtypes(now.ops)).equal_share < LEAST_EQUAL


def _without_dtypes(ops: Sequence[ContractOp]) -> list[ContractOp]:
    return [replace(op, given=(), out=(), rule="", constants=()) for op in ops]
