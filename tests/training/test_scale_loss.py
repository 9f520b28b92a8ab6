"""`scale_loss`, skipped steps, accumulation and the saved scalers give what float32 or hand-written references give.

Guards: training/scale_loss, training/gradient_sums, training/first_step, training/step_log, training/gradient_patches.
"""

import contextlib
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from training import backward

import amp_patch as amp


def make(seed=0, **options):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, **options)


def make_data(seed=0, size=6):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 4, generator=generator), torch.randint(0, 3, (size,), generator=generator)


def compute_loss(model, seed=0, factor=1.0):
    inputs, targets = make_data(seed)
    return F.cross_entropy(model(inputs), targets) * factor


def weights(model):
    return [parameter.detach().clone() for parameter in model.state_dict().values()]


def assert_equal(left, right):
    assert len(left) == len(right) > 0
    for a, b in zip(left, right, strict=True):
        assert torch.equal(a, b)


def test_the_loss_comes_multiplied_by_the_scale_and_itself_where_that_is_one():
    model, optimizer = make()
    with amp.scope(model, optimizer, opt_level="O1", loss_scale=4.0, verbosity=0):
        loss = compute_loss(model)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            assert scaled_loss.item() == loss.item() * 4 and scaled_loss.dtype is torch.float32
    amp.initialize(model, optimizer, opt_level="O4", verbosity=0)
    loss = compute_loss(model)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        assert scaled_loss is loss
    with amp.scale_loss(loss.bfloat16(), optimizer) as scaled_loss:
        assert scaled_loss.dtype is torch.float32


# ---- overflow --------------------------------------------------------------------------------------------------------


def test_an_overflow_skips_one_step_and_halves_the_scale(capsys):
    model, optimizer = make(momentum=0.9)
    amp.initialize(model, optimizer, opt_level="O2", loss_scale="dynamic")
    model.eval()
    before = weights(model)
    capsys.readouterr()
    backward(compute_loss(model, factor=math.inf), optimizer)
    assert optimizer.step_was_skipped is False
    optimizer.step()
    assert optimizer.step_was_skipped is True
    assert_equal(weights(model), before)
    assert not optimizer.state
    assert capsys.readouterr().out.startswith(
        "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0"
    )
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 32768.0, "unskipped": 0}}
    optimizer.zero_grad()
    backward(compute_loss(model), optimizer)
    optimizer.step()
    assert optimizer.step_was_skipped is False
    assert any(not torch.equal(a, b) for a, b in zip(weights(model), before, strict=True))
    stats = amp.stats()
    assert (stats.steps, stats.steps_skipped, stats.loss_scales) == (1, 1, (32768.0,))


def test_delayed_gradients_stay_scaled_while_another_optimizer_has_a_delayed_pass():
    models = [nn.Linear(2, 2) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    amp.initialize(models, optimizers, opt_level="O2", loss_scale=4.0, verbosity=0)
    for index, delay_unscale in ((0, False), (0, True), (1, True)):
        loss = models[index](torch.ones(1, 2)).float().sum()
        backward(loss, optimizers[index], delay_unscale=delay_unscale)
    assert models[0].bias.grad.tolist() == [4.0, 4.0]
    assert list(amp.master_params(optimizers[0]))[-1].grad.tolist() == [1.0, 1.0]


def test_gradients_of_optimizers_and_parameters_that_were_not_passed_are_unscaled_too():
    generator, generator_optimizer = make(0)
    discriminator = nn.Linear(3, 1)
    free = nn.Linear(1, 1)
    discriminator_optimizer = torch.optim.SGD(discriminator.parameters(), lr=0.1)
    models = [generator, discriminator, free]
    amp.initialize(
        models, [generator_optimizer, discriminator_optimizer], opt_level="O0", loss_scale="dynamic", verbosity=0
    )
    inputs, _ = make_data()
    backward(free(discriminator(generator(inputs))).sum(), generator_optimizer)
    found = [p.grad.clone() for model in models for p in model.parameters()]
    for model in models:
        model.zero_grad()
    free(discriminator(generator(inputs))).sum().backward()
    assert_equal(found, [p.grad for model in models for p in model.parameters()])


def test_the_scale_stays_above_its_minimum_and_says_that_it_fell():
    model, optimizer = make()
    amp.initialize(model, optimizer, opt_level="O1", loss_scale="dynamic", min_loss_scale=2.0**14, verbosity=0)
    with pytest.warns(UserWarning, match="fallen to 16384.0: .* that min_loss_scale allows") as caught:
        for _ in range(5):
            optimizer.zero_grad()
            backward(compute_loss(model, factor=math.nan), optimizer)
            optimizer.step()
    assert amp.stats().loss_scales == (2.0**14,)
    assert len(caught) == 1


def test_a_hundred_skips_in_a_row_are_an_error_that_names_the_parameters():
    model, optimizer = make()
    amp.initialize(model, optimizer, opt_level="O2", loss_scale="dynamic", verbosity=0)
    model.eval()
    list(amp.master_params(optimizer))[-1].data[0] = float("nan")
    with (
        contextlib.suppress(UserWarning),
        pytest.raises(amp.GradientOverflowError, match=r"100 steps in a row.*0\.weight.*2\.bias.*amp-patch trace"),
    ):
        for _ in range(101):
            optimizer.zero_grad()
            backward(compute_loss(model), optimizer)
            optimizer.step()
    assert amp.stats().steps_skipped == 100


@pytest.mark.parametrize("skips_itself", [False, True], ids=["steps", "skips itself"])
def test_a_scale_that_falls_for_good_is_warned_of_again_and_ends_training(skips_itself):
    """Good batches come between bad ones, so that no hundred steps in a row are skipped; or the loop itself skips."""
    model, optimizer = make()
    amp.initialize(model, optimizer, opt_level="O1", loss_scale="dynamic", verbosity=0)
    with (
        pytest.warns(UserWarning, match="loss scale has fallen to") as caught,
        pytest.raises(amp.GradientOverflowError, match=r"2\*\*100.*min_loss_scale"),
    ):
        for number in range(400):
            optimizer.zero_grad()
            backward(compute_loss(model, factor=math.nan if number % 3 else 1.0), optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if not skips_itself or torch.isfinite(norm):
                optimizer.step()
    assert [str(one.message) for one in caught if "has fallen" not in str(one.message)] == []
    assert len(caught) > 2 and len({str(one.message) for one in caught}) == len(caught)
    assert all(torch.isfinite(weight).all() for weight in weights(model))


def test_with_a_minimum_bad_batches_are_skipped_without_end():
    model, optimizer = make()
    amp.initialize(model, optimizer, opt_level="O1", loss_scale="dynamic", min_loss_scale=1.0, verbosity=0)
    with pytest.warns(UserWarning, match="has fallen to 1.0") as caught:
        for number in range(240):
            optimizer.zero_grad()
            backward(compute_loss(model, factor=math.nan if number % 2 else 1.0), optimizer)
            optimizer.step()
    assert len(caught) == 1 and amp.stats().steps_skipped == 120


@pytest.mark.parametrize("is_delayed", [False, True], ids=["inside", "delayed"])
@pytest.mark.parametrize("name", ["parameters", "master_params"])
@pytest.mark.parametrize(
    ("level", "scale", "is_warned"),
    [("O0", 8.0, True), ("O1", 8.0, True), ("O1", 1.0, False), ("O2", 8.0, True), ("O5", 1.0, True)],
)
def test_clipping_gradients_that_are_still_scaled_is_warned_of(level, scale, is_warned, name, is_delayed):
    model, optimizer = make()
    other = nn.Linear(2, 2)
    other(torch.ones(1, 2)).sum().backward()
    amp.initialize(model, optimizer, opt_level=level, loss_scale=scale, verbosity=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")

        def clip():
            given = model.parameters() if name == "parameters" else amp.master_params(optimizer)
            nn.utils.clip_grad_norm_(other.parameters(), 1.0)  # which no block scales
            nn.utils.clip_grad_norm_(given, 1.0)

        with amp.scale_loss(compute_loss(model), optimizer, delay_unscale=is_delayed) as scaled_loss:
            scaled_loss.backward()
            if not is_delayed:
                clip()
        if is_delayed:
            clip()
        optimizer.step()
        optimizer.zero_grad()
        backward(compute_loss(model), optimizer)
        clip()
    assert ["clip after the block" in str(one.message) for one in caught] == [True] * is_warned


def test_a_static_scale_warns_once_and_never_skips():
    model, optimizer = make()
    amp.initialize(model, optimizer, opt_level="O1", loss_scale=128.0, verbosity=0)
    with pytest.warns(UserWarning, match=r"non-finite gradients under a static loss scale \(0\.weight") as caught:
        for _ in range(3):
            optimizer.zero_grad()
            backward(compute_loss(model, factor=math.inf), optimizer)
            optimizer.step()
            assert optimizer.step_was_skipped is False
    assert len(caught) == 1
    assert amp.stats().loss_scales == (128.0,)


# ---- faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_exception_in_step_leaves_the_next_iteration_correct(level):
    results = []
    for with_error in (False, True):
        model, optimizer = make()
        amp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
        model.eval()
        backward(compute_loss(model), optimizer)
        if with_error:
            handle = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                optimizer.step()
            handle.remove()
            optimizer.zero_grad()
            backward(compute_loss(model), optimizer)
        optimizer.step()
        results.append(weights(model))
        amp.reset()
    assert_equal(*results)


def test_no_gradients_at_all_is_a_step_that_does_nothing():
    model, optimizer = make()
    amp.initialize(model, optimizer, opt_level="O2", loss_scale="dynamic", verbosity=0)
    backward(torch.zeros((), requires_grad=True), optimizer)
    optimizer.step()
    assert optimizer.step_was_skipped is False


# ---- state -----------------------------------------------------------------------------------------------------------


def test_a_state_that_does_not_fit_loads_nothing():
    model, optimizer = make()
    amp.initialize(model, optimizer, opt_level="O1", loss_scale="dynamic", num_losses=2, verbosity=0)
    before, good = amp.state_dict(), {"loss_scale": 2.0, "unskipped": 0}
    for bad in (
        {},
        {"loss_scaler0": good},
        {"loss_scaler0": good, "loss_scaler2": good},
        *(
            {"loss_scaler0": good, "loss_scaler1": {**good, "loss_scale": value}}
            for value in (math.nan, 0.0, "x", None)
        ),
        {"loss_scaler0": good, "loss_scaler1": {"unskipped": 0}},
        {"loss_scaler0": good, "loss_scaler1": None},
        *(
            {"loss_scaler0": good, "loss_scaler1": {**good, key: value}}
            for key in ("loss_scale", "unskipped", "hysteresis_tracker")
            for value in (1e300, 1e39, -1, math.inf, 10**400, torch.empty((), device="meta"), "many", None)
        ),
        *({"loss_scaler0": good, "loss_scaler1": {**good, "loss_scale": value}} for value in (math.nan, 0.0, 1e-60)),
        {"loss_scaler0": good, "loss_scaler1": {**good, "unskipped": 2**31}},
    ):
        with pytest.raises(amp.CheckpointError):
            amp.load_state_dict(bad)
        assert amp.state_dict() == before


OWN = ("clone", "mul", "add", "div", "reciprocal", "where", "stack", "isfinite", "count_nonzero", "zeros_like", "eq")


@pytest.mark.parametrize(("kind", "is_fused"), [("whitelist", False), ("blacklist", True)])
def test_lists_do_not_act_on_what_scaling_computes(kind, is_fused, tmp_path):
    def train(lists):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=is_fused)
        model, optimizer = amp.initialize(model, optimizer, opt_level="O1", lists=lists, verbosity=0)
        for number in range(5):
            optimizer.zero_grad()
            for _ in range(2):
                loss = nn.functional.mse_loss(model(torch.randn(4, 8) * (1e6 if number == 2 else 1)), torch.zeros(4, 1))
                backward(loss, optimizer)
            optimizer.step()
        scales = amp.stats().loss_scales
        amp.reset()
        return scales, [parameter.detach() for parameter in model.parameters()]

    scales, weights = train(None)
    (tmp_path / "own.yaml").write_text(f"extends: float16\n{kind}: [{', '.join(OWN)}]\n")
    found_scales, found = train(str(tmp_path / "own.yaml"))
    assert found_scales == scales != (65536.0,)
    assert all(map(torch.equal, found, weights))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_loss_that_goes_backward_in_the_place_of_the_scaled_one_is_told_of_once(level):
    model = nn.Linear(8, 2)
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level, verbosity=0)
    with pytest.warns(UserWarning, match="call scaled_loss.backward\\(\\) inside the block") as told:
        for _ in range(2):
            loss = model(torch.ones(4, 8)).float().sum()
            with amp.scale_loss(loss, optimizer):
                loss.backward()
    assert len(told) == 1


def test_blocks_whose_scaled_loss_goes_backward_in_some_way_are_told_nothing_of(recwarn):
    model = nn.Linear(8, 2)
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), num_losses=3, verbosity=0)
    ways = (
        lambda scaled: (scaled * 2).backward(),
        lambda scaled: torch.autograd.grad(scaled, list(model.parameters())),
        lambda scaled: torch.autograd.backward([scaled]),
    )
    for loss_id, go_backward in enumerate(ways):
        for _ in range(2):
            with amp.scale_loss(model(torch.ones(4, 8)).float().sum(), optimizer, loss_id=loss_id) as scaled_loss:
                go_backward(scaled_loss)
    assert not [one for one in recwarn if "go backward" in str(one.message)]


def test_a_loss_scale_that_is_not_used_yet_does_not_hide_that_nothing_is_trained():
    model, other = nn.Linear(8, 2), nn.Linear(8, 2)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, other)]
    amp.initialize([model, other], optimizers, num_losses=2, verbosity=0)
    backward(model(torch.ones(4, 8)).float().sum(), optimizers)
    with pytest.warns(UserWarning, match="it trains nothing"):
        optimizers[1].step()
