"""`LossScaler` follows a pure-Python model over any sequence of finite and non-finite steps; unscaling is division, and
finds inf and NaN element by element.
"""

import math
from dataclasses import dataclass, field
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
INIT_SCALE, GROWTH_FACTOR, BACKOFF_FACTOR, GROWTH_INTERVAL = 65536.0, 2.0, 0.5, 2000  # Apex's, and GradScaler's
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


def note_pass(scaler: LossScaler, gradient: Tensor) -> None:
    """One backward pass that left this gradient."""
    found_inf = new_flag()
    unscale_([gradient], scaler.scale_on(CPU), found_inf)
    scaler.note(found_inf)


def run_step(scaler: LossScaler, *overflows: bool) -> None:
    """One optimizer step that the given backward passes led to."""
    for overflow in overflows:
        note_pass(scaler, torch.tensor([1.0, math.inf if overflow else 2.0]))
    scaler.update()


@dataclass
class Model:
    """The update law as Micikevicius et al. state it, in Python floats."""

    minimum: float | None = None
    maximum: float = 2.0**24
    interval: int = GROWTH_INTERVAL
    scale: float = field(init=False)
    unskipped: int = 0

    def __post_init__(self) -> None:
        self.scale = max(min(self.maximum, INIT_SCALE), self.minimum or 0.0)

    def step(self, overflow: bool) -> None:
        if overflow:
            self.scale, self.unskipped = self.scale * BACKOFF_FACTOR, 0
        else:
            self.unskipped += 1
            if self.unskipped == self.interval:
                self.scale, self.unskipped = self.scale * GROWTH_FACTOR, 0
        self.scale = min(max(self.scale, self.minimum or TINY), self.maximum)


# ---- the dynamic law -------------------------------------------------------------------------------------------------


@given(
    overflows=st.lists(st.booleans(), max_size=60),
    interval=st.integers(1, 5),
    minimum=st.sampled_from([None, 1.0, 128.0, 1000.0]),
    maximum=st.sampled_from([1024.0, 2.0**15 + 1, 2.0**24, 2.0**30]),
)
def test_a_dynamic_scale_follows_the_model(
    overflows: list[bool], interval: int, minimum: float | None, maximum: float
) -> None:
    model = Model(minimum, maximum, interval)
    scaler = LossScaler(DynamicScale(growth_interval=interval), min_loss_scale=minimum, max_loss_scale=maximum)
    for overflow in overflows:
        assert scaler.state_dict() == {"loss_scale": model.scale, "unskipped": model.unskipped}
        run_step(scaler, overflow)
        model.step(overflow)
        assert (minimum or 0.0) <= scaler.loss_scale() <= maximum
    assert scaler.state_dict() == {"loss_scale": model.scale, "unskipped": model.unskipped}
    assert scaler.scale_on(CPU).item() == model.scale


@dataclass
class Megatron:
    """The law of `DynamicGradScaler` in Megatron-LM (megatron/core/optimizer/grad_scaler.py), in float32 as there."""

    rule: DynamicScale
    unskipped: int = 0

    def __post_init__(self) -> None:
        self.scale, self.tracker = scale_of(self.rule.init), self.rule.hysteresis

    def step(self, overflow: bool) -> None:
        if overflow:
            self.unskipped = 0
            self.tracker -= 1
            if self.tracker <= 0:
                self.scale = self.scale * scale_of(self.rule.backoff_factor)
            return
        self.unskipped += 1
        if self.unskipped == self.rule.growth_interval:
            self.unskipped, self.tracker = 0, self.rule.hysteresis
            self.scale = self.scale * scale_of(self.rule.growth_factor)

    def state(self) -> dict[str, float]:
        state = {"loss_scale": self.scale.item(), "unskipped": self.unskipped}
        return {**state, "hysteresis_tracker": max(self.tracker, 0)} if self.rule.hysteresis > 1 else state


RULES = st.builds(
    DynamicScale,
    init=st.sampled_from([1.0, 768.0, 2.0**17]),
    growth_factor=st.sampled_from([1.25, 2.0, 3.0]),  # exact in float32, in which Megatron-LM keeps them
    backoff_factor=st.sampled_from([0.25, 0.5, 0.875]),
    growth_interval=st.integers(1, 4),
    hysteresis=st.integers(1, 4),
)


@given(rule=RULES, overflows=st.lists(st.booleans(), max_size=40), saved_at=st.integers(0, 40))
def test_hysteresis_is_that_of_megatron_and_goes_on_after_a_resume(
    rule: DynamicScale, overflows: list[bool], saved_at: int
) -> None:
    model = Megatron(rule)
    scaler = LossScaler(rule, max_loss_scale=math.inf)
    for index, overflow in enumerate(overflows):
        if index == saved_at:
            state, scaler = scaler.state_dict(), LossScaler(rule, max_loss_scale=math.inf)
            scaler.load_state_dict(state)
        run_step(scaler, overflow)
        model.step(overflow)
        assert scaler.state_dict() == model.state()


def test_the_state_says_how_many_overflows_are_left_and_only_with_a_hysteresis() -> None:
    scaler = LossScaler(DynamicScale(init=4096.0, growth_interval=2, hysteresis=3))
    told = []
    for overflow in (True, False, True, True, True, False, False, True):
        run_step(scaler, overflow)
        told.append((scaler.loss_scale(), scaler.state_dict()["hysteresis_tracker"]))
    fallen = [(4096.0, 2), (4096.0, 2), (4096.0, 1), (2048.0, 0), (1024.0, 0), (1024.0, 0), (2048.0, 3), (2048.0, 2)]
    assert told == fallen
    assert set(LossScaler(DynamicScale(init=3.0, backoff_factor=0.1)).state_dict()) == {"loss_scale", "unskipped"}


def test_states_without_a_count_load_with_a_full_one_and_counts_load_without_hysteresis() -> None:
    patient = LossScaler(DynamicScale(hysteresis=5))
    run_step(patient, True)
    patient.load_state_dict({"loss_scale": 512.0, "unskipped": 7})  # what Apex writes, and we did
    assert patient.state_dict() == {"loss_scale": 512.0, "unskipped": 7, "hysteresis_tracker": 5}
    patient.load_state_dict({"loss_scale": 512.0, "unskipped": 7, "hysteresis_tracker": 80})
    assert patient.state_dict()["hysteresis_tracker"] == 5
    plain = LossScaler("dynamic")
    plain.load_state_dict({"loss_scale": 64.0, "unskipped": 1, "hysteresis_tracker": 4})
    run_step(plain, True)
    assert plain.state_dict() == {"loss_scale": 32.0, "unskipped": 0}
    for wrong in (-1, "many", None):
        with pytest.raises((TypeError, ValueError)):
            patient.load_state_dict({"loss_scale": 8.0, "unskipped": 0, "hysteresis_tracker": wrong})


@pytest.mark.parametrize(
    ("rule", "skips"),
    [
        (DynamicScale(), 100),
        (DynamicScale(hysteresis=21), 120),
        (DynamicScale(backoff_factor=0.1), 100),
        (DynamicScale(backoff_factor=0.75), 241),
    ],
    ids=str,
)
def test_a_scale_is_given_up_when_it_has_fallen_far(rule: DynamicScale, skips: int) -> None:
    scaler = LossScaler(rule)
    assert scaler.hopeless_after == skips
    for _ in range(skips):
        run_step(scaler, True)
    assert scaler.loss_scale() <= 2.0**-83


@given(passes=st.lists(st.lists(st.booleans(), max_size=4), max_size=20), interval=st.integers(1, 3))
def test_there_is_one_decision_for_all_passes_of_a_step_and_none_without_a_pass(
    passes: list[list[bool]], interval: int
) -> None:
    model = Model(interval=interval)
    scaler = LossScaler(DynamicScale(growth_interval=interval))
    for overflows in passes:
        run_step(scaler, *overflows)
        if overflows:
            model.step(any(overflows))
        assert scaler.state_dict() == {"loss_scale": model.scale, "unskipped": model.unskipped}


@pytest.mark.parametrize("overflows", [(True, False), (False, True), (False, False)], ids=str)
def test_readers_are_told_the_decision_that_is_due_and_do_not_take_it(overflows: tuple[bool, ...]) -> None:
    scaler = LossScaler(DynamicScale(growth_interval=1))
    for overflow in overflows:
        note_pass(scaler, torch.tensor([math.nan if overflow else 1.0]))
    due = INIT_SCALE * (BACKOFF_FACTOR if any(overflows) else GROWTH_FACTOR)
    assert [scaler.loss_scale(), scaler.state_dict()["loss_scale"], scaler.loss_scale()] == [due] * 3
    assert scaler.scale_on(CPU).item() == INIT_SCALE
    state = scaler.state_dict()
    scaler.update()
    assert scaler.scale_on(CPU).item() == due and scaler.state_dict() == state
    scaler.update()
    assert scaler.loss_scale() == due


def test_a_decision_makes_a_new_scale_tensor_and_leaves_the_one_handed_out() -> None:
    scaler = LossScaler("dynamic")
    handed_out = scaler.scale_on(CPU)
    run_step(scaler, True)
    assert handed_out.item() == INIT_SCALE
    assert scaler.scale_on(CPU).item() == INIT_SCALE / 2


def test_without_a_minimum_the_scale_never_reaches_zero() -> None:
    scaler = LossScaler("dynamic")
    for _ in range(200):
        run_step(scaler, True)
    assert scaler.loss_scale() == TINY
    gradient = torch.ones(2)
    unscale_([gradient], scaler.scale_on(CPU), None)
    assert torch.isfinite(gradient).all()


# ---- the static law --------------------------------------------------------------------------------------------------


@given(overflows=st.lists(st.booleans(), max_size=20), scale=st.sampled_from([1.0, 0.5, 128.0, 1000.0]))
def test_a_static_scale_never_changes_and_counts_every_step(overflows: list[bool], scale: float) -> None:
    scaler = LossScaler(scale)
    scaler.growth_interval = 2
    for overflow in overflows:
        run_step(scaler, overflow)
    assert scaler.state_dict() == {"loss_scale": scale, "unskipped": len(overflows)}


def test_a_static_scale_ignores_the_bounds_of_the_dynamic_one() -> None:
    scaler = LossScaler(2.0**20, min_loss_scale=2.0**21, max_loss_scale=2.0)
    run_step(scaler, False)
    assert scaler.loss_scale() == 2.0**20


def test_only_a_static_scale_of_one_is_the_identity() -> None:
    assert LossScaler(1.0).is_identity and LossScaler(1).is_identity and not LossScaler(128.0).is_identity
    may_grow = LossScaler("dynamic", max_loss_scale=1.0)
    assert may_grow.loss_scale() == 1.0 and may_grow.is_dynamic and not may_grow.is_identity


# ---- flags -----------------------------------------------------------------------------------------------------------


def test_found_inf_is_exactly_zero_or_one() -> None:
    found_inf = new_flag()
    assert found_inf.item() == 0.0
    unscale_([torch.full((3,), math.nan), torch.full((2,), math.inf)], scale_of(2.0), found_inf)
    assert (found_inf.item(), found_inf.dtype, found_inf.shape) == (
        1.0,
        torch.float32,
        torch.Size([]),
    )


# ---- state -----------------------------------------------------------------------------------------------------------


@given(
    overflows=st.lists(st.booleans(), max_size=10),
    scale=st.floats(2.0**-20, 2.0**24, width=32),
    unskipped=st.integers(0, 4),
)
def test_a_loaded_scaler_goes_on_as_the_saved_one(overflows: list[bool], scale: float, unskipped: int) -> None:
    saved = LossScaler(DynamicScale(growth_interval=5))
    saved.load_state_dict({"loss_scale": scale, "unskipped": unskipped})
    state = saved.state_dict()
    assert state == {"loss_scale": scale, "unskipped": unskipped}
    assert [type(value) for value in state.values()] == [float, int]
    loaded = LossScaler(DynamicScale(growth_interval=5))
    loaded.load_state_dict(state)
    for overflow in overflows:
        run_step(saved, overflow)
        run_step(loaded, overflow)
        assert loaded.state_dict() == saved.state_dict()


def test_a_scaler_that_receives_the_state_of_another_goes_on_as_that_one() -> None:
    rule = DynamicScale(init=4096.0, growth_interval=3, hysteresis=2)
    sender, receiver = LossScaler(rule), LossScaler(rule)
    for overflow in (True, True, False):
        run_step(sender, overflow)
    receiver.receive_state(sender.send_state(CPU))
    for overflow in (False, False, True, True):
        assert receiver.state_dict() == sender.state_dict()
        run_step(sender, overflow)
        run_step(receiver, overflow)
    assert receiver.state_dict() == sender.state_dict()


def test_loading_drops_the_decision_that_was_due() -> None:
    scaler = LossScaler("dynamic")
    note_pass(scaler, torch.tensor([math.inf]))
    scaler.load_state_dict({"loss_scale": 32.0, "unskipped": 7})
    scaler.update()
    assert scaler.state_dict() == {"loss_scale": 32.0, "unskipped": 7}


@pytest.mark.parametrize("unskipped", [GROWTH_INTERVAL - 1, GROWTH_INTERVAL, 10**6], ids=str)
def test_a_count_at_or_beyond_the_interval_lets_the_scale_grow(unskipped: int) -> None:
    scaler = LossScaler("dynamic")
    scaler.load_state_dict({"loss_scale": 32.0, "unskipped": unskipped})
    run_step(scaler, False)
    assert scaler.loss_scale() == 64.0


def test_a_static_scaler_takes_over_a_loaded_count_but_keeps_its_scale() -> None:
    for own in (1.0, 128.0):
        scaler = LossScaler(own)
        scaler.load_state_dict({"loss_scale": 256.0, "unskipped": 5000})
        assert scaler.state_dict() == {"loss_scale": own, "unskipped": 5000}
        assert scaler.is_identity is (own == 1.0)


def test_a_bad_state_is_refused_and_changes_nothing() -> None:
    good = {"loss_scale": 48.0, "unskipped": 3}
    scaler = LossScaler("dynamic")
    scaler.load_state_dict(good)
    bad: list[dict[str, Any]] = [{}, {"loss_scale": 2.0}, {"unskipped": 1}]
    bad += [{**good, "loss_scale": scale} for scale in (None, "much", 0.0, -2.0, math.inf, math.nan)]
    bad += [{**good, "unskipped": count} for count in (-1, None)]
    for state in bad:
        with pytest.raises((KeyError, TypeError, ValueError)):
            scaler.load_state_dict(state)
        assert scaler.state_dict() == good


# ---- unscale_ is division --------------------------------------------------------------------------------------------


def values(dtype: torch.dtype, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    full = torch.complex128 if dtype.is_complex else torch.float64
    return (torch.randn(*shape, generator=generator, dtype=full) * 8).to(dtype)


@each_dtype
def test_unscaling_by_a_power_of_two_is_division_to_the_bit(dtype: torch.dtype) -> None:
    for scale in (1.0, 2.0, 2.0**7, 2.0**-5):
        gradient, found_inf = values(dtype, 5, 3), new_flag()
        parts = torch.view_as_real(gradient) if dtype.is_complex else gradient
        expected = parts / scale  # complex division rounds more than once in torch 2.6
        unscale_([gradient], scale_of(scale), found_inf)
        assert torch.equal(parts, expected)
        assert not bool(found_inf)


@each_dtype
def test_unscaling_by_any_scale_is_division_to_the_last_place(dtype: torch.dtype) -> None:
    for scale in (3.0, 1000.0, 0.3):
        gradient = values(dtype, 40)
        expected = gradient.to(torch.complex128 if dtype.is_complex else torch.float64) / scale_of(scale).item()
        unscale_([gradient], scale_of(scale), new_flag())
        eps = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)  # the scale and its inverse are float32
        # below the smallest normal number of float16 the spacing, not the relative error, is the bound
        torch.testing.assert_close(
            gradient.to(expected.dtype), expected, rtol=1.01 * eps, atol=torch.finfo(dtype).tiny * eps
        )


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


def test_one_call_takes_gradients_of_every_kind() -> None:
    dense = [values(dtype, 4) for dtype in DTYPES]
    sparse = torch.eye(3).to_sparse()
    odd = [torch.empty(0), torch.tensor(6.0), values(torch.float32, 4, 6)[:, ::2], values(torch.float32, 4, 6).t()]
    gradients = [*dense, sparse, *odd]
    expected = [gradient.to_dense() / 8 for gradient in gradients]
    unscale_(gradients, scale_of(8.0), new_flag())
    assert all(torch.equal(gradient.to_dense(), wanted) for gradient, wanted in zip(gradients, expected, strict=True))


def test_without_a_flag_gradients_are_divided_all_the_same() -> None:
    gradient = torch.tensor([8.0, math.inf])
    unscale_([gradient], scale_of(2.0), None)
    assert gradient.tolist() == [4.0, math.inf]


# ---- overflow is seen element by element -----------------------------------------------------------------------------


def is_found(*gradients: Tensor) -> bool:
    found_inf = new_flag()
    unscale_(list(gradients), scale_of(2.0), found_inf)
    return bool(found_inf)


@pytest.mark.parametrize("bad", NONFINITE.values(), ids=list(NONFINITE))
def test_one_bad_element_is_found_wherever_it_is(bad: float) -> None:
    for dtype in REAL_DTYPES:
        for position in (0, 17, 36):
            gradient = torch.ones(37, dtype=dtype)
            gradient[position] = bad
            assert is_found(torch.ones(3, dtype=dtype), gradient, torch.ones(2))


@requires_cpu("the simulated device has no sparse tensors")
@pytest.mark.parametrize("bad", NONFINITE.values(), ids=list(NONFINITE))
def test_one_bad_element_of_a_sparse_gradient_is_found(bad: float) -> None:
    assert is_found(torch.sparse_coo_tensor([[1, 4]], [1.0, bad], (6,), check_invariants=True))


def test_a_bad_real_or_imaginary_part_is_found() -> None:
    for bad in (complex(math.inf, 0), complex(0, -math.inf), complex(math.nan, 1), complex(1, math.nan)):
        for dtype in COMPLEX_DTYPES:
            assert is_found(torch.tensor([1, bad, 2j], dtype=dtype))


@pytest.mark.parametrize(
    "view",
    [torch.conj, lambda memory: memory.conj().imag],
    ids=["conjugate", "negative"],
)
def test_lazy_views_are_divided_and_multiplied_in_their_memory(view: Any) -> None:
    dtype = torch.complex64
    gradient = view(torch.tensor([3 - 4j, -5 + 6j, 7 + 0j], dtype=dtype))
    memory, before = gradient.data_ptr(), gradient.clone()
    found_inf = new_flag()
    unscale_([gradient], scale_of(8.0), found_inf)
    assert torch.equal(gradient, before / 8) and gradient.data_ptr() == memory and not bool(found_inf)
    rescale_([gradient], scale_of(4.0))
    assert torch.equal(gradient, before / 2)
    gradient[1] = math.nan
    unscale_([gradient], scale_of(8.0), found_inf)
    assert bool(found_inf)


def test_the_last_of_many_gradients_is_looked_at() -> None:
    gradients = [torch.ones(2, dtype=dtype) for dtype in REAL_DTYPES for _ in range(20)]
    gradients[-1][1] = math.nan
    found_inf = new_flag()
    unscale_(gradients, scale_of(2.0), found_inf)
    assert bool(found_inf)


@pytest.mark.parametrize("sign", [1, -1], ids=["max", "min"])
def test_huge_finite_values_are_no_overflow_though_their_sum_is(sign: int) -> None:
    for dtype in REAL_DTYPES:
        huge = sign * torch.finfo(dtype).max
        gradient = torch.full((64,), huge, dtype=dtype)
        assert not torch.isfinite(gradient.sum())
        assert not is_found(gradient)
        assert torch.equal(gradient, torch.full((64,), huge / 2, dtype=dtype))


def test_huge_values_of_both_signs_are_no_overflow_though_their_norm_is() -> None:
    assert not is_found(torch.tensor([3e38, -3e38, 3e38]))


# ---- rescale_ and unscale_ are inverse -------------------------------------------------------------------------------


@each_dtype
@given(exponent=st.integers(-3, 8), elements=st.lists(st.floats(-200, 200, width=16), min_size=2, max_size=8))
def test_rescaling_and_unscaling_by_a_power_of_two_is_the_identity(
    dtype: torch.dtype, exponent: int, elements: list[float]
) -> None:
    gradient = torch.tensor(elements, dtype=dtype)
    if exponent < 0:
        gradient[gradient.abs() < 2.0**-8] = 0  # a smaller scale may push tiny values below what the dtype can hold
    before, scale = gradient.clone(), scale_of(2.0**exponent)
    rescale_([gradient], scale)
    assert torch.equal(gradient, before * 2.0**exponent)
    unscale_([gradient], scale, None)
    assert torch.equal(gradient, before)


def test_rescaling_reaches_the_values_of_sparse_gradients_and_every_dtype_of_a_mixed_list() -> None:
    gradients = [torch.eye(2).to_sparse(), *(values(dtype, 3) for dtype in DTYPES)]
    expected = [gradient.to_dense() * 4 for gradient in gradients]
    rescale_(gradients, scale_of(4.0))
    assert all(torch.equal(gradient.to_dense(), wanted) for gradient, wanted in zip(gradients, expected, strict=True))


# ---- a scale set by hand ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss_scale", ["dynamic", 8.0])
def test_a_scale_set_by_hand_is_used_next_and_keeps_the_count(loss_scale: Any) -> None:
    scaler = LossScaler(loss_scale)
    run_step(scaler, False)
    scaler.set_loss_scale(32)
    assert scaler.scale_on(CPU).item() == scaler.loss_scale() == 32.0
    assert scaler.state_dict() == {"loss_scale": 32.0, "unskipped": 1}
    scaler.set_loss_scale(1.0)
    assert scaler.is_identity is (loss_scale != "dynamic")


def test_a_decision_that_is_due_does_not_touch_a_scale_set_by_hand() -> None:
    scaler = LossScaler("dynamic")
    note_pass(scaler, torch.tensor([math.inf]))
    scaler.set_loss_scale(64.0)
    scaler.update()
    assert scaler.state_dict() == {"loss_scale": 64.0, "unskipped": 0}


def test_a_scale_by_hand_must_be_finite_and_positive() -> None:
    scaler = LossScaler("dynamic")
    for value in (0.0, -2.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="finite and positive"):
            scaler.set_loss_scale(value)
    assert scaler.loss_scale() == INIT_SCALE
