"""The demo `digits`: its table and picture, and what training at each level reaches."""

import re
from pathlib import Path

import pytest
import torch

import amp_patch as amp
from amp_patch import hardware
from amp_patch.cli import main
from amp_patch.demos import DEMOS, Options, digits, digits_training, training

pytestmark = pytest.mark.usefixtures("large_packages_are_searched")

STEPS = 12
PNG_MAGIC = b"\x89PNG\r\n\x1a\n"


def cells(output: str) -> dict[str, list[str]]:
    """The table's rows by level, each as the texts between the gaps of two spaces or more."""
    rows = (re.split(r"\s{2,}", line) for line in output.splitlines() if re.match(r"O\d\s", line))
    return {row[0]: row for row in rows}


def test_demo_prints_one_row_for_each_level_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["demo", "--opt-level", "O0,O4", "--steps", str(STEPS), "--device", "cpu", "--seed", "3", "--seeds", "1"])
        == 0
    )
    output = capsys.readouterr().out
    assert tuple(re.split(r"\s{2,}", output.splitlines()[3])) == digits.COLUMNS
    rows = cells(output)
    assert list(rows) == ["O0", "O4"]
    assert {len(row) for row in rows.values()} == {len(digits.COLUMNS)}
    low, patched = digits.COLUMNS.index("low dtype"), digits.COLUMNS.index("names patched")
    assert (rows["O0"][patched], rows["O4"][low]) == ("0", "bfloat16")
    assert int(rows["O4"][patched]) > 0


@pytest.mark.parametrize("has_products", [True, False])
def test_demo_says_how_16_bits_are_computed_here(
    has_products: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in (hardware, training):
        monkeypatch.setattr(module, "has_low_products", lambda device_type, low: has_products)
    assert main(["demo", "--opt-level", "O0,O4,O5", "--steps", "2", "--device", "cpu", "--seeds", "1"]) == 0
    first, *others = capsys.readouterr().out.splitlines()
    assert first == (
        "16 bits here: bfloat16 by instructions that this CPU has for it"
        if has_products
        else "16 bits here: bfloat16 as tensor cores do: values are rounded, products are computed in float32 (this CPU"
        " has no fast ones; for speed here, use O0)"
    )
    assert not any("16 bits" in line or "products" in line for line in others)


def test_plot_writes_a_png_and_html_a_report(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    files = ["--plot", str(tmp_path / "levels.png"), "--html", str(tmp_path / "levels.html")]
    options = ["--opt-level", "O4,O1", "--steps", "3", "--device", "cpu", "--seeds", "2", "--seed", "5"]
    assert main(["demo", *options, *files]) == 0
    assert (tmp_path / "levels.png").read_bytes().startswith(PNG_MAGIC)
    page = (tmp_path / "levels.html").read_text()
    assert "Difference from O4" in page and ">5, 6<" in page and "BatchNorm" not in page


def test_levels_are_compared_over_seeds_with_what_they_are_trained_by(tmp_path: Path) -> None:
    options = Options(("O0", "O4"), torch.device("cpu"), 3, 7, 2, None)
    comparison, results, _ = digits.measure(options)
    data = digits_training.load_digits_tensors()
    for level in ("O0", "O4"):
        alone = [digits_training.train(level, data, steps=3, seed=seed) for seed in (7, 8)]
        assert [one.accuracy for one in results[level]] == [one.accuracy for one in alone]
        curves = comparison.curves(level).values()
        assert [curve.losses for curve in curves] == [pytest.approx(one.losses, rel=1e-6) for one in alone]
        amp.reset()
    assert comparison.noise is not None and not comparison.are_seeds_equal and comparison.runs[1].peak


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
