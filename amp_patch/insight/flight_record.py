"""`FlightRecord`: the magnitudes of a module, a value or the loss scale over the sampled steps of a training."""

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

NEAR = 65504.0 / 8
"""The magnitude from which a value counts as near the end of float16: an eighth of float16's largest number."""


class FlightKind(StrEnum):
    """What was sampled."""

    OUTPUT = "output"
    GRADIENT = "gradient"
    VALUE = "value"
    SCALE = "scale"


@dataclass(frozen=True, slots=True)
class FlightRecord:
    """The samples of one module, value or loss scale, oldest first.

    A step in which the module did not run, or the value was not observed, has no sample.

    Attributes:
        subject: OUTPUT: all floating tensors that `forward` returns; GRADIENT: the gradients of the module's own
            parameters, without the loss scale where that is known; VALUE: a tensor that the script shows to
            `FlightRecorder.observe`; SCALE: the loss scale.
        name: the qualified name of the module, "" for the model itself; or the name of the value.
        dtype: the short name of the dtype at the last sample.
        steps: the numbers of the steps, from 0.
        largest: the largest magnitude in each step, over all calls of the module; inf or NaN if there was one.
        zeros: the share of zeros in at most 512 values that are spread over the first tensor of the step, or over each
            gradient of the module.
        near: the share of these values whose magnitude is at least `NEAR`.
        low: the short name of the 16-bit dtype that the sampled steps used; "" without one.
    """

    kind: ClassVar[str] = "flight"

    subject: FlightKind
    name: str
    dtype: str
    steps: tuple[int, ...]
    largest: tuple[float, ...]
    zeros: tuple[float, ...]
    near: tuple[float, ...]
    low: str = ""
