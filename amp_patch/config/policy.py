"""`Policy`: the properties of a run, how their values are read, who may state them, and which contradict each other."""

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

import torch

from ..dtypes import LOW_DTYPES, dtype_name, parse_dtype, round_to_float32
from ..errors import PolicyError, did_you_mean
from ..hardware import explain_imitation, explain_products, get_longest_attention, has_low_products
from .levels import Level

ParseValue = Callable[[Any], Any]


# ---- the loss scale: a number, or how a dynamic scale starts, grows and backs off ------------------------------------

INIT_SCALE = 2.0**16
MOST = 2**31 - 1
"""Steps and overflows are counted in int32."""


def _to_number(value: object) -> float:
    """Return a number, or text that is one, as a float; NaN for anything else."""
    if isinstance(value, bool):  # float(True) would be 1.0
        return math.nan
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return math.nan


def is_scale(number: float) -> bool:
    """Return whether a number can be a loss scale: finite and positive, also as float32."""
    return 0.0 < round_to_float32(number) < math.inf


def _is_fraction(value: object) -> bool:
    """Return whether a number is written as a fraction, such as 2.0."""
    return isinstance(value, float) or (isinstance(value, str) and "." in value)


def _is_count(number: float) -> bool:
    return 1 <= number <= MOST and number.is_integer()


def _knob(default: float, is_allowed: Callable[[float], bool], allowed: str) -> Any:
    """Return a field of `DynamicScale`. `allowed` describes the values that pass `is_allowed`."""
    return field(default=default, metadata={"is_allowed": is_allowed, "allowed": allowed})


@dataclass(frozen=True, slots=True)
class DynamicScale:
    """How a dynamic loss scale moves: names and defaults of torch.amp.GradScaler, and Megatron-LM's `hysteresis`.

    Attributes:
        init: the first scale. The default gives way to a bound that excludes it.
        growth_factor: multiplies the scale after `growth_interval` steps in a row without an overflow.
        backoff_factor: multiplies the scale at an overflow, once `hysteresis` overflows have come since the scale last
            grew, or since the start.
    """

    init: float = _knob(INIT_SCALE, is_scale, "a finite positive number")
    growth_factor: float = _knob(2.0, lambda number: 1.0 < number < math.inf, "a finite number greater than 1")
    backoff_factor: float = _knob(0.5, lambda number: 0.0 < number < 1.0, "a number between 0 and 1, and neither")
    growth_interval: int = _knob(2000, _is_count, f"a whole number from 1 to {MOST}")
    hysteresis: int = _knob(1, _is_count, f"a whole number from 1 to {MOST}")

    def __str__(self) -> str:
        """Return `dynamic`, with values that are not the default in brackets."""
        changed: list[str] = []
        for knob in fields(self):
            value = getattr(self, knob.name)
            if value != knob.default:
                changed.append(f"{knob.name} {value:.12g}")
        return f"dynamic ({', '.join(changed)})" if changed else "dynamic"

    @classmethod
    def read(cls, given: Mapping[Any, Any]) -> "DynamicScale":
        """Return the scale that a mapping states, in numbers or text. Missing keys have their defaults.

        Raises PolicyError for the first unknown key or value that is not allowed.
        """
        known = {knob.name: knob for knob in fields(cls)}
        values: dict[str, Any] = {}
        for name, value in given.items():
            if name not in known:
                raise PolicyError(f"unknown key {name!r} ({', '.join(known)}).{did_you_mean(name, known)}")
            knob, number = known[name], _to_number(value)
            is_count = isinstance(knob.default, int)
            if not knob.metadata["is_allowed"](number) or (is_count and _is_fraction(value)):
                raise PolicyError(f"{name}={value!r} must be {knob.metadata['allowed']}")
            if is_count:
                number = int(number)
            values[name] = number
        return cls(**values)


def parse_loss_scale(value: object) -> float | DynamicScale:
    """Return a finite positive float, or a dynamic scale; "dynamic" means all defaults. Raises PolicyError."""
    if isinstance(value, DynamicScale):
        return value
    if isinstance(value, Mapping):
        return DynamicScale.read(value)
    if value == "dynamic":
        return DynamicScale()
    number = _to_number(value)
    if not is_scale(number):
        keys = ", ".join(knob.name for knob in fields(DynamicScale))
        raise PolicyError(
            f"loss_scale={value!r} is neither a finite positive number nor 'dynamic' nor a mapping of"
            f" {keys}.{did_you_mean(value, ('dynamic',))}"
        )
    return number


# ---- properties ------------------------------------------------------------------------------------------------------


def _parse_boolean(value: object) -> bool:
    if isinstance(value, bool):
        return value
    # Apex took the text "True" too, which command lines pass
    if value in ("true", "True", "false", "False"):
        return value in ("true", "True")
    raise PolicyError(
        f"{value!r} is neither true nor false; write one of them.{did_you_mean(value, ('true', 'false'))}"
    )


def _parse_number(value: object) -> float:
    number = _to_number(value)
    if math.isnan(number):
        raise PolicyError(f"{value!r} is not a number")
    return number


COMPUTE = ("auto", "native", "float32")


def _parse_compute(value: object) -> str:
    if value in COMPUTE:
        return str(value)
    raise PolicyError(f"{value!r} is not one of {', '.join(COMPUTE)}.{did_you_mean(value, COMPUTE)}")


def _parse_dtype_of(name: str) -> ParseValue:
    return lambda value: parse_dtype(value, name)


def _parse_lists(value: object) -> tuple[str, ...]:
    if isinstance(value, (str, os.PathLike)):
        return (os.fspath(value),)
    if isinstance(value, (list, tuple)) and all(isinstance(item, (str, os.PathLike)) for item in value):
        return tuple(os.fspath(item) for item in value)
    raise PolicyError(f"lists={value!r} is neither a name, a path, nor a sequence of those")


def _property(
    parse: ParseValue | None,
    default: Any = MISSING,
    *,
    in_presets: bool = True,
    is_override: bool = True,
    is_described: bool = True,
) -> Any:
    """Return a field of `Policy`.

    Args:
        parse: reads a value, and raises PolicyError, ValueError or TypeError.
        in_presets: whether a presets file may state the property.
        is_override: whether an argument of `initialize` with the same name overrides it.
        is_described: whether `describe` includes it.
    """
    metadata = {"parse": parse, "in_presets": in_presets, "is_override": is_override, "is_described": is_described}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class Policy:
    """The properties of one run. `presets.yaml` describes them. Runs with equal policies can share a session.

    Code that reads, overrides or prints properties takes them from the fields of this class.
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
        if self.cast_model_type in LOW_DTYPES:
            return self.cast_model_type
        return None

    @property
    def is_scale_dynamic(self) -> bool:
        """Whether the loss scale follows the gradients, and an overflow skips a step."""
        return isinstance(self.loss_scale, DynamicScale)

    def as_level(self) -> Level:
        """Return the facts of a level with these properties."""
        return Level(
            self.opt_level,
            low="" if self.low_dtype is None else dtype_name(self.low_dtype),
            patches_functions=self.patch_torch_functions,
            has_masters=bool(self.master_weights),
            has_dynamic_scale=self.is_scale_dynamic,
            lists=", ".join(self.lists),
        )

    def computes_in_float32(self, device_type: str) -> bool:
        """Return whether products of 16-bit values are computed in float32 on devices of this type."""
        low = self.low_dtype
        if low is None:
            return False
        if self.compute == "auto":
            return not has_low_products(device_type, low)
        return self.compute == "float32"

    def get_longest_attention(self, device_type: str) -> int:
        """Return the largest number of queries times keys at which attention is computed in float32 on devices of this
        type, although other products are not. 0 for none.
        """
        low = self.low_dtype
        if low is None or self.compute != "auto":
            return 0
        return get_longest_attention(device_type, low)

    def explain_compute(self, device_type: str) -> list[str]:
        """Return a sentence if devices of this type have no instructions for the products."""
        low = self.low_dtype
        if low is None:
            return []
        if self.computes_in_float32(device_type):
            return [explain_products(device_type, low)]
        if has_low_products(device_type, low):
            return []
        return [explain_imitation(device_type, low)]

    def describe(self) -> list[tuple[str, str]]:
        """Return name and value, as text, of each property that has an effect."""
        idle = set()
        if not self.patch_torch_functions:
            idle.add("patch_torch_functions_type")
        if self.low_dtype is None:
            idle.add("compute")
        described = []
        for known in fields(self):
            value = getattr(self, known.name)
            if known.metadata["is_described"] and known.name not in idle and value not in (None, ()):
                described.append((known.name, _in_words(value)))
        return described

    @classmethod
    def get_overrides(cls) -> dict[str, ParseValue]:
        """Return the properties that arguments of `initialize` override, each with its parser."""
        return {known.name: known.metadata["parse"] for known in fields(cls) if known.metadata["is_override"]}

    @classmethod
    def get_preset_properties(cls) -> dict[str, ParseValue]:
        """Return the properties that a presets file may state, each with its parser."""
        return {known.name: known.metadata["parse"] for known in fields(cls) if known.metadata["in_presets"]}


def _in_words(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.12g}"
    if isinstance(value, tuple):
        return ", ".join(value)
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    return str(value)


# ---- contradictions --------------------------------------------------------------------------------------------------


def find_contradictions(preset: Policy, given: Mapping[str, Any], policy: Policy) -> list[str]:
    """Return the contradictions in a policy that was made from a preset and the overrides `given`."""
    find = _contradict_casts_of_the_model
    if preset.patch_torch_functions:
        find = _contradict_casts_of_functions
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
    # `not >` also refuses NaN
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
