"""Magnitudes of gradients, counted so that the effect of a 16-bit dtype at any loss scale can be computed exactly.

Each power of two from 2**e up to, not with, 2**(e + 1) has four counts: of values that are 2**e, of larger ones, of
those that bfloat16 rounds up to 2**(e + 1) (from 2 - 2**-8 times 2**e on), and of those that float16 does too (from
2 - 2**-11 on). The counts of all powers stand one after another, from the lowest power on.
"""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from ..records import CLASSES, GradientRecord

if TYPE_CHECKING:
    from torch import Tensor

_LOWEST, _HIGHEST = -149, 127  # powers of two that float32 has


class Format(NamedTuple):
    """A 16-bit dtype: up to 2**`zero` it rounds to zero, below 2**`normal` it has fewer bits, and in the power `last`
    it rounds to inf from `infinite` of the four counts on.
    """

    zero: int
    normal: int
    last: int
    infinite: int


FORMATS = {"f16": Format(-25, -14, 15, 3), "bf16": Format(-134, -126, 127, 2)}
"""By the short name of the dtype."""


class Shares(NamedTuple):
    """The parts, from 0 to 1, of values that are neither zero nor inf or NaN which become zero, subnormal, and inf."""

    zero: float
    subnormal: float
    infinite: float


def count(tensors: "Iterable[Tensor]") -> GradientRecord:
    """Count the elements of floating tensors on any device, as float32. Waits for the device."""
    import torch

    total = torch.zeros((_HIGHEST - _LOWEST + 1) * CLASSES, dtype=torch.int64, device="cpu")
    zeros = nonfinite = 0
    with torch.no_grad():
        for tensor in tensors:
            sizes = tensor.detach().float().abs().flatten()
            finite = sizes[sizes.isfinite()]
            nonfinite += sizes.numel() - finite.numel()
            positive = finite[finite > 0]
            zeros += finite.numel() - positive.numel()
            if positive.device.type == "mps":
                positive = positive.cpu()  # MPS has no frexp in torch 2.13
            mantissa, exponent = torch.frexp(positive)  # mantissa from 0.5 up to 1
            kind = (mantissa > 0.5).int() + (mantissa >= 1 - 2**-9).int() + (mantissa >= 1 - 2**-12).int()
            # 2 - 2**-8 and 2 - 2**-11 times 2**e, as mantissas between 0.5 and 1, are 1 - 2**-9 and 1 - 2**-12.
            places = (exponent - 1 - _LOWEST) * CLASSES + kind
            total += torch.bincount(places, minlength=len(total)).cpu()
    powers = [any(total[place : place + CLASSES].tolist()) for place in range(0, len(total), CLASSES)]
    if not any(powers):
        return GradientRecord("", 0, (), zeros, nonfinite)
    first, last = powers.index(True), len(powers) - powers[::-1].index(True)
    counts = tuple(total[first * CLASSES : last * CLASSES].tolist())
    return GradientRecord("", first + _LOWEST, counts, zeros, nonfinite)


def find_shares(counted: GradientRecord, low: str, scale: float = 1.0) -> Shares:
    """Return the parts of scaled values that become zero, subnormal and inf in a dtype of `FORMATS`.

    The scale is rounded to a power of two. The result is exact, except for subnormals that round up to a normal number.
    """
    form, first = FORMATS[low], counted.lowest + round(math.log2(scale))
    zero = subnormal = infinite = 0
    for place, number in enumerate(counted.counts):
        power, kind = first + place // CLASSES, place % CLASSES
        if power < form.zero or (power == form.zero and kind == 0):
            zero += number
        elif power < form.normal:
            subnormal += number
        elif power > form.last or (power == form.last and kind >= form.infinite):
            infinite += number
    total = sum(counted.counts) or 1
    return Shares(zero / total, subnormal / total, infinite / total)
