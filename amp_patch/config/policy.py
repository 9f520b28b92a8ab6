"""The properties of a run: what each is, how its value is read, who may state it, and which contradict each other."""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

import torch

from ..dtypes import LOW_DTYPES, dtype_name, parse_dtype
from ..errors import PolicyError, did_you_mean
from ..hardware import explain_imitation, explain_products, has_low_products
from .loss_scale import INIT_SCALE, DynamicScale, parse_loss_scale

Parser = Callable[[Any], Any]


def _parse_boolean(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if value in ("true", "True", "false", "False"):
        return value in ("true", "True")
    raise PolicyError(
        f"{value!r} is neither true nor false; write one of them.{did_you_mean(value, ('true', 'false'))}"
    )


def _parse_number(value: object) -> float:
    with contextlib.suppress(TypeError, ValueError):
        if not isinstance(value, bool):
            return float(value)  # type: ignore[arg-type]
    raise PolicyError(f"{value!r} is no number")


COMPUTE = ("auto", "native", "float32")


def _parse_compute(value: object) -> str:
    if value in COMPUTE:
        return str(value)
    raise PolicyError(f"{value!r} is none of {', '.join(COMPUTE)}.{did_you_mean(value, COMPUTE)}")


def _parse_dtype_of(name: str) -> Parser:
    return lambda value: parse_dtype(value, name)


def _parse_lists(value: object) -> tuple[str, ...]:
    if isinstance(value, (str, os.PathLike)):
        return (os.fspath(value),)
    if isinstance(value, (list, tuple)) and all(isinstance(item, (str, os.PathLike)) for item in value):
        return tuple(os.fspath(item) for item in value)
    raise PolicyError(f"lists={value!r} is neither a name, a path, nor a sequence of those")


def _property(
    parse: Parser | None,
    default: Any = MISSING,
    *,
    in_presets: bool = True,
    is_override: bool = True,
    is_described: bool = True,
) -> Any:
    """Return a field of `Policy`.

    Args:
        parse: reads a value, and raises PolicyError, ValueError or TypeError.
        in_presets: a presets file may state it.
        is_override: the caller of `initialize` may, by an argument of the same name.
        is_described: `describe` tells it.
    """
    told = {"parse": parse, "in_presets": in_presets, "is_override": is_override, "is_described": is_described}
    return field(default=default, metadata=told)


@dataclass(frozen=True, slots=True)
class Policy:
    """The properties of one run.

    `presets.yaml` says what each means; two runs with equal policies can share a session. Whatever reads, overrides or
    prints a property knows it from here.
    """

    opt_level: str = _property(None, in_presets=False, is_override=False)
    description: str = _property(str, "", is_override=False, is_described=False)
    cast_model_type: torch.dtype | None = _property(_parse_dtype_of("cast_model_type"), None)
    patch_torch_functions: bool = _property(_parse_boolean, False)
    patch_torch_functions_type: torch.dtype | None = _property(_parse_dtype_of("patch_torch_functions_type"), None)
    keep_batchnorm_fp32: bool | None = _property(_parse_boolean, None)
    master_weights: bool | None = _property(_parse_boolean, None)
    loss_scale: float | DynamicScale = _property(parse_loss_scale, 1.0)
    compute: str = _property(_parse_compute, "auto")
    lists: tuple[str, ...] = _property(_parse_lists, ())
    cast_model_outputs: torch.dtype | None = _property(_parse_dtype_of("cast_model_outputs"), None, in_presets=False)
    min_loss_scale: float | None = _property(_parse_number, None, in_presets=False, is_described=False)
    max_loss_scale: float = _property(_parse_number, 2.0**24, in_presets=False, is_described=False)
    casts_inside: bool = _property(None, True, in_presets=False, is_override=False, is_described=False)

    @property
    def low_dtype(self) -> torch.dtype | None:
        """The 16-bit dtype in force, or None at a float32 level."""
        if self.patch_torch_functions:
            return self.patch_torch_functions_type
        return self.cast_model_type if self.cast_model_type in LOW_DTYPES else None

    @property
    def is_scale_dynamic(self) -> bool:
        """Whether the loss scale follows the gradients, and an overflow skips a step."""
        return isinstance(self.loss_scale, DynamicScale)

    def computes_in_float32(self, device_type: str) -> bool:
        """Tell whether products of 16-bit values are computed in float32 on such devices."""
        low = self.low_dtype
        if low is None or self.compute != "auto":
            return low is not None and self.compute == "float32"
        return not has_low_products(device_type, low)

    def explain_compute(self, device_type: str) -> list[str]:
        """Return a sentence if products are not computed by instructions made for them on such devices."""
        low = self.low_dtype
        if low is not None and self.computes_in_float32(device_type):
            return [explain_products(device_type, low)]
        return [] if low is None or has_low_products(device_type, low) else [explain_imitation(device_type, low)]

    def describe(self) -> list[tuple[str, str]]:
        """Return the name and the value in words of each property that has an effect."""
        shown = {one.name: getattr(self, one.name) for one in fields(self) if one.metadata["is_described"]}
        idle = {"patch_torch_functions_type"} if not self.patch_torch_functions else set()
        idle |= {"compute"} if self.low_dtype is None else set()
        return [
            (name, _in_words(value)) for name, value in shown.items() if name not in idle and value not in (None, ())
        ]

    @classmethod
    def get_overrides(cls) -> dict[str, Parser]:
        """Return the properties that an argument of `initialize` overrides, each with what reads its value."""
        return {one.name: one.metadata["parse"] for one in fields(cls) if one.metadata["is_override"]}

    @classmethod
    def get_preset_properties(cls) -> dict[str, Parser]:
        """Return the properties that a presets file may state, each with what reads its value."""
        return {one.name: one.metadata["parse"] for one in fields(cls) if one.metadata["in_presets"]}


def _in_words(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.12g}"
    if isinstance(value, tuple):
        return ", ".join(value)
    return dtype_name(value) if isinstance(value, torch.dtype) else str(value)


# ---- contradictions --------------------------------------------------------------------------------------------------


def find_contradictions(preset: Policy, given: Mapping[str, Any], policy: Policy) -> list[str]:
    """Return what does not go together in a policy that comes of a preset and the overrides `given`."""
    find = _contradict_casts_of_functions if preset.patch_torch_functions else _contradict_casts_of_the_model
    return [*find(preset.opt_level, given, policy), *_contradict_bounds(policy)]


def _contradict_casts_of_functions(level: str, given: Mapping[str, Any], policy: Policy) -> Iterator[str]:
    if policy.cast_model_type not in (None, torch.float32):
        yield (
            f"cast_model_type={given['cast_model_type']}: {level} casts at functions and keeps the model float32;"
            " use O2, O3 or O5"
        )
    for name in ("keep_batchnorm_fp32", "master_weights"):
        if given.get(name) is not None:
            yield f"{name}={given[name]!r}: {level} keeps all weights float32 anyway; leave it out"
    if policy.patch_torch_functions and policy.patch_torch_functions_type not in LOW_DTYPES:
        yield f"patch_torch_functions_type={policy.patch_torch_functions_type}: must be float16 or bfloat16"


def _contradict_casts_of_the_model(level: str, given: Mapping[str, Any], policy: Policy) -> Iterator[str]:
    if policy.patch_torch_functions:
        yield f"patch_torch_functions=True: {level} casts the whole model; use O1 or O4 to cast at functions"
    if (named := given.get("patch_torch_functions_type")) is not None:
        yield f"patch_torch_functions_type={named}: {level} patches nothing; use cast_model_type, or O1 or O4"
    if given.get("lists") is not None and policy.cast_model_type not in LOW_DTYPES:
        yield (
            f"lists={given['lists']!r}: {level} runs everything in float32, so op lists have no effect; use another"
            " level"
        )


def _contradict_bounds(policy: Policy) -> Iterator[str]:
    if policy.min_loss_scale is not None and not 0 <= policy.min_loss_scale <= policy.max_loss_scale:
        yield f"min_loss_scale={policy.min_loss_scale}: must lie between 0 and max_loss_scale={policy.max_loss_scale}"
    if not policy.max_loss_scale > 0:
        yield f"max_loss_scale={policy.max_loss_scale}: must be positive"
    scale = policy.loss_scale
    if isinstance(scale, DynamicScale) and scale.init != INIT_SCALE:  # which gives way to a bound
        lowest = policy.min_loss_scale or 0.0
        if not lowest <= scale.init <= policy.max_loss_scale:
            yield (
                f"loss_scale: init={scale.init:.12g} must lie between min_loss_scale={lowest:g} and"
                f" max_loss_scale={policy.max_loss_scale:.12g}"
            )
