"""`QuietRecord`: a quiet loss, in which 16 bits make values wrong, and all values stay finite."""

from dataclasses import dataclass
from typing import ClassVar

from .fault_record import Word
from .json_values import absent

WEIGHTS, WEIGHT_DECAY, GRADIENTS = "weights", "weight decay", "gradients"
"""Values of `QuietRecord.role`. For a state of an optimizer, the role is the name of the state."""


class QuietCause(Word):
    """The kind of a quiet loss. `quiet_text` describes each kind, and has its remedy."""

    LOST_UPDATE = "lost update"  # changes are so small that rounding loses them, or a large part of them
    COLLAPSED = "collapsed"  # positions or times have too few digits for what is computed from them
    CANCELLED = "cancelled"  # the rounding of its operands makes a difference inexact
    ZERO_GRADIENTS = "zero gradients"  # gradients are zero in float16, and not in float32
    STALE_COPY = "stale copy"  # a weight has changed, and ops use a 16-bit copy from before


@dataclass(frozen=True, slots=True)
class QuietRecord:
    """A quiet loss of 16 bits, over all steps in which it was seen. Texts that do not apply are None, and "" in files.

    Attributes:
        cause: "lost update", "collapsed", "cancelled", "zero gradients" or "stale copy".
        step: the number of the first step in which it was seen, from 0.
        steps: the number of steps in which it was seen.
        looked: the number of steps in which it was looked for.
        tensor: the name of the tensor that loses most, such as "fc.weight" or "exp_avg_sq of fc.weight"; None if it has
            no name.
        tensors: the number of tensors that lose values.
        of: the number of tensors that were examined, including these.
        module: the name of the module in which the op ran.
        op: the op that loses; in a step of an optimizer, the class of the optimizer.
        site: the line of the script that ran the op.
        role: the part of an optimizer's step that loses: "weights", "weight decay", or the name of a state. For sums of
            gradients in a backward pass, "gradients". None for other losses.
        dtype: the short name of the 16-bit dtype.
        kept: the share of elements whose change is not lost. For collapsed values, the share that stays distinct. For
            zero gradients, the share that is not zero.
        descent: the part of the true change that is stored, `<stored, true> / |true|^2`: 1 for all of it, 0 for none.
        error: the error of a change or a result, relative to float32. For integers, it is the share that differs. It
            may be an estimate.
        used: the line that uses the values, if that is another line than `site`.
        regions: choosers of modules that keep the values if they run in float32, such as `match: "time"`.
        is_temporary: whether the tensor that loses an update is made anew in each step.
        rank: the rank of the process.
    """

    kind: ClassVar[str] = "quiet"

    cause: QuietCause
    step: int
    steps: int
    looked: int
    tensor: str | None = absent("")
    tensors: int = 1
    of: int = 1
    module: str | None = absent("")
    op: str | None = absent("")
    role: str | None = absent("")
    site: str | None = absent("")
    dtype: str | None = absent("")
    kept: float | None = None
    descent: float | None = None
    error: float | None = None
    used: str | None = absent("")
    regions: tuple[str, ...] = ()
    is_temporary: bool = False
    rank: int = 0
