"""The example `cartpole` obeys the symmetry of its task, learns it in float16, and notices a level that does not learn.

Guards: examples/cartpole.py.
"""

import pytest

pytest.importorskip("matplotlib")

import cartpole
import torch

import amp_patch as amp

CPU = torch.device("cpu")


def test_a_mirrored_cart_moves_as_the_mirror_image():
    poles, mirrored = (cartpole.CartPoles(8, CPU, seed=0) for _ in range(2))
    poles.state = torch.randn(8, 4) * 0.05
    mirrored.state = -poles.state
    actions = torch.arange(8) % 2
    poles.step(actions)
    mirrored.step(1 - actions)
    assert poles.state.abs().max() > 0 and torch.allclose(poles.state, -mirrored.state, atol=1e-7)


def test_a_pole_falls_without_control_and_an_episode_ends_at_its_limit():
    poles = cartpole.CartPoles(4, CPU, seed=0)
    fallen = [poles.step(torch.ones(4, dtype=torch.int64))[0].any().item() for _ in range(20)]
    assert any(fallen)
    poles.state, poles.age = torch.zeros(4, 4), torch.full((4,), cartpole.LIMIT - 1)
    fell, ended = poles.step(torch.zeros(4, dtype=torch.int64))
    assert ended.all() and not fell.any() and (poles.age == 0).all()


def test_float16_learns_the_pole_and_moves_ratios_less_than_bfloat16(tmp_path, capsys):
    picture = tmp_path / "cartpole.png"
    assert cartpole.main(["--steps", "3", "--seeds", "1", "--device", "cpu", "--plot", str(picture)]) == 0
    said = capsys.readouterr().out
    rows = {line.split()[0]: line.split() for line in said.splitlines() if line[:1] == "O"}
    assert tuple(rows) == cartpole.LEVELS and said.count("\nyes ") == 3
    assert float(rows["O0"][4]) == 0 < float(rows["O1"][4]) < float(rows["O4"][4])
    assert picture.stat().st_size > 10_000


def test_a_level_that_does_not_learn_fails_the_example(monkeypatch, capsys):
    monkeypatch.setattr(cartpole, "evaluate", lambda actor, device: 1.0 if amp.stats().low_dtype else 100.0)
    assert cartpole.main(["--steps", "1", "--seeds", "1", "--device", "cpu"]) == 1
    assert capsys.readouterr().out.count("\nNO  O") == 2
