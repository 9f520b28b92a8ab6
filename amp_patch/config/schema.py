"""The JSON Schemas that editors complete and check list files and presets files by.

Keys, rules, choices and patterns are those of the readers; what each means to a person is told here. Without names of
ops, the schema of lists holds for every torch and takes what has the form of a name.
"""

import re
import sys
import types
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import nn

from ..dtypes import DTYPE_WORDS
from ..errors import OpListError
from .list_file import BOOLEANS, ENTRY_KEYS, INPLACE_CHOICES, KEYS, NAME, VERSION
from .loss_scale import DynamicScale
from .module_rules import MODULE_KEYS, RUNS, TYPE_NAME
from .op_names import SHORT, find_spellings
from .op_namespaces import get_op_names
from .policy import COMPUTE, Policy
from .rules import RULES, Rule
from .shipped import shipped_names

REASONS = ("range", "kernel", "speed", "dtype-match", "parity")
"""Words for `why` that the shipped lists use; others are as good."""

OPS = {
    Rule.WHITELIST: "Ops that run in the low dtype.",
    Rule.BLACKLIST: "Ops that run in float32.",
    Rule.PROMOTE: "Ops that run in the widest dtype among their arguments.",
    Rule.SEQUENCE_PROMOTE: "The same for ops whose first argument is a sequence of tensors.",
    Rule.BANNED: "Ops that raise an error on 16-bit tensors.",
    Rule.NEUTRAL: "Ops that come off the list an earlier file put them on.",
}
LEVEL = {
    "description": "One line, logged by initialize.",
    "cast_model_type": "The dtype of the model's parameters, buffers and inputs; null leaves the model alone.",
    "patch_torch_functions": "true: torch functions cast their arguments by the op lists.",
    "patch_torch_functions_type": "The 16-bit dtype of those casts.",
    "keep_batchnorm_fp32": "true: BatchNorm layers keep float32 parameters and statistics.",
    "master_weights": "true: the optimizer steps on float32 copies of the 16-bit parameters.",
    "loss_scale": "A number; dynamic; or how a dynamic scale moves.",
    "compute": "How products of 16-bit values are computed; auto: native where the device has instructions for them.",
    "lists": "Op lists for the casts; null picks the list named after the dtype.",
    "extends": "The level whose properties are taken over first.",
}
"""The properties of a level, for a person."""

_DRAFT = "http://json-schema.org/draft-07/schema#"
_PART = "[A-Za-z_][A-Za-z0-9_]*"
_PRIVATE = rf"^({_PART}\.)*_[A-Za-z0-9_]*(\.{_PART})*$"


def make_list_schema(packages: Sequence[str] | None = None) -> dict[str, Any]:
    """Return the schema of a list file.

    Args:
        packages: imported packages whose ops are known by name, beside those of the installed torch; None: no op is.
    """
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
            **_entries(packages),
            "module": {
                **_object(MODULE_KEYS, _module_keys(packages), required=["run"]),
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
        "list": {"anyOf": [{"enum": list(shipped_names())}, {"type": "string", "pattern": r"(\.ya?ml$|[/\\])"}]},
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
        "inplace_blacklist": {
            "enum": list(INPLACE_CHOICES),
            "description": "What the in-place twin of a blacklisted op does to a 16-bit tensor: compute in the tensor's"
            " own dtype (the default), or raise.",
        },
        "modules": {
            "description": "Parts of a model that run in one dtype whatever the ops' lists say. The last rule that"
            " covers a module counts.",
            "type": ["array", "null"],
            "items": _definition("module"),
        },
        **{rule: _definition("ops", OPS[rule]) for rule in RULES},
    }


def _entries(packages: Sequence[str] | None) -> dict[str, Any]:
    """Return the definition of an entry, and where ops are known, of the names it may have.

    An op that torch may lack, or that is for another version, may have any name.
    """
    entry = _object(ENTRY_KEYS, _entry_keys(), required=["op"])
    if packages is None:
        return {"op": {"oneOf": [_definition("name"), entry]}}
    names = [*_torch_names(), *(name for package in packages for name in _find_ops(package))]
    unknown = rf"^(?!({'|'.join(_strict(['torch', *SHORT, *packages]))})\.){_PART}(\.{_PART})+$"
    is_free = {"anyOf": [{"required": [key]} for key in ("since", "until", "optional")]}
    checked = {**entry, "if": {"not": is_free}, "then": {"properties": {"op": _definition("known")}}}
    return {
        "op": {"oneOf": [_definition("known"), checked]},
        "known": _one_of(names, unknown, f"torch {torch.__version__} has no such op"),
    }


def _entry_keys() -> dict[str, Any]:
    return {
        "op": _definition("name"),
        "why": _definition("why"),
        "since": _definition("version", "The first torch version the entry applies to."),
        "until": _definition("version", "The first torch version it no longer applies to."),
        "optional": {
            "type": ["boolean", "string"],
            "enum": [*(word == "true" for word in BOOLEANS), *BOOLEANS],
            "description": "true: torch may lack the op.",
        },
    }


def _module_keys(packages: Sequence[str] | None) -> dict[str, Any]:
    told = "A class with its module, such as torch.nn.LayerNorm; subclasses are meant too."
    kind: dict[str, Any] = _string(f"^{TYPE_NAME.pattern}$", told)
    if packages is not None:
        names = [f"torch.nn.{name}" for name in sorted(vars(nn)) if _is_module_class(getattr(nn, name))]
        unknown = rf"^(?!torch\.nn\.{_PART}$){_PART}(\.{_PART})+$"
        kind = {"description": told, **_one_of(names, unknown, f"torch {torch.__version__} has no such class")}
    return {
        "match": {
            "type": "string",
            "minLength": 1,
            "description": "A qualified name; * stands for one part of it, ** for any number of parts. With re: in"
            " front, a regular expression to search for.",
        },
        "type": kind,
        "run": {"enum": list(RUNS), "description": "The dtype that everything inside runs in."},
        "why": _definition("why"),
    }


def _level_keys() -> dict[str, Any]:
    number = {"type": ["number", "string"]}
    scales = {one.name: {**number, "description": one.metadata["allowed"]} for one in fields(DynamicScale)}
    kinds: dict[str, dict[str, Any]] = {
        "description": {"type": ["string", "null"]},
        "extends": {"type": "string"},
        "lists": _definition("lists"),
        "compute": {"enum": [*COMPUTE, None]},
        "loss_scale": {
            "anyOf": [
                {"enum": ["dynamic", None]},
                {"type": "number", "exclusiveMinimum": 0},
                {"type": "string", "pattern": r"^[0-9.]+([eE][-+]?[0-9]+)?$"},
                _object(tuple(scales), scales),
            ]
        },
        **{name: _definition("dtype") for name in ("cast_model_type", "patch_torch_functions_type")},
        **{name: _definition("boolean") for name in ("patch_torch_functions", "keep_batchnorm_fp32", "master_weights")},
    }
    return {name: {**kinds[name], "description": told} for name, told in LEVEL.items()}


# ---- names -----------------------------------------------------------------------------------------------------------


def _one_of(names: Sequence[str], unknown: str, told: str) -> dict[str, Any]:
    """Return the schema of a known name; what a pattern says cannot be known, and private names, are taken too.

    `errorMessage` is what editors show in the place of thousands of names.
    """
    patterns = [{"type": "string", "pattern": pattern} for pattern in (unknown, _PRIVATE)]
    return {"anyOf": [{"enum": list(names), "errorMessage": told}, *patterns]}


def _torch_names() -> Iterator[str]:
    """Yield the names of torch's ops, and the short forms that the reader knows."""
    yield from get_op_names()
    for short, namespace in SHORT.items():
        for name in get_op_names():
            if name.startswith(f"{namespace}."):
                yield f"{short}{name.removeprefix(namespace)}"


def _modules_of(package: str) -> Iterator[types.ModuleType]:
    for name, module in sorted(sys.modules.items()):
        if f"{name}.".startswith(f"{package}.") and isinstance(module, types.ModuleType):
            yield module


def _strict(packages: Sequence[str]) -> list[str]:
    """Return those packages whose names are all there: no module of theirs serves names when it is asked for them."""
    lazy = {package for package in packages if any("__getattr__" in vars(one) for one in _modules_of(package))}
    return [re.escape(package) for package in packages if package == "torch" or package not in lazy]


def _find_ops(package: str) -> Iterator[str]:
    """Yield the public functions and methods of an imported package that a list may name."""
    for module in _modules_of(package):
        for name, value in vars(module).items():
            is_own = isinstance(value, type) and value.__module__.partition(".")[0] == package.partition(".")[0]
            inner = [f"{name}.{one}" for one, method in vars(value).items() if callable(method)] if is_own else [name]
            yield from (op for one in inner if callable(value) and _is_op(op := f"{module.__name__}.{one}"))


def _is_op(name: str) -> bool:
    if not NAME.fullmatch(name) or re.search(r"(^|\.)_", name):
        return False
    try:
        return bool(find_spellings(name, may_be_missing=False))
    except OpListError:
        return False


def _is_module_class(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module)
