"""`find_differences`: how the ops of two runs differ, whatever the lines and the modules are called.

Calls are compared by module: first between modules of the same name, then between modules whose calls look alike. The
calls that are left are compared as if they were in one module. So moved lines, renamed modules and modules that were
split or joined are no differences. Importing this does not import torch.
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


class Moved(NamedTuple):
    """Calls of an op that differ between the two runs in dtypes, rule or constants."""

    before: ContractOp
    after: ContractOp

    @property
    def has_other_dtypes(self) -> bool:
        """Whether the dtypes differ, and not only the rule."""
        return (self.before.given, self.before.out) != (self.after.given, self.after.out)


@dataclass(slots=True)
class OpDifferences:
    """The ops that differ.

    Attributes:
        moved: calls in other dtypes, or by another rule.
        changed: calls with other constants among their arguments.
        vanished, appeared: calls that only the first, or only the second run has.
        part: the share of the calls of both runs with an equal call in the other run, from 0 to 1.
    """

    moved: list[Moved] = field(default_factory=list)
    changed: list[Moved] = field(default_factory=list)
    vanished: list[ContractOp] = field(default_factory=list)
    appeared: list[ContractOp] = field(default_factory=list)
    part: float = 1.0

    def __bool__(self) -> bool:
        return bool(self.moved or self.changed or self.vanished or self.appeared)

    @property
    def casts(self) -> list[ContractOp]:
        """The casts of the script that only one of the runs has."""
        return [op for op in (*self.vanished, *self.appeared) if is_cast(op)]


def is_cast(op: ContractOp) -> bool:
    """Return whether an op only casts from one floating dtype to another."""
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
    """Return the ops of the forward pass of a recording, in the order of their first calls."""
    ops: dict[ContractOp, int] = {}
    steps = set()
    for record in records:
        steps.add(record.step)
        if record.phase == "forward":
            op = ContractOp(
                *(record.module, record.op, record.given, record.out, record.rule, record.entry, record.site),
                calls=0,
                constants=record.constants,
            )
            ops[op] = ops.get(op, 0) + record.calls
    number = max(1, len(steps))
    return [replace(op, calls=max(1, round(calls / number))) for op, calls in ops.items()]


def find_differences(before: Sequence[ContractOp], after: Sequence[ContractOp]) -> OpDifferences:
    """Return how the ops of two runs differ. Ops that are not promised are left out."""
    unpromised = {_name(op) for op in (*before, *after) if not op.is_promised}
    old, new = (_group(op for op in ops if _name(op) not in unpromised) for ops in (before, after))
    found = OpDifferences()
    left_before: list[ContractOp] = []
    left_after: list[ContractOp] = []
    for old_name, new_name in _match_modules(old, new):
        _compare(old.get(old_name, []), new.get(new_name, []), found, left_before, left_after)
    # Calls may have moved to another module, so those that are left are compared as if they were in one.
    _compare(left_before, left_after, found, found.vanished, found.appeared)
    # modules were compared one by one, but an op that comes first in the run may cause the others
    order = {replace(op, calls=0): place for place, op in enumerate(after)}
    found.moved.sort(key=lambda pair: order[replace(pair.after, calls=0)])
    total = sum(op.calls for op in (*before, *after))
    differing = sum(op.calls for op in (*found.vanished, *found.appeared))
    differing += sum(pair.before.calls + pair.after.calls for pair in found.moved)
    found.part = 1 - differing / max(1, total)
    return found


def _group(ops: Iterable[ContractOp]) -> dict[str, list[ContractOp]]:
    groups: dict[str, list[ContractOp]] = {}
    for op in ops:
        groups.setdefault(op.module, []).append(op)
    return groups


def _match_modules(old: dict[str, list[ContractOp]], new: dict[str, list[ContractOp]]) -> list[tuple[str, str]]:
    """Return pairs of modules that belong together; a module without a partner is paired with its own name."""
    pairs = _match_equal_modules(old, new) if old.keys() != new.keys() else []
    matched, matched_new = {left for left, _ in pairs}, {right for _, right in pairs}
    pairs.extend((name, name) for name in old if name in new and name not in matched and name not in matched_new)
    matched, matched_new = {left for left, _ in pairs}, {right for _, right in pairs}
    old_left = [name for name in old if name not in matched]
    new_left = [name for name in new if name not in matched_new]
    old_looks, new_looks = [_look_of(old[name]) for name in old_left], [_look_of(new[name]) for name in new_left]
    matcher = difflib.SequenceMatcher(None, old_looks, new_looks, autojunk=False)
    for block in matcher.get_matching_blocks():
        for place in range(block.size):
            pairs.append((old_left[block.a + place], new_left[block.b + place]))
    matched, matched_new = {left for left, _ in pairs}, {right for _, right in pairs}
    pairs.extend((name, name) for name in old_left if name not in matched)
    pairs.extend((name, name) for name in new_left if name not in matched_new)
    return pairs


def _match_equal_modules(old: dict[str, list[ContractOp]], new: dict[str, list[ContractOp]]) -> list[tuple[str, str]]:
    """Return pairs of modules with equal calls, of the same name where there are such.

    In a `Sequential` that was split or joined, a name may belong to another module now.
    """
    calls = {name: _count_calls(ops) for name, ops in new.items()}
    pairs = [(name, name) for name, ops in old.items() if calls.get(name) == _count_calls(ops)]
    kept = {name for name, _ in pairs}
    partners: dict[object, list[str]] = {}
    for name in new:
        if name not in kept:
            partners.setdefault(calls[name], []).append(name)
    for name, ops in old.items():
        equal = partners.get(_count_calls(ops))
        if name not in kept and equal:
            pairs.append((name, equal.pop(0)))
    return pairs


def _count_calls(ops: Sequence[ContractOp]) -> frozenset[tuple[object, int]]:
    counts: Counter[object] = Counter()
    for op in ops:
        counts[_key_with_constants(op)] += op.calls
    return frozenset(counts.items())


def _look_of(ops: Sequence[ContractOp]) -> tuple[tuple[str, int], ...]:
    """Return the names of the ops of a module, each with its number of calls. Neither depends on dtypes."""
    counts: Counter[str] = Counter()
    for op in ops:
        counts[strip_spelling(op.op)] += op.calls
    return tuple(sorted(counts.items()))


def _compare(
    old: Sequence[ContractOp],
    new: Sequence[ContractOp],
    found: OpDifferences,
    vanished: list[ContractOp],
    appeared: list[ContractOp],
) -> None:
    """Compare the calls of a module. Calls that only one side has go to `vanished` and `appeared`."""
    old_left, new_left = _subtract(old, new), _subtract(new, old)
    for name in dict.fromkeys(strip_spelling(op.op) for op in (*old, *new)):
        _compare_constants(name, old, new, found)
        mine = [op for op in old_left if strip_spelling(op.op) == name]
        theirs = [op for op in new_left if strip_spelling(op.op) == name]
        while mine and theirs:
            before, after = mine[0], theirs[0]
            calls = min(before.calls, after.calls)
            found.moved.append(Moved(replace(before, calls=calls), replace(after, calls=calls)))
            mine, theirs = _take(mine, calls), _take(theirs, calls)
        vanished.extend(mine)
        appeared.extend(theirs)


def _take(ops: list[ContractOp], calls: int) -> list[ContractOp]:
    """Return `ops` with `calls` fewer calls of the first."""
    first = ops[0]
    if first.calls == calls:
        return ops[1:]
    return [replace(first, calls=first.calls - calls), *ops[1:]]


def _name(op: ContractOp) -> tuple[str, str]:
    return op.module, strip_spelling(op.op)


def _key(op: ContractOp) -> _Key:
    return strip_spelling(op.op), op.given, op.out, op.rule


def _key_with_constants(op: ContractOp) -> tuple[_Key, tuple[str, ...]]:
    return _key(op), op.constants


def _subtract(ops: Sequence[ContractOp], others: Sequence[ContractOp]) -> list[ContractOp]:
    """Return the calls in `ops` that have no equal in `others`. Calls with equal constants are matched first."""
    left, others_left = list(ops), list(others)
    keys: tuple[Callable[[ContractOp], object], ...] = (_key_with_constants, _key)
    for key in keys:
        # Each side is reduced by the other as it was before.
        left, others_left = _subtract_by(key, left, others_left), _subtract_by(key, others_left, left)
    return left


def _subtract_by(
    key: Callable[[ContractOp], object], ops: Sequence[ContractOp], others: Sequence[ContractOp]
) -> list[ContractOp]:
    counts: Counter[object] = Counter()
    for op in others:
        counts[key(op)] += op.calls
    left = []
    for op in ops:
        there = min(op.calls, counts[key(op)])
        counts[key(op)] -= there
        if op.calls > there:
            left.append(replace(op, calls=op.calls - there))
    return left


def _compare_constants(name: str, old: Sequence[ContractOp], new: Sequence[ContractOp], found: OpDifferences) -> None:
    """Note an op whose calls have other constants, if both sides have the same number of calls."""
    mine = [op for op in old if strip_spelling(op.op) == name]
    theirs = [op for op in new if strip_spelling(op.op) == name]
    if sum(op.calls for op in mine) != sum(op.calls for op in theirs):
        return
    constants = [{constant for op in ops for constant in op.constants} for ops in (mine, theirs)]
    gone, come = sorted(constants[0] - constants[1]), sorted(constants[1] - constants[0])
    if not gone and not come:
        return
    before = next((op for op in mine if set(gone) & set(op.constants)), mine[0])
    after = next((op for op in theirs if set(come) & set(op.constants)), theirs[0])
    found.changed.append(Moved(replace(before, constants=tuple(gone)), replace(after, constants=tuple(come))))
