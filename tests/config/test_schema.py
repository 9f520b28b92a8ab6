"""The JSON Schema that editors use agrees with the reader of list files."""

import json
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

import amp_patch as amp
from amp_patch.config import list_file, module_rules, schema
from amp_patch.config.op_lists import load_oplists
from amp_patch.config.shipped import lists_dir, shipped_names

sys.path.append(str(Path(amp.__path__[0]).parent / "tools"))
import generate_list_schema

SCHEMA = json.loads((lists_dir() / "schema.json").read_text())
VALIDATOR = jsonschema.Draft7Validator(SCHEMA)
PRESETS = jsonschema.Draft7Validator(json.loads((lists_dir() / "presets.schema.json").read_text()))
OPS = jsonschema.Draft7Validator(schema.make_list_schema([]))


@pytest.mark.parametrize("validator", [VALIDATOR, PRESETS, OPS], ids=["lists", "presets", "ops"])
def test_a_schema_is_one(validator):
    validator.check_schema(validator.schema)
    assert validator.schema["$id"].startswith("urn:amp-patch:")


@pytest.mark.parametrize("name", generate_list_schema.FILES)
def test_a_file_is_what_is_generated(name):
    assert (lists_dir() / name).read_text() == generate_list_schema.render(name)


@pytest.mark.parametrize("path", sorted(lists_dir().glob("*.yaml")), ids=lambda path: path.stem)
def test_a_shipped_file_names_its_schema(path):
    name = path.read_text().partition("\n")[0].removeprefix("# yaml-language-server: $schema=")
    validator = {"schema.json": VALIDATOR, "presets.schema.json": PRESETS}[name]
    validator.validate(yaml.safe_load(path.read_text()))


def test_it_knows_the_reader_s_keys():
    assert set(SCHEMA["properties"]) == set(list_file.KEYS)
    entry = SCHEMA["definitions"]["op"]["oneOf"][1]
    assert set(entry["properties"]) == set(list_file.ENTRY_KEYS)
    module = SCHEMA["definitions"]["module"]
    assert set(module["properties"]) == set(module_rules.MODULE_KEYS)
    assert module["properties"]["run"]["enum"] == list(module_rules.RUNS)
    assert SCHEMA["definitions"]["name"]["pattern"] == f"^{list_file.NAME.pattern}$"


@pytest.mark.parametrize("name", shipped_names())
def test_shipped_lists_are_valid_where_ops_are_known(name):
    OPS.validate(yaml.safe_load((lists_dir() / f"{name}.yaml").read_text()))


GOOD = [
    "whitelist: [mm]",
    "whitelist:",
    "extends: float16",
    "extends: [float16, bfloat16]",
    "blacklist: [{op: rms_norm, why: parity, since: '2.6', until: '99', optional: true}]",
    "inplace_blacklist: error",
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
    "inplace_blacklist: maybe",
    "modules: [{run: low}]",
    "modules: [{match: a, type: torch.nn.Linear, run: low}]",
    "modules: [{match: a, run: half}]",
    "modules: [{type: Linear, run: low}]",
    "- mm",
]


@pytest.mark.parametrize("text", GOOD)
def test_both_take(text, tmp_path):
    (tmp_path / "list.yaml").write_text(text)
    load_oplists(tmp_path / "list.yaml")
    VALIDATOR.validate(yaml.safe_load(text))


@pytest.mark.parametrize("text", BAD)
def test_both_refuse(text, tmp_path):
    (tmp_path / "list.yaml").write_text(text)
    with pytest.raises(amp.OpListError):
        load_oplists(tmp_path / "list.yaml")
    assert not VALIDATOR.is_valid(yaml.safe_load(text))
