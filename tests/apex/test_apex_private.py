"""Scripts that use the private names of `apex.amp` get what Apex gave: loss scales set by hand, skips seen early,
stashes, handles, and the oldest interface.

Guards: apex/amp/*, apex/amp/lists/*, apex/_core.
"""

import random

import pytest
import torch
import torch.nn.functional as F
from apex_training import (
    OVERFLOWING,
    assert_equal,
    backward,
    make_batches,
    make_model,
    make_optimizer,
    overflow,
    start,
    state_of_a_new_process,  # noqa: F401 - a fixture
    train,
    weights,
)
from torch import nn

import amp_patch
from amp_patch.apex import amp
from amp_patch.apex.amp.scaler import LossScaler
from amp_patch.session import current

# ---- the loss scale by hand ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("level", "loss_scale"), [("O1", None), ("O2", 128.0), ("O0", 1.0)])
def test_a_loss_scale_set_by_hand_is_the_one_of_the_next_pass(level, loss_scale):
    model, optimizer = start(level, loss_scale=loss_scale)
    train(model, optimizer, make_batches(1))
    scaler = amp._amp_state.loss_scalers[0]
    scaler._loss_scale = 2**10
    assert scaler is amp._amp_state.loss_scalers[0] and scaler.loss_scale() == scaler._loss_scale == 1024.0
    loss = F.cross_entropy(model(make_batches(1)[0][0]), make_batches(1)[0][1])
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        assert scaled_loss.item() == loss.float().item() * 1024
        scaled_loss.backward()
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 1024.0


def test_a_scale_set_by_hand_leaves_a_pending_skip_pending():
    model, optimizer = start("O1")
    before = weights(model)[0]
    overflow(model, optimizer)
    amp._amp_state.loss_scalers[0]._loss_scale = 2.0**20
    optimizer.step()
    assert optimizer.step_was_skipped and torch.equal(model[0].weight, before)
    assert amp._amp_state.loss_scalers[0].loss_scale() == 2.0**20


def test_the_count_and_the_window_may_be_set_too():
    model, optimizer = start("O1")
    scaler = amp._amp_state.loss_scalers[0]
    scaler._scale_seq_len = 3
    scaler._unskipped = 1
    train(model, optimizer, make_batches(1))
    assert (scaler._unskipped, scaler._loss_scale) == (2, 65536.0)
    train(model, optimizer, make_batches(1))
    assert (scaler._unskipped, scaler._loss_scale) == (0, 131072.0)
    scaler._max_loss_scale = 65536.0
    train(model, optimizer, make_batches(1))
    assert scaler._loss_scale == 65536.0


# ---- skips -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("level", "scheduler"), [("O2", None), ("O1", "before"), ("O2", "after")])
def test_an_overflow_shows_before_the_step_in_three_ways(level, scheduler, capsys):
    model = make_model()
    optimizer = make_optimizer(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1) if scheduler == "before" else None
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    amp._amp_state.loss_scalers  # noqa: B018 - views are made
    amp.initialize(nn.Linear(1, 1), opt_level=level, verbosity=1)  # from here on messages are printed
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1) if scheduler == "after" else schedule
    train(model, optimizer, make_batches(1))
    usual, scale, before = optimizer.step, amp._amp_state.loss_scalers[0].loss_scale(), weights(model)[0]
    overflow(model, optimizer)
    assert optimizer.step is not usual
    assert optimizer._amp_stash.already_patched is True
    assert amp._amp_state.loss_scalers[0].loss_scale() == scale / 2
    capsys.readouterr()
    assert optimizer.step() is None
    said = capsys.readouterr().out
    assert said.startswith("Gradient overflow.") and "loss scaler 0 reducing loss scale to 32768.0" in said
    assert optimizer.step is usual and optimizer._amp_stash.already_patched is False
    assert torch.equal(weights(model)[0], before)
    if level == "O2":
        assert all(master.grad is None for master in optimizer._amp_stash.all_fp32_from_fp16_params)
    if schedule is not None:
        schedule.step()
    train(model, optimizer, make_batches(1))
    assert optimizer.step is usual and not torch.equal(weights(model)[0], before)


def test_every_optimizer_of_the_loss_shows_the_skip_and_no_other():
    models = [make_model(), make_model(1), make_model(2)]
    models, optimizers = amp.initialize(
        models, [make_optimizer(model) for model in models], opt_level="O1", verbosity=0
    )
    images, targets = make_batches(1)[0]
    loss = F.cross_entropy(models[0](images), targets) * OVERFLOWING + F.cross_entropy(models[1](images), targets)
    with amp.scale_loss(loss, optimizers[:2]) as scaled_loss:
        scaled_loss.backward()
    assert [optimizer._amp_stash.already_patched for optimizer in optimizers] == [True, True, False]


def test_a_skip_that_was_zeroed_away_no_longer_shows():
    model, optimizer = start("O1")
    usual = optimizer.step
    overflow(model, optimizer)
    optimizer.zero_grad()
    backward(model, optimizer, make_batches(1)[0])
    assert optimizer.step is usual
    before = weights(model)[0]
    optimizer.step()
    assert not torch.equal(weights(model)[0], before)


def test_reset_takes_a_step_that_shows_a_skip_away():
    class Own(torch.optim.SGD):
        pass

    model = make_model()
    optimizer = Own(model.parameters(), lr=0.1)
    own_step = optimizer.step = optimizer.step  # on the instance, as a library may put it
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    overflow(model, optimizer)
    amp_patch.reset()
    assert optimizer.step.__func__ is own_step.__func__ and not hasattr(optimizer, "_amp_stash")


def test_a_scheduler_built_while_a_skip_is_pending():
    model, optimizer = start("O1")
    overflow(model, optimizer)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    counted = optimizer.step
    optimizer.step()
    assert optimizer.step_was_skipped
    schedule.step()
    before = weights(model)[0]
    train(model, optimizer, make_batches(2))
    assert not optimizer.step_was_skipped and not torch.equal(weights(model)[0], before)
    assert optimizer.step is counted


def test_delayed_passes_say_nothing_early():
    model, optimizer = start("O1")
    usual = optimizer.step
    backward(model, optimizer, make_batches(1)[0], factor=OVERFLOWING, delay_unscale=True)
    assert optimizer.step is usual and optimizer._amp_stash.params_have_scaled_gradients is True
    backward(model, optimizer, make_batches(1)[0])
    assert optimizer.step is not usual and optimizer._amp_stash.params_have_scaled_gradients is False


# ---- the stash -------------------------------------------------------------------------------------------------------


def test_the_stash_lists_parameters_by_group():
    model = make_model()
    groups = [[*model[0].parameters()], [*model[1].parameters(), *model[3].parameters()]]
    optimizer = torch.optim.SGD([{"params": group} for group in groups], lr=0.1)
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    stash, (first, second) = optimizer._amp_stash, [group["params"] for group in optimizer.param_groups]

    def assert_same(found, expected):
        assert [[id(p) for p in group] for group in found] == [[id(p) for p in group] for group in expected]

    assert_same(stash.fp16_groups, [groups[0], groups[1][2:]])
    assert_same(stash.fp32_from_fp16_groups, [first, second[2:]])
    assert_same(stash.fp32_from_fp32_groups, [[], groups[1][:2]])
    assert (len(stash.all_fp32_from_fp32_params), stash.lazy_init_called) == (2, True)
    for low, master in zip(stash.all_fp16_params, stash.all_fp32_from_fp16_params, strict=True):
        assert low.dtype is torch.float16 and torch.equal(master.half(), low)


@pytest.mark.parametrize(("level", "low", "full"), [("O0", 0, 6), ("O1", 0, 6), ("O3", 6, 0)])
def test_the_stash_without_masters(level, low, full):
    _, optimizer = start(level)
    assert (len(optimizer._amp_stash.all_fp16_params), len(optimizer._amp_stash.all_fp32_params)) == (low, full)
    assert hasattr(optimizer, "_master_params_to_model_params") is False


def test_masters_changed_by_hand_are_copied_to_the_model():
    model, optimizer = start("O2")
    optimizer._amp_lazy_init()
    for master in amp.master_params(optimizer):
        master.data.fill_(0.5)
    optimizer._master_params_to_model_params()
    assert all((p == 0.5).all() for p in model.parameters())


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_scale_loss_that_a_project_copied_trains_the_same(level):
    """Projects carry their own version of the block, written with the private methods."""

    def pass_by_hand(model, optimizer, batch, factor):
        scaler = amp._amp_state.loss_scalers[0]
        loss = F.cross_entropy(model(batch[0]), batch[1]) * factor
        if not optimizer._amp_stash.params_have_scaled_gradients:
            optimizer._prepare_amp_backward()
        (loss.float() * scaler.loss_scale()).backward()
        scaler.clear_overflow_state()
        optimizer._post_amp_backward(scaler)
        optimizer._amp_stash.params_have_scaled_gradients = False
        assert scaler.update_scale() is (factor != 1)

    def pass_by_amp(model, optimizer, batch, factor):
        backward(model, optimizer, batch, factor=factor)

    results = []
    for go_backward in (pass_by_hand, pass_by_amp):
        model, optimizer = start(level, loss_scale="dynamic")
        amp._amp_state.loss_scalers[0]._loss_scale = 256.0
        for count, batch in enumerate(make_batches(3)):
            optimizer.zero_grad()
            for factor in (1, OVERFLOWING if count == 1 else 1):  # accumulation
                go_backward(model, optimizer, batch, factor)
            optimizer.step()
            assert optimizer.step_was_skipped is (count == 1)
        scale = torch.tensor(amp._amp_state.loss_scalers[0].loss_scale())
        results.append([*(p.detach().clone() for p in amp.master_params(optimizer)), scale])
        del model, optimizer
        amp_patch.reset()
    assert_equal(*results)


# ---- handles ---------------------------------------------------------------------------------------------------------


def test_deactivating_puts_functions_back_and_goes_on_scaling():
    matmul = torch.Tensor.__matmul__
    model, optimizer = start("O1")
    handle = amp._amp_state.handle
    assert handle.is_active() and handle._is_active and torch.Tensor.__matmul__ is not matmul
    handle._deactivate()
    handle._deactivate()
    assert torch.Tensor.__matmul__ is matmul and not handle.is_active()
    assert amp.half_function(torch.exp)(torch.zeros(1)).dtype is torch.float32
    with amp.scale_loss(torch.ones((), requires_grad=True), optimizer) as scaled_loss:
        assert scaled_loss.item() == 65536.0
    train(model, optimizer, make_batches(1))
    handle._is_active = True
    assert not handle.is_active()


def test_after_deactivating_the_level_or_another_may_come():
    kept = start("O1")
    amp._amp_state.handle._deactivate()
    again, _ = start("O1")
    assert again(make_batches(1)[0][0]).dtype is torch.float16
    amp._amp_state.handle._deactivate()
    model, optimizer = start("O2")
    second = start("O2")
    for pair in ((model, optimizer), second):
        train(*pair, make_batches(1))
    assert kept[0][0].weight.dtype is torch.float32 and model[0].weight.dtype is torch.float16


def test_casts_may_be_switched_through_the_handle():
    start("O1")
    handle = amp._amp_state.handle
    handle._is_active = False
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32 and not handle.is_active()
    handle._is_active = True
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float16
    with handle._disable_casts():
        assert not handle.is_active()
    assert handle.is_active()


def test_init_patches_without_a_model_until_deactivated():
    originals = torch.exp, F.linear
    for _ in range(2):
        handle = amp.init()
        with pytest.raises(RuntimeError, match=r"amp\.initialize\(model, optimizer\)"):  # what to write instead
            handle.scale_loss(torch.ones(1), None)
        assert torch.ones(2).half().exp().dtype is torch.float32
        assert F.linear(torch.ones(1, 2), nn.Parameter(torch.ones(2, 2))).dtype is torch.float16
        with pytest.raises(NotImplementedError):
            F.binary_cross_entropy(torch.rand(2).half(), torch.rand(2).half())
    handle._deactivate()
    handle._deactivate()
    assert (torch.exp, F.linear) == originals and amp_patch.stats().opt_level is None
    handle = amp.init(allow_banned=True)
    assert F.binary_cross_entropy(torch.rand(2).half(), torch.rand(2).half()).dtype is torch.float32
    handle._deactivate()
    assert current.state.registered == []


def test_init_that_is_disabled():
    handle = amp.init(enabled=False)
    assert not handle.is_active() and handle is amp._amp_state.handle
    loss = torch.ones((), requires_grad=True)
    with handle.scale_loss(loss, None) as scaled_loss, handle._disable_casts():
        assert scaled_loss is loss
    parameter = nn.Parameter(torch.ones(2))
    wrapper = handle.wrap_optimizer(torch.optim.SGD([parameter], lr=1.0))
    with wrapper.scale_loss(parameter.sum()) as scaled_loss:
        scaled_loss.backward()
    wrapper.step(closure=None)
    handle._clear_cache()
    handle._deactivate()
    assert parameter.tolist() == [0, 0]


def test_wrapped_optimizers_train_as_initialize_does():
    results = []
    for is_wrapped in (True, False):
        model = make_model()
        optimizer = make_optimizer(model)
        if is_wrapped:
            optimizer = amp.init().wrap_optimizer(optimizer, num_loss=2)
            contexts = [optimizer.scale_loss] * 2
        else:
            amp.initialize(model, optimizer, opt_level="O1", num_losses=2, verbosity=0)
            contexts = [lambda loss, i=i, o=optimizer: amp.scale_loss(loss, o, loss_id=i) for i in (0, 1)]
        for count, (images, targets) in enumerate(make_batches(4)):
            optimizer.zero_grad()
            for index, context in enumerate(contexts):
                factor = OVERFLOWING if count == 2 and index == 0 else 1
                with context(F.cross_entropy(model(images), targets) * factor) as scaled_loss:
                    scaled_loss.backward()
            optimizer.step()
        scalers = amp._amp_state.loss_scalers[-2:]
        results.append([*weights(model), torch.tensor([(s._loss_scale, s._unskipped) for s in scalers])])
        assert scalers[0]._loss_scale == 32768.0
        amp_patch.reset()
    assert_equal(*results)


def test_wrapped_optimizers_refuse_what_they_cannot_do():
    handle = amp.init()
    parameter = nn.Parameter(torch.ones(2))
    optimizer = handle.wrap_optimizer(torch.optim.SGD([parameter], lr=1.0))
    assert optimizer.param_groups[0]["lr"] == 1.0
    with optimizer.scale_loss(parameter.sum()) as scaled_loss:
        scaled_loss.backward()
    context = optimizer.scale_loss(parameter.sum())
    with pytest.raises(IndexError, match="num_loss=1"), context:
        pass
    with pytest.raises(NotImplementedError, match="closure"):
        optimizer.step(lambda: None)


# ---- LossScaler by itself --------------------------------------------------------------------------------------------


def test_a_scaler_follows_the_rule():
    """Halve on an overflow, double after a window of good passes, stay within the bounds."""
    rng = random.Random(0)
    scaler = LossScaler("dynamic", init_scale=64.0, scale_window=3, min_loss_scale=4.0, max_loss_scale=256.0)
    scale, good = 64.0, 0
    for _ in range(60):
        bad = rng.random() < 0.3
        gradient = torch.tensor([scale, float("inf") if bad else 3 * scale])
        master = torch.empty(2, dtype=torch.float16)
        scaler.clear_overflow_state()
        scaler.unscale([gradient.clone()], [torch.empty(2)], scaler.loss_scale())
        scaler.unscale([gradient], [master], scaler.loss_scale(), models_are_masters=True)
        assert bad or master.tolist() == [1, 3]
        assert scaler._has_overflow is bad and scaler.loss_scale() == scale
        assert scaler.update_scale() is bad
        scale, good = (max(4.0, scale / 2), 0) if bad else (scale, good + 1)
        scale, good = (min(256.0, scale * 2), 0) if good == 3 else (scale, good)
        assert (scaler._loss_scale, scaler._unskipped) == (scale, good)


def test_a_static_scaler_never_skips():
    scaler = LossScaler(1.0)
    gradient = torch.tensor([float("inf")])
    scaler.unscale([gradient], [gradient], None, models_are_masters=True)
    scaler.unscale([gradient], [torch.empty(1)], None)
    assert scaler.update_scale() is False and scaler.update_scale() is False
    assert (scaler._unskipped, scaler.loss_scale(), scaler.dynamic) == (2, 1.0, False)


def test_a_static_scaler_divides_in_place():
    gradient = torch.tensor([256.0])
    LossScaler(128.0).unscale([gradient], [gradient], None, models_are_masters=True)
    assert gradient.item() == 2


# ---- messages, and functions that are decorated ----------------------------------------------------------------------


def test_verbosity_may_change_at_any_time(capsys):
    model = make_model()
    optimizer = make_optimizer(model)
    amp.initialize(model, optimizer, opt_level="O1")
    amp._amp_state.verbosity = 0
    capsys.readouterr()
    overflow(model, optimizer)
    optimizer.step()
    assert capsys.readouterr().out == ""
    amp._amp_state.verbosity = 1
    overflow(model, optimizer)
    optimizer.step()
    assert capsys.readouterr().out.startswith("Gradient overflow.")


def test_a_float_function_casts_its_arguments_alone_as_apex_did():
    from amp_patch.apex import amp as apex_amp

    model = torch.nn.Linear(3, 3)
    apex_amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O1", verbosity=0)
    decorated = apex_amp.float_function(lambda x: (x.dtype, (x @ x).dtype))
    assert decorated(torch.ones(2, 2).half()) == (torch.float32, torch.float16)
    apex_amp.amp.api.reset()
    handle = apex_amp.init(loss_scale=1.0)
    assert decorated(torch.ones(2, 2).half()) == (torch.float32, torch.float16)
    handle._deactivate()
