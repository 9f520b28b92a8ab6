"""The demo `paper`: what float16 loses without master weights and without a loss scale, and that it does not with."""

from pathlib import Path

import pytest
import torch

from amp_patch.cli import main
from amp_patch.demos import digits_training, paper, paper_training

STEPS = 21  # the first and the last of them are watched


@pytest.fixture(scope="module")
def data() -> digits_training.Digits:
    pytest.importorskip("sklearn")
    return digits_training.load_digits_tensors()


def test_without_masters_float16_loses_updates_that_it_keeps_with_them(data: digits_training.Digits) -> None:
    lost = {
        name: paper_training.train(paper_training.classifier(), properties, data, STEPS, 0).updates_lost
        for name, properties in paper.MASTERS.items()
    }
    assert lost["float32"] < 0.01 and lost["float16, masters"] < 0.01
    assert lost["float16, no masters"] > 0.5


def test_a_loss_scale_keeps_gradients_that_float16_loses_without_one(data: digits_training.Digits) -> None:
    plain, scaled, unscaled = (
        paper_training.train(paper_training.autoencoder(), properties, data, STEPS, 0)
        for properties in paper.SCALING.values()
    )
    assert plain.gradients_zero == 0
    assert unscaled.gradients_zero > 10 * scaled.gradients_zero
    # what is expected of float32's gradients happens to those of float16
    assert unscaled.gradients_zero == pytest.approx(paper.find_lost(plain.gradients, 1.0).zero, rel=0.5)


def test_what_is_lost_is_what_the_cast_loses() -> None:
    sizes = torch.tensor([0.0, 2.0**-30, 2.0**-25, 1.0001 * 2.0**-25, 2.0**-15, 2.0**-14, 1.0, 7e4])
    for scale in (1.0, 2.0**-3, 2.0**10):
        low = (sizes * scale).half().double()
        is_zero, is_subnormal = (low == 0) & (sizes != 0), (low != 0) & (low < 2.0**-14)
        expected = [float(part.float().sum() / 7) for part in (is_zero, is_subnormal, low.isinf())]
        assert list(paper.find_lost(sizes, scale)) == pytest.approx(expected)


def test_each_magnitude_counts_at_its_power_of_two() -> None:
    gradients = torch.tensor([0.0, 0.25, -0.3, 0.5, 1.0, 1.9, 2.0, 1e9])
    assert (8 * paper.count_by_exponent(gradients, 1.0, range(-2, 3))).tolist() == [2, 1, 2, 1, 1]
    assert (8 * paper.count_by_exponent(gradients, 0.5, range(-2, 3))).tolist() == [3, 2, 1, 0, 1]


def test_both_experiments_are_printed_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "paper.png"
    assert main(["demo", "paper", "--steps", "2", "--device", "cpu", "--plot", str(picture)]) == 0
    said = capsys.readouterr().out
    assert all(f"\n{name}  " in said for name in (*paper.MASTERS, *paper.SCALING))
    assert picture.stat().st_size > 10_000
