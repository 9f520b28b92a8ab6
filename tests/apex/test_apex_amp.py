"""`apex.amp` has the names and messages that scripts know, and trains as amp_patch with float16 and the list `apex`.

Guards: apex/amp/*, apex/_core, apex/_forward.
"""

import copy
import importlib
import inspect
import logging
import re

import pytest
import torch
import torch.nn.functional as F
from apex_training import (
    LEVELS,
    assert_equal,
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
from amp_patch.apex.amp import frontend
from amp_patch.apex.amp._amp_state import _amp_state

OURS = {"O0": {}, "O1": {"lists": "apex"}, "O2": {}, "O3": {}}

# ---- names -----------------------------------------------------------------------------------------------------------

FUNCTIONS = (
    "initialize scale_loss state_dict load_state_dict disable_casts half_function float_function promote_function"
    " register_half_function register_float_function register_promote_function init"
)
SUBMODULES = "amp frontend handle scaler opt utils compat rnn_compat lists _initialize _process_optimizer __version__"


def test_names_are_where_apex_had_them():
    for name in FUNCTIONS.split():
        assert callable(getattr(amp, name)) and getattr(amp.amp, name) is getattr(amp, name)
    for name in SUBMODULES.split():
        assert getattr(amp, name) is importlib.import_module(f"amp_patch.apex.amp.{name}")
    module = importlib.import_module("amp_patch.apex.amp._amp_state")  # the attribute is the object
    assert amp._amp_state is module._amp_state and amp._amp_state is not module
    assert callable(module.maybe_print) and module.master_params is amp.master_params
    assert amp.__version__.VERSION == (0, 1, 0)


def test_the_signature_is_apexs():
    parameters = inspect.signature(amp.initialize).parameters.values()
    first = {"optimizers": None, "enabled": True, "opt_level": "O1", "cast_model_type": None}
    properties = dict.fromkeys(("patch_torch_functions", "keep_batchnorm_fp32", "master_weights", "loss_scale"))
    last = {"cast_model_outputs": None, "num_losses": 1, "verbosity": 1, "min_loss_scale": None}
    expected = [*first.items(), *properties.items(), *last.items(), ("max_loss_scale", 2.0**24)]
    assert [(one.name, one.default) for one in parameters][1:] == expected


# ---- training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_training_equals_amp_patch_with_the_list_apex(level):
    losses, states = [], []
    for api, options in ((amp, {}), (amp_patch, OURS[level])):
        model = make_model()
        optimizer = make_optimizer(model)
        model, optimizer = api.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
        losses.append(train(model, optimizer, make_batches(4), api))
        states.append(weights(model))
        assert model[0].weight.dtype is (torch.float16 if level in ("O2", "O3") else torch.float32)
        amp_patch.reset()
    assert losses[0] == losses[1]
    assert_equal(*states)


def test_the_recipe_for_saved_masters_resumes_bitwise():
    model, optimizer = start("O2")
    train(model, optimizer, make_batches(3))
    checkpoint = copy.deepcopy(
        {
            "model": {
                name: value.half().float() if "1." not in name else value for name, value in model.state_dict().items()
            },
            "optimizer": optimizer.state_dict(),
            "master params": list(amp.master_params(optimizer)),
            "amp": amp.state_dict(),
        }
    )
    expected = train(model, optimizer, make_batches(3, seed=2))
    amp_patch.reset()
    model, optimizer = start("O2")
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    amp.load_state_dict(checkpoint["amp"])
    optimizer._lazy_init_maybe_master_weights()
    optimizer._amp_stash.lazy_init_called = True
    optimizer.load_state_dict(checkpoint["optimizer"])
    for param, saved_param in zip(amp.master_params(optimizer), checkpoint["master params"], strict=True):
        param.data.copy_(saved_param.data)
    assert train(model, optimizer, make_batches(3, seed=2)) == expected


# ---- what goes in and comes out --------------------------------------------------------------------------------------


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize(
    "arrange",
    [lambda m, o: (m, [o]), lambda m, o: ([m], o), lambda m, o: (m, []), lambda m, o: ([m], None)],
    ids=["list of optimizers", "list of models", "empty list", "no optimizer"],
)
def test_arguments_come_back_in_their_shape(arrange, enabled):
    model = make_model()
    models, optimizers = arrange(model, make_optimizer(model))
    returned = amp.initialize(models, optimizers, enabled=enabled, verbosity=0)
    found_models, found_optimizers = (returned, None) if optimizers is None else returned
    assert found_models is models and found_optimizers is optimizers


@pytest.mark.parametrize(
    ("models", "options", "said"),
    [
        (make_model, {"opt_level": "o1"}, r"'o1' is not one of Apex's \(O0, O1, O2, O3.*Did you mean 'O1'"),
        (make_model, {"opt_level": None}, r"None is not one of Apex's"),
        (lambda: make_model().half(), {}, r"16 bits already"),
        (lambda: [], {}, r"at least one model"),
    ],
    ids=["letter", "none", "half", "no model"],
)
def test_what_does_not_fit_is_a_runtime_error_and_changes_nothing(models, options, said):
    with pytest.raises(RuntimeError, match=said):
        amp.initialize(models(), verbosity=0, **options)
    assert not hasattr(_amp_state, "opt_properties")
    assert amp_patch.stats().opt_level is None


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_models_may_come_one_after_another(level):
    """GANs do it, and cross-validation, with earlier models alive or not."""
    kept = [start(level) for _ in range(2)]
    for model, optimizer in kept:
        train(model, optimizer, make_batches(2))
    assert_equal(weights(kept[0][0]), weights(kept[1][0]))
    for _ in range(3):
        model, optimizer = start(level)
        train(model, optimizer, make_batches(2))
    assert_equal(weights(kept[0][0]), weights(model))


def test_an_optimizer_that_amp_does_not_know_is_fine_where_nothing_is_scaled():
    model = amp.initialize(make_model(), opt_level="O0", verbosity=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, make_batches(1))
    assert all(p.grad is not None for p in model.parameters())
    amp_patch.reset()
    model = amp.initialize(make_model(), opt_level="O1", verbosity=0)
    with pytest.raises(RuntimeError, match="was not passed to initialize"):
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), make_batches(1))


def test_low_models_are_taken_when_the_script_says_so():
    """A half parameter beside a float32 one, no cast: at O2 the half one gets a master, at O1 it is stepped on as it
    is.
    """
    for level, masters in (("O1", 0), ("O2", 1)):
        model = nn.ParameterList([torch.ones(2), torch.ones(2, dtype=torch.float16)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        _amp_state.allow_incoming_model_not_fp32 = True
        amp.initialize(model, optimizer, opt_level=level, cast_model_type=False, loss_scale=128.0, verbosity=0)
        _amp_state.allow_incoming_model_not_fp32 = False
        assert [p.dtype for p in model] == [torch.float32, torch.float16]
        assert len(optimizer._amp_stash.fp32_from_fp16_groups[0]) == masters
        with amp.scale_loss((model[0] * 2).sum() + (model[1].float() * 2).sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
        assert [p.grad.tolist() for p in amp.master_params(optimizer)] == [[2, 2], [2, 2]]
        optimizer.step()
        assert [p.tolist() for p in model] == [[0, 0], [0, 0]]
        amp_patch.reset()


# ---- disabled --------------------------------------------------------------------------------------------------------


def test_disabled_amp_is_not_there_for_a_script():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert amp.initialize(model, optimizer, enabled=False, opt_level="nonsense") == (model, optimizer)
    assert _amp_state.opt_properties.enabled is False and _amp_state.loss_scalers == []
    assert _amp_state.opt_properties.patch_torch_functions is False
    loss = model(make_batches(1)[0][0]).sum()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        assert scaled_loss is loss
    with amp.disable_casts():
        assert list(amp.master_params(optimizer)) == list(model.parameters())
    assert amp.state_dict() == {}
    amp.load_state_dict({})
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 8.0, "unskipped": 0}})
    assert (
        not hasattr(optimizer, "_amp_stash")
        and amp.float_function(torch.exp)(torch.zeros(1).half()).dtype is torch.float16
    )


def test_before_initialize_scale_loss_says_what_is_missing():
    context = amp.scale_loss(torch.ones(1), torch.optim.SGD([torch.ones(1)], lr=1))
    with pytest.raises(RuntimeError, match=r"amp\.initialize has not been called"), context:
        pass
    assert not hasattr(_amp_state, "loss_scalers") and not hasattr(_amp_state, "opt_properties")


def test_a_script_may_switch_scaling_off_through_the_options():
    model, optimizer = start("O1")
    _amp_state.opt_properties.enabled = False
    loss = model(make_batches(1)[0][0]).sum()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        assert scaled_loss is loss


# ---- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("level", "name", "value", "expected"),
    [
        ("O1", "cast_model_type", False, False),
        ("O2", "cast_model_type", False, False),
        ("O2", "keep_batchnorm_fp32", "False", False),
        ("O1", "master_weights", False, RuntimeError),
        ("O0", "loss_scale", "dynamic", "dynamic"),
        ("O2", "loss_scale", "128.0", 128.0),
        ("O2", "loss_scale", "high", ValueError),
    ],
)
def test_options_are_checked_against_the_level(level, name, value, expected):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"opt_level": level, "verbosity": 0, name: value}
    if isinstance(expected, type):
        with pytest.raises(expected, match=name):
            amp.initialize(model, optimizer, **options)
        assert amp_patch.stats().opt_level is None
    else:
        amp.initialize(model, optimizer, **options)
        assert getattr(_amp_state.opt_properties, name) == _amp_state.opt_properties.options[name] == expected


def test_options_reach_the_training():
    model, optimizer = start("O2", keep_batchnorm_fp32="False", master_weights=False, loss_scale="4")
    assert {p.dtype for p in model.parameters()} == {torch.float16} == {p.dtype for p in amp.master_params(optimizer)}
    assert _amp_state.loss_scalers[0].loss_scale() == 4.0
    amp_patch.reset()
    options = {"cast_model_outputs": torch.float16, "num_losses": 3, "min_loss_scale": 128.0, "max_loss_scale": 256.0}
    model, optimizer = start("O1", patch_torch_functions=False, **options)
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32 and _amp_state.loss_scalers[0].dynamic
    assert model(make_batches(1)[0][0]).dtype is torch.float16
    assert [scaler.loss_scale() for scaler in _amp_state.loss_scalers] == [256.0] * 3
    for _ in range(2):
        overflow(model, optimizer)
        optimizer.step()
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 128.0


# ---- messages --------------------------------------------------------------------------------------------------------


def test_options_are_printed_once_in_a_few_lines_even_where_logging_is_off(capsys):
    logging.disable(logging.CRITICAL)
    try:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        amp.initialize(model, optimizer, opt_level="O1", loss_scale=64)
        model(make_batches(1)[0][0])
    finally:
        logging.disable(logging.NOTSET)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("amp: opt_level O1, ")
    options = set(frontend.OPTIONS) - {"enabled", "opt_level"}  # whose values are in the first line
    assert [set(re.findall(r"(\w+): ", line)) for line in lines if "loss_scale: 64.0" in line] == [options]
    assert "  set by the script: loss_scale" in lines and len(lines) <= 6


def test_messages_are_printed_alone_and_amp_patch_logs_again_afterwards(caplog, capsys):
    caplog.set_level(logging.INFO, logger="amp_patch")
    model = make_model()
    optimizer = make_optimizer(model)
    amp.initialize(model, optimizer, opt_level="O1")
    overflow(model, optimizer)
    optimizer.step()
    assert caplog.records == []
    assert capsys.readouterr().out.count("Gradient overflow.") == 1
    amp_patch.reset()
    amp_patch.initialize(make_model(), opt_level="O4", verbosity=1)
    assert any("opt_level O4" in record.message for record in caplog.records)


# ---- casts -----------------------------------------------------------------------------------------------------------


def test_binary_cross_entropy_is_banned_at_o1():
    start("O1")
    with pytest.raises(NotImplementedError, match="binary_cross_entropy_with_logits"):
        F.binary_cross_entropy(torch.rand(2).half(), torch.rand(2).half())
    assert F.binary_cross_entropy(torch.rand(2), torch.rand(2)).dtype is torch.float32


def test_disable_casts_is_a_decorator_and_harmless_at_o2():
    start("O1")
    product = amp.handle.disable_casts()(lambda: torch.ones(2, 2) @ torch.ones(2, 2))
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float16 and product().dtype is torch.float32
    amp_patch.reset()
    start("O2")
    assert product().dtype is torch.float32


def test_edits_of_the_lists_are_followed(monkeypatch):
    functional, tensor = amp.lists.functional_overrides, amp.lists.tensor_overrides
    monkeypatch.setattr(functional, "FP32_FUNCS", [name for name in functional.FP32_FUNCS if name != "softmax"])
    monkeypatch.setattr(functional, "FP16_FUNCS", [*functional.FP16_FUNCS, "selu"])
    monkeypatch.setattr(functional, "BANNED_FUNCS", [])
    monkeypatch.setattr(tensor, "FP32_FUNCS", [*tensor.FP32_FUNCS, "sigmoid"])
    start("O1")
    half, full = torch.rand(2).half(), torch.rand(2)
    assert F.softmax(half, -1).dtype is torch.float16 and F.selu(full).dtype is torch.float16
    assert F.binary_cross_entropy(half, half).dtype is torch.float16 and half.sigmoid().dtype is torch.float32
    amp_patch.reset()
    monkeypatch.undo()
    start("O1")
    assert F.softmax(half, -1).dtype is torch.float32 and F.selu(full).dtype is torch.float32


# ---- amp's checkpoints -----------------------------------------------------------------------------------------------


def test_the_state_is_apexs_and_comes_back():
    start("O1", num_losses=2)
    assert amp.state_dict() == {f"loss_scaler{i}": {"loss_scale": 65536.0, "unskipped": 0} for i in (0, 1)}
    into = {"mine": 1}
    assert amp.state_dict(into) is into and set(into) == {"mine", "loss_scaler0", "loss_scaler1"}
    saved = {
        "loss_scaler0": {"loss_scale": 512.0, "unskipped": 7},
        "loss_scaler1": {"loss_scale": 1024.0, "unskipped": 9},
    }
    amp.load_state_dict(saved)
    assert amp.state_dict() == saved


@pytest.mark.parametrize("saved", [1, 3], ids=["fewer", "more"])
def test_another_number_of_scalers_is_told_and_loaded_as_far_as_it_goes(saved, capsys):
    start("O1", num_losses=2)
    amp.load_state_dict({f"loss_scaler{i}": {"loss_scale": 2.0**i, "unskipped": i} for i in range(saved)})
    assert f"{saved} loss scalers" in capsys.readouterr().out
    expected = [2.0**i if i < saved else 65536.0 for i in range(2)]
    assert [scaler.loss_scale() for scaler in _amp_state.loss_scalers] == expected


@pytest.mark.parametrize("saved", [1, 2, 3], ids=["fewer", "equal", "more"])
def test_steps_of_stochastic_rounding_come_back_beside_the_scalers(saved, tmp_path, monkeypatch):
    presets = tmp_path / "presets.yaml"
    presets.write_text("O2: {extends: O2, cast_model_type: float16, optimizer_state_type: bfloat16}\n")
    monkeypatch.setenv("AMP_PATCH_PRESETS", str(presets))
    start("O2", num_losses=2)
    entries = {f"loss_scaler{i}": {"loss_scale": 2.0**i, "unskipped": i} for i in range(saved)}
    amp.load_state_dict({**entries, "stochastic_rounding": {"steps": 7}})
    loaded = amp.state_dict()
    assert loaded.pop("stochastic_rounding") == {"steps": 7}
    assert [entry["loss_scale"] for entry in loaded.values()] == [2.0**i if i < saved else 65536.0 for i in range(2)]
    amp.load_state_dict(amp.state_dict())
    assert amp.state_dict() == {**loaded, "stochastic_rounding": {"steps": 7}}


def test_foreign_entries_are_refused_before_anything_is_loaded():
    start("O1")
    with pytest.raises(RuntimeError, match="epoch"):
        amp.load_state_dict({"loss_scaler0": {"loss_scale": 2.0, "unskipped": 0}, "epoch": 3})
    assert _amp_state.loss_scalers[0].loss_scale() == 65536.0


# ---- one initialize after another ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "second"), [("O1", "O2"), ("O2", "O1"), ("O3", "O0")], ids=str)
def test_a_later_level_takes_over_from_models_that_are_still_alive(first, second):
    batches = make_batches(4)
    expected, optimizer = start(second)
    train(expected, optimizer, batches)
    amp_patch.reset()

    older, older_optimizer = start(first)
    train(older, older_optimizer, batches[:2])
    newer, optimizer = start(second)
    assert amp_patch.stats().opt_level == second == _amp_state.opt_properties.opt_level
    train(newer, optimizer, batches)
    assert_equal(weights(newer), weights(expected))
    assert {parameter.dtype for parameter in older.parameters()} == {torch.float32}
    older(batches[0][0])  # runs as a plain model, whatever the level patches
    with pytest.raises(amp_patch.OptimizerError, match="was not passed to initialize"):
        amp_patch.scale_loss(torch.ones(()), older_optimizer)


def test_a_later_level_does_not_take_over_inside_a_scale_loss_block():
    model, optimizer = start("O2")
    with (
        pytest.raises(amp_patch.SessionError, match="a scale_loss block is open"),
        amp.scale_loss(torch.ones((), requires_grad=True), optimizer),
    ):
        start("O1")
    assert amp_patch.stats().opt_level == "O2"
