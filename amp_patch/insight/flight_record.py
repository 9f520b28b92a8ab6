"""`FlightRecord`: the magnitudes of one module over the sampled steps of a training."""

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

NEAR = 65504.0 / 8
"""The magnitude from which a value counts as near the end of float16: an eighth of its largest number."""


class FlightKind(StrEnum):
    """What was sampled."""

    OUTPUT = "output"
    GRADIENT = "gradient"
    VALUE = "value"
    SCALE = "scale"


@dataclass(frozen=True, slots=True)
class FlightRecord:
    """The samples of one module, oldest first. Steps in which it did not run have no sample.

    Attributes:
        subject: OUTPUT: all floating tensors that `forward` returns; GRADIENT: the gradients of the module's own
            parameters, without the loss scale where that is known; VALUE: a tensor that the script shows to
            `FlightRecorder.observe`; SCALE: the loss scale.
        name: the qualified name of the module, "" for the model itself; or the name of the value.
        dtype: the short name of the dtype at the last sample.
        steps: the numbers of the steps, from 0.
        largest: the largest magnitude in each step; inf or NaN if there was one. Of all calls of a module in the step.
        zeros: the share of zeros in at most 512 values that are spread over the tensor, in the last call of the step.
        near: the share of these values beyond `NEAR`.
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
