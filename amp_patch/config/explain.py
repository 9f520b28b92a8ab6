"""Explains op lists, for `amp-patch lists explain` and `lists diff`: the rules that an op follows, with the entries of
lists that decide, and the differences between two lists.

A *spelling* is a function that the name of an op means, such as `torch.exp` and `Tensor.exp` for `exp`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ..errors import OpListError
from .list_file import OpEntry
from .list_names import OLDEST_TORCH, parse_version
from .module_rules import ModuleRule
from .op_lists import OpLists, load_oplists
from .op_names import SpellingKey, find_known_spellings, find_spellings, get_op, inplace_twins, is_augmented, is_inplace
from .op_rules import OpRule


@dataclass(frozen=True, slots=True)
class Ruling:
    """Spellings of an op that follow the same rule because of the same entry.

    Attributes:
        spellings: dotted names, such as "torch.exp".
        kind: the rule that they follow; `amp-patch lists explain --json` prints it under this name. For spellings that
            write in place, it may differ from the rule of the entry.
        entry: the entry that puts them under a rule; None if no list names them.
        overridden: the entries of earlier files that `entry` overrides, the earliest first. Empty if `package` is set.
        package: the package, or module of torch, that must be imported before the rule has an effect, or None.
    """

    spellings: tuple[str, ...]
    kind: OpRule
    entry: OpEntry | None = None
    overridden: tuple[OpEntry, ...] = ()
    package: str | None = None

    def describe_effects(self, low: str) -> dict[str, str]:
        """Return the effect on an argument, by the name of its dtype. See `OpRule.describe_effects`."""
        return self.kind.describe_effects(low, "" if self.entry is None else self.entry.like)


@dataclass(frozen=True, slots=True)
class Explanation:
    """The rules that lists have for an op, and entries for it that have no effect.

    Attributes:
        missing: entries without effect because the running torch has no such op.
        other_torch: entries without effect because they are for other versions of torch.
    """

    op: str
    rulings: tuple[Ruling, ...]
    missing: tuple[OpEntry, ...]
    other_torch: tuple[OpEntry, ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """What follows the rule `left` in one list and the rule `right` in the other: an op, or modules of a model.

    Attributes:
        op: one of
            * "exp" or "exp_": the op, or its in-place twin, if all its spellings have these two rules;
            * "torch.exp": one spelling, if not all spellings of its op have these two rules, or no bare name means it;
            * "modules " and the chooser of a module rule, which says to which modules the rule applies;
            * "modules", if only the order of the module rules differs.
        spellings: dotted names. Empty for module rules, and for an op that the running torch lacks.
        left, right: for an op, a rule such as "whitelist", or "unlisted". For a module rule, "low", "float32" or
            "unlisted". For an order, all the module rules of the list.
    """

    op: str
    spellings: tuple[str, ...]
    left: str
    right: str


@dataclass(frozen=True, slots=True)
class Change:
    """The differences of a list between two versions of torch, `before` and `after`, such as "2.11" and "2.12"."""

    before: str
    after: str
    differences: tuple[Difference, ...]


_Rulings = dict[SpellingKey, Ruling]
"""The ruling of each spelling that lists name. Its field `spellings` is empty."""


def explain_op(op: str, lists: OpLists) -> Explanation:
    """Return the rules that lists have for an op and its in-place twins. `op` is a name as in a list file.

    Raises OpListError for a name that no rule can apply to, and for a name that neither torch nor the lists have.
    """
    try:
        keys = find_spellings(op, may_be_missing=True)
    except OpListError:
        # this call checks more, such as whether the name is a class of modules, and so may raise a better error
        find_spellings(op, may_be_missing=False)
        raise
    missing: list[OpEntry] = []
    for entry in lists.missing:
        if _is_named(op, entry):
            missing.append(entry)
    other_torch: list[OpEntry] = []
    for entry in lists.other_torch:
        if _is_named(op, entry) or find_known_spellings(entry.op).keys() & keys.keys():
            other_torch.append(entry)
    if not keys and not missing and not other_torch:
        find_spellings(op, may_be_missing=False)  # raises an error: neither torch nor a list has the name
    by_key = _find_rulings(lists)
    groups: dict[Ruling, list[str]] = {}  # the names of the spellings that have the same ruling
    for key, owner in _with_twins(keys).items():
        unlisted = Ruling((), OpRule.UNLISTED, package=None if owner is not None else _package_of(key))
        groups.setdefault(by_key.get(key, unlisted), []).append(".".join(key))
    rulings = [replace(ruling, spellings=tuple(names)) for ruling, names in groups.items()]
    return Explanation(op, tuple(rulings), tuple(missing), tuple(other_torch))


def compare(left: OpLists, right: OpLists) -> tuple[Difference, ...]:
    """Return the differences between two lists, in the order of the left one.

    There are none if the lists have the same `OpLists.digest`, and only then. If the rules of an op differ, in-place
    twins and augmented operators that differ only because of the op are left out.
    """
    left_rulings, right_rulings = _find_rulings(left), _find_rulings(right)
    by_op: dict[str, list[SpellingKey]] = {}
    for key in {**left_rulings, **right_rulings}:
        by_op.setdefault(get_op(key), []).append(key)
    differences: list[Difference] = []
    for op, keys in by_op.items():
        differences += _compare_op(op, keys, left_rulings, right_rulings)
    return (*differences, *_compare_modules(left.modules, right.modules))


def find_changes(name: str) -> Iterator[Change]:
    """Yield the `Change` at each version of torch that `since` or `until` names in a shipped list, the oldest first.

    `OLDEST_TORCH` and versions before it are left out. A change may have no differences.
    """
    lists = load_oplists(name)
    entries = [spelling.entry for spelling in (*lists.spellings, *lists.deferred, *lists.neutral)]
    bounds: set[tuple[int, int]] = set()
    for entry in (*entries, *lists.missing, *lists.other_torch):
        for version in filter(None, map(parse_version, (entry.since, entry.until))):
            bounds.add((version[0], version[1]))
    for major, minor in sorted(bounds):
        if (major, minor) > OLDEST_TORCH:
            before, after = f"{major}.{minor - 1}", f"{major}.{minor}"
            left, right = load_oplists(f"{name}@{before}"), load_oplists(f"{name}@{after}")
            yield Change(before, after, compare(left, right))


def compare_missing(left: OpLists, right: OpLists) -> Iterator[Difference]:
    """Yield the differences on ops that the running torch lacks. Lists for another version of torch name such ops."""
    left_rules = {entry.op: entry.rule.describe(entry.like) for entry in left.missing}
    right_rules = {entry.op: entry.rule.describe(entry.like) for entry in right.missing}
    for op in {**left_rules, **right_rules}:
        rules = left_rules.get(op, OpRule.UNLISTED), right_rules.get(op, OpRule.UNLISTED)
        if rules[0] != rules[1]:
            yield Difference(op, (), *rules)


def _compare_modules(left: Sequence[ModuleRule], right: Sequence[ModuleRule]) -> Iterator[Difference]:
    left_runs = {rule.chooser: rule.run for rule in left}
    right_runs = {rule.chooser: rule.run for rule in right}
    for chooser in {**left_runs, **right_runs}:
        runs = left_runs.get(chooser, OpRule.UNLISTED), right_runs.get(chooser, OpRule.UNLISTED)
        if runs[0] != runs[1]:
            yield Difference(f"modules {chooser}", (), *runs)
    in_order = _write_in_order(left), _write_in_order(right)
    # the same rules in another order differ too: of several rules that cover a module, the last one counts
    if left_runs == right_runs and in_order[0] != in_order[1]:
        yield Difference("modules", (), *in_order)


def _write_in_order(rules: Sequence[ModuleRule]) -> str:
    return ", ".join(f"{rule.chooser} {rule.run}" for rule in rules)


def _compare_op(op: str, keys: list[SpellingKey], left: _Rulings, right: _Rulings) -> Iterator[Difference]:
    """Yield the differences between the spellings of one op: first the op's own, then those that write in place."""
    plain: list[SpellingKey] = []
    inplace_by_name: dict[str, list[SpellingKey]] = {}
    for key in dict.fromkeys([*_with_twins(find_known_spellings(op)), *keys]):
        if is_inplace(key) or is_augmented(key[1]):
            inplace_by_name.setdefault(key[1], []).append(key)
        else:
            plain.append(key)
    differences = list(_compare_keys(op, plain, left, right))
    yield from differences
    for name, inplace in inplace_by_name.items():
        only_follow_op = all(_is_from_op(key, plain, side) for key in inplace for side in (left, right))
        if differences and only_follow_op:
            continue  # they differ only because their op differs
        is_dotted = op == ".".join(inplace[0])  # no bare name means this spelling
        yield from _compare_keys(op if is_dotted else name, inplace, left, right)


def _compare_keys(op: str, keys: list[SpellingKey], left: _Rulings, right: _Rulings) -> Iterator[Difference]:
    """Yield one difference for all spellings if they have the same two rules, else one for each that differs."""
    rules = {key: (_get_rule(key, left), _get_rule(key, right)) for key in keys}
    if len(set(rules.values())) == 1:
        left_rule, right_rule = rules[keys[0]]
        if left_rule != right_rule:
            yield Difference(op, tuple(".".join(key) for key in keys), left_rule, right_rule)
        return
    for key, (left_rule, right_rule) in rules.items():
        if left_rule != right_rule:
            yield Difference(".".join(key), (".".join(key),), left_rule, right_rule)


def _get_rule(key: SpellingKey, rulings: _Rulings) -> str:
    """Return the rule of a spelling, such as "whitelist" or "match v"; "unlisted" also if it is on `neutral`."""
    ruling = rulings.get(key)
    if ruling is None or ruling.kind is OpRule.NEUTRAL:
        return OpRule.UNLISTED
    return ruling.kind.describe("" if ruling.entry is None else ruling.entry.like)


def _is_from_op(key: SpellingKey, plain: list[SpellingKey], rulings: _Rulings) -> bool:
    """Return whether a spelling that writes in place has its ruling only from the op, or has none.

    `plain`: the spellings of the op that do not write in place.
    """
    if key not in rulings:
        return True
    entry = rulings[key].entry
    return any(spelling in rulings and rulings[spelling].entry == entry for spelling in plain)


def _find_rulings(lists: OpLists) -> _Rulings:
    """Return the ruling of every spelling that the lists name."""
    rulings: _Rulings = {}
    for spelling in (*lists.spellings, *lists.neutral):
        key = spelling.owner_name, spelling.name
        rulings[key] = Ruling((), spelling.rule, spelling.entry, spelling.overridden)
    for spelling in lists.deferred:
        key = spelling.owner_name, spelling.name
        rulings[key] = Ruling((), spelling.rule, spelling.entry, package=_package_of(key))
    return rulings


def _package_of(key: SpellingKey) -> str:
    """Return the package that must be imported before a spelling exists, such as "flash_attn"; in torch, the module."""
    root = key[0].partition(".")[0]
    return key[0] if root == "torch" else root


def _is_named(op: str, entry: OpEntry) -> bool:
    """Return whether an entry may mean the op: their names are equal, or one is the other without its namespace.

    The names are compared as text, because torch may lack the op of the entry.
    """
    return op in (entry.op, entry.op.rpartition(".")[2]) or entry.op == op.rpartition(".")[2]


def _with_twins(keys: dict[SpellingKey, object | None]) -> dict[SpellingKey, object | None]:
    """Return spellings with their owners, and the in-place twins of these spellings."""
    with_twins = dict(keys)
    for key, owner in keys.items():
        for twin in inplace_twins(key):
            with_twins[twin] = owner
    return with_twins
