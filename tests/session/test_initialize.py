"""`initialize`: shapes, identity, `enabled=False`, and bad input that changes nothing."""

import inspect
import re

import pytest
import torch
from torch import nn
from torch_state import find_changes

import amp_patch as amp
from amp_patch import hardware
from amp_patch.config import policy
from amp_patch.patching import references
from amp_patch.training import gradient_patches
from amp_patch.training.attributes import Attributes

LEVELS = ["O0", "O1", "O2", "O3", "O4", "O5"]


def make(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def describe(model, optimizer):
    """All that initialize may change about a model and an optimizer."""
    return (
        [(id(p), p.dtype, p.data_ptr()) for p in (*model.parameters(), *model.buffers())],
        [(name, len(hooks)) for name, hooks in sorted(vars(model).items()) if name.endswith("_hooks")],
        sorted(vars(optimizer)),
        [[id(p) for p in group["params"]] for group in optimizer.param_groups],
    )


def test_the_first_fourteen_parameters_are_apex_s_and_the_rest_are_keywords():
    parameters = list(inspect.signature(amp.initialize).parameters.values())
    assert [p.name for p in parameters[:14]] == [
        "models",
        "optimizers",
        "enabled",
        "opt_level",
        "cast_model_type",
        "patch_torch_functions",
        "keep_batchnorm_fp32",
        "master_weights",
        "loss_scale",
        "cast_model_outputs",
        "num_losses",
        "verbosity",
        "min_loss_scale",
        "max_loss_scale",
    ]
    assert {p.name: p.default for p in parameters[14:]} == {
        "patch_torch_functions_type": None,
        "compute": None,
        "lists": None,
        "presets": None,
        "replace": False,
        "overflow_group": None,
    }
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in parameters[14:])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("wrap_models", [None, list, tuple], ids=["model", "models-list", "models-tuple"])
@pytest.mark.parametrize(
    "wrap_optimizers", [None, list, tuple], ids=["optimizer", "optimizers-list", "optimizers-tuple"]
)
def test_what_comes_back_is_what_went_in(level, wrap_models, wrap_optimizers):
    model, optimizer = make()
    models = model if wrap_models is None else wrap_models([model])
    optimizers = optimizer if wrap_optimizers is None else wrap_optimizers([optimizer])
    returned = amp.initialize(models, optimizers, opt_level=level, verbosity=0)
    assert returned[0] is models and returned[1] is optimizers


@pytest.mark.parametrize("level", LEVELS)
def test_without_optimizers_only_the_models_come_back(level):
    model, _ = make()
    assert amp.initialize(model, opt_level=level, verbosity=0) is model
    amp.reset()
    assert amp.initialize([model], None, opt_level=level, verbosity=0) == [model]


def test_generators_come_back_as_lists_of_what_they_gave():
    model, optimizer = make()
    models, optimizers = amp.initialize((m for m in [model]), iter([optimizer]), opt_level="O2", verbosity=0)
    assert models == [model] and optimizers == [optimizer]
    assert model[0].weight.dtype is torch.float16


def test_an_empty_list_of_optimizers_is_allowed():
    model, _ = make()
    assert amp.initialize(model, [], opt_level="O1", verbosity=0) == (model, [])


def test_disabled_makes_every_call_a_no_op():
    model, optimizer = make()
    before = describe(model, optimizer)
    assert amp.initialize(model, optimizer, enabled=False, opt_level="no such level") == (model, optimizer)
    assert optimizer.step_was_skipped is False
    del optimizer.step_was_skipped
    assert describe(model, optimizer) == before
    loss = model(torch.ones(3, 4)).sum()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        assert scaled_loss is loss
    with amp.disable_casts():
        pass
    assert amp.state_dict() == {}
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 1.0, "unskipped": 0}})
    assert list(amp.master_params(optimizer)) == list(model.parameters())
    assert amp.stats().opt_level is None
    amp.refresh()
    assert find_changes() == []


def test_enabled_again_after_disabled():
    model, optimizer = make()
    amp.initialize(model, optimizer, enabled=False)
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    assert amp.is_patched(torch, "matmul")
    assert "loss_scaler0" in amp.state_dict()


def bad_level(model, optimizer):
    amp.initialize(model, optimizer, opt_level="o1")


def zero_for_o(model, optimizer):
    amp.initialize(model, optimizer, opt_level="01")


def no_level(model, optimizer):
    amp.initialize(model, optimizer, opt_level=None)


def contradictions(model, optimizer):
    amp.initialize(
        model, optimizer, opt_level="O1", cast_model_type=torch.float16, keep_batchnorm_fp32=False, master_weights=False
    )


def patch_at_o2(model, optimizer):
    amp.initialize(model, optimizer, opt_level="O2", patch_torch_functions=True)


def bad_keep_batchnorm(model, optimizer):
    amp.initialize(model, optimizer, opt_level="O2", keep_batchnorm_fp32="yes")


def bad_scale(model, optimizer):
    amp.initialize(model, optimizer, opt_level="O2", loss_scale="big")


def negative_scale(model, optimizer):
    amp.initialize(model, optimizer, opt_level="O2", loss_scale=-1.0)


def bad_dtype(model, optimizer):
    amp.initialize(model, optimizer, opt_level="O2", cast_model_type=torch.int8)


def bad_bounds(model, optimizer):
    amp.initialize(model, optimizer, opt_level="O1", min_loss_scale=8.0, max_loss_scale=4.0)


def data_parallel(model, optimizer):
    amp.initialize(nn.DataParallel(model), optimizer, opt_level="O1")


def half_model(model, optimizer):
    model.half()
    amp.initialize(model, optimizer, opt_level="O2")


def same_optimizer_twice(model, optimizer):
    amp.initialize(model, [optimizer, optimizer], opt_level="O2")


def no_optimizer_at_all(model, optimizer):
    amp.initialize(model, [optimizer, "adam"], opt_level="O2")


def no_module(model, optimizer):
    amp.initialize([model, model.forward], optimizer, opt_level="O2")


def no_model(model, optimizer):
    amp.initialize([], optimizer, opt_level="O2")


def lbfgs(model, optimizer):
    amp.initialize(model, [optimizer, torch.optim.LBFGS(model.parameters())], opt_level="O2")


def no_losses(model, optimizer):
    amp.initialize(model, optimizer, opt_level="O2", num_losses=0)


def unknown_list(model, optimizer):
    amp.initialize(model, optimizer, opt_level="O1", lists="bfloat61")


def missing_list(model, optimizer):
    amp.initialize(model, optimizer, opt_level="O1", lists="nowhere/my.yaml")


def lists_without_patches(model, optimizer):
    amp.initialize(model, optimizer, opt_level="O5", lists="float16")


def bad_compute(model, optimizer):
    amp.initialize(model, optimizer, opt_level="O1", compute="tf32")


def missing_presets(model, optimizer):
    amp.initialize(model, optimizer, opt_level="O1", presets="nowhere/presets.yaml")


def lazy(model, optimizer):
    amp.initialize([model, nn.LazyLinear(3)], optimizer, opt_level="O2")


BAD = [
    (
        bad_level,
        amp.PolicyError,
        r"'o1' is not a preset \(O0, O1, O2, O3, O4, O5\).*Did you mean 'O1'\? The first character is the letter O",
    ),
    (zero_for_o, amp.PolicyError, r"Did you mean 'O1'\? The first character is the letter O"),
    (no_level, amp.PolicyError, "None is not a preset"),
    (contradictions, amp.PolicyError, r"(?s)cast_model_type.*keep_batchnorm_fp32.*master_weights"),
    (patch_at_o2, amp.PolicyError, "patch_torch_functions=True.*use O1 or O4"),
    (bad_keep_batchnorm, amp.PolicyError, "keep_batchnorm_fp32='yes'.*neither true nor false"),
    (bad_scale, amp.PolicyError, "loss_scale='big'"),
    (negative_scale, amp.PolicyError, "loss_scale=-1.0"),
    (bad_dtype, amp.PolicyError, "cast_model_type=torch.int8"),
    (bad_bounds, amp.PolicyError, "min_loss_scale=8.0"),
    (data_parallel, amp.ModelError, "DataParallel is a parallel wrapper"),
    (half_model, amp.ModelError, "in 16 bits already.*0.weight"),
    (same_optimizer_twice, amp.OptimizerError, "the same SGD was passed twice"),
    (no_optimizer_at_all, amp.ArgumentTypeError, "not str"),
    (no_module, amp.ArgumentTypeError, "not method"),
    (no_model, amp.ModelError, "at least one model"),
    (lbfgs, amp.OptimizerError, "LBFGS"),
    (no_losses, amp.ArgumentTypeError, "num_losses=0"),
    (unknown_list, amp.OpListError, "bfloat61.*Did you mean 'bfloat16'"),
    (missing_list, amp.OpListError, "nowhere/my.yaml"),
    (lists_without_patches, amp.PolicyError, "lists=float16: O5 patches no functions"),
    (bad_compute, amp.PolicyError, "compute='tf32'.*none of auto, native, float32"),
    (missing_presets, amp.PolicyError, "nowhere/presets.yaml"),
    (lazy, amp.ModelError, "uninitialized parameters"),
]


@pytest.mark.parametrize(("call", "error", "message"), BAD, ids=[case[0].__name__ for case in BAD])
def test_bad_input_is_named_and_changes_nothing(call, error, message):
    model, optimizer = make()
    before = None if call is half_model else describe(model, optimizer)
    with pytest.raises(error, match=message):
        call(model, optimizer)
    if before is not None:
        assert describe(model, optimizer) == before
    assert find_changes() == []
    assert amp.stats().opt_level is None
    if call is not half_model:  # and the next, correct call works
        amp.initialize(model, optimizer, opt_level="O2", verbosity=0)


def test_errors_are_also_the_runtime_error_that_apex_scripts_catch():
    model, optimizer = make()
    with pytest.raises(RuntimeError):
        amp.initialize(model, optimizer, opt_level="O9")


def test_a_wrapped_distributed_model_is_refused():
    wrapped = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(wrapped)
    with pytest.raises(amp.ModelError, match="DistributedDataParallel is a parallel wrapper: pass the bare model"):
        amp.initialize(wrapped, opt_level="O1", verbosity=0)


def test_an_optimizer_without_any_of_the_parameters_is_warned_about():
    model, _ = make()
    other, stranger = make(seed=1)
    with pytest.warns(UserWarning, match="owns none of the models' parameters"):
        amp.initialize(model, stranger, opt_level="O1", verbosity=0)
    del other


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failure_half_way_is_undone(level, error, monkeypatch):
    model, optimizer = make()
    before = describe(model, optimizer)

    def fail(*args, **kwargs):
        raise error("in the middle")

    where = {
        "O1": (references, "redirect"),
        "O2": (gradient_patches, "resolve_before_reading"),
        "O3": (Attributes, "replace"),
    }
    monkeypatch.setattr(*where[level], fail)
    with pytest.raises(error, match="in the middle"):
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    monkeypatch.undo()
    assert describe(model, optimizer) == before
    assert find_changes() == []
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)


def test_what_is_chosen_is_said_once(capsys):
    model, optimizer = make()
    amp.initialize(model, optimizer, opt_level="O2", compute="native")
    said = capsys.readouterr().out
    assert said.count("opt_level             : O2") == said.count("cast_model_type       : float16") == 1
    assert said.count("compute               : native") == 1 and "products are computed" not in said


@pytest.mark.parametrize("compute", ["auto", "float32"])
@pytest.mark.parametrize(("level", "name"), [("O1", "float16"), ("O2", "float16"), ("O5", "bfloat16")])
def test_that_products_are_computed_in_float32_is_said_once_with_the_reason(level, name, compute, capsys, monkeypatch):
    for module in (hardware, policy):
        monkeypatch.setattr(module, "has_low_products", lambda device_type, low: compute == "float32")
    model, optimizer = make()
    amp.initialize(model, optimizer, opt_level=level, compute=compute)
    amp.reset()
    amp.initialize(model, optimizer, opt_level=level, compute=compute)
    said = capsys.readouterr().out
    assert len(re.findall(rf"compute +: {compute}", said)) == 2
    told = f"values are rounded to {name}, products are computed in float32, as tensor cores do"
    reason = f"this CPU has no fast {name} products: "
    cost = "; a step takes 1.1 to 1.5 times as long as in float32: for speed here, use O0"
    assert said.count(told) == 1
    assert said.count(reason + told + cost) == (compute == "auto")


def test_what_is_for_speed_is_what_the_doctor_advises(monkeypatch):
    monkeypatch.setattr(hardware, "has_low_products", lambda device_type, low: low is torch.bfloat16)
    assert hardware.explain_products("cpu", torch.float16).endswith(
        "for speed here, use O4 or O5, or O0 for a small model"
    )
    monkeypatch.setattr(hardware, "has_low_products", lambda device_type, low: low is torch.float16)
    assert hardware.explain_products("cuda", torch.bfloat16).endswith(
        "for speed here, use O1 or O2, or O0 for a small model"
    )


def test_verbosity_zero_prints_nothing(capsys):
    model, optimizer = make()
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("level", "options", "low", "scale"),
    [
        ("O1", {}, torch.float16, 65536.0),
        ("O1", {"patch_torch_functions_type": "float16"}, torch.float16, 65536.0),
        ("O1", {"patch_torch_functions_type": "bfloat16"}, torch.bfloat16, 65536.0),
        ("O1", {"loss_scale": 1.0}, torch.float16, 1.0),
        ("O4", {"loss_scale": "dynamic"}, torch.bfloat16, 65536.0),
        ("O2", {}, torch.float16, 65536.0),
        ("O2", {"cast_model_type": torch.float16}, torch.float16, 65536.0),
        ("O2", {"cast_model_type": "half", "loss_scale": "128.0"}, torch.float16, 128.0),
        ("O2", {"cast_model_type": torch.bfloat16}, torch.bfloat16, 65536.0),
        ("O3", {}, torch.float16, 1.0),
        ("O4", {}, torch.bfloat16, 1.0),
        ("O5", {}, torch.bfloat16, 1.0),
        ("O0", {}, None, 1.0),
        ("O1", {"patch_torch_functions": False}, None, 65536.0),
    ],
    ids=str,
)
def test_the_low_dtype_and_scale_on_the_cpu(level, options, low, scale):
    model, optimizer = make()
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    assert (amp.stats().low_dtype, amp.stats().loss_scales) == (low, (scale,))


@pytest.mark.parametrize("word", ["O2", "O5", "o1", "yes", "", "dynamic"])
def test_text_in_the_place_of_enabled_is_refused_unless_it_is_a_boolean_word(word):
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(amp.ArgumentTypeError, match=rf"enabled='{word}'.* write opt_level='{word}'"):
        amp.initialize(model, optimizer, word)
    assert amp.stats().opt_level is None and model.weight.dtype is torch.float32


@pytest.mark.parametrize(("word", "is_on"), [("True", True), ("true", True), ("False", False), (" FALSE", False)])
def test_boolean_words_in_the_place_of_enabled_are_read(word, is_on):
    model = nn.Linear(3, 3)
    amp.initialize(model, enabled=word, opt_level="O4", verbosity=0)
    assert amp.stats().opt_level == ("O4" if is_on else None)


@pytest.mark.parametrize("has_products", [True, False])
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_that_native_products_are_imitated_is_said_once_with_what_to_do(level, has_products, capsys, monkeypatch):
    monkeypatch.setattr(policy, "has_low_products", lambda device_type, low: has_products)
    model = nn.Linear(3, 3)
    amp.initialize(model, opt_level=level, compute="native")
    low = "bfloat16" if level == "O5" else "float16"
    told = [line for line in capsys.readouterr().out.splitlines() if "compute='native' has torch imitate them" in line]
    assert len(told) == (0 if has_products else 1)
    assert all(f"no fast {low} products" in line and "leave compute out" in line for line in told)
