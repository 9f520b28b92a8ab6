"""Write lists/schema.json and lists/presets.schema.json, by which editors complete and check lists and presets.

    python tools/generate_list_schema.py

Keys, rules, choices and patterns are those of the readers; what each means to a person is told here. Names of ops are
no part of it: the schema holds for every torch and takes what has the form of a name. `amp-patch lists check` knows
the ops of the torch that is installed.
"""

import json
from dataclasses import fields
from typing import Any

from amp_patch.config.list_file import ARGUMENT, BOOLEANS, ENTRY_KEYS, KEYS, NAME, VERSION
from amp_patch.config.module_rules import MODULE_KEYS, RUNS, TYPE_NAME
from amp_patch.config.op_rules import RULE_KEYS
from amp_patch.config.policy import COMPUTE, STATE_TYPES, DynamicScale, Policy
from amp_patch.config.shipped import lists_dir, shipped_names
from amp_patch.dtypes import DTYPE_WORDS, parse_dtype

REASONS = ("range", "kernel", "speed", "dtype-match", "parity")
"""Words for `why` that the shipped lists use; others are as good."""

BOOLEAN_PROPERTIES = ("patch_torch_functions", "keep_batchnorm_fp32", "master_weights", "split_masters")

_KEYS_OF_NAMES = tuple(key for key in ENTRY_KEYS if key != "like")
"""The keys of an entry under a rule that takes no argument."""

LEVEL = {
    "description": "One line, logged by initialize.",
    "cast_model_type": "The dtype of the model's parameters, buffers and inputs; null leaves the model alone.",
    "patch_torch_functions": "true: torch functions cast their arguments by the op lists.",
    "patch_torch_functions_type": "The 16-bit dtype of those casts.",
    "keep_batchnorm_fp32": "true: BatchNorm layers keep float32 parameters and statistics.",
    "master_weights": "true: the optimizer steps on float32 copies of the 16-bit parameters.",
    "split_masters": "true: between steps, a master is its bfloat16 parameter and 16 more bits.",
    "optimizer_state_type": "bfloat16: running averages of the optimizer are float32 only within a step.",
    "loss_scale": "A number; dynamic; or how a dynamic scale moves.",
    "compute": "How products of 16-bit values are computed; auto: native where the device has instructions for them.",
    "lists": "Op lists for the casts; null picks the list named after the dtype.",
    "extends": "The level whose properties are taken over first.",
}
"""The properties of a level, for a person."""

_PATH_OR_VERSION = r"(\.ya?ml(@[0-9.]+)?$|[/\\]|@[0-9.]+$)"
"""What names a list and is no shipped name: a path, or a list as it is for a version of torch."""

_DRAFT = "http://json-schema.org/draft-07/schema#"


def make_list_schema() -> dict[str, Any]:
    """Return the schema of a list file."""
    return {
        "$schema": _DRAFT,
        "$id": "urn:amp-patch:list",
        "title": "Op list of amp_patch",
        "description": "Which torch ops run in the low dtype, which in float32, and which modules are an exception.",
        **_object(KEYS, _keys()),
        "definitions": {
            "name": _string(
                f"^{NAME.pattern}$",
                "A bare name (softmax) means every spelling of the op; a dotted name (torch.Tensor.softmax) that one.",
            ),
            "version": {
                **_string(f"^{VERSION.pattern}$", "A torch version; quote it, or 2.10 becomes 2.1."),
                "type": ["string", "number"],
            },
            "why": {
                "description": "The reason, in a word or in a sentence.",
                "anyOf": [{"enum": list(REASONS)}, {"type": "string"}],
            },
            **_lists(),
            "ops": {"type": ["array", "null"], "items": _definition("op")},
            "op": {"oneOf": [_definition("name"), _object(_KEYS_OF_NAMES, _entry_keys(), required=["op"])]},
            "matched_ops": {"type": ["array", "null"], "items": _definition("matched_op")},
            "matched_op": _object(ENTRY_KEYS, _entry_keys(), required=["op", "like"]),
            "module": {
                **_object(MODULE_KEYS, _module_keys(), required=["run"]),
                "oneOf": [{"required": ["match"]}, {"required": ["type"]}],
            },
        },
    }


def make_presets_schema() -> dict[str, Any]:
    """Return the schema of a presets file."""
    return {
        "$schema": _DRAFT,
        "$id": "urn:amp-patch:presets",
        "title": "Presets of amp_patch",
        "description": "Levels by their names, each a mapping of properties.",
        "type": "object",
        "additionalProperties": _definition("level"),
        "definitions": {
            "level": _object((*Policy.get_preset_properties(), "extends"), _level_keys()),
            "boolean": {"enum": [True, False, None, *(word for one in BOOLEANS for word in (one, one.title()))]},
            "dtype": {
                "anyOf": [
                    {"enum": ["float16", "bfloat16", "float32", None]},
                    {"type": "string", "pattern": rf"^(torch\.)?({'|'.join(DTYPE_WORDS)})$"},
                ]
            },
            **_lists(),
        },
    }


# ---- parts -----------------------------------------------------------------------------------------------------------


def _object(keys: tuple[str, ...], known: dict[str, Any], required: list[str] | None = None) -> dict[str, Any]:
    """Return the schema of a mapping that has these keys and no others; each of them must be known here."""
    schema: dict[str, Any] = {"type": "object", "additionalProperties": False}
    if required is not None:
        schema["required"] = required
    return {**schema, "properties": {str(key): known[key] for key in keys}}


def _definition(name: str, description: str | None = None) -> dict[str, Any]:
    reference = {"$ref": f"#/definitions/{name}"}
    return reference if description is None else {**reference, "description": description}


def _string(pattern: str, description: str) -> dict[str, Any]:
    return {"type": "string", "pattern": pattern, "description": description}


def _lists() -> dict[str, Any]:
    """Return the definitions of what names a list, and of one or several of those."""
    several = {"type": "array", "items": _definition("list")}
    return {
        "list": {"anyOf": [{"enum": list(shipped_names())}, {"type": "string", "pattern": _PATH_OR_VERSION}]},
        "lists": {"anyOf": [_definition("list"), several, {"type": "null"}]},
    }


def _keys() -> dict[str, Any]:
    return {
        "description": {"type": "string", "description": "One line that says what the list is for."},
        "extends": _definition(
            "lists",
            "A shipped list, or a path relative to this file, or several of those. They are read first,"
            " so this file wins. null: the file stands alone, also where other lists come before it.",
        ),
        "modules": {
            "description": "Parts of a model that run in one dtype whatever the ops' lists say. The last rule that"
            " covers a module counts.",
            "type": ["array", "null"],
            "items": _definition("module"),
        },
        **{rule: _definition("matched_ops" if rule.takes_argument else "ops", rule.meaning) for rule in RULE_KEYS},
    }


def _entry_keys() -> dict[str, Any]:
    return {
        "op": _definition("name"),
        "like": _string(f"^{ARGUMENT.pattern}$", "The argument of the op whose dtype the other tensors are cast to."),
        "why": _definition("why"),
        "since": _definition("version", "The first torch version the entry applies to."),
        "until": _definition("version", "The first torch version it no longer applies to."),
        "optional": {
            "type": ["boolean", "string"],
            "enum": [*(word == "true" for word in BOOLEANS), *BOOLEANS],
            "description": "true: torch may lack the op.",
        },
    }


def _module_keys() -> dict[str, Any]:
    told = "A class with its module, such as torch.nn.LayerNorm; subclasses are meant too."
    return {
        "match": {
            "type": "string",
            "minLength": 1,
            "description": "A qualified name; * stands for one part of it, ** for any number of parts. With re: in"
            " front, a regular expression to search for.",
        },
        "type": _string(f"^{TYPE_NAME.pattern}$", told),
        "run": {"enum": list(RUNS), "description": "The dtype that everything inside runs in."},
        "why": _definition("why"),
    }


def _level_keys() -> dict[str, Any]:
    number = {"type": ["number", "string"]}
    state_types = "|".join(word for word in DTYPE_WORDS if parse_dtype(word, "") in STATE_TYPES)
    scales = {one.name: {**number, "description": one.metadata["allowed"]} for one in fields(DynamicScale)}
    kinds: dict[str, dict[str, Any]] = {
        "description": {"type": ["string", "null"]},
        "extends": {"type": "string"},
        "lists": _definition("lists"),
        "compute": {"enum": [*COMPUTE, None]},
        "optimizer_state_type": {"type": ["string", "null"], "pattern": rf"^(torch\.)?({state_types})$"},
        "loss_scale": {
            "anyOf": [
                {"enum": ["dynamic", None]},
                {"type": "number", "exclusiveMinimum": 0},
                {"type": "string", "pattern": r"^[0-9.]+([eE][-+]?[0-9]+)?$"},
                _object(tuple(scales), scales),
            ]
        },
        **{name: _definition("dtype") for name in ("cast_model_type", "patch_torch_functions_type")},
        **{name: _definition("boolean") for name in BOOLEAN_PROPERTIES},
    }
    return {name: {**kinds[name], "description": told} for name, told in LEVEL.items()}


FILES = {"schema.json": make_list_schema, "presets.schema.json": make_presets_schema}


def render(name: str) -> str:
    """Return the text of a file."""
    made: dict[str, Any] = FILES[name]()
    comment = "Generated by tools/generate_list_schema.py; do not edit."
    return json.dumps({"$comment": comment, **made}, indent=2) + "\n"


if __name__ == "__main__":
    for name in FILES:
        (lists_dir() / name).write_text(render(name), encoding="utf-8")
