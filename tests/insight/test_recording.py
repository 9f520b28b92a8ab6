"""A recording tells for each op of a step its rule, dtypes, casts and place, and the step is bit by bit the same
without a recording.

Guards: insight/recorder, insight/observe, insight/rules, insight/folding, insight/ops, insight/tensors, insight/naming.
Guards: insight/sites, insight/recordings, insight/records, insight/record_checks, insight/json_values, insight/text.
Guards: insight/display, insight/short_dtypes, events.
"""

import contextlib
import copy
import gc
import json
import math
import os
import pydoc
import re
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from compared import make_op
from gpt import make_gpt
from torch import nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils.flop_counter import FlopCounterMode
from torch_state import VERSION, find_changes
from training import backward

import amp_patch as amp
from amp_patch import events, insight
from amp_patch.config import load_oplists
from amp_patch.events import count_watching_modes
from amp_patch.insight import short_dtypes
from amp_patch.insight.recorder import Recorder
from amp_patch.insight.recordings import Recording
from amp_patch.insight.records import OpRecord, RunRecord
from amp_patch.insight.rules import RuleFinder
from amp_patch.insight.sites import casts_result
from amp_patch.insight.text import fold_layers, merge_steps
from amp_patch.patching import Patcher
from amp_patch.torch_private import count_dispatch_modes

RUN = (
    '{"kind": "run", "torch": "2", "device": "cpu", "opt_level": "O1", "low": "f16", "lists": [], "digest": "",'
    ' "rank": 0, "schema": 1}\n'
)


def initialize(model, level, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)


def train(model, optimizer, steps, seed=0, micro_batches=1):
    losses = []
    for number in range(steps):
        tokens = torch.randint(0, 40, (2, 9), generator=torch.Generator().manual_seed(seed + number))
        optimizer.zero_grad()
        for _ in range(micro_batches):
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            backward(loss, optimizer)
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def forward(recording, op):
    return [record for record in recording.ops if record.phase == "forward" and record.op == op]


def line_of(oplist, op):
    """`file.yaml:line` of what is written of an op in a shipped list."""
    entry = next(one.entry for one in load_oplists(oplist).spellings if one.name == op)
    return f"{entry.path.rpartition('/')[2]}:{entry.line}"


# ---- nothing changes -------------------------------------------------------------------------------------------------


def test_reads_of_the_loss_scale_are_no_ops_of_the_script():
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with insight.recording() as recorded:
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    assert {op.phase for op in recorded.ops} == {"forward", "backward"}


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_recorded_run_is_bitwise_the_plain_one(level):
    def run(block):
        model, optimizer = initialize(make_gpt(), level)
        random = torch.get_rng_state()
        with block:
            losses = train(model, optimizer, 2, micro_batches=2)
        assert torch.equal(torch.get_rng_state(), random)
        state = copy.deepcopy(model.state_dict())
        amp.reset()
        return [losses, *state.values()]

    plain = run(contextlib.nullcontext())
    assert all(map(torch.equal, plain, run(insight.recording())))


def test_a_block_leaves_every_function_as_it_was():
    model, optimizer = initialize(make_gpt(), "O1")
    before = [dict(vars(owner)) for owner in (F, torch.Tensor, torch._C._nn)]
    for _ in range(2):
        with insight.recording():
            train(model, optimizer, 1)
        with pytest.raises(ZeroDivisionError), insight.recording():
            train(model, optimizer, 1)
            raise ZeroDivisionError
        assert [dict(vars(owner)) for owner in (F, torch.Tensor, torch._C._nn)] == before
    amp.reset()
    assert not find_changes()


def test_a_reset_in_a_block_ends_the_recording():
    model, optimizer = initialize(make_gpt(), "O4")
    with insight.recording() as found:
        train(model, optimizer, 1)
        amp.reset()
        assert not find_changes()
        model(torch.zeros(1, 4, dtype=torch.long))
    assert sum(record.calls for record in forward(found, "F.layer_norm")) == 4


def test_a_recording_without_ops_says_so():
    with insight.recording() as recorded:
        pass
    assert "no op of the forward pass was recorded" in insight.format_recording(recorded, with_all=True)


def test_a_cast_in_a_statement_that_is_a_call_is_found(tmp_path):
    path = tmp_path / "script.py"
    path.write_text("if keeps:\n    kept.append(torch.exp(x).half())\n    kept.append(torch.exp(x))\n")
    assert [line for line in (1, 2, 3) if casts_result(str(path), line)] == [2]


def test_blocks_do_not_nest():
    initialize(make_gpt(), "O4")
    with insight.recording(), pytest.raises(amp.SessionError, match="in progress"), insight.recording():
        pass


def test_what_a_module_took_hold_of_in_a_block_is_given_back(tmp_path, monkeypatch):
    (tmp_path / "late_module.py").write_text("from torch.nn.functional import linear\n")
    monkeypatch.syspath_prepend(tmp_path)
    original = F.linear
    initialize(make_gpt(), "O4", compute="native")
    with insight.recording():
        import late_module
    assert late_module.linear is F.linear
    held = F.linear
    amp.reset()
    assert late_module.linear is F.linear is original
    initialize(make_gpt(), "O4", compute="native")
    assert late_module.linear is F.linear is not held
    assert late_module.linear(torch.ones(2, 4), torch.ones(3, 4)).dtype is torch.bfloat16
    del sys.modules["late_module"]


def test_a_cover_that_nobody_finds_calls_what_it_is_around():
    model, _ = initialize(make_gpt(), "O4", compute="native")
    with insight.recording() as found:
        held = [(F.linear,)]
    assert held[0][0](torch.ones(2, 4), torch.ones(3, 4)).dtype is torch.bfloat16
    assert not forward(found, "F.linear")


class Interrupt(BaseException):
    pass


def test_an_interrupt_while_a_block_begins_leaves_nothing(monkeypatch):
    model, optimizer = initialize(make_gpt(layers=1), "O4")
    count, is_op = [], RuleFinder.is_op

    def interrupted(self, *args):
        count.append(1)
        if len(count) == 100:
            raise Interrupt
        return is_op(self, *args)

    monkeypatch.setattr(RuleFinder, "is_op", interrupted)
    before = dict(vars(torch.Tensor))
    with pytest.raises(Interrupt), insight.recording():
        pass
    assert dict(vars(torch.Tensor)) == before and len(count) == 100
    with insight.recording() as found:
        train(model, optimizer, 1)
    assert {record.rule for record in forward(found, "F.linear")} == {"whitelist"}


@pytest.mark.parametrize("after", [1, 200])
def test_an_interrupt_while_a_block_ends_is_finished(after, monkeypatch):
    initialize(make_gpt(layers=1), "O4")
    before, uncover, count = dict(vars(torch.Tensor)), Patcher.uncover, []

    def interrupted(self):
        if not count:
            count.append(1)
            for exchange in self._exchanges[:after]:
                exchange.slot.write(exchange.after)
            raise Interrupt
        return uncover(self)

    monkeypatch.setattr(Patcher, "uncover", interrupted)
    with pytest.raises(Interrupt), insight.recording():
        pass
    assert dict(vars(torch.Tensor)) == before
    with insight.recording():
        pass
    amp.reset()
    assert not find_changes()


@pytest.mark.parametrize("in_thread", [False, True])
def test_a_reset_below_a_mode_of_the_users_leaves_that_alone(in_thread):
    x = torch.ones(8, 8)
    initialize(nn.Linear(8, 8), "O4")
    with insight.recording(), FlopCounterMode(display=False) as counter:
        F.linear(x, x)
        if in_thread:
            thread = threading.Thread(target=amp.reset)
            thread.start()
            thread.join()
        else:
            amp.reset()
        F.linear(x, x)
    assert counter.get_total_flops() == 2 * 2 * 8**3
    assert count_dispatch_modes() == count_watching_modes() == 0
    assert not is_in_torch_dispatch_mode()  # where torch believes that it is in one, it compiles nothing


TRANSFORMS = {
    "vmap": lambda f, x: torch.func.vmap(f)(x),
    "grad": lambda f, x: torch.func.grad(lambda y: f(y).float().sum())(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,))[1],
    "functionalize": lambda f, x: torch.func.functionalize(f)(x),
    "zero tensor": lambda f, x: f(torch._efficientzerotensor(x.shape)),
    "empty": lambda f, x: f(x[:0]),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_tensors_that_have_no_memory_of_their_own_are_recorded(name):
    weight, x = torch.randn(4, 4), torch.randn(3, 4)
    initialize(nn.Linear(4, 4), "O4")
    plain = TRANSFORMS[name](lambda y: F.linear(y, weight), x)
    with insight.recording() as found:
        assert torch.equal(TRANSFORMS[name](lambda y: F.linear(y, weight), x), plain)
        F.softmax(x, dim=-1)
    assert forward(found, "F.linear") and forward(found, "F.softmax")


def test_fake_tensors_and_export_run_in_a_block():
    from torch._subclasses.fake_tensor import FakeTensorMode

    model, _ = initialize(nn.Linear(4, 4), "O4", compute="native")
    with insight.recording():
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert F.linear(torch.empty(2, 4), torch.empty(3, 4)).dtype is torch.bfloat16
        if VERSION > (2, 6):  # whose export does not take hooks that know modules
            torch.export.export(model, (torch.ones(2, 4),))


def test_only_casts_that_would_have_been_are_avoided():
    initialize(nn.Linear(4, 4), "O4", compute="native")
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    with insight.recording() as found:
        torch.mm(a, b, out=torch.empty(4, 4))
    (row,) = forward(found, "torch.mm")
    assert (row.ran, row.casts, row.avoided) == (("f32",), 0, 0)


def test_copies_of_weights_are_no_casts_that_a_later_op_undoes():
    model, _ = initialize(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), "O4", compute="native")
    with insight.recording() as found:
        F.cross_entropy(model(torch.randn(3, 4)), torch.tensor([0, 1, 2]))
    assert [row.casts for row in forward(found, "F.linear")] == [3, 2] and not found.undone


def test_a_forward_without_a_graph_has_no_backward():
    initialize(nn.Linear(4, 4), "O4", compute="native")
    a, b = torch.randn(4, 4), torch.randn(1, 4, requires_grad=True)
    with insight.recording() as found:
        expanded = b.expand(4, 4)
        with torch.no_grad():
            F.linear(a, a)
        (expanded * 1.0).sum().backward()
    assert [record.op for record in found.ops if record.phase == "backward" and record.op == "F.linear"] == []


def test_no_tensor_is_kept():
    model, optimizer = initialize(make_gpt(), "O4")
    train(model, optimizer, 1)

    def count():
        gc.collect()
        return sum(isinstance(one, torch.Tensor) for one in gc.get_objects())

    with insight.recording():
        train(model, optimizer, 1)
        first = count()
        train(model, optimizer, 3)
        assert count() == first


def test_importing_the_package_imports_no_insight(fork_server, tmp_path):
    code = "import sys, amp_patch; amp_patch.initialize; print(any('insight' in name for name in sys.modules))"
    assert fork_server.run("-c", code, cwd=tmp_path).stdout == "False\n"


# ---- what it says ----------------------------------------------------------------------------------------------------


def test_each_op_has_its_rule_line_dtypes_casts_and_place():
    model, optimizer = initialize(make_gpt(layers=2), "O4", compute="native")
    train(model, optimizer, 1)
    with insight.recording() as found:
        train(model, optimizer, 1)
    rows = {(record.module, record.op): record for record in found.ops if record.phase == "forward"}
    qkv = rows["blocks.0.attention.qkv", "F.linear"]
    assert (qkv.rule, qkv.entry) == ("whitelist", line_of("bfloat16", "linear"))
    assert (qkv.given, qkv.ran, qkv.out) == (("f32",) * 3, ("bf16",), ("bf16",))
    assert (qkv.calls, qkv.casts, qkv.avoided) == (1, 3, 0)
    assert qkv.site.startswith("gpt.py:")
    norm = rows["blocks.1.norm", "F.layer_norm"]
    assert (norm.rule, norm.entry, norm.casts) == ("blacklist", line_of("bfloat16", "layer_norm"), 0)
    softmax = rows["blocks.0.attention", "Tensor.softmax"]
    assert (softmax.given, softmax.ran, softmax.out, softmax.casts) == (("bf16",), ("f32",), ("f32",), 1)
    loss = rows["", "F.cross_entropy"]
    assert (loss.given, loss.ran, loss.casts) == (("bf16", "i64"), ("f32",), 1)
    assert loss.site.startswith("test_recording.py:")
    unlisted = rows["blocks.0", "aten.gelu"]
    assert (unlisted.rule, unlisted.entry, unlisted.ran) == ("", "", ("bf16",))
    undone = {(one.module, one.producer, one.consumer, one.outside, one.between): one.calls for one in found.undone}
    assert undone["blocks.0.attention", "Tensor.softmax", "Tensor.__matmul__", "bf16", "f32"] == 1


def test_casts_of_the_recorded_step_are_those_that_torch_dispatches():
    """Counted once more, by a mode of our own that knows nothing of ops, rules and calls."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):
        casts = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if func.overloadpacket is torch.ops.aten._to_copy and args[0].is_floating_point():
                self.casts += result.is_floating_point() and result.dtype is not args[0].dtype
            return result

    model, optimizer = initialize(make_gpt(layers=3), "O4")
    train(model, optimizer, 1)
    with insight.recording() as found:
        train(model, optimizer, 1, seed=7)
    with Counting() as counting:
        train(model, optimizer, 1, seed=7)
    assert sum(record.casts for record in found.ops) == counting.casts > 30


def test_casts_that_a_copy_made_needless_are_avoided():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(256, 256, bias=False)

        def forward(self, x):
            return self.inner(self.inner(x))

    model, _ = initialize(Twice(), "O4", compute="native")
    with insight.recording() as found:
        model(torch.ones(2, 256))
    first, second = forward(found, "F.linear")
    assert (first.given, first.casts, first.avoided) == (("f32", "f32"), 2, 0)
    assert (second.given, second.casts, second.avoided) == (("bf16", "f32"), 0, 1)


def test_ops_of_the_backward_pass_are_told_to_the_call_that_they_are_of():
    model, optimizer = initialize(make_gpt(layers=1), "O4")
    with insight.recording() as found:
        train(model, optimizer, 1)
    backward = [record for record in found.ops if record.phase == "backward"]
    of_calls = [record for record in backward if not record.op.startswith("aten.")]
    listed = {"F.linear", "F.layer_norm", "Tensor.__matmul__", "Tensor.softmax", "F.cross_entropy"}
    assert {record.op for record in of_calls} == listed
    head = [record for record in of_calls if record.module == "head"]
    assert sum(record.calls for record in head if record.ran == ("bf16",)) >= 3  # two products and a sum
    assert {record.site for record in head} == {forward(found, "F.linear")[-1].site}


def test_models_that_are_cast_say_what_kept_a_module_in_its_dtype(tmp_path):
    path = tmp_path / "my.yaml"
    path.write_text("extends: null\nmodules:\n  - {match: last, run: float32}\n")
    model = nn.Sequential()
    for name, part in {"first": nn.Linear(4, 4), "norm": nn.BatchNorm1d(4), "last": nn.Linear(4, 2)}.items():
        model.add_module(name, part)
    model, optimizer = initialize(model, "O5", lists=str(path), compute="native")
    with insight.recording() as found:
        backward(model(torch.ones(3, 4)).sum(), optimizer)
        optimizer.step()
    rules = {
        record.module: (record.rule, record.entry)
        for record in found.ops
        if record.phase == "forward" and record.op in ("aten.addmm", "aten.native_batch_norm", "F.linear")
    }
    assert rules == {
        "first": ("cast_model_type", "O5"),
        "norm": ("keep_batchnorm_fp32", "O5"),
        "last": ("run: float32", "my.yaml:3"),
    }
    borders = [record for record in found.ops if record.rule == "border of the cast"]
    assert {(record.module, record.given, record.out) for record in borders} >= {("last", ("bf16",), ("f32",))}


def test_a_region_is_told_with_the_line_of_its_module_rule(tmp_path):
    path = tmp_path / "my.yaml"
    path.write_text("extends: bfloat16\nmodules:\n  - {match: blocks.*.attention, run: float32}\n")
    model, optimizer = initialize(make_gpt(layers=1), "O4", lists=str(path))
    with insight.recording() as found:
        train(model, optimizer, 1)
    (row,) = [record for record in forward(found, "F.linear") if record.module == "blocks.0.attention.qkv"]
    assert (row.region, row.rule, row.entry, row.ran) == ("float32", "run: float32", "my.yaml:3", ("f32",))
    unlisted = [record for record in found.ops if record.op == "aten.div" and record.module == "blocks.0.attention"]
    assert unlisted and all((one.rule, one.entry) == ("run: float32", "my.yaml:3") for one in unlisted)
    with insight.recording() as found, amp.disable_casts():
        model(torch.zeros(1, 4, dtype=torch.long))
    assert {(record.region, record.ran) for record in forward(found, "F.linear")} == {("off", ("f32",))}


def test_modules_of_several_models_have_the_name_of_their_model():
    class Generator(nn.Linear):
        pass

    class Critic(nn.Linear):
        pass

    models, _ = amp.initialize(
        [Generator(2, 2), Critic(2, 1)], torch.optim.SGD([torch.zeros(1)], lr=1.0), opt_level="O4", verbosity=0
    )
    with insight.recording() as found:
        models[1](models[0](torch.ones(1, 2)))
    assert [record.module for record in forward(found, "F.linear")] == ["Generator", "Critic"]
    assert "(Generator, Critic)" in str(found)  # the legend says what names begin with


def test_listed_ops_of_other_threads_are_recorded():
    model, _ = initialize(make_gpt(layers=1), "O4", compute="native")
    with insight.recording() as found:
        thread = threading.Thread(target=lambda: model(torch.zeros(1, 4, dtype=torch.long)))
        thread.start()
        thread.join()
    rows = {record.module: record for record in forward(found, "F.linear")}
    assert rows["head"].ran == ("bf16",) and rows["head"].casts == 3


def test_originals_are_compiled_by_torchscript_in_a_block():
    initialize(make_gpt(layers=1), "O4")

    def act(x: torch.Tensor) -> torch.Tensor:
        return F.softmax(x, dim=-1)

    with insight.recording():
        scripted = torch.jit.script(act)
        held = F.softmax
        torch.jit.script(act)
        assert F.softmax is held
    assert torch.equal(scripted(torch.ones(3)), torch.full((3,), 1 / 3))


def test_a_recorder_of_later_steps_follows_a_session_after_another():
    """As `amp-patch explain` has it, in a script that calls initialize twice."""
    ended = []
    recorder = Recorder(2, 3, lambda: ended.append(True))
    stop = events.watch(recorder)
    try:
        train(*initialize(make_gpt(layers=1), "O4"), 1)
        assert not recorder.is_recording
        amp.reset()
        model, optimizer = initialize(make_gpt(layers=1), "O1")
        train(model, optimizer, 1)
        assert recorder.is_recording and not ended
        train(model, optimizer, 2)
        assert not recorder.is_recording and ended == [True]
    finally:
        stop()
    assert (recorder.recording.run.opt_level, len(recorder.recording.steps)) == ("O1", 1)


def test_explain_warms_up_and_records():
    model, optimizer = initialize(make_gpt(layers=1), "O2")
    found = insight.explain(lambda: train(model, optimizer, 1), steps=2, warmup=1)
    assert [step.step for step in found.steps] == [0, 1]
    assert {record.step for record in found.ops if record.module == "head"} == {0, 1}
    assert amp.stats().steps + amp.stats().steps_skipped == 3
    assert [step.skipped for step in found.steps] == [False, False]


@pytest.mark.parametrize("look", [insight.explain, insight.trace])
def test_a_function_that_is_not_one_step_is_refused(look):
    def start():
        train(*initialize(make_gpt(layers=1), "O4"), 1)

    for is_in_session in (False, True):
        with pytest.raises(amp.SessionError, match="there is nothing to record: pass a function that trains"):
            look(lambda: None)
        if not is_in_session:
            start()
    gc.collect()  # the model of the session is gone, so that the next call of initialize ends it
    with pytest.raises(amp.SessionError, match="ended the session.* insight.compare and insight.tune take"):
        look(start)


def test_a_star_stands_for_numbers_that_differ_alone():
    layers = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)))
    initialize(layers, "O4")
    with insight.recording() as found:
        layers(torch.ones(2, 8))
    rows = [line.split()[:2] for line in str(found).splitlines() if "F.linear" in line]
    assert rows == [["0", "F.linear"], ["1.*", "F.linear"]]


def test_print_shows_what_the_commands_show():
    model, optimizer = initialize(make_gpt(layers=1), "O4")
    found = insight.explain(lambda: train(model, optimizer, 1))
    assert str(found) == insight.format_recording(found)
    assert len(repr(found)) < 200 and "bf16 on cpu" in repr(found)
    traced = insight.trace(lambda: train(model, optimizer, 1), steps=2)
    assert "every value fits, in 2 steps" in str(traced) and "every value fits" in repr(traced)
    assert "every value fits, in 2 steps" in traced._repr_html_()
    with torch.no_grad():
        model.head.weight.fill_(math.inf)
    faulty = insight.trace(lambda: train(model, optimizer, 1), on_fault="record")
    (fault,) = faulty.of(insight.FaultRecord)
    assert insight.format_fault(fault, faulty.run) in str(faulty) and str(fault) == insight.format_fault(fault, None)


@pytest.mark.parametrize("short", ["f16", "bf16"])
def test_the_limits_of_a_dtype_in_records_are_those_of_torch(short):
    dtype = getattr(torch, short_dtypes.spell_out(short))
    tiny, next_number = short_dtypes.TINY[short], short_dtypes.TINY[short] * (1 + 2**-10)
    assert (short_dtypes.LARGEST[short], short_dtypes.EPS[short]) == (torch.finfo(dtype).max, torch.finfo(dtype).eps)
    assert torch.tensor([tiny, next_number], dtype=torch.float64).to(dtype).ne(0).tolist() == [False, True]


@pytest.mark.parametrize(("size", "found"), [("4", 3), ("1", 0)])
def test_the_rank_is_what_a_launcher_says_if_it_says_one(size, found, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", size)
    initialize(nn.Linear(2, 2), "O4")
    with insight.recording() as recording:
        pass
    assert recording.run.rank == found


def test_help_of_a_patched_op_says_by_which_line():
    before = F.softmax.__doc__
    initialize(make_gpt(layers=1), "O4")
    found = pydoc.render_doc(F.softmax, renderer=pydoc.plaintext)
    assert "Apply a softmax function." in found
    assert "Patched by amp_patch until amp_patch.reset(): blacklist, " in found
    assert f"{line_of('bfloat16', 'softmax')}:" in found
    assert "Patched by amp_patch" in torch.Tensor.__matmul__.__doc__
    amp.reset()
    assert F.softmax.__doc__ is before


# ---- files and text --------------------------------------------------------------------------------------------------


def test_a_file_is_read_as_it_was_written(tmp_path):
    model, optimizer = initialize(make_gpt(layers=1), "O1")
    with insight.recording() as found:
        train(model, optimizer, 2)
    path = tmp_path / "rec.jsonl"
    found.to_jsonl(path)
    assert insight.Recording.read(path) == found
    text, number = path.read_text(), len(found.records)
    path.write_text(
        text.replace(f'"records": {number}', f'"records": {number + 1}') + '{"kind": "of a later version", "x": 1}\n'
    )
    assert insight.Recording.read(path) == found
    path.write_text(re.sub(f', "records": {number}', "", text))  # as earlier versions wrote it
    assert insight.Recording.read(path) == found


def test_a_part_of_a_recording_is_not_read_as_the_whole(tmp_path):
    initialize(nn.Linear(4, 4), "O1")
    with insight.recording() as found:
        F.linear(torch.ones(2, 4), torch.ones(4, 4))
    path = tmp_path / "rec.jsonl"
    lines = found.format().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]))
    with pytest.raises(amp.RecordError, match=f"{len(lines) - 2} of {len(lines) - 1} records"):
        insight.Recording.read(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no record of kind 'run'"),
        ("not json\n", r"rec\.jsonl:1: not a line of a recording"),
        ('{"kind": "op", "step": 1}\n', r"rec\.jsonl:1: not a line of a recording"),
        ('{"kind": "run", "torch": 3}\n', r"rec\.jsonl:1: not a line of a recording"),
        (RUN.replace('"schema": 1', '"schema": 99'), "schema 99 is newer than"),
        (RUN.replace('"torch": "2"', '"torch": 2'), "torch is 2"),
    ],
)
def test_what_is_no_recording_is_refused_with_its_line(text, message, tmp_path):
    path = tmp_path / "rec.jsonl"
    path.write_text(text)
    with pytest.raises(amp.RecordError, match=message):
        insight.Recording.read(path)


GRADIENTS = '{"kind": "gradients", "run": "O0", "lowest": 0, "counts": [1, 2, 3, 4], "zeros": 0, "nonfinite": 0}\n'
COMPARED = RUN + '{"kind": "compared", "run": "O0"}\n' + GRADIENTS
ABOUT = '{"kind": "comparison", "reference": "O0", "steps": 1, "seeds": [0], "machine": "", "command": ""}\n'
CURVE = '{"kind": "curve", "run": "O0", "seed": 0, "losses": [1.0], "scales": [1.0], "skipped": [], "ms": 1.0}\n'
COMPARISON = COMPARED + ABOUT + CURVE


@pytest.mark.parametrize(
    ("written", "instead"),
    [
        ('"counts": [1, 2, 3, 4]', '"counts": [1, "2", 3, 4]'),
        ('"counts": [1, 2, 3, 4]', '"counts": [1, true, 3, 4]'),
        ('"counts": [1, 2, 3, 4]', '"counts": [1, 2, 3]'),
        ('"lowest": 0', '"lowest": 2000000000'),
        ('"losses": [1.0]', f'"losses": [{10**400}]'),
        ('"losses": [1.0]', '"losses": [1.0, 2.0]'),
        ('"losses": [1.0]', '"losses": ' + "[" * 100_000 + "]" * 100_000),
        ('"seeds": [0]', '"seeds": []'),
        ('"reference": "O0"', '"reference": "O1"'),
        ('"kind": "compared"', '"kind": ["compared"]'),
        (ABOUT, ABOUT + ABOUT),
        (RUN, "[]\n"),
    ],
)
def test_a_file_whose_values_contradict_each_other_is_refused(written, instead, tmp_path):
    path = tmp_path / "rec.jsonl"
    path.write_text(COMPARISON)
    assert "O0" in str(insight.Recording.read(path))
    assert COMPARISON.count(written) == 1
    path.write_text(COMPARISON.replace(written, instead))
    with pytest.raises(amp.RecordError, match=r"rec\.jsonl"):
        insight.Recording.read(path)


def test_nothing_in_a_file_reaches_a_terminal_as_a_command(tmp_path):
    path = tmp_path / "rec.jsonl"
    path.write_text(COMPARISON.replace('"O0"', json.dumps("O0\x1b[2J\x9b31m\u202e\ud800")))
    found = insight.Recording.read(path)
    for text in (str(found), repr(found), found._repr_html_(), found.format()):
        assert text.encode() and not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", text)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes with names")
def test_a_file_without_an_end_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zeros").touch()
    os.truncate(tmp_path / "zeros", 1 << 40)
    for path in (tmp_path / "pipe", Path(os.devnull), tmp_path / "zeros"):
        with pytest.raises(amp.RecordError):
            insight.Recording.read(path)


def test_equal_layers_are_one_row_unless_all_are_asked_for():
    model, optimizer = initialize(make_gpt(layers=2), "O4")
    found = insight.explain(lambda: train(model, optimizer, 1))
    folded = insight.format_recording(found)
    assert "blocks.*.attention.qkv" in folded and "blocks.0." not in folded
    assert "casts that undo each other:" in folded
    unfolded = insight.format_recording(found, with_all=True)
    assert "blocks.0.attention.qkv" in unfolded and "blocks.1.attention.qkv" in unfolded
    (row,) = [line for line in insight.format_recording(found, "op").splitlines() if line.startswith("F.linear ")]
    calls, casts, avoided = map(int, row.split()[-3:])
    records = forward(found, "F.linear")
    assert (calls, casts, avoided) == (len(records), sum(one.casts for one in records), 0)
    assert line_of("bfloat16", "linear") in insight.format_recording(found, "entry")


def test_a_table_of_a_width_has_long_names_above_their_rows():
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.a_module_with_a_long_name = nn.ModuleDict({"and_one_that_is_long_as_well": make_gpt(layers=1)})

        def forward(self, *inputs):
            return self.a_module_with_a_long_name["and_one_that_is_long_as_well"](*inputs)

    model, optimizer = initialize(Wrapper(), "O4")
    found = insight.explain(lambda: train(model, optimizer, 1))
    narrow = insight.format_recording(found, with_all=True, width=100).splitlines()
    assert max(len(line) for line in narrow[: narrow.index("", 2)]) <= 100
    wide = insight.format_recording(found, with_all=True).splitlines()
    names = {line.split("  ")[0] for line in wide[4 : wide.index("", 4)]}
    assert len(names) > 9 and names <= set(narrow)
    narrowest = insight.format_recording(found, with_all=True, width=60)
    assert "columns left out" in narrowest and "line: of" not in narrowest  # a note about a column that is not there


def test_a_narrow_table_keeps_the_line_that_decided_in_a_list_of_ones_own():
    given = ("bf16", "f32", "f32")
    own = ("forward", "up.conv1", "conv2d", "run: float32", "own.yaml:3", "float32")
    shipped = ("forward", "up.conv2", "F.binary_cross_entropy", "border of the cast", "autocast-cpu.yaml:171", "")
    rows = [
        OpRecord(0, *own, given, given, given, "model.py:19"),
        OpRecord(0, *shipped, given, given, given, "a_model.py:1900"),
    ]
    found = Recording(RunRecord("", "cpu", "O4", "bf16", (), "", 0), rows)
    narrow = insight.format_recording(found, width=100)
    assert max(map(len, narrow.splitlines())) <= 100
    assert re.search(r"run: float32 +own.yaml:3 ", narrow) and "autocast-cpu:171" in narrow
    for width in (60, 70, 80, 90):
        left_out = re.search("left out.*: (.*);", insight.format_recording(found, width=width))[1].split(", ")
        assert "line" not in left_out or left_out[-1] == "line"


def test_an_assignment_by_index_is_shown_where_it_casts():
    model, _ = initialize(nn.Linear(4, 4), "O4")

    def fill():
        x, index = torch.zeros(4, 4), torch.tensor([0, 2])
        x[0] = 1.0
        x[:, 1] = torch.ones(4)
        x[index] = model(torch.ones(2, 4))

    found = insight.explain(fill)
    is_assignment = re.compile(r"Tensor\.__setitem__ +match_self")
    assert len(is_assignment.findall(insight.format_recording(found))) == 1
    assert len(is_assignment.findall(insight.format_recording(found, with_all=True))) == 3


def test_counts_of_steps_and_of_equal_layers_are_added():
    """Each of these ops has 3 calls and 2 casts. A row shows no constants."""
    of_steps = list(merge_steps(replace(make_op("fc"), step=step, constants=(str(step),)) for step in (1, 2)))
    assert [(op.calls, op.casts) for op in of_steps] == [(6, 4)]
    layers = (replace(make_op(f"layers.{number}.fc"), constants=(str(number),)) for number in range(3))
    of_layers = list(fold_layers(layers))
    assert [(op.module, op.calls, op.casts) for op in of_layers] == [("layers.*.fc", 9, 6)]
