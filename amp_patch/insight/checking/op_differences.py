"""`find_differences`: the ops on which two runs differ. Moved lines and renamed modules are no differences.

Ops are compared module by module. First, each module of one run gets a partner in the other (see `_match_modules`).
Calls without an equal call in the partner are compared a second time, as if all of them were in one module, because a
module may have been split, or joined with another. Importing this does not import torch.
"""

import difflib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ..op_constants import strip_spelling
from ..records import OpRecord
from .contract import ContractOp

FLOATS = frozenset({"f16", "bf16", "f32", "f64"})

_Key = tuple[str, tuple[str, ...], tuple[str, ...], str]
"""Calls with the same key are equal: the name of the op, the dtypes of its arguments and results, and its rule."""


class Moved(NamedTuple):
    """Calls of an op in the first run, and the corresponding calls in the second, in other dtypes or by another rule.

    In `OpDifferences.changed`, the two differ in their constants, and `constants` has only those of one run.
    """

    before: ContractOp
    after: ContractOp

    @property
    def has_other_dtypes(self) -> bool:
        """Whether the dtypes differ, and not only the rule."""
        return (self.before.given, self.before.out) != (self.after.given, self.after.out)


@dataclass(slots=True)
class OpDifferences:
    """The ops on which two runs differ.

    Attributes:
        moved: calls in other dtypes, or by another rule.
        changed: calls with other numbers or words among their arguments.
        vanished: calls that only the first run has.
        appeared: calls that only the second run has.
        equal_share: the share of the calls of both runs with an equal call in the other run, from 0 to 1.
    """

    moved: list[Moved] = field(default_factory=list)
    changed: list[Moved] = field(default_factory=list)
    vanished: list[ContractOp] = field(default_factory=list)
    appeared: list[ContractOp] = field(default_factory=list)
    equal_share: float = 1.0

    def __bool__(self) -> bool:
        return bool(self.moved or self.changed or self.vanished or self.appeared)

    @property
    def casts(self) -> list[ContractOp]:
        """The casts of the script that only one of the runs has."""
        return [op for op in (*self.vanished, *self.appeared) if is_cast(op)]


def is_cast(op: ContractOp) -> bool:
    """Return whether an op only casts floating values to another dtype."""
    is_copy = strip_spelling(op.op) in (
        "_to_copy",
        "copy",
        "half",
        "float",
        "bfloat16",
        "double",
        "to",
        "type",
        "type_as",
    )
    return is_copy and bool(FLOATS.intersection(op.given)) and op.given[-1:] != op.out[:1]


def read_ops(records: Iterable[OpRecord]) -> list[ContractOp]:
    """Return the ops of the forward pass of a recording, in the order of their first calls.

    `calls` is the mean number of calls over the recorded steps, rounded, and at least 1.
    """
    calls_by_op: dict[ContractOp, int] = {}
    steps = set()
    for record in records:
        steps.add(record.step)
        if record.phase == "forward":
            op = ContractOp(
                *(record.module, record.op, record.given, record.out, record.rule, record.entry, record.site),
                calls=0,
                constants=record.constants,
            )
            calls_by_op[op] = calls_by_op.get(op, 0) + record.calls
    step_count = max(1, len(steps))
    return [replace(op, calls=max(1, round(calls / step_count))) for op, calls in calls_by_op.items()]


def find_differences(before: Sequence[ContractOp], after: Sequence[ContractOp]) -> OpDifferences:
    """Return how the ops of two runs differ. Ops that are not promised are left out."""
    unpromised = {_module_and_op(op) for op in (*before, *after) if not op.is_promised}
    old, new = (_group_by_module(op for op in ops if _module_and_op(op) not in unpromised) for ops in (before, after))
    differences = OpDifferences()
    only_before: list[ContractOp] = []
    only_after: list[ContractOp] = []
    for old_name, new_name in _match_modules(old, new):
        _compare(old.get(old_name, []), new.get(new_name, []), differences, only_before, only_after)
    # an op may be in another module now, so compare all these calls once more
    _compare(only_before, only_after, differences, differences.vanished, differences.appeared)
    # in the order of the run, because an earlier op may be the cause of later ones
    order = {replace(op, calls=0): place for place, op in enumerate(after)}
    differences.moved.sort(key=lambda pair: order[replace(pair.after, calls=0)])
    total = sum(op.calls for op in (*before, *after))
    differing = sum(op.calls for op in (*differences.vanished, *differences.appeared))
    differing += sum(pair.before.calls + pair.after.calls for pair in differences.moved)
    differences.equal_share = 1 - differing / max(1, total)
    return differences


def _group_by_module(ops: Iterable[ContractOp]) -> dict[str, list[ContractOp]]:
    groups: dict[str, list[ContractOp]] = {}
    for op in ops:
        groups.setdefault(op.module, []).append(op)
    return groups


def _match_modules(old: dict[str, list[ContractOp]], new: dict[str, list[ContractOp]]) -> list[tuple[str, str]]:
    """Return a pair of names for each module: its name in the first run, and its partner's in the second.

    Partners are, in this order: modules with equal calls, if a module was renamed; modules of the same name; modules
    with the same numbers of calls of the same ops, whatever their dtypes. A module without a partner is paired with its
    own name, which the other run does not have.
    """
    pairs: list[tuple[str, str]] = []

    def without_partner() -> tuple[list[str], list[str]]:
        paired_old, paired_new = {old_name for old_name, _ in pairs}, {new_name for _, new_name in pairs}
        return [name for name in old if name not in paired_old], [name for name in new if name not in paired_new]

    if old.keys() != new.keys():
        pairs += _match_equal_modules(old, new)
    old_names, new_names = without_partner()
    pairs += [(name, name) for name in old_names if name in new_names]

    old_names, new_names = without_partner()
    old_ops, new_ops = [_count_ops(old[name]) for name in old_names], [_count_ops(new[name]) for name in new_names]
    matcher = difflib.SequenceMatcher(None, old_ops, new_ops, autojunk=False)
    for block in matcher.get_matching_blocks():
        for place in range(block.size):
            pairs.append((old_names[block.a + place], new_names[block.b + place]))

    old_names, new_names = without_partner()
    return [*pairs, *((name, name) for name in (*old_names, *new_names))]


def _match_equal_modules(old: dict[str, list[ContractOp]], new: dict[str, list[ContractOp]]) -> list[tuple[str, str]]:
    """Return pairs of modules with equal calls. Of several with equal calls, those with the same name are a pair.

    In a `Sequential` that was split or joined, a name such as "3" may belong to another module in the second run.
    """
    new_calls = {name: _count_calls(ops) for name, ops in new.items()}
    pairs = [(name, name) for name, ops in old.items() if new_calls.get(name) == _count_calls(ops)]
    with_same_name = {name for name, _ in pairs}
    candidates: dict[object, list[str]] = {}  # names in the second run, by their calls
    for name in new:
        if name not in with_same_name:
            candidates.setdefault(new_calls[name], []).append(name)
    for name, ops in old.items():
        equal_modules = candidates.get(_count_calls(ops))
        if name not in with_same_name and equal_modules:
            pairs.append((name, equal_modules.pop(0)))
    return pairs


def _count_calls(ops: Sequence[ContractOp]) -> frozenset[tuple[object, int]]:
    """Return the calls of a module: the key of each op with its constants, and its number of calls."""
    counts: Counter[object] = Counter()
    for op in ops:
        counts[_key_with_constants(op)] += op.calls
    return frozenset(counts.items())


def _count_ops(ops: Sequence[ContractOp]) -> tuple[tuple[str, int], ...]:
    """Return the names of the ops of a module, each with its number of calls, without dtypes, rules and constants."""
    counts: Counter[str] = Counter()
    for op in ops:
        counts[strip_spelling(op.op)] += op.calls
    return tuple(sorted(counts.items()))


def _compare(
    old: Sequence[ContractOp],
    new: Sequence[ContractOp],
    differences: OpDifferences,
    vanished: list[ContractOp],
    appeared: list[ContractOp],
) -> None:
    """Compare the calls of a module in the first run, `old`, with the calls of its partner in the second, `new`.

    Calls without an equal are paired with calls of the same op, and added to `differences.moved`. Calls that are still
    left are added to `vanished` and `appeared`. Other constants are added to `differences.changed`.
    """
    unequal_old, unequal_new = _subtract(old, new), _subtract(new, old)
    for name in dict.fromkeys(strip_spelling(op.op) for op in (*old, *new)):
        _compare_constants(name, old, new, differences)
        old_calls = [op for op in unequal_old if strip_spelling(op.op) == name]
        new_calls = [op for op in unequal_new if strip_spelling(op.op) == name]
        while old_calls and new_calls:
            before, after = old_calls[0], new_calls[0]
            calls = min(before.calls, after.calls)
            differences.moved.append(Moved(replace(before, calls=calls), replace(after, calls=calls)))
            old_calls, new_calls = _drop_calls(old_calls, calls), _drop_calls(new_calls, calls)
        vanished.extend(old_calls)
        appeared.extend(new_calls)


def _drop_calls(ops: list[ContractOp], calls: int) -> list[ContractOp]:
    """Return `ops` with `calls` fewer calls of the first op."""
    first = ops[0]
    if first.calls == calls:
        return ops[1:]
    return [replace(first, calls=first.calls - calls), *ops[1:]]


def _module_and_op(op: ContractOp) -> tuple[str, str]:
    return op.module, strip_spelling(op.op)


def _key(op: ContractOp) -> _Key:
    return strip_spelling(op.op), op.given, op.out, op.rule


def _key_with_constants(op: ContractOp) -> tuple[_Key, tuple[str, ...]]:
    return _key(op), op.constants


def _subtract(ops: Sequence[ContractOp], others: Sequence[ContractOp]) -> list[ContractOp]:
    """Return the calls in `ops` that have no equal call in `others`. Calls with equal constants are matched first."""
    rest, rest_of_others = list(ops), list(others)
    keys: tuple[Callable[[ContractOp], object], ...] = (_key_with_constants, _key)
    for key in keys:
        # both on one line, so that each is reduced by the other as it was before
        rest, rest_of_others = _subtract_by(key, rest, rest_of_others), _subtract_by(key, rest_of_others, rest)
    return rest


def _subtract_by(
    key: Callable[[ContractOp], object], ops: Sequence[ContractOp], others: Sequence[ContractOp]
) -> list[ContractOp]:
    """Return the calls in `ops` that have no call with the same key in `others`."""
    counts: Counter[object] = Counter()  # calls in `others` that are not matched yet
    for op in others:
        counts[key(op)] += op.calls
    rest = []
    for op in ops:
        matched = min(op.calls, counts[key(op)])
        counts[key(op)] -= matched
        if op.calls > matched:
            rest.append(replace(op, calls=op.calls - matched))
    return rest


def _compare_constants(
    name: str, old: Sequence[ContractOp], new: Sequence[ContractOp], differences: OpDifferences
) -> None:
    """Add an op to `differences.changed` if its calls have other constants.

    Does nothing if the numbers of calls differ, because then other calls explain other constants.
    """
    old_calls = [op for op in old if strip_spelling(op.op) == name]
    new_calls = [op for op in new if strip_spelling(op.op) == name]
    if sum(op.calls for op in old_calls) != sum(op.calls for op in new_calls):
        return
    old_constants = {constant for op in old_calls for constant in op.constants}
    new_constants = {constant for op in new_calls for constant in op.constants}
    only_old, only_new = sorted(old_constants - new_constants), sorted(new_constants - old_constants)
    if not only_old and not only_new:
        return
    before = next((op for op in old_calls if set(only_old) & set(op.constants)), old_calls[0])
    after = next((op for op in new_calls if set(only_new) & set(op.constants)), new_calls[0])
    pair = Moved(replace(before, constants=tuple(only_old)), replace(after, constants=tuple(only_new)))
    differences.changed.append(pair)
