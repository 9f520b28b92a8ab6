"""Why a value did not fit into its dtype: a class for each cause, with its condition, its words and its remedy.

To add a cause, name it in `Cause` and put its class into `DIAGNOSES`. If its condition needs a fact that no field of
`FaultRecord` has yet, add the field and let the module `faults` fill it.
"""

import abc
from dataclasses import dataclass, replace
from typing import ClassVar

from ..config import levels
from .fault_record import CASTS, Cause, FaultRecord, Phase, RegionKind, Value
from .records import RunRecord
from .remedies import Remedy, RemedyKind, advise_script, format_scale, make_list_remedy
from .short_dtypes import TINY

_LARGE = 1e15  # hardly any value of a training that works is so large, apart from constants such as masks


@dataclass(frozen=True, slots=True)
class Course:
    """The evidence about a fault from the rest of its step and from the steps before it.

    Attributes:
        has_grown: whether the loss or the largest weight has grown without bound.
        is_mended: whether the gradients that the fault reaches are finite once the faulty ops run in float32.
    """

    has_grown: bool = False
    is_mended: bool = False


class Diagnosis(abc.ABC):
    """A cause of faults."""

    cause: ClassVar[Cause]

    @abc.abstractmethod
    def applies(self, fault: FaultRecord, course: Course) -> bool:
        """Return whether this is the cause of a fault to which no diagnosis before this one in `DIAGNOSES` applies."""

    @abc.abstractmethod
    def describe(self, fault: FaultRecord) -> str:
        """Return the cause in words, for a report."""

    @abc.abstractmethod
    def find_remedy(self, fault: FaultRecord, run: RunRecord | None) -> Remedy:
        """Return the remedy. A list in it extends the last list of the run, or a shipped list if the run has none."""


class _CameIn(Diagnosis):
    """An input of an op, or the gradient of a parameter, was inf or NaN, and no op that the tracer saw had made it."""

    cause = Cause.CAME_IN

    def applies(self, fault: FaultRecord, course: Course) -> bool:
        return fault.origin.came_in

    def describe(self, fault: FaultRecord) -> str:
        origin = fault.origin
        if origin.aten is None:
            unseen = f"the gradient of {origin.parameter} is not finite, and no op that trace saw caused it"
            return f"{unseen} (a kernel that torch does not dispatch, compiled code, or another rank)"
        return f"{origin.parameter or 'an input that no op made'} held {fault.value} before ({_format_share(fault)})"

    def find_remedy(self, fault: FaultRecord, run: RunRecord | None) -> Remedy:
        origin = fault.origin
        if fault.evidence.fits_in_float32:  # the float32 master of the weight is finite
            return make_list_remedy(RemedyKind.LIST, fault, run)
        if origin.parameter and origin.is_given_low:
            return make_list_remedy(RemedyKind.WEIGHTS, fault, run)
        return advise_script(
            "look at the data and the weights, and how they were made: no list and no loss scale helps"
        )


class _Divergence(Diagnosis):
    """Losses or weights have grown without bound. A dtype with a larger range would only delay the overflow."""

    cause = Cause.DIVERGENCE

    def applies(self, fault: FaultRecord, course: Course) -> bool:
        origin, evidence = fault.origin, fault.evidence
        if fault.value is Value.ZERO or fault.is_in_backward:
            return False
        if fault.phase is not Phase.STEP and origin.out == "bf16" and evidence.fits_in_float32:
            # bfloat16 has the range of float32, so a value that is too large for it has grown without bound. But a cast
            # may get a constant, such as the lowest number of float32 for a mask.
            is_huge = evidence.in_float32 is not None and evidence.in_float32 > _LARGE
            if is_huge and origin.aten not in CASTS:
                return True
        if fault.step == 0:  # nothing has grown yet
            return False
        return course.has_grown

    def describe(self, fault: FaultRecord) -> str:
        return f"losses or weights have grown without bound ({_format_share(fault)}{_format_inputs(fault)})"

    def find_remedy(self, fault: FaultRecord, run: RunRecord | None) -> Remedy:
        return advise_script(
            "training has diverged: a smaller learning rate, a warm-up, or clipped gradients; no list helps"
        )


class _Step(Diagnosis):
    """A weight does not fit after an optimizer's step, although weights and gradients were finite before it."""

    cause = Cause.STEP

    def applies(self, fault: FaultRecord, course: Course) -> bool:
        return fault.phase is Phase.STEP and fault.origin.aten is None

    def describe(self, fault: FaultRecord) -> str:
        text = f"{fault.origin.parameter or 'a weight'} became {_format_share(fault)}"
        if fault.evidence.lr is not None:
            text += f", at a learning rate of {fault.evidence.lr:g}"
        return text

    def find_remedy(self, fault: FaultRecord, run: RunRecord | None) -> Remedy:
        eps = fault.evidence.eps
        if fault.origin.out == "f16" and eps is not None and 0 < eps <= TINY["f16"]:
            return Remedy(RemedyKind.STEP, eps=eps, level=levels.find_master_level("float16").name)
        return Remedy(RemedyKind.STEP)


class _Precision(Diagnosis):
    """16 bits are the reason: float32 holds the values, or the gradients fit once the faulty ops run in float32."""

    cause = Cause.PRECISION

    def applies(self, fault: FaultRecord, course: Course) -> bool:
        return fault.value is Value.ZERO or fault.evidence.fits_in_float32 or course.is_mended

    def describe(self, fault: FaultRecord) -> str:
        evidence, share = fault.evidence, _format_share(fault)
        if evidence.lost is not None:
            return f"{share}; {evidence.lost:g} in the script is zero in 16 bits"
        if fault.value is Value.ZERO:
            text = f"{share}; float32 holds them"
        elif evidence.fits_in_float32:
            text = f"{share}; in float32 the largest is {evidence.in_float32:.3g}"
        else:
            text = f"{share}; some are finite in float32, and the rest reach no gradient"
        if fault.is_in_backward and evidence.loss_scale != 1:
            text += f"; loss scale {format_scale(evidence.loss_scale)}"
        return text

    def find_remedy(self, fault: FaultRecord, run: RunRecord | None) -> Remedy:
        origin, fix = fault.origin, fault.fix
        rule, scale = origin.rule or "", fix.scale
        if fault.is_in_backward and fault.value is Value.ZERO:
            return Remedy(RemedyKind.SCALE, scale=scale, is_larger=True, may_need_list=True)
        if origin.region is RegionKind.GRADIENT_IN_FORWARD:
            return advise_script(
                "torch.autocast casts this gradient, whatever a list says:",
                "with torch.autocast(..., enabled=False), on .float() inputs, around the forward pass and the call of"
                " torch.autograd.grad",
            )
        # A mean instead of a sum also leaves room for small gradients, which a smaller loss scale does not.
        if fix.summed:
            return Remedy(RemedyKind.SUM, scale=scale)
        if rule.startswith("run: float32"):
            return advise_script(
                f"the module runs in float32 already, by {origin.entry}: look for a buffer or a cast in it that has 16"
                " bits"
            )
        if fault.is_in_backward and fix.is_scale_enough and not (fix.regions or fix.ops):
            return Remedy(RemedyKind.SCALE, scale=scale, may_need_list=True)
        if fault.is_in_backward and rule.startswith("border"):
            return advise_script(
                "look at the ops before: the module is cast, and no loss scale makes its gradients fit; bfloat16 does",
                may_need_list=True,
            )
        # A list would only move the fault to an op whose result float32 does not hold either.
        if fix.beyond:
            return advise_script(
                f"look at {fix.beyond}, too: float32 does not hold its result either, so no list is enough"
            )
        return make_list_remedy(RemedyKind.LIST, fault, run)


class _Mathematics(Diagnosis):
    """float32 does not hold the result either, or this is not known, because torch cannot run the op in float32."""

    cause = Cause.MATHEMATICS

    def applies(self, fault: FaultRecord, course: Course) -> bool:
        return True

    def describe(self, fault: FaultRecord) -> str:
        evidence = f"{_format_share(fault)}{_format_inputs(fault)}"
        if fault.evidence.is_untested:
            return f"{evidence}; torch cannot run this op in float32, so it is not known whether float32 holds them"
        return f"not finite in float32 either ({evidence})"

    def find_remedy(self, fault: FaultRecord, run: RunRecord | None) -> Remedy:
        call = fault.origin.op or "the op"
        if fault.evidence.is_untested:
            scale = ", or a smaller loss scale" if fault.is_in_backward and fault.evidence.loss_scale != 1 else ""
            return advise_script(f"look at the arguments of {call}; try it on .float() inputs{scale}")
        return advise_script(f"look at the arguments of {call}: no list and no loss scale helps")


DIAGNOSES: tuple[Diagnosis, ...] = (_CameIn(), _Divergence(), _Step(), _Precision(), _Mathematics())
"""The first that applies is the cause of a fault."""

_BY_CAUSE = {diagnosis.cause: diagnosis for diagnosis in DIAGNOSES}


def diagnose(fault: FaultRecord, course: Course) -> FaultRecord:
    """Return a copy of a fault with the cause that applies, whatever cause the fault has."""
    return replace(fault, cause=next(diagnosis.cause for diagnosis in DIAGNOSES if diagnosis.applies(fault, course)))


def describe_cause(fault: FaultRecord) -> str:
    """Return the cause of a fault in words."""
    return f"{fault.cause}: {_BY_CAUSE[fault.cause].describe(fault)}"


def find_remedy(fault: FaultRecord, run: RunRecord | None) -> Remedy:
    """Return the remedy for a fault: see `Diagnosis.find_remedy`."""
    return _BY_CAUSE[fault.cause].find_remedy(fault, run)


def _format_share(fault: FaultRecord) -> str:
    """Return the value with its share, such as "inf in 3.0% of the values"; the value alone if no share is known."""
    share = fault.origin.share
    if share is None:
        return str(fault.value)
    percent = "less than 0.1%" if share < 0.001 else f"{share:.1%}"
    return f"{fault.value} in {percent} of the values"


def _format_inputs(fault: FaultRecord) -> str:
    if fault.evidence.largest is None:
        return ""
    return f"; inputs up to {fault.evidence.largest:.3g}"
