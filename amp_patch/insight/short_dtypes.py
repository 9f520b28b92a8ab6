"""Dtypes by the short names that records have: their names in torch, and what those of 16 bits hold."""

_LONG = {"f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64"}

LARGEST = {"f16": 65504.0, "bf16": 3.3895313892515355e38}
"""The largest finite number."""

TINY = {"f16": 2.0**-25, "bf16": 2.0**-134}
"""Up to this a number rounds to zero."""

EPS = {"f16": 2.0**-10, "bf16": 2.0**-7}
"""The distance from 1 to the next number, as `torch.finfo` has it."""


def spell_out(dtype: str) -> str:
    """Return `float16` for "f16"; a dtype that is not floating as it is."""
    return _LONG.get(dtype, dtype)
