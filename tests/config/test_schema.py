"""The JSON Schemas that editors use agree with the readers of lists and presets."""

import json

import generate_list_schema
import jsonschema
import pytest
import yaml

import amp_patch as amp
from amp_patch.config.op_lists import load_oplists
from amp_patch.config.presets import Presets
from amp_patch.config.shipped import lists_dir

LISTS = jsonschema.Draft7Validator(json.loads((lists_dir() / "schema.json").read_text()))
PRESETS = jsonschema.Draft7Validator(json.loads((lists_dir() / "presets.schema.json").read_text()))


@pytest.mark.parametrize("name", generate_list_schema.FILES)
def test_a_file_is_what_is_generated(name):
    text = (lists_dir() / name).read_text()
    assert text == generate_list_schema.render(name)
    jsonschema.Draft7Validator.check_schema(json.loads(text))


@pytest.mark.parametrize("path", sorted(lists_dir().glob("*.yaml")), ids=lambda path: path.stem)
def test_a_shipped_file_names_its_schema(path):
    name = path.read_text().partition("\n")[0].removeprefix("# yaml-language-server: $schema=")
    validator = {"schema.json": LISTS, "presets.schema.json": PRESETS}[name]
    validator.validate(yaml.safe_load(path.read_text()))


GOOD = [
    "whitelist: [mm, F.gelu, torch.fft.rfft, lib_not_imported.ops.f]\nblacklist:\nextends: [float16, bfloat16]",
    "blacklist: [{op: rms_norm, why: parity, since: '2.6', until: '99', optional: true}]",
    "modules: [{match: 'a.*', run: low}, {type: torch.nn.Linear, run: float32, why: because}]",
]
BAD = [
    "whitelists: [mm]",
    "whitelist: mm",
    "whitelist: [[mm]]",
    "whitelist: ['mm mm']",
    "whitelist: [{name: mm}]",
    "whitelist: [{op: mm, why: [1]}]",
    "blacklist: [{op: mm, since: new}]",
    "inplace_blacklist: match",
    "modules: [{run: low}]",
    "modules: [{match: a, type: torch.nn.Linear, run: low}]",
    "modules: [{match: a, run: half}]",
    "modules: [{type: Linear, run: low}]",
    "extends: flaot16",
    "- mm",
]


def is_valid_list(text, path):
    """What the schema says of a list, which is what the reader says."""
    path.write_text(text)
    is_valid = LISTS.is_valid(yaml.safe_load(text))
    if is_valid:
        load_oplists(path)
    else:
        with pytest.raises(amp.OpListError):
            load_oplists(path)
    return is_valid


def test_schema_and_reader_take_and_refuse_the_same_lists(tmp_path):
    assert [text for text in GOOD if not is_valid_list(text, tmp_path / "list.yaml")] == []
    assert [text for text in BAD if is_valid_list(text, tmp_path / "list.yaml")] == []


GOOD_LEVELS = [
    "{extends: O1, loss_scale: dynamic}",
    "{loss_scale: 128}",
    "{loss_scale: '128'}",
    "{loss_scale: {init: 1024, growth_interval: 10}}",
    "{cast_model_type: half, master_weights: true, keep_batchnorm_fp32: null}",
    "{cast_model_type: torch.bfloat16, compute: native}",
    "{extends: O4, lists: [float16, mine.yaml], description: mine}",
]
BAD_LEVELS = [
    "O2",
    "{loss_scale: dynmic}",
    "{loss_scale: -1}",
    "{loss_scale: {init_scale: 1}}",
    "{loss_scal: 1}",
    "{master_weights: maybe}",
    "{cast_model_type: flaot16}",
    "{cast_model_type: float64}",
    "{compute: nativ}",
]


def is_valid_level(level, path):
    """What the schema says of a level, which is what the reader says."""
    path.write_text(f"Mine: {level}")
    is_valid = PRESETS.is_valid(yaml.safe_load(f"Mine: {level}"))
    if is_valid:
        Presets(path).properties("Mine")
    else:
        with pytest.raises(amp.PolicyError):
            Presets(path).properties("Mine")
    return is_valid


def test_schema_and_reader_take_and_refuse_the_same_levels(tmp_path):
    assert [level for level in GOOD_LEVELS if not is_valid_level(level, tmp_path / "presets.yaml")] == []
    assert [level for level in BAD_LEVELS if is_valid_level(level, tmp_path / "presets.yaml")] == []
