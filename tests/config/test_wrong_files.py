"""Each fault of a wrong file (`wrong_files.yaml`) is reported once, at its place.

Guards: config/list_file, config/yaml_nodes, config/look_alikes, config/op_names, config/module_rules, config/presets.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from amp_patch.config import yaml_nodes
from amp_patch.config.op_lists import check_oplists, load_oplists
from amp_patch.config.presets import make_policy
from amp_patch.errors import OpListError, PolicyError

CASES = yaml.safe_load(Path(__file__).with_name("wrong_files.yaml").read_text(encoding="utf-8"))


@pytest.fixture(params=["c", "python"], autouse=True)
def parser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Each of PyYAML's two parsers, which complain in other words."""
    if request.param == "c" and not yaml.__with_libyaml__:
        pytest.skip("PyYAML is built without libyaml")
    monkeypatch.setattr(yaml_nodes, "_LOADER", yaml.CSafeLoader if request.param == "c" else yaml.SafeLoader)
    monkeypatch.chdir(tmp_path)
    Path("other.yaml").write_text("{}")
    yield


def find_wrong(case: dict[str, str], error: Any, others: list[Any]) -> str | None:
    """What is wrong with the error of a case, or None. A message is one line: the place, what is wrong, the remedy."""
    message = str(error.value)
    expected = f"mine.yaml:{case['at']}: "
    if not message.startswith(expected) or message.count("\n") or case.get("said", "") not in message:
        return f"{case} gives {message}"
    if (error.value.path, f"{error.value.line}:{error.value.column}") != ("mine.yaml", case["at"]):
        return f"{case} has the place {error.value.path}:{error.value.line}:{error.value.column}"
    return None if list(map(str, others)) == [message] else f"{case} is checked as {others}"


def test_a_wrong_list_is_reported_once_at_its_place() -> None:
    wrong = []
    for case in CASES["lists"].values():
        Path("mine.yaml").write_text(case["file"])
        with pytest.raises(OpListError) as raised:
            load_oplists("mine.yaml")
        wrong.append(find_wrong(case, raised, check_oplists(Path("mine.yaml")).errors))
    assert [one for one in wrong if one] == []


def test_a_wrong_presets_file_is_reported_at_its_place() -> None:
    wrong = []
    for case in CASES["presets"].values():
        Path("mine.yaml").write_text(case["file"])
        with pytest.raises(PolicyError) as raised:
            make_policy("Mine", {}, presets="mine.yaml")
        wrong.append(find_wrong(case, raised, [raised.value]))
    assert [one for one in wrong if one] == []
