"""The property `loss_scale` takes numbers, "dynamic" and mappings, in YAML and in Python, and refuses all else.

Guards: config/policy, config/presets.
"""

import pytest

import amp_patch as amp
from amp_patch.config import make_policy
from amp_patch.config.policy import DynamicScale, parse_loss_scale

FULL = {"init": 2048, "growth_factor": 1.5, "backoff_factor": 0.25, "growth_interval": 300, "hysteresis": 4}


def test_dynamic_is_the_mapping_with_the_defaults():
    spelled = {"init": 65536, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "hysteresis": 1}
    policies = {make_policy("O1", {"loss_scale": given}) for given in ("dynamic", {}, spelled)}
    assert policies == {make_policy("O1", {})}  # one hash, one session
    assert make_policy("O4", {"loss_scale": {}}).is_scale_dynamic and not make_policy("O4", {}).is_scale_dynamic


def test_a_mapping_may_name_some_keys_and_the_rest_are_defaults():
    for name in FULL:
        scale = make_policy("O2", {"loss_scale": {name: FULL[name]}}).loss_scale
        told = {one: getattr(scale, one) for one in FULL}
        assert told == {**{one: getattr(DynamicScale(), one) for one in FULL}, name: FULL[name]}
        assert make_policy("O2", {"loss_scale": {name: FULL[name]}}) != make_policy("O2", {})


def test_numbers_of_a_presets_file_are_read(tmp_path):
    for text in ["init: 32768", "init: 3.2768e4", 'init: "32768.0"', "{init: 32768}"]:
        path = tmp_path / "levels.yaml"
        path.write_text(
            f"Mine:\n  extends: O5\n  loss_scale:\n    {text}\nWhole: {{loss_scale: {{growth_interval: 1e2}}}}\n"
        )
        assert make_policy("Mine", {}, presets=path).loss_scale == DynamicScale(init=32768.0)
        interval = make_policy("Whole", {}, presets=path).loss_scale.growth_interval
        assert interval == 100 and type(interval) is int
        assert make_policy("Mine", {"loss_scale": "8"}, presets=path).loss_scale == 8.0


def test_a_level_that_builds_on_another_takes_its_scale_or_states_all_of_its_own(tmp_path):
    path = tmp_path / "levels.yaml"
    path.write_text(
        "A: {extends: O1, loss_scale: {init: 512, hysteresis: 2}}\n"
        "B: {extends: A, compute: native}\n"
        "C: {extends: A, loss_scale: {init: 256}}\n"
    )
    scales = [make_policy(level, {}, presets=path).loss_scale for level in "ABC"]
    assert scales == [DynamicScale(init=512.0, hysteresis=2)] * 2 + [DynamicScale(init=256.0)]


WRONG = [
    ("growth_factor", "1", "greater than 1"),
    ("backoff_factor", 0, "between 0 and 1"),
    ("backoff_factor", "1.0", "between 0 and 1"),
    ("growth_interval", 0, "whole number from 1"),
    ("growth_interval", 2.0, "whole number from 1"),
    ("hysteresis", "2.0", "whole number from 1"),
    ("growth_interval", True, "whole number from 1"),
    ("growth_interval", 2**40, "whole number from 1 to 2147483647"),
    ("hysteresis", -3, "whole number from 1"),
    ("hysteresis", None, "whole number from 1"),
    ("init", "nan", "finite positive number"),
    ("init", 1e39, "finite positive number"),  # inf in float32
    ("init", [4], "finite positive number"),
    ("init_scale", 4.0, "unknown key 'init_scale' .*init, growth_factor"),
]


def test_what_cannot_be_is_refused_with_what_can():
    for name, value, message in WRONG:
        with pytest.raises(amp.PolicyError, match=rf"loss_scale=.*{name}.*{message}"):
            make_policy("O1", {"loss_scale": {"growth_interval": 5, name: value}})


def test_in_a_presets_file_it_is_refused_where_it_stands(tmp_path):
    path = tmp_path / "levels.yaml"
    for name, value, message in [row for row in WRONG if isinstance(row[1], str)]:
        path.write_text(f'Mine:\n  extends: O1\n  loss_scale:\n    growth_interval: 5\n    {name}: "{value}"\n')
        with pytest.raises(amp.PolicyError, match=f"5:5: loss_scale: {name}=.*{message}"):
            make_policy("Mine", {}, presets=path)
    for text, message in [
        ("{growth_intervall: 5}", "1:34: loss_scale: unknown key 'growth_intervall'.*'growth_interval'"),
        ("[64]", "1:33: loss_scale=.*nor 'dynamic' nor a mapping of init, growth"),
    ]:
        path.write_text(f"Mine: {{extends: O2, loss_scale: {text}}}\n")
        with pytest.raises(amp.PolicyError, match=message):
            make_policy("Mine", {}, presets=path)


def test_a_number_that_no_scale_can_be_is_refused():
    for value in ["1e39", 1e-60, "huge", -2.0, None, True, [8.0], 10**400]:
        with pytest.raises(amp.PolicyError, match="neither a finite positive number nor 'dynamic' nor a mapping"):
            parse_loss_scale(value)


@pytest.mark.parametrize(
    ("bounds", "is_allowed"),
    [
        ({}, True),
        ({"min_loss_scale": 3000.0}, True),
        ({"min_loss_scale": 3001.0}, False),
        ({"max_loss_scale": 3000.0}, True),
        ({"max_loss_scale": 2048.0}, False),
    ],
    ids=str,
)
def test_an_init_lies_within_the_bounds_and_the_default_gives_way(bounds, is_allowed):
    assert make_policy("O1", {**bounds, "loss_scale": {"init": 65536}}) == make_policy("O1", bounds)
    overrides = {**bounds, "loss_scale": {"init": 3000}}
    if is_allowed:
        assert make_policy("O1", overrides).loss_scale.init == 3000.0
        return
    with pytest.raises(amp.PolicyError, match=r"loss_scale: init=3000 must lie between min_loss_scale=.*and max_loss"):
        make_policy("O1", overrides)
