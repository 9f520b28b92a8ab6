"""Presets, the user's own levels and overrides give the documented policy, and each fault of a file has a position.

Guards: config/policy, config/presets, config/shipped.
"""

import inspect

import pytest
import torch
from torch import nn

import amp_patch as amp
from amp_patch.config import Policy, make_policy
from amp_patch.config import policy as policy_module
from amp_patch.config.presets import DynamicScale
from amp_patch.config.shipped import shipped_presets

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32

TABLE = {  # cast_model_type, patch_torch_functions, type, keep_batchnorm_fp32, master_weights, loss_scale
    "O0": (F32, False, None, None, False, 1.0),
    "O1": (None, True, F16, None, None, DynamicScale()),
    "O2": (F16, False, None, True, True, DynamicScale()),
    "O3": (F16, False, None, False, False, 1.0),
    "O4": (None, True, BF16, None, None, 1.0),
    "O5": (BF16, False, None, True, True, 1.0),
}


def properties(policy):
    return (
        policy.cast_model_type,
        policy.patch_torch_functions,
        policy.patch_torch_functions_type,
        policy.keep_batchnorm_fp32,
        policy.master_weights,
        policy.loss_scale,
    )


def test_the_shipped_levels():
    for level in TABLE:
        assert properties(make_policy(level, {})) == TABLE[level]


@pytest.mark.parametrize("has_products", [True, False])
def test_auto_becomes_what_the_hardware_is_made_for(has_products, monkeypatch):
    asked = []
    monkeypatch.setattr(policy_module, "has_low_products", lambda *about: asked.append(about) or has_products)
    for level in TABLE:
        asked.clear()
        policy = make_policy(level, {})
        assert policy.compute == "auto"
        assert policy.computes_in_float32("cuda") is (level != "O0" and not has_products)
        assert asked == ([] if level == "O0" else [("cuda", policy.low_dtype)])  # O0 has no 16-bit products


@pytest.mark.parametrize("compute", ["native", "float32"])
@pytest.mark.parametrize("has_products", [True, False])
def test_how_products_are_computed_is_as_it_is_given(compute, has_products, monkeypatch, tmp_path):
    monkeypatch.setattr(policy_module, "has_low_products", lambda device_type, low: has_products)
    policy = make_policy("O1", {"compute": compute})
    assert policy.computes_in_float32("cpu") is (compute == "float32") and properties(policy) == TABLE["O1"]
    assert ("compute", compute) in policy.describe()
    path = tmp_path / "mine.yaml"
    path.write_text(f"Mine: {{extends: O5, compute: {compute}}}\nAgain: {{extends: Mine, compute: auto}}\n")
    assert make_policy("Mine", {}, presets=path).compute == compute
    assert make_policy("Again", {}, presets=path).computes_in_float32("cpu") is not has_products
    assert make_policy("Mine", {"compute": "auto"}, presets=path).computes_in_float32("cpu") is not has_products
    assert not make_policy("O0", {"compute": compute}).computes_in_float32("cpu")


def test_overrides_replace_one_property_each():
    policy = make_policy("O2", {"loss_scale": "64", "keep_batchnorm_fp32": "False", "cast_model_type": None})
    assert (policy.loss_scale, policy.keep_batchnorm_fp32, policy.cast_model_type) == (64.0, False, F16)
    assert make_policy("O2", {"cast_model_type": False}).cast_model_type is None


def test_lists_follow_the_low_dtype_unless_they_are_named():
    assert make_policy("O1", {}).lists == ("float16",)
    assert make_policy("O4", {}).lists == ("bfloat16",)
    assert make_policy("O4", {"lists": ["bfloat16", "my.yaml"]}).lists == ("bfloat16", "my.yaml")
    assert make_policy("O2", {}).lists == ()


def test_a_presets_file_may_add_levels_and_build_on_others(tmp_path, monkeypatch):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "Mine: {extends: O5, loss_scale: 16}\n"
        "O2: {extends: O2, keep_batchnorm_fp32: false}\n"
        "Small: {extends: Mine, master_weights: false}\n"
    )
    assert properties(make_policy("Mine", {}, presets=path)) == (BF16, False, None, True, True, 16.0)
    assert make_policy("O2", {}, presets=path).keep_batchnorm_fp32 is False
    assert make_policy("O2", {}, presets=path).cast_model_type is F16
    assert make_policy("Small", {}, presets=path).master_weights is False
    assert make_policy("O1", {}, presets=path).patch_torch_functions is True
    monkeypatch.setenv("AMP_PATCH_PRESETS", str(path))
    model = nn.Linear(2, 2)
    amp.initialize(model, opt_level="Small", verbosity=0)
    assert model.weight.dtype is BF16 and amp.stats().loss_scales == (16.0,)


def test_the_shipped_file_is_the_only_place_that_knows_the_levels(tmp_path):
    path = tmp_path / "presets.yaml"
    path.write_text(shipped_presets().read_text().replace("\nO2:", "\nTwo:").replace("extends: O2", "extends: Two"))
    assert properties(make_policy("Two", {}, presets=path)) == TABLE["O2"]


def test_every_property_has_its_argument_and_its_line_of_documentation():
    assert set(Policy.get_overrides()) <= set(inspect.signature(amp.initialize).parameters)
    assert all(name in amp.initialize.__doc__ for name in Policy.get_overrides())
    comment = shipped_presets().read_text().partition("\nO0:")[0]
    assert all(f"#   {name} " in comment for name in Policy.get_preset_properties())


def test_names_that_override_nothing_are_left_aside():
    plain = make_policy("O1", {})
    assert make_policy("O1", {"opt_level": "O2", "verbosity": 1, "description": "x"}) == plain


def test_a_fault_of_a_presets_file_has_its_place_as_attributes(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("Mine:\n  loss_scal: 1\n")
    with pytest.raises(amp.PolicyError) as caught:
        make_policy("Mine", {}, presets=path)
    assert (caught.value.path, caught.value.line, caught.value.column) == (str(path), 2, 3)
    with pytest.raises(amp.PolicyError, match="O5, Mine") as caught:
        make_policy("Other", {}, presets=path)
    assert (caught.value.path, caught.value.line, caught.value.column) == (None, None, None)
