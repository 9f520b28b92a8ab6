"""The demo `qlora`: a base that stays what it was, gradients that are autocast's, and that a difference is seen."""

import warnings

import pytest
import torch

from amp_patch.cli import main
from amp_patch.demos import Options, qlora, qlora_training

pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")

OPTIONS = Options(levels=(), device=torch.device("cpu"), steps=3, seed=0, seeds=1, plot=None)


@pytest.fixture(autouse=True)
def bitsandbytes_may_warn():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Paged optimizers are not supported on CPU")
        yield


def test_the_base_stays_and_gradients_are_those_of_autocast(monkeypatch):
    found = []
    find_gradients = qlora_training.find_gradients
    monkeypatch.setattr(qlora, "find_gradients", lambda *given: found.append(find_gradients(*given)) or found[-1])
    result = qlora.experiment(OPTIONS)
    assert list(result.checks.values()) == [True] * 3
    by_amp, by_autocast = found
    assert len(by_amp) == 2 * 4 * qlora_training.DEPTH and all(gradient.any() for gradient in by_amp)
    assert by_amp is not by_autocast
    # without the casts they would not be equal
    model, _ = qlora_training.quantise(qlora_training.build_model(OPTIONS.device, 0)[0], 0)
    batch = qlora_training.read_source(OPTIONS.device).test[:2]
    rounded = qlora_training.find_gradients(model, batch, None)
    monkeypatch.setattr(torch, "autocast", lambda *_: torch.enable_grad())
    assert not qlora_training.are_equal(rounded, qlora_training.find_gradients(model, batch, None))


def test_bytes_are_those_of_four_bits_and_eight():
    sizes = qlora.experiment(OPTIONS).sizes
    blocks = 12 * qlora_training.WIDTH**2 * qlora_training.DEPTH
    plain, small = sizes["float32"], sizes["QLoRA"]
    # half a byte instead of four, and what the blocks of 64 are scaled by: a byte each, and little more
    assert plain["weights"] - small["weights"] == pytest.approx(blocks * (4 - 1 / 2 - 1 / 64), rel=0.03)
    assert small["optimizer"] < 8 / 4 * small["adapters"]
    assert plain["optimizer"] == pytest.approx(2 * plain["weights"], rel=0.01)


@pytest.mark.parametrize("name", ["norm.weight", "blocks.0.qkv"])
def test_a_base_that_moves_fails_the_command(name, monkeypatch, capsys):
    train = qlora_training.train

    def train_and_touch(model, *rest):
        train(model, *rest)
        for parameter_name, parameter in model.named_parameters():
            if name in parameter_name and not parameter.requires_grad:
                parameter.data.flatten()[0] += 1

    monkeypatch.setattr(qlora, "train", train_and_touch)
    assert main(["demo", "qlora", "--steps", "1", "--device", "cpu"]) == 1
    said = capsys.readouterr()
    assert "NO   all" in said.out and "of the base are what they were" in said.err
