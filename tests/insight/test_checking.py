"""A contract holds for runs that differ in nothing that counts, and names what a change of the script breaks.

Guards: insight/checking/*, insight/numbers_record, insight/op_constants.
"""

import contextlib
import io
import linecache
import runpy
from dataclasses import replace

import pytest
import torch

from amp_patch.errors import RecordError, SessionError
from amp_patch.insight.checking import Contract, Measurer, Question, describe_contract, describe_files, judge
from amp_patch.insight.checking.bands import compare_sketches
from amp_patch.insight.checking.contract import ContractOp
from amp_patch.insight.checking.op_differences import find_differences
from amp_patch.insight.checking.probe import sketch_all
from amp_patch.insight.checking.text import format_verdict
from amp_patch.insight.checking.upgrades import Upgrade
from amp_patch.insight.op_constants import strip_spelling
from amp_patch.insight.recordings import Recording
from amp_patch.insight.records import ComparedRecord, ComparisonRecord, CurveRecord, RunRecord
from amp_patch.insight.runs import FunctionRunner
from amp_patch.script_settings import Settings

AUTOCAST = """
import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=1e-5)
        self.fc = nn.Linear(width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.fc(F.gelu(self.norm(x)))) * 0.5


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(8, 16)
        self.block = Block(16)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.block(self.stem(x)))


net = Net()
nn.init.normal_(net.head.weight, std=0.1)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-8)
for _ in range(10):
    x = torch.randn(16, 8)
    y = x[:, :4].argmax(1)
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
SESSION = """
import torch
from torch import nn
import amp_patch as amp

net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
net, optimizer = amp.initialize(net, optimizer, opt_level="O1", verbosity=0)
criterion = nn.CrossEntropyLoss()
for _ in range(10):
    x = torch.randn(8, 1, 6, 6)
    loss = criterion(net(x), x[:, 0, 0, :3].argmax(1))
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
    optimizer.step()
"""
# two pairs of lines with the same ops, and two models that share one optimizer
ALIKE = """
import torch
from torch import nn

a, b = nn.Linear(4, 4), nn.Linear(4, 4)
optimizer = torch.optim.SGD([*a.parameters(), *b.parameters()], lr=0.1)
for step in range(5):
    x = torch.randn(8, 4)
    with torch.autocast("cpu", torch.bfloat16):
        u = a(x)
        u = (u * 3).pow(2).mean()
        v = b(x).float()
        v = (v * 3).pow(2).mean()
    optimizer.zero_grad()
    (u + v).backward()
    optimizer.step()
"""
# the first two of four steps overflow, and clipping by an infinite norm makes the finite gradients zero
SKIPPING = """
import torch
from torch import nn

torch.manual_seed(3)
net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
optimizer = torch.optim.SGD(net.parameters(), lr=0.001)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, backoff_factor=2.0**-6)
net[0].weight.register_hook(lambda gradient: gradient * 1.0)
for step in range(4):
    x = torch.randn(8, 4)
    with torch.autocast("cpu", torch.float16):
        output = net(x)
    loss = (output.float() * 10).square().mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(net.parameters(), 1000.0)
    scaler.step(optimizer)
    scaler.update()
"""
SCRIPTS = {"autocast": AUTOCAST, "session": SESSION, "alike": ALIKE}
TWO_MODELS = """
import torch
from torch import nn
import amp_patch as amp


def make():
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Tanh())


maker, critic = make(), make()
optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (maker, critic)]
(maker, critic), optimizers = amp.initialize([maker, critic], optimizers, opt_level="O5", verbosity=0)
for _ in range(4):
    fake = maker(torch.randn(8, 4))
    for number, inputs in ((1, fake.detach()), (0, fake)):
        optimizers[number].zero_grad()
        loss = critic(inputs).float().square().mean()
        with amp.scale_loss(loss, optimizers[number]) as scaled_loss:
            scaled_loss.backward()
        optimizers[number].step()
"""


def measurer(path, source):
    """A measurer of a script that runs in this process."""
    path.write_text(source)

    def train():
        linecache.clearcache()
        with contextlib.redirect_stdout(io.StringIO()):
            runpy.run_path(str(path), run_name="__main__")

    question = Question(path.name, Settings(), everywhere=False, lists=(), steps=4, seed=0)
    return Measurer(FunctionRunner(train), question, lambda line: None)


@pytest.fixture(scope="module")
def contracts(tmp_path_factory):
    """The contracts of the scripts, as read from their files."""
    made = {}
    for name, source in SCRIPTS.items():
        folder = tmp_path_factory.mktemp(name)
        measurer(folder / "train.py", source).write().write(folder / "numerics.json")
        made[name] = Contract.read(folder / "numerics.json")
    return made


@pytest.fixture
def check(contracts, tmp_path):
    def check_it(name, old="", new="", more=()):
        source = SCRIPTS[name]
        for before, after in [(old, new), *more]:
            assert before in source
            source = source.replace(before, after) if before else source
        return judge(contracts[name], measurer(tmp_path / "train.py", source).measure_again())

    return check_it


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("threads", [1, 2])
def test_an_unchanged_script_breaks_nothing(name, threads, check):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert check(name).breaks == []
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("name", "old", "new", "kind", "named"),
    [
        ("autocast", "self.norm(x)", "self.norm(x.float())", "cast", "block"),
        ("autocast", "net(x), y", "net(x).float(), y", "cast", "train.py"),
        ("autocast", "eps=1e-5", "eps=1e-6", "constant", "block.norm"),
        ("autocast", "* 0.5", "* 0.51", "constant", "block"),
        ("autocast", "F.gelu(self.norm(x))", "F.gelu(self.norm(x), approximate='tanh')", "constant", "gelu"),
        ("autocast", "std=0.1", "std=0.11", "start", "head"),
        ("autocast", "eps=1e-8", "eps=1e-7", "optimizer", "eps"),
        ("autocast", "net(x), y)", "net(x), y, label_smoothing=0.1)", "constant", "cross_entropy"),
        ("autocast", "F.gelu(", "F.silu(", "ops", "silu"),
        ("session", '"O1"', '"O4"', "precision", "conv2d"),
        ("session", "verbosity=0", "verbosity=0, loss_scale=128.0", "scale", "128"),
        ("session", "BatchNorm2d(4)", "BatchNorm2d(4, momentum=0.2)", "constant", "0.2"),
        ("session", "), 1.0)", "), 0.5)", "constant", "aten.mul: 1 -> 0.5"),
        ("alike", "u * 3", "u * 4", "constant", "aten.mul: 3 -> 4"),
        ("alike", "v * 3", "v * 4", "constant", "train.py:13"),
        ("session", "range(10)", "range(3)", "steps", "took 3 steps, and 4"),
        ("session", "momentum=0.9)", "momentum=0.95)", "optimizer", "momentum"),
    ],
)
def test_a_change_is_named_first(name, old, new, kind, named, check):
    verdict = check(name, old, new)
    first = verdict.breaks[0]
    assert first.kind == kind and named in f"{first.site} {first.text}"


@pytest.mark.parametrize(
    ("name", "old", "new", "more"),
    [
        ("autocast", "self.stem", "self.inner", ()),
        ("autocast", "import torch\n", "import torch\n\n\n", ()),
        (
            "autocast",
            "self.fc = nn.Linear(width, width)",
            "self.mlp = nn.Sequential(nn.Linear(width, width))",
            [("self.fc(", "self.mlp(")],
        ),
        ("session", "nn.ReLU()", "nn.ReLU(inplace=True)", ()),
        (
            "session",
            "nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)",
            "nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4))",
            (),
        ),
        ("session", "nn.Conv2d(1, 4, 3),", "nn.Identity(), nn.Conv2d(1, 4, 3),", ()),
        ("session", "criterion(net(x), ", "torch.nn.functional.cross_entropy(net(x), ", ()),
    ],
)
def test_a_change_that_changes_no_number_breaks_nothing(name, old, new, more, check):
    verdict = check(name, old, new, more)
    assert verdict.breaks == []


def test_ops_that_move_to_another_module_are_no_difference(contracts):
    ops = contracts["autocast"].ops
    renamed = [replace(op, module=f"other.{op.module}", site="") for op in reversed(ops)]
    assert not find_differences(ops, renamed)
    swapped = [replace(op, out=("f32",)) if op.module == "stem" else op for op in ops]
    assert [pair.after.module for pair in find_differences(ops, swapped).moved] == ["stem"]


@pytest.mark.parametrize("added", [0, 3])
@pytest.mark.parametrize(
    ("old", "new", "kinds_by_line"),
    [
        ("a(x)", "a(x).float()", {10: "cast", 11: "precision", 15: "precision"}),
        ("b(x).float()", "b(x)", {12: "cast", 13: "precision", 15: "precision"}),
        ("u * 3", "u.float() * 3", {11: "cast precision", 15: "precision"}),
        ("v * 3", "v * 2", {13: "constant"}),
        ("lr=0.1", "lr=0.2", {}),
    ],
)
def test_only_lines_that_compute_something_else_are_named(added, old, new, kinds_by_line, check):
    breaks = check("alike", old, new, [("import torch\n", "import torch\n" + "\n" * added)]).breaks
    kinds: dict[int, set[str]] = {}
    for broken in breaks:
        if broken.site:
            kinds.setdefault(int(broken.site.rpartition(":")[2]) - added, set()).add(broken.kind)
    assert kinds == {line: set(text.split()) for line, text in kinds_by_line.items()}
    assert "start" not in {broken.kind for broken in breaks}


def test_a_line_that_went_and_a_line_that_came_are_no_pair():
    def call(line, op, dtype):
        return ContractOp("", f"aten.{op}", (dtype,), (dtype,), "", "", f"train.py:{line}", 1)

    before = [call(1, "mul", "f32"), call(2, "exp", "f32"), call(3, "sin", "f32")]
    after = [call(1, "exp", "f32"), call(2, "sin", "f32"), call(3, "mul", "bf16")]
    differences = find_differences(before, after)
    assert (differences.moved, differences.vanished, differences.appeared) == ([], before[:1], after[2:])
    # between the same neighbours, it is the same call
    (pair,) = find_differences(before, [call(1, "cos", "f32"), call(2, "mul", "bf16"), *before[1:]]).moved
    assert pair.after.site == "train.py:2"


def test_a_layer_that_went_from_a_sequential_is_the_only_difference():
    before = [
        ContractOp("2", "aten.relu", ("f32",), ("f32",), "", "", "train.py:1", 1),
        ContractOp("3", "aten.linear", ("f32",), ("f32",), "", "", "train.py:2", 1),
    ]
    after = [replace(before[0], module="3")]  # the number of the second layer is the number of the first now
    differences = find_differences(before, after)
    assert (differences.moved, differences.vanished, differences.appeared) == ([], before[1:], [])
    differences = find_differences(after, before)
    assert (differences.moved, differences.vanished, differences.appeared) == ([], [], before[1:])


def test_a_model_that_joins_later_has_no_first_weights_and_adds_no_ops_of_the_check(tmp_path):
    source = ALIKE.replace("v = b(x).float()", "v = (b if step else a)(x).float()")
    contract = measurer(tmp_path / "train.py", source).measure_again()
    (numbers,) = contract.numbers.values()
    weights = {module.module: bool(module.of_weights) for module in numbers.modules if module.of_output}
    assert weights == {"Linear[0]": True, "Linear[1]": False}
    assert {op.op for op in contract.ops if op.module} == {"F.linear"}


def test_numbers_of_other_hardware_are_not_judged(contracts, check):
    contract = contracts["autocast"]
    (numbers,) = contract.numbers.values()
    moved = Contract(contract.about, contract.optimizers, contract.ops, {"another CPU": numbers})
    verdict = judge(moved, contract)
    assert verdict.holds and "another CPU" in verdict.notes[0]


def test_a_share_of_lost_updates_that_rounds_to_zero_breaks_nothing(contracts):
    contract = contracts["autocast"]
    ((name, numbers),) = contract.numbers.items()
    for kept, holds in ((1.0, True), (0.5, False)):
        hardware = replace(numbers.hardware, kept=kept, kept_worst="weight")
        now = replace(contract, numbers={name: replace(numbers, hardware=hardware)})
        assert judge(contract, now).holds is holds


def test_a_script_that_draws_other_numbers_promises_none(tmp_path):
    source = AUTOCAST.replace(
        "x = torch.randn(16, 8)", "torch.manual_seed(__import__('time').time_ns() % 2**31); x = torch.randn(16, 8)"
    )
    contract = measurer(tmp_path / "train.py", source).write()
    (numbers,) = contract.numbers.values()
    assert "stem" in numbers.hardware.problem and "Seed" in numbers.hardware.problem
    again = measurer(tmp_path / "train.py", source).measure_again()
    assert judge(contract, again).holds and "Seed" in describe_contract(contract)
    # only the ops tell, so other ops are more than a note
    activated = measurer(tmp_path / "train.py", source.replace("F.gelu(", "F.silu(")).measure_again()
    assert [each.kind for each in judge(contract, activated).breaks] == ["ops"]


def test_skipped_steps_hide_no_number_of_the_others(tmp_path):
    contract = measurer(tmp_path / "train.py", SKIPPING).write()
    (numbers,) = contract.numbers.values()
    skipped = numbers.curve("skipped").values
    assert skipped[0] == 1.0 and skipped[-1] == 0.0
    bands = numbers.curve("gradient norm").bands
    assert [band is None for band in bands] == [bool(step) for step in skipped]
    changed = measurer(tmp_path / "train.py", SKIPPING.replace("* 1.0)", "* 1.2)")).measure_again()
    first = judge(contract, changed).breaks[0]
    assert first.kind == "gradient" and "0 (Linear)" in first.text


def test_modules_of_two_models_have_gradients_of_their_own(tmp_path):
    contract = measurer(tmp_path / "train.py", TWO_MODELS).write()
    (numbers,) = contract.numbers.values()
    names = [module.module for module in numbers.modules if module.of_gradient]
    assert names == ["Sequential[0].0", "Sequential[0].1", "Sequential[1].0", "Sequential[1].1"]


def test_curves_break_in_the_order_of_their_steps(contracts):
    contract = contracts["autocast"]
    ((name, numbers),) = contract.numbers.items()
    first_steps = {"loss": 2, "gradient norm": 2, "update norm": 1}
    curves = []
    for curve in numbers.curves:
        start = first_steps.get(curve.name, len(curve.values))
        moved = [value + 1.0 if step >= start else value for step, value in enumerate(curve.values)]
        curves.append(replace(curve, values=tuple(moved)))
    now = replace(contract, numbers={name: replace(numbers, curves=curves)})
    texts = [each.text for each in judge(contract, now).breaks]
    beginnings = ["the update norm of optimizer step 1", "the loss of step 2", "the gradient norm of optimizer step 2"]
    assert [text[: len(start)] for text, start in zip(texts, beginnings, strict=True)] == beginnings


def test_long_promises_are_short_and_wrapped(contracts):
    contract = contracts["autocast"]
    (op, *others) = contract.ops
    long = replace(op, given=("f16",) + ("f32",) * 40, out=("f16",), module=".".join(["layers"] * 12))
    before, after = (replace(contract, ops=[each, *others]) for each in (long, replace(long, out=("f32",))))
    verdict = judge(before, after)
    text = format_verdict(verdict, "numerics.json")
    assert "f16, f32 x 40 -> f16, now" in verdict.breaks[0].text
    assert max(map(len, text.splitlines())) <= 100 and "\n    " in text


def test_an_op_that_leaves_its_list_comes_before_its_effects(contracts):
    contract = contracts["autocast"]
    listed = [replace(op, rule="blacklist", out=("f32",)) if "gelu" in op.op else op for op in contract.ops]
    effects = [replace(op, given=("f64",)) if op.op == "F.linear" else op for op in contract.ops]
    renamed = [replace(op, op="aten.other") if "gelu" in op.op else op for op in effects]
    first = judge(contract, replace(contract, ops=listed)).breaks[0]
    assert first.kind == "precision" and "gelu" in first.text
    first = judge(contract, replace(contract, ops=renamed)).breaks[0]
    assert first.kind == "ops" and "aten.other" in first.text


def test_a_file_that_is_no_contract_is_refused(contracts, tmp_path):
    text = contracts["autocast"].format()
    bad = {
        "cut.json": text[: len(text) // 2],
        "later.json": text.replace('"schema": 1', '"schema": 99'),
        "empty.json": "[]",
        "object.json": "{}",
        "other.json": '[{"kind": "module"}]',
        "deep.json": "[" * 100_000,
        "twice.json": text.replace("[\n", "[\n" + text.splitlines()[1] + "\n", 1),
        "steps.json": text.replace('"steps": 4', '"steps": 0'),
        "setting.json": text.replace('"lr=', '"lr'),
        "band.json": text.replace('"output_band": 0', '"output_band": "nan", "was": 0', 1),
        "sketch.json": text.replace('"of_output": "', '"of_output": "?', 1),
        "head.json": text.splitlines()[0] + text.splitlines()[1].rstrip(",") + "]",
    }
    for name, content in bad.items():
        (tmp_path / name).write_text(content)
        with pytest.raises(RecordError, match=name):
            Contract.read(tmp_path / name)
    with pytest.raises(RecordError):
        Contract.read(tmp_path / "missing.json")


def test_a_contract_survives_its_file(contracts, tmp_path):
    contract = contracts["session"]
    contract.write(tmp_path / "again.json")
    assert Contract.read(tmp_path / "again.json") == contract
    assert describe_files(tmp_path / "again.json", tmp_path / "again.json") == []


def test_contracts_of_two_scripts_differ(contracts, tmp_path):
    for name, contract in contracts.items():
        contract.write(tmp_path / f"{name}.json")
    lines = describe_files(tmp_path / "autocast.json", tmp_path / "session.json")
    assert any("conv2d" in line for line in lines) and any("gelu" in line for line in lines)


def test_settings_differ_once_whatever_the_hardware(contracts, tmp_path):
    contract = contracts["session"]
    (numbers,) = contract.numbers.values()
    elsewhere = {"another": replace(numbers, hardware=replace(numbers.hardware, name="another"))}
    optimizers = [
        replace(record, settings=tuple(text.replace("lr=", "lr=1") for text in record.settings))
        for record in contract.optimizers
    ]
    changed = replace(contract, about=replace(contract.about, seed=5), optimizers=optimizers)
    for before, after in (
        (contract.numbers, elsewhere),
        (contract.numbers | elsewhere, contract.numbers | elsewhere),
    ):
        replace(contract, numbers=before).write(tmp_path / "before.json")
        replace(changed, numbers=after).write(tmp_path / "after.json")
        lines = describe_files(tmp_path / "before.json", tmp_path / "after.json")
        assert lines[0] == "seed: 0 -> 5"
        assert sum(" lr " in line for line in lines) == len(contract.optimizers)


def test_a_training_without_steps_has_no_contract(tmp_path):
    with pytest.raises(SessionError):
        measurer(tmp_path / "train.py", AUTOCAST.replace("    optimizer.step()\n", "")).write()
    with pytest.raises(SessionError, match="two steps"):
        measurer(tmp_path / "train.py", AUTOCAST.replace("range(10)", "range(1)")).write()


def test_settings_of_an_optimizer_with_a_closure_are_promised(tmp_path):
    source = AUTOCAST.replace("optimizer.step()", "optimizer.step(lambda: loss)")
    contract = measurer(tmp_path / "train.py", source).measure_again()
    assert any("eps=1e-08" in record.settings for record in contract.optimizers)


def test_sketches_estimate_norms_and_differences():
    torch.manual_seed(0)
    base, change = torch.randn(10_000), torch.randn(10_000)
    ratios = []
    for _ in range(20):
        change = torch.randn(10_000) * 0.01
        estimate = compare_sketches(sketch_all([base]), sketch_all([base + change]))
        ratios.append(estimate / float(change.norm() / base.norm()))
    assert 0.8 < sum(ratios) / len(ratios) < 1.25
    assert compare_sketches(sketch_all([base]), sketch_all([base])) == 0
    assert sketch_all([torch.empty(0)]) == ()


def test_a_number_that_is_nan_in_both_runs_is_no_difference():
    masked = torch.where(torch.arange(64) < 32, -float("inf"), 1.0)
    assert compare_sketches(sketch_all([masked]), sketch_all([masked])) == 0
    assert compare_sketches(sketch_all([masked]), sketch_all([torch.ones(64)])) == float("inf")


@pytest.mark.parametrize(
    ("spelled", "plain"),
    [
        ("Tensor.__rmul__", "mul"),
        ("aten.mul_", "mul"),
        ("Tensor.__truediv__", "div"),
        ("F.relu_", "relu"),
        ("Tensor.__imatmul__", "matmul"),
        ("aten.rsqrt", "rsqrt"),
        ("torch.index_add", "index_add"),
        ("aten.native_layer_norm", "layer_norm"),
    ],
)
def test_spellings_of_an_op_have_one_name(spelled, plain):
    assert strip_spelling(spelled) == plain


def test_an_upgrade_of_torch_is_named_where_it_explains_an_op():
    op = ContractOp("norm", "F.rms_norm", ("bf16", "f32"), ("f32",), "blacklist", "", "", 1)
    assert "torch 2.12 changed its autocast: unlisted -> blacklist" in Upgrade("2.11.0", "2.13.0+cu1", "cuda").describe(
        op
    )
    assert "lies between" in Upgrade("2.11.0", "2.13.0", "cpu").describe(op)
    assert Upgrade("2.13.0", "2.13.0", "cuda").describe(op) == ""


@pytest.mark.parametrize(("before", "after"), [("nan", "nan"), ("inf", "inf"), ("nan", "1"), ("1", "inf")])
def test_losses_that_are_not_finite_are_equal_only_to_themselves(before, after, tmp_path):
    for name, loss in (("before", before), ("after", after)):
        runs = [CurveRecord("O0", 0, (1.0,) * 9, (1.0,) * 9, (), 1.0)]
        runs.append(CurveRecord("O1", 0, (float(loss),) * 9, (1.0,) * 9, (), 1.0))
        about = [ComparisonRecord("O0", 9, (0,), "a CPU", ""), ComparedRecord("O0"), ComparedRecord("O1")]
        Recording(RunRecord("", "cpu", "O0", "", (), "", 0), [*about, *runs]).to_jsonl(tmp_path / name)
    lines = describe_files(tmp_path / "before", tmp_path / "after")
    assert lines == ([] if before == after else [f"O1: final loss {before} -> {after} (noise 0)"])
