"""The JSON Schema that editors use agrees with the reader of list files."""

import importlib
import json
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

import amp_patch as amp
from amp_patch.config import list_file, module_rules, schema
from amp_patch.config.op_lists import load_oplists
from amp_patch.config.op_names import find_spellings
from amp_patch.config.presets import Presets
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
    "extends: flaot16",
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


# ---- with the ops of the installed torch -----------------------------------------------------------------------------

KNOWN = [
    *GOOD,
    "whitelist: [F.gelu, nn.functional.relu, Tensor.mm, torch.fft.rfft, __add__, torch._VF.lstm]",
    "blacklist: [{op: later, since: '99'}, {op: gone, until: '1.0'}, {op: perhaps, optional: true}, exp_]",
    "blacklist: [lib_not_imported.ops.f, torch._softmax]",
    "modules: [{type: lib_not_imported.Block, run: low}, {type: torch.nn.modules.linear.Linear, run: low}]",
]
UNKNOWN = [
    *BAD,
    "whitelist: [sofmax]",
    "whitelist: [conv]",
    "blacklist: [{op: sofmax, why: range}]",
    "blacklist: [F.sofmax]",
    "blacklist: [torch.fft.softmax]",
    "blacklist: [Tensor.item, to]",
    "blacklist: [nn.Linear]",
    "modules: [{type: torch.nn.Liner, run: low}]",
]


@pytest.mark.parametrize("text", KNOWN)
def test_both_take_ops_that_there_are(text, tmp_path):
    (tmp_path / "list.yaml").write_text(text)
    load_oplists(tmp_path / "list.yaml")
    OPS.validate(yaml.safe_load(text))


@pytest.mark.parametrize("text", UNKNOWN)
def test_both_refuse_ops_that_there_are_not(text, tmp_path):
    (tmp_path / "list.yaml").write_text(text)
    with pytest.raises(amp.OpListError):
        load_oplists(tmp_path / "list.yaml")
    assert not OPS.is_valid(yaml.safe_load(text))


def test_every_op_it_names_is_one_to_the_reader_and_every_listed_one_is_named():
    names = OPS.schema["definitions"]["known"]["anyOf"][0]["enum"]
    assert len(names) == len(set(names)) > 2000
    for name in names:
        assert find_spellings(name, may_be_missing=False), name
    listed = {
        f"{one.owner_name}.{one.name}" for list_name in shipped_names() for one in load_oplists(list_name).spellings
    }
    assert {name for name in listed if name.startswith("torch.") and "._" not in name} <= set(names)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package with a module of ops."""
    (tmp_path / "lib_for_schema").mkdir()
    (tmp_path / "lib_for_schema" / "__init__.py").write_text("from . import ops\n")
    source = "import math, torch\nWIDTH = 3\n\ndef nms(x): ...\n\ndef _private(x): ...\n\n"
    source += "class Attention(torch.nn.Module):\n    def forward(self, x): ...\n"
    (tmp_path / "lib_for_schema" / "ops.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("lib_for_schema")
    yield "lib_for_schema"
    for name in [name for name in sys.modules if name.startswith("lib_for_schema")]:
        del sys.modules[name]


def test_the_ops_of_an_imported_package_are_known(package):
    validator = jsonschema.Draft7Validator(schema.make_list_schema([package]))
    names = validator.schema["definitions"]["known"]["anyOf"][0]["enum"]
    own = [name for name in names if name.startswith(package)]
    assert own == ["lib_for_schema.ops.nms", "lib_for_schema.ops.Attention.forward"]
    assert validator.is_valid({"whitelist": [*own, "lib_for_schema.ops._private"]})
    assert not validator.is_valid({"whitelist": ["lib_for_schema.ops.nmss"]})


def test_a_package_that_serves_names_when_asked_may_have_any(package, monkeypatch):
    monkeypatch.setattr(sys.modules["lib_for_schema.ops"], "__getattr__", lambda name: None, raising=False)
    validator = jsonschema.Draft7Validator(schema.make_list_schema([package]))
    assert validator.is_valid({"whitelist": ["lib_for_schema.ops.nmss"]})
    assert not validator.is_valid({"whitelist": ["torch.nmss"]})


# ---- presets ---------------------------------------------------------------------------------------------------------

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


@pytest.mark.parametrize("level", GOOD_LEVELS)
def test_both_take_a_level(level, tmp_path):
    (tmp_path / "presets.yaml").write_text(f"Mine: {level}")
    Presets(tmp_path / "presets.yaml").properties("Mine")
    PRESETS.validate(yaml.safe_load(f"Mine: {level}"))


@pytest.mark.parametrize("level", BAD_LEVELS)
def test_both_refuse_a_level(level, tmp_path):
    (tmp_path / "presets.yaml").write_text(f"Mine: {level}")
    with pytest.raises(amp.PolicyError):
        Presets(tmp_path / "presets.yaml").properties("Mine")
    assert not PRESETS.is_valid(yaml.safe_load(f"Mine: {level}"))
