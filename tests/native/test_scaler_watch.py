"""A GradScaler used wrongly is told once, with line and edit; correct loops are told of nothing and train the same.

Guards: native/scaler_watch, native/misuse, native/unscaled_gradients, native/unscaled_losses.
Guards: insight/misuse_record, native/gradient_reads, native/region_watch, native/scale_state.
"""

import io
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from amp_patch import insight, native
from amp_patch.insight import MisuseRecord
from amp_patch.insight.tracer import tracing
from amp_patch.native.misuse import Kind


class Training:
    """Two models with an optimizer each, and one GradScaler."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model, self.other = nn.Linear(8, 1), nn.Linear(8, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.second = torch.optim.SGD(self.other.parameters(), lr=0.01)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        self.x = torch.randn(16, 8)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 100)

    def loss(self, model: nn.Module | None = None) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            return (model or self.model)(self.x).float().square().mean()

    def clip(self, limit: float = 0.1) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), limit)

    def finish(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.second.zero_grad()


def plain(t: Training) -> None:
    t.scaler.scale(t.loss()).backward()
    t.finish()


def clip_unscaled(t: Training) -> None:
    t.scaler.scale(t.loss()).backward()
    t.scaler.unscale_(t.optimizer)
    t.clip()
    t.finish()


def clip_at_the_scale(t: Training) -> None:
    t.scaler.scale(t.loss()).backward()
    t.clip(0.1 * t.scaler.get_scale())
    t.finish()


def measure_only(t: Training) -> None:
    t.scaler.scale(t.loss()).backward()
    t.clip(float("inf"))
    t.finish()


def accumulate(t: Training) -> None:
    for _ in range(2):
        t.scaler.scale(t.loss() / 2).backward()
    t.finish()


def one_update_for_two(t: Training) -> None:
    t.scaler.scale(t.loss() + t.loss(t.other)).backward()
    t.scaler.step(t.second)
    t.finish()


def update_after_each_loss(t: Training) -> None:
    t.scaler.scale(t.loss(t.other)).backward()
    t.scaler.step(t.second)
    t.scaler.update()
    t.scaler.scale(t.loss()).backward()
    t.finish()


def one_without_scaler(t: Training) -> None:
    t.loss(t.other).backward()
    t.second.step()
    t.scaler.scale(t.loss()).backward()
    t.finish()


def unscale_by_hand(t: Training) -> None:
    t.scaler.scale(t.loss()).backward()
    for parameter in t.model.parameters():
        parameter.grad /= t.scaler.get_scale()
    t.optimizer.step()
    t.optimizer.zero_grad()


def unscale_then_own_step(t: Training) -> None:
    t.scaler.scale(t.loss()).backward()
    t.scaler.unscale_(t.optimizer)
    t.optimizer.step()
    t.scaler.update()
    t.optimizer.zero_grad()


def gradients_by_hand(t: Training) -> None:
    t.scaler.scale(t.loss()).backward()
    for parameter in t.other.parameters():
        parameter.grad = torch.ones_like(parameter)
    t.second.step()
    t.finish()


def read_unscaled(t: Training) -> None:
    t.scaler.scale(t.loss()).backward()
    t.scaler.unscale_(t.optimizer)
    _ = t.model.weight.grad.norm().item()
    t.model.weight.grad.clamp_(-1, 1)
    t.finish()


def read_and_divide(t: Training) -> None:
    t.scaler.scale(t.loss()).backward()
    _ = t.model.weight.grad.norm().item() / t.scaler.get_scale()
    t.finish()


def look_for_inf(t: Training) -> None:
    t.scaler.scale(t.loss()).backward()
    for parameter in t.model.parameters():
        assert torch.isfinite(parameter.grad).all() and parameter.grad.abs().sum() > 0
        parameter.grad.mul_(0.5)
    t.finish()


def teacher_in_float16(t: Training) -> None:
    with torch.autocast("cpu", torch.float16), torch.no_grad():
        target = t.other(t.x)
    (t.model(t.x) - target.float()).square().mean().backward()
    t.optimizer.step()
    t.optimizer.zero_grad()


def save_all(t: Training) -> None:
    plain(t)
    torch.save([t.optimizer.state_dict(), t.scaler.state_dict()], io.BytesIO())


def schedule_taken_steps(t: Training) -> None:
    t.scaler.scale(t.loss() * (1e30 if t.scaler.get_scale() > 512 else 1)).backward()
    scale = t.scaler.get_scale()
    t.finish()
    if t.scaler.get_scale() >= scale:
        t.schedule.step()


def step_both(t: Training) -> None:
    t.scaler.step(t.second)
    t.finish()


def scale_by_hand(t: Training) -> None:
    scale = t.scaler.get_scale()
    t.scaler.scale(t.loss()).backward()
    (t.loss(t.other) * scale).mean().backward()
    step_both(t)


def scale_gradients_by_hand(t: Training) -> None:
    scale = torch.tensor(t.scaler.get_scale())
    t.scaler.scale(t.loss()).backward()
    t.loss(t.other).backward(scale)
    step_both(t)


def penalty_after_unscale(t: Training) -> None:
    t.scaler.scale(t.loss() + t.loss(t.other)).backward()
    t.scaler.unscale_(t.second)
    t.other.weight.square().sum().backward()
    step_both(t)


def unscaled_gradients_dropped(t: Training) -> None:
    (t.loss() + t.loss(t.other)).backward()
    t.optimizer.zero_grad(set_to_none=False)
    t.second.zero_grad()
    t.scaler.scale(t.loss() + t.loss(t.other)).backward()
    step_both(t)


def gradients_assigned(t: Training) -> None:
    t.scaler.scale(t.loss()).backward()
    (t.loss(t.other) * 0).backward()
    weights = list(t.other.parameters())
    for weight, gradient in zip(weights, torch.autograd.grad(t.scaler.scale(t.loss(t.other)), weights), strict=True):
        weight.grad = gradient
    step_both(t)


def second_scaler_disabled(t: Training) -> None:
    disabled = torch.amp.GradScaler("cpu", enabled=False)
    t.scaler.scale(t.loss()).backward()
    disabled.scale(t.loss(t.other)).backward()
    disabled.step(t.second)
    t.finish()


RIGHT = [
    *(scale_by_hand, scale_gradients_by_hand, penalty_after_unscale, unscaled_gradients_dropped, gradients_assigned),
    second_scaler_disabled,
    *(plain, clip_unscaled, clip_at_the_scale, measure_only, accumulate, one_update_for_two, update_after_each_loss),
    *(one_without_scaler, unscale_by_hand, unscale_then_own_step, gradients_by_hand),
    *(read_unscaled, read_and_divide, look_for_inf, teacher_in_float16, save_all, schedule_taken_steps),
]


def clip_scaled(t: Training) -> None:
    t.scaler.scale(t.loss()).backward()
    t.clip()
    t.finish()


def clip_before_unscale(t: Training) -> None:
    t.scaler.scale(t.loss()).backward()
    t.clip()
    t.scaler.unscale_(t.optimizer)
    t.finish()


def not_scaled(t: Training) -> None:
    t.scaler.scale(t.loss())
    t.loss().backward()
    t.finish()


def own_step(t: Training) -> None:
    t.scaler.scale(t.loss()).backward()
    t.optimizer.step()
    t.optimizer.zero_grad()


def update_between(t: Training) -> None:
    t.scaler.scale(t.loss() + t.loss(t.other)).backward()
    t.scaler.step(t.second)
    t.scaler.update()
    t.finish()


def read_scaled(t: Training) -> None:
    t.scaler.scale(t.loss()).backward()
    _ = sum(parameter.grad.data.norm(2).item() for parameter in t.model.parameters())
    t.finish()


def read_before_unscale(t: Training) -> None:
    t.scaler.scale(t.loss()).backward()
    _ = torch.norm(t.model.weight.grad.detach())
    t.scaler.unscale_(t.optimizer)
    t.finish()


def clamp_by_hand(t: Training) -> None:
    t.scaler.scale(t.loss()).backward()
    t.model.weight.grad.data.clamp_(-1, 1)
    t.finish()


def clip_values(t: Training) -> None:
    t.scaler.scale(t.loss()).backward()
    nn.utils.clip_grad_value_(t.model.parameters(), 1.0)
    t.finish()


def float16_alone(t: Training) -> None:
    t.loss().backward()
    t.optimizer.step()
    t.optimizer.zero_grad()


def float16_with_a_disabled_scaler(t: Training) -> None:
    disabled = torch.amp.GradScaler("cpu", enabled=False)
    disabled.scale(t.loss()).backward()
    disabled.step(t.optimizer)
    t.optimizer.zero_grad()


def loss_outside(t: Training) -> None:
    with torch.autocast("cpu", torch.float16):
        output = t.model(t.x)
    t.scaler.scale(nn.functional.mse_loss(output, torch.zeros_like(output))).backward()
    t.finish()


def scaled_bfloat16(t: Training) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = t.model(t.x).float().mean()
    t.scaler.scale(loss).backward()
    t.finish()


def schedule_all_steps(t: Training) -> None:
    t.scaler.scale(t.loss() * torch.inf).backward()
    t.finish()
    t.schedule.step()


def save_without_scaler(t: Training) -> None:
    plain(t)
    torch.save({"model": t.model.state_dict(), "optimizer": t.optimizer.state_dict()}, io.BytesIO())


def closure_without_its_name(t: Training) -> None:
    def backward() -> Tensor:
        loss = t.loss()
        t.scaler.scale(loss).backward()
        return loss

    backward()
    t.scaler.step(t.optimizer, backward)
    t.scaler.update()


def backward_after_unscale(t: Training) -> None:
    t.scaler.scale(t.loss()).backward()
    t.scaler.unscale_(t.optimizer)
    t.scaler.scale(t.loss()).backward()
    t.finish()


def second_not_scaled(t: Training) -> None:
    t.scaler.scale(t.loss()).backward()
    for _ in range(2):
        (t.loss(t.other) / 2).backward()
    step_both(t)


def second_not_scaled_and_clipped(t: Training) -> None:
    t.loss(t.other).backward()
    t.scaler.scale(t.loss()).backward()
    t.scaler.unscale_(t.second)
    nn.utils.clip_grad_norm_(t.other.parameters(), 0.1)
    step_both(t)


def scaled_gradients_dropped(t: Training) -> None:
    t.scaler.scale(t.loss() + t.loss(t.other)).backward()
    t.second.zero_grad()
    t.loss(t.other).backward()
    step_both(t)


TOLD = [
    (second_not_scaled, Kind.UNSCALED_LOSS),
    (second_not_scaled_and_clipped, Kind.UNSCALED_LOSS),
    (scaled_gradients_dropped, Kind.UNSCALED_LOSS),
    (backward_after_unscale, Kind.ADDED_SCALED),
    (read_scaled, Kind.READ),
    (read_before_unscale, Kind.READ),
    (clamp_by_hand, Kind.CLIPPED),
    (clip_values, Kind.CLIPPED),
    (float16_alone, Kind.NO_SCALER),
    (float16_with_a_disabled_scaler, Kind.NO_SCALER),
    (loss_outside, Kind.LOSS_OUTSIDE),
    (scaled_bfloat16, Kind.SCALED_BFLOAT16),
    (schedule_all_steps, Kind.SCHEDULED_SKIP),
    (save_without_scaler, Kind.UNSAVED_SCALER),
    (clip_scaled, Kind.CLIPPED),
    (clip_before_unscale, Kind.CLIPPED),
    (not_scaled, Kind.UNSCALED_LOSS),
    (own_step, Kind.SCALED_STEP),
    (update_between, Kind.EARLY_UPDATE),
    (closure_without_its_name, Kind.CLOSURE),
]


def never_scaled(t: Training) -> None:
    t.loss().backward()
    t.finish()


def update_first(t: Training) -> None:
    t.scaler.update()


def unscale_twice(t: Training) -> None:
    t.scaler.scale(t.loss()).backward()
    t.scaler.unscale_(t.optimizer)
    t.scaler.unscale_(t.optimizer)


def no_update(t: Training) -> None:
    t.scaler.scale(t.loss()).backward()
    t.scaler.step(t.optimizer)


def update_alone(t: Training) -> None:
    t.scaler.scale(t.loss()).backward()
    t.scaler.update()


def closure(t: Training) -> None:
    t.scaler.step(t.optimizer, closure=t.loss)


def zeroed(t: Training) -> None:
    t.scaler.scale(t.loss()).backward()
    t.optimizer.zero_grad()
    t.finish()


def low_weights(t: Training) -> None:
    t.model.half()
    t.scaler.scale(t.loss()).backward()
    t.finish()


def no_update_with_low_weights(t: Training) -> None:
    t.model.half()
    t.optimizer = torch.optim.Adam(t.model.parameters(), fused=True)
    no_update(t)
    t.scaler.step(t.optimizer)


RAISING = [
    (never_scaled, Kind.UNSCALED_LOSS),
    (update_first, Kind.NOTHING_SCALED),
    (unscale_twice, Kind.UNSCALED_TWICE),
    (no_update, Kind.MISSING_UPDATE),
    (update_alone, Kind.UPDATE_WITHOUT_STEP),
    (closure, Kind.CLOSURE),
    (zeroed, Kind.NO_GRADIENTS),
    (low_weights, Kind.LOW_WEIGHTS),
    (no_update_with_low_weights, Kind.MISSING_UPDATE),
]


def run(step: Callable[[Training], None]) -> tuple[list[Tensor], list[str]]:
    """The weights after four steps, and the warnings."""
    training = Training()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "Detected call of")  # of a scheduler, by torch
        for _ in range(4):
            step(training)
    weights = [*training.model.parameters(), *training.other.parameters()]
    return weights, [str(one.message) for one in caught]


@pytest.mark.parametrize("step", RIGHT)
def test_a_correct_loop_is_told_of_nothing_and_trains_the_same(step) -> None:
    expected, _ = run(step)
    with native.install():
        weights, messages = run(step)
    assert messages == []
    # a step on scaled gradients diverges
    torch.testing.assert_close(weights, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("step", "kind"), TOLD)
def test_a_wrong_loop_is_told_once_and_trains_the_same(step, kind) -> None:
    expected, _ = run(step)
    with native.install():
        weights, messages = run(step)
    assert len(messages) == 1
    assert native.Misuse(kind, "").effect in messages[0] and native.Misuse(kind, "").edit in messages[0]
    assert messages[0].startswith("test_scaler_watch.py:")
    # a step on scaled gradients diverges
    torch.testing.assert_close(weights, expected, rtol=0, atol=0, equal_nan=True)


def test_an_error_between_loss_and_step_leaves_torch_as_it_was() -> None:
    before = torch.norm, Tensor.norm, vars(Tensor).get("std"), torch._foreach_norm
    training = Training()
    with native.install(), pytest.raises(KeyError), insight.recording():
        training.scaler.scale(training.loss()).backward()
        raise KeyError
    assert before == (torch.norm, Tensor.norm, vars(Tensor).get("std"), torch._foreach_norm)


def test_functions_can_be_scripted_between_loss_and_step() -> None:
    def norm(x):
        return torch.norm(x)

    training = Training()
    with native.install():
        training.scaler.scale(training.loss()).backward()
        assert torch.jit.script(norm)(torch.ones(4)) == 2


def test_functions_of_torch_func_run_between_loss_and_step() -> None:
    training = Training()
    with native.install():
        training.scaler.scale(training.loss()).backward()
        assert torch.func.vmap(torch.norm)(torch.ones(2, 4)).tolist() == [2, 2]
        assert torch.func.grad(lambda x: x.pow(2).sum())(torch.ones(2)).tolist() == [2, 2]


@pytest.mark.parametrize(("step", "kind"), RAISING)
@pytest.mark.filterwarnings("ignore:.*test_scaler_watch")
def test_an_error_of_the_scaler_has_a_note(step, kind) -> None:
    with native.install(), pytest.raises((RuntimeError, ValueError, AssertionError)) as raised:
        run(step)
    (note,) = raised.value.__notes__
    assert native.Misuse(kind, "").edit in note


@pytest.mark.filterwarnings("ignore:.*one region of torch.autocast")
def test_a_loop_in_one_region_is_recorded(monkeypatch) -> None:
    # another test of this process may have compiled code
    monkeypatch.setattr("amp_patch.native.scaler_watch.count_compiled", lambda: 0)
    training = Training()
    with native.install(), insight.recording() as recording, torch.autocast("cpu", torch.bfloat16):
        for _ in range(3):
            plain(training)
    assert [record.cause for record in recording.misuses] == [str(Kind.LOOP_IN_REGION)]


@pytest.mark.filterwarnings("ignore:.*gradients are clipped")
def test_trace_reports_a_misuse_and_reads_it_again(tmp_path) -> None:
    training = Training()
    with native.install(), tracing() as tracer:
        for _ in range(2):
            clip_scaled(training)
    tracer.recording.to_jsonl(tmp_path / "trace.jsonl")
    (record,) = insight.Recording.read(tmp_path / "trace.jsonl").of(MisuseRecord)
    assert "Call scaler.unscale_(optimizer) before the clipping" in str(tracer.recording)
    assert record == tracer.recording.misuses[0]


def test_a_report_that_reads_the_scale_hides_no_misuse() -> None:
    read = eval("lambda scaler: scaler.get_scale()", {"__name__": "amp_patch.insight.tracer"})

    def step(t: Training) -> None:
        read(t.scaler)
        update_between(t)

    def watched(t: Training) -> None:
        original = t.scaler.update
        t.scaler.update = lambda: (original(), read(t.scaler))
        step(t)
        del t.scaler.update

    with native.install():
        _, messages = run(watched)
    assert len(messages) == 1 and "scaler.update() may change the scale" in messages[0]
