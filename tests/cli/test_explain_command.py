"""`amp-patch explain` explains unmodified scripts of Apex and of amp_patch, and says why other scripts give nothing to
explain.

Guards: cli/explain, cli/recording, script_settings.
"""

import functools
import json
import re
import types

import pytest

from amp_patch.cli import explain
from amp_patch.cli.main import main
from amp_patch.cli.scripts import WatchedRun
from amp_patch.errors import SessionError

pytestmark = pytest.mark.xdist_group("scripts")

HEAD = """
import sys

import torch
{imports}

model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Softmax(-1), torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def step(number):
    optimizer.zero_grad()
    with amp.scale_loss(model(torch.ones(2, 4)).float().sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    print("step", number)

"""
APEX = HEAD.format(imports="from apex import amp")
OURS = HEAD.format(imports="import amp_patch as amp")
INITIALIZE = "model, optimizer = amp.initialize(model, optimizer, opt_level='O1', verbosity=0)\n"
LOOP = "for number in range(4):\n    step(number)\nprint('end')\n"


@pytest.fixture
def call(run_command):
    """Returns a function that explains a script."""
    return functools.partial(run_command, "explain")


def rows(text):
    """The rows of a table: module, op, rule and line of the list."""
    lines = text.splitlines()
    first = next(index for index, line in enumerate(lines) if line.startswith("---"))
    return [
        line.split()[:4] for line in lines[first + 1 : lines.index("", first)] if not line.startswith("*  products")
    ]


@pytest.mark.parametrize(("source", "lists"), [(APEX, "apex"), (OURS, "float16")], ids=["apex", "amp_patch"])
def test_a_script_runs_up_to_the_end_of_the_step_that_is_explained(source, lists, call):
    code, out, err = call(source + INITIALIZE + "print(sys.argv[1:])\n" + LOOP, arguments=["--", "--steps", "9"])
    assert (code, err) == (0, "")
    assert out.startswith("['--steps', '9']\nstep 0\nO1, f16 on cpu") and f"1 step, lists {lists}\n" in out
    found = rows(out)
    assert [row[:3] for row in found[:2]] == [["*", "F.linear", "whitelist"], ["1", "F.softmax", "blacklist"]]
    assert all(re.fullmatch(r"([a-z0-9_]+\.yaml:)?\d+", row[3]) for row in found[:2])
    assert f"{lists}.yaml" in out
    lines = source.splitlines()
    assert f"train.py:{1 + lines.index(next(line for line in lines if 'scale_loss' in line))}" in out


def test_level_and_lists_take_the_place_of_the_scripts(call, tmp_path):
    (tmp_path / "mine.yaml").write_text("whitelist: [softmax]\n")
    source = OURS + INITIALIZE + LOOP
    _, out, _ = call(source, "--opt-level", "O4", "--lists", "mine.yaml", "--wide")
    assert out.partition("\n")[2].startswith("O4, bf16 on cpu") and "mine.yaml:1" in out
    assert ["1", "F.softmax", "whitelist", "mine.yaml:1"] in rows(out)


def test_options_without_effect_at_a_level_are_told(call, tmp_path):
    source = OURS + "model, optimizer = amp.initialize(model, optimizer, opt_level='O1', lists='apex')\n" + LOOP
    _, out, _ = call(source, "--opt-level", "O2", "--steps", "0")
    assert "told to use opt_level O2 instead of O1; of its lists, O2 takes the modules alone" in out
    assert "O2, f16 on cpu" in out
    (tmp_path / "ops.yaml").write_text("blacklist: [gelu]\n")
    _, out, _ = call(source.replace("'O1', lists='apex'", "'O2'"), "--lists", "ops.yaml", "--steps", "0")
    assert "O2 takes the module rules of lists alone, and there are none in" in out and "ops.yaml" in out
    source = "import torch, amp_patch as amp\nx = torch.ones(2, 2)\n"
    source += "with amp.session(opt_level='O4'):\n    print(x.mm(x).dtype)\n"
    _, out, _ = call(source, "--opt-level", "O1")
    assert out.endswith("torch.float16\n")


def test_steps_and_sums_and_files(call, tmp_path, capsys):
    code, out, _ = call(APEX + INITIALIZE + LOOP, "--steps", "1:3", "--by", "op", "--json", "rec.jsonl")
    assert code == 0 and "2 steps, lists apex" in out and "step 1\n" in out and "step 2\n" not in out
    assert re.search(r"^F\.linear +whitelist +\S+ +4 ", out, re.MULTILINE)
    lines = [json.loads(line) for line in (tmp_path / "rec.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines].count("step") == 2 and lines[0]["schema"] == 1
    assert main(["explain", "--from", "rec.jsonl", "--by", "op", "--html", "rec.html"]) == 0
    assert capsys.readouterr().out == out[out.index("O1, f16") :]
    assert "F.linear" in (tmp_path / "rec.html").read_text()


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("print('nothing')\n", "nothing to explain: the script called no model and no amp.initialize"),
        (APEX + "1 / 0\n", "nothing to explain: the script ended with exit code 1"),
        (APEX + INITIALIZE + "1 / 0\n", "nothing to explain: the script ended with exit code 1 before a step"),
        (APEX + INITIALIZE + "step(0)\n", "the script took 1 optimizer step, but steps 1:2 were to be recorded"),
    ],
    ids=["no apex", "crash", "crash before a step", "one step"],
)
def test_what_gives_nothing_to_explain_says_so(source, told, call):
    code, _, err = call(source)
    assert code == 1 and told in err


def test_a_region_after_the_last_step_is_found_by_the_steps_that_the_message_names():
    recording = types.SimpleNamespace(ops=[], raised=[])
    with pytest.raises(SessionError, match="before the script entered torch.autocast; give --steps 2:3"):
        explain._check_ops(WatchedRun(0, [2], [recording]), 1, 2)


def test_a_script_that_fails_in_the_step_is_explained_as_far_as_it_came(call):
    code, out, err = call(APEX + INITIALIZE + "step(0)\nmodel(torch.ones(2, 4))\nraise SystemExit(5)\n")
    assert code == 1 and ["*", "F.linear", "whitelist"] in [row[:3] for row in rows(out)]
    assert "the script ended after 0 of 1 steps" in out and err == ""


def test_a_loop_that_catches_everything_ends_all_the_same_with_what_was_recorded(call):
    source = (
        APEX
        + INITIALIZE
        + "for number in range(3):\n    try:\n        step(number)\n    except BaseException:\n        pass\n"
    )
    code, out, _ = call(source)
    assert code == 0 and "step 2\n" in out and "F.linear" in out


def test_a_file_that_is_none_is_refused(tmp_path, capsys):
    (tmp_path / "x.jsonl").write_text("{}\n")
    assert main(["explain", "--from", str(tmp_path / "x.jsonl")]) == 1
    assert "no record of kind 'run'" in capsys.readouterr().err
    gone = tmp_path / "gone.jsonl"
    assert main(["explain", "--from", str(gone)]) == 1
    assert capsys.readouterr().err == f"amp-patch explain: failed: {gone}: No such file or directory\n"


def test_a_script_without_mixed_precision_is_told_of_everywhere(call):
    source = OURS.replace("import amp_patch as amp", "").partition("def step")[0]
    source += "for _ in range(3):\n    model(torch.ones(2, 4)).sum().backward()\n    optimizer.step()\n"
    code, out, _ = call(source)
    assert code == 0 and out.endswith("--everywhere --opt-level O4 shows what it would run in bfloat16\n")
    code, out, _ = call(source, "--everywhere", "--opt-level", "O4")
    assert code == 0 and "bf16" in out and "without mixed precision" not in out


def test_a_16_bit_model_is_no_script_without_mixed_precision(call):
    source = HEAD.format(imports="").replace("optimizer =", "model.bfloat16()\noptimizer =")
    step = source[source.index("def step") :]
    source = source.replace(step, "") + "for _ in range(2):\n    model(torch.ones(2, 4).bfloat16()).sum().backward()\n"
    code, out, _ = call(source + "    optimizer.step()\n")
    assert code == 0 and "as-is, bf16 weights on cpu" in out and "without mixed precision" not in out
    assert "the weights are bf16 by the script itself" in out


LATE = """
import torch


def train(use_amp, steps):
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        with torch.autocast("cpu", torch.bfloat16, enabled=use_amp):
            loss = model(torch.ones(2, 4)).exp().sum()
        loss.backward()
        optimizer.step()


train(False, 3)
train(True, 3)
"""


def test_steps_of_a_script_that_begins_in_float32_are_counted_from_the_first(call, tmp_path):
    (tmp_path / "mine.yaml").write_text("blacklist: [exp]\n")
    code, out, _ = call(LATE, "--steps", "5", "--all")
    assert code == 0 and "bf16" in out
    for given in ((), ("--steps", "4")):  # the second in bfloat16
        code, out, _ = call(LATE, "--lists", "mine.yaml", *given)
        assert code == 0 and "mine.yaml:1" in out
    code, _, err = call(LATE, "--lists", "mine.yaml", "--steps", "1")
    assert code == 1 and "give --steps 4:5" in err
    code, _, err = call(LATE.replace("train(True, 3)", ""), "--lists", "mine.yaml")
    assert code == 1 and "no mixed precision to change" in err


def test_ops_before_an_exception_are_shown_and_the_exception_is_explained(run_command):
    script = """
import torch

model = torch.nn.Linear(4, 4)
with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
    out = model(torch.ones(3, 4))
out.numpy()
"""
    code, out, _ = run_command("explain", script)
    assert code == 1 and "F.linear" in out and "whitelist" in out
    assert "step 0, forward: the script raised TypeError" in out and "out.float() in place of out" in out
