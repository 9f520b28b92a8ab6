"""Whole scripts written for Apex, run unmodified by `amp-patch run`, train as over plain torch and over amp_patch
itself.

The references run in this process: the source of the script with another module in the place of `apex.amp`.

Guards: apex/amp/*, apex/parallel/*, apex/_finder.
"""

import contextlib
import runpy
import socket
import sys
import types
from pathlib import Path

import pytest
import torch
from apex_training import state_of_a_new_process  # noqa: F401 - a fixture
from fork_server import ForkServer

import amp_patch
import amp_patch.apex

SCRIPTS = Path(__file__).resolve().parent.parent / "support" / "scripts"
ROOT = SCRIPTS.parent.parent.parent

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("scripts")]  # one server for all

AS_APEX = """
O1: {extends: O1, patch_torch_functions_type: float16, lists: apex}
O2: {extends: O2, cast_model_type: float16}
"""

PLAIN = types.ModuleType("plain_amp")
PLAIN.initialize = lambda models, optimizers, **options: (models, optimizers)
PLAIN.scale_loss = lambda loss, optimizers, **options: contextlib.nullcontext(loss)
PLAIN.master_params = amp_patch.master_params
PLAIN.state_dict = dict
PLAIN.load_state_dict = lambda state: None


@pytest.fixture(scope="module")
def server():
    """Runs commands where all is imported that training imports."""
    server = ForkServer("import torch, torch._dynamo, torch.distributed, wrapt, yaml")
    yield server
    server.close()


def run_script(server, name, *arguments, cwd):
    done = server.run("-m", "amp_patch", "run", SCRIPTS / name, *arguments, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_ranks(server, name, *arguments, cwd):
    """Two processes with the variables that torchrun sets."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(probe.getsockname()[1]), "WORLD_SIZE": "2"}
    environments = [{**address, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in (0, 1)]
    command = ["-m", "amp_patch", "run", SCRIPTS / name, *arguments]
    ranks = server.run_together([command] * 2, cwd=cwd, environments=environments)
    for done in ranks:
        assert done.returncode == 0, done.stderr
    return "".join(done.stdout for done in ranks), [torch.load(cwd / f"out.pt.{rank}") for rank in (0, 1)]


def run_here(name, module, *arguments, cwd, monkeypatch):
    """Run a script in this process; with `module` as its amp, unless that is "apex"."""
    source = (SCRIPTS / name).read_text()
    if module != "apex":
        unmodified = source
        source = source.replace(
            "from apex import amp, optimizers", f"import {module} as amp; from apex import optimizers", 1
        )
        source = source.replace("from apex import amp\n", f"import {module} as amp\n", 1)
        assert source != unmodified
    (cwd / name).write_text(source)
    monkeypatch.chdir(cwd)
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    monkeypatch.setitem(sys.modules, "plain_amp", PLAIN)
    # torch's own test helpers, which other test modules import, forbid scripts to set flags such as
    # torch.backends.cudnn.benchmark
    monkeypatch.setitem(torch.backends.flags_frozen.__globals__, "__allow_nonbracketed_mutation_flag", True)
    monkeypatch.setattr(
        amp_patch, "_amp_state", amp_patch.apex.amp._amp_state, raising=False
    )  # it looks at the session, whoever opened that
    if module == "amp_patch":
        (cwd / "presets.yaml").write_text(AS_APEX)
        monkeypatch.setenv("AMP_PATCH_PRESETS", str(cwd / "presets.yaml"))
    with amp_patch.apex.install():
        runpy.run_path(name, run_name="__main__")
    amp_patch.reset()


def assert_same(left, right):
    """Bitwise, through dicts, lists and tuples."""
    if isinstance(left, dict):
        assert left.keys() == right.keys() and left
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right) > 0
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    else:
        assert (
            torch.equal(left, right)
            if isinstance(left, torch.Tensor)
            else left == right or left != left and right != right
        )


OUT = {"imagenet.py": "out.pt.0", "dcgan.py": "out.pt", "bert.py": "out.pt"}
ARGUMENTS = {"imagenet.py": ["--opt-level"], "dcgan.py": ["--opt_level"], "bert.py": ["--fp16", "--opt_level"]}


@pytest.mark.parametrize(
    ("name", "level"),
    [("imagenet.py", "O0"), *((name, level) for name in OUT for level in ("O1", "O2"))],
)
def test_a_script_trains_as_over_plain_torch_or_amp_patch(name, level, tmp_path, monkeypatch, capsys, server):
    """O0 is compared with plain torch, O1 and O2 with amp_patch in float16 with the list `apex`.

    O2 runs by the command, the others in-process.
    """
    ours, here = tmp_path / "ours", tmp_path / "here"
    ours.mkdir()
    here.mkdir()
    arguments = [*ARGUMENTS[name], level]
    if level == "O2":
        said = run_script(server, name, *arguments, cwd=ours)
    else:
        run_here(name, "apex", *arguments, cwd=ours, monkeypatch=monkeypatch)
        said = capsys.readouterr().out
    assert f"opt_level {level}" in said and ("Gradient overflow." in said) is (name == "bert.py" and level != "O0")
    if level == "O0":
        arguments = [argument for argument in arguments if argument != "--fp16"]
    run_here(name, "plain_amp" if level == "O0" else "amp_patch", *arguments, cwd=here, monkeypatch=monkeypatch)
    results = [torch.load(folder / OUT[name]) for folder in (ours, here)]
    if level == "O0":
        for result in results:
            result.pop("amp", None)
            result["losses"] = [
                row[:2] if isinstance(row, tuple) else row for row in result["losses"]
            ]  # the third is the loss scale
    assert_same(*results)


RESUMING = {
    "imagenet.py": (
        ["--opt-level", "O2", "--loss-scale", "128.0", "--keep-batchnorm-fp32=True"],
        ["--epochs", "1"],
        "--resume=checkpoint.pth.tar",
    ),
    "bert.py": (["--fp16", "--optimizer", "adam"], ["--max_steps", "3"], "--resume_from_checkpoint=ckpt.pt"),
}


@pytest.mark.parametrize("name", RESUMING)
def test_a_script_resumes_bitwise_in_another_process(name, tmp_path, monkeypatch, server):
    arguments, first, resume = RESUMING[name]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    run_here(name, "apex", *arguments, cwd=whole, monkeypatch=monkeypatch)
    run_here(name, "apex", *arguments, *first, cwd=parts, monkeypatch=monkeypatch)
    run_script(server, name, *arguments, resume, cwd=parts)
    results = [torch.load(folder / OUT[name]) for folder in (whole, parts)]
    losses = [result.pop("losses") for result in results]
    assert_same(losses[0][-len(losses[1]) :], losses[1])
    assert_same(*results)


# ---- two processes ---------------------------------------------------------------------------------------------------


def test_two_processes_train_as_one(tmp_path, monkeypatch, server):
    _, results = run_ranks(server, "distributed.py", "--opt-level", "O0", cwd=tmp_path)
    assert_same(results[0]["weights"], results[1]["weights"])
    here = tmp_path / "here"
    here.mkdir()
    run_here("distributed.py", "plain_amp", "--opt-level", "O0", cwd=here, monkeypatch=monkeypatch)
    one = torch.load(here / "out.pt.0")
    mean = [sum(pair) / 2 for pair in zip(*(result["losses"] for result in results), strict=True)]
    torch.testing.assert_close(mean, one["losses"])
    torch.testing.assert_close(results[0]["weights"], one["weights"])


def test_an_overflow_on_one_rank_skips_the_step_on_both(tmp_path, server):
    said, results = run_ranks(server, "distributed.py", "--opt-level", "O2", "--overflow-at", "2", cwd=tmp_path)
    assert [result["skipped"] for result in results] == [[False, False, True, False]] * 2
    assert [result["amp"]["loss_scaler0"] for result in results] == [{"loss_scale": 32768.0, "unskipped": 1}] * 2
    assert said.count("Gradient overflow.") == 1 and said.count("opt_level O2") == 1
    assert_same(results[0]["weights"], results[1]["weights"])


def test_the_classic_script_on_two_ranks(tmp_path, server):
    said, results = run_ranks(server, "imagenet.py", "--opt-level", "O1", "--sync_bn", "--epochs", "1", cwd=tmp_path)
    assert "using apex synced BN" in said
    assert_same(results[0]["weights"], results[1]["weights"])
    assert results[0]["losses"] != results[1]["losses"]
