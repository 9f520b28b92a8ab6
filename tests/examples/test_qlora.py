"""The example `qlora` leaves its base as it was, has the gradients of autocast, and notices a difference.

Guards: examples/qlora.py.
"""

import contextlib

import pytest
import torch

pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")

import qlora

COMMAND = ["--steps", "1", "--device", "cpu"]
pytestmark = [
    pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def test_the_base_stays_and_gradients_are_those_of_autocast(tmp_path, capsys):
    assert qlora.main([*COMMAND, "--plot", str(tmp_path / "qlora.png")]) == 0
    assert capsys.readouterr().out.count("\nyes ") == 4
    assert (tmp_path / "qlora.png").stat().st_size > 10_000


def test_bytes_are_those_of_four_bits():
    _, sizes, _ = qlora.fine_tune(1, torch.device("cpu"))
    linear = 3 * (4 * 128 * 128 + 3 * 128 * 384)
    # half a byte instead of four, and what the blocks of 64 are scaled by: a byte each, and little more
    assert sizes["float32"] - sizes["4 bits"] == pytest.approx(linear * (4 - 1 / 2 - 1 / 64), rel=0.03)


def test_a_base_that_moves_fails_the_example(monkeypatch, capsys):
    train = qlora.train

    def train_and_touch(model, *rest):
        train(model, *rest)
        for parameter_name, parameter in model.named_parameters():
            if "layers.0.self_attn.q_proj" in parameter_name and not parameter.requires_grad:
                parameter.data.flatten()[0] += 1

    monkeypatch.setattr(qlora, "train", train_and_touch)
    assert qlora.main(COMMAND) == 1
    assert "\nNO  all" in capsys.readouterr().out


def test_other_gradients_fail_the_example(monkeypatch, capsys):
    monkeypatch.setattr(torch, "autocast", lambda *_: contextlib.nullcontext())
    assert qlora.main(COMMAND) == 1
    assert '\nNO  with compute="native", all 42' in capsys.readouterr().out
