"""Tuning finds the seeded faults of models with as few entries as possible, and its runs are bit by bit the training's
own.

Guards: insight/tuning/tuner, insight/tuning/options, insight/tuning/float32_run, insight/shadow.
Guards: insight/tuning/check, insight/tuning/ranking, insight/tuning/traced, insight/tuning/result, insight/runs.
Guards: script_settings.
"""

import math
import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from faulty_gpt import LOW, FaultyGPT, make_training
from gpt import make_gpt
from torch import nn
from torch_state import VERSION, find_changes
from training import backward, take_step

import amp_patch as amp
from amp_patch import events, insight
from amp_patch.config.op_lists import check_oplists
from amp_patch.insight.recorder import make_empty_run
from amp_patch.insight.recordings import Recording
from amp_patch.insight.records import CheckedStepRecord, LowOpRecord, ModulesRecord, SketchRecord
from amp_patch.insight.runs import FunctionRunner, Run
from amp_patch.insight.shadow import Shadow
from amp_patch.insight.tuning.ranking import Ranking
from amp_patch.insight.tuning.sketches import sketch
from amp_patch.insight.tuning.traced import read_trace
from amp_patch.script_settings import Settings

pytestmark = pytest.mark.filterwarnings("ignore:non-finite gradients under a static loss scale")


@pytest.fixture
def base(tmp_path):
    path = tmp_path / "base.yaml"
    path.write_text(LOW)
    return path


@pytest.fixture
def tune(base, tmp_path):
    """Returns a function that tunes from the base list, checks what holds of any result, and returns it."""

    def tune(train, **options):
        lines = []
        options = {"extends": base, "out": tmp_path / "tuned.yaml", "log": lines.append, **options}
        result = insight.tune(train, **options)
        assert sum(line.startswith("run") for line in lines) <= result.runs <= options.get("max_runs", 40)
        assert [path.name for path in tmp_path.glob(".*")] == [] and not find_changes()
        if result.text:
            assert (tmp_path / "tuned.yaml").read_text() == result.text
            report = check_oplists(tmp_path / "tuned.yaml")
            assert report.errors == report.warnings == []
        return result

    return tune


def names(result):
    return [entry.name for entry in result.entries]


@pytest.mark.parametrize(
    ("faults", "units", "entries", "most"),
    [
        ({"cumsum": True}, "modules", ["pos"], 6),
        ({"square": (0, 1, 2), "exp": (1,)}, "modules", ["blocks.*.n1", "blocks.1.attn"], 6),
        ({"square": (0, 1, 2), "exp": (1,)}, "ops", ["exp", "mean", "rsqrt", "square", "sum"], 25),
    ],
    ids=["precision", "range", "ops"],
)
def test_the_fault_is_found_and_no_entry_can_be_left_out(faults, units, entries, most, tune):
    result = tune(make_training(**faults), units=units, steps=1)
    assert names(result) == entries and result.is_reached and result.runs <= most
    by_entries = {trial.entries: trial for trial in result.trials}
    assert by_entries[result.entries].verdict.worst < 0.01
    for left_out in result.entries:
        rest = tuple(entry for entry in result.entries if entry != left_out)
        assert rest not in by_entries or not by_entries[rest].verdict.passed


def test_the_file_that_is_written_is_enough_by_itself(tune, tmp_path):
    train = make_training(square=(0, 1, 2))
    assert names(tune(train)) == ["blocks.*.n1"]
    again = insight.tune(train, extends=tmp_path / "tuned.yaml", log=lambda line: None)
    assert again.entries == () and again.runs == 2 and again.is_reached


class Gate(nn.Module):
    def forward(self, x):
        weights = torch.exp(torch.tanh(x) + 11.5)
        return x * (weights / weights.sum(-1, keepdim=True)).to(x.dtype)


def test_the_digits_network_with_a_gate_that_overflows(tune, base):
    base.write_text("extends: float16\nwhitelist: [exp]\n")

    def train():
        torch.manual_seed(3)
        model = nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.AdaptiveAvgPool2d(2), nn.Flatten(), Gate(), nn.Linear(64, 10)),
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
        for _ in range(3):
            take_step(F.cross_entropy(model(torch.randn(16, 1, 8, 8)), torch.randint(10, (16,))), optimizer)

    result = tune(train, opt_level="O2")
    assert names(result) == ["6"] and result.runs <= 6


def test_bfloat16_has_the_range_and_needs_nothing(tune, tmp_path):
    result = tune(make_training(level="O4", square=(0, 1), exp=(2,)), opt_level="O4")
    assert (result.entries, result.is_reached, result.runs, result.text) == ((), True, 2, "")
    assert result.message.startswith("nothing needs float32 at a tolerance of 0.1: worst parameter 0.0")
    assert not (tmp_path / "tuned.yaml").exists()


def test_the_default_is_what_the_script_has(tune, base):
    result = tune(make_training(exp=(1,), lists=str(base)), extends=None)
    assert names(result) == ["blocks.1.attn"] and "\nextends: base.yaml\n" in result.text


def test_what_runs_outside_of_modules_needs_ops(tune):
    def train():
        torch.manual_seed(0)
        model = nn.Linear(8, 20)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
        for _ in range(2):
            weights = torch.exp(model(torch.randn(16, 8)) + 12)
            take_step(-(weights / weights.sum(-1, keepdim=True)).square().mean(), optimizer)

    result = tune(train, steps=1)
    assert not result.is_reached and "exp" in result.message and "add --units both" in result.message
    result = tune(train, units="both", steps=1)
    assert result.is_reached and "exp" in names(result) and {entry.kind for entry in result.entries} == {"op"}


class Scaled(nn.Module):
    """An unlisted op overflows between two layers."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.b((self.a(x) * 1e6) / 1e6)


class GradientsTimes(torch.autograd.Function):
    @staticmethod
    def forward(context, x, factor):
        context.factor = factor
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        return gradient * context.factor, None


class Backward(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.a, self.factor = nn.Linear(16, 16), factor

    def forward(self, x):
        return x + GradientsTimes.apply(self.a(x), self.factor)


def train_vectors(make_model, **options):
    def train():
        torch.manual_seed(0)
        model = make_model()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0, **options)
        for _ in range(3):
            loss = F.cross_entropy(model(torch.randn(8, 16)), torch.randint(4, (8,)))
            take_step(loss, optimizer)

    return train


def test_an_op_on_no_list_that_overflows_is_seen(tune):
    result = tune(train_vectors(lambda: nn.Sequential(nn.Linear(16, 16), Scaled())))
    assert names(result) == ["1"] and re.search(r"Tensor\.mul: \d+ % of its results overflow float16", result.text)


def test_parameters_whose_gradients_are_zero_at_the_first_weights_are_not_judged(tune):
    def make():
        model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
        nn.init.zeros_(model[1].weight)
        return model

    message = tune(train_vectors(make)).message
    assert "not judged: 2 of 4 parameters, such as 0.weight" in message


def test_gradients_that_overflow_move_a_dynamic_scale_and_no_module(tune):
    def make():
        return nn.Sequential(nn.Linear(16, 16), Backward(1e6), nn.Linear(16, 4))

    result = tune(train_vectors(make))
    assert result.entries == () and result.is_reached and "at a loss scale of 0." in result.message
    result = tune(train_vectors(make, loss_scale=128.0))
    assert "1.a" in names(result) and result.is_reached and "loss scale" not in result.message


def test_gradients_that_overflow_before_they_are_clipped_move_a_dynamic_scale_and_no_module(tune):
    def train():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1e-3), torch.amp.GradScaler("cpu")
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = (model(torch.rand(64, 16)).float() * 10).square().sum()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
            scaler.step(optimizer)
            scaler.update()

    result = tune(train, extends=None)
    assert result.entries == () and result.is_reached, result
    scale = float(re.search("tried at a loss scale of (.*), at which gradients fit", result.message)[1])
    assert 1 <= scale < 4096


def test_a_loss_in_16_bits_overflows_at_the_first_scale_whatever_else(tune, base):
    base.write_text("extends: apex\nwhitelist: [exp, sum]\n")

    def train():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), Gate(), nn.Linear(8, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        amp.initialize(model, optimizer, opt_level="O1", lists="apex", verbosity=0)
        backward((model(torch.randn(6, 4)) * 0.5).mean(), optimizer)
        optimizer.step()

    result = tune(train, steps=1)
    assert names(result) == ["1"] and result.runs == 4 and "at a loss scale of 16384" in result.message


def test_the_lists_do_not_act_on_what_a_check_computes(tmp_path):
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.full((100, 100), 3.0))

    (tmp_path / "low.yaml").write_text("extends: float16\nwhitelist: [sum, mean, vector_norm, abs, amax]\n")

    def train():
        model = Wide()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        amp.initialize(model, optimizer, opt_level="O1", loss_scale=1.0, verbosity=0)
        loss = torch.stack([model.weight[0, 0] * 1e5, model.weight[1, 1] * 1e-9])
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward(torch.ones(2))
        optimizer.step()

    run = Run("tuning.check:Check", {"steps": 1}, Settings("O1", (str(tmp_path / "low.yaml"),)))
    found = FunctionRunner(train)(run)
    (step,), (gradient,) = found.of(CheckedStepRecord), found.of(SketchRecord)
    assert step.losses == (pytest.approx(1.5e5),) and gradient.norm == gradient.largest == pytest.approx(1e5)


def test_random_ops_draw_the_same_numbers_in_all_runs(tune):
    class Model(FaultyGPT):
        def forward(self, tokens):
            x = F.dropout(self.pos(self.embedding(tokens)), 0.2)
            for block in self.blocks:
                x = F.dropout(block(x), 0.1)
            x = F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
            return self.head(x)

    assert names(tune(make_training(make_model=Model, square=(1,)))) == ["blocks.1.n1"]


@pytest.mark.parametrize(("level", "entries"), [("O1", ["odd name"]), ("O5", [])])
def test_two_models_and_a_graph_that_lives_over_the_step_of_the_other_optimizer(level, entries, tune):
    """As in DCGAN: what was generated for the critic's step is criticized once more for the generator's."""

    def train():
        torch.manual_seed(0)
        generator = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16))
        critic = nn.ModuleDict({"first": nn.Linear(16, 16), "odd name": Scaled(), "last": nn.Linear(4, 1)})
        both = [torch.optim.SGD(one.parameters(), lr=1e-3) for one in (generator, critic)]
        amp.initialize([generator, critic], both, opt_level=level, num_losses=2, loss_scale=128.0, verbosity=0)
        for _ in range(3):
            made = generator(torch.randn(4, 8))
            for number, x in ((1, made.detach()), (0, made)):
                for part in critic.values():
                    x = part(x)
                take_step(F.softplus(x.float()).mean(), both[number], loss_id=number)

    result = tune(train, extends=None, opt_level=level)
    assert names(result) == entries and result.is_reached and result.runs <= 6


# ---- the budget, and what ends the search ----------------------------------------------------------------------------


def test_the_budget_of_runs_is_kept(tune):
    result = tune(make_training(layers=1, cumsum=True), units="ops", max_runs=3, steps=1)
    assert result.runs == 3 and "stopped after 3 runs (max_runs)" in result.message


def test_the_best_so_far_is_kept_by_an_interrupt(tune):
    train, calls = make_training(square=(0,), exp=(2,)), []

    def interrupted():
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        train()

    result = tune(interrupted)
    assert names(result) == ["blocks.0.n1", "blocks.2.attn"] and result.is_reached
    assert "interrupted in run 4, so there may be entries that are not needed" in result.message

    def at_once():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune(at_once)


def test_a_training_that_fails_in_16_bits_is_a_trial_that_fails(tune):
    train, calls = make_training(layers=1, exp=(0,)), []

    def picky():
        calls.append(1)
        if len(calls) == 2:
            raise FloatingPointError("inf in the loss")
        train()

    result = tune(picky, steps=1)
    assert result.is_reached and result.trials[0].verdict.fault == "FloatingPointError: inf in the loss"


def test_the_same_error_with_every_list_ends_the_search(tune):
    train, calls = make_training(layers=2, square=(0,), exp=(1,)), []

    def failing():
        calls.append(1)
        if len(calls) > 1:
            raise TypeError("a dtype that this kernel never takes")
        train()

    result = tune(failing, steps=1)
    assert len(calls) == 4 and not result.is_reached  # float32, two lists, and everything in float32
    assert "the same error with every list: TypeError: a dtype that this kernel never takes" in result.message


def test_a_trace_of_no_step_tells_of_no_skipped_steps():
    assert read_trace(Recording(make_empty_run(), [])).text == "traced: no step ended"


def test_a_search_that_ends_does_not_tell_of_an_error_that_float32_does_not_have(tune):
    train, calls = make_training(layers=2, square=(0,), exp=(1,)), []

    def failing():
        calls.append(1)
        if len(calls) in (2, 3):
            raise TypeError("a dtype that this kernel never takes")
        if len(calls) == 1:
            train()
        else:
            make_training(layers=2, batches=0)()

    result = tune(failing, steps=1)
    assert len(calls) == 4 and not result.is_reached
    assert "everything in float32 does not pass either" in result.message
    assert "the same error with every list" not in result.message


@pytest.mark.parametrize(
    ("train", "options", "message"),
    [
        (lambda: None, {}, "no model was called, and amp.initialize was not"),
        (make_training(batches=0), {}, "the run ended before a step was taken"),
        (make_training(), {"opt_level": "O0"}, "O0 runs everything in float32"),
        (make_training(), {"opt_level": "O2", "units": "ops"}, "at O2, which casts the model, lists have no ops"),
        (
            train_vectors(lambda: nn.Sequential(nn.Linear(16, 4), nn.Threshold(0.0, float("nan")))),
            {},
            "nothing to tune: with every module in float32, too, a loss of step 0 is nan",
        ),
        (
            train_vectors(lambda: nn.Sequential(nn.Linear(16, 4), nn.Threshold(9e9, 0.0))),
            {},
            "nothing to tune: no parameter that an optimizer holds has a gradient other than zero",
        ),
    ],
    ids=["no session", "no step", "O0", "ops of a cast model", "not finite", "no gradient"],
)
def test_what_cannot_be_tuned_is_said(train, options, message, tune):
    with pytest.raises(Exception, match=message):
        tune(train, **options)
    assert not find_changes() and not events.watchers


@pytest.mark.parametrize("options", [{"units": "layers"}, {"tolerance": 0.0}, {"steps": 0}, {"max_runs": 1}])
def test_wrong_arguments_are_refused_before_a_run(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        insight.tune(lambda: pytest.fail("a run"), **options)


# ---- what the run in float32 shows -----------------------------------------------------------------------------------


def test_gradients_of_modules_that_stay_in_float32_do_not_lower_the_loss_scale():
    def measure(module, overflow, gradient):
        return LowOpRecord(module, "exp", False, 0.0, overflow, 0.0, 0.0, gradient, 0.0)

    records = [
        *(measure(f"layers.{number}", 0.5, 1.0) for number in range(2)),
        measure("layers.0", 0.0, 1e6),
        measure("layers.1.inner", 0.0, 1e6),
        ModulesRecord(("layers", "layers.0", "layers.1", "layers.1.inner"), ()),
        CheckedStepRecord(0, 0, (), False, 2.0**10, True),
    ]
    run = replace(make_empty_run(), low="f16")
    ranking = Ranking(Recording(run, records), "modules")
    forced = ranking.find_forced()
    assert [entry.name for entry in forced] == ["layers.*"]
    assert ranking.find_loss_scale(forced) is None
    assert ranking.find_loss_scale([]) < 1


def test_the_backward_error_of_each_result_is_its_own():
    def copy_and_exp(x):
        return x.clone(), x.exp()

    shadow = Shadow(torch.bfloat16, lambda: 1.0)
    x = torch.linspace(0.1, 2.0, 9, requires_grad=True)
    results = shadow.run("", "copy_and_exp", copy_and_exp, [x], {}, is_listed=False)
    results[1].sum().backward()
    (record,) = shadow.records()
    assert record.backward_error > 0


# ---- what a run does -------------------------------------------------------------------------------------------------


def run_steps(level, seed=5):
    """Losses and unscaled gradients of two steps from the same weights, and the model."""
    seen = []
    torch.manual_seed(seed)
    model = make_gpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    for number in range(2):
        tokens = torch.randint(0, 40, (2, 9), generator=torch.Generator().manual_seed(number))
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        take_step(loss, optimizer)
        masters = list(amp.master_params(optimizer))
        grads = {name: tensor.grad for (name, _), tensor in zip(model.named_parameters(), masters, strict=True)}
        if any(one is None for one in grads.values()):
            grads = {}
        seen.append((loss.item(), {name: sketch(one) for name, one in grads.items()}))
    return seen, model, torch.get_rng_state()


@pytest.fixture
def refer(tmp_path):
    """Returns a function that watches a training with a reference: every module runs in float32."""
    path = tmp_path / "float32.yaml"
    path.write_text('modules:\n  - {match: "**", run: float32}\n')

    def refer(train, level="O1", steps=9):
        run = Run("tuning.float32_run:Float32Run", {"steps": steps}, Settings(level, (str(path),)))
        return FunctionRunner(train)(run)

    return refer


@pytest.mark.parametrize("level", ["O1", "O5"])
def test_a_check_is_bitwise_the_plain_run(level):
    plain, model, state = run_steps(level)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    amp.reset()
    kept = []
    run = Run("tuning.check:Check", {"steps": 9}, Settings(level))
    found = FunctionRunner(lambda: kept.append(run_steps(level)))(run)
    ((seen, checked, state_then),) = kept
    assert [step.losses for step in found.of(CheckedStepRecord)] == [(loss,) for loss, _ in plain]
    assert [loss for loss, _ in seen] == [loss for loss, _ in plain] and torch.equal(state, state_then)
    assert all(torch.equal(value, weights[name]) for name, value in checked.state_dict().items())
    recorded = [{}, {}]
    for one in found.of(SketchRecord):
        recorded[one.step][one.parameter] = one.norm, one.largest, one.sketch
    if plain[0][1]:
        assert recorded == [gradients for _, gradients in plain]


@pytest.mark.parametrize("level", ["O1", "O5"])
def test_the_reference_is_bitwise_a_float32_run(level, refer, tmp_path):
    plain, model, state = run_steps("O0")
    amp.reset()
    kept = []
    found = refer(lambda: kept.append(run_steps(level)), level)
    ((seen, _, state_then),) = kept
    assert [loss for loss, _ in seen] == [loss for loss, _ in plain] and torch.equal(state, state_then)
    recorded = {one.parameter: one.sketch for one in found.of(SketchRecord) if one.step == 1}
    assert recorded == {name: text for name, (_, _, text) in plain[1][1].items()}
    (modules,) = found.of(ModulesRecord)
    assert "blocks.1.attention.qkv" in modules.ran and set(modules.ran) < set(modules.names)
    by_op = {(one.module, one.op) for one in found.of(LowOpRecord)}
    assert {("blocks.0.attention.qkv", "linear"), ("blocks.0.attention.qkv", "F.linear")} & by_op
    found.to_jsonl(tmp_path / "x.jsonl")
    assert Recording.read(tmp_path / "x.jsonl") == found


def test_a_reference_that_is_broken_off_leaves_nothing(refer):
    class Broken(nn.Module):
        def forward(self, x):
            raise KeyboardInterrupt

    def train():
        model = nn.Sequential(nn.Linear(4, 4), Broken())
        amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O1", verbosity=0)
        model(torch.ones(2, 4))

    with pytest.raises(KeyboardInterrupt):
        refer(train)
    assert not find_changes() and not events.watchers
    assert torch.overrides._get_current_function_mode() is None


def test_a_reference_sees_into_what_is_compiled_and_lets_it_be_compiled_again(refer):
    torch.compiler.reset()  # beyond a number of programs torch compiles no more
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    class Model(FaultyGPT):
        def __init__(self, **options):
            super().__init__(**options)
            self.block = torch.compile(self.blocks[0].forward, backend=backend)

        def forward(self, tokens):
            return self.head(self.block(self.embedding(tokens)))

    train = make_training(make_model=Model, layers=1)
    found = refer(train, steps=1)
    assert ("blocks.0.up", "linear") in {(one.module, one.op) for one in found.of(LowOpRecord)} and not compiled
    train()
    assert compiled


# ---- lists that are laid over ----------------------------------------------------------------------------------------


def test_module_rules_that_are_laid_over_hold_at_levels_that_cast_the_model(tmp_path):
    (tmp_path / "ops.yaml").write_text("extends: float16\nblacklist: [linear]\n")
    (tmp_path / "modules.yaml").write_text('modules:\n  - {match: "1", run: float32}\n')
    dtypes = []

    def train():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
        dtypes.append([one.weight.dtype for one in model])

    runner = FunctionRunner(train)
    both = (str(tmp_path / "ops.yaml"), str(tmp_path / "modules.yaml"))
    runner(Run("recorder:Recorder", {}, Settings("O5", both)))
    runner(Run("recorder:Recorder", {}, Settings("O5", both[:1])))
    assert dtypes == [[torch.bfloat16, torch.float32], [torch.bfloat16, torch.bfloat16]]


@pytest.mark.skipif(VERSION < (2, 7), reason="torch 2.6 draws other random numbers in 16 bits than in float32")
def test_noise_of_the_users_own_is_drawn_as_without(tune):
    def train():
        torch.manual_seed(0)
        generator = torch.Generator().manual_seed(1)

        class Noisy(nn.Module):
            def forward(self, h):
                keep = torch.bernoulli(torch.full_like(h, 0.5), generator=generator)
                return h * keep + torch.empty_like(h).normal_(generator=generator)

        model = nn.Sequential(nn.Linear(8, 8), Noisy(), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = amp.initialize(model, optimizer, opt_level="O1", loss_scale=128.0, verbosity=0)
        for _ in range(3):
            loss = model(torch.randn(8, 8)).float().square().mean()
            backward(loss, optimizer)
            optimizer.step()

    result = tune(train)
    assert (result.is_reached, result.entries, result.runs) == (True, (), 2)


def test_the_level_is_that_of_the_training_unless_another_is_asked_for():
    def train():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(torch.randn(8, 8)).float().square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    result = insight.tune(train, tolerance=1e-4, log=lambda line: None)
    assert "tune: autocast on cpu" in result.text
    assert result.text in result._repr_html_().replace("&quot;", '"') and result.message in repr(result)
    assert "tune: O4 on cpu" in insight.tune(train, opt_level="O4", tolerance=1e-4, log=lambda line: None).text


@pytest.mark.parametrize(
    ("factor", "entries", "is_reached"), [(1.0, [], True), (3e3, ["1"], True), (math.inf, [], False)]
)
def test_a_fault_beyond_the_steps_that_are_compared_is_found_by_a_trace(factor, entries, is_reached):
    def train():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), Normalize(), nn.Linear(16, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        amp.initialize(model, optimizer, opt_level="O1", loss_scale=128.0, verbosity=0)
        for step in range(8):
            x = torch.randn(8, 16) * (factor if step == 5 else 1.0)
            optimizer.zero_grad()
            backward(model(x).float().square().mean(), optimizer)
            optimizer.step()

    result = insight.tune(train, log=lambda line: None)
    assert (names(result), result.is_reached) == (entries, is_reached)
    assert "compared: 2 steps" in result.message and ("fits in 8 steps" in result.message) == is_reached


class Normalize(nn.Module):
    def forward(self, x):
        return x / ((x * x).mean(-1, keepdim=True) + 1.0).sqrt()


def test_an_entry_whose_ops_show_no_reason_has_the_fault_of_the_run_without_it(tmp_path):
    """The cast to the dtype of an operand, which is float32 in the measured run, hides that the ops run in float16."""

    class Sums(nn.Module):
        def __init__(self):
            super().__init__()
            self.offset = nn.Parameter(torch.full((8,), 10.4))

        def forward(self, x):
            return (x + self.offset.to(x.dtype)).exp().sum(-1).log() + x.tanh().sum(-1)

    def train():
        model = nn.Sequential(nn.Linear(4, 8), Sums())
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1e-3), torch.amp.GradScaler("cpu", 2.0**10)
        for _ in range(3):
            with torch.autocast("cpu", torch.float16):
                loss = model(torch.zeros(2, 4)).mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    result = insight.tune(train, log=str)
    assert len(result.entries) == 1
    assert 'why: "without it: ' in result.text and "error beyond rounding" not in result.text


def test_ops_outside_the_blocks_of_autocast_are_never_tried():
    class Large(nn.Module):
        """A module whose values fit in float32 only."""

        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            return self.linear(x * 1e6) * 1e-6

    def train():
        torch.manual_seed(0)
        model = nn.ModuleDict({"outside": Large(), "inside": nn.Linear(8, 1)})
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", 2.0**10)
        for _ in range(3):
            x = model["outside"](torch.randn(8, 8))
            with torch.autocast("cpu", torch.float16):
                loss = model["inside"](x).float().square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    result = insight.tune(train, log=lambda line: None)
    # one run in float32 and one in float16; a third would try entries
    assert (result.entries, result.is_reached, result.runs) == ((), True, 2)
