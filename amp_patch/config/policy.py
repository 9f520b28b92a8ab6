"""Presets from YAML plus the caller's overrides -> one frozen `Policy`."""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from ..dtypes import LOW_DTYPES, dtype_name, parse_dtype
from ..errors import AmpError, PolicyError
from .presets import DTYPE_OVERRIDES, PARSERS, PRESETS_VARIABLE, Presets, unknown_level, without_overridden
from .shipped import shipped_presets

_DESCRIBED = (
    "opt_level",
    "cast_model_type",
    "patch_torch_functions",
    "patch_torch_functions_type",
    "keep_batchnorm_fp32",
    "master_weights",
    "loss_scale",
    "lists",
    "cast_model_outputs",
)


@dataclass(frozen=True, slots=True)
class Policy:
    """The properties of one run.

    `presets.yaml` says what each means; two runs with equal policies can share a session.
    """

    opt_level: str
    cast_model_type: torch.dtype | None = None
    patch_torch_functions: bool = False
    patch_torch_functions_type: torch.dtype | None = None
    keep_batchnorm_fp32: bool | None = None
    master_weights: bool | None = None
    loss_scale: float | str = 1.0
    lists: tuple[str, ...] = ()
    cast_model_outputs: torch.dtype | None = None
    min_loss_scale: float | None = None
    max_loss_scale: float = 2.0**24
    description: str = ""
    is_cpu_variant: bool = False  # the level's own dtype gave way to the one its preset names for the CPU

    @property
    def low_dtype(self) -> torch.dtype | None:
        """The 16-bit dtype in force, or None at a float32 level."""
        if self.patch_torch_functions:
            return self.patch_torch_functions_type
        return self.cast_model_type if self.cast_model_type in LOW_DTYPES else None

    def describe(self) -> list[str]:
        """Return one line for each property, `name : value` with the name padded to 22 columns."""
        shown = {name: value for name, value in asdict(self).items() if name in _DESCRIBED}
        return [
            f"{name:22} : {dtype_name(value) if isinstance(value, torch.dtype) else value}"
            for name, value in shown.items()
        ]


# ---- from a level and overrides to a policy --------------------------------------------------------------------------


def make_policy(
    opt_level: object, overrides: Mapping[str, Any], *, device_type: str, presets: str | os.PathLike[str] | None = None
) -> Policy:
    """Return the policy of a level on a device type, with `overrides` (None means: not given) applied.

    Raises PolicyError for an unknown level, an unreadable value, and for overrides that contradict the level; all
    contradictions at once.
    """
    path = Path(presets or os.environ.get(PRESETS_VARIABLE) or shipped_presets())
    table = Presets(path)
    if not isinstance(opt_level, str) or opt_level not in table.names():
        raise unknown_level(opt_level, table.names())
    properties, on_cpu = table.properties(opt_level)
    given = {name: value for name, value in overrides.items() if value is not None}
    if device_type == "cpu":
        on_cpu = without_overridden(on_cpu, {name: value for name, value in given.items() if value is not False})
        is_cpu_variant = any(properties.get(name) != on_cpu[name] for name in DTYPE_OVERRIDES if name in on_cpu)
        properties = {**properties, **on_cpu, "is_cpu_variant": is_cpu_variant}
    preset = Policy(opt_level=opt_level, **{**properties, "lists": properties.get("lists") or ()})
    policy, problems = _override(preset, given)
    problems += _contradictions(preset, given, policy)
    if problems:
        raise PolicyError(
            f"opt_level {opt_level!r} cannot be combined with these arguments:\n"
            + "\n".join(f"  - {problem}" for problem in problems)
        )
    if policy.patch_torch_functions and not policy.lists:
        policy = replace(policy, lists=(dtype_name(policy.patch_torch_functions_type),))
    return policy


def _override(preset: Policy, given: Mapping[str, Any]) -> tuple[Policy, list[str]]:
    known = {field.name for field in fields(Policy)}
    problems: list[str] = []
    values: dict[str, Any] = {}
    for name, value in given.items():
        try:
            if name == "cast_model_type" and value is False:  # Apex's way to say "leave the model alone"
                values[name] = None
            elif name == "cast_model_outputs":
                values[name] = parse_dtype(value, name)
            elif name in ("min_loss_scale", "max_loss_scale"):
                values[name] = float(value)
            elif name in known:
                values[name] = PARSERS[name](value)
        except (AmpError, ValueError, TypeError) as error:
            problems.append(f"{name}={value!r}: {error}")
    return replace(preset, **values), problems


def _contradictions(preset: Policy, given: Mapping[str, Any], policy: Policy) -> list[str]:
    problems: list[str] = []
    level = preset.opt_level
    if preset.patch_torch_functions:
        if policy.cast_model_type not in (None, torch.float32):
            problems.append(
                f"cast_model_type={given['cast_model_type']}: {level} casts at functions and keeps the model float32;"
                " use O2, O3 or O5"
            )
        if given.get("keep_batchnorm_fp32") is not None:
            problems.append(
                f"keep_batchnorm_fp32={given['keep_batchnorm_fp32']!r}: {level} keeps all weights float32 anyway; leave"
                " it out"
            )
        if given.get("master_weights") is not None:
            problems.append(
                f"master_weights={given['master_weights']!r}: {level} keeps all weights float32 anyway; leave it out"
            )
        if policy.patch_torch_functions and policy.patch_torch_functions_type not in LOW_DTYPES:
            problems.append(
                f"patch_torch_functions_type={policy.patch_torch_functions_type}: must be float16 or bfloat16"
            )
    else:
        if policy.patch_torch_functions:
            problems.append(
                f"patch_torch_functions=True: {level} casts the whole model; use O1 or O4 to cast at functions"
            )
        if given.get("patch_torch_functions_type") is not None:
            named = given["patch_torch_functions_type"]
            problems.append(
                f"patch_torch_functions_type={named}: {level} patches nothing; use cast_model_type, or O1 or O4"
            )
        if given.get("lists") is not None and policy.cast_model_type not in LOW_DTYPES:
            problems.append(
                f"lists={given['lists']!r}: {level} runs everything in float32, so op lists have no effect; use another"
                " level"
            )
    if policy.min_loss_scale is not None and not 0 <= policy.min_loss_scale <= policy.max_loss_scale:
        problems.append(
            f"min_loss_scale={policy.min_loss_scale}: must lie between 0 and max_loss_scale={policy.max_loss_scale}"
        )
    if not policy.max_loss_scale > 0:
        problems.append(f"max_loss_scale={policy.max_loss_scale}: must be positive")
    return problems
