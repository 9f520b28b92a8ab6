"""The first value that does not fit: that it is found, at the op that made it, with its cause and what came of it."""

import math

import numpy
import pytest
import torch
import yaml
from gpt import make_gpt
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from training import backward, take_step

import amp_patch as amp
from amp_patch import NonFiniteError, insight
from amp_patch.insight.records import FaultRecord, RunRecord
from amp_patch.insight.remedies import Remedy, format_entries

RUN = RunRecord(torch.__version__, "cpu", "O1", "f16", (), "", 0)


class Sandwich(nn.Module):
    """Two linear layers with something in between."""

    def __init__(self, between, width=16, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(width, width)
        self.between = between
        self.last = nn.Linear(width, 1)

    def forward(self, x):
        return self.last(self.between(self.first(x)))


class Call(nn.Module):
    """A module that calls a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Norm(nn.Module):
    """A norm as people write it: squares, their mean, and the root."""

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def start(model, compute_loss, *, level="O1", loss_scale=128.0, **options):
    """Bring a model under a level and return a function that trains it for a step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=loss_scale, verbosity=0, **options)
    return lambda: take_step(compute_loss(), optimizer)


def make_step(model, *, inputs=None, factor=1.0, seed=1, **options):
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(seed)) if inputs is None else inputs
    return start(model, lambda: model(x).float().square().mean() * factor, **options)


def make_gpt_step(model, **options):
    tokens = torch.randint(0, 40, (2, 8), generator=torch.Generator().manual_seed(1))
    return start(model, lambda: F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()), **options)


def find(step, **options):
    """All faults of at most three steps."""
    recording = insight.trace(step, steps=3, on_fault="record", **options)
    return recording.of(insight.FaultRecord)


def enlarge(parameter, factor):
    with torch.no_grad():
        parameter.mul_(factor)


pytestmark = pytest.mark.filterwarnings("ignore:non-finite gradients")  # which are made on purpose


# ---- nothing to find -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_a_clean_run_has_no_fault_though_its_mask_is_infinite(level):
    assert find(make_gpt_step(make_gpt(), level=level)) == []


@pytest.mark.parametrize(
    "mask",
    [
        lambda x: x.masked_fill(x > 0, -math.inf),
        lambda x: torch.where(x > 0, -math.inf, x),
        lambda x: x + torch.full((8, 16), -math.inf).triu(1),
        lambda x: x + torch.zeros_like(x).masked_fill_(x > 0, float("-inf")),
        lambda x: x.clamp(max=math.inf) + torch.tensor(-math.inf).exp(),
    ],
    ids=["masked_fill", "where", "full", "masked_fill_", "constant"],
)
def test_what_is_infinite_by_intention_is_no_fault(mask):
    def attend(x):
        return torch.softmax(torch.cat([mask(x), torch.zeros_like(x)], -1), -1)[..., :16]

    assert find(make_step(Sandwich(Call(attend)))) == []


class Masked(nn.Module):
    """Attention scores with -inf beyond the fourth column, by a buffer or by a parameter."""

    def __init__(self, is_buffer):
        super().__init__()
        mask = torch.zeros(16).masked_fill(torch.arange(16) > 3, -math.inf)
        if is_buffer:
            self.register_buffer("mask", mask)
        else:
            self.mask = nn.Parameter(mask)

    def forward(self, x):
        return torch.softmax(x + self.mask, -1)


def test_a_mask_that_is_a_buffer_is_no_fault_and_a_parameter_of_that_kind_is():
    assert find(make_step(Sandwich(Masked(is_buffer=True)))) == []
    amp.reset()
    (fault,) = find(make_step(Sandwich(Masked(is_buffer=False))))
    assert (fault.cause, fault.parameter) == ("came in", "between.mask")


def test_a_row_that_is_masked_all_over_is_mathematics():
    def attend(x):
        return torch.softmax(x.masked_fill(torch.ones_like(x, dtype=torch.bool), -math.inf), -1)

    (fault,) = find(make_step(Sandwich(Call(attend))))
    assert (fault.op, fault.cause, fault.value) == ("torch.softmax", "mathematics", "nan")


@pytest.mark.parametrize("number", [math.inf, math.nan])
def test_a_trail_of_what_is_not_finite_is_written_and_read_and_told(number, tmp_path):
    fault = FaultRecord(
        0, "forward", "nan", "mathematics", aten="softmax", trail=(("masked_fill", number), ("mm", 2.0))
    )
    recording = insight.Recording(RunRecord("", "cpu", "O1", "f16", (), "", 0), [fault])
    recording.to_jsonl(tmp_path / "faults.jsonl")
    again = insight.Recording.read(tmp_path / "faults.jsonl")
    (read,) = again.of(FaultRecord)
    assert repr(read.trail) == repr(fault.trail)
    assert insight.format_fault(read, again.run) == insight.format_fault(fault, again.run)


def log_of_mask(x):
    return torch.softmax(x + torch.log((torch.arange(16) < 12).float()), -1)


def infinite_distance(x):
    return torch.minimum(x, 1 / (1 - (torch.arange(16) < 12).float()))


def log_where_positive(x):
    return torch.where(x > 0, torch.log(x.clamp(min=0)), 0.0)


@pytest.mark.parametrize("function", [log_of_mask, infinite_distance, log_where_positive])
def test_what_is_infinite_in_float32_too_and_comes_to_nothing_is_no_fault(function):
    assert find(make_step(Sandwich(Call(function)))) == []


def test_a_padded_input_that_comes_to_nothing_is_no_fault():
    inputs = torch.randn(8, 16)
    inputs[:, 12:] = math.inf
    mask = torch.arange(16) < 12
    model = nn.Sequential(Call(lambda x: torch.where(mask, x * 2, 0.0)), Sandwich(nn.ReLU()))
    assert find(make_step(model, inputs=inputs)) == []


def test_a_fault_is_told_though_another_comes_to_nothing():
    model = Sandwich(Call(lambda x: log_of_mask(x) + x * 1e6))
    assert [(one.op, one.reach) for one in find(make_step(model))] == [("aten.mul", "gradients")]


def test_a_mask_by_zero_times_infinity_is_mathematics():
    (fault,) = find(make_step(Sandwich(Call(lambda x: x + (torch.arange(16) > 12).float() * -math.inf))))
    assert (fault.aten, fault.cause, fault.value, fault.reach) == ("mul", "mathematics", "nan", "gradients")


def test_gradients_of_a_step_with_a_closure_are_looked_at():
    model = Sandwich(Call(lambda x: x * 1e6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O1", loss_scale=128.0, verbosity=0)

    def evaluate():
        optimizer.zero_grad()
        loss = model(torch.ones(8, 16)).float().square().mean()
        backward(loss, optimizer)
        return loss

    (fault,) = find(lambda: optimizer.step(evaluate))
    assert (fault.aten, fault.reach, len(fault.gradients), fault.of) == ("mul", "gradients", 4, 4)


@pytest.mark.parametrize("is_cleared", [True, False], ids=["cleared", "stepped by"])
def test_a_gradient_that_does_not_fit_is_a_fault_once_an_optimizer_steps_by_it(is_cleared):
    torch.manual_seed(0)
    maker, judge = nn.Linear(4, 8), nn.Linear(8, 1)
    with torch.no_grad():
        maker.weight.mul_(2000)
    of_maker, of_judge = (torch.optim.SGD(model.parameters(), lr=1e-3) for model in (maker, judge))
    amp.initialize([maker, judge], [of_maker, of_judge], opt_level="O1", loss_scale=1024.0, verbosity=0)

    def step():
        made = maker(torch.randn(16, 4))
        if is_cleared:
            judge.zero_grad()
        backward(torch.tanh(judge(made.detach() / 1e4)).mean(), of_judge)
        of_judge.step()
        take_step(judge(made).mean(), of_maker)  # which leaves a gradient of the judge's, too

    recording = insight.trace(step, steps=4, on_fault="record")
    found = recording.of(insight.FaultRecord)
    assert [fault.reach for fault in found] == ([] if is_cleared else ["gradients"])


def test_the_table_of_a_ctc_loss_is_no_fault():
    targets, lengths = torch.tensor([[1, 2], [3, 4]]), torch.tensor([2, 2])
    model = nn.Linear(16, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O1", loss_scale=128.0, verbosity=0)
    x = torch.randn(6, 2, 16)

    def step():
        loss = F.ctc_loss(model(x).float().log_softmax(-1), targets, torch.tensor([6, 6]), lengths)
        take_step(loss, optimizer)

    assert find(step) == []


@pytest.mark.parametrize(
    ("name", "function", "found"),
    [
        ("aminmax", lambda x: torch.log(torch.exp(x.float() + 13)), []),  # beyond what float16 holds
        ("ne", lambda x: x * 1e-9, ["zero"]),
    ],
    ids=["aminmax", "ne"],
)
def test_the_lists_do_not_act_on_what_is_computed_about_values(name, function, found, tmp_path):
    (tmp_path / "own.yaml").write_text(f"extends: float16\nwhitelist: [{name}]\n")
    faults = find(make_step(Sandwich(Call(function)), lists=tmp_path / "own.yaml"), underflow=0.5)
    assert [fault.value for fault in faults[:1]] == found


# ---- forward ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("level", "block", "rule"), [("O1", 1, ("whitelist", "float16.yaml:32")), ("O2", 0, ("", "")), ("O3", 1, ("", ""))]
)
def test_logits_that_overflow(level, block, rule):
    model = make_gpt()
    enlarge(model.blocks[block].attention.qkv.weight, 600)
    (fault,) = find(make_gpt_step(model, level=level))
    assert (fault.op, fault.module) == ("Tensor.__matmul__", f"blocks.{block}.attention")
    assert (fault.rule, fault.entry) == rule
    assert (fault.step, fault.phase, fault.cause, fault.value) == (0, "forward", "precision", "inf")
    assert fault.reach == "gradients" and len(fault.gradients) == fault.of == 27
    assert fault.site.startswith("gpt.py:") and 65504 < fault.in_float32 < math.inf


def test_a_checkpointed_overflow_is_told_where_it_came_first():
    model = make_gpt()
    enlarge(model.blocks[1].attention.qkv.weight, 600)
    forward = model.blocks[1].forward
    model.blocks[1].forward = lambda x: checkpoint(forward, x, use_reentrant=False)
    first, *others = find(make_gpt_step(model))
    assert (first.op, first.module, first.phase) == ("Tensor.__matmul__", "blocks.1.attention", "forward")
    assert [other.phase for other in others] == ["recompute"] * len(others)


def test_an_overflow_that_is_swallowed_is_found_and_names_the_line_of_the_list(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("extends: float16\nwhitelist:\n  - square\n")
    model = Sandwich(Norm())
    enlarge(model.first.weight, 2000)
    (fault,) = find(make_step(model, lists=str(path)))
    assert (fault.op, fault.module, fault.entry) == ("Tensor.square", "between", "mine.yaml:3")
    assert (fault.cause, fault.reach, fault.gradients) == ("precision", "swallowed", ())
    amp.reset()
    model = Sandwich(Norm())
    enlarge(model.first.weight, 2000)
    assert find(make_step(model)) == []


def test_mathematics_is_told_from_precision():
    (fault,) = find(make_step(Sandwich(Call(lambda x: torch.log(torch.relu(x))))))
    assert (fault.op, fault.cause, fault.rule, fault.value) == ("torch.log", "mathematics", "blacklist", "inf")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_data_that_does_not_fit_came_in(value):
    inputs = torch.randn(8, 16)
    inputs[3, 7] = value
    (fault,) = find(make_step(Sandwich(nn.ReLU()), inputs=inputs))
    assert (fault.cause, fault.module, fault.op, fault.parameter) == ("came in", "first", "F.linear", "")
    assert fault.value == ("nan" if math.isnan(value) else "inf")


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_weight_that_does_not_fit_is_named(level):
    model = Sandwich(nn.ReLU())
    with torch.no_grad():
        model.last.weight[0, 3] = math.inf
    (fault,) = find(make_step(model, level=level))
    assert (fault.cause, fault.parameter, fault.module) == ("came in", "last.weight", "last")


@pytest.mark.parametrize(
    ("function", "aten"),
    [
        (lambda x: x.mul_(1e6), "mul_"),
        (lambda x: x * 1e6, "mul"),
        (lambda x: x.clone().mul_(x * 1e3).mul_(1e4), "mul_"),
    ],
    ids=["in place", "new", "twice in place"],
)
def test_an_op_on_no_list(function, aten):
    (fault,) = find(make_step(Sandwich(Call(function))))
    assert (fault.op, fault.aten, fault.rule) == (f"aten.{aten}", aten, "")
    assert (fault.module, fault.cause) == ("between", "precision")
    assert fault.site.startswith("test_trace.py:")


def test_a_cast_of_the_users():
    (fault,) = find(make_step(Sandwich(Call(lambda x: (x.float() * 1e5).half()))))
    assert (fault.aten, fault.given, fault.out, fault.cause) == ("_to_copy", ("f32",), "f16", "precision")


def test_modules_of_one_class_that_differ_in_a_number_are_one_pattern():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.layer = Norm(), nn.Linear(16, 16)

        def forward(self, x):
            return x + self.layer(self.norm(x * 3e3))

    blocks = nn.Sequential()
    for number in range(3):
        blocks.add_module(f"block{number}", Block())
    (fault, *_) = find(make_step(Sandwich(blocks), level="O2", loss_scale=1.0))
    assert fault.regions == ('match: "between.block*.norm"',)


def test_layers_at_one_place_in_several_sequentials_are_one_pattern():
    """`layers.*.*` would match the activation between them, too."""
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)) for _ in range(3)))
    with torch.no_grad():
        for layer in layers:
            layer[0].weight.copy_(2e4 * torch.eye(16))
            layer[2].weight.copy_(1e-4 * torch.eye(16))
    (fault, *_) = find(make_step(Sandwich(layers), level="O2", loss_scale=1.0))
    assert fault.regions[0] == 'match: "between.*.0"'


def test_a_list_of_many_rules_has_one_on_a_line():
    regions = tuple(f'match: "layers.{number}"' for number in (10, 2, 1))
    lines = format_entries(Remedy("list", regions=regions, ops=("exp",)))
    assert [rule["match"] for rule in yaml.safe_load("\n".join(lines))["modules"]] == [
        "layers.1",
        "layers.2",
        "layers.10",
    ]
    assert lines[0] == "modules:" and lines[-1] == "blacklist: [exp]" and len(lines) == 5


# ---- backward --------------------------------------------------------------------------------------------------------


def test_a_static_scale_that_is_too_large_is_told_with_the_one_that_fits():
    (fault,) = find(make_gpt_step(make_gpt(), loss_scale=2.0**24))
    assert (fault.phase, fault.op, fault.node) == ("backward", "F.cross_entropy", "ToCopyBackward0")
    assert (fault.given, fault.out, fault.loss_scale) == (("f32",), "f16", 2.0**24)
    for _ in range(3):  # each is the scale under which the op fits that overflowed first
        amp.reset()
        told = insight.format_fault(fault, RUN).partition("a smaller loss scale, 2**")[2].partition(" ")[0]
        (fault, *_) = find(make_gpt_step(make_gpt(), loss_scale=2.0 ** int(told))) or [None]
        if fault is None:
            break
        assert fault.loss_scale == 2.0 ** int(told) < 2.0**24
    assert fault is None


def test_a_dynamic_scale_that_comes_down_is_no_fault():
    (fault, *_) = found = find(make_gpt_step(make_gpt(), loss_scale={"init": 2.0**24}))
    assert all(one.is_search and one.skipped for one in found)
    assert [one.step for one in found] == [0, 1, 2]
    assert fault.loss_scale == 2.0**24


def test_a_gradient_that_no_scale_helps_is_a_fault_under_a_dynamic_scale_too():
    class Explode(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * math.inf

    (fault,) = find(make_step(Sandwich(Call(Explode.apply)), loss_scale="dynamic"))
    assert not fault.is_search and fault.phase == "backward"


@pytest.mark.parametrize("fitting", [1.0, 0.5])
def test_what_other_code_wrote_into_a_gradient_is_a_fault_once_the_scale_is_as_low_as_it_goes(fitting):
    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            written = torch.empty_like(gradient)
            fits = amp.stats().loss_scales[0] <= fitting
            written.numpy()[...] = gradient.numpy() if fits else numpy.inf  # by no op of torch's
            return written

    found = find(make_step(Sandwich(Call(Kernel.apply)), loss_scale={"init": 4.0}))
    expected = {(0, True), (1, True)} | ({(2, False)} if fitting < 1 else set())
    assert {(one.step, one.is_search) for one in found} == expected


def test_a_dynamic_scale_that_may_not_come_down_far_enough_is_a_fault():
    (fault, *_) = find(make_gpt_step(make_gpt(), loss_scale={"init": 2.0**24}, min_loss_scale=2.0**24))
    assert not fault.is_search and fault.scale < 2.0**24


def test_a_function_of_the_users_is_on_the_trail():
    class Enlarge(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 1e9

    (fault,) = find(make_step(Sandwich(Call(lambda x: Enlarge.apply(x.float()))), loss_scale=128.0))
    labels = [label for label, _ in fault.trail]
    assert fault.phase == "backward" and fault.cause == "precision" and fault.out == "f16"
    assert any("EnlargeBackward" in label for label in labels)


def test_gradients_that_are_lost_to_zero():
    model = nn.Sequential()
    torch.manual_seed(0)
    model.add_module("a", nn.Linear(16, 16))
    model.add_module("act", nn.ReLU())
    model.add_module("b", nn.Linear(16, 16))
    cast, first, *_ = find(make_step(model, loss_scale=1.0, factor=1e-5), underflow=0.05)
    assert (cast.op, cast.aten, cast.phase) == ("aten._to_copy", "_to_copy", "backward")  # of the loss code's float()
    assert (first.phase, first.module, first.op) == ("backward", "b", "F.linear")
    assert (first.value, first.cause) == ("zero", "precision") and first.share > 0.05
    amp.reset()
    assert find(make_step(model, loss_scale=2.0**16, factor=1e-5), underflow=0.05) == []
    amp.reset()
    assert find(make_step(model, loss_scale=1.0, factor=1e-5)) == []


def test_a_gradient_that_nothing_seen_made_is_told_all_the_same():
    model = Sandwich(nn.ReLU())
    step = make_step(model)

    def spoil(weight):  # as a kernel does that torch does not dispatch
        weight.grad.numpy()[0, 2] = math.nan

    model.first.weight.register_post_accumulate_grad_hook(spoil)
    (fault,) = find(step)
    assert (fault.cause, fault.parameter, fault.aten, fault.reach) == ("came in", "first.weight", "", "gradients")
    assert "compiled code, or another rank" in insight.format_fault(fault, RUN)


# ---- the run ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_a_traced_run_is_bitwise_the_run_without(level):
    def run(is_traced):
        model = make_gpt(seed=2)
        step = make_gpt_step(model, level=level, loss_scale=None)
        state = torch.get_rng_state()
        find(step, underflow=0.9) if is_traced else [step() for _ in range(3)]
        weights = [weight.detach().clone() for weight in model.parameters()]
        assert torch.equal(torch.get_rng_state(), state)
        amp.reset()
        return weights

    assert all(map(torch.equal, run(False), run(True)))


def test_a_fault_is_raised_with_its_record_and_what_to_try():
    model = make_gpt()
    enlarge(model.blocks[0].attention.qkv.weight, 600)
    with pytest.raises(NonFiniteError, match=r"step 0, forward: first value that does not fit") as raised:
        insight.trace(make_gpt_step(model))
    assert raised.value.fault.op == "Tensor.__matmul__"
    for told in ("blacklist: [matmul]", 'match: "blocks.0.attention", run: float32', "float16.yaml:32", "gpt.py:"):
        assert told in str(raised.value)


def test_the_list_that_is_proposed_mends_it(tmp_path):
    model = make_gpt()
    enlarge(model.blocks[0].attention.qkv.weight, 600)
    with pytest.raises(NonFiniteError) as raised:
        insight.trace(make_gpt_step(model))
    line = next(line for line in str(raised.value).splitlines() if "blacklist:" in line)
    amp.reset()
    for number, proposed in enumerate(line.split("   or   ")):
        (tmp_path / f"{number}.yaml").write_text(f"extends: float16\n{proposed.strip()}\n")
        model = make_gpt()
        enlarge(model.blocks[0].attention.qkv.weight, 600)
        assert find(make_gpt_step(model, lists=str(tmp_path / f"{number}.yaml"))) == []
        amp.reset()


def test_what_the_step_raises_over_a_fault_is_told_as_its_cause():
    step = make_step(Sandwich(Call(lambda x: x * 1e6)))

    def careful():
        step()
        raise ValueError("the loss is not finite")

    with pytest.raises(NonFiniteError) as raised:
        insight.trace(careful)
    assert isinstance(raised.value.__cause__, ValueError)


def test_an_ignored_op_is_let_through():
    step = make_step(
        Sandwich(Call(lambda x: torch.nan_to_num(x.detach() * 1e6, posinf=1.0, neginf=-1.0).clamp(-1, 1) + x))
    )
    assert find(step, ignore=["mul"]) == []
    (fault,) = find(step)
    assert fault.aten == "mul" and fault.reach == "swallowed"


def test_faults_are_read_back_as_they_were_written(tmp_path):
    model = Sandwich(Call(lambda x: torch.log(torch.relu(x))))
    recording = insight.trace(make_step(model), on_fault="record")
    recording.to_jsonl(tmp_path / "faults.jsonl")
    assert insight.Recording.read(tmp_path / "faults.jsonl") == recording
    assert recording.of(insight.FaultRecord)[0].in_float32 == math.inf


def test_nothing_of_a_step_is_kept():
    model = make_gpt()
    step = make_gpt_step(model)
    sizes = []
    with insight.tracer.tracing() as tracer:
        for _ in range(3):
            step()
            sizes.append(len(tracer._finder._written) + len(tracer._folding.ops()))
    assert sizes == [0, 0, 0]


@pytest.mark.parametrize("has_fault", [True, False])
def test_a_step_that_fails_over_a_fault_leaves_the_recording_of_it(has_fault):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O1", loss_scale=1.0, verbosity=0)

    def step():
        loss = model(torch.full((2, 4), 1e5 if has_fault else 1.0)).sum()
        raise ZeroDivisionError(f"the loss is {loss}")

    if has_fault:
        (fault,) = insight.trace(step, on_fault="record").of(insight.FaultRecord)
        assert fault.module == "0" and fault.cause == "precision"
    else:
        with pytest.raises(ZeroDivisionError):
            insight.trace(step, on_fault="record")


def test_a_part_that_is_written_anew_leaves_the_fault_beside_it():
    def rewrite(h):
        h = (h.half() * 65504.0).clone()
        h[:, :1] = 0.0
        return h.float()

    step = make_step(Sandwich(Call(rewrite), seed=3))
    (fault,) = insight.trace(step, on_fault="record").of(FaultRecord)
    assert (fault.aten, fault.cause, fault.reach) == ("mul", "precision", "gradients")


def test_what_no_op_wrote_over_finite_values_came_in():
    def refill(h):
        low = h.detach().half()
        array = low.view(torch.int16).untyped_storage()
        low + 1.0  # it is known to be finite
        array[1] = 0x7C  # float16's inf is 0x7C00, in its bytes; torch sees no op
        array[0] = 0x00
        return h * low.float()

    (fault,) = insight.trace(make_step(Sandwich(Call(refill))), on_fault="record").of(FaultRecord)
    assert fault.cause == "came in" and fault.value == "inf"


def test_a_wider_copy_has_the_magnitude_of_what_it_was_copied_from():
    def overflow(h):
        return torch.exp(h.half().float() * 0.0 + 100.0)

    (fault,) = insight.trace(make_step(Sandwich(Call(overflow))), on_fault="record").of(FaultRecord)
    copies = [largest for op, largest in fault.trail if op == "_to_copy"]
    assert dict(fault.trail)["add"] == 100.0
    assert copies[0] == copies[1] > 0  # to float32, of the one to float16


def low_of(h, factor=0.0, more=0.0):
    """Return float16 values that are finite, made of some by ops that are seen."""
    return h.detach().half() * factor + more


@pytest.mark.parametrize(
    ("function", "aten", "in_float32"),
    [
        (lambda h: torch.add(low_of(h, more=40000.0), 40000.0, out=torch.empty_like(h, dtype=torch.half)), "add", 8e4),
        (lambda h: (x := low_of(h, more=300.0)).mul_(x), "mul_", 9e4),
        (lambda h: (x := low_of(h, more=40000.0))[:, 1:].add_(x[:, :-1]), "add_", 8e4),
    ],
    ids=["out", "by itself", "by its neighbours"],
)
def test_precision_is_told_of_ops_that_write_what_they_read(function, aten, in_float32):
    (fault,) = find(make_step(Sandwich(Call(lambda h: h + function(h).float().sum()))))
    assert (fault.aten, fault.cause, fault.in_float32) == (aten, "precision", in_float32)


def test_the_largest_input_is_that_before_it_is_written_over():
    (fault,) = find(make_step(Sandwich(Call(lambda h: (h.float() * 0.0 + 1e30).mul_(1e30)))))
    assert (fault.cause, fault.largest) == ("mathematics", float(torch.tensor(1e30)))


@pytest.mark.parametrize("is_logged", [False, True])
def test_gradients_may_be_looked_at_after_a_step_that_was_skipped(is_logged):
    model = Sandwich(nn.ReLU())
    enlarge(model.first.weight, 30.0)
    step = make_step(model, loss_scale="dynamic")

    def logged_step():
        step()
        return [parameter.grad.norm() for parameter in model.parameters()] if is_logged else None

    recording = insight.trace(logged_step, steps=3)
    faults = recording.of(FaultRecord)
    assert len(faults) == 3 and all(fault.is_search for fault in faults)
    assert "run more steps" in str(recording) and "every value fits" not in str(recording)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_running_statistics_are_looked_at_and_left_as_they_are(momentum):
    def train(is_traced):
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(16, momentum=momentum)
        model = Sandwich(nn.Sequential(Call(lambda h: h * 3e3), norm))
        step = make_step(model, level="O3", loss_scale=1.0)
        faults = insight.trace(step, on_fault="record").of(FaultRecord) if is_traced else step()
        return faults, {name: value.clone() for name, value in norm.state_dict().items()}

    (fault,), traced = train(is_traced=True)
    amp.reset()
    _, plain = train(is_traced=False)
    assert (fault.aten, fault.cause, fault.out) == ("native_batch_norm", "precision", "f16")
    assert 65504 < fault.in_float32 < math.inf and not plain["running_var"].isfinite().all()
    assert all(torch.equal(traced[name], plain[name]) for name in plain)


def test_a_statistic_of_float32_is_moved_once_though_its_op_overflows():
    def train(is_traced):
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(16)
        enlarge(norm.weight, 3e38)
        step = make_step(Sandwich(norm))
        found = insight.trace(step, on_fault="record").of(FaultRecord) if is_traced else step()
        return found, norm.running_mean.clone()

    found, traced = train(is_traced=True)
    amp.reset()
    assert found and torch.equal(traced, train(is_traced=False)[1])


@pytest.mark.parametrize(
    ("function", "op"),
    [
        (lambda h: torch.fft.rfft(h.float() * 0.0 + 3e38).real, "_fft_r2c"),
        (lambda h: torch.exp(torch.complex(h.float() * 0.0 + 100.0, h.float() * 0.0)).abs(), "exp"),
    ],
    ids=["made", "given"],
)
def test_complex_values_are_looked_at(function, op):
    (fault,) = find(make_step(Sandwich(Call(lambda h: h + function(h).sum()))))
    assert (fault.aten, fault.cause, fault.out) == (op, "mathematics", "complex64")


def test_what_integers_wrote_is_known_no_more():
    def refill(h):
        low = low_of(h, 1.0)
        low.view(torch.int16).fill_(0x7C00)  # inf
        return h * low.float()

    (fault,) = find(make_step(Sandwich(Call(refill))))
    assert (fault.cause, fault.value) == ("came in", "inf")


def test_a_weight_that_was_written_in_the_step_is_named():
    model = Sandwich(nn.ReLU())
    step = make_step(model)

    def clamp_and_step():
        model.last.weight.data.clamp_(-1, 1)
        model.last.weight.data.view(torch.uint8).untyped_storage()[3] = 0x7F  # of a float32: no op is seen
        model.last.weight.data.view(torch.uint8).untyped_storage()[2] = 0x80
        step()

    (fault,) = insight.trace(clamp_and_step, on_fault="record").of(FaultRecord)
    assert (fault.cause, fault.parameter) == ("came in", "last.weight")


def test_two_faults_in_one_buffer_both_reach_what_is_made_of_it():
    def fill(h):
        buffer = torch.zeros(2, *h.shape, dtype=torch.half)
        buffer[0] = h.half() * 65504.0
        buffer[1] = h.half() * 65000.0
        return buffer.float().sum(0)

    faults = find(make_step(Sandwich(Call(fill), seed=3)))
    assert [fault.reach for fault in faults] == ["gradients", "gradients"]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_an_op_of_a_recomputation_is_told_so(use_reentrant):
    attempts = []

    def overflow_again(h):
        attempts.append(1)
        return torch.tanh(h.half() * (1e6 if len(attempts) > 1 else 1.0)).float()

    def between(h):
        return checkpoint(overflow_again, h, use_reentrant=use_reentrant)

    faults = find(make_step(Sandwich(Call(between))))
    assert [(fault.phase, fault.aten) for fault in faults] == [("recompute", "mul")]
    (text,) = [insight.format_fault(fault, amp_run()) for fault in faults]
    assert "backward" not in text and "loss scale" not in text


def amp_run():
    """Return what a recording says of the session in force."""
    with insight.recording() as recording:
        pass
    return recording.run


def test_what_16_bits_made_zero_may_be_mended_by_a_list(tmp_path):
    def normalise(h):
        none = h * 0.0
        return none / (none.abs().amax(-1, keepdim=True) + 1e-8)

    fault, *_ = find(make_step(Sandwich(Call(normalise))))
    text = insight.format_fault(fault, amp_run())
    assert (fault.cause, fault.lost) == ("precision", 1e-8) and 'modules: [{match: "between", run: float32}]' in text
    amp.reset()
    mended = tmp_path / "mended.yaml"
    mended.write_text('extends: float16\nmodules: [{match: "between", run: float32}]\n')
    assert find(make_step(Sandwich(Call(normalise)), lists=mended)) == []


def test_numbers_of_the_users_own_generator_are_drawn_as_without():
    def train(is_traced):
        generator = torch.Generator().manual_seed(1)

        def between(h):
            torch.empty(64, dtype=torch.half).log_normal_(10, 1, generator=generator)  # of which some do not fit
            return h * torch.rand(h.shape, generator=generator)

        step = make_step(Sandwich(Call(between)))
        faults = insight.trace(step, on_fault="record").of(FaultRecord) if is_traced else step()
        drawn = generator.get_state()
        amp.reset()
        return faults, drawn

    faults, drawn = train(is_traced=True)
    assert faults[0].aten == "log_normal_" and torch.equal(drawn, train(is_traced=False)[1])


def test_an_op_in_float32_is_not_judged_by_other_random_numbers():
    def between(h):
        torch.manual_seed(0)
        torch.empty(16).log_normal_(0, 60)  # of which one does not fit float32, and all do of the next 16
        return h

    assert find(make_step(Sandwich(Call(between)))) == []
