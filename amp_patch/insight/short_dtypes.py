"""The short names of dtypes in records, such as "bf16", and the limits of the 16-bit dtypes."""

import itertools
from collections.abc import Iterable

_LONG = {"f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64"}

LARGEST = {"f16": 65504.0, "bf16": 3.3895313892515355e38}
"""The largest finite number of a dtype."""

TINY = {"f16": 2.0**-25, "bf16": 2.0**-134}
"""The largest number that a dtype rounds to zero."""

EPS = {"f16": 2.0**-10, "bf16": 2.0**-7}
"""The distance from 1 to the next number, `torch.finfo(dtype).eps`."""


def spell_out(dtype: str) -> str:
    """Return torch's name of a floating dtype: "float16" for "f16". Other names, such as "i64", stay as they are."""
    return _LONG.get(dtype, dtype)


def count_equal(dtypes: Iterable[str]) -> list[str]:
    """Return dtypes with a number for three or more equal ones in a row: ["f16", "f32 x 4"]."""
    parts: list[str] = []
    for dtype, equal in itertools.groupby(dtypes):
        number = len(list(equal))
        parts += [f"{dtype} x {number}"] if number > 2 else [dtype] * number
    return parts
