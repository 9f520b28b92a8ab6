"""`LossScaler` follows the rule of Megatron-LM, which is that of GradScaler without hysteresis, over any sequence of
steps; unscaling is division, and finds inf and NaN element by element.

Guards: training/loss_scaler, training/unscaling.
"""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from devices import requires_cpu
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from amp_patch.config.presets import DynamicScale
from amp_patch.training.loss_scaler import LossScaler
from amp_patch.training.unscaling import rescale_, unscale_

CPU = torch.device("cpu")
INIT_SCALE, GROWTH_INTERVAL = 65536.0, 2000  # Apex's, and GradScaler's
REAL_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX_DTYPES = (torch.complex64, torch.complex128)
DTYPES = (*REAL_DTYPES, *COMPLEX_DTYPES)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
NONFINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
TINY = torch.finfo(torch.float32).tiny


def scale_of(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float32)


def new_flag() -> Tensor:
    return torch.zeros((), dtype=torch.float32)


def note_pass(scaler: LossScaler, overflow: bool) -> None:
    """One backward pass that overflowed, or not."""
    scaler.add_found_inf(scale_of(float(overflow)))


def run_step(scaler: LossScaler, *overflows: bool) -> None:
    """One optimizer step that the given backward passes led to."""
    for overflow in overflows:
        note_pass(scaler, overflow)
    scaler.update()


# ---- the dynamic law -------------------------------------------------------------------------------------------------


@dataclass
class Megatron:
    """The law of `DynamicGradScaler` in Megatron-LM (megatron/core/optimizer/grad_scaler.py), in float32 as there, and
    with our bounds.
    """

    rule: DynamicScale
    minimum: float | None
    maximum: float
    unskipped: int = 0

    def __post_init__(self) -> None:
        self.scale, self.tracker = scale_of(self.rule.init), self.rule.hysteresis
        self.clamp()

    def clamp(self) -> None:
        self.scale = self.scale.clamp(self.minimum or TINY, self.maximum)

    def step(self, overflow: bool) -> None:
        if overflow:
            self.unskipped = 0
            self.tracker -= 1
            if self.tracker <= 0:
                self.scale = self.scale * scale_of(self.rule.backoff_factor)
        else:
            self.unskipped += 1
            if self.unskipped == self.rule.growth_interval:
                self.unskipped, self.tracker = 0, self.rule.hysteresis
                self.scale = self.scale * scale_of(self.rule.growth_factor)
        self.clamp()

    def state(self) -> dict[str, float]:
        state = {"loss_scale": self.scale.item(), "unskipped": self.unskipped}
        return {**state, "hysteresis_tracker": max(self.tracker, 0)} if self.rule.hysteresis > 1 else state


RULES = st.builds(
    DynamicScale,
    init=st.sampled_from([1.0, 768.0, 2.0**17]),
    growth_factor=st.sampled_from([1.25, 2.0, 3.0]),  # exact in float32, in which Megatron-LM keeps them
    backoff_factor=st.sampled_from([0.25, 0.5, 0.875]),
    growth_interval=st.integers(1, 4),
    hysteresis=st.sampled_from([1, 1, 2, 4]),
)


@given(
    rule=RULES,
    minimum=st.sampled_from([None, 1.0, 1000.0]),
    maximum=st.sampled_from([1024.0, 2.0**15 + 1, math.inf]),
    steps=st.lists(st.lists(st.booleans(), max_size=3), max_size=40),
    saved_at=st.integers(0, 40),
)
def test_a_dynamic_scale_follows_the_model_and_goes_on_after_a_resume(
    rule: DynamicScale, minimum: float | None, maximum: float, steps: list[list[bool]], saved_at: int
) -> None:
    """There is one decision for all passes of a step, and none without a pass."""

    def make() -> LossScaler:
        return LossScaler(rule, min_loss_scale=minimum, max_loss_scale=maximum)

    model, scaler = Megatron(rule, minimum, maximum), make()
    for index, overflows in enumerate(steps):
        if index == saved_at:
            state, scaler = scaler.state_dict(), make()
            scaler.load_state_dict(state)
        run_step(scaler, *overflows)
        if overflows:
            model.step(any(overflows))
        assert scaler.state_dict() == model.state()
    assert scaler.scale_on(CPU).item() == scaler.loss_scale() == model.scale.item()
    assert [type(value) for value in scaler.state_dict().values()][:2] == [float, int]


@pytest.mark.parametrize(
    ("rule", "skips"),
    [(DynamicScale(), 100), (DynamicScale(hysteresis=21), 120), (DynamicScale(backoff_factor=0.75), 241)],
    ids=str,
)
def test_a_scale_is_given_up_when_it_has_fallen_far(rule: DynamicScale, skips: int) -> None:
    scaler = LossScaler(rule)
    assert scaler.hopeless_after == skips
    for _ in range(skips):
        run_step(scaler, True)
    assert 0 < scaler.loss_scale() <= 2.0**-83
    for _ in range(200):
        run_step(scaler, True)
    assert scaler.loss_scale() == TINY


@pytest.mark.parametrize(("overflows", "due"), [((True, False), 0.5), ((False, True), 0.5), ((False, False), 2.0)])
def test_readers_are_told_the_decision_that_is_due_and_do_not_take_it(overflows: tuple[bool, ...], due: float) -> None:
    scaler = LossScaler(DynamicScale(growth_interval=1))
    for overflow in overflows:
        note_pass(scaler, overflow)
    due *= INIT_SCALE
    assert [scaler.loss_scale(), scaler.state_dict()["loss_scale"], scaler.loss_scale()] == [due] * 3
    handed_out = scaler.scale_on(CPU)
    scaler.update()
    assert handed_out.item() == INIT_SCALE  # a new tensor holds the next one
    scaler.update()
    assert scaler.scale_on(CPU).item() == scaler.loss_scale() == due


# ---- the static law --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 2.0**20])
def test_a_static_scale_never_changes_and_counts_every_step(scale: float) -> None:
    scaler = LossScaler(scale, min_loss_scale=2.0**21, max_loss_scale=2.0)  # bounds of a dynamic one
    scaler.growth_interval = 2
    for overflow in (False, True, False, False):
        run_step(scaler, overflow)
    assert scaler.state_dict() == {"loss_scale": scale, "unskipped": 4}
    scaler.load_state_dict({"loss_scale": 256.0, "unskipped": 5000})
    assert scaler.state_dict() == {"loss_scale": scale, "unskipped": 5000}
    assert scaler.is_identity is (scale == 1.0)


def test_a_dynamic_scale_of_one_is_not_the_identity() -> None:
    may_grow = LossScaler("dynamic", max_loss_scale=1.0)
    assert may_grow.loss_scale() == 1.0 and may_grow.is_dynamic and not may_grow.is_identity


# ---- state -----------------------------------------------------------------------------------------------------------


def test_states_without_a_count_load_with_a_full_one_and_counts_load_without_hysteresis() -> None:
    patient = LossScaler(DynamicScale(hysteresis=5))
    run_step(patient, True)
    patient.load_state_dict({"loss_scale": 512.0, "unskipped": 7})  # what Apex writes
    assert patient.state_dict() == {"loss_scale": 512.0, "unskipped": 7, "hysteresis_tracker": 5}
    patient.load_state_dict({"loss_scale": 512.0, "unskipped": 7, "hysteresis_tracker": 80})
    assert patient.state_dict()["hysteresis_tracker"] == 5
    plain = LossScaler("dynamic")
    plain.load_state_dict({"loss_scale": 64.0, "unskipped": 1, "hysteresis_tracker": 4})
    run_step(plain, True)
    assert plain.state_dict() == {"loss_scale": 32.0, "unskipped": 0}


def test_a_scaler_that_receives_the_state_of_another_goes_on_as_that_one() -> None:
    rule = DynamicScale(init=4096.0, growth_interval=3, hysteresis=2)
    sender, receiver = LossScaler(rule), LossScaler(rule)
    for overflow in (True, True, False):
        run_step(sender, overflow)
    receiver.load_packed_state(sender.pack_state(CPU))
    for overflow in (False, False, True, True):
        assert receiver.state_dict() == sender.state_dict()
        run_step(sender, overflow)
        run_step(receiver, overflow)
    assert receiver.state_dict() == sender.state_dict()


def test_loading_drops_the_decision_that_was_due() -> None:
    scaler = LossScaler("dynamic")
    note_pass(scaler, True)
    scaler.load_state_dict({"loss_scale": 32.0, "unskipped": 7})
    scaler.update()
    assert scaler.state_dict() == {"loss_scale": 32.0, "unskipped": 7}


@pytest.mark.parametrize("unskipped", [GROWTH_INTERVAL - 1, GROWTH_INTERVAL, 10**6], ids=str)
def test_a_count_at_or_beyond_the_interval_lets_the_scale_grow(unskipped: int) -> None:
    scaler = LossScaler("dynamic")
    scaler.load_state_dict({"loss_scale": 32.0, "unskipped": unskipped})
    run_step(scaler, False)
    assert scaler.loss_scale() == 64.0


@pytest.mark.parametrize("loss_scale", ["dynamic", 8.0])
def test_a_scale_set_by_hand_is_used_next_and_keeps_the_count(loss_scale: Any) -> None:
    scaler = LossScaler(loss_scale)
    run_step(scaler, False)
    for value in (0.0, -2.0, math.inf, math.nan, 1e300, 1e-60):
        with pytest.raises(ValueError, match="finite and positive"):
            scaler.set_loss_scale(value)
    scaler.set_loss_scale(32)
    assert scaler.scale_on(CPU).item() == scaler.loss_scale() == 32.0
    assert scaler.state_dict() == {"loss_scale": 32.0, "unskipped": 1}
    scaler.set_loss_scale(1.0)
    assert scaler.is_identity is (loss_scale != "dynamic")
    assert scaler.awaits_backward is not scaler.is_identity  # where the scale is 1, nothing is divided by it


def test_a_decision_that_is_due_does_not_touch_a_scale_set_by_hand() -> None:
    scaler = LossScaler("dynamic")
    note_pass(scaler, True)
    scaler.set_loss_scale(64.0)
    scaler.update()
    assert scaler.state_dict() == {"loss_scale": 64.0, "unskipped": 0}


# ---- unscale_ is division, and rescale_ multiplication ---------------------------------------------------------------


def values(dtype: torch.dtype, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    full = torch.complex128 if dtype.is_complex else torch.float64
    return (torch.randn(*shape, generator=generator, dtype=full) * 8).to(dtype)


@each_dtype
def test_unscaling_by_a_power_of_two_is_division_to_the_bit(dtype: torch.dtype) -> None:
    for scale in (1.0, 2.0**7, 2.0**-5):
        gradient, found_inf = values(dtype, 5, 3), new_flag()
        parts = torch.view_as_real(gradient) if dtype.is_complex else gradient
        expected = parts / scale  # complex division rounds more than once in torch 2.6
        unscale_([gradient], scale_of(scale), found_inf)
        assert torch.equal(parts, expected)
        assert not bool(found_inf)


@each_dtype
def test_unscaling_by_any_scale_is_division_to_the_last_place(dtype: torch.dtype) -> None:
    for scale in (3.0, 0.3):
        gradient = values(dtype, 40)
        expected = gradient.to(torch.complex128 if dtype.is_complex else torch.float64) / scale_of(scale).item()
        unscale_([gradient], scale_of(scale), new_flag())
        eps = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)  # the scale and its inverse are float32
        # below the smallest normal number of float16 the spacing, not the relative error, is the bound
        torch.testing.assert_close(
            gradient.to(expected.dtype), expected, rtol=1.01 * eps, atol=torch.finfo(dtype).tiny * eps
        )


def test_one_call_takes_gradients_of_every_kind() -> None:
    dense = [values(dtype, 4) for dtype in DTYPES]
    sparse = torch.eye(3).to_sparse()
    odd = [torch.empty(0), torch.tensor(6.0), values(torch.float32, 4, 6)[:, ::2], values(torch.float32, 4, 6).t()]
    gradients = [*dense, sparse, *odd]
    before = [gradient.to_dense().clone() for gradient in gradients]

    def check(factor: float) -> None:
        assert all(torch.equal(one.to_dense(), old * factor) for one, old in zip(gradients, before, strict=True))

    unscale_(gradients, scale_of(8.0), None)
    check(0.125)
    rescale_(gradients, scale_of(32.0))
    check(4.0)


@requires_cpu("the simulated device has no sparse tensors")
@pytest.mark.parametrize("is_coalesced", [True, False], ids=["coalesced", "uncoalesced"])
def test_sparse_gradients_are_divided_like_dense_ones(is_coalesced: bool) -> None:
    for dtype in (*REAL_DTYPES, torch.complex64):
        indices = torch.tensor([[0, 3, 0]])
        gradient = torch.sparse_coo_tensor(indices, values(dtype, 3, 2), (5, 2), check_invariants=True)
        gradient = gradient.coalesce() if is_coalesced else gradient
        expected = gradient._values() / 4
        unscale_([gradient], scale_of(4.0), new_flag())
        assert torch.equal(gradient._values(), expected)


@pytest.mark.parametrize("view", [torch.conj, lambda memory: memory.conj().imag], ids=["conjugate", "negative"])
def test_lazy_views_are_divided_and_multiplied_in_their_memory(view: Any) -> None:
    gradient = view(torch.tensor([3 - 4j, -5 + 6j, 7 + 0j], dtype=torch.complex64))
    memory, before = gradient.data_ptr(), gradient.clone()
    found_inf = new_flag()
    unscale_([gradient], scale_of(8.0), found_inf)
    assert torch.equal(gradient, before / 8) and gradient.data_ptr() == memory and not bool(found_inf)
    rescale_([gradient], scale_of(4.0))
    assert torch.equal(gradient, before / 2)
    gradient[1] = math.nan
    unscale_([gradient], scale_of(8.0), found_inf)
    assert bool(found_inf)


# ---- overflow is seen element by element -----------------------------------------------------------------------------


def is_found(*gradients: Tensor) -> bool:
    found_inf = new_flag()
    unscale_(list(gradients), scale_of(2.0), found_inf)
    assert found_inf.item() in (0.0, 1.0) and found_inf.dtype is torch.float32 and found_inf.shape == ()
    return bool(found_inf)


@pytest.mark.parametrize("bad", NONFINITE.values(), ids=list(NONFINITE))
def test_one_bad_element_is_found_wherever_it_is(bad: float) -> None:
    for dtype in REAL_DTYPES:
        for position in (0, 17, 36):
            gradient = torch.ones(37, dtype=dtype)
            gradient[position] = bad
            others = [torch.ones(3, dtype=other) for other in REAL_DTYPES for _ in range(5)]
            assert is_found(*others, gradient) and is_found(gradient, *others)
    for dtype in COMPLEX_DTYPES:
        for number in (complex(bad, 1), complex(1, bad)):
            assert is_found(torch.tensor([1, number, 2j], dtype=dtype))


@requires_cpu("the simulated device has no sparse tensors")
def test_one_bad_element_of_a_sparse_gradient_is_found() -> None:
    for bad in NONFINITE.values():
        assert is_found(torch.sparse_coo_tensor([[1, 4]], [1.0, bad], (6,), check_invariants=True))


@pytest.mark.parametrize("sign", [1, -1], ids=["max", "min"])
def test_huge_finite_values_are_no_overflow_though_their_sum_is(sign: int) -> None:
    for dtype in REAL_DTYPES:
        huge = sign * torch.finfo(dtype).max
        gradient = torch.full((64,), huge, dtype=dtype)
        assert not torch.isfinite(gradient.sum())
        assert not is_found(gradient)
        assert torch.equal(gradient, torch.full((64,), huge / 2, dtype=dtype))
