"""Explains op lists: which rules an op follows and why, and on which ops two lists differ."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ..errors import OpListError
from .list_file import OpEntry
from .module_rules import ModuleRule
from .op_lists import OpLists
from .op_names import SpellingKey, find_or_none, find_spellings, get_op, inplace_twin, is_augmented, is_inplace
from .op_rules import OpRule


@dataclass(frozen=True, slots=True)
class Ruling:
    """The spellings of an op that follow one rule for one reason.

    Attributes:
        spellings: dotted names.
        kind: the rule that they follow.
        entry: the entry that decides; None if no list names the spellings.
        overridden: the entries of earlier files that it overrides, the earliest first.
        package: the package that has to be imported first, or None.
    """

    spellings: tuple[str, ...]
    kind: OpRule
    entry: OpEntry | None = None
    overridden: tuple[OpEntry, ...] = ()
    package: str | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    """The rules that lists have for an op, and entries without effect on this torch.

    Attributes:
        missing: entries whose op this torch lacks.
        other_torch: entries for other versions of torch.
    """

    op: str
    rulings: tuple[Ruling, ...]
    missing: tuple[OpEntry, ...]
    other_torch: tuple[OpEntry, ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """Spellings of an op that follow different rules in two lists.

    `op` is dotted if other spellings of the op follow other rules. A difference between module rules has no spellings:
    `op` names the rule, and both sides state its dtype.
    """

    op: str
    spellings: tuple[str, ...]
    left: str
    right: str


_Rulings = dict[SpellingKey, Ruling]


def explain_op(op: str, lists: OpLists) -> Explanation:
    """Return the rules that lists have for an op (a bare or dotted name, as in a list file) and its in-place twins.

    Raises OpListError, with a suggestion, for a name that no rule can apply to, and for a name that torch lacks and the
    lists do not name.
    """
    try:
        keys = find_spellings(op, may_be_missing=True)
    except OpListError:
        find_spellings(op, may_be_missing=False)  # knows more reasons, such as that it is a class of modules
        raise
    missing: list[OpEntry] = []
    for entry in lists.missing:
        if _is_named(op, entry):
            missing.append(entry)
    other_torch: list[OpEntry] = []
    for entry in lists.other_torch:
        if _is_named(op, entry) or find_or_none(entry.op).keys() & keys.keys():
            other_torch.append(entry)
    if not keys and not missing and not other_torch:
        find_spellings(op, may_be_missing=False)
    # the call above raised an error if neither torch nor the lists know the name
    by_key = _rule_all(lists)
    groups: dict[Ruling, list[str]] = {}
    for key, owner in _with_twins(keys).items():
        unlisted = Ruling((), OpRule.UNLISTED, package=None if owner is not None else _package_of(key))
        groups.setdefault(by_key.get(key, unlisted), []).append(".".join(key))
    rulings = [replace(ruling, spellings=tuple(names)) for ruling, names in groups.items()]
    return Explanation(op, tuple(rulings), tuple(missing), tuple(other_torch))


def compare(left: OpLists, right: OpLists) -> tuple[Difference, ...]:
    """Return the differences of two lists, in the order of the left one; none if and only if their digests are equal.

    An in-place twin or augmented operator is left out if it only follows an op that differs.
    """
    before, after = _rule_all(left), _rule_all(right)
    by_op: dict[str, list[SpellingKey]] = {}
    for key in {**before, **after}:
        by_op.setdefault(get_op(key), []).append(key)
    differences: list[Difference] = []
    for op, keys in by_op.items():
        differences += _compare_op(op, keys, before, after)
    return (*differences, *_compare_modules(left.modules, right.modules))


def _compare_modules(left: Sequence[ModuleRule], right: Sequence[ModuleRule]) -> Iterator[Difference]:
    before = {rule.chooser: rule.run for rule in left}
    after = {rule.chooser: rule.run for rule in right}
    for chooser in {**before, **after}:
        runs = before.get(chooser, OpRule.UNLISTED), after.get(chooser, OpRule.UNLISTED)
        if runs[0] != runs[1]:
            yield Difference(f"modules {chooser}", (), *runs)
    written = _write_out(left), _write_out(right)
    if before == after and written[0] != written[1]:  # the order matters: the last rule that covers a module counts
        yield Difference("modules", (), *written)


def _write_out(rules: Sequence[ModuleRule]) -> str:
    return ", ".join(f"{rule.chooser} {rule.run}" for rule in rules)


def _compare_op(op: str, keys: list[SpellingKey], left: _Rulings, right: _Rulings) -> Iterator[Difference]:
    plain: list[SpellingKey] = []
    written: dict[str, list[SpellingKey]] = {}  # spellings that write in place, by their name
    for key in dict.fromkeys([*_with_twins(find_or_none(op)), *keys]):
        if is_inplace(key[1]) or is_augmented(key[1]):
            written.setdefault(key[1], []).append(key)
        else:
            plain.append(key)
    differences = list(_compare_keys(op, plain, left, right))
    yield from differences
    for name, twins in written.items():
        only_follow = all(_is_from_op(key, plain, side) for key in twins for side in (left, right))
        if not (differences and only_follow):
            if op == ".".join(twins[0]):
                name = op
            yield from _compare_keys(name, twins, left, right)


def _compare_keys(op: str, keys: list[SpellingKey], left: _Rulings, right: _Rulings) -> Iterator[Difference]:
    """Yield one difference for all the spellings if they agree on it, else one for each that differs."""
    kinds = {key: (_kind(key, left), _kind(key, right)) for key in keys}
    if len(set(kinds.values())) == 1:
        before, after = kinds[keys[0]]
        if before != after:
            yield Difference(op, tuple(".".join(key) for key in keys), before, after)
        return
    for key, (before, after) in kinds.items():
        if before != after:
            yield Difference(".".join(key), (".".join(key),), before, after)


def _kind(key: SpellingKey, rulings: _Rulings) -> OpRule:
    ruling = rulings.get(key)
    if ruling is None or ruling.kind is OpRule.NEUTRAL:
        return OpRule.UNLISTED
    return ruling.kind


def _is_from_op(key: SpellingKey, plain: list[SpellingKey], rulings: _Rulings) -> bool:
    """Return whether an in-place spelling has no rule, or has it from the entry of its op."""
    if key not in rulings:
        return True
    entry = rulings[key].entry
    return any(spelling in rulings and rulings[spelling].entry == entry for spelling in plain)


def _rule_all(lists: OpLists) -> _Rulings:
    """Return the ruling of every spelling that the lists name, without its `spellings`."""
    rulings: _Rulings = {}
    for spelling in (*lists.spellings, *lists.neutral):
        key = spelling.owner_name, spelling.name
        rulings[key] = Ruling((), spelling.kind, spelling.entry, spelling.overridden)
    for spelling in lists.deferred:
        key = spelling.owner_name, spelling.name
        rulings[key] = Ruling((), spelling.kind, spelling.entry, package=_package_of(key))
    return rulings


def _package_of(key: SpellingKey) -> str:
    return key[0].partition(".")[0]


def _is_named(op: str, entry: OpEntry) -> bool:
    """Return whether an entry may mean an op that torch lacks: both have the same name, or one name is bare."""
    return op in (entry.op, entry.op.rpartition(".")[2]) or entry.op == op.rpartition(".")[2]


def _with_twins(keys: dict[SpellingKey, object | None]) -> dict[SpellingKey, object | None]:
    with_twins = dict(keys)
    for key, owner in keys.items():
        twin = inplace_twin(key)
        if twin is not None:
            with_twins[twin] = owner
    return with_twins
