"""The property `loss_scale`: a number, or how a dynamic scale starts, grows and backs off."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from ..errors import PolicyError, did_you_mean

INIT_SCALE = 2.0**16
MOST = 2**31 - 1
"""Steps and overflows are counted in int32."""


def _number(value: object) -> float:
    """Return a number, or text that is one, as a float; NaN for anything else."""
    try:
        return math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return math.nan


def is_scale(number: float) -> bool:
    """Tell whether a loss scale can be this number: finite and positive, in float32 too."""
    return 0.0 < torch.tensor(number, dtype=torch.float32).item() < math.inf


def _is_fraction(value: object) -> bool:
    """Tell whether a number is written as a fraction, be it a whole one, as 2.0 is."""
    return isinstance(value, float) or (isinstance(value, str) and "." in value)


def _is_count(number: float) -> bool:
    return 1 <= number <= MOST and number.is_integer()


def _knob(default: float, is_allowed: Callable[[float], bool], allowed: str) -> Any:
    """Return a field of `DynamicScale`: what its values are, and how that is said."""
    return field(default=default, metadata={"is_allowed": is_allowed, "allowed": allowed})


@dataclass(frozen=True, slots=True)
class DynamicScale:
    """How a dynamic loss scale moves: names and defaults of torch.amp.GradScaler, and Megatron-LM's `hysteresis`.

    Attributes:
        init: where it starts. The default gives way to a bound that excludes it.
        growth_factor: what `growth_interval` steps in a row without an overflow multiply it by.
        backoff_factor: what an overflow multiplies it by, once `hysteresis` of them have come since it last grew, or
            since the start.
    """

    init: float = _knob(INIT_SCALE, is_scale, "a finite positive number")
    growth_factor: float = _knob(2.0, lambda number: 1.0 < number < math.inf, "a finite number greater than 1")
    backoff_factor: float = _knob(0.5, lambda number: 0.0 < number < 1.0, "a number between 0 and 1, and neither")
    growth_interval: int = _knob(2000, _is_count, f"a whole number from 1 to {MOST}")
    hysteresis: int = _knob(1, _is_count, f"a whole number from 1 to {MOST}")

    def __str__(self) -> str:
        """Return `dynamic`, and in brackets what is not the default."""
        others = [
            f"{one.name} {getattr(self, one.name):.12g}"
            for one in fields(self)
            if getattr(self, one.name) != one.default
        ]
        return f"dynamic ({', '.join(others)})" if others else "dynamic"

    @classmethod
    def read(cls, given: Mapping[Any, Any]) -> "DynamicScale":
        """Return the scale that a mapping states, by numbers or by text; keys that it leaves out are the defaults.

        Raises PolicyError for the first key or value that cannot be.
        """
        known = {one.name: one for one in fields(cls)}
        values: dict[str, Any] = {}
        for name, value in given.items():
            if name not in known:
                raise PolicyError(f"unknown key {name!r} ({', '.join(known)}).{did_you_mean(name, known)}")
            number, told, is_count = _number(value), known[name].metadata, isinstance(known[name].default, int)
            if not told["is_allowed"](number) or (is_count and _is_fraction(value)):
                raise PolicyError(f"{name}={value!r} must be {told['allowed']}")
            values[name] = int(number) if is_count else number
        return cls(**values)


def parse_loss_scale(value: object) -> float | DynamicScale:
    """Return a finite positive float, or how a dynamic scale moves: "dynamic" means the mapping without keys."""
    if isinstance(value, DynamicScale):
        return value
    if isinstance(value, Mapping):
        return DynamicScale.read(value)
    if value == "dynamic":
        return DynamicScale()
    number = _number(value)
    if not is_scale(number):
        keys = ", ".join(one.name for one in fields(DynamicScale))
        raise PolicyError(
            f"loss_scale={value!r} is neither a finite positive number nor 'dynamic' nor a mapping of"
            f" {keys}.{did_you_mean(value, ('dynamic',))}"
        )
    return number
