"""Scripts that raise because of dtypes get the call, the origins of its operands, and an edit or a list that works.

Guards: insight/raised, insight/raised_record, insight/raised_text, insight/failing_call, insight/expressions.
Guards: insight/dtype_trials, insight/edits, insight/origins, insight/scaler_errors, insight/module_casts.
Guards: insight/spellings, cli/trace_raised.
"""

import functools
import gc
import linecache
import multiprocessing
import traceback
import types
import warnings

import pytest
import torch
from raising_scripts import HEAD, SCRIPTS, UNRELATED

import amp_patch as amp
from amp_patch import insight, native
from amp_patch.cli import recording as script_recording
from amp_patch.cli.trace_raised import find_entries, merge_entries
from amp_patch.insight.expressions import read_attribute
from amp_patch.insight.module_casts import casts
from amp_patch.insight.raised_record import Operand, OperandOrigin
from amp_patch.insight.raised_text import describe_operand
from amp_patch.interrupts import UndoStack

NAMES = tuple(SCRIPTS)


@pytest.fixture(autouse=True)
def noted_casts():
    undo = UndoStack()
    casts.install(undo)
    yield
    undo.close()
    gc.collect()


@pytest.fixture
def run(tmp_path):
    """Returns a function that runs the text of a script."""
    path = tmp_path / "script.py"

    def run_text(body):
        text = HEAD + body
        path.write_text(text)
        linecache.checkcache(str(path))
        exec(compile(text, str(path), "exec"), {"__name__": "__main__"})

    return run_text


def raise_in(run, body):
    """Return the recording of a script that raises, and the exception."""
    with pytest.raises(Exception) as raised:  # of any class: it is the script's
        insight.trace(lambda: run(body))
    return raised.value


@pytest.mark.parametrize("name", NAMES)
def test_a_report_has_the_cause_the_origins_and_a_remedy(run, name):
    case = SCRIPTS[name]
    recording = insight.trace(lambda: run(case.body), on_fault="record")
    (raised,) = recording.raised
    text = str(recording)
    assert raised.cause == case.cause and (raised.called_from or raised.site).startswith("script.py:")
    assert [told for told in case.told if told not in text] == [], text
    assert raised.entries == ((case.entry,) if case.entry else ())


@pytest.mark.parametrize("name", NAMES)
def test_the_edit_repairs_the_script(run, name):
    before, after = SCRIPTS[name].edit
    body = SCRIPTS[name].body
    assert before in body
    run(body.replace(before, after))


@pytest.mark.parametrize("name", [name for name in NAMES if SCRIPTS[name].entry])
def test_the_line_of_a_list_repairs_the_script(run, name, tmp_path):
    path = tmp_path / "fix.yaml"
    path.write_text(f"extends: autocast-cpu\n{SCRIPTS[name].entry}\n")
    with native.install(lists=[str(path)]):
        run(SCRIPTS[name].body)


@pytest.mark.parametrize("name", UNRELATED)
def test_nothing_is_said_of_other_exceptions(run, name):
    try:
        recording = insight.trace(lambda: run(UNRELATED[name]), on_fault="record")
    except Exception as error:
        assert not getattr(error, "__notes__", [])
    else:
        assert not recording.raised


def test_the_exception_is_the_same_and_the_report_follows_its_traceback(run):
    error = raise_in(run, SCRIPTS["scatter_add"].body)
    assert type(error) is RuntimeError and str(error).startswith("scatter(): Expected self.dtype")
    lines = traceback.format_exception(error)
    assert "the script raised RuntimeError" in lines[-1] or "promote: [scatter_add]" in "".join(lines[-12:])


def test_explain_and_a_recording_explain_it_too(run):
    body = SCRIPTS["numpy"].body
    with pytest.raises(TypeError) as raised:
        insight.explain(lambda: run(body))
    assert "h.float() in place of h" in "".join(raised.value.__notes__)
    with pytest.raises(TypeError), insight.recording() as recording:
        run(body)
    (record,) = recording.raised
    assert record.op == "numpy" and [op.op for op in recording.ops if op.op == "F.linear"]
    assert "F.linear" in str(recording) and "h.float()" in str(recording)
    assert "h.float()" in recording._repr_html_()


def test_a_record_is_read_as_it_was_written(run, tmp_path):
    recording = insight.trace(lambda: run(SCRIPTS["scatter_add"].body), on_fault="record")
    recording.to_jsonl(tmp_path / "raised.jsonl")
    again = insight.Recording.read(tmp_path / "raised.jsonl")
    assert again.raised == recording.raised and str(again) == str(recording)


class Head(torch.nn.Module):
    def forward(self, x):
        return torch.linalg.svd(x.reshape(1, 3, 4))[1]


def _multiply(layer, buffer):
    return torch.mm(layer(torch.randn(3, 4)), torch.eye(4), out=buffer)


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_a_session_names_its_list_and_the_module(level):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), Head())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    buffer = torch.empty(3, 4)
    with torch.no_grad():
        step = functools.partial(_multiply, model[0], buffer)
        recording = insight.trace(step, on_fault="record")
    (raised,) = recording.raised
    assert raised.cause == "mixed dtypes" and "whitelist" in str(raised)


def test_a_session_refuses_a_second_loss_scale():
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    scaler = torch.amp.GradScaler("cpu")

    def step():
        scaler.scale(model(torch.randn(3, 4)).float().mean()).backward()
        scaler.step(optimizer)

    recording = insight.trace(step, on_fault="record")
    assert "amp_patch.initialize is in force at O2" in str(recording)


def test_an_exception_of_a_scaler_is_told_once(run):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        recording = insight.trace(lambda: run(SCRIPTS["unscaled twice"].body), on_fault="record")
    assert len(recording.raised) == 1 and not recording.misuses
    caught = "try:\n    scaler.unscale_(optimizer)\nexcept RuntimeError:\n    pass\n"
    body = SCRIPTS["unscaled twice"].body.replace("scaler.unscale_(optimizer)  # again\n", caught)
    recording = insight.trace(lambda: run(body), on_fault="record")
    assert not recording.raised and [misuse.cause for misuse in recording.misuses] == ["unscale_ twice"]


def _fail(number):
    raise ValueError(number)


def _catch(function, number):
    with pytest.raises(ValueError):
        function(number)


def test_exceptions_of_processes_are_explained(monkeypatch):
    """Also where the function that a process runs catches them, as torch's spawn does."""
    told = []
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "run", multiprocessing.process.BaseProcess.run)
    monkeypatch.setattr(_catch, "__module__", "torch.multiprocessing.spawn")
    script_recording._explain_in_processes(types.SimpleNamespace(note_raised=told.append))
    with pytest.raises(ValueError):
        multiprocessing.Process(target=_fail, args=(1,)).run()
    multiprocessing.Process(target=_catch, args=(_fail, 2)).run()
    assert [error.args for error in told] == [(1,), (2,)]


def test_o2_tells_of_its_weights():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    recording = insight.trace(lambda: torch.randn(3, 4) @ model[0].weight, on_fault="record")
    assert "cast by O2 (cast_model_type)" in str(recording)


def test_trials_leave_tensors_and_random_numbers_as_they_were(run):
    seen = torch.zeros(3, 4)

    def step():
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            seen.index_add_(0, torch.tensor([0, 1, 2]), torch.nn.Linear(4, 4)(torch.randn(3, 4)))

    recording = insight.trace(step, on_fault="record")
    assert recording.raised and not seen.any()
    drawn = torch.rand(1)
    with pytest.raises(RuntimeError):
        step()
    assert torch.rand(1) == drawn


def test_entries_are_merged_by_key():
    assert merge_entries(["promote: [a]", "blacklist: [b]", "promote: [c]", "promote: [a]"]) == [
        "promote: [a, c]",
        "blacklist: [b]",
    ]


def test_a_list_gets_an_entry_for_each_call_that_raises(run):
    bodies = ["scatter_add", "index_add"]
    first, second = [
        insight.trace(lambda name=name: run(SCRIPTS[name].body), on_fault="record").raised[0] for name in bodies
    ]
    tried = []
    left = {("promote: [scatter_add]",): second}
    assert find_entries(first, lambda entries: tried.append(list(entries)) or left.get(tuple(entries))) is None
    assert tried == [["promote: [scatter_add]"], ["promote: [scatter_add, index_add_]"]]


def test_a_gradient_is_not_said_to_be_older_than_the_first_call():
    gradient = Operand("param.grad", "bf16", OperandOrigin.WEIGHT, "the gradient of fc.weight")
    assert describe_operand(gradient) == "param.grad: bfloat16, the gradient of fc.weight"


def test_a_cast_is_named_only_while_the_tensor_has_the_dtype_that_it_gave():
    model = torch.nn.Linear(2, 2).half()
    assert casts.find(model.weight).startswith(".half() at test_raised.py:")
    model.weight = torch.nn.Parameter(torch.zeros(2, 2))
    assert casts.find(model.weight) == ""


class Layer(torch.nn.Linear):
    """A layer of the script, whose `forward` is inherited."""

    calls = 0

    def reset_parameters(self):
        type(self).calls += 1
        super().reset_parameters()


def test_a_method_that_a_class_inherits_is_no_method_of_the_class():
    assert read_attribute(Layer, "forward") is torch.nn.Linear.forward
    layer = Layer(1, 1)
    assert read_attribute(layer, "forward") == layer.forward


def test_a_container_with_a_module_of_the_script_is_not_called_again(run):
    body = """
calls = []

class Block(nn.Module):
    def forward(self, x):
        calls.append(1)
        return x

net = nn.Sequential(Block(), nn.Linear(4, 4))
x = torch.ones(2, 5)
net(x)
"""
    names = {}
    error = raise_in(run, body)
    for frame, _ in traceback.walk_tb(error.__traceback__):
        names |= {"calls": frame.f_globals["calls"]} if "calls" in frame.f_globals else {}
    assert names["calls"] == [1]
