"""What is said and decided before a demo begins: how long it will take, and how many steps that allows."""

import itertools

import pytest
import torch

from amp_patch.cli import main
from amp_patch.demos import Options, digits, mlp, training
from amp_patch.demos.training import FEW_STEPS, MOST_SECONDS, Part, fit, prepare

pytestmark = pytest.mark.usefixtures("large_packages_are_searched")


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still but for what is added to it."""
    now = [100.0]
    monkeypatch.setattr(training.time, "perf_counter", lambda: now[0])
    return now


def make_part(clock, before, step, warm_up=0.0, **times):
    """A training that takes so many seconds before the first step, and for each; the first time more."""
    waits = itertools.chain([warm_up], itertools.repeat(0.0))

    def train(steps, on_step):
        clock[0] += before + next(waits)
        for _ in range(steps):
            clock[0] += step
            on_step()

    return Part(train, **times)


def options(steps, seeds, may_shorten=True):
    return Options(("O0",), torch.device("cpu"), steps, 0, seeds, None, may_shorten=may_shorten)


def test_the_estimate_is_what_the_demo_takes(clock, capsys):
    parts = [make_part(clock, 0.5, 0.01, warm_up=60.0, per_seed=2, short=1), make_part(clock, 0.25, 0.02)]
    assert prepare(options(100, 3), parts) == options(100, 3)
    takes = 3 * (2 * (0.5 + 100 * 0.01) + 0.25 + 100 * 0.02) + 0.5 + 4 * 0.01
    assert capsys.readouterr().out == (
        f"100 steps from each of 3 seeds: about {takes:.0f} s here, as three steps of each run took\n\n"
    )


def test_several_calls_for_a_step_count_as_the_step(clock):
    def train(steps, on_step):
        for _ in range(3 * steps):
            clock[0] += 1.0
            on_step()

    assert training.time_steps(train) == (12.0, 3.0)


@pytest.mark.parametrize("step", [0.02, 0.1, 0.5, 1.5, 20.0])
def test_a_slow_machine_takes_fewer_steps_then_fewer_seeds(step, clock, capsys):
    part = make_part(clock, 0.1, step)
    fitted = prepare(options(100, 3), [part, part])
    takes = 2 * fitted.seeds * (0.1 + fitted.steps * step)
    assert takes <= MOST_SECONDS or (fitted.steps, fitted.seeds) == (2, 1)
    assert fitted.seeds == 1 or fitted.steps >= FEW_STEPS
    more = 2 * fitted.seeds * (0.1 + (fitted.steps + 1) * step)
    assert fitted.steps == 100 or more > MOST_SECONDS
    said = capsys.readouterr().out
    assert (f"would take {6 * (0.1 + 100 * step):.0f} s" in said) is (fitted != options(100, 3))
    assert ("--steps 100 --seeds 3" in said) is (fitted != options(100, 3))


def test_what_was_asked_for_is_done_however_long_it_takes(clock, capsys):
    part = make_part(clock, 0.1, 9.0)
    assert prepare(options(100, 2, may_shorten=False), [part, part]) == options(100, 2, may_shorten=False)
    assert "100 steps from each of 2 seeds: about 3600 s here" in capsys.readouterr().out


def test_few_steps_by_default_are_no_reason_for_fewer_seeds():
    assert fit(lambda steps, seeds: steps * seeds, 10, 5) == (10, 5)
    assert fit(lambda steps, seeds: 1000.0, 10, 5) == (2, 1)


@pytest.mark.parametrize(("given", "may"), [([], True), (["--steps", "3"], False), (["--seeds", "1"], False)])
def test_steps_and_seeds_that_are_given_are_not_changed(given, may, monkeypatch):
    seen = []
    monkeypatch.setattr(digits, "run", seen.append)
    assert main(["demo", "--device", "cpu", *given]) == 0
    assert [one.may_shorten for one in seen] == [may]


@pytest.mark.parametrize("levels", [("O0", "O4", "O1")])
def test_each_row_is_there_when_its_level_is_done_and_ctrl_c_keeps_it(levels, monkeypatch, capsys, tmp_path):
    """Ctrl-C in the second seed of the last level."""
    train, calls = digits.train, []

    def interrupted(level, *arguments, steps, seed, **options):
        if steps == 3:
            calls.append(capsys.readouterr().out)
            if len(calls) == 10:
                raise KeyboardInterrupt
        return train(level, *arguments, steps=steps, seed=seed, **options)

    monkeypatch.setattr(digits, "train", interrupted)
    page = tmp_path / "levels.html"
    line = ["demo", "--opt-level", ",".join(levels), "--steps", "3", "--seeds", "2", "--device", "cpu"]
    assert main([*line, "--html", str(page)]) == 130
    # O0: noise and layers after the first seed; others: layers
    assert [number for number, printed in enumerate(calls) if printed.startswith("level")] == [5]
    assert [number for number, printed in enumerate(calls) if printed.startswith("O4")] == [8]
    output = capsys.readouterr()
    assert "means of 2 seeds" in output.out and "O1" not in output.out
    assert output.err == "amp-patch demo: interrupted\n" and "O4" in page.read_text()


def test_ctrl_c_keeps_the_levels_of_mlp(monkeypatch, capsys):
    train = mlp.train

    def interrupted(level, seed, steps, *arguments):
        if level == "O4" and steps == 3:
            raise KeyboardInterrupt
        return train(level, seed, steps, *arguments)

    monkeypatch.setattr(mlp, "train", interrupted)
    assert main(["demo", "mlp", "--opt-level", "O0,O4", "--steps", "3", "--seeds", "2", "--device", "cpu"]) == 130
    output = capsys.readouterr()
    assert [line.split()[0] for line in output.out.splitlines()[3:]] == ["level", "-----", "O0"]
    assert output.err == "amp-patch demo: interrupted\n"
