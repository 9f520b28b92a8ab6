"""`Variants`: by how much the numbers of equal trainings differ, and the bands in which a contract promises numbers.

When a contract is written, the training runs several times: the *base*, and *variants* that should give the same. These
are the same run once more, a run with weights that are off by one unit in the last place before each step, one with
another number of threads, and one with both. With d the largest difference of a number between a variant and the base,
the band of the number is

    SAFETY * d + floor.

A later run may differ from the base by the band. For the numbers of modules, differences and bands are relative (L2);
tensors are compared by their sketches (see `ModuleNumbersRecord`). For the numbers of each step, such as the loss, they
are absolute, and d is the largest difference in this step or an earlier one, because noise grows along a training.
Importing this module does not import torch.
"""

import math
from collections.abc import Sequence

from .contract import StepsRecord, round_number
from .measured import Measured

SAFETY = 4.0
"""A factor above 1, because four variants may not show the largest difference that is possible."""

FLOORS = {"f16": 2.0**-11, "bf16": 2.0**-8}
"""The floor of a run by its 16-bit dtype: the most by which rounding to this dtype changes a number in its normal
range, relative to the number (half a unit in the last place).
"""

FLOAT32_FLOOR = 1e-5
"""The floor of runs that cast nothing, and of first weights. If 10,000 positive float32 elements are added in another
order, their sum usually changes by a smaller share.
"""

WIDEST = 0.5
"""A number is not promised if its band is more than this share of it: hardly any mistake would leave the band."""

MOST_AT_START = 0.1
"""If two runs with the same seed differ by more than this share in a module's first weights or first output, no number
is promised: the script seems to draw other random numbers in each run.
"""

CURVES = ("loss scale", "skipped", "loss", "gradient norm", "update norm")
"""The names of the numbers of each step. A number comes after those that may be the cause of its change."""

EXACT = ("loss scale", "skipped")
"""The names of `CURVES` that have no floor, because rounding seldom changes them."""

TENSORS = ("weights", "output", "gradient")
"""Fields of `ModuleNumbersRecord` that are sketches."""


def norm_of(sketch: Sequence[float]) -> float | None:
    """Return the L2 norm that a sketch estimates; None for an empty one."""
    return math.hypot(*sketch) if sketch else None


def compare_sketches(base: Sequence[float], values: Sequence[float]) -> float | None:
    """Return the relative difference (L2) of two sketches, |values - base| / |base|; None if both are empty.

    0 if both are equal; NaN counts as equal to NaN. Otherwise inf if their lengths differ, if `base` is zero, or if a
    value is not finite.
    """
    if not base and not values:
        return None
    if len(base) != len(values):
        return math.inf
    if all(map(_are_same, base, values)):
        return 0.0
    norm = math.hypot(*base)
    distance = math.dist(base, values)
    if not math.isfinite(distance) or not norm:
        return math.inf
    return distance / norm


def compare_norms(base: float | None, value: float | None) -> float | None:
    """Return the relative difference of two norms, |value - base| / |base|; None if `base` is None.

    0 if both are equal, or both NaN. Otherwise inf if `value` is None, `base` is zero, or one of them is not finite.
    """
    if base is None:
        return None
    if value is not None and _are_same(base, value):
        return 0.0
    if value is None or not base or not math.isfinite(base) or not math.isfinite(value):
        return math.inf
    return abs(value - base) / abs(base)


def _are_same(base: float, value: float) -> bool:
    """Return whether two numbers are equal, or both NaN."""
    return base == value or (math.isnan(base) and math.isnan(value))


class Variants:
    """Runs that should give the same numbers. `runs` has the base first; without variants, no number has a band."""

    def __init__(self, runs: Sequence[Measured]) -> None:
        self._base = runs[0]
        self._variants = runs[1:]
        low = self._base.recording.run.low or self._base.recording.run.script_low
        self._floor = FLOORS.get(low, FLOAT32_FLOOR)

    def find_problem(self) -> str:
        """Return a message if two runs with the same seed start differently, so that no number can be promised.

        Returns "" if they start alike, or if there are no variants.
        """
        if not self._variants:
            return ""
        repeated = self._variants[0]  # the same run once more
        for name, module in self._base.modules.items():
            for field in ("weights", "output"):
                difference = self._compare(name, field, repeated)
                if difference is not None and difference > MOST_AT_START:
                    what = "starts with other weights" if field == "weights" else "gives another output"
                    return (
                        f"two runs with the same seed differ from the first step on: {name} ({module.type}) {what}."
                        " Seed what draws random numbers, for example torch.Generator, or the module random in worker"
                        " processes"
                    )
        return ""

    def _compare(self, name: str, field: str, run: Measured) -> float | None:
        """Return the relative difference of a module's number between a variant and the base.

        `field` is a field of `ModuleNumbersRecord`. None if it is a norm that the base lacks, or a sketch that both
        runs lack.
        """
        base, module = self._base.modules[name], run.modules.get(name)
        if field in TENSORS:
            return compare_sketches(getattr(base, field), () if module is None else getattr(module, field))
        return compare_norms(getattr(base, field), None if module is None else getattr(module, field))

    def find_band(self, name: str, field: str) -> float | None:
        """Return the band of a number of a module, relative to the number; None if the number is not promised."""
        compared = [self._compare(name, field, run) for run in self._variants]
        differences = [difference for difference in compared if difference is not None]
        if not differences:
            return None
        # first weights do not depend on the dtypes of ops
        floor = FLOAT32_FLOOR if field == "weights" else self._floor
        band = SAFETY * max(differences) + floor
        return round_number(band, 2) if band <= WIDEST else None

    def make_curve(self, name: str) -> StepsRecord:
        """Return the value of a number in each step, with its band, which is None if the value is not promised.

        `name` is one of `CURVES`.
        """
        base = get_curve(self._base, name)
        variants = [get_curve(run, name) for run in self._variants]
        magnitudes = sorted(abs(value) for value in base if math.isfinite(value))
        median = magnitudes[len(magnitudes) // 2] if magnitudes else 0.0
        bands: list[float | None] = []
        largest_difference = 0.0  # in this step or an earlier one
        for step, value in enumerate(base):
            for variant in variants:
                difference = _subtract(variant[step], value) if step < len(variant) else math.inf
                largest_difference = max(largest_difference, difference)
            # a number that happens to be near zero is as noisy as the others, so its size counts as at least the median
            size = max(abs(value), median)
            floor = 0.0 if name in EXACT else self._floor * size
            band = SAFETY * largest_difference + floor
            is_promised = bool(variants) and math.isfinite(band) and band <= WIDEST * size
            bands.append(round_number(band, 2) if is_promised else None)
        return StepsRecord(name, tuple(round_number(value) or 0.0 for value in base), tuple(bands))


def _subtract(value: float, base: float) -> float:
    """Return the absolute difference. It is 0 if both are NaN, or the same inf, as in a step that both runs skip.
    Otherwise it is inf if one of them is not finite.
    """
    if _are_same(base, value):
        return 0.0
    difference = abs(value - base)
    return math.inf if math.isnan(difference) else difference


def get_curve(run: Measured, name: str) -> Sequence[float]:
    """Return a number of each step of a run; empty if it was not recorded. `name` is one of `CURVES`."""
    if name == "gradient norm":
        return run.norms.gradients
    if name == "update norm":
        return run.norms.updates
    if run.curve is None:
        return ()
    if name == "skipped":
        return [float(step in run.curve.skipped) for step in range(len(run.curve.losses))]
    return run.curve.losses if name == "loss" else run.curve.scales
