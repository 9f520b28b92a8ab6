"""`initialize` returns the objects that it was given, does nothing with `enabled=False`, and changes nothing if its
arguments are wrong.

Guards: session/arguments, session/current, hardware, api.
"""

import inspect
import re

import pytest
import torch
from torch import nn
from torch_state import find_changes

import amp_patch as amp
from amp_patch import hardware
from amp_patch.config import policy


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


APEX = "models optimizers enabled opt_level cast_model_type patch_torch_functions keep_batchnorm_fp32 master_weights"
APEX += " loss_scale cast_model_outputs num_losses verbosity min_loss_scale max_loss_scale"
OURS = {"patch_torch_functions_type": None, "compute": None, "lists": None, "presets": None, "replace": False}
OURS |= {"overflow_group": None, "split_masters": None, "optimizer_state_type": None}


def test_the_first_fourteen_parameters_are_apex_s_and_the_rest_are_keywords():
    parameters = list(inspect.signature(amp.initialize).parameters.values())
    assert [p.name for p in parameters[:14]] == APEX.split()
    assert {p.name: p.default for p in parameters[14:]} == OURS
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in parameters[14:])


@pytest.mark.parametrize("wrap", [lambda one: one, lambda one: [one], lambda one: (one,)], ids=["one", "list", "tuple"])
def test_what_comes_back_is_what_went_in(wrap):
    model, optimizer = make()
    models, optimizers = wrap(model), wrap(optimizer)
    returned = amp.initialize(models, optimizers, opt_level="O2", verbosity=0)
    assert returned[0] is models and returned[1] is optimizers
    assert amp.initialize(models, opt_level="O2", verbosity=0) is models
    assert amp.initialize(models, [], opt_level="O2", verbosity=0) == (models, [])


def test_a_model_without_parameters_may_come():
    model = nn.Flatten()
    assert amp.initialize(model, opt_level="O4", verbosity=0) is model and amp.stats().opt_level == "O4"


def test_generators_come_back_as_lists_of_what_they_gave():
    model, optimizer = make()
    models, optimizers = amp.initialize((m for m in [model]), iter([optimizer]), opt_level="O2", verbosity=0)
    assert models == [model] and optimizers == [optimizer]
    assert model[0].weight.dtype is torch.float16


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
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    assert amp.is_patched(torch, "matmul") and "loss_scaler0" in amp.state_dict()


CONTRADICTIONS = {"cast_model_type": torch.float16, "keep_batchnorm_fp32": False, "master_weights": False}
BAD_OPTIONS = [
    ({"opt_level": "01"}, amp.PolicyError, "Did you mean 'O1'"),
    ({"opt_level": "O1", **CONTRADICTIONS}, amp.PolicyError, "(?s)cast_model_type.*keep_batchnorm_fp32.*master_weigh"),
    ({"loss_scale": -1.0}, amp.PolicyError, "loss_scale=-1.0"),
    ({"min_loss_scale": 8.0, "max_loss_scale": 4.0}, amp.PolicyError, "min_loss_scale=8.0"),
    ({"num_losses": 0}, amp.ArgumentTypeError, "num_losses=0"),
    ({"opt_level": "O1", "lists": "bfloat61"}, amp.OpListError, "bfloat61.*Did you mean 'bfloat16'"),
    ({"opt_level": "O5", "lists": "float16"}, amp.PolicyError, "lists=float16: O5 patches no functions"),
    ({"presets": "nowhere/presets.yaml"}, amp.PolicyError, "nowhere/presets.yaml"),
]


BAD_OBJECTS = {
    "data parallel": (lambda m, o: (nn.DataParallel(m), o), amp.ModelError, "DataParallel is a parallel wrapper"),
    "scripted": (lambda m, o: (torch.jit.script(m), o), amp.ModelError, "is TorchScript"),
    "one in 16 bits": (lambda m, o: ([m, make()[0].half()], o), amp.ModelError, "in 16 bits already.*0.weight"),
    "the same optimizer twice": (lambda m, o: (m, [o, o]), amp.OptimizerError, "the same SGD was passed twice"),
    "no optimizer": (lambda m, o: (m, [o, "adam"]), amp.ArgumentTypeError, "not str"),
    "no module": (lambda m, o: ([m, m.forward], o), amp.ArgumentTypeError, "not method"),
    "no model": (lambda m, o: ([], o), amp.ModelError, "at least one model"),
    "LBFGS": (lambda m, o: (m, [o, torch.optim.LBFGS(m.parameters())]), amp.OptimizerError, "LBFGS"),
    "lazy": (lambda m, o: ([m, nn.LazyLinear(3)], o), amp.ModelError, "uninitialized parameters"),
}


@pytest.mark.parametrize(("make_arguments", "error", "message"), BAD_OBJECTS.values(), ids=BAD_OBJECTS)
def test_bad_objects_are_named_and_nothing_is_changed(make_arguments, error, message):
    model, optimizer = make()
    before = describe(model, optimizer)
    with pytest.raises(error, match=message):
        amp.initialize(*make_arguments(model, optimizer), opt_level="O2")
    assert describe(model, optimizer) == before and find_changes() == [] and amp.stats().opt_level is None
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)  # and the next, correct call works


def test_bad_options_are_named_and_nothing_is_changed():
    model, optimizer = make()
    before = describe(model, optimizer)
    for options, error, message in BAD_OPTIONS:
        with pytest.raises(error, match=message):
            amp.initialize(model, optimizer, **{"opt_level": "O2", **options})
        assert describe(model, optimizer) == before
        assert amp.stats().opt_level is None
    assert find_changes() == []


def test_an_optimizer_without_any_of_the_parameters_is_warned_about():
    model, _ = make()
    other, stranger = make(seed=1)
    with pytest.warns(UserWarning, match="owns none of the models' parameters"):
        amp.initialize(model, stranger, opt_level="O1", verbosity=0)
    del other


def test_an_optimizer_of_an_earlier_model_may_come_with_a_later_one(recwarn):
    model, optimizer = make()
    later, _ = make(seed=1)
    amp.initialize(model, opt_level="O1", verbosity=0)
    amp.initialize([model, later], optimizer, opt_level="O1", verbosity=0)
    assert not recwarn.list


def test_what_is_chosen_is_said_once(capsys):
    model, optimizer = make()
    amp.initialize(model, optimizer, opt_level="O2", compute="native")
    said = capsys.readouterr().out
    assert said.count("opt_level O2") == said.count("cast_model_type: float16") == said.count("compute: native") == 1
    assert "products are computed" not in said


@pytest.mark.parametrize("compute", ["auto", "float32"])
def test_that_products_are_computed_in_float32_is_said_once_with_the_reason(compute, capsys, monkeypatch):
    for module in (hardware, policy):
        monkeypatch.setattr(module, "has_low_products", lambda _, low: compute == "float32" or low is torch.bfloat16)
    model, optimizer = make()
    for _ in range(2):
        amp.initialize(model, optimizer, opt_level="O2", compute=compute)
        amp.reset()
    said = capsys.readouterr().out
    assert len(re.findall(rf"compute: {compute}", said)) == 2
    assert said.count("values are rounded to float16, products are computed in float32") == 1
    assert said.count("no fast float16 products") == said.count("for speed here, use O4 or O5") == (compute == "auto")


def test_text_in_the_place_of_enabled_is_refused_unless_it_is_a_boolean_word():
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for word in ("O2", "o1", "yes", ""):
        with pytest.raises(amp.ArgumentTypeError, match=rf"enabled='{word}'.* write opt_level='{word}'"):
            amp.initialize(model, optimizer, word)
        assert amp.stats().opt_level is None and model.weight.dtype is torch.float32
    for word, is_on in (("True", True), ("true", True), ("False", False), (" FALSE", False)):
        amp.initialize(model, enabled=word, opt_level="O4", verbosity=0)
        assert amp.stats().opt_level == ("O4" if is_on else None)
        amp.reset()


@pytest.mark.parametrize("has_products", [True, False])
def test_that_native_products_are_imitated_is_said_once_with_what_to_do(has_products, capsys, monkeypatch):
    monkeypatch.setattr(policy, "has_low_products", lambda device_type, low: has_products)
    amp.initialize(nn.Linear(3, 3), opt_level="O5", compute="native")
    told = [line for line in capsys.readouterr().out.splitlines() if "compute='native', torch imitates them" in line]
    assert len(told) == (0 if has_products else 1)
    assert all("no fast bfloat16 products" in line and "leave compute out" in line for line in told)
