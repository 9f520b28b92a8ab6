"""`Variants`: how far numbers of equal trainings differ, and the band in which a contract promises them.

A contract compares a run with runs that differ in nothing that counts: the same once more, weights that are off by one
unit in the last place before each step, another number of threads, and both. With d the largest difference of a number
in these runs from the first, its band is

    SAFETY * d + FLOOR.

Differences of tensors are relative (L2), from sketches; differences of norms are relative, too. For numbers of each
step, differences are absolute, and d is the largest one in any step so far, since noise grows along a training.
Importing this does not import torch.
"""

import math
from collections.abc import Sequence

from .contract import StepsRecord, round_number
from .measured import Measured

SAFETY = 4.0
"""Four variants do not show the largest difference that there can be."""

FLOORS = {"f16": 2.0**-11, "bf16": 2.0**-8}
"""By the 16-bit dtype of the run: half a unit in the last place, relative to the value. If every element of a tensor
is rounded the other way, the tensor changes by no more than about this part.
"""

FLOAT32_FLOOR = 1e-5
"""The floor of runs that cast nothing. Another order of addition changes sums of 10,000 float32 elements by less."""

MOST = 0.5
"""A number with a wider band is not promised, since hardly any mistake would leave the band."""

AGREED = 0.1
"""If the first outputs of equal runs differ by more than this part, the script draws other numbers in each run."""

CURVES = ("loss scale", "skipped", "loss", "gradient norm", "update norm")
"""The numbers of each step, causes before effects."""

EXACT = ("loss scale", "skipped")
"""Numbers that rounding does not change."""

TENSORS = ("weights", "output", "gradient")
"""Fields of `ModuleNumbersRecord` that are sketches."""


def norm_of(sketch: Sequence[float]) -> float | None:
    """Return the L2 norm that a sketch estimates; None for an empty one."""
    return math.hypot(*sketch) if sketch else None


def find_relative(base: Sequence[float], values: Sequence[float]) -> float | None:
    """Return the relative difference (L2) of two sketches; None if both are empty.

    inf for sketches of other lengths, for a base of norm zero, and for values that are not finite.
    """
    if not base and not values:
        return None
    if len(base) != len(values):
        return math.inf
    if list(base) == list(values):
        return 0.0
    size = math.hypot(*base)
    distance = math.dist(base, values)
    if not math.isfinite(distance) or not size:
        return math.inf
    return distance / size


def find_difference(base: float | None, value: float | None) -> float | None:
    """Return the relative difference of two norms; None without the first, 0 if both are NaN.

    inf without the second, for a base of zero, and for a norm that is not finite.
    """
    if base is None:
        return None
    if base == value or (value is not None and math.isnan(base) and math.isnan(value)):
        return 0.0
    if value is None or not base or not math.isfinite(base) or not math.isfinite(value):
        return math.inf
    return abs(value - base) / abs(base)


class Variants:
    """Runs of one training that differ in nothing that counts, the base first."""

    def __init__(self, runs: Sequence[Measured]) -> None:
        self._base = runs[0]
        self._variants = runs[1:]
        low = self._base.recording.run.low or self._base.recording.run.script_low
        self._floor = FLOORS.get(low, FLOAT32_FLOOR)

    def find_problem(self) -> str:
        """Return why no number can be promised; "" if numbers can be."""
        if not self._variants:
            return ""
        repeated = self._variants[0]
        for name, module in self._base.modules.items():
            for field in ("weights", "output"):
                off = self._find_off(name, field, repeated)
                if off is not None and off > AGREED:
                    what = "starts with other weights" if field == "weights" else "gets other inputs"
                    return (
                        f"two runs with the same seed differ from the first step on: {name} ({module.type}) {what}."
                        " Seed what draws random numbers, for example torch.Generator, or random in worker processes"
                    )
        return ""

    def _find_off(self, name: str, field: str, run: Measured) -> float | None:
        base, other = self._base.modules[name], run.modules.get(name)
        if field in TENSORS:
            return find_relative(getattr(base, field), getattr(other, field) if other is not None else ())
        return find_difference(getattr(base, field), getattr(other, field) if other is not None else None)

    def find_band(self, name: str, field: str) -> float | None:
        """Return the band of a number of a module, relative to it; None if it is not promised."""
        offs = [self._find_off(name, field, run) for run in self._variants]
        known = [off for off in offs if off is not None]
        if not known:
            return None
        band = SAFETY * max(known) + (FLOAT32_FLOOR if field == "weights" else self._floor)
        return round_number(band, 2) if band <= MOST else None

    def make_curve(self, name: str) -> StepsRecord:
        """Return the numbers of each step with their bands."""
        base = get_curve(self._base, name)
        others = [get_curve(run, name) for run in self._variants]
        finite = [abs(value) for value in base if math.isfinite(value)]
        typical = sorted(finite)[len(finite) // 2] if finite else 0.0
        bands: list[float | None] = []
        worst = 0.0
        for step, value in enumerate(base):
            for other in others:
                off = abs(other[step] - value) if step < len(other) else math.inf
                worst = max(worst, off if math.isfinite(off) else math.inf)
            # a loss near zero is a difference of numbers of the typical size
            size = max(abs(value), typical)
            floor = 0.0 if name in EXACT else self._floor * size
            band = SAFETY * worst + floor
            is_promised = bool(others) and math.isfinite(band) and band <= MOST * size
            bands.append(round_number(band, 2) if is_promised else None)
        return StepsRecord(name, tuple(round_number(value) or 0.0 for value in base), tuple(bands))


def get_curve(run: Measured, name: str) -> Sequence[float]:
    """Return a number of each step of a run. `name` is one of `CURVES`."""
    if name == "gradient norm":
        return run.norms.gradients
    if name == "update norm":
        return run.norms.updates
    if run.curve is None:
        return ()
    if name == "skipped":
        return [float(step in run.curve.skipped) for step in range(len(run.curve.losses))]
    return run.curve.losses if name == "loss" else run.curve.scales
