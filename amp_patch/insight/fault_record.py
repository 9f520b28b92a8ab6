"""`FaultRecord`: a value that does not fit into its dtype, with its cause, its effect and its fix.

A fault consists of parts: `Origin`, `Evidence`, `Effect` and `Fix`. A recording stores the fields of all parts side by
side. If a field is declared with `absent(value)`, its None is stored as `value`.
"""

import math
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, ClassVar

from . import display
from .json_values import absent, flatten, is_stored

CASTS = ("_to_copy", "copy_")
"""The names of torch's ops that cast, or copy."""


class Word(StrEnum):
    """Base class of the vocabularies. A member compares, prints and is written to JSON as its string."""

    __repr__ = str.__repr__


class Phase(Word):
    """The part of a step in which an op ran."""

    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTE = "recompute"  # of a checkpoint
    STEP = "step"  # of an optimizer


class Value(Word):
    """The kind of values that do not fit."""

    INF = "inf"
    NAN = "nan"
    INF_OR_NAN = "inf or NaN"
    ZERO = "zero"  # in 16 bits, but not in float32


class RegionKind(Word):
    """The kind of a region: code in which not all ops are cast as the op lists say."""

    LOW = "low"  # whitelisted and blacklisted ops run in 16 bits
    FLOAT32 = "float32"  # whitelisted and blacklisted ops run in float32
    OFF = "off"  # no op is cast
    # the backward ops of torch.autograd.grad, called in the forward pass, where torch.autocast casts them
    GRADIENT_IN_FORWARD = "a gradient that the forward pass takes"


class Cause(Word):
    """Why a value does not fit. The module `causes` finds the cause of a fault, and has the text and remedy of each."""

    CAME_IN = "came in"
    DIVERGENCE = "divergence"
    STEP = "step"
    PRECISION = "precision"
    MATHEMATICS = "mathematics"


class Reach(Word):
    """How far a fault spread in its step."""

    SWALLOWED = "swallowed"  # in neither loss nor gradients, as far as was seen
    LOSS = "loss"
    GRADIENTS = "gradients"
    WEIGHTS = "weights"


@dataclass(frozen=True, slots=True)
class Origin:
    """The op at which the value was found, its call, and the parameter that holds it.

    `FaultRecord` describes the fields.

    `aten` is None in two cases. If a weight does not fit after the step of an optimizer, `op` is the name of the
    optimizer's class. If a gradient came in (see `came_in`), `op` is None, too.

    Attributes:
        came_in: whether the value was in an input of the op, or in a gradient, and trace saw no op that made it. Not
            stored.
    """

    module: str | None = absent("")
    op: str | None = absent("")
    rule: str | None = absent("")
    entry: str | None = absent("")
    listed: str | None = absent("")
    region: RegionKind | None = absent("")
    site: str | None = absent("")
    aten: str | None = absent("")
    node: str | None = absent("")
    given: tuple[str, ...] = ()
    out: str | None = absent("")
    share: float | None = absent(math.nan)
    parameter: str | None = absent("")
    came_in: bool = field(default=False, compare=False, metadata={"is_stored": False})

    @property
    def is_given_low(self) -> bool:
        """Whether an input has a 16-bit dtype."""
        return not {"f16", "bf16"}.isdisjoint(self.given)


@dataclass(frozen=True, slots=True)
class Evidence:
    """The numbers that show the cause."""

    largest: float | None = absent(math.nan)
    in_float32: float | None = absent(math.inf)
    loss_scale: float = 1.0
    trail: tuple[tuple[str, float], ...] = ()
    is_of_rounding: bool = False
    is_untested: bool = False
    lost: float | None = absent(0.0)
    eps: float | None = None
    lr: float | None = None

    @property
    def fits_in_float32(self) -> bool:
        """Whether float32 is known to hold the result."""
        return self.in_float32 is not None and math.isfinite(self.in_float32)


@dataclass(frozen=True, slots=True)
class Effect:
    """The consequences of a fault in its step."""

    reach: Reach | None = absent("")
    gradients: tuple[str, ...] = ()
    of: int = 0
    skipped: bool | None = None
    is_search: bool = False


@dataclass(frozen=True, slots=True)
class Fix:
    """The changes that make the values of the step fit."""

    regions: tuple[str, ...] = ()
    ops: tuple[str, ...] = ()
    alternative: tuple[str, ...] = ()
    sites: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    beyond: str | None = absent("")
    scale: float | None = None
    is_scale_enough: bool = False
    summed: float | None = absent(0.0)


@dataclass(frozen=True, slots=True)
class FaultRecord:
    """A value that does not fit into its dtype, with the op at which it was found, its cause, its effect and its fix.

    The fields are grouped into parts. Each stored field of a part is also an attribute of the record itself, with the
    value that a recording stores: `fault.site` is `fault.origin.site`, or "" if that is None.

    Attributes:
        step: the number of the step, from 0. With several optimizers, the steps of the one that steps first are
            counted.
        phase: "forward", "backward", "recompute" (of a checkpoint) or "step" (of an optimizer).
        value: "inf", "nan", "inf or NaN", or "zero" for values that are zero in 16 bits but not in float32.
        cause: one of these:
            "precision": float32 holds the result, or makes the gradients fit.
            "mathematics": float32 does not hold the result, or it is not known whether it does.
            "came in": an input of the op, or a gradient, did not fit, and no op that trace saw produced it.
            "step": a weight does not fit after a step of an optimizer.
            "divergence": the loss or the weights have grown without bound, or a result is too large for bfloat16.
        rank: the rank of the process.
        origin: the op and its call:
            `module`, `op`, `rule`, `entry`, `region`, `site`: as in `OpRecord`. For an op of the backward pass, they
            describe the call in the forward pass. For the cause "step", `op` is the name of the optimizer's class.
            `region` may also be "a gradient that the forward pass takes".
            `listed`: the name of the op in the lists; "" for an op on no list.
            `aten`, `node`: the op that torch ran, and its node of the backward pass; "" if unknown.
            `given`, `out`: short names of the dtypes of the inputs and of the output, such as "f16".
            `share`: the share of values in the output, or in the weight, that do not fit, from 0 to 1; NaN if unknown.
            For "zero": of the values that are not zero in float32, the share that is zero in 16 bits.
            `parameter`: the name of the parameter or buffer that holds the value, or whose gradient does; "" if the
            value is in another tensor.
        evidence: numbers that show the cause:
            `largest`: the largest finite magnitude among the inputs; 0 without inputs, NaN if unknown.
            `in_float32`: the largest magnitude of the result in float32, or of the float32 master of a weight; inf if
            float32 does not hold it, or if it was not computed; NaN if a part of it is NaN there, too.
            `loss_scale`: the loss scale of the step; 1 for a value of the backward pass that does not carry it, and for
            a value that an optimizer's step produced.
            `trail`: ops before this op, latest first, with the largest magnitude in the result of each.
            `is_of_rounding`: whether the value fits if certain earlier ops run in float32. They need not be in `trail`.
            `is_untested`: whether it is not known if float32 holds the result, because torch cannot run the op in
            float32.
            `lost`: a number in the script that became zero in 16 bits, such as an eps, and so caused the value; 0 for
            none.
            `eps`, `lr`: the settings of the optimizer whose step produced the value; None for another value.
        effect: the consequences in the step:
            `reach`: "swallowed" (neither loss nor gradients have the value, as far as was seen), "loss", "gradients",
            or "weights" (an optimizer's step made the value); "" if it is not known, or if the value reached only
            gradients that no optimizer has used yet.
            `gradients`: names of the parameters whose gradients are not finite; `of`: the number of parameters with a
            gradient.
            `skipped`: whether the step was skipped; None if it did not end, or if that is not known.
            `is_search`: whether the step was skipped because a dynamic loss scale was, or may have been, too large. The
            scale falls by itself.
        fix: the changes that make the values of the step fit:
            `regions`: the modules to run in float32, as in module rules.
            `ops`: names of the ops to run in float32, as in lists.
            `alternative`: names of ops to run in float32 instead of the modules in `regions`.
            `sites`: lines of the script to edit, because neither a module rule nor a list reaches their ops, or because
            they cast a value to 16 bits.
            `lines`: all lines of the script whose ops must run in float32.
            `beyond`: an op whose result does not fit even in float32, so that the other entries are not enough; "" for
            none.
            `scale`: the loss scale to use, a power of two; None if the scale does not matter. It keeps gradients
            finite. If `value` is "zero", it also keeps them from becoming zero, as far as they stay finite.
            `is_scale_enough`: whether this scale is enough, without regions, ops and sites.
            `summed`: how many times larger the loss is than the mean of its terms, if the loss is a sum and therefore
            needs a small loss scale; else 0.
    """

    kind: ClassVar[str] = "fault"

    step: int
    phase: Phase
    value: Value
    cause: Cause
    rank: int = 0
    origin: Origin = Origin()
    evidence: Evidence = Evidence()
    effect: Effect = Effect()
    fix: Fix = Fix()

    def __getattr__(self, name: str) -> Any:
        """Return a field of a part as a recording stores it.

        Raises AttributeError for a name that no part has, and for fields that are not stored.
        """
        part = _PART_OF.get(name)
        if part is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return flatten(getattr(self, part))[name]

    @property
    def is_in_backward(self) -> bool:
        """Whether the value was found in the backward pass."""
        return self.phase is Phase.BACKWARD

    @property
    def may_come_from_another_rank(self) -> bool:
        """Whether the value came in with a tensor that has no name in the models: perhaps from another process."""
        return self.cause is Cause.CAME_IN and self.origin.parameter is None

    def __str__(self) -> str:
        return display.as_text(self)

    def _repr_html_(self) -> str:
        return display.as_html(self)


_PART_OF = {
    declared.name: part
    for part, kind in (("origin", Origin), ("evidence", Evidence), ("effect", Effect), ("fix", Fix))
    for declared in fields(kind)
    if is_stored(declared)
}
