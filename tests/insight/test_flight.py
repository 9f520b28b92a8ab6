"""A flight recorder leaves the training as it was, keeps magnitudes of some steps, and says which of them have grown.

Guards: insight/flight_record, insight/flight/sheet, insight/flight/sampler, insight/flight/steps.
Guards: insight/flight/flight_recorder, insight/flight/growth, insight/flight/describe, insight/report/flown.
Guards: insight/notebook, integrations/trackers.
"""

import copy
import math
import pickle
import random
import subprocess
import sys
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import amp_patch as amp
from amp_patch import insight
from amp_patch.errors import ArgumentTypeError, ArgumentValueError, RecordError
from amp_patch.insight.flight.describe import summarize
from amp_patch.insight.flight.growth import find_growth
from amp_patch.insight.flight.sheet import Sheet
from amp_patch.insight.flight_record import FlightKind, FlightRecord
from amp_patch.insight.report import make_report
from amp_patch.integrations.trackers import log_samples

OUTPUT, GRADIENT, SCALE = FlightKind.OUTPUT, FlightKind.GRADIENT, FlightKind.SCALE


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))


def train(mode, steps=6, recorder=None, spike=None):
    """Train at a level, with a GradScaler ("scaler"; "fused" with a fused optimizer), or in float32. Returns what the
    training computed, and its objects.
    """
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, fused=mode == "fused")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=mode in ("scaler", "fused"))
    if mode.startswith("O"):
        net, optimizer = amp.initialize(net, optimizer, opt_level=mode, verbosity=0)
    if recorder is not None:
        recorder.attach(net, optimizer, scaler if scaler.is_enabled() else None)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16, enabled=scaler.is_enabled()):
            loss = net(torch.randn(32, 8)).float().square().mean()
        if step == spike:
            loss = loss * math.inf
        losses.append(float(loss.detach()))
        if mode.startswith("O"):
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    if recorder is not None:
        recorder.close()
    computed = losses, [weight.detach().clone() for weight in net.parameters()], torch.get_rng_state()
    return computed, (net, optimizer, scaler)


@pytest.mark.parametrize("mode", ["float32", "scaler", "fused", "O1", "O2", "O5"])
def test_a_training_is_bitwise_as_without_it_and_nothing_is_left_behind(mode):
    (losses, weights, random_state), _ = train(mode, spike=3 if mode == "scaler" else None)
    amp.reset()
    recorder = insight.FlightRecorder(every=2)
    recorded, (net, optimizer, scaler) = train(mode, recorder=recorder, spike=3 if mode == "scaler" else None)
    assert str(recorded[0]) == str(losses) and torch.equal(recorded[2], random_state)
    assert all(map(torch.equal, recorded[1], weights))
    outputs = {record.name: record for record in recorder.records if record.subject is OUTPUT}
    assert {"0", "1", "2", "3", "4"} <= outputs.keys() and outputs["2"].steps == (0, 2, 4)
    assert outputs["2"].zeros[-1] > 0.3 and outputs["0"].zeros[-1] == 0
    amp.reset()
    assert not any(module._forward_hooks for module in net.modules()) and "step" not in vars(scaler)
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks


@pytest.mark.parametrize("mode", ["scaler", "fused", "O1", "O2"])
def test_gradients_come_without_the_loss_scale(mode):
    found = {}
    for way in ("float32", mode):
        recorder = insight.FlightRecorder(every=1)
        train(way, steps=2, recorder=recorder)
        amp.reset()
        found[way] = [record.largest for record in recorder.records if record.subject is GRADIENT]
        scales = [record.largest for record in recorder.records if record.subject is SCALE]
    for magnitudes, in_float32 in zip(found[mode], found["float32"], strict=True):
        # ratios of sums over gradients that float16 has rounded
        assert magnitudes == pytest.approx(in_float32, rel=0.1)
    assert scales == [(2.0**10,) * 2 if mode in ("scaler", "fused") else (2.0**16,) * 2]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler))])
def test_a_scaler_can_be_copied_and_pickled_while_it_is_recorded(duplicate):
    scaler, net = torch.amp.GradScaler("cpu", init_scale=8.0), make_net()
    with insight.FlightRecorder().attach(net, torch.optim.SGD(net.parameters(), lr=0.1), scaler):
        other = duplicate(scaler)
    assert other.step.__func__ is torch.amp.GradScaler.step and other.step.__self__ is other


def test_a_step_that_a_scaler_skips_is_counted_and_sampled():
    recorder = insight.FlightRecorder(every=3)
    train("scaler", steps=7, recorder=recorder, spike=3)
    gradient = next(record for record in recorder.records if record.subject is GRADIENT)
    assert gradient.steps == (0, 3, 6)
    assert [math.isfinite(number) for number in gradient.largest] == [True, False, True]


def test_there_are_hooks_only_in_sampled_steps_and_copies_of_the_model_have_none_that_act():
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    recorder = insight.FlightRecorder(every=2).attach(net, optimizer)
    found = []
    for _ in range(4):
        found.append(sum(len(module._forward_hooks) for module in net.modules()))
        copies = [copy.deepcopy(net), pickle.loads(pickle.dumps(net))]
        net(torch.ones(4, 8)).sum().backward()
        for copied in copies:
            copied(torch.full((4, 8), 1e6))
        optimizer.step()
    recorder.close()
    assert found == [6, 0, 6, 0]
    assert max(number for record in recorder.records for number in record.largest) < 1e5


class Recomputed(nn.Module):
    """Runs a layer in a checkpoint."""

    def __init__(self, reentrant):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.reentrant = reentrant
        self.calls = 0

    def forward(self, x):
        def run(x):
            self.calls += 1
            return self.inner(x * self.calls)  # recomputed values are larger

        return checkpoint(run, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_neither_recomputed_nor_evaluated_modules_count(reentrant):
    torch.manual_seed(0)
    net = Recomputed(reentrant)
    inputs = torch.randn(4, 8, requires_grad=True)
    largest = float(net.inner(inputs).detach().abs().max())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    recorder = insight.FlightRecorder(every=1).attach(net, optimizer)
    loss = net(inputs).sum()
    net.eval()
    with torch.no_grad():
        net.inner(1e6 * inputs)
    loss.backward()
    optimizer.step()
    recorder.close()
    output = next(record for record in recorder.records if record.name == "inner" and record.subject is OUTPUT)
    assert net.calls == 2 and output.largest == pytest.approx((largest,), rel=1e-4)


def test_any_tensor_can_be_observed_and_several_models_have_names_of_their_own():
    nets = [nn.Linear(4, 4), nn.Linear(4, 4)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    recorder = insight.FlightRecorder(every=1, keep=3).attach(nets, optimizers)
    for step in range(5):
        loss = sum(net(torch.ones(2, 4)).sum() for net in nets)
        recorder.observe("loss", loss * 0 + step)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    recorder.close()
    named = {(record.subject, record.name): record for record in recorder.records}
    assert named[FlightKind.VALUE, "loss"].largest[-1] == 4
    assert {name for subject, name in named if subject is OUTPUT} == {"Linear[0]", "Linear[1]"}
    # the optimizer that steps first ends a step, so the other's gradients belong to the next
    assert named[OUTPUT, "Linear[0]"].steps == (2, 3, 4) and (GRADIENT, "Linear[1]") in named


def test_shares_are_of_values_all_over_a_tensor():
    layer = nn.Identity()
    net = nn.Sequential(nn.Linear(64, 64, bias=False), layer)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    values = torch.zeros(32, 16, 64)
    values[..., ::4] = 1e4  # a fourth of the channels
    recorder = insight.FlightRecorder(every=1).attach(net, optimizer)
    for shown in (values, values.transpose(1, 2), values.permute(2, 0, 1)[:, :, 1:], values.double(), values.half()):
        recorder.observe(f"of shape {tuple(shown.shape)}, {shown.dtype}", shown)
    net(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    recorder.close()
    seen = [record for record in recorder.records if record.subject is FlightKind.VALUE]
    assert len(seen) == 5
    for record in seen:
        assert record.largest == (1e4,) and record.zeros[0] == pytest.approx(0.75, abs=0.06)
        assert record.near[0] == pytest.approx(1 - record.zeros[0], abs=1e-4)


def test_a_sheet_that_holds_a_loss_scale_alone_counts_no_zeros_of_an_earlier_step():
    sheet = Sheet(torch.device("cpu"), 2)
    sheet.begin()
    sheet.measure(0, torch.zeros(600))
    sheet.finish()
    sheet.begin()
    sheet.note(0, 1024.0)
    assert [column[0] for column in sheet.finish().unfold()] == [0, 1024, 0, 0]


# ---- what it says ----------------------------------------------------------------------------------------------------

STEPS = tuple(range(0, 6400, 50))


def make_record(law, *, noise=0.0, subject=OUTPUT, name="blocks.7.scores", low="f16", seed=0, **changed):
    """A record whose magnitude is a function of the step, times noise of that many powers of two."""
    draw = random.Random(seed)
    largest = tuple(law(step) * 2 ** draw.gauss(0, noise) for step in STEPS)
    values = {"zeros": (0.0,) * len(STEPS), "near": (0.0,) * len(STEPS), **changed}
    return FlightRecord(subject, name, low, STEPS, largest, low=low, **values)


def test_growth_is_told_with_its_ends_and_a_forecast():
    record = make_record(lambda step: 300 * 2 ** (step / 1000), noise=0.2)
    text = summarize([record])
    assert text.startswith("128 samples of steps 0 to 6,350:\n  the output of blocks.7.scores grew from ")
    # log2(65504 / (300 * 2**6.35)) * 1000 = 1420
    growth = find_growth(record.steps, record.largest)
    assert growth.start == pytest.approx(300, rel=0.3) and growth.rise == pytest.approx(6.35, abs=0.3)
    assert growth.forecast(65504.0) == pytest.approx(1420, rel=0.15)
    assert "at this pace float16 ends in about 1," in text


HEALTHY = {
    "level": lambda step: 20.0,
    "a beginning that levels off": lambda step: 20 - 19 * math.exp(-step / 800),
    "a logarithm": lambda step: 2 * math.log(step + 2),
    "a warmup and a decay": lambda step: 1 + 30 * math.sin(step / 6400 * math.pi),
    "a fall": lambda step: 100 * 2 ** (-step / 1000),
    "a cycle": lambda step: 10 + 9 * math.sin(step / 500),
    "one spike": lambda step: 1e4 if step == 3000 else 10.0,
    "a small drift": lambda step: 10 * 2 ** (step / 6400),
    "overflows that a scaler skips": lambda step: math.inf if step % 1000 == 0 else 3.0,
}


@pytest.mark.parametrize("name", HEALTHY)
@pytest.mark.parametrize("noise", [0.0, 0.5, 1.5])
def test_nothing_is_told_of_a_healthy_training(name, noise):
    records = [make_record(HEALTHY[name], noise=noise, seed=seed) for seed in range(10)]
    assert ": nothing has grown; the output of blocks.7.scores is the largest with " in summarize(records)


GROWING = {
    "an exponential": (lambda step: 2.0 * 2 ** (step / 450), 0.5),
    "a line": (lambda step: 1.0 + 8 * step, 0.2),
    "from a late step on": (lambda step: 20.0 * 2 ** max(0, (step - 4500) / 200), 0.2),
    "faster and faster": (lambda step: 10.0 * 2 ** ((step / 2200) ** 2), 0.2),
    "with skipped steps": (lambda step: math.inf if step % 700 == 0 else 2.0 * 2 ** (step / 450), 0.3),
}


@pytest.mark.parametrize("name", GROWING)
def test_growth_is_told(name):
    law, noise = GROWING[name]
    for seed in range(5):
        assert " grew from " in summarize([make_record(law, noise=noise, seed=seed)])


def test_equal_layers_share_a_line_and_the_end_of_samples_is_named():
    records = [make_record(lambda step: 2.0 * 2 ** (step / 450), name=f"blocks.{number}.mlp") for number in range(8)]
    records[0] = make_record(lambda step: math.nan if step > 6000 else 2.0 * 2 ** (step / 450), name="blocks.0.mlp")
    (line,) = summarize(records).splitlines()[1:]
    assert "(and 7 more of blocks.*.mlp), and was first NaN in step 6,050" in line


def test_gradients_that_vanish_and_a_scale_that_falls_are_told():
    rising = tuple(min(0.9, step / 6000) for step in STEPS)
    lost = make_record(lambda step: 1e-8, subject=GRADIENT, name="head", zeros=rising)
    scale = make_record(lambda step: 2.0**12 if step < 5000 else 1.0, subject=SCALE, name="")
    output = make_record(HEALTHY["level"])
    lines = summarize([lost, scale, output]).splitlines()[1:]
    assert lines[0].startswith("  zeros in the gradient of head rose from 13% to 90%: float16 ends below 6e-08")
    assert lines[1:] == ["  the loss scale fell from 2**12 to 1"]
    assert summarize([lost, make_record(lambda step: 2.0**20, subject=SCALE), output]).endswith(
        "nothing has grown; the output of blocks.7.scores is the largest with 20, and float16 ends at 65,504"
    )


def test_few_samples_say_nothing():
    record = FlightRecord(OUTPUT, "a", "f16", (0, 50), (1.0, 100.0), (0.0, 0.0), (0.0, 0.0))
    assert summarize([record]) == (
        "2 samples of steps 0 to 50: too few to see growth, which takes 8; sample more often"
    )


# ---- files, pages, trackers ------------------------------------------------------------------------------------------


def test_a_file_holds_the_samples_and_a_chart_is_drawn_of_what_grew(tmp_path):
    path = tmp_path / "flight.jsonl"
    recorder = insight.FlightRecorder(every=1, path=path)
    net = nn.Sequential(nn.Linear(4, 4), nn.Identity())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    with recorder.attach(net, optimizer):
        for step in range(20):
            net(torch.full((2, 4), 2.0**step)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    recording = insight.Recording.read(path)
    assert recording.flight == recorder.records and str(recording) == str(recorder.recording)
    assert "the output of 0 grew from" in str(recording) and "grew from" in recorder.summary()
    assert "20 samples" in repr(recording) and "grew from" in recording._repr_html_()
    page = make_report(recording)
    assert page.count("<figure>") == 2 and "Largest magnitude of the output of 0" in page
    steady = replace(recorder.records[0], name="Net.QKV", subject=FlightKind.OUTPUT, low="f16", largest=(1.0,) * 20)
    assert "the output of Net.QKV is the largest" in make_report(replace(recording, records=[steady]))
    path.write_text(path.read_text().replace('"largest": [', '"largest": [1.0, '))
    with pytest.raises(RecordError, match="not a recording"):
        insight.Recording.read(path)


def test_a_file_that_cannot_be_written_does_not_end_the_training(tmp_path):
    recorder = insight.FlightRecorder(every=1, path=tmp_path / "missing" / "flight.jsonl")
    with pytest.warns(UserWarning, match="could not write"):
        train("float32", recorder=recorder)
    with pytest.raises(OSError):
        recorder.write(tmp_path / "missing" / "flight.jsonl")


class WandbRun:
    def __init__(self):
        self.logged = []

    def log(self, numbers, step):
        self.logged.append((step, numbers))


def test_a_tracker_gets_each_sample_once():
    run, entries = WandbRun(), []
    for target in (run, lambda *entry: entries.append(entry)):
        train("scaler", steps=5, recorder=insight.FlightRecorder(every=2, on_sample=log_samples(target)))
    assert [step for step, _ in run.logged] == [0, 2, 4]
    numbers = dict(run.logged)[2]
    assert {"flight/output/0", "flight/gradient/4", "flight/zeros/gradient/4", "flight/scale"} <= numbers.keys()
    assert {step: dict(run.logged)[step][tag] for tag, _, step in entries if tag == "flight/output/0"} == {
        step: value for tag, value, step in entries if tag == "flight/output/0"
    }


def test_a_step_without_a_measurement_is_no_sample():
    sampled = []
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    recorder = insight.FlightRecorder(every=1, on_sample=lambda step, numbers: sampled.append(step))
    with recorder.attach(net, optimizer):
        for is_called in (True, False, True, True):
            optimizer.zero_grad()
            if is_called:
                net(torch.ones(2, next(net.parameters()).shape[1])).sum().backward()
            optimizer.step()
    assert sampled == [0, 2, 3]


def test_compiled_code_keeps_no_hook_and_does_not_recompile():
    torch._dynamo.reset()
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    net = make_net()
    net.compile(backend=backend)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        recorder = insight.FlightRecorder(every=2).attach(net, optimizer)
        for _ in range(5):
            net(torch.ones(4, 8)).sum().backward()
            optimizer.step()
        recorder.close()
    assert len(compiled) == 1 and any(record.subject is GRADIENT for record in recorder.records)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: insight.FlightRecorder(every=0), ArgumentValueError),
        (lambda: insight.FlightRecorder(keep="all"), ArgumentTypeError),
        (lambda: insight.FlightRecorder().attach(make_net(), None), ArgumentTypeError),
        (
            lambda: insight.FlightRecorder().attach(
                net := make_net(), torch.optim.SGD(net.parameters(), lr=0.1), scaler=2.0
            ),
            ArgumentTypeError,
        ),
    ],
    ids=["every", "keep", "no optimizer", "scaler"],
)
def test_wrong_arguments(call, error):
    with pytest.raises(error):
        call()


def test_it_is_read_without_torch():
    record = make_record(lambda step: 2.0 * 2 ** (step / 450))
    script = (
        "import sys\n"
        "from amp_patch.insight.flight.describe import describe_flight\n"
        "from amp_patch.insight.flight_record import FlightRecord, FlightKind\n"
        f"record = FlightRecord(FlightKind.OUTPUT, 'a', 'f16', {record.steps}, {record.largest},"
        f" {record.zeros}, {record.near}, 'f16')\n"
        "assert len(describe_flight([record])) == 1\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_session_may_open_and_close_while_it_records():
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    recorder = insight.FlightRecorder(every=1).attach(net, optimizer)
    hooks = []
    for step in range(6):
        if step == 2:
            amp.initialize(net, optimizer, opt_level="O2", verbosity=0)
        if step == 4:
            amp.reset()
        hooks.append(len(optimizer._optimizer_step_pre_hooks))
        loss = net(torch.randn(32, 8)).float().square().mean()
        optimizer.zero_grad()
        if 2 <= step < 4:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        else:
            loss.backward()
        optimizer.step()
    recorder.close()
    assert hooks == [1, 1, 0, 0, 1, 1]  # with a hook, a bound fused optimizer could not skip on the device
    assert recorder.recording.run.opt_level == "O2"
    gradients = [record for record in recorder.records if record.subject is GRADIENT]
    assert {record.steps for record in gradients} == {(0, 1, 2, 3, 4, 5)}


def test_a_rank_has_a_file_of_its_own_which_an_interrupt_leaves_whole(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    recorder = insight.FlightRecorder(every=1, path=tmp_path / "flight.jsonl")
    with pytest.raises(KeyboardInterrupt), recorder.attach(net, optimizer):
        for step in range(10):
            net(torch.randn(4, 8)).sum().backward()
            optimizer.step()
            if step == 4:
                raise KeyboardInterrupt
    recording = insight.Recording.read(tmp_path / "flight.1.jsonl")
    assert recording.run.rank == 1 and recording.flight[0].steps == (0, 1, 2, 3, 4)


def test_a_recording_of_ops_does_not_have_those_of_the_recorder():
    found = []
    for is_eager_autograd in (False, True):
        net = make_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        recorder = insight.FlightRecorder(every=1)
        if is_eager_autograd:
            recorder.attach(net, optimizer)
        with insight.recording() as recording:
            net(torch.ones(4, 8)).sum().backward()
            optimizer.step()
        recorder.close()
        found.append([(op.module, op.op, op.calls) for op in recording.ops])
    assert found[0] == found[1] and recorder.records
