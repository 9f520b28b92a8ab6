"""Each example proves what it shows, fails if this is not so, and takes no longer than a machine allows.

Guards: examples/digits.py, examples/mlp.py, examples/paper.py, examples/checkpointing.py, examples/common.py.
"""

import ast
import statistics
from pathlib import Path

import pytest
import torch

pytest.importorskip("sklearn")

import checkpointing
import common
import digits
import mlp
import paper

EXAMPLES = Path(common.__file__).parent
CPU = torch.device("cpu")
PNG_MAGIC = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def data():
    return common.load_digits(CPU)


def test_examples_use_public_names_alone():
    for path in EXAMPLES.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert "amp_patch" not in node.module
            elif isinstance(node, ast.Import):
                assert all(alias.name == "amp_patch" or "amp_patch" not in alias.name for alias in node.names)


# ---- slow machines ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [0.01, 0.2, 1.5, 30.0])
def test_a_slow_machine_takes_fewer_seeds_then_fewer_steps(step, monkeypatch, capsys):
    setup = 2.0
    now = [100.0]
    monkeypatch.setattr(common.time, "perf_counter", lambda: now[0])
    warm_up = [5.0]

    def train_all(steps):
        now[0] += setup + steps * step + (warm_up.pop() if warm_up else 0.0)

    options = common.parse_options("", steps=100, seeds=3, argv=[])
    common.shorten(options, train_all)
    said = capsys.readouterr().out
    seconds = options.seeds * (setup + options.steps * step)
    assert seconds <= common.MOST_SECONDS or (options.steps, options.seeds) == (2, 1)
    assert options.seeds == 1 or options.steps >= common.FEW_STEPS
    if (options.steps, options.seeds) == (100, 3):
        assert 3 * (setup + 100 * step) <= common.MOST_SECONDS and not said
    else:
        assert 3 * (setup + 100 * step) > common.MOST_SECONDS
        assert f"{options.steps} steps from {options.seeds} of 3" in said and "--steps 100 --seeds 3" in said


@pytest.mark.parametrize("given", [["--steps", "100"], ["--seeds", "3"]])
def test_what_was_asked_for_is_done_however_long_it_takes(given, monkeypatch):
    options = common.parse_options("", steps=100, seeds=3, argv=given)
    common.shorten(options, lambda steps: pytest.fail("nothing is to be timed"))
    assert (options.steps, options.seeds) == (100, 3)


# ---- digits ----------------------------------------------------------------------------------------------------------


def test_digits_prints_a_row_for_each_level_and_draws(tmp_path, capsys):
    picture = tmp_path / "digits.png"
    assert digits.main(["--steps", "2", "--seeds", "1", "--device", "cpu", "--plot", str(picture)]) == 0
    rows = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines() if line[:1] == "O"}
    assert tuple(rows) == digits.LEVELS
    assert rows["O4"][1] == "bfloat16" and rows["O0"][-3] == "0" and int(rows["O4"][-3]) > 0
    assert picture.read_bytes().startswith(PNG_MAGIC)


def test_a_seed_decides_the_losses(data):
    first, again, other = (digits.train("O4", data, steps=3, seed=seed).losses for seed in (5, 5, 6))
    assert first == again != other


@pytest.mark.slow
def test_every_level_reaches_the_accuracy_of_float32(data):
    accuracy = {level: digits.train(level, data, steps=60, seed=0).accuracy for level in digits.LEVELS}
    assert accuracy["O0"] > 97.0
    assert {level: reached for level, reached in accuracy.items() if abs(reached - accuracy["O0"]) > 1.0} == {}


# ---- mlp -------------------------------------------------------------------------------------------------------------


def test_mixed_precision_moves_the_loss_less_than_the_seed_does():
    plain = [mlp.train("O0", 60, seed, CPU).loss for seed in range(3)]
    mixed = [mlp.train("O4", 60, seed, CPU).loss for seed in range(3)]
    assert max(abs(one - other) for one, other in zip(plain, mixed, strict=True)) < statistics.stdev(plain) / 2


def test_mlp_prints_means_and_deviations(capsys):
    assert mlp.main(["--seeds", "2", "--steps", "3", "--device", "cpu"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line[:1] == "O"]
    assert [row.split()[0] for row in rows] == list(mlp.LEVELS) and all(row.count("±") == 3 for row in rows)


# ---- paper -----------------------------------------------------------------------------------------------------------

STEPS = 21  # the first and the last of them are watched


def test_without_masters_float16_loses_updates_that_it_keeps_with_them(data):
    lost = {
        name: paper.train(paper.make_classifier, properties, data, STEPS).updates_lost
        for name, properties in paper.MASTERS.items()
    }
    assert lost["float32"] < 0.01 and lost["float16, masters"] < 0.01
    assert lost["float16, no masters"] > 0.5


def test_a_loss_scale_keeps_gradients_that_float16_loses_without_one(data):
    plain, scaled, unscaled = (
        paper.train(paper.make_autoencoder, properties, data, STEPS).gradients for properties in paper.SCALING.values()
    )
    zero = [float((gradients == 0).float().mean()) for gradients in (plain, scaled, unscaled)]
    assert zero[0] == 0 and zero[2] > 10 * zero[1]
    # what float16 would make of float32's gradients happens to those of float16
    assert zero[2] == pytest.approx(float((plain.half() == 0).float().mean()), rel=0.5)


def test_both_experiments_are_printed_and_drawn(tmp_path, capsys):
    picture = tmp_path / "paper.png"
    assert paper.main(["--steps", "2", "--device", "cpu", "--plot", str(picture)]) == 0
    said = capsys.readouterr().out
    assert all(f"\n{name}  " in said for name in (*paper.MASTERS, *paper.SCALING))
    assert picture.read_bytes().startswith(PNG_MAGIC)


# ---- checkpointing ---------------------------------------------------------------------------------------------------


def test_a_checkpointed_model_has_the_same_losses_and_gradients_in_less_memory(data):
    kept, again = (checkpointing.train("O1", is_checkpointed, data, 2) for is_checkpointed in (False, True))
    assert kept.gradients.shape[0] == 2 and kept.gradients.abs().sum(dim=1).min() > 0
    assert kept.losses == again.losses and torch.equal(kept.gradients, again.gradients)
    assert again.peak < kept.peak / 2


def test_a_difference_fails_the_example(monkeypatch, tmp_path, capsys):
    command = ["--steps", "2", "--device", "cpu"]
    monkeypatch.setattr(checkpointing, "LEVELS", ("O5",))
    assert checkpointing.main([*command, "--plot", str(tmp_path / "picture.png")]) == 0
    assert capsys.readouterr().out.count("yes O5: ") == 2
    assert (tmp_path / "picture.png").read_bytes().startswith(PNG_MAGIC)

    def forget_the_generator(block, x, use_reentrant):
        return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=use_reentrant, preserve_rng_state=False)

    monkeypatch.setattr(checkpointing, "checkpoint", forget_the_generator)
    assert checkpointing.main(command) == 1
    assert "NO  O5: gradients" in capsys.readouterr().out


def test_the_peak_is_what_is_held_at_once():
    def step():
        for _ in range(3):
            first, second = torch.empty(1000), torch.empty(500)
            del first, second

    assert checkpointing.measure_peak(step, CPU) == 4 * 1500
