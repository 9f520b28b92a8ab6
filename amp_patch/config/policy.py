"""`Policy`: the properties of a session. It says how their values are read, who may set them, and which values
contradict each other.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

import torch

from ..dtypes import LOW_DTYPES, dtype_name, parse_dtype, round_to_float32
from ..errors import PolicyError, did_you_mean
from ..hardware import explain_imitation, explain_products, get_max_attention_scores, has_low_products
from .levels import Level

ParseValue = Callable[[Any], Any]


# ---- the loss scale: a number, or how a dynamic scale starts, grows and backs off ------------------------------------

INIT_SCALE = 2.0**16
MAX_COUNT = 2**31 - 1
"""The largest number of steps or overflows: both are counted in int32 on the device."""


def _to_number(value: object) -> float:
    """Return a number, or text that is one, as a float; NaN for anything else."""
    if isinstance(value, bool):  # float(True) would be 1.0
        return math.nan
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _is_valid_scale(number: float) -> bool:
    """Return whether a number, rounded to float32, is finite and positive, as a loss scale must be."""
    return 0.0 < round_to_float32(number) < math.inf


def _has_point(value: object) -> bool:
    """Return whether a value is a float, or text with a decimal point. Either is refused as a count, even 2.0."""
    return isinstance(value, float) or (isinstance(value, str) and "." in value)


def _is_count(number: float) -> bool:
    return 1 <= number <= MAX_COUNT and number.is_integer()


def _setting(default: float, is_allowed: Callable[[float], bool], allowed: str) -> Any:
    """Return a field of `DynamicScale`.

    Args:
        is_allowed: whether a number is allowed as the value.
        allowed: the words for these numbers in the error, such as "a finite positive number".
    """
    return field(default=default, metadata={"is_allowed": is_allowed, "allowed": allowed})


@dataclass(frozen=True, slots=True)
class DynamicScale:
    """How a dynamic loss scale moves between `min_loss_scale` and `max_loss_scale` of the policy.

    The settings are those of torch.amp.GradScaler, and Megatron-LM's `hysteresis`.

    Attributes:
        init: the first scale. If it is the default, 2**16, and lies outside of the bounds, the scale starts at the
            nearer bound.
        growth_factor: the scale is multiplied by this after `growth_interval` steps in a row without an overflow.
        backoff_factor: the scale is multiplied by this at an overflow.
        hysteresis: with n, the first n - 1 overflows do not lower the scale, and later ones do. The count of overflows
            starts again after `growth_interval` steps in a row without one.
    """

    init: float = _setting(INIT_SCALE, _is_valid_scale, "a finite positive number")
    growth_factor: float = _setting(2.0, lambda number: 1.0 < number < math.inf, "a finite number greater than 1")
    backoff_factor: float = _setting(0.5, lambda number: 0.0 < number < 1.0, "a number between 0 and 1, both excluded")
    growth_interval: int = _setting(2000, _is_count, f"a whole number from 1 to {MAX_COUNT}")
    hysteresis: int = _setting(1, _is_count, f"a whole number from 1 to {MAX_COUNT}")

    def __str__(self) -> str:
        """Return "dynamic", with the settings that differ from the defaults: "dynamic (init 1024, hysteresis 2)"."""
        changed: list[str] = []
        for setting in fields(self):
            value = getattr(self, setting.name)
            if value != setting.default:
                changed.append(f"{setting.name} {value:.12g}")
        return f"dynamic ({', '.join(changed)})" if changed else "dynamic"

    @classmethod
    def read(cls, given: Mapping[Any, Any]) -> "DynamicScale":
        """Return the settings that a mapping states, such as {"init": 1024} or {"init": "1024"}.

        Missing keys get their defaults. Raises PolicyError for the first key that is unknown, or whose value is not
        allowed.
        """
        known = {setting.name: setting for setting in fields(cls)}
        values: dict[str, Any] = {}
        for name, value in given.items():
            if name not in known:
                raise PolicyError(f"unknown key {name!r} ({', '.join(known)}).{did_you_mean(name, known)}")
            setting, number = known[name], _to_number(value)
            is_count = isinstance(setting.default, int)
            is_allowed = setting.metadata["is_allowed"](number)
            if is_count and _has_point(value):
                is_allowed = False
            if not is_allowed:
                raise PolicyError(f"{name}={value!r} must be {setting.metadata['allowed']}")
            if is_count:
                number = int(number)
            values[name] = number
        return cls(**values)


def parse_loss_scale(value: object) -> float | DynamicScale:
    """Return a static scale as a float, or the settings of a dynamic scale. "dynamic" means all defaults.

    Accepts a finite positive number (also as text), "dynamic", a mapping of settings, and a `DynamicScale`. Raises
    PolicyError for any other value, and for a mapping that `DynamicScale.read` refuses.
    """
    if isinstance(value, DynamicScale):
        return value
    if isinstance(value, Mapping):
        return DynamicScale.read(value)
    if value == "dynamic":
        return DynamicScale()
    number = _to_number(value)
    if not _is_valid_scale(number):
        keys = ", ".join(setting.name for setting in fields(DynamicScale))
        raise PolicyError(
            f"loss_scale={value!r} is neither a finite positive number nor 'dynamic' nor a mapping of"
            f" {keys}.{did_you_mean(value, ('dynamic',))}"
        )
    return number


# ---- properties ------------------------------------------------------------------------------------------------------


def _parse_boolean(value: object) -> bool:
    if isinstance(value, bool):
        return value
    # as in Apex, because scripts pass text from their command line to `initialize`
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
"""The values of the property `compute`, which says how products (matrix products, convolutions, ...) of 16-bit values
are computed.
"""


def _parse_compute(value: object) -> str:
    if value in COMPUTE:
        return str(value)
    raise PolicyError(f"{value!r} is not one of {', '.join(COMPUTE)}.{did_you_mean(value, COMPUTE)}")


STATE_TYPES = (torch.float32, torch.bfloat16)


def _parse_dtype_of(name: str) -> ParseValue:
    """Return the parser of the property `name`, whose values are dtypes. An error of the parser contains the name."""
    return lambda value: parse_dtype(value, name)


def _parse_state_type(value: object) -> torch.dtype:
    dtype = parse_dtype(value, "optimizer_state_type")
    if dtype not in STATE_TYPES:
        reason = ": in float16, the squares of small gradients are 0" if dtype is torch.float16 else ""
        raise PolicyError(f"optimizer_state_type={dtype} is not one of float32, bfloat16{reason}")
    return dtype


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
        parse: converts the value that a user gave, such as the text "true", to the type of the property. It raises
            PolicyError, ValueError or TypeError if it cannot. None for a property that users cannot set.
        in_presets: whether a presets file may state the property.
        is_override: whether the argument of `initialize` with the same name overrides the property.
        is_described: whether `describe` includes the property.
    """
    metadata = {"parse": parse, "in_presets": in_presets, "is_override": is_override, "is_described": is_described}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class Policy:
    """The properties of one session. Calls of `initialize` with equal policies can share a session.

    `lists/presets.yaml` explains the properties that a presets file may state. Each field says how its value is read,
    who may set it, and whether it is printed (see `_property`).
    """

    opt_level: str = _property(None, in_presets=False, is_override=False)
    description: str = _property(str, "", is_override=False, is_described=False)
    cast_model_type: torch.dtype | None = _property(_parse_dtype_of("cast_model_type"), None)
    patch_torch_functions: bool = _property(_parse_boolean, False)
    patch_torch_functions_type: torch.dtype | None = _property(_parse_dtype_of("patch_torch_functions_type"), None)
    keep_batchnorm_fp32: bool | None = _property(_parse_boolean, None)
    master_weights: bool | None = _property(_parse_boolean, None)
    split_masters: bool | None = _property(_parse_boolean, None)
    optimizer_state_type: torch.dtype | None = _property(_parse_state_type, None)
    loss_scale: float | DynamicScale = _property(parse_loss_scale, 1.0)
    compute: str = _property(_parse_compute, "auto")
    lists: tuple[str, ...] = _property(_parse_lists, ())
    cast_model_outputs: torch.dtype | None = _property(_parse_dtype_of("cast_model_outputs"), None, in_presets=False)
    min_loss_scale: float | None = _property(_parse_number, None, in_presets=False, is_described=False)
    max_loss_scale: float = _property(_parse_number, 2.0**24, in_presets=False, is_described=False)
    # Whether a rule for a function of another package also holds for the ops that its body calls. With False, as in
    # Apex, the rule casts the arguments of the function and nothing else.
    casts_inside: bool = _property(None, True, in_presets=False, is_override=False, is_described=False)

    @property
    def low_dtype(self) -> torch.dtype | None:
        """The 16-bit dtype to which ops or the model are cast, or None at a float32 level."""
        if self.patch_torch_functions:
            return self.patch_torch_functions_type
        if self.cast_model_type in LOW_DTYPES:
            return self.cast_model_type
        return None

    @property
    def is_scale_dynamic(self) -> bool:
        """Whether the loss scale grows and backs off, and a step with an overflow is skipped."""
        return isinstance(self.loss_scale, DynamicScale)

    def as_level(self) -> Level:
        """Return the policy as a `Level`, for code that asks for facts such as `needs_loss_scale`."""
        return Level(
            self.opt_level,
            low="" if self.low_dtype is None else dtype_name(self.low_dtype),
            patches_functions=self.patch_torch_functions,
            has_masters=bool(self.master_weights),
            has_dynamic_scale=self.is_scale_dynamic,
            lists=", ".join(self.lists),
        )

    def computes_in_float32(self, device_type: str) -> bool:
        """Return whether products of 16-bit values (matrix products, convolutions, ...) are computed in float32.

        Under `compute="auto"`, they are if this type of device has no instructions for products in the low dtype.
        """
        low = self.low_dtype
        if low is None:
            return False
        if self.compute == "auto":
            return not has_low_products(device_type, low)
        return self.compute == "float32"

    def get_max_attention_scores(self, device_type: str) -> int:
        """Return the number of attention scores (queries times keys) up to which attention is faster in float32.

        Attention with at most that many scores is computed in float32.

        Returns 0 if no attention is faster in float32 on this type of device, at a float32 level, and for any `compute`
        but "auto". Also returns 0 if `computes_in_float32(device_type)`, because all attention runs in float32 then.
        """
        low = self.low_dtype
        if low is None or self.compute != "auto":
            return 0
        return get_max_attention_scores(device_type, low)

    def explain_compute(self, device_type: str) -> list[str]:
        """Return a list with one message for the user, if products are computed in float32 on this type of device, or
        if torch imitates 16-bit products in software there. Otherwise the list is empty.
        """
        low = self.low_dtype
        if low is None:
            return []
        if self.computes_in_float32(device_type):
            return [explain_products(device_type, low)]
        if has_low_products(device_type, low):
            return []
        return [explain_imitation(device_type, low)]

    def describe(self) -> list[tuple[str, str]]:
        """Return the properties that have a value, as text: [("master_weights", "yes"), ...].

        Leaves out properties without `is_described`, `patch_torch_functions_type` without patches, and `compute` at a
        float32 level.
        """
        without_effect = set()  # properties that have a value, which nothing uses at this level
        if not self.patch_torch_functions:
            without_effect.add("patch_torch_functions_type")
        if self.low_dtype is None:
            without_effect.add("compute")
        described = []
        for declared in fields(self):
            value = getattr(self, declared.name)
            if declared.metadata["is_described"] and declared.name not in without_effect and value not in (None, ()):
                described.append((declared.name, _in_words(value)))
        return described

    @classmethod
    def get_overrides(cls) -> dict[str, ParseValue]:
        """Return the properties that arguments of `initialize` override, each with its parser."""
        return {
            declared.name: declared.metadata["parse"] for declared in fields(cls) if declared.metadata["is_override"]
        }

    @classmethod
    def get_preset_properties(cls) -> dict[str, ParseValue]:
        """Return the properties that a presets file may state, each with its parser."""
        return {
            declared.name: declared.metadata["parse"] for declared in fields(cls) if declared.metadata["in_presets"]
        }


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
    """Return a sentence for each contradiction in `policy`, which is `preset` with the overrides `given`."""
    level = preset.opt_level
    problems: list[str] = []
    if preset.patch_torch_functions:
        problems += _find_at_level_that_patches(level, given, policy)
    else:
        problems += _find_at_level_without_patches(level, given, policy)
    problems += _find_in_scale_bounds(policy)
    if policy.split_masters:
        problems += _find_in_split_masters(policy)
    if policy.optimizer_state_type is torch.bfloat16:
        problems += _find_in_state_type(policy)
    return problems


def _find_in_state_type(policy: Policy) -> Iterator[str]:
    if policy.cast_model_type in LOW_DTYPES and not policy.master_weights:
        yield (
            f"optimizer_state_type={policy.optimizer_state_type}: {policy.opt_level} steps on weights in 16 bits, so"
            " the optimizer state is in 16 bits anyway; leave it out"
        )


def _find_in_split_masters(policy: Policy) -> Iterator[str]:
    name = f"split_masters=True: {policy.opt_level}"
    if not policy.master_weights:
        yield f"{name} has no masters to split; use O5, or leave it out"
    elif policy.cast_model_type is torch.float16:
        yield (
            f"{name} has float16 weights, which have 5 exponent bits and so are not the upper half of float32 masters;"
            " use O5, or leave it out"
        )


def _find_at_level_that_patches(level: str, given: Mapping[str, Any], policy: Policy) -> Iterator[str]:
    if policy.cast_model_type not in (None, torch.float32):
        # show what the user wrote, unless a presets file has set the property
        value = given.get("cast_model_type", policy.cast_model_type)
        yield (
            f"cast_model_type={value}: {level} casts the arguments of functions and keeps the"
            " model float32; use O2, O3 or O5"
        )
    for name in ("keep_batchnorm_fp32", "master_weights"):
        if given.get(name) is not None:
            yield f"{name}={given[name]!r}: {level} keeps all weights float32 anyway; leave it out"
    if policy.patch_torch_functions and policy.patch_torch_functions_type not in LOW_DTYPES:
        yield f"patch_torch_functions_type={policy.patch_torch_functions_type}: must be float16 or bfloat16"


def _find_at_level_without_patches(level: str, given: Mapping[str, Any], policy: Policy) -> Iterator[str]:
    if policy.patch_torch_functions:
        yield f"patch_torch_functions=True: {level} patches no functions; use O1 or O4, which do"
    dtype = given.get("patch_torch_functions_type")
    if dtype is not None:
        yield f"patch_torch_functions_type={dtype}: {level} patches no functions; use cast_model_type, or O1 or O4"
    if given.get("lists") is not None and policy.cast_model_type not in LOW_DTYPES:
        yield (
            f"lists={given['lists']!r}: {level} runs everything in float32, so op lists have no effect; use another"
            " level"
        )


def _find_in_scale_bounds(policy: Policy) -> Iterator[str]:
    if policy.min_loss_scale is not None and not 0 <= policy.min_loss_scale <= policy.max_loss_scale:
        yield f"min_loss_scale={policy.min_loss_scale}: must lie between 0 and max_loss_scale={policy.max_loss_scale}"
    if policy.max_loss_scale <= 0:
        yield f"max_loss_scale={policy.max_loss_scale}: must be positive"
    scale = policy.loss_scale
    # the default `init` is no contradiction: the scale then starts at the bound
    if isinstance(scale, DynamicScale) and scale.init != INIT_SCALE:
        lowest = policy.min_loss_scale or 0.0
        if not lowest <= scale.init <= policy.max_loss_scale:
            yield (
                f"loss_scale: init={scale.init:.12g} must lie between min_loss_scale={lowest:g} and"
                f" max_loss_scale={policy.max_loss_scale:.12g}"
            )
