"""The explanation of an op names its rules, their reasons and history and the casts that happen; a comparison names
every op on which two lists differ.

Guards: config/explain, config/op_rules.
"""

import tempfile
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from amp_patch.casting.mode import Switch
from amp_patch.casting.wrappers import OpCasts
from amp_patch.config import op_lists
from amp_patch.config.explain import Difference, Ruling, compare, explain_op
from amp_patch.config.op_lists import OpLists, load_oplists
from amp_patch.config.op_names import get_op, is_augmented, is_inplace
from amp_patch.errors import BannedOpError, OpListError

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a list file and return its path."""

    def write(text: str, name: str = "mine.yaml") -> Path:
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write


def kinds(lists: OpLists) -> dict[str, str]:
    """The kind of each spelling, by its full name, those of packages that are not imported too."""
    deferred = {spelling.entry.op: spelling.rule for spelling in lists.deferred}
    return deferred | {f"{spelling.owner_name}.{spelling.name}": spelling.rule for spelling in lists.spellings}


def by_spelling(rulings: tuple[Ruling, ...]) -> dict[str, Ruling]:
    return {spelling: ruling for ruling in rulings for spelling in ruling.spellings}


# ---- explain ---------------------------------------------------------------------------------------------------------


def test_every_spelling_is_explained_by_its_kind_and_entry() -> None:
    for name in ("float16", "apex"):
        lists = load_oplists(name)
        for spelling in lists.spellings:
            dotted = f"{spelling.owner_name}.{spelling.name}"
            for op in (dotted, get_op((spelling.owner_name, spelling.name))):
                ruling = by_spelling(explain_op(op, lists).rulings)[dotted]
                assert (ruling.kind, ruling.entry) == (spelling.rule, spelling.entry)


def test_spellings_with_the_same_fate_are_told_together() -> None:
    for op, expected in [
        (
            "softmax",
            {"blacklist": "torch.softmax torch.nn.functional.softmax torch.Tensor.softmax torch.special.softmax"},
        ),
        ("exp", {"blacklist": "torch.exp torch.Tensor.exp", "match_self": "torch.exp_ torch.Tensor.exp_"}),
        ("exp_", {"match_self": "torch.exp_ torch.Tensor.exp_"}),
        ("torch.Tensor.__ipow__", {"match_self": "torch.Tensor.__ipow__"}),
        ("torch.mul", {"unlisted": "torch.mul"}),
    ]:
        rulings = explain_op(op, load_oplists("float16")).rulings
        assert {ruling.kind: set(ruling.spellings) for ruling in rulings} == {
            kind: set(names.split()) for kind, names in expected.items()
        }
        assert len(rulings) == len(expected)


def test_a_ruling_tells_what_it_overrides(write: Write) -> None:
    write("blacklist: [exp]", "base.yaml")
    write("extends: base.yaml\npromote:\n  - {op: torch.exp, why: better}", "middle.yaml")
    rulings = by_spelling(explain_op("exp", load_oplists(write("extends: middle.yaml\nwhitelist: [exp]"))).rulings)
    told = {
        name: [(entry.rule, Path(entry.path).name, entry.line, entry.why) for entry in ruling.overridden]
        for name, ruling in rulings.items()
    }
    first, second = ("blacklist", "base.yaml", 1, ""), ("promote", "middle.yaml", 3, "better")
    assert told == {
        "torch.exp": [first, second],
        "torch.exp_": [first, second],
        "torch.Tensor.exp": [first],
        "torch.Tensor.exp_": [first],
    }
    assert {(ruling.entry.rule, ruling.entry.line) for ruling in rulings.values() if ruling.entry} == {("whitelist", 2)}


def test_a_neutral_entry_is_told_with_what_it_took_off(write: Write) -> None:
    rulings = by_spelling(explain_op("exp", load_oplists(write("extends: float16\nneutral: [torch.exp]"))).rulings)
    assert {name: ruling.kind for name, ruling in rulings.items()} == {
        "torch.exp": "neutral",
        "torch.exp_": "neutral",
        "torch.Tensor.exp": "blacklist",
        "torch.Tensor.exp_": "match_self",
    }
    assert [entry.op for entry in rulings["torch.exp_"].overridden] == ["exp"]


def test_a_package_that_is_not_imported_is_told(write: Write) -> None:
    lists = load_oplists(write("whitelist: [lib_not_imported.ops.f]"))
    (listed,) = explain_op("lib_not_imported.ops.f", lists).rulings
    assert (listed.kind, listed.package, listed.entry and listed.entry.line) == ("whitelist", "lib_not_imported", 1)
    (unlisted,) = explain_op("lib_not_imported.ops.g", lists).rulings
    assert (unlisted.kind, unlisted.package, unlisted.entry) == ("unlisted", "lib_not_imported", None)


def test_entries_without_effect_on_this_torch_are_told(write: Write) -> None:
    text = (
        "blacklist: [{op: soon, optional: true}, {op: tanh, since: 99.1}, {op: torch.erf, until: 1.2}, {op: mean,"
        " until: 1.2}]"
    )
    lists = load_oplists(write(text))
    assert [entry.op for entry in explain_op("soon", lists).missing] == ["soon"]
    assert explain_op("soon", lists).rulings == ()
    assert [entry.op for entry in explain_op("torch.fft.soon", lists).missing] == ["soon"]
    dotted = load_oplists(write("blacklist: [{op: torch.fft.soon, optional: true}]"))
    assert [entry.op for entry in explain_op("soon", dotted).missing] == ["torch.fft.soon"]
    with pytest.raises(OpListError, match=r"has no op 'torch\.linalg\.soon'"):
        explain_op("torch.linalg.soon", dotted)
    tanh, erf = explain_op("tanh", lists), explain_op("torch.special.erf", lists)
    assert [(entry.op, entry.since, entry.until) for entry in tanh.other_torch] == [("tanh", "99.1", "")]
    assert {ruling.kind for ruling in tanh.rulings} == {"unlisted"}
    assert erf.other_torch == ()
    assert [(entry.op, entry.until) for entry in explain_op("erf", lists).other_torch] == [("torch.erf", "1.2")]


# ---- what becomes of arguments ---------------------------------------------------------------------------------------

FLOATS = ("float16", "bfloat16", "float32")


def observe(kind: str, low: str, dtypes: tuple[str, ...]) -> tuple[str, ...]:
    """The dtypes in which an op under a rule gets tensors of these dtypes, or an error's name in their place."""
    switch, seen = Switch(), []
    switch.turn_on()

    def op(first: Any, *others: Any) -> None:
        seen.extend(first if kind == "sequence_promote" else (first, *others))

    tensors = [torch.ones(2, dtype=getattr(torch, dtype)) for dtype in dtypes]
    try:
        wrapper = OpCasts(switch, getattr(torch, low), "cpu", None).wrap(kind, op, "first")
        wrapper(tensors) if kind == "sequence_promote" else wrapper(*tensors)
    except BannedOpError:
        return ("an error",) * len(dtypes)
    return tuple(str(tensor.dtype).removeprefix("torch.") for tensor in seen)


def fate(dtype: str, got: str) -> str:
    return got if got == "an error" else "as it is" if got == dtype else f"cast to {got}"


@pytest.mark.parametrize("kind", [rule for rule in op_lists.OpRule if rule.is_casting])
def test_effects_are_what_the_casts_do(kind: op_lists.OpRule) -> None:
    for low, dtype, other in product(("float16", "bfloat16"), FLOATS, FLOATS):
        told = kind.describe_effects(low, "first")
        assert set(told) == set(FLOATS)
        alone = fate(dtype, observe(kind, low, (dtype,))[0])
        first, second = (
            fate(dtype, got) for got in (observe(kind, low, (dtype, other))[0], observe(kind, low, (other, dtype))[1])
        )
        if kind in ("promote", "sequence_promote"):
            is_cast = " beside " in told[dtype] and other in told[dtype].partition(" beside ")[2].split(" or ")
            expected = told[dtype].partition(" beside ")[0] if is_cast else "as it is"
            assert (alone, first, second) == ("as it is", expected, expected)
        elif kind in ("match_self", "match"):
            followed = "the first argument" if kind == "match_self" else "first"
            assert told[dtype] == f"cast to the dtype of {followed}"
            assert (alone, first, second) == ("as it is", "as it is", fate(dtype, other))
        elif kind == "banned":
            assert alone == told[dtype]
            assert (first == second == "an error") is ("an error" in (told[dtype], told[other]))
        else:
            assert {alone, first, second} == {told[dtype]}


# ---- compare ---------------------------------------------------------------------------------------------------------


def shown(differences: tuple[Difference, ...]) -> list[tuple[str, str, str]]:
    return [(difference.op, difference.left, difference.right) for difference in differences]


def test_differences_are_told_by_op_and_by_spelling_where_those_differ(write: Write) -> None:
    for left, right, expected in [
        ("blacklist: [softmax]", "", [("softmax", "blacklist", "unlisted")]),
        ("blacklist: [acos]", "promote: [arccos]", [("acos", "blacklist", "promote")]),
        ("blacklist: [exp]", "", [("exp", "blacklist", "unlisted")]),  # its twin goes without saying
        ("blacklist: [exp]", "blacklist: [exp]\nbanned: [exp_]", [("exp_", "match_self", "banned")]),
        (
            "blacklist: [softmax]",
            "blacklist: [torch.softmax, torch.Tensor.softmax, torch.special.softmax]",
            [("torch.nn.functional.softmax", "blacklist", "unlisted")],
        ),
        (
            "whitelist: [lib.f_]",
            "promote: [lib.f]",
            [("lib.f_", "match_self", "unlisted"), ("lib.f", "unlisted", "promote")],
        ),
    ]:
        a, b = load_oplists(write(left or "{}", "a.yaml")), load_oplists(write(right or "{}", "b.yaml"))
        assert shown(compare(a, b)) == expected
        assert sorted(shown(compare(b, a))) == sorted((op, after, before) for op, before, after in expected)


def check_comparison(left: OpLists, right: OpLists) -> None:
    """Every spelling is told with its two kinds, or has the same kind on both sides, or is in-place and follows an op
    that is told.
    """
    before, after = kinds(left), kinds(right)
    differences = compare(left, right)
    told = {spelling: difference for difference in differences for spelling in difference.spellings}
    assert sum(len(difference.spellings) for difference in differences) == len(told)
    for name in {*before, *after, *told}:
        pair = before.get(name, "unlisted"), after.get(name, "unlisted")
        if name in told:
            assert pair == (told[name].left, told[name].right)
        elif pair[0] != pair[1]:
            owner_name, _, short = name.rpartition(".")
            assert is_inplace((owner_name, short)) or is_augmented(short)
            assert get_op((owner_name, short)) in {get_op(tuple(spelling.rsplit(".", 1))) for spelling in told}  # type: ignore[arg-type]
    assert (differences == ()) is (left.digest == right.digest)
    assert {(d.spellings, d.right, d.left) for d in compare(right, left)} == {
        (d.spellings, d.left, d.right) for d in differences
    }


OPS = [
    *("exp", "torch.exp", "exp_", "torch.Tensor.exp_", "acos", "torch.arccos", "pow", "__ipow__"),
    *("torch.Tensor.__pow__", "mul", "lib.f", "lib.f_"),
]
BARE_RULES = [rule for rule in op_lists.RULE_KEYS if not rule.takes_argument]
LISTS = st.dictionaries(st.sampled_from(OPS), st.sampled_from(BARE_RULES), max_size=4)


@given(st.lists(LISTS, min_size=2, max_size=2))
@settings(max_examples=40, deadline=None)
def test_any_lists_compare(sides: list[dict[str, str]]) -> None:
    loaded = []
    with tempfile.TemporaryDirectory() as folder:
        for rules in sides:
            # one file for each entry: within one file, several names of an op would be refused
            for index, (op, rule) in enumerate(rules.items()):
                Path(folder, f"{index}.yaml").write_text(f"{rule}: [{op}]")
            path = Path(folder, "empty.yaml")
            path.write_text("{}")
            loaded.append(load_oplists([path, *(Path(folder, f"{index}.yaml") for index in range(len(rules)))]))
    check_comparison(*loaded)
