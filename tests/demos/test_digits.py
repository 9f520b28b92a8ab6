"""The demo `digits`: its table and picture, and what training at each level reaches."""

import re
from pathlib import Path

import pytest

from amp_patch.cli import main
from amp_patch.demos import DEMOS, digits, digits_training

pytestmark = pytest.mark.usefixtures("large_packages_are_searched")

STEPS = 12
PNG_MAGIC = b"\x89PNG\r\n\x1a\n"


def cells(output: str) -> dict[str, list[str]]:
    """The table's rows by level, each as the texts between the gaps of two spaces or more."""
    rows = (re.split(r"\s{2,}", line) for line in output.splitlines() if re.match(r"O\d\s", line))
    return {row[0]: row for row in rows}


def test_demo_prints_one_row_for_each_level_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--opt-level", "O0,O4", "--steps", str(STEPS), "--device", "cpu", "--seed", "3"]) == 0
    output = capsys.readouterr().out
    assert tuple(re.split(r"\s{2,}", output.splitlines()[0])) == digits.COLUMNS
    rows = cells(output)
    assert list(rows) == ["O0", "O4"]
    assert {len(row) for row in rows.values()} == {len(digits.COLUMNS)}
    low, patched = digits.COLUMNS.index("low dtype"), digits.COLUMNS.index("names patched")
    assert (rows["O0"][patched], rows["O4"][low]) == ("0", "bfloat16")
    assert int(rows["O4"][patched]) > 0


@pytest.mark.parametrize("has_products", [True, False])
def test_demo_says_which_products_are_computed_in_float32(
    has_products: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(digits, "has_low_products", lambda device_type, low: has_products)
    assert main(["demo", "--opt-level", "O0,O4,O5", "--steps", "2", "--device", "cpu"]) == 0
    told = [line for line in capsys.readouterr().out.splitlines() if "products are computed in float32" in line]
    assert len(told) == (0 if has_products else 1)
    assert all("rounded to bfloat16" in line and line.endswith("for speed here, use O0") for line in told)


def test_plot_writes_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "curves.png"
    assert main(["demo", "--opt-level", "O0,O4", "--steps", str(STEPS), "--device", "cpu", "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(PNG_MAGIC)


@pytest.mark.slow
def test_every_level_reaches_the_accuracy_of_float32() -> None:
    data = digits_training.load_digits_tensors()
    accuracy = {level: digits_training.train(level, data, steps=60, seed=0).accuracy for level in DEMOS[0].levels}
    assert accuracy["O0"] > 97.0
    assert {level: reached for level, reached in accuracy.items() if abs(reached - accuracy["O0"]) > 1.0} == {}


def test_same_seed_same_losses() -> None:
    data = digits_training.load_digits_tensors()
    first, again, other = (digits_training.train("O4", data, steps=3, seed=seed).losses for seed in (5, 5, 6))
    assert first == again
    assert first != other
