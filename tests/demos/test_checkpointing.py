"""The demo `checkpointing`: the same bits in less memory, and that a difference would be seen."""

from pathlib import Path

import pytest
import torch

from amp_patch.cli import main
from amp_patch.demos import checkpointing, digits_training, training

pytest.importorskip("sklearn")


@pytest.mark.parametrize("level", ["O0", "O1", "O4", "O5"])
def test_a_checkpointed_model_has_the_same_losses_and_gradients_in_less_memory(level: str) -> None:
    data = digits_training.load_digits_tensors()
    kept, again = (checkpointing.train(level, is_checkpointed, data, 2, 0) for is_checkpointed in (False, True))
    assert kept.gradients.shape[0] == 2 and kept.gradients.abs().sum(dim=1).min() > 0
    assert torch.equal(kept.losses, again.losses) and torch.equal(kept.gradients, again.gradients)
    assert again.peak < kept.peak / 2


def test_a_difference_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    command = ["demo", "checkpointing", "--steps", "2", "--opt-level", "O4", "--device", "cpu"]
    assert main([*command, "--plot", str(tmp_path / "picture.png")]) == 0
    assert capsys.readouterr().out.count("yes  O4: ") == 2
    assert (tmp_path / "picture.png").stat().st_size > 10_000

    def forget_the_generator(block: torch.nn.Module, x: torch.Tensor, use_reentrant: bool) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=use_reentrant, preserve_rng_state=False)

    monkeypatch.setattr(checkpointing, "checkpoint", forget_the_generator)
    assert main(command) == 1
    said = capsys.readouterr()
    assert "NO   O4: gradients of 2 steps" in said.out and "not so: O4:" in said.err


def test_the_peak_is_what_is_held_at_once() -> None:
    def step() -> None:
        for _ in range(3):
            first, second = torch.empty(1000), torch.empty(500)
            del first, second

    assert training.measure_peak(step, torch.device("cpu")) == 4 * 1500
