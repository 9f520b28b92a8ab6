"""The `amp-patch` command: the demo's table and picture, and what bad usage is told."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import amp_patch as amp
from amp_patch.cli import demo
from amp_patch.cli.main import build_parser, main
from amp_patch.errors import AmpError

pytestmark = pytest.mark.usefixtures("large_packages_are_searched")

STEPS = 12
PNG_MAGIC = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The network is small: a second thread gains nothing, and on a busy machine it makes every step wait."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def cells(output: str) -> dict[str, list[str]]:
    """The table's rows by level, each as the texts between the gaps of two spaces or more."""
    rows = (re.split(r"\s{2,}", line) for line in output.splitlines() if re.match(r"O\d\s", line))
    return {row[0]: row for row in rows}


def test_demo_prints_one_row_for_each_level_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--opt-level", "O0,O4", "--steps", str(STEPS), "--device", "cpu", "--seed", "3"]) == 0
    output = capsys.readouterr().out
    assert tuple(re.split(r"\s{2,}", output.splitlines()[0])) == demo.COLUMNS
    rows = cells(output)
    assert list(rows) == ["O0", "O4"]
    assert {len(row) for row in rows.values()} == {len(demo.COLUMNS)}
    low, patched = demo.COLUMNS.index("low dtype"), demo.COLUMNS.index("names patched")
    assert (rows["O0"][patched], rows["O4"][low]) == ("0", "bfloat16")
    assert int(rows["O4"][patched]) > 0


@pytest.mark.parametrize("has_products", [True, False])
def test_demo_says_which_products_are_computed_in_float32(
    has_products: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "has_low_products", lambda device_type, low: has_products)
    assert main(["demo", "--opt-level", "O0,O4,O5", "--steps", "2", "--device", "cpu"]) == 0
    told = [line for line in capsys.readouterr().out.splitlines() if "products are computed in float32" in line]
    assert len(told) == (0 if has_products else 1)
    assert all("rounded to bfloat16" in line and line.endswith("for speed here, use O0") for line in told)


def test_demo_leaves_no_session_open() -> None:
    linear = torch.nn.functional.linear
    main(["demo", "--opt-level", "O4", "--steps", "1", "--device", "cpu"])
    assert torch.nn.functional.linear is linear
    assert amp.stats().names_patched == 0


def test_levels_may_be_repeated_or_listed() -> None:
    arguments = ["demo", "--opt-level", "O1", "--opt-level", "O4,O5"]
    parsed = build_parser(arguments).parse_args(arguments)
    assert parsed.levels == ["O1", "O4", "O5"]


def test_plot_writes_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "curves.png"
    assert main(["demo", "--opt-level", "O0,O4", "--steps", str(STEPS), "--device", "cpu", "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(PNG_MAGIC)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        pytest.param(
            ["--opt-level", "o1"], "'o1' is not an opt_level (O0, O1, O2, O3, O4, O5). Did you mean 'O1'?", id="level"
        ),
        pytest.param(["--opt-level", "O1,O9"], "'O9' is not an opt_level", id="level-in-list"),
        pytest.param(["--steps", "0"], "'0' is not a whole number of 1 or more", id="steps"),
        pytest.param(["--device", "abacus"], "device 'abacus' cannot be used here", id="device"),
        pytest.param(["--plot", "curves.jpg"], "'curves.jpg' must be a .png file in a folder that exists", id="plot"),
    ],
)
def test_bad_usage_is_told_before_any_training(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["demo", *options])
    assert left.value.code == 2
    assert said in capsys.readouterr().err


def test_missing_extra_is_one_line_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    assert main(["demo", "--steps", "1"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "sklearn" in said and 'pip install "amp_patch[demo]"' in said


def test_failure_of_the_work_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise AmpError("no luck")

    monkeypatch.setattr(demo, "train", fail)
    assert main(["demo", "--steps", "1", "--device", "cpu"]) == 1
    assert capsys.readouterr().err.endswith("amp-patch demo: failed: no luck\n")


@pytest.mark.slow
def test_every_level_reaches_the_accuracy_of_float32() -> None:
    digits = demo.load_digits_tensors()
    accuracy = {level: demo.train(level, digits, steps=60, seed=0).accuracy for level in demo.LEVELS}
    assert accuracy["O0"] > 97.0
    assert {level: reached for level, reached in accuracy.items() if abs(reached - accuracy["O0"]) > 1.0} == {}


def test_same_seed_same_losses() -> None:
    digits = demo.load_digits_tensors()
    first, again, other = (demo.train("O4", digits, steps=3, seed=seed).losses for seed in (5, 5, 6))
    assert first == again
    assert first != other


def test_module_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "amp_patch", "--help"],
        cwd=Path(__file__).parent.parent.parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0
    assert "demo" in done.stdout
