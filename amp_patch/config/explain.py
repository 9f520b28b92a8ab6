"""What op lists come to: the rules one op follows and why, and the ops on which two lists differ."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import OpListError
from .list_file import OpEntry
from .op_lists import OpLists, kind_of
from .op_names import Key, find_spellings, get_op, inplace_twin, is_augmented, is_inplace

SUMMARIES = {
    "whitelist": "runs in {low}",
    "blacklist": "runs in float32",
    "promote": "runs in the widest dtype among its arguments",
    "sequence_promote": "runs in the widest dtype among the tensors of its first argument",
    "banned": "refuses 16-bit arguments",
    "match_self": "writes to its first argument, in the dtype of that",
    "inplace_error": "writes to its first argument, and refuses if that is 16-bit",
    "neutral": "taken off its list, so it runs in the dtype it is given",
    "unlisted": "on no list, so it runs in the dtype it is given",
}
"""Each kind of behaviour in a few words; `{low}` stands for the low dtype."""

_SIXTEEN_BIT = ("float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class Ruling:
    """What happens to those spellings of an op that have the same fate for the same reason.

    Attributes:
        spellings: dotted names.
        kind: a key of SUMMARIES.
        entry: the line that decides; None for what no list names.
        overridden: the lines of earlier files that it overrules, the earliest first.
        package: what has to be imported first, or None.
    """

    spellings: tuple[str, ...]
    kind: str
    entry: OpEntry | None = None
    overridden: tuple[OpEntry, ...] = ()
    package: str | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    """All that lists say of an op: rulings, and entries that have no effect on this torch, because it lacks the op or
    has another version.
    """

    op: str
    rulings: tuple[Ruling, ...]
    missing: tuple[OpEntry, ...]
    other_torch: tuple[OpEntry, ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """Spellings of an op whose kinds differ between two lists; `op` is dotted where other spellings of the op have
    other kinds.

    A difference between module rules has no spellings: `op` tells which rule it is, and both sides what it says.
    """

    op: str
    spellings: tuple[str, ...]
    left: str
    right: str


_Rulings = dict[Key, Ruling]


def describe_effects(kind: str, low: str) -> dict[str, str]:
    """Return what becomes of an argument of each dtype that is ever cast, when the low dtype is `low`; any other dtype
    stays as it is.
    """
    untouched = dict.fromkeys((*_SIXTEEN_BIT, "float32"), "as it is")
    if kind == "whitelist":
        return {name: "as it is" if name == low else f"cast to {low}" for name in untouched}
    if kind == "blacklist":
        return untouched | dict.fromkeys(_SIXTEEN_BIT, "cast to float32")
    if kind in ("promote", "sequence_promote"):
        return untouched | {
            "float16": "cast to float32 beside float32 or bfloat16",
            "bfloat16": "cast to float32 beside float32 or float16",
        }
    if kind == "match_self":
        return dict.fromkeys(untouched, "cast to the dtype of the first argument")
    if kind == "inplace_error":
        return untouched | dict.fromkeys(_SIXTEEN_BIT, "an error as the first argument, else cast to float32")
    return untouched | dict.fromkeys(_SIXTEEN_BIT, "an error") if kind == "banned" else untouched


def explain(op: str, lists: OpLists) -> Explanation:
    """Return what lists say of an op, a bare or a dotted name as in a list file. Its in-place twins are explained along
    with it.

    Raises OpListError, with a suggestion, for a name that no rule can apply to, and for one that torch lacks and the
    lists do not name.
    """
    keys = find_spellings(op, may_be_missing=True)
    missing = tuple(entry for entry in lists.missing if _is_named(op, entry))
    other_torch = tuple(
        entry for entry in lists.other_torch if _is_named(op, entry) or _find_all(entry.op).keys() & keys.keys()
    )
    if not keys and not missing and not other_torch:
        find_spellings(op, may_be_missing=False)
    by_key = _rule_all(lists)
    groups: dict[Ruling, list[str]] = {}
    for key, owner in _with_twins(keys).items():
        package = key[0].partition(".")[0] if owner is None else None
        groups.setdefault(by_key.get(key) or Ruling((), "unlisted", package=package), []).append(".".join(key))
    rulings = tuple(replace(ruling, spellings=tuple(names)) for ruling, names in groups.items())
    return Explanation(op, rulings, missing, other_torch)


def compare(left: OpLists, right: OpLists) -> tuple[Difference, ...]:
    """Return where two lists differ, in the order of the left one; nothing if and only if their digests are equal.

    An in-place twin or augmented operator that merely follows an op that differs is not mentioned beside it.
    """
    sides = _rule_all(left), _rule_all(right)
    by_op: dict[str, list[Key]] = {}
    for key in {**sides[0], **sides[1]}:
        by_op.setdefault(get_op(key), []).append(key)
    ops = (difference for op, keys in by_op.items() for difference in _compare_op(op, keys, *sides))
    return (*ops, *_compare_modules(left.modules, right.modules))


def _compare_modules(left: Sequence[Any], right: Sequence[Any]) -> Iterator[Difference]:
    before, after = ({rule.chooser: rule.run for rule in rules} for rules in (left, right))
    if before != after:
        for chooser in {**before, **after}:
            if before.get(chooser) != after.get(chooser):
                yield Difference(
                    f"modules {chooser}", (), before.get(chooser, "unlisted"), after.get(chooser, "unlisted")
                )
    elif [(rule.chooser, rule.run) for rule in left] != [
        (rule.chooser, rule.run) for rule in right
    ]:  # of several, the last one counts
        yield Difference(
            "modules", (), *(", ".join(f"{rule.chooser} {rule.run}" for rule in rules) for rules in (left, right))
        )


def _compare_op(op: str, keys: list[Key], left: _Rulings, right: _Rulings) -> Iterator[Difference]:
    every = dict.fromkeys([*_with_twins(_find_all(op)), *keys])
    written = [key for key in every if _is_written_to(key)]
    plain = [key for key in every if not _is_written_to(key)]
    differences = list(_compare_keys(op, plain, left, right))
    yield from differences
    for name in dict.fromkeys(name for _, name in written):
        keys = [key for key in written if key[1] == name]
        if not differences or not all(_follows(key, plain, side) for key in keys for side in (left, right)):
            yield from _compare_keys(name if op != ".".join(keys[0]) else op, keys, left, right)


def _compare_keys(op: str, keys: list[Key], left: _Rulings, right: _Rulings) -> Iterator[Difference]:
    """Yield one difference for all the spellings if they agree on it, else one for each that differs."""
    kinds = {key: (_kind(key, left), _kind(key, right)) for key in keys}
    groups = [(op, keys)] if len(set(kinds.values())) == 1 else [(".".join(key), [key]) for key in keys]
    for name, members in groups:
        before, after = kinds[members[0]]
        if before != after:
            yield Difference(name, tuple(".".join(key) for key in members), before, after)


def _kind(key: Key, rulings: _Rulings) -> str:
    ruling = rulings.get(key)
    return "unlisted" if ruling is None or ruling.kind == "neutral" else ruling.kind


def _is_written_to(key: Key) -> bool:
    return is_inplace(key[1]) or is_augmented(key[1])


def _follows(key: Key, plain: list[Key], rulings: _Rulings) -> bool:
    """Whether an in-place spelling has its rule from the entry of its op, or has none."""
    return key not in rulings or any(other in rulings and rulings[other].entry == rulings[key].entry for other in plain)


def _rule_all(lists: OpLists) -> _Rulings:
    """Return the ruling of every spelling that the lists name, without its `spellings`."""
    rulings = {
        (spelling.owner_name, spelling.name): Ruling((), spelling.kind, spelling.entry, spelling.overridden)
        for spelling in (*lists.spellings, *lists.neutral)
    }
    for entry in lists.deferred:
        owner_name, _, name = entry.op.rpartition(".")
        kind = kind_of(name, entry.rule, lists.inplace_blacklist)
        rulings[owner_name, name] = Ruling((), kind, entry, package=owner_name.partition(".")[0])
    return rulings


def _is_named(op: str, entry: OpEntry) -> bool:
    """Whether an entry may mean an op that torch lacks: the same name, or one of the two is bare."""
    return op in (entry.op, entry.op.rpartition(".")[2]) or entry.op == op.rpartition(".")[2]


def _find_all(op: str) -> dict[Key, object | None]:
    """Return the spellings of a name, none at all for one that no rule can apply to."""
    try:
        return find_spellings(op, may_be_missing=True)
    except OpListError:
        return {}


def _with_twins(keys: dict[Key, object | None]) -> dict[Key, object | None]:
    return keys | {twin: owner for key, owner in keys.items() if (twin := inplace_twin(key))}
