"""What is recorded of runs by which lists are tuned."""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class CheckedStepRecord:
    """A step of an optimizer whose losses and gradients are to be compared with those of another run.

    Attributes:
        step: of this optimizer, from 0.
        optimizer: its number, in the order in which they step first.
        losses: those scaled since the step before, unscaled: float32 means of their elements.
        skipped: whether the step was skipped for an overflow.
        loss_scale: of the first scaler, at the step.
        is_dynamic: whether it follows the gradients.
    """

    kind: ClassVar[str] = "checked"

    step: int
    optimizer: int
    losses: tuple[float, ...]
    skipped: bool
    loss_scale: float
    is_dynamic: bool


@dataclass(frozen=True, slots=True)
class SketchRecord:
    """The unscaled gradient of a parameter at a step, small enough to keep.

    Attributes:
        step, optimizer: as in CheckedStepRecord.
        parameter: its qualified name.
        norm, largest: of the gradient, L2 and largest magnitude, float32.
        sketch: at most 4,096 float32 values, little-endian in base64: the gradient itself, or sums of its elements with
            fixed signs. The norm of the difference of two sketches is about that of the gradients.
    """

    kind: ClassVar[str] = "sketch"

    step: int
    optimizer: int
    parameter: str
    norm: float
    largest: float
    sketch: str


@dataclass(frozen=True, slots=True)
class LowOpRecord:
    """What would become of an op in 16 bits, by calls in float32 with rounded arguments and results.

    Attributes:
        module: the pattern that matches the innermost named module it ran in; "**": the model itself; "": outside.
        op: the entry of the op lists that has it run low; the function's name if it is on none.
        is_listed: whether there is such an entry.
        calls: how many there were.
        overflow_in, overflow: largest share of the values that went in, and came out, that overflow.
        underflow: largest share of results that become 0.
        error: largest relative error of a result (L2).
        gradient_error: that of the scaled gradient of a result, rounded.
        gradient: largest magnitude in the unscaled gradient of a result.
        effect: by how much rounding moves the loss, to first order: sum over calls of |sum of gradient times error|.
    """

    kind: ClassVar[str] = "low_op"

    module: str
    op: str
    is_listed: bool
    calls: int
    overflow_in: float
    overflow: float
    underflow: float
    error: float
    gradient_error: float
    gradient: float
    effect: float


@dataclass(frozen=True, slots=True)
class ModulesRecord:
    """Qualified names of all modules below the models, and of those among them whose forward ran."""

    kind: ClassVar[str] = "modules"

    names: tuple[str, ...]
    ran: tuple[str, ...]
