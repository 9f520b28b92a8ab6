"""`trace` finds the first value that does not fit, at the op that made it, with its cause and effect, and lets harmless
ones pass.

Guards: insight/tracer, insight/faults, insight/step_faults, insight/storages, insight/written, insight/recent.
Guards: insight/repair, insight/fault_text, insight/placing, insight/ops, insight/tensors.
"""

import contextlib
import math

import numpy
import pytest
import torch
import yaml
from gpt import make_gpt
from seeded_faults import Layer
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from training import backward, take_step

import amp_patch as amp
from amp_patch import NonFiniteError, insight
from amp_patch.insight import ops
from amp_patch.insight.causes import find_remedy
from amp_patch.insight.fault_record import Cause, Evidence, FaultRecord, Origin, Phase, Value
from amp_patch.insight.records import RunRecord
from amp_patch.insight.remedies import Remedy, format_entries
from amp_patch.insight.tracer import tracing

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


def calling(function):
    """A module that calls a function."""
    return Layer(lambda _, x: function(x))


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
    return recording.of(FaultRecord)


def enlarge(parameter, factor):
    with torch.no_grad():
        parameter.mul_(factor)


pytestmark = pytest.mark.filterwarnings("ignore:non-finite gradients")  # which are made on purpose


# ---- nothing to find -------------------------------------------------------------------------------------------------


def draw_large_numbers(x):
    torch.manual_seed(0)
    torch.empty(16).log_normal_(0, 60)  # of which one does not fit float32, and all do of the next 16
    return x


MASKS = {
    "masked_fill": lambda x: x.masked_fill(x > 0, -math.inf),
    "where": lambda x: torch.where(x > 0, -math.inf, x),
    "full": lambda x: x + torch.full((8, 16), -math.inf).triu(1),
    "masked_fill_": lambda x: x + torch.zeros_like(x).masked_fill_(x > 0, float("-inf")),
    "constant": lambda x: x.clamp(max=math.inf) + torch.tensor(-math.inf).exp(),
    "log of a mask": lambda x: x + torch.log((torch.arange(16) < 12).float()),
    "infinite distance": lambda x: torch.minimum(x, 1 / (1 - (torch.arange(16) < 12).float())),
    "log where positive": lambda x: torch.where(x > 0, torch.log(x.clamp(min=0)), 0.0),
    "random numbers": draw_large_numbers,
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_what_is_infinite_by_intention_or_comes_to_nothing_is_no_fault(mask):
    def attend(x):
        return torch.softmax(torch.cat([mask(x), torch.zeros_like(x)], -1), -1)[..., :16]

    assert find(make_step(Sandwich(calling(attend)))) == []


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


@pytest.mark.parametrize("number", [math.inf, math.nan])
def test_a_trail_of_what_is_not_finite_is_written_and_read_and_told(number, tmp_path):
    evidence = Evidence(trail=(("masked_fill", number), ("mm", 2.0)))
    fault = FaultRecord(
        0, Phase.FORWARD, Value.NAN, Cause.MATHEMATICS, origin=Origin(aten="softmax"), evidence=evidence
    )
    recording = insight.Recording(RUN, [fault])
    recording.to_jsonl(tmp_path / "faults.jsonl")
    again = insight.Recording.read(tmp_path / "faults.jsonl")
    (read,) = again.of(FaultRecord)
    assert repr(read.trail) == repr(fault.trail)
    assert insight.format_fault(read, again.run) == insight.format_fault(fault, again.run)


@pytest.mark.parametrize(("loss_scale", "is_search"), [(1024.0, False), ("dynamic", True)])
def test_an_op_that_torch_cannot_run_in_float32_may_need_a_smaller_loss_scale(loss_scale, is_search, monkeypatch):
    """As flash attention on a GPU, which takes 16 bits only. Here, it is the product that computes a gradient."""
    run = ops.run_in_float32
    monkeypatch.setattr(ops, "run_in_float32", lambda op: None if op.overload.name == "mul" and op.node else run(op))
    model = Sandwich(calling(lambda h: h / 256 * 256))  # the gradient of the product is too large
    weights = torch.full((8, 1), 1024 / 65536 if is_search else 1.0)  # the gradient of the output is 1024 at each scale
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    enlarge(model.last.weight, 8.0)
    step = start(model, lambda: (model(x).float() * weights).sum(), loss_scale=loss_scale)
    recording = insight.trace(step, on_fault="record")
    (fault,) = recording.searches if is_search else recording.faults
    assert (fault.aten, fault.phase, fault.is_untested) == ("mul", "backward", True)
    assert "torch cannot run this op in float32" in insight.format_fault(fault, recording.run)
    assert "no loss scale helps" not in insight.format_fault(fault, recording.run)


def test_a_padded_input_that_comes_to_nothing_is_no_fault():
    inputs = torch.randn(8, 16)
    inputs[:, 12:] = math.inf
    mask = torch.arange(16) < 12
    model = nn.Sequential(calling(lambda x: torch.where(mask, x * 2, 0.0)), Sandwich(nn.ReLU()))
    assert find(make_step(model, inputs=inputs)) == []


def test_a_fault_is_told_though_another_comes_to_nothing():
    model = Sandwich(calling(lambda x: torch.softmax(MASKS["log of a mask"](x), -1) + x * 1e6))
    assert [(one.op, one.reach) for one in find(make_step(model))] == [("aten.mul", "gradients")]


def test_gradients_of_a_step_with_a_closure_are_looked_at():
    model = Sandwich(calling(lambda x: x * 1e6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O1", loss_scale=128.0, verbosity=0)

    def evaluate():
        optimizer.zero_grad()
        loss = model(torch.ones(8, 16)).float().square().mean()
        backward(loss, optimizer)
        return loss

    (fault,) = find(lambda: optimizer.step(evaluate))
    assert (fault.aten, fault.reach, len(fault.gradients), fault.of) == ("mul", "gradients", 4, 4)


def test_a_gradient_that_does_not_fit_is_no_fault_where_no_optimizer_steps_by_it():
    torch.manual_seed(0)
    maker, judge = nn.Linear(4, 8), nn.Linear(8, 1)
    enlarge(maker.weight, 2000)
    of_maker, of_judge = (torch.optim.SGD(model.parameters(), lr=1e-3) for model in (maker, judge))
    amp.initialize([maker, judge], [of_maker, of_judge], opt_level="O1", loss_scale=1024.0, verbosity=0)

    def step():
        made = maker(torch.randn(16, 4))
        take_step(torch.tanh(judge(made.detach() / 1e4)).mean(), of_judge)
        take_step(judge(made).mean(), of_maker)  # which leaves a gradient of the judge's, too

    assert find(step) == []


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
    faults = find(make_step(Sandwich(calling(function)), lists=tmp_path / "own.yaml"), underflow=0.5)
    assert [fault.value for fault in faults[:1]] == found


# ---- forward ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("level", "block", "rule"), [("O1", 1, ("whitelist", "float16.yaml:34")), ("O2", 0, ("", ""))])
def test_logits_that_overflow(level, block, rule):
    model = make_gpt()
    enlarge(model.blocks[block].attention.qkv.weight, 600)
    (fault,) = find(make_gpt_step(model, level=level))
    assert (fault.op, fault.module) == ("Tensor.__matmul__", f"blocks.{block}.attention")
    assert (fault.rule, fault.entry) == rule
    assert (fault.step, fault.phase, fault.cause, fault.value) == (0, "forward", "precision", "inf")
    assert fault.reach == "gradients" and len(fault.gradients) == fault.of == 27
    assert fault.site.startswith("gpt.py:") and 65504 < fault.in_float32 < math.inf


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_weight_that_does_not_fit_is_named(level):
    model = Sandwich(nn.ReLU())
    with torch.no_grad():
        model.last.weight[0, 3] = math.inf
    (fault,) = find(make_step(model, level=level))
    assert (fault.cause, fault.parameter, fault.module) == ("came in", "last.weight", "last")


def low_of(h, factor=0.0, more=0.0):
    """Return float16 values that are finite, made of some by ops that are seen."""
    return h.detach().half() * factor + more


def rewrite_a_part(h):
    """Leave inf beside what is written."""
    h = (h.half() * 65504.0).clone()
    h[:, :1] = 0.0
    return h.float()


def refill(h):
    """Write inf by no op that torch sees, over values that are known to be finite."""
    low = low_of(h, 1.0) + 0.0
    low.untyped_storage()[0] = 0x00
    low.untyped_storage()[1] = 0x7C
    return low.float()


def normalise(h):
    none = h.half() * 0.0
    return none / (none.abs().amax(-1, keepdim=True) + 1e-8)


LARGE = float(torch.tensor(1e30))
FAULTS = {
    "cast": (lambda h: (h.float() * 1e5).half(), {"aten": "_to_copy", "given": ("f32",), "out": "f16"}),
    "0 times inf": (
        lambda h: h + (torch.arange(16) > 12).float() * -math.inf,
        {"aten": "mul", "cause": "mathematics", "value": "nan", "reach": "gradients"},
    ),
    "out": (
        lambda h: torch.add(low_of(h, more=40000.0), 40000.0, out=torch.empty_like(h, dtype=torch.half)),
        {"op": "aten.add", "in_float32": 8e4, "rule": "", "module": "between"},
    ),
    "by itself": (lambda h: (x := low_of(h, more=300.0)).mul_(x), {"op": "aten.mul_", "in_float32": 9e4}),
    "by its neighbours": (
        lambda h: (x := low_of(h, more=40000.0))[:, 1:].add_(x[:, :-1]),
        {"aten": "add_", "in_float32": 8e4},
    ),
    "written over": (lambda h: (h.float() * 0.0 + 1e30).mul_(1e30), {"cause": "mathematics", "largest": LARGE}),
    "beside": (rewrite_a_part, {"aten": "mul", "reach": "gradients"}),
    "by no op": (refill, {"cause": "came in", "value": "inf"}),
    "zero": (normalise, {"aten": "div", "lost": 1e-8}),
    "made complex": (
        lambda h: torch.fft.rfft(h.float() * 0.0 + 3e38).real,
        {"aten": "_fft_r2c", "cause": "mathematics", "out": "complex64"},
    ),
    "given complex": (
        lambda h: torch.exp(torch.complex(h.float() * 0.0 + 100.0, h.float() * 0.0)).abs(),
        {"aten": "exp", "cause": "mathematics", "out": "complex64"},
    ),
}


@pytest.mark.parametrize(("function", "expected"), FAULTS.values(), ids=FAULTS)
def test_the_first_value_that_does_not_fit_is_told_with_its_op(function, expected):
    fault, *_ = find(make_step(Sandwich(calling(lambda h: h + function(h).float().sum()), seed=3)))
    expected = {"cause": "precision", **expected}
    assert {name: getattr(fault, name) for name in expected} == expected
    assert fault.site.startswith("test_trace.py:")


def test_no_list_is_advised_where_float32_does_not_hold_a_later_result():
    def log_of_nothing(h):
        large = h * 1e6
        return torch.log(large - large)

    fault, *_ = find(make_step(Sandwich(calling(log_of_nothing))))
    assert fault.aten == "mul" and not find_remedy(fault, None).has_list
    assert fault.beyond.startswith("torch.log at test_trace.py:") and fault.beyond in insight.format_fault(fault, None)


def test_layers_at_one_place_in_several_sequentials_are_one_pattern():
    """`layers.*.*` would match the activation between them, too."""
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)) for _ in range(3)))
    with torch.no_grad():
        for layer in layers:
            layer[0].weight.copy_(2e4 * torch.eye(16))
            layer[2].weight.copy_(1e-4 * torch.eye(16))
    (fault, *_) = find(make_step(Sandwich(layers), level="O2", loss_scale=1.0))
    assert fault.regions[0] == 'match: "between.*.0"'


def test_a_level_that_casts_the_model_is_told_no_rules_for_ops(tmp_path):
    """A list has only module rules there: `blacklist: [exp]` would do nothing."""
    (tmp_path / "own.yaml").write_text("extends: null\nmodules: [{match: first, run: float32}]\n")
    model, x = Sandwich(nn.ReLU()), torch.randn(8, 16)

    def compute_loss():
        return (model(x) * torch.exp(torch.full((), 12.0, dtype=torch.half))).mean()

    (fault, *_) = find(start(model, compute_loss, level="O2", loss_scale=1.0, lists=tmp_path / "own.yaml"))
    assert (fault.op, fault.ops) == ("aten.exp", ())


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


def test_a_gradient_that_no_scale_helps_is_a_fault_under_a_dynamic_scale_too():
    class Explode(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * math.inf

    (fault,) = find(make_step(Sandwich(calling(Explode.apply)), loss_scale="dynamic"))
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

    found = find(make_step(Sandwich(calling(Kernel.apply)), loss_scale={"init": 4.0}))
    expected = {(0, True), (1, True)} | ({(2, False)} if fitting < 1 else set())
    assert {(one.step, one.is_search) for one in found} == expected


def test_a_dynamic_scale_that_may_not_come_down_far_enough_is_a_fault():
    (fault, *_) = find(make_gpt_step(make_gpt(), loss_scale={"init": 2.0**24}, min_loss_scale=2.0**24))
    assert not fault.is_search and fault.scale < 2.0**24


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


@pytest.mark.parametrize("level", ["O1", "O5"])
def test_a_traced_run_is_bitwise_the_run_without(level):
    def run(is_traced):
        model = make_gpt(seed=2, layers=1)
        step = make_gpt_step(model, level=level, loss_scale=None)
        state = torch.get_rng_state()
        if is_traced:
            assert find(step, underflow=0.9) == []  # although the mask is infinite
        else:
            for _ in range(3):
                step()
        assert torch.equal(torch.get_rng_state(), state)
        amp.reset()
        return list(model.parameters())

    assert all(map(torch.equal, run(is_traced=False), run(is_traced=True)))


def test_a_fault_is_raised_with_its_record_and_what_to_try():
    model = make_gpt()
    enlarge(model.blocks[0].attention.qkv.weight, 600)
    with pytest.raises(NonFiniteError, match=r"step 0, forward: first value that does not fit") as raised:
        insight.trace(make_gpt_step(model))
    assert raised.value.fault.op == "Tensor.__matmul__"
    for told in ("blacklist: [matmul]", 'match: "blocks.0.attention", run: float32', "float16.yaml:34", "gpt.py:"):
        assert told in str(raised.value)


def test_an_ignored_op_is_let_through():
    step = make_step(
        Sandwich(calling(lambda x: torch.nan_to_num(x.detach() * 1e6, posinf=1.0, neginf=-1.0).clamp(-1, 1) + x))
    )
    assert find(step, ignore=["mul"]) == []
    (fault,) = find(step)
    assert fault.aten == "mul" and fault.reach == "swallowed"


KERNELS = {  # whether the finder reads all results, only the first, or none
    "_scaled_dot_product_flash_attention_for_cpu": "first",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "all",
    "_efficient_attention_backward": "all",
    "_fused_rms_norm": "all",
    "_fused_rms_norm_backward": "all",
    "_fused_adamw_": "none",
    "_foreach_add_": "none",
}


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_results_of_fused_kernels_are_looked_at_but_in_optimizers(kernel):
    packet = getattr(torch.ops.aten, kernel)
    overload = ops.find_overload(getattr(packet, packet.overloads()[0]))
    read = "none" if overload.is_in_bulk else "first" if overload.has_one_output else "all"
    assert read == KERNELS[kernel]


def test_an_op_in_the_step_of_an_unknown_optimizer_is_told_as_any_other():
    extra = nn.Parameter(torch.ones(16))
    unknown = torch.optim.RMSprop([extra], lr=1e35, eps=0.0, alpha=1.0, foreach=False)
    extra.grad = torch.ones(16)
    known = make_step(Sandwich(nn.Tanh()))

    def step():
        unknown.step()
        known()

    (fault,) = find(step)
    assert (fault.phase, fault.cause, fault.aten) == (Phase.STEP, Cause.MATHEMATICS, "addcdiv_")
    text = str(fault)
    assert "Tensor.addcdiv_ at test_trace.py:" in text and ".step()" not in text and "a weight" not in text


def test_nothing_of_a_step_is_kept():
    step = make_gpt_step(make_gpt(layers=1))
    with tracing() as tracer:
        for _ in range(3):
            step()
            assert not tracer._finder.storages._written and not tracer._folding.make_op_records()


def test_an_error_of_the_step_is_told_beside_the_fault_that_it_may_come_of():
    model = nn.Linear(4, 1)
    inputs = torch.ones(2, 4)
    amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O1", loss_scale=1.0, verbosity=0)

    def step():
        raise ZeroDivisionError(f"the loss is {model(inputs).sum()}")

    with pytest.raises(ZeroDivisionError):
        insight.trace(step, on_fault="record")
    inputs *= 1e5
    with pytest.raises(NonFiniteError) as raised:
        insight.trace(step)
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    with pytest.warns(UserWarning, match="ended with ZeroDivisionError: the loss is"):
        (fault,) = insight.trace(step, on_fault="record").of(FaultRecord)
    assert (fault.cause, fault.reach) == ("precision", "")


def test_a_dynamic_scale_that_comes_down_is_no_fault_though_gradients_are_looked_at_after_the_step():
    model = Sandwich(nn.ReLU())
    step = make_step(model, loss_scale={"init": 2.0**24}, factor=100.0)

    def logged_step():
        step()
        return [parameter.grad.norm() for parameter in model.parameters()]

    recording = insight.trace(logged_step, steps=3)
    faults = recording.of(FaultRecord)
    assert [fault.step for fault in faults] == [0, 1, 2]
    assert all(fault.is_search and fault.skipped for fault in faults)
    assert "run more steps" in str(recording) and "every value fits" not in str(recording)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_run_without_16_bits_says_so(dtype):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step():
        with contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype):
            loss = model(torch.ones(2, 4)).float().square().mean()
        loss.backward()
        optimizer.step()

    text = str(insight.trace(step, steps=2))
    assert "every value fits, in 2 steps" in text and ("without mixed precision" in text) is (dtype is None)


def test_running_statistics_are_looked_at_and_left_as_they_are():
    def train(is_traced):
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(16)
        step = make_step(Sandwich(nn.Sequential(calling(lambda h: h * 3e3), norm)), level="O3", loss_scale=1.0)
        faults = find(step) if is_traced else step()
        amp.reset()
        return faults, {name: value.clone() for name, value in norm.state_dict().items()}

    (fault, *_), traced = train(is_traced=True)
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


def test_two_faults_in_one_buffer_both_reach_what_is_made_of_it():
    def fill(h):
        buffer = torch.zeros(2, *h.shape, dtype=torch.half)
        buffer[0] = h.half() * 65504.0
        buffer[1] = h.half() * 65000.0
        return buffer.float().sum(0)

    faults = find(make_step(Sandwich(calling(fill), seed=3)))
    assert [fault.reach for fault in faults] == ["gradients", "gradients"]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_an_op_of_a_recomputation_is_told_so(use_reentrant):
    attempts = []

    def overflow_again(h):
        attempts.append(1)
        return torch.tanh(h.half() * (1e6 if len(attempts) > 1 else 1.0)).float()

    def between(h):
        return checkpoint(overflow_again, h, use_reentrant=use_reentrant)

    faults = find(make_step(Sandwich(calling(between))))
    assert [(fault.phase, fault.aten) for fault in faults] == [("recompute", "mul")]
    assert "backward" not in str(faults[0]) and "loss scale" not in str(faults[0])


def test_numbers_of_the_users_own_generator_are_drawn_as_without():
    def train(is_traced):
        generator = torch.Generator().manual_seed(1)

        def between(h):
            torch.empty(64, dtype=torch.half).log_normal_(10, 1, generator=generator)  # of which some do not fit
            return h * torch.rand(h.shape, generator=generator)

        step = make_step(Sandwich(calling(between)))
        faults = insight.trace(step, on_fault="record").of(FaultRecord) if is_traced else step()
        drawn = generator.get_state()
        amp.reset()
        return faults, drawn

    faults, drawn = train(is_traced=True)
    assert faults[0].aten == "log_normal_" and torch.equal(drawn, train(is_traced=False)[1])


def test_weights_that_shrink_and_return_have_not_diverged():
    model, number = Sandwich(nn.ReLU()), iter(range(3))

    def compute_loss():
        step = next(number)
        for parameter in model.parameters():
            enlarge(parameter, (3, 1e-3, 1e3)[step])
        inputs = torch.ones(8, 16) * (3e5 if step == 2 else 1)
        return model(inputs).float().abs().mean() * 1e-3

    (fault, *_) = find(start(model, compute_loss))
    assert (fault.step, fault.cause) == (2, "precision")


def test_a_fault_in_a_step_within_a_backward_pass_is_found_and_leaves_no_mode():
    model, factors = nn.Linear(4, 4), iter([1, math.inf, 1])
    optimizers = {weight: torch.optim.SGD([weight], lr=0.1) for weight in model.parameters()}
    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(lambda weight: optimizers[weight].step())

    def step():
        (model(torch.ones(2, 4)).square().mean() * next(factors)).backward()

    with pytest.raises(NonFiniteError, match="step 1, backward"):
        insight.trace(step, steps=3)
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


@pytest.mark.parametrize(
    ("compute_loss", "factor"),
    [
        (lambda x, y: F.cross_entropy(x, y, weight=torch.rand(4)), 1),
        (lambda x, y: F.cross_entropy(x, y, weight=torch.rand(4), reduction="sum"), 8),
        (lambda x, y: F.cross_entropy(x, y, ignore_index=2), 1),  # 2 is also the number of reduction="sum"
        (lambda x, y: F.binary_cross_entropy_with_logits(x, x.sigmoid(), weight=torch.rand(8, 4)), 1),
        (lambda x, y: F.smooth_l1_loss(x, x + 1, beta=2.0), 1),
        (lambda x, y: F.mse_loss(x, x + 1, reduction="sum"), 32),
    ],
)
def test_losses_with_weights_are_traced_and_only_sums_count_as_sums(compute_loss, factor):
    model = nn.Linear(16, 4)
    inputs, labels = torch.randn(8, 16), torch.arange(8) % 4
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O1", loss_scale=1.0, verbosity=0)
    with tracing() as tracer:
        loss = compute_loss(model(inputs).float(), labels)
        assert tracer._finder.storages.find_summed(loss) == factor
        take_step(loss, optimizer)
    assert not tracer.faults
