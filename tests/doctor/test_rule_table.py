"""The rules and their examples, which codes select them, and what is said of each."""

import re
from pathlib import Path

import pytest

from amp_patch.doctor.coverage import get_coverage
from amp_patch.doctor.files import Project
from amp_patch.doctor.rules import RETIRED, Selection, complete, explain, sorted_rules
from amp_patch.errors import SettingsError

WITH_EXAMPLES = [pytest.param(rule, id=rule.code) for rule in sorted_rules() if rule.find]


def read(tmp_path: Path, text: str):
    """A project of one script, and that."""
    path = tmp_path / "example.py"
    path.write_text(text)
    project = Project([path], get_coverage())
    return project, project.scripts[str(path)]


@pytest.mark.parametrize("rule", WITH_EXAMPLES)
def test_the_bad_example_has_its_fault_where_it_says_so(rule, tmp_path):
    project, script = read(tmp_path, complete(rule.bad))
    found = [(one.code, one.line) for one in project.diagnose(script, Selection())]
    lines = enumerate(script.text.splitlines(), 1)
    assert found == [(rule.code, number) for number, line in lines if line.endswith(f"# {rule.code}")] != []


@pytest.mark.parametrize("rule", WITH_EXAMPLES)
def test_the_good_example_has_none_and_is_what_mending_makes_of_the_bad_one(rule, tmp_path):
    project, script = read(tmp_path, complete(rule.good))
    assert project.diagnose(script, Selection()) == []
    project, script = read(tmp_path, complete(rule.bad))
    mended, count = project.fix(script, Selection())
    assert bool(count) is rule.mends
    if rule.mends:
        assert re.sub(r"  # AMP\d+$", "", mended.text, flags=re.MULTILINE) == complete(rule.good)


def test_codes_are_never_used_again():
    assert not RETIRED.keys() & {rule.code for rule in sorted_rules()}


@pytest.mark.parametrize("rule", [pytest.param(rule, id=rule.code) for rule in sorted_rules()])
def test_a_rule_is_explained(rule):
    said = explain(rule.code)
    assert said.startswith(f"{rule.code}: {rule.summary}\n\n{rule.why}")
    assert ("what --fix makes of it" in said) is rule.mends
    assert all(f"    {line}" in said for line in [*rule.bad.splitlines(), *rule.good.splitlines()] if line)


def test_a_rule_that_is_gone_is_explained_by_why():
    assert explain("AMP306") == (
        "AMP306 is gone: torch's clip functions take masters where they are given the model's parameters."
    )


@pytest.mark.parametrize(
    ("select", "ignore", "has", "has_not"),
    [
        (["AMP"], [], ["AMP101", "AMP305"], []),
        (["AMP3"], [], ["AMP301", "AMP312"], ["AMP201", "AMP001"]),
        (["AMP"], ["AMP3"], ["AMP201"], ["AMP301"]),
        (["AMP301"], ["AMP3"], ["AMP301"], ["AMP302", "AMP201"]),
        (["AMP3"], ["AMP301"], ["AMP302"], ["AMP301"]),
        (["AMP301"], ["AMP301"], [], ["AMP301"]),
        (["AMP", "AMP401"], ["AMP306"], ["AMP301"], []),
    ],
)
def test_of_the_beginnings_of_a_code_the_longest_decides(select, ignore, has, has_not):
    selection = Selection(select, ignore)
    assert all(map(selection.has, has)) and not any(map(selection.has, has_not))


@pytest.mark.parametrize("prefix", ["", "X", "AMP4012", "amp301", "AMP8"])
def test_a_beginning_of_no_code_is_refused(prefix):
    with pytest.raises(SettingsError, match="no code of a rule"):
        Selection([prefix])


def test_a_misspelt_code_is_told_the_right_one():
    with pytest.raises(SettingsError, match="Did you mean 'AMP30[1-9]'"):
        explain("AMP3O5")
