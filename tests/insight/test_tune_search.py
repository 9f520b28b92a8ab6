"""The parts of tuning that need no run find the fewest units and entries, and judge gradients by their sketches.

Guards: insight/tuning/search, insight/tuning/entries, insight/tuning/sketches, insight/tuning/verdict.
"""

import itertools
import math
import random

import pytest
import torch

from amp_patch.config import load_oplists
from amp_patch.insight.recordings import Recording
from amp_patch.insight.records import CheckedStepRecord, RunRecord, SketchRecord
from amp_patch.insight.tuning.entries import ListEntry, fold_siblings, format_list, prune
from amp_patch.insight.tuning.search import find_fewest, find_prefix
from amp_patch.insight.tuning.sketches import SIZE, distance, sketch
from amp_patch.insight.tuning.verdict import explain_non_finite, judge

# ---- searches --------------------------------------------------------------------------------------------------------


class Counting:
    """A test that passes for sets that hold one of some needed sets; counts what it is asked for the first time."""

    def __init__(self, *needed):
        self.needed = [set(one) for one in needed]
        self.asked = {}

    def __call__(self, units):
        assert len(set(units)) == len(units)
        key = frozenset(units)
        if key not in self.asked:
            self.asked[key] = any(one <= key for one in self.needed)
        return self.asked[key]


def is_smallest(test, units):
    return test(units) and not any(test(tuple(one for one in units if one != left)) for left in units)


def test_every_answer_over_every_monotone_test_of_four_units_is_a_smallest_one():
    units = (0, 1, 2, 3)
    subsets = [some for size in range(5) for some in itertools.combinations(units, size)]
    for needed in itertools.chain(itertools.combinations(subsets, 1), itertools.combinations(subsets, 2)):
        for cut in range(5):
            test = Counting(*needed)
            found = find_fewest(test, units[:cut], units[cut:])
            assert found is not None and is_smallest(test, found), (needed, cut)
        for size in range(5):  # a test that only fails
            assert find_fewest(Counting(), units[:size], units[size:]) is None


@pytest.mark.parametrize("length", [0, 1, 8, 9, 30])
def test_a_prefix_is_the_shortest_and_costs_logarithms(length):
    for needed in range(1, length + 2):
        asked = []
        found = find_prefix(lambda count, needed=needed, asked=asked: asked.append(count) or count >= needed, length)
        assert found == (needed if needed <= length else None)
        assert len(asked) == len(set(asked)) <= 2 * math.ceil(math.log2(length + 1)) + 1
        assert all(1 <= count <= length for count in asked)


def test_few_of_many_are_found_in_few_tests():
    for seed in range(20):
        needed = random.Random(seed).sample(range(64), 3)
        test = Counting(needed)
        assert find_fewest(test, (), range(64)) == tuple(sorted(needed))
        assert len(test.asked) <= 3 * 2 * math.ceil(math.log2(65))


def test_what_is_forced_and_right_costs_one_test_and_one_for_each_entry():
    test = Counting("ab")
    assert find_fewest(test, "ab", "cdefgh") == ("a", "b") and len(test.asked) == 3
    test = Counting("")
    assert find_fewest(test, "", "abc") == () and len(test.asked) == 1


def test_a_test_that_is_not_monotone_still_gives_what_passes():
    def test(units):  # with c, a does harm
        return "b" in units and not {"a", "c"} <= set(units)

    assert find_fewest(test, "a", "bc") == ("b",)
    assert test(find_fewest(test, "", "cbad"))


# ---- entries ---------------------------------------------------------------------------------------------------------


def module(name):
    return ListEntry("module", name)


NAMES = [f"blocks.{i}{part}" for i in range(3) for part in ("", ".n1", ".attn", ".attn.qkv")] + ["blocks", "head"]


@pytest.mark.parametrize(
    ("names", "entries"),
    [
        (["blocks.0.n1", "blocks.1.n1", "blocks.2.n1"], ["blocks.*.n1"]),
        (["blocks.0.n1", "blocks.2.n1"], ["blocks.0.n1", "blocks.2.n1"]),
        (["head", "blocks.2.attn.qkv", "blocks.1.attn.qkv", "blocks.0.attn.qkv"], ["head", "blocks.*.attn.qkv"]),
    ],
)
def test_siblings_are_folded_if_all_are_there(names, entries):
    assert [entry.name for entry in fold_siblings(names, NAMES)] == entries


def test_a_fold_takes_in_no_module_that_is_not_meant():
    names = [f"{i}.{j}" for i in range(2) for j in range(2)]
    assert [one.name for one in fold_siblings(names, names)] == ["*.*"]
    assert [one.name for one in fold_siblings(names[:3], names)] == ["*.0", "0.1"]
    assert [one.name for one in fold_siblings(["a.0", "a.1"], ["a.0", "a.1", "a.last"])] == ["a.0", "a.1"]


def test_entries_inside_of_others_go():
    given = [module("blocks.0.attn"), module("blocks.0.attn.qkv"), module("blocks.*.n1"), module("blocks.2.n1.x")]
    assert prune([*given, ListEntry("op", "exp")]) == (given[2], given[0], ListEntry("op", "exp"))
    assert prune([*given, module("**")]) == (module("**"),)
    assert prune([module("blocks.10"), module("blocks.9")]) == (module("blocks.9"), module("blocks.10"))


def test_a_list_that_is_written_is_read_as_meant(tmp_path):
    (tmp_path / "base.yaml").write_text("extends: float16\n")
    entries = [module("a b.*.n'1"), ListEntry("op", "exp")]
    reasons = {entries[0]: 'it says: "no" # ü', entries[1]: "exp: 33 % of its results"}
    for extends in (["float16"], ["base.yaml"], ["float16", "base.yaml"]):
        path = tmp_path / "x.yaml"
        path.write_text(format_list(extends, entries, reasons), encoding="utf-8")
        lists = load_oplists(path)
        (rule,) = lists.modules
        assert (rule.chooser, rule.run, rule.why) == ("a b.*.n'1", "float32", reasons[entries[0]])
        (entry,) = {one.entry for one in lists.spellings if one.entry.path == str(path)}
        assert (entry.op, entry.rule, entry.why) == ("exp", "blacklist", reasons[entries[1]])
        assert any(one.name == "linear" and one.rule == "whitelist" for one in lists.spellings)


# ---- sketches --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (64, 64), (SIZE + 1,), (100, 1000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_distance_of_sketches_is_that_of_gradients(shape, dtype):
    generator = torch.Generator().manual_seed(1)
    one = torch.randn(shape, generator=generator).to(dtype)
    other = (one.float() * (1 + 0.1 * torch.randn(shape, generator=generator))).to(dtype)
    (norm, largest, text), (_, _, other_text) = sketch(one), sketch(other)
    exact = float((one.double() - other.double()).norm())
    assert norm == pytest.approx(float(one.double().norm()), rel=1e-5) and largest == float(one.abs().max())
    assert distance(text, other_text) == pytest.approx(exact, rel=1e-6 if one.numel() <= SIZE else 0.1)
    assert distance(text, text) == 0.0 and len(text) <= 4 * SIZE * 4 / 3 + 4


def test_one_element_of_many_is_not_overlooked():
    gradient = torch.zeros(1_000_000)
    other = gradient.clone()
    gradient[123_457], other[654_321] = 2.0, 1.0
    assert distance(sketch(gradient)[2], sketch(other)[2]) == pytest.approx(5**0.5, rel=0.1)


def test_a_sketch_draws_no_random_numbers_and_takes_what_is_sparse_or_empty_or_not_finite():
    before = torch.get_rng_state()
    dense = torch.arange(10_000.0)
    assert sketch(dense.to_sparse()) == sketch(dense)
    assert sketch(torch.zeros(0)) == (0.0, 0.0, "")
    norm, _, text = sketch(torch.tensor([1.0, math.inf]))
    assert norm == math.inf and not math.isfinite(distance(text, text))
    assert torch.equal(torch.get_rng_state(), before)


# ---- verdicts --------------------------------------------------------------------------------------------------------

RUN = RunRecord("2", "cpu", "O1", "f16", (), "", 0)


def make_run(gradients, losses=(1.0,), *, skipped=False, steps=1):
    records = []
    for step in range(steps):
        records += [SketchRecord(step, 0, name, *sketch(torch.tensor(one))) for name, one in gradients.items()]
        records.append(CheckedStepRecord(step, 0, tuple(losses), skipped, 128.0, False))
    return Recording(RUN, records)


REFERENCE = make_run({"a": [3.0, 4.0], "b": [1e-3, 0.0], "tiny": [1e-9, 0.0]})


@pytest.mark.parametrize(
    ("run", "worst", "parameter", "fault"),
    [
        (make_run({"a": [3.0, 4.0], "b": [1e-3, 0.0], "tiny": [1e-9, 0.0]}), 0.0, "b", ""),
        (make_run({"a": [3.0, 4.0], "b": [2e-3, 0.0], "tiny": [1e-9, 0.0]}), 1.0, "b", "the gradient of b is off by 1"),
        (make_run({"a": [3.0, 4.0], "b": [1e-3, 0.0], "tiny": [9.0, 0.0]}), 0.0, "b", ""),
        (make_run({"a": [3.0, 4.0], "tiny": [1e-9, 0.0]}), math.inf, "b", "the gradient of b is off by inf"),
        (make_run({"a": [3.0, math.nan], "b": [1e-3, 0.0]}), math.inf, "a", "the gradient of a is off by inf"),
        (make_run({"a": [3.0, 4.0], "b": [1e-3, 0.0]}, [1.05]), 0.0, "b", "a loss is off by 0.05, more than 0.02"),
        (make_run({"a": [3.0, 4.0], "b": [1e-3, 0.0]}, [math.nan]), 0.0, "b", "a loss is off by inf"),
        (make_run({"a": [3.0, 4.0], "b": [1e-3, 0.0]}, [1.0, 1.0]), 0.0, "b", "a loss is off by inf"),
        (make_run({"a": [math.inf, 4.0]}, skipped=True), math.inf, "a", "step 0 was skipped for an overflow"),
        (Recording(RUN, []), math.inf, "", "it took 0 of 1 steps"),
        (Recording(RUN, [CheckedStepRecord(7, 0, (1.0,), False, 128.0, False)]), math.inf, "", "it took 0 of 1 steps"),
    ],
    ids=["equal", "small", "too small", "missing", "nan", "loss", "nan loss", "losses", "skip", "none", "another"],
)
def test_a_verdict_is_by_parameter(run, worst, parameter, fault):
    found = judge(REFERENCE, run, 0.1)
    assert (found.worst, found.parameter) == (pytest.approx(worst, abs=1e-6), parameter)
    assert found.fault.startswith(fault) and found.passed == (not fault) == (not found.fault)


def test_a_verdict_takes_the_worst_step():
    run = make_run({"a": [3.0, 4.0]}, steps=2)
    run.records[2] = SketchRecord(1, 0, "a", *sketch(torch.tensor([3.0, 4.5])))
    assert judge(make_run({"a": [3.0, 4.0]}, steps=2), run, 0.05).worst == pytest.approx(0.1)


@pytest.mark.parametrize("number", [math.inf, math.nan])
def test_nothing_agrees_with_a_reference_that_is_not_finite(number):
    reference = make_run({"a": [3.0, 4.0]}, [1.0, number])
    assert judge(reference, make_run({"a": [3.0, 4.0]}, [1.0, 1.0]), 0.1).loss_error == math.inf
    reference = make_run({"a": [number, 4.0]})
    assert judge(reference, make_run({"a": [3.0, 4.0]}), 0.1).worst == math.inf


def test_what_is_not_finite_survives_a_file(tmp_path):
    run = make_run({"a": [math.inf, math.nan]}, [math.nan, -math.inf, 1.5])
    run.to_jsonl(tmp_path / "x.jsonl")
    assert "Infinity" not in (tmp_path / "x.jsonl").read_text() and "NaN" not in (tmp_path / "x.jsonl").read_text()
    back = Recording.read(tmp_path / "x.jsonl")
    assert repr(back.records) == repr(run.records)
    assert explain_non_finite(back) == "a loss of step 0 is nan" and explain_non_finite(REFERENCE) == ""
    assert explain_non_finite(make_run({"a": [math.inf]})) == "the gradient of a in step 0 has the norm inf"
