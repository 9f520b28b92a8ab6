"""Files that people get wrong (`wrong_files.yaml`), and what they are told: a plain sentence, then the remedy."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml

from amp_patch.config import yaml_nodes
from amp_patch.config.list_file import KEYS
from amp_patch.config.loss_scale import DynamicScale
from amp_patch.config.op_lists import check_oplists, load_oplists
from amp_patch.config.presets import make_policy
from amp_patch.config.shipped import shipped_names
from amp_patch.errors import OpListError, PolicyError

CASES = yaml.safe_load(Path(__file__).with_name("wrong_files.yaml").read_text(encoding="utf-8"))
WORDS = {
    "torch": torch.__version__,
    "keys": ", ".join(KEYS),
    "lists": ", ".join(shipped_names()),
    "scale": ", ".join(DynamicScale.__dataclass_fields__),
}


@pytest.fixture(params=["c", "python"], autouse=True)
def parser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Each of PyYAML's two parsers, which complain in other words."""
    if request.param == "c" and not yaml.__with_libyaml__:
        pytest.skip("PyYAML is built without libyaml")
    monkeypatch.setattr(yaml_nodes, "_LOADER", yaml.CLoader if request.param == "c" else yaml.Loader)
    monkeypatch.chdir(tmp_path)
    Path("other.yaml").write_text("{}")
    yield


def told(case: dict[str, str]) -> str:
    text = case["told"]
    for word, meaning in WORDS.items():
        text = text.replace(f"<{word}>", meaning)
    return f"mine.yaml:{text}"


def test_there_are_enough() -> None:
    assert len(CASES["lists"]) + len(CASES["presets"]) >= 60


@pytest.mark.parametrize("case", CASES["lists"].values(), ids=CASES["lists"])
def test_a_wrong_list_is_told_once_with_the_remedy(case: dict[str, str]) -> None:
    path = Path("mine.yaml")
    path.write_text(case["file"])
    assert list(map(str, check_oplists(path).errors)) == [told(case)]
    with pytest.raises(OpListError) as raised:
        load_oplists(path)
    assert str(raised.value) == told(case)


@pytest.mark.parametrize("case", CASES["presets"].values(), ids=CASES["presets"])
def test_a_wrong_presets_file_is_told_with_the_remedy(case: dict[str, str]) -> None:
    Path("mine.yaml").write_text(case["file"])
    with pytest.raises(PolicyError) as raised:
        make_policy("Mine", {}, presets="mine.yaml")
    assert str(raised.value) == told(case)
