"""`amp-patch trace` finds the fault of scripts of Apex and of amp_patch, and says which scripts it cannot trace.

Guards: cli/trace, cli/traced_run, cli/trace_fix, cli/ranks, cli/recording, insight/agreement.
"""

import functools
import json
import re
import signal
import tempfile
from pathlib import Path

import pytest

from amp_patch import insight
from amp_patch.cli.main import main
from amp_patch.cli.ranks import name_for_node
from amp_patch.cli.scripts import WatchedRun
from amp_patch.cli.traced_run import TracedRun
from amp_patch.insight import Recording
from amp_patch.insight.quiet_record import QuietCause, QuietRecord
from amp_patch.insight.recorder import make_empty_run

pytestmark = pytest.mark.xdist_group("scripts")

SCRIPT = """
import torch
from {package} import amp

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0, loss_scale={scale!r})
for number in range(4):
    x = torch.randn(8, 16)
    if number == {bad}:
        x[2, 3] = 1e5
    loss = model(x).float().square().mean()
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    print("step", number)
"""


def script(package="apex", bad=2, scale=128.0):
    return SCRIPT.format(package=package, bad=bad, scale=scale)


@pytest.fixture
def call(run_command):
    """Returns a function that traces a script."""
    return functools.partial(run_command, "trace")


def test_a_script_ends_with_the_step_that_has_the_fault(call, tmp_path):
    code, out, _ = call(script(), "--json", "faults.jsonl")
    assert code == 1 and out.startswith("step 0\nstep 1\nstep 2, forward: first") and "step 3" not in out
    assert "step 2, forward: first value that does not fit" in out
    for told in ("F.linear at train.py:13, module 0", "whitelist", "precision: inf", "linear]"):
        assert told in out
    (line,) = [json.loads(line) for line in (tmp_path / "faults.jsonl").read_text().splitlines()][1:]
    assert (line["kind"], line["step"], line["module"]) == ("fault", 2, "0")


def test_what_was_found_is_said_although_its_file_cannot_be_written(call):
    code, out, err = call(script(bad=0), "--json", "/dev/full")
    assert code == 2 and "step 0, forward: first value that does not fit" in out and "/dev/full" in err


def test_a_window_without_the_fault(call):
    assert call(script(), "--steps", "0:2")[:2] == (0, "step 0\nevery value fits, in 2 steps\n")
    code, out, _ = call(script(), "--steps", "2:4")
    assert code == 1 and "step 2, forward" in out


def test_a_dynamic_scale_on_its_way_down_is_told_and_no_fault(call):
    code, out, _ = call(script("amp_patch", bad=None, scale={"init": 2.0**24}))
    assert code == 0 and "no fault: 4 steps skipped as the dynamic loss scale came down from 2**24" in out
    assert "run more steps" in out and "every value fits" not in out


BY_HAND = """
import torch

weight = torch.nn.Parameter(torch.ones(4))
optimizer = torch.optim.SGD([weight])
for _ in range(3):
    weight.grad = torch.ones(4)
    optimizer.step()
torch.nn.Linear(4, 1)(weight)
"""


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("print('nothing')\n", "the script called no model and no amp.initialize"),
        ("raise SystemExit(3)\n", "the script ended with exit code 3"),
        (script(bad=None).partition("for number")[0], "ended without an optimizer step"),
        (script(bad=None) + "1 / 0\n", "ended with exit code 1 after 4 steps, in which every value fits"),
        (BY_HAND, "after 3 optimizer steps, all before it used a model or torch.autocast"),
    ],
    ids=["no amp", "exit", "no step", "crash", "steps before a model"],
)
def test_what_cannot_be_looked_at_is_trouble(source, told, call):
    code, _, err = call(source)
    assert code == 2 and err.strip().splitlines()[-1].startswith("amp-patch trace: failed: the script") and told in err


def test_ctrl_c_in_a_script_is_one_line_below_what_was_found(call):
    source = script(bad=None).replace('print("step", number)', "if number == 2:\n        raise KeyboardInterrupt")
    assert call(source) == (130, "every value fits, in 3 steps\n", "amp-patch trace: interrupted\n")


def test_ctrl_c_before_a_step_ends_the_command_after_the_quiet_losses(capsys):
    recording = Recording(make_empty_run(), [QuietRecord(QuietCause.COLLAPSED, 0, 1, 1, dtype="bf16", kept=0.5)])
    traced = TracedRun(WatchedRun(-signal.SIGINT, [0], [recording]), 0, "amp-patch trace")
    with pytest.raises(KeyboardInterrupt):
        traced.report_none()
    assert "lost quietly" in capsys.readouterr().out


def test_a_script_that_fails_over_the_fault_is_told_of_it(call):
    source = script().replace("    optimizer.step()\n", "    assert loss.isfinite()\n    optimizer.step()\n")
    code, out, _ = call(source)
    assert code == 1 and "step 2, forward" in out and "gradients of" in out
    source = script().replace("scaled_loss.backward()", "assert scaled_loss.isfinite()")
    code, out, _ = call(source)
    assert code == 1 and "step 2, forward" in out and "not known: the step did not end" in out


@pytest.mark.parametrize(
    ("options", "base", "steps"),
    [((), "apex", "11 steps"), (("--lists", "own.yaml", "--steps", "0:2"), "own.yaml", "2 steps")],
)
def test_fix_writes_a_list_and_says_whether_it_is_enough(options, base, steps, call, tmp_path):
    (tmp_path / "own.yaml").write_text("extends: apex\n")
    (tmp_path / "lists").mkdir()
    source = script(bad=None).replace("range(4)", "range(12)").replace("lr=1e-3", "lr=0.0")
    overflowing = source.replace("optimizer =", "model[0].weight.data.mul_(1e6)\noptimizer =", 1)
    code, out, _ = call(overflowing, "--fix", "lists/fix.yaml", *options)
    assert (
        "first value that does not fit" in out
        and f"every value fits, in {steps}\nloss in " in out
        and "fix.yaml is enough" in out
    )
    written = (tmp_path / "lists" / "fix.yaml").read_text()
    assert code == 0 and (f"extends: {base}\n" in written or f"extends: ../{base}\n" in written)
    code, out, _ = call(overflowing, "--lists", "lists/fix.yaml")
    assert code == 0


def test_fix_looks_beyond_steps_that_a_dynamic_scale_skips(call):
    source = script("amp_patch", bad=None, scale={"init": 2.0**24}).replace("range(4)", "range(40)")
    source = source.replace("lr=1e-3", "lr=0.0").replace(".mean()", ".mean() * 1e3")
    source = source.replace("randn(8, 16)", "randn(8, 16) * 3e5")
    source = source.replace("optimizer =", "model[0].weight.data.div_(3e5)\noptimizer =", 1)
    code, out, _ = call(source, "--fix", "fix.yaml")
    skipped = int(out.partition("no fault: ")[2].partition(" steps skipped")[0])
    assert (
        code == 0 and skipped > 10 and "every value fits, in 11 steps\nloss in " in out and "fix.yaml is enough" in out
    )


ENDS_ON_NAN = """
import sys
import torch
from torch import nn


class Gram(nn.Module):
    def forward(self, x):
        return (x.transpose(1, 2).contiguous() * 1.0).matmul(x).flatten(1)


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), Gram(), nn.Linear(256, 1))
optimizer = torch.optim.Adam(model.parameters())
scaler = torch.amp.GradScaler("cpu")
for _ in range(12):
    with torch.autocast("cpu", torch.float16):
        loss = model(60 * torch.randn(4, 200, 8)).square().mean()
    if not torch.isfinite(loss):
        sys.exit(1)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""


def test_fix_tries_the_other_of_two_lists_where_the_first_is_not_enough(call, tmp_path):
    code, out, _ = call(ENDS_ON_NAN, "--fix", "fix.yaml", arguments=["--", "--name", "a b"])
    assert re.search(r"blacklist: \[matmul, linear\]\s+or, in its place,\s+modules: \[", out)
    assert code == 0 and "fix.yaml is enough for these steps" in out
    assert out.endswith("amp-patch compare train.py --runs O0,as-is+fix.yaml -- --name 'a b'\n")
    assert "blacklist: [matmul, linear]" in (tmp_path / "fix.yaml").read_text()


CASTS_RESULT = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
for _ in range(3):
    with torch.autocast("cpu", torch.float16):
        shares = (40 * model(torch.eye(4))).softmax(-1).half()
        loss = (shares + 1e-8).log().mean()
    loss.backward()
    optimizer.step()
"""


def test_a_list_that_is_not_enough_says_so_itself(call, tmp_path):
    code, out, _ = call(CASTS_RESULT, "--fix", "fix.yaml")
    assert code == 1 and out.count("written:") == 1 and "fix.yaml is not enough" in out and "fix.yaml is left" in out
    assert "# not enough" in (tmp_path / "fix.yaml").read_text() and "blacklist: [softmax]" in out


def test_fix_writes_nothing_where_no_list_helps(call, tmp_path):
    code, out, _ = call(script(bad=2).replace("1e5", "float('nan')"), "--fix", "fix.yaml")
    assert code == 1 and "no list was written: none helps against this" in out and not (tmp_path / "fix.yaml").exists()


@pytest.mark.parametrize("error", [ValueError("Unknown format code"), OSError("no space left")])
def test_an_error_of_the_command_itself_is_not_taken_for_a_fault(error, call, monkeypatch):
    def fail(*_):
        raise error

    monkeypatch.setattr(insight, "format_fault", fail)
    code, _, err = call(script())
    assert code == 2 and str(error) in err


OF_A_RANK = """
import os, torch

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(torch.ones(2, 4)).float().square().mean()
    if step == 1 and os.environ["RANK"] == "1":
        loss = loss.log().exp() / torch.zeros(())
    loss.backward()
    optimizer.step()
"""


def start_as_ranks(run_command, monkeypatch, tmp_path, command, *options):
    """What `torchrun -m amp_patch COMMAND` does, the first rank last: exit codes and outputs."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    done = []
    for rank in (1, 0):
        for name in ("RANK", "LOCAL_RANK"):
            monkeypatch.setenv(name, str(rank))
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            monkeypatch.setenv(name, "2")
        try:
            done.append(run_command(command, OF_A_RANK, *options))
        except SystemExit as left:
            done.append((left.code, "", ""))
    return done


def test_each_rank_of_a_launcher_has_its_recording_and_the_first_tells_the_fault(run_command, monkeypatch, tmp_path):
    (code, _, _), (first, told, _) = start_as_ranks(run_command, monkeypatch, tmp_path, "trace", "--json", "r.jsonl")
    assert (code, first) == (0, 1)
    assert told.startswith("rank 1, step 1, forward: first value that does not fit")
    ranks = [Recording.read(tmp_path / name).run.rank for name in ("r.jsonl", "r.1.jsonl")]
    assert ranks == [0, 1] and not list(tmp_path.glob("amp-patch-*"))


@pytest.mark.parametrize("command", [("compare",), ("tune",), ("trace", "--fix", "fix.yaml")], ids=" ".join)
def test_a_command_that_runs_a_script_again_is_not_started_once_for_each_rank(
    command, run_command, monkeypatch, tmp_path, capsys
):
    assert [code for code, _, _ in start_as_ranks(run_command, monkeypatch, tmp_path, *command)] == [2, 2]
    assert "-m torch.distributed.run -- --nproc-per-node 2" in capsys.readouterr().err


@pytest.mark.parametrize(("machine", "name"), [("0", "r.jsonl"), ("2", "r.node2.jsonl")])
def test_each_machine_of_a_launcher_writes_a_file_of_its_own(machine, name, monkeypatch):
    for variable, value in {"RANK": 0, "WORLD_SIZE": 4, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(variable, str(value))
    monkeypatch.setenv("GROUP_RANK", machine)
    assert name_for_node(Path("folder/r.jsonl")) == Path("folder", name)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert name_for_node(Path("folder/r.jsonl")) == Path("folder/r.jsonl")


RANKS = """
import os, signal, sys, tempfile
import torch, amp_patch.insight.tracer, amp_patch.api
import torch.distributed as dist
from apex import amp

# what torchrun does, with one import of torch instead of three
folder = tempfile.mkdtemp()
ranks = {}
for rank in range(int(sys.argv[1])):
    pid = os.fork()
    if pid == 0:
        break
    ranks[pid] = rank
else:
    signal.signal(signal.SIGTERM, lambda *_: [os.kill(pid, signal.SIGTERM) for pid in ranks])
    sys.exit(max(os.WEXITSTATUS(os.waitpid(pid, 0)[1]) for pid in ranks))
dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=int(sys.argv[1]))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0, loss_scale=128.0)
model = torch.nn.parallel.DistributedDataParallel(model)
for number in range(int(sys.argv[3])):
    x = torch.randn(8, 16)
    if number == 2 and dist.get_rank() == 1:
        x[2, 3] = 1e5
    output = model(x).float()
    lost = torch.nan_to_num(output.detach()).mean() if sys.argv[2] == "swallowed" else output.mean()
    loss = lost + model(torch.randn(8, 16)).float().square().mean()
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
"""


def test_a_fault_of_one_rank_ends_all_though_the_others_see_nothing_of_it(tmp_path, monkeypatch, capfd):
    (tmp_path / "train.py").write_text(RANKS)
    monkeypatch.chdir(tmp_path)
    assert main(["trace", "train.py", "--", "2", "swallowed", "200"]) == 1
    told = capfd.readouterr().out
    assert "rank 1, step 2, forward: first value that does not fit" in told and "swallowed" in told


def test_a_fault_is_of_the_rank_that_made_it_though_its_gradients_came_in_at_another(call):
    code, out, _ = call(RANKS, arguments=["--", "2", "gradients", "4"])
    assert code == 1 and "rank 1, step 2, forward: first value that does not fit" in out
    assert "cause  precision" in out and "gradients of" in out


QUIET = """
import torch
from amp_patch import amp

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.LayerNorm(16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
model, optimizer = amp.initialize(model, optimizer, opt_level="{level}", verbosity=0, loss_scale=128.0)
x, y = torch.randn(32, 16), torch.arange(32) % 4
for number in range(4):
    loss = torch.nn.functional.cross_entropy(model(x).float(), y)
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
"""


def test_a_quiet_loss_ends_with_the_exit_code_of_a_fault(call, tmp_path):
    code, out, _ = call(QUIET.format(level="O3"), "--json", "quiet.jsonl")
    assert code == 1 and "every value fits, in 4 steps" in out
    assert "lost quietly in float16, in each of 4 steps" in out and 'opt_level="O2"' in out
    assert [lost.role for lost in Recording.read(tmp_path / "quiet.jsonl").quiet] == ["weights"]
    code, out, _ = call(QUIET.format(level="O2"))
    assert code == 0 and "quietly" not in out


def test_fix_tries_the_level_that_keeps_what_is_lost(call, tmp_path):
    code, out, _ = call(QUIET.format(level="O3"), "--fix", "fix.yaml")
    assert code == 0 and 'opt_level="O2" is enough for these steps' in out and "in float32" in out
    assert not (tmp_path / "fix.yaml").exists()


COLLAPSES = """
import torch
from torch import nn

class Time(nn.Module):
    def forward(self, t):
        angles = t[:, None] @ torch.linspace(1, 0.001, 8)[None]
        return angles.sin()

torch.manual_seed(0)
model = nn.Sequential(Time(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(3):
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.arange(3000.0, 3064.0)).float().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_fix_writes_the_list_that_keeps_what_is_lost(call, tmp_path):
    code, out, _ = call(COLLAPSES, "--fix", "fix.yaml")
    assert code == 0 and "fix.yaml is enough for these steps" in out
    assert 'modules: [{match: "0", run: float32}]' in (tmp_path / "fix.yaml").read_text()


RAISING = """
import torch

torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    with torch.autocast("cpu", torch.bfloat16):
        out = torch.zeros(2, 4).index_add(0, torch.tensor([0, 1, 1]), model(torch.ones(3, 4)))
    optimizer.zero_grad()
    out.square().mean().backward()
    optimizer.step()
"""


def test_an_exception_is_explained_after_its_traceback_and_the_list_repairs_it(call, tmp_path):
    code, out, err = call(RAISING, "--json", "raised.jsonl")
    assert code == 1 and "Traceback" in err and "RuntimeError: index_add" in err
    assert out.startswith("step 0, forward: the script raised RuntimeError") and "promote: [index_add]" in out
    (raised,) = Recording.read(tmp_path / "raised.jsonl").raised
    assert raised.site == "train.py:9" and raised.entries == ("promote: [index_add]",)
    code, out, _ = call(RAISING, "--fix", "fix.yaml")
    assert code == 0 and "fix.yaml is enough" in out
    assert "promote: [index_add]" in (tmp_path / "fix.yaml").read_text()


def test_an_exception_that_dtypes_do_not_explain_is_none_of_the_command(call):
    code, out, err = call(RAISING.replace("torch.ones(3, 4)", "torch.ones(3, 5)"))
    assert code == 2 and not out and "the script ended with exit code 1" in err
