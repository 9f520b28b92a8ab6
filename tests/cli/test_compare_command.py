"""`amp-patch compare` runs unmodified scripts at each level, writes what it says, and reports runs that fail.

Guards: cli/compare, cli/scripts, cli/recording.
"""

import functools
import re
import signal
import sys

import pytest

from amp_patch.cli import compare, recording, scripts
from amp_patch.doctor.machine import Advice
from amp_patch.insight.comparing import Comparison
from amp_patch.insight.recordings import Recording
from amp_patch.insight.records import ComparedRecord, ComparisonRecord, CurveRecord, RunRecord
from amp_patch.script_settings import HasRegionsError

pytestmark = pytest.mark.xdist_group("scripts")

HEAD = """
import sys

import torch
{imports}

model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
open("given", "w").write(str(sys.argv[1:]))
"""
LOOP = """
for number in range(6):
    optimizer.zero_grad()
    with amp.scale_loss(model(torch.randn(4, 4)).float().square().mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
"""
APEX = HEAD.format(imports="from apex import amp")
OURS = HEAD.format(imports="import amp_patch as amp")


@pytest.fixture
def call(run_command):
    return functools.partial(run_command, "compare")


def table(text):
    lines = text.splitlines()
    first = next(index for index, line in enumerate(lines) if line.startswith("---"))
    return {line.split()[0]: line.split() for line in lines[first + 1 : lines.index("", first)]}


def test_a_script_is_run_at_each_level(call, tmp_path):
    (tmp_path / "mine.yaml").write_text("whitelist: [relu]\n")
    files = ("--jsonl", "c.jsonl", "--html", "c.html")
    options = ("--runs", "O0,O4+mine.yaml", "--steps", "4", "--in-place", *files)
    code, out, err = call(APEX + LOOP, *options, arguments=["--", "--steps", "9"])
    assert code == 0 and (tmp_path / "given").read_text() == "['--steps', '9']" and "\r" not in err
    rows = table(out)
    assert [(name, row[1]) for name, row in rows.items()] == [("O0", "-"), ("O4+mine.yaml", "bf16")]
    assert err.count("amp-patch compare: run ") == 6 and "run 6 of 6: O4+mine.yaml, layers and memory" in err
    found = Comparison.read(tmp_path / "c.jsonl")
    assert [len(curve.losses) for curve in found.curves("O4+mine.yaml").values()] == [4]
    assert found.runs[1].lists[-1].endswith("/mine.yaml")
    assert {one.module for one in found.layers("O4+mine.yaml")} == {"0", "1", "2"} and not found.failed
    assert found.runs[0].peak > 0
    assert (tmp_path / "c.html").read_text().startswith("<!DOCTYPE html>")


@pytest.mark.parametrize(
    ("losses", "advised"),
    [
        ({"O4": 1.0}, "use O4 or O5: fast"),
        ({"O1": 9.0}, "use O4 or O5: fast"),
        ({"O4": 9.0}, "keep O0: see the verdict on O4"),
        ({"as-is": 9.0}, "keep O0: see the verdict on as-is"),
        ({"O4": None, "O5": 9.0}, "keep O0: see the verdict on O4 and O5"),
        ({"O4": 9.0, "O5": 1.0}, "use O5, and not O4"),
        ({"O4": None, "O4+fix.yaml": 1.0}, "use O4+fix.yaml, and not O4"),
    ],
    ids=str,
)
def test_advice_names_no_level_that_failed_or_is_worse(losses, advised, monkeypatch):
    monkeypatch.setattr(compare, "get_advice", lambda device: Advice("use O4 or O5: fast", ("O4", "O5"), "bf16"))
    about = ComparisonRecord("O0", 9, (0,), "a CPU", "")
    runs, curves = [], []
    for name, loss in {"O0": 1.0, **losses}.items():
        low = {"O0": "", "O1": "f16"}.get(name, "bf16")
        runs.append(ComparedRecord(name, low=low, failed="" if loss else "RuntimeError: it fails"))
        if loss:
            curves.append(CurveRecord(name, 0, (loss,) * 9, (1.0,) * 9, (), 10.0))
    recording = Recording(RunRecord("", "cpu", "O0", "", (), "", 0), [about, *runs, *curves])
    assert compare._advise(Comparison(recording)) == advised


@pytest.mark.parametrize(
    ("ms", "is_native", "advised"),
    [
        (10.0, False, "keep O0, unless memory matters more than time: a step of O4 takes as long or longer"),
        (20.0, True, "keep O0, unless memory matters more than time: a step of O4 takes as long or longer"),
        (5.0, False, "use O4 or O5: fast"),
        (5.0, True, "use O4: fast"),
    ],
)
def test_advice_follows_the_measured_time_and_names_levels_that_fit_the_script(ms, is_native, advised, monkeypatch):
    monkeypatch.setattr(compare, "get_advice", lambda device: Advice("use O4 or O5: fast", ("O4", "O5"), "bf16"))
    about = ComparisonRecord("O0", 20, (0,), "a CPU", "")
    runs = [ComparedRecord("O0"), ComparedRecord("O4", low="bf16")]
    curves = [CurveRecord(name, 0, (1.0,) * 20, (1.0,) * 20, (), time) for name, time in (("O0", 10.0), ("O4", ms))]
    run = RunRecord("", "cpu", "O0", "", (), "", 0, is_native=is_native)
    assert compare._advise(Comparison(Recording(run, [about, *runs, *curves]))) == advised


def test_each_run_has_the_seed_of_the_command(call, monkeypatch, tmp_path):
    monkeypatch.setattr("sys.argv", ["amp-patch", "compare", "--runs", "O0,O0", "a b.py"])
    code, out, _ = call(APEX + LOOP, "--runs", "O0,O0", "--steps", "2", "--seeds", "2", "--jsonl", "c.jsonl")
    assert code == 0 and "2 steps, seeds 0 to 1" in out
    found = Comparison.read(tmp_path / "c.jsonl")
    assert found.differences("O0 (2)") == [[0.0, 0.0]] * 2
    first, second = found.curves("O0").values()
    assert first.losses != second.losses  # the script sets no seed, so each run has that of the command
    assert found.about.command == "amp-patch compare --runs O0,O0 'a b.py'"


def test_runs_that_fail_have_a_row_and_a_reason(call):
    source = OURS + 'if amp.stats().opt_level == "O4":\n    sys.exit(3)\n' + LOOP
    code, out, _ = call(source, "--runs", "O0,O4", "--steps", "9")
    assert code == 1 and table(out)["O4"][1:6] == ["bf16", "-", "-", "-", "-"]
    assert out.startswith("O4: the script ended with exit code 3\n\n6 of 9 steps, since the script ended")


def test_a_script_without_steps_is_nothing_to_compare(call):
    code, _, err = call("print(1)\n", "--runs", "O0")
    assert code == 1 and "nothing to compare: no run took a step (O0: the script took no step\n  1)" in err


def test_a_script_that_fails_in_a_model_is_shown_by_its_own_lines_and_once(call):
    source = """
import torch

model = torch.nn.Linear(4, 4)
for _ in range(4):
    model = torch.nn.Sequential(model)
with torch.autocast("cpu", torch.bfloat16):
    model(torch.zeros(2, 3))  # four are needed
"""
    code, out, err = call(source)
    assert out == "" and "failed: the training fails at the reference O0, so no other level was run:\n" in err
    lines = [line.strip() for line in err.splitlines()]
    assert code == 1 and lines.count("model(torch.zeros(2, 3))  # four are needed") == 1
    assert sum(line.startswith("RuntimeError: ") for line in lines) == 1 and "amp_patch/" not in err
    # it is not known yet how many runs there would be
    assert re.findall(r"run (\d+)(?: of (\d+))?:", err) == [("1", "")]


FAILS = """
import torch

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number in range(6):
    with torch.autocast("cpu", torch.bfloat16):
        output = model(torch.ones(2, 4))
    {line}
    output.float().sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("line", "runs"),
    [
        ("if number == 2: raise ValueError('a bad row')", ["O0"]),
        ("assert output.dtype == torch.bfloat16", ["O0", "as-is", "O1", "O4"]),
        ("if output.dtype == torch.float32: raise RuntimeError('CUDA out of memory')", ["O0", "as-is", "O1", "O4"]),
        ("raise TypeError('this dtype never works')", ["O0", "as-is"]),
    ],
    ids=["an error of its own", "not in float32", "memory", "the same error of dtypes"],
)
def test_levels_run_after_a_failure_only_if_they_may_do_better(line, runs, call):
    code, out, err = call(FAILS.format(line=line), "--steps", "4")
    begun = re.findall(r"run \d+(?: of \d+)?: (\S+),", err)
    assert code == 1 and list(dict.fromkeys(begun)) == runs
    if runs == ["O0"]:
        assert err.endswith("ValueError: a bad row\n--steps 2 compares the 2 steps before it\n") and not out


PLAIN = """
import torch

model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number in range(6):
    loss = model(torch.randn(4, 4)).square().mean()
    print("loss", loss.item(), file=open("losses", "a"))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_a_script_without_amp_is_compared_with_itself_in_one_region(call, tmp_path):
    code, out, _ = call(PLAIN, "--everywhere", "--in-place", "--steps", "3", "--jsonl", "c.jsonl")
    assert code == 0 and [(name, row[1]) for name, row in table(out).items()] == [("O0", "-"), ("O4", "bf16")]
    found = Comparison.read(tmp_path / "c.jsonl")
    own = [float(line.split()[1]) for line in (tmp_path / "losses").read_text().splitlines()[:3]]
    assert [curve.losses for curve in found.curves("O0").values()] == [pytest.approx(own, rel=1e-7)]
    assert [curve.losses for curve in found.curves("O4").values()] != [pytest.approx(own, rel=1e-7)]


def test_everywhere_is_refused_for_a_script_with_regions(call, capsys):
    source = PLAIN.replace("= model(", "= torch.autocast('cpu', torch.bfloat16)(model)(")
    assert source != PLAIN
    with pytest.raises(SystemExit, match="2"):
        call(source, "--everywhere", "--steps", "2")
    err = capsys.readouterr().err
    assert "error: this script has regions of torch.autocast" in err and "Traceback" not in err
    with pytest.raises(SystemExit, match="2"):  # the excepthook of `amp-patch run`
        recording._print_error_in_short(HasRegionsError, HasRegionsError("it has regions"), None)


LATE = """
import torch

torch.manual_seed(0)
encoder, model = torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)
optimizer = torch.optim.LBFGS(encoder.parameters(), max_iter=2)
optimizer.step(lambda: encoder(torch.ones(2, 4)).square().mean())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number in range(9):
    with torch.autocast("cpu", torch.bfloat16, enabled=number > 5):
        loss = model(encoder(torch.ones(2, 4)).detach()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_levels_are_compared_from_the_first_region_on_and_those_that_cannot_run_are_left_out(call, tmp_path):
    code, out, err = call(LATE, "--steps", "3", "--jsonl", "c.jsonl")
    assert code == 0 and [*table(out)] == ["as-is", "O0", "O4"] and "takes steps without" not in out
    assert "first 3 steps, after 7 without mixed precision" in out
    assert "\nO1 is left out: it is float16, whose gradients need a loss scale" in out and "GradScaler" in out
    found = Comparison.read(tmp_path / "c.jsonl")
    assert found.runs[0].low == "bf16" and found.differences("as-is") != [[0.0] * 3]
    assert found.differences("as-is") == found.differences("O4")
    code, out, _ = call(LATE, "--runs", "O0,O1", "--steps", "2")
    assert code == 1 and "  O1 is float16, whose gradients need a loss scale" in out and "Traceback" not in out


def test_outputs_of_a_script_in_one_region_become_arrays_of_float32(call):
    step = "    loss = model(torch.randn(4, 4)).square().mean()\n"
    arrays = "    array = model(torch.ones(1, 4)).detach()\n    assert str(array.numpy().dtype) == 'float32'\n"
    arrays += "    import numpy\n    assert str(numpy.asarray(array).dtype) == 'float32'\n"
    source = PLAIN.replace(step, step + arrays)
    code, out, _ = call(source, "--everywhere", "--steps", "3")
    assert code == 0 and [*table(out)] == ["O0", "O4"]


@pytest.mark.parametrize(("runs", "reason"), [("O0,O1", "need a loss scale"), ("O2", "no op in the region")])
def test_a_level_that_no_region_has_is_refused_before_anything_runs(runs, reason, call, capsys, tmp_path):
    with pytest.raises(SystemExit, match="2"):
        call(PLAIN, "--everywhere", "--runs", runs)
    assert reason in capsys.readouterr().err and not (tmp_path / "losses").exists()


def test_ctrl_c_keeps_what_is_done(call, monkeypatch, tmp_path):
    forked, count = scripts._call, []

    def interrupted(*arguments):
        count.append(1)
        code = forked(*arguments)
        return -signal.SIGINT if len(count) == 4 else code

    monkeypatch.setattr(scripts, "_call", interrupted)
    code, out, err = call(APEX + LOOP, "--runs", "O0,O4,O5", "--steps", "3", "--jsonl", "c.jsonl")
    assert code == 130 and "amp-patch compare: interrupted; these are the results so far" in err
    assert "Traceback" not in err and len(count) == 4
    assert [run.failed for run in Comparison.read(tmp_path / "c.jsonl").runs] == ["", "did not run", "did not run"]


def test_a_terminal_shows_the_steps_of_a_run_in_one_line(call, monkeypatch):
    forked = scripts._call

    def call_and_ask(command, environment, is_over, log):
        code = forked(command, environment, is_over, log)
        is_over()
        return code

    monkeypatch.setattr(scripts, "_call", call_and_ask)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    source = (APEX + LOOP).replace("optimizer.zero_grad()", "optimizer.zero_grad(); import time; time.sleep(0.6)")
    _, out, err = call(source, "--runs", "O0", "--steps", "3")
    assert re.search(r"\r  O0  step [12] of 3  \d+ s", err) and "step 1 of" not in out
    assert re.search(r" s\r +\r(amp-patch compare: run|$)", err)  # removed before the next line of the command
