"""`insight.compare` finds the differences that are known to be in its runs, and watched runs are bit by bit the plain
ones.

Guards: insight/comparing/assessment, insight/comparing/campaign, insight/comparing/comparison.
Guards: insight/comparing/exponents, insight/comparing/memory, insight/comparing/probes, insight/comparing/summary.
Guards: insight/comparing/op_errors, insight/op_watch.
Guards: insight/comparing/text, insight/runs, insight/record_checks, insight/notebook.
"""

import copy
import gc
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from compared import HOSTILE, make_comparison
from gpt import make_gpt
from torch import nn
from torch_state import find_changes
from training import backward, take_step

import amp_patch as amp
from amp_patch import events, insight
from amp_patch.events import count_watching_modes
from amp_patch.insight.comparing import Comparison, exponents, parse_run, plan_runs
from amp_patch.insight.comparing.campaign import find_error
from amp_patch.insight.comparing.memory import PeakMeter
from amp_patch.insight.comparing.op_errors import LowOps, OpErrors
from amp_patch.insight.comparing.probes import CurveProbe, LayerProbe
from amp_patch.insight.recordings import Recording
from amp_patch.insight.records import (
    ComparedRecord,
    ComparisonRecord,
    CurveRecord,
    GradientRecord,
    LayerRecord,
    RunRecord,
)
from amp_patch.script_settings import Settings
from amp_patch.session import current
from amp_patch.torch_private import count_dispatch_modes


def start(level, *, seed=0, layers=2, lr=0.05, **options):
    model = make_gpt(layers=layers, seed=seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)


def take_steps(model, optimizer, steps, factor=1.0):
    losses = []
    for number in range(steps):
        tokens = torch.randint(0, 40, (2, 9), generator=torch.Generator().manual_seed(number))
        loss = factor * F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        take_step(loss, optimizer)
        losses.append(loss.item())
    return losses


def make_train(level="O4", steps=100, factor=1.0, **options):
    return lambda: take_steps(*start(level, **options), steps, factor)


# ---- nothing changes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("probe", [lambda: CurveProbe(9), LayerProbe], ids=["curve", "layers"])
@pytest.mark.parametrize("level", ["O1", "O5"])
def test_a_watched_run_is_bitwise_the_plain_one(level, probe):
    def run():
        model, optimizer = start(level)
        random = torch.get_rng_state()
        losses = take_steps(model, optimizer, 3)
        assert torch.equal(torch.get_rng_state(), random)
        state = copy.deepcopy(model.state_dict())
        amp.reset()
        return losses, state

    losses, state = run()
    watching = probe()
    end = events.watch(watching)
    watched_losses, watched_state = run()
    end()
    assert watching.steps == 3 and watching.recording.records
    assert losses == watched_losses
    assert all(torch.equal(value, watched_state[name]) for name, value in state.items())


def check_nothing_is_left():
    hooks = torch.nn.modules.module
    assert not hooks._global_forward_hooks and not hooks._global_forward_pre_hooks
    assert count_dispatch_modes() == count_watching_modes() == 0
    assert not events.watchers and not find_changes()


def test_probes_keep_no_tensor_and_no_hook():
    def count():
        gc.collect()
        return sum(isinstance(one, torch.Tensor) for one in gc.get_objects())

    ends = [events.watch(one) for one in (CurveProbe(7, is_noise=True), LayerProbe())]
    model, optimizer = start("O4")
    take_steps(model, optimizer, 6)
    before = count()
    take_steps(model, optimizer, 1)
    assert count() == before
    for end in ends:
        end()
    amp.reset()
    check_nothing_is_left()


def test_a_training_that_fails_leaves_nothing_even_in_the_step_whose_memory_is_measured():
    def train():
        take_steps(*start("O4"), steps)
        raise ZeroDivisionError

    steps = 1
    found = insight.compare(train, ("O0", "O4"), steps=1)
    assert all("ZeroDivisionError" in run.failed and run.peak is None for run in found.runs)
    check_nothing_is_left()
    steps = 0
    with pytest.raises(amp.SessionError, match=r"fails at the reference O0, so .*:\nZeroDivisionError"):
        insight.compare(train, ("O0", "O4"), steps=2)
    check_nothing_is_left()


def test_an_open_session_is_refused():
    start("O4")
    with pytest.raises(amp.SessionError, match="a session is in force"):
        insight.compare(make_train(), ("O0",), steps=2)


# ---- what is found ---------------------------------------------------------------------------------------------------


def test_a_run_compared_with_itself_differs_in_nothing():
    found = insight.compare(make_train(), ("O0", "O0"), steps=4)
    reference, again = found.rows()
    assert (reference.name, again.name) == ("O0", "O0 (2)")
    assert again.difference == 0 and found.differences("O0 (2)") == [[0.0] * 4]
    layers = found.layers("O0 (2)")
    assert len(layers) == 14 and all((one.output, one.gradient) == (0, 0) for one in layers)
    assert reference.steps == 4 and len(set(found.curves("O0")[0].losses)) == 4
    assert 0 < found.noise < 1e-4


def test_the_one_layer_that_runs_low_comes_first(tmp_path):
    layer = "blocks.1.attention.out"
    path = tmp_path / "one.yaml"
    path.write_text(
        "extends: null\nblacklist: [linear, matmul, layer_norm, softmax, cross_entropy]\n"
        f"modules:\n  - {{match: {layer}, run: low}}\n"
    )
    found = insight.compare(make_train("O4", lists=str(path), layers=3, seed=5), ("O0", "O4"), steps=2)
    assert found.layers("O4")[0].module == layer == found.rows()[1].worst.module
    before = list(found.recording.of(LayerRecord))
    before = before[: [one.module for one in before].index(layer)]
    assert all(one.output == 0 for one in before) and 1e-4 < found.layers("O4")[0].output < 1e-2


class Sine(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x):
        return self.outer(torch.sin(300 * self.inner(x)))


class Sums(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x):
        return self.outer(x + self.inner(x)[torch.arange(4096) % 4].view(1024, 4, 8).mean(0))


@pytest.mark.parametrize(
    ("kind", "op", "is_backward"), [(Sine, "sin", False), (Sums, "getitem", True)], ids=["forward", "backward"]
)
def test_the_worst_op_is_the_one_that_adds_the_error_and_not_one_that_inherits_it(kind, op, is_backward):
    def train():
        torch.manual_seed(0)
        model = kind()
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                loss = (model(torch.randn(4, 8) + 1) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    found = insight.compare(train, ["O0", "as-is"], steps=1)
    worst = found.rows()[1].worst
    assert (worst.module, worst.op, worst.is_backward) == (f"({kind.__name__})", op, is_backward)
    assert worst.error > 0.02 and worst.site.startswith("test_comparing.py:")
    assert f"{op}{' (backward)' * is_backward} {worst.error:.1e}" in found.table()


def test_an_op_in_16_bits_is_not_blamed_for_the_same_op_in_float32_at_another_line():
    def train():
        torch.manual_seed(0)
        model, scaler = nn.Linear(8, 1), torch.amp.GradScaler("cpu")
        optimizer = torch.optim.SGD(model.parameters(), 1e-6)
        for _ in range(2):
            with torch.autocast("cpu", torch.float16):
                small = model(torch.randn(4, 8)) * 0.1
                loss = small.float().square().mean() + 1e3
            optimizer.zero_grad()
            scaler.scale(loss).backward()  # loss * 65536, which would overflow in float16
            scaler.step(optimizer)
            scaler.update()

    found = insight.compare(train, ["O0", "as-is"], steps=1)
    errors = {op.op: op.error for op in found.ops("as-is")}
    assert "mul" in errors and max(errors.values()) < 0.01


def test_the_lists_do_not_act_on_what_probes_compute(tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text("extends: float16\nwhitelist: [flatten, abs]\nmodules: [{match: '**', run: float32}]\n")

    def train():
        torch.manual_seed(0)
        model = nn.Linear(8, 8)
        model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), 0.1), opt_level="O1", verbosity=0)
        for _ in range(2):
            backward(F.mse_loss(model(torch.ones(1, 8)), torch.zeros(1, 8)), optimizer)
            optimizer.step()

    (layer,) = insight.compare(train, ("O0", f"O1+{path}"), steps=2).recording.of(LayerRecord)
    assert (layer.input, layer.output, layer.gradient) == (0, 0, 0)


@pytest.mark.parametrize("level", ["O1", "O5"])
def test_layers_of_every_level_are_those_of_the_reference(level):
    found = insight.compare(make_train(), ("O0", level), steps=2)
    layers = {one.module: one for one in found.layers(level)}
    assert set(layers) == {name for name, part in make_gpt().named_modules() if not list(part.children())}
    assert all(0 < layers[name].output < 0.02 for name in ("blocks.0.down", "blocks.1.attention.qkv", "head"))
    assert all(0 < one.gradient < 0.05 for one in layers.values())
    assert found.runs[1].has_equal_weights and not found.failed


def test_counts_are_those_of_the_unscaled_gradients():
    probe = LayerProbe(loss_scale=1024.0)
    end = events.watch(probe)
    take_steps(*start("O2"), 1)
    (counted,) = probe.recording.of(GradientRecord)
    probe.stop()
    end()
    amp.reset()
    gradients = []

    class Looking(events.Watcher):
        def step_begun(self, optimizer):
            gradients.extend(weight.grad.clone() for weight in amp.master_params(optimizer))

    end = events.watch(Looking())
    take_steps(*start("O2", loss_scale=1024.0), 1)
    end()
    assert gradients[0].dtype is torch.float32
    assert counted == exponents.count(gradients)
    assert sum(counted.counts) > 5_000


def test_the_layers_of_a_scaled_run_are_compared_at_the_scale_that_it_came_to():
    found = insight.compare(make_train(layers=1, factor=1e4), ("O0", "O1"), steps=14)
    row = found.rows()[1]
    assert row.skipped > 2 and found.curves("O1")[0].skipped[:2] == (0, 1)
    assert row.scale == found.curves("O1")[0].scales[-1] == row.run.loss_scale == 2.0 ** (16 - row.skipped)
    assert all(math.isfinite(one.gradient) for one in found.layers("O1"))


def test_gradients_that_float16_would_lose_are_told_unscaled_and_scaled():
    found = insight.compare(make_train(factor=1e-6), ("O0", "O1", "O4"), steps=1)
    none, half, bfloat = found.rows()
    assert (none.zero, none.zero_scaled) == (0, 0)
    assert half.zero > 0.9 and half.zero_scaled < 0.1 and bfloat.zero < 1e-3


@pytest.mark.parametrize("scale", [2.0**0, 2.0**16, 2.0**120], ids=lambda scale: f"{scale:g}")
@pytest.mark.parametrize(("low", "dtype"), [("f16", torch.float16), ("bf16", torch.bfloat16)], ids=["f16", "bf16"])
def test_shares_are_those_that_a_cast_gives(low, dtype, scale):
    generator = torch.Generator().manual_seed(3)
    sizes = torch.empty(100_000).uniform_(-9, 4, generator=generator)
    values = torch.randn(100_000, generator=generator) * 10.0**sizes
    edges = [65504.0, 65519.0, 65520.0, 65535.0, 2.0**-24, 2.0**-25, 1.001 * 2.0**-25, 2.0**-26, 2.0**-134, 2.0**-133]
    values = torch.cat([values, torch.tensor([*edges, 3.39e38, 3.3895e38, 3.4e38, 1e-40, 0.0, math.inf, math.nan])])
    counted = exponents.count([values[:50_000], values[50_000:]])
    assert (counted.zeros, counted.nonfinite) == (1, 2)
    there = values[(values != 0) & values.isfinite()]
    cast = (there * scale).to(dtype)
    is_subnormal = (cast != 0) & (cast.abs() < torch.finfo(dtype).tiny)
    found = exponents.find_shares(counted, low, scale)
    assert found.zero == pytest.approx((cast == 0).double().mean().item(), abs=1e-12)
    assert found.infinite == pytest.approx(cast.isinf().double().mean().item(), abs=1e-12)
    assert found.subnormal == pytest.approx(is_subnormal.double().mean().item(), abs=1e-3)


def test_nothing_is_counted_of_nothing():
    counted = exponents.count([torch.zeros(3), torch.tensor([math.inf])])
    assert counted == GradientRecord("", 0, (), 3, 1)
    assert exponents.find_shares(counted, "f16") == (0, 0, 0)


@pytest.mark.parametrize(
    ("reference", "values", "error"),
    [
        ((3.0, 4.0), (3.0, 4.5), 0.1),
        ((0.0,), (0.0,), 0.0),
        ((0.0,), (1.0,), math.inf),
        ((1.0,), (math.nan,), math.inf),
        ((math.inf,), (math.inf,), 0.0),
        ((), (), None),
        ((1.0,), (1.0, 2.0), None),
    ],
)
def test_errors_are_relative_norms(reference, values, error):
    assert find_error(reference, values) == error


def test_memory_counts_what_stays_and_what_a_step_adds():
    def train():
        model = nn.Sequential(nn.Linear(512, 512, bias=False), nn.Linear(512, 512, bias=False))
        optimizer = torch.optim.Adam(model.parameters())
        model, optimizer = amp.initialize(model, optimizer, opt_level="O0", verbosity=0)
        for _ in range(9):
            take_step(model(torch.ones(2, 512)).sum(), optimizer)

    plain, masters = insight.compare(train, ("O0", "O5"), steps=1).rows()
    weights = 2 * 512 * 512 * 4
    small = 40_000  # activations, numbers of steps
    # weights, gradients and two states, and what the step of one weight, or of all of them together, makes
    assert 4 * weights <= plain.run.peak < 6 * weights + small
    assert masters.run.peak > plain.run.peak + 0.4 * weights  # the low weights beside their masters


def test_memory_is_counted_for_as_long_as_it_lives():
    model = amp.initialize(nn.Linear(1, 1, bias=False), opt_level="O0", verbosity=0)
    meter = PeakMeter(current.require())
    meter.start()
    kept = torch.zeros(1000)
    for _ in range(3):
        torch.zeros(500)
    view = kept.view(10, 100)[1:]
    del kept
    torch.zeros(200)
    del view
    torch.zeros(1200)
    meter.stop()
    meter.stop()
    torch.zeros(9000)
    assert meter.peak == 4 * (model.weight.numel() + 1500)
    assert count_watching_modes() == count_dispatch_modes() == 0


def test_memory_counts_the_low_halves_of_split_masters():
    model = nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    amp.initialize(model, optimizer, opt_level="O5", split_masters=True, verbosity=0)
    model.weight.grad = torch.zeros_like(model.weight)
    meter = PeakMeter(current.require())
    meter.start()
    meter.stop()
    # the weight, its gradient, the low half, and the copy of the weight that shows edits: 2 bytes each
    assert meter.peak == 4 * 2 * 64 * 64


def test_times_leave_the_first_step_out(monkeypatch):
    times = iter([0.0, 5.0, 5.0, 5.2, 5.2, 5.5, 5.5, 5.9, 5.9])
    monkeypatch.setattr("amp_patch.insight.comparing.probes.time.process_time", lambda: next(times))
    probe = CurveProbe(4)
    end = events.watch(probe)
    take_steps(*start("O0"), 4)
    end()
    (curve,) = probe.recording.of(CurveRecord)
    assert curve.ms == pytest.approx(300)


def test_times_leave_out_how_long_the_noise_takes_to_make(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("amp_patch.insight.comparing.probes.time.process_time", lambda: now[0])
    monkeypatch.setattr("amp_patch.insight.comparing.probes._nudge", lambda *_: now.append(now.pop() + 7.0))
    probe = CurveProbe(3, is_noise=True)
    end = events.watch(probe)
    take_steps(*start("O0"), 3)
    end()
    (curve,) = probe.recording.of(CurveRecord)
    assert now[0] == 28.0 and curve.ms == 0.0


# ---- seeds, noise, failures ------------------------------------------------------------------------------------------


def test_seeds_that_a_training_sets_itself_are_told_of():
    found = insight.compare(make_train(), ("O0", "O4"), steps=2, seeds=3)
    assert found.are_seeds_equal and "sets a seed of its own" in found.table()
    assert [len(found.curves(run)) for run in ("O0", "O4")] == [2, 1] and "±" not in found.table()


def train_unseeded():
    model = nn.Linear(8, 2)
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O1", verbosity=0)
    for _ in range(7):
        loss = model(torch.randn(4, 8)).square().mean()
        take_step(loss, optimizer)


def test_a_training_without_a_seed_is_given_each():
    found = insight.compare(train_unseeded, ("O0", "O0", "O4"), steps=5, seeds=3)
    assert len({curve.losses for curve in found.curves("O0").values()}) == 3 and not found.are_seeds_equal
    assert found.differences("O0 (2)") == [[0.0] * 5] * 3 and found.rows()[2].spread > 0
    (layer,) = found.layers("O4")
    assert layer.module == "(Linear)" and layer.output > 0


def test_a_training_that_begins_again_is_looked_at_in_the_session_that_steps():
    def train():
        start("O1")
        amp.reset()
        take_steps(*start("O1"), 3)

    found = insight.compare(train, ("O0", "O4"), steps=2)
    assert len(found.layers("O4")) == 14 and found.rows()[1].steps == 2


def test_a_run_that_fails_has_its_reason_and_the_others_go_on():
    def train():
        model, optimizer = start("O1")
        if amp.stats().opt_level == "O4":
            raise RuntimeError("out of <memory>\nand more")
        take_steps(model, optimizer, 2)

    found = insight.compare(train, ("O0", "O4", "O5"), steps=2)
    assert [run.failed.partition(": ")[0] for run in found.runs] == ["", "RuntimeError", ""]
    assert "O4: RuntimeError: out of <memory>" in found.table().splitlines()
    assert found.rows()[1].loss is None and found.rows()[2].difference is not None
    check_nothing_is_left()


def test_other_weights_than_the_references_are_told_of():
    count = iter(range(100))
    found = insight.compare(lambda: take_steps(*start("O1", seed=next(count)), 3), ("O0", "O4"), steps=1)
    assert not found.runs[1].has_equal_weights and not found.layers("O4")
    assert "O4: began with other weights" in found.table()


def test_noise_reaches_weights_that_are_loaded_later_and_normalised():
    def train():
        torch.manual_seed(0)
        model, other = (nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)) for _ in range(2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = amp.initialize(model, optimizer, opt_level="O0", verbosity=0)
        model.load_state_dict(other.state_dict())
        for _ in range(8):
            take_step(model(torch.randn(64, 4)).square().mean(), optimizer)

    found = insight.compare(train, ("O0",), steps=8)
    assert 0 < found.noise < 1e-5


def test_noise_is_at_least_what_float32_rounds_off_a_loss():
    found = make_comparison()
    same = [
        replace(one, losses=found.curves("O0")[one.seed].losses) for one in found.curves("O0", is_noise=True).values()
    ]
    others = [one for one in found.recording.records if not getattr(one, "is_noise", False)]
    silent = Comparison(Recording(found.recording.run, [*others, *same]))
    unmeasured = Comparison(Recording(found.recording.run, others))
    largest = max(loss for curve in found.curves("O0").values() for loss in curve.losses)
    assert found.noise == pytest.approx(1e-6) and silent.noise == largest * 2**-24
    assert unmeasured.noise is None and "noise: not known" in unmeasured.table()


# ---- verdicts --------------------------------------------------------------------------------------------------------


def make_table(
    offs, *, loss=0.1, noise=1e-6, ms=10.0, steps=30, skipped=(), peak=None, gained=None, first=0.0, batches=0, **facts
):
    """The table of a reference with this loss, and of a run that is off by so much in each seed.

    gained: what the training of the reference gained; first: the difference of the first losses; batches: those of the
    run, of which the reference has one for each step; facts: of the run.
    """
    curves, scales = [], (1.0,) * steps
    for seed, off in enumerate(offs):
        curves += [
            CurveRecord("O0", seed, (loss + seed,) * steps, scales, (), 10.0, batches=steps),
            CurveRecord("O0", seed, (loss + seed + noise,) * steps, scales, (), 9.0, is_noise=True),
            CurveRecord(
                *("O1", seed, (loss + seed + first, *(loss + seed + off,) * (steps - 1)), scales, skipped, ms),
                batches=batches,
            ),
        ]
    if gained is not None:
        curves.append(CurveRecord("O0", 0, (loss + gained,) * steps, scales, (), 9.0, is_frozen=True))
    about = ComparisonRecord("O0", steps, tuple(range(len(offs))), "a CPU", "")
    runs = [ComparedRecord("O0", peak=10), ComparedRecord("O1", low="f16", peak=peak, **facts)]
    recording = Recording(RunRecord("", "cpu", "O0", "", (), "", 0), [about, *runs, *curves])
    return Comparison(recording).table()


@pytest.mark.parametrize(
    ("off", "options", "told"),
    [
        (1e-6, {}, "as good as O0 (loss less than 0.01% higher, within noise); time within noise"),
        (3e-5, {"ms": 5.0}, "as good as O0 (loss 0.03% higher, below 1%); faster (a step takes 0.50"),
        (-0.009, {"ms": 10.8}, "no worse than O0 (loss 9.00% lower); time within noise"),
        (0.009, {"ms": 30.0}, "perhaps worse than O0 (loss 9.00% higher); slower (a step takes 3.00"),
        (0.02, {"peak": 15}, "worse than O0 (loss 20.00% higher); time within noise"),
        (0.1, {"skipped": (0, 1)}, "worse than O0 (loss 100.00% higher, 2 steps of 30 skipped)"),
        (0.02, {"noise": 0.05}, "not told apart from O0 (loss 20.00% higher, within noise, which is 50% of the loss)"),
        (1e-7, {"loss": 0.0}, "not told apart from O0 (loss 1.0e-07 higher, within noise, and the loss is 0)"),
        (0.0, {"ms": math.nan}, "as good as O0 (the same loss); time not judged, since O1 gives the script float32"),
        (math.nan, {}, "worse than O0 (the loss is not finite)"),
        (0.0, {"ms": 3.5, "steps": 8}, "as good as O0 (the same loss); time not judged after 8 steps: 10 are enough"),
        (1e-6, {"skipped": range(30)}, "not judged against O0, since nothing was learned (loss less than"),
        (
            math.nan,
            {"skipped": range(30), "peak": 5},
            "worse than O0 (the loss is not finite); time and memory not judged",
        ),
    ],
)
def test_a_run_has_a_verdict(off, options, told):
    table = make_table([off], **options)
    assert f"O1: {told}" in table and ("--seeds 3" in table) == ("perhaps" in told or "no worse" in told)
    assert ("; amp-patch trace --opt-level O1 finds lost values" in table) == told.startswith("worse")
    assert ("; 1.50 times the peak memory" in table) == (options.get("peak") == 15)


@pytest.mark.parametrize(
    ("off", "options", "told"),
    [
        (1e-4, {"gained": 0.1}, "as good as O0 (loss 0.10% higher, below 1%)"),
        (0.0, {"gained": 0.0}, "not judged: O0 has learned nothing in these steps"),
        (1e-6, {"gained": 5e-6}, "not judged: O0 has learned nothing in these steps"),
        (5e-4, {"gained": 5e-4}, "worse than O0 (loss higher by 100% of what O0 gained)"),
        (
            2e-4,
            {"gained": 5e-4, "first": 1e-4},
            "not judged: O0 has learned too little in these steps (its loss gained",
        ),
        (
            -5e-3,
            {"gained": 0.1, "batches": 60},
            "worse than O0 (it drops 30 of 60 batches, so its loss is of other data)",
        ),
        (1e-4, {"gained": 0.1, "batches": 31}, "as good as O0"),
        (
            1e-4,
            {"gained": 0.1, "skipped": range(30)},
            "worse than O0 (all 30 steps are skipped, so nothing is learned)",
        ),
        (
            1e-4,
            {"gained": 0.1, "gradient_error": 0.69, "gradient_worst": "ln2"},
            "worse than O0 (gradients of ln2 are off by 0.69 in the first step)",
        ),
        (1e-4, {"gained": 0.1, "gradient_error": 0.05}, "as good as O0"),
        (1e-4, {"gained": 0.1, "gradient_error": math.inf}, "as good as O0"),
        (
            1e-4,
            {"gained": 0.1, "kept": 0.04, "kept_worst": "w", "lost_by": "weights"},
            "worse than O0 (96% of the weight updates are lost)",
        ),
        (
            1e-4,
            {"gained": 0.1, "kept": 0.1, "kept_worst": "w", "lost_by": "tensor"},
            "worse than O0 (90% of the updates of w are lost)",
        ),
        (
            1e-4,
            {"gained": 0.1, "kept": 1.0, "kept_worst": "w", "lost_by": "sum", "update_error": 0.66},
            "worse than O0 (the sums at w are off by 66%)",
        ),
    ],
)
def test_a_verdict_counts_more_than_the_last_losses(off, options, told):
    table = make_table([off], **options)
    assert f"O1: {told}" in table
    assert ("updates kept" in table) == ("kept" in options) and ("(w)" in table) == ("kept" in options)


def test_times_are_not_judged_if_the_reference_was_not_timed():
    found = make_comparison()
    records = [
        replace(one, ms=math.nan) if isinstance(one, CurveRecord) and one.run == "O0" else one
        for one in found.recording.records
    ]
    untimed = Comparison(Recording(found.recording.run, records))
    assert untimed.rows()[1].factor is None and untimed.rows()[0].ms is None
    assert "time not judged, since O0 gives the script float32 op by op" in untimed.table()


@pytest.mark.parametrize(
    ("offs", "told"),
    [
        ((0.1, -0.12, 0.05), "as good as O0 (loss "),
        ((0.1, 0.12, 0.11), "worse than O0 (loss "),
        ((3.0, 0.0, 0.0), "worse than O0 in 1 of 3 seeds (loss "),
    ],
    ids=["sign of chance", "all", "one clearly"],
)
def test_three_seeds_tell_what_is_chance(offs, told):
    table = make_table(offs, loss=1.0)
    assert f"O1: {told}" in table and "--seeds" not in table


# ---- noise and names -------------------------------------------------------------------------------------------------


def test_noise_is_measured_of_a_generator_whose_graph_holds_weights_while_its_judge_steps():
    def train():
        torch.manual_seed(0)
        models = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        (generator, judge), (of_generator, of_judge) = amp.initialize(models, optimizers, opt_level="O0", verbosity=0)
        for _ in range(3):
            made = generator(torch.ones(2, 4))
            take_step(judge(made.detach()).square().mean(), of_judge)
            take_step(judge(made).mean(), of_generator)

    assert 0 < insight.compare(train, ("O0",), steps=3).noise < 1e-5


def test_a_notebook_shows_a_row_for_each_run_and_escapes_what_it_is_given():
    shown = make_comparison()._repr_html_()
    assert shown.count("<tr>") == 1 + 4 and "<td>O4</td>" in shown and HOSTILE not in shown
    assert make_comparison().recording._repr_html_() == shown
    assert str(make_comparison().recording) == str(make_comparison()) == make_comparison().table()


def test_runs_are_named_by_level_and_lists():
    assert parse_run("O4+a/b.yaml+paper") == Settings("O4", ("a/b.yaml", "paper"))
    plan = plan_runs(["O1", "O4+a/b.yaml", "O4+c/b.yaml", Settings("O1")], "O0", 5, [1, 2])
    assert list(plan.runs) == ["O0", "O1", "O4+b.yaml", "O4+b.yaml (2)", "O1 (2)"]
    assert plan.runs["O4+b.yaml (2)"] == Settings("O4", ("c/b.yaml",)) and plan.reference == "O0"
    assert list(plan_runs(["O4", "O1"], "O1", 5, [0]).runs) == ["O4", "O1"]
    plan = plan_runs(["O4+a/b.yaml", "O4+c/b.yaml"], "O4+c/b.yaml", 5, [0])
    assert list(plan.runs) == ["O4+b.yaml (2)", "O4+b.yaml"] and plan.runs[plan.reference].lists == ("c/b.yaml",)


@pytest.mark.parametrize("reference", ["as-is", "script"])
def test_each_choice_of_runs_has_the_reference_under_its_name(reference):
    for asked in (None, ["O0", "as-is"], ["O0", "script"]):
        plan = plan_runs(asked, reference, 5, [0])
        assert all(plan.reference in runs for runs in (plan.runs, plan.native_runs, plan.low_runs))


# ---- out -------------------------------------------------------------------------------------------------------------


def test_a_comparison_is_read_as_it_was_written(tmp_path):
    found = make_comparison()
    found.to_jsonl(tmp_path / "c.jsonl")
    again = Comparison.read(tmp_path / "c.jsonl")
    assert again.recording == found.recording and again.table() == found.table()


def test_another_recording_is_no_comparison():
    with pytest.raises(amp.RecordError, match="no record of kind 'comparison'"):
        Comparison(Recording(RunRecord("2", "cpu", "O1", "f16", (), "", 0), []))


def test_an_op_has_one_name_whether_a_list_has_it_or_not():
    """Otherwise an op of a run finds no error of its own in the run in float32."""

    def train():
        model = nn.Linear(4, 4)
        out = model(torch.randn(6, 4))
        torch.zeros(2, 4, dtype=out.dtype).index_add_(0, torch.arange(6) % 2, out).sum().backward()

    named = []
    for level in ("O0", "O4"):
        ops = OpErrors() if level == "O0" else LowOps()
        amp.initialize(nn.Linear(1, 1), opt_level=level, verbosity=0)
        ops.watch(current.require())
        train()
        ops.stop()
        named.append({op.op for op in ops.records() if op.low == "bf16"})
        amp.reset()
    assert "index_add_" in named[0] & named[1]
