"""`find_differences`: the ops on which two runs differ. Moved lines and renamed modules are no differences.

Ops are compared module by module. First, modules of one run get partners in the other (see `_match_modules`). Calls
without a partner in the other module are compared a second time, as if all of them were in one module, because a module
may have been split, or joined with another. Calls on the same line of the script are compared before calls on different
lines (see `match_lines`). Importing this does not import torch.
"""

import difflib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ..op_constants import strip_spelling
from ..records import OpRecord
from .contract import ContractOp
from .line_matching import Line, match_lines

FLOATS = frozenset({"f16", "bf16", "f32", "f64"})

_Key = tuple[str, tuple[str, ...], tuple[str, ...], str]
"""The name of an op, the dtypes of its arguments and results, and its rule. Calls with the same key are equal, apart
from their constants.
"""


class Moved(NamedTuple):
    """Calls of an op in the first run, and the corresponding calls in the second.

    In `OpDifferences.moved`, the two differ in their dtypes or rules. In `OpDifferences.changed`, they differ in their
    constants (numbers and words among the arguments), and the `constants` of each are only those that the other lacks.
    """

    before: ContractOp
    after: ContractOp

    @property
    def has_other_dtypes(self) -> bool:
        """Whether the dtypes differ, and not only the rule."""
        return (self.before.given, self.before.out) != (self.after.given, self.after.out)


class _Call(NamedTuple):
    """Calls of an op in one of the runs, and their line. `line` is None if the op has no site."""

    op: ContractOp
    line: Line | None


@dataclass(slots=True)
class OpDifferences:
    """The ops on which two runs differ.

    Attributes:
        moved: calls in other dtypes, or by another rule.
        changed: calls with other numbers or words among their arguments.
        vanished: calls that only the first run has.
        appeared: calls that only the second run has.
        sites: lines of the first run, each with the line of the second run that corresponds to it.
        equal_share: the share of the calls of both runs, from 0 to 1, that are not in `moved`, `vanished` or
            `appeared`.
    """

    moved: list[Moved] = field(default_factory=list)
    changed: list[Moved] = field(default_factory=list)
    vanished: list[ContractOp] = field(default_factory=list)
    appeared: list[ContractOp] = field(default_factory=list)
    sites: dict[str, str] = field(default_factory=dict)
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
    return is_copy and bool(op.out) and bool(FLOATS.intersection(op.given)) and op.given[-1:] != op.out[:1]


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
    """Return how the ops of two runs differ. Leave out ops that one of the runs does not promise (`is_promised`)."""
    unpromised = {_module_and_op(op) for op in (*before, *after) if not op.is_promised}
    old, new = (_group_by_module(op for op in ops if _module_and_op(op) not in unpromised) for ops in (before, after))
    old_lines, new_lines = match_lines(before, after)
    site_by_number = {line.number: site for site, line in new_lines.items()}
    differences = OpDifferences()
    differences.sites = {
        site: site_by_number[line.number] for site, line in old_lines.items() if line.number in site_by_number
    }
    only_before: list[_Call] = []
    only_after: list[_Call] = []
    for old_name, new_name in _match_modules(old, new):
        old_ops = [] if old_name is None else old[old_name]
        new_ops = [] if new_name is None else new[new_name]
        old_calls = [_Call(op, old_lines.get(op.site)) for op in old_ops]
        new_calls = [_Call(op, new_lines.get(op.site)) for op in new_ops]
        rest = _compare(old_calls, new_calls, differences, is_module=bool(old_name))
        only_before.extend(rest[0])
        only_after.extend(rest[1])
    # an op may be in another module now, so compare all these calls once more
    rest = _compare(only_before, only_after, differences, is_module=False)
    differences.vanished, differences.appeared = ([call.op for call in calls] for calls in rest)
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


def _match_modules(
    old: dict[str, list[ContractOp]], new: dict[str, list[ContractOp]]
) -> list[tuple[str | None, str | None]]:
    """Return a pair of names for each module: its name in the first run, and its partner's name in the second.

    Partners are, in this order: modules with equal calls, if the runs differ in the names of their modules; modules of
    the same name; modules with the same numbers of calls of the same ops, whatever their dtypes. A module without a
    partner is paired with None.
    """
    pairs: list[tuple[str | None, str | None]] = []

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
    return [*pairs, *((name, None) for name in old_names), *((None, name) for name in new_names)]


def _match_equal_modules(old: dict[str, list[ContractOp]], new: dict[str, list[ContractOp]]) -> list[tuple[str, str]]:
    """Return pairs of modules with equal calls. If several could be partners, those with the same name are.

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
    old: Sequence[_Call], new: Sequence[_Call], differences: OpDifferences, *, is_module: bool
) -> tuple[list[_Call], list[_Call]]:
    """Compare calls in the first run, `old`, with calls in the second, `new`, and return those without a partner.

    Pairs of calls that differ are added to `differences`. `is_module`: whether all calls are of one named module.
    """
    vanished: list[_Call] = []
    appeared: list[_Call] = []
    for name in dict.fromkeys(strip_spelling(call.op.op) for call in (*old, *new)):
        old_calls = [call for call in old if strip_spelling(call.op.op) == name]
        new_calls = [call for call in new if strip_spelling(call.op.op) == name]
        is_only_line = len({call.line for call in old_calls}) == len({call.line for call in new_calls}) == 1
        rest = _compare_op(old_calls, new_calls, differences, is_only_line=is_module and is_only_line)
        vanished.extend(rest[0])
        appeared.extend(rest[1])
    return vanished, appeared


def _compare_op(
    old: list[_Call], new: list[_Call], differences: OpDifferences, *, is_only_line: bool
) -> tuple[list[_Call], list[_Call]]:
    """Compare the calls of one op in two runs, and return the calls without a partner. Add pairs that differ to
    `differences`.

    Partners are sought in this order:

    1. equal calls on the same line. If the runs then have the same calls left, only lines have moved, and all calls
       have a partner.
    2. calls on the same line;
    3. equal calls on any line;
    4. calls between the same two anchors (see `match_lines`), if both runs have equally many there;
    5. the remaining calls, if each run has the op on a single line of a module (`is_only_line`), or if the line of
       a call is not known.
    """
    _, old, new = _pair(old, new, lambda call: (call.line, _key_with_constants(call.op)))
    if _count_calls([call.op for call in old]) == _count_calls([call.op for call in new]):
        return [], []  # only lines have moved
    old, new = _pair_and_add(old, new, differences, lambda call: call.line)
    _, old, new = _pair(old, new, lambda call: _key_with_constants(call.op))
    # between two anchors, calls belong together if there are equally many
    old_gaps, new_gaps = _count_by_gap(old), _count_by_gap(new)
    gaps = {gap for gap, calls in old_gaps.items() if new_gaps[gap] == calls}
    sure_old, sure_new = ([call for call in calls if _gap(call) in gaps] for calls in (old, new))
    unsure_old, unsure_new = ([call for call in calls if _gap(call) not in gaps] for calls in (old, new))
    _pair_and_add(sure_old, sure_new, differences, _gap)
    if is_only_line or any(call.line is None for call in (*old, *new)):
        return _pair_and_add(unsure_old, unsure_new, differences, lambda call: "")
    return unsure_old, unsure_new


def _count_by_gap(calls: Sequence[_Call]) -> Counter[int | None]:
    counts: Counter[int | None] = Counter()
    for call in calls:
        if call.line is not None:
            counts[call.line.gap] += call.op.calls
    return counts


def _gap(call: _Call) -> int | None:
    """Return the number that identifies the gap between two anchors in which a call is: see `Line.gap`."""
    return None if call.line is None else call.line.gap


def _pair_and_add(
    old: Sequence[_Call], new: Sequence[_Call], differences: OpDifferences, place: Callable[[_Call], object]
) -> tuple[list[_Call], list[_Call]]:
    """Pair calls for which `place` returns the same; among them, first those that differ only in their constants.

    Add the pairs to `differences`, and return the calls without a partner.
    """
    equal_but_constants, old, new = _pair(old, new, lambda call: (place(call), _key(call.op)))
    others, old, new = _pair(old, new, place)
    differences.moved.extend(others)
    for before, after in (*equal_but_constants, *others):
        only_before = Counter(before.constants) - Counter(after.constants)
        only_after = Counter(after.constants) - Counter(before.constants)
        if only_before or only_after:
            constants = tuple(only_before.elements()), tuple(only_after.elements())
            pair = Moved(replace(before, constants=constants[0]), replace(after, constants=constants[1]))
            differences.changed.append(pair)
    return old, new


def _pair(
    old: Sequence[_Call], new: Sequence[_Call], key: Callable[[_Call], object]
) -> tuple[list[Moved], list[_Call], list[_Call]]:
    """Pair calls with the same key, in order. Return the pairs, and the calls without a partner of each run."""
    left = [call.op.calls for call in new]  # for each item of `new`, how many of its calls have no partner yet
    places: dict[object, list[int]] = {}
    for place, call in enumerate(new):
        places.setdefault(key(call), []).append(place)
    pairs: list[Moved] = []
    rest: list[_Call] = []
    for call in old:
        calls = call.op.calls
        for place in places.get(key(call), ()):
            paired = min(calls, left[place])
            if paired:
                pairs.append(Moved(replace(call.op, calls=paired), replace(new[place].op, calls=paired)))
                calls -= paired
                left[place] -= paired
        if calls:
            rest.append(_with_calls(call, calls))
    return pairs, rest, [_with_calls(call, calls) for call, calls in zip(new, left, strict=True) if calls]


def _with_calls(call: _Call, calls: int) -> _Call:
    return call._replace(op=replace(call.op, calls=calls))


def _module_and_op(op: ContractOp) -> tuple[str, str]:
    return op.module, strip_spelling(op.op)


def _key(op: ContractOp) -> _Key:
    return strip_spelling(op.op), op.given, op.out, op.rule


def _key_with_constants(op: ContractOp) -> tuple[_Key, tuple[str, ...]]:
    return _key(op), op.constants
