"""Counts of gradients by magnitude. They show how many gradients a 16-bit dtype loses at each loss scale.

The magnitudes from 2**e up to, but not including, 2**(e + 1) are counted in four classes:

    0: 2**e itself
    1: above 2**e
    2: from (2 - 2**-8) * 2**e on, which bfloat16 rounds up to 2**(e + 1)
    3: from (2 - 2**-11) * 2**e on, which float16 rounds up to 2**(e + 1), too

The list of counts has the four classes of the lowest e, then those of the next e, and so on.
"""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from ..records import CLASSES, GradientRecord

if TYPE_CHECKING:
    from torch import Tensor

_LOWEST, _HIGHEST = -149, 127  # the exponents e of the powers of two that float32 has


class Format(NamedTuple):
    """The range of a 16-bit dtype.

    Attributes:
        zero: values up to 2**zero round to zero.
        normal: values below 2**normal are subnormal, and keep fewer bits.
        last: the exponent of the largest finite numbers: values from 2**(last + 1) on round to inf.
        infinite: the first class (0 to 3) of the magnitudes from 2**last on whose values round to inf.
    """

    zero: int
    normal: int
    last: int
    infinite: int


FORMATS = {"f16": Format(-25, -14, 15, 3), "bf16": Format(-134, -126, 127, 2)}
"""The formats by the short name of the dtype."""


class Shares(NamedTuple):
    """The shares (0 to 1) of finite values other than zero that become zero, subnormal and inf."""

    zero: float
    subnormal: float
    infinite: float


def count(tensors: "Iterable[Tensor]") -> GradientRecord:
    """Return the counts of the elements of floating tensors on any device, cast to float32. Waits for the device."""
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
            # frexp returns mantissas from 0.5 up to 1, half the factors of 2**e in the docstring of this module, so its
            # exponents are e + 1
            mantissa, exponent = torch.frexp(positive)
            class_of_value = (mantissa > 0.5).int() + (mantissa >= 1 - 2**-9).int() + (mantissa >= 1 - 2**-12).int()
            places = (exponent - 1 - _LOWEST) * CLASSES + class_of_value
            total += torch.bincount(places, minlength=len(total)).cpu()
    # for each e, whether there is any value; leave out the e below the first and above the last
    has_values = [any(total[place : place + CLASSES].tolist()) for place in range(0, len(total), CLASSES)]
    if not any(has_values):
        return GradientRecord("", 0, (), zeros, nonfinite)
    first, last = has_values.index(True), len(has_values) - has_values[::-1].index(True)
    counts = tuple(total[first * CLASSES : last * CLASSES].tolist())
    return GradientRecord("", first + _LOWEST, counts, zeros, nonfinite)


def find_shares(counted: GradientRecord, low: str, scale: float = 1.0) -> Shares:
    """Return the shares of counted values, times a scale, that become zero, subnormal and inf in the dtype `low`.

    The scale is rounded to a power of two. The result is exact for this power, except that values just below the normal
    numbers, which round up to the smallest of these, count as subnormal.
    """
    form = FORMATS[low]
    lowest = counted.lowest + round(math.log2(scale))
    zero = subnormal = infinite = 0
    for place, number in enumerate(counted.counts):
        exponent, class_of_values = lowest + place // CLASSES, place % CLASSES
        if exponent < form.zero or (exponent == form.zero and class_of_values == 0):
            zero += number
        elif exponent < form.normal:
            subnormal += number
        elif exponent > form.last or (exponent == form.last and class_of_values >= form.infinite):
            infinite += number
    total = sum(counted.counts) or 1
    return Shares(zero / total, subnormal / total, infinite / total)
