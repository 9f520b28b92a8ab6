"""The demo `mlp`: what a seed decides, and that mixed precision is no further from float32 than seeds are apart."""

import statistics

import pytest
import torch

from amp_patch.cli import main
from amp_patch.demos import mlp

CPU = torch.device("cpu")


def test_every_level_meets_the_same_rows_weights_and_batches() -> None:
    first, again = (mlp.train("O0", 3, 8, CPU) for _ in range(2))
    assert (first.loss, first.accuracy) == (again.loss, again.accuracy)
    assert mlp.train("O0", 4, 8, CPU).loss != first.loss


def test_rows_to_test_on_have_no_part_in_the_scaling() -> None:
    rows, labels, test_rows, test_labels = mlp.load_rows(seed=1)
    assert (len(rows), len(test_rows)) == (380, 189) == (len(labels), len(test_labels))
    torch.testing.assert_close(rows.mean(dim=0), torch.zeros(30), atol=1e-5, rtol=0)
    torch.testing.assert_close(rows.std(dim=0), torch.ones(30))
    assert test_rows.mean(dim=0).abs().max() > 0.01


def test_mixed_precision_moves_the_loss_less_than_the_seed_does() -> None:
    plain = [mlp.train("O0", seed, 60, CPU).loss for seed in range(3)]
    mixed = [mlp.train("O4", seed, 60, CPU).loss for seed in range(3)]
    assert max(abs(one - other) for one, other in zip(plain, mixed, strict=True)) < statistics.stdev(plain) / 2


def test_the_table_has_a_row_for_each_level(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "mlp", "--opt-level", "O0,O4", "--seeds", "2", "--steps", "4", "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[3].split("  ")[0] == "level" and [line.split()[0] for line in lines[5:7]] == ["O0", "O4"]
    assert all(line.count("±") == (2 if line.startswith("O0") else 3) for line in lines[5:7])
