"""`StepFaults`: completes the faults of a step with their cause, their effect and their fix.

A fault is a value that does not fit into its dtype (see `FaultRecord`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ..reporting import find_rank
from ..session import Session
from .causes import Course, diagnose
from .fault_record import Effect, FaultRecord, Fix, Phase, Reach, Value
from .faults import FaultFinder
from .placing import find_scope
from .repair import Needs
from .short_dtypes import LARGEST
from .written import Culprit

_NEAR = 8.0  # a value is nearly too large if it is above the largest number of its dtype divided by this
_FEW = 16  # a loss that sums fewer terms than this is not the reason for large gradients
_LITTLE = 256.0  # a loss scale up to this leaves little room for small gradients


@dataclass
class SeenInStep:
    """The observations of a tracer in one step.

    Attributes:
        is_loss_seen: whether there was a loss.
        is_loss_bad: whether a loss was not finite.
        is_scaled: whether gradients may carry the loss scale by now.
        gradients: names of the parameters whose gradients are not finite.
        total: the number of gradients that were looked at.
        are_gradients_bad: whether the optimizer that steps has gradients that are not finite.
        mended: for each gradient that is not finite, whether it is finite once the faulty ops run in float32.
        is_lost: whether a gradient that is not finite would not be finite in float32 either.
        skips: for each optimizer with gradients that are not finite, whether it skipped its step.
        summed: how many times larger a loss is than the mean of its terms.
        reaching_loss: the faults on which a loss depends, as their positions among the faults of the step.
        reaching_gradients: the faults on which the gradients that `total` counts depend.
        reaching_unused: the faults on which gradients depend that the stepping optimizer does not hold. In a GAN, these
            are the discriminator's gradients in the backward pass of the generator.
    """

    is_loss_seen: bool = False
    is_loss_bad: bool = False
    is_scaled: bool = False
    gradients: list[str] = field(default_factory=list)
    total: int = 0
    are_gradients_bad: bool = False
    mended: list[bool] = field(default_factory=list)
    is_lost: bool = False
    skips: list[bool] = field(default_factory=list)
    summed: float = 1.0
    reaching_loss: set[int] = field(default_factory=set)
    reaching_gradients: set[int] = field(default_factory=set)
    reaching_unused: set[int] = field(default_factory=set)


@dataclass
class Finished:
    """The complete faults of a step.

    Attributes:
        faults: the faults to report.
        searches: the first fault, if the step was skipped because a dynamic loss scale is, or may be, too large; else
            empty.
        unused: faults in gradients that an optimizer may use in a later step.
    """

    faults: list[FaultRecord] = field(default_factory=list)
    searches: list[FaultRecord] = field(default_factory=list)
    unused: list[FaultRecord] = field(default_factory=list)


class StepFaults:
    """Completes the faults of one step.

    Args:
        session: the session that ran the step.
        finder: knows the values of the step.
        seen: the observations in this step.
        has_grown: whether the loss or the largest weight has grown so much that the training has diverged.
    """

    def __init__(self, session: Session, finder: FaultFinder, seen: SeenInStep, *, has_grown: bool) -> None:
        self._session = session
        self._finder = finder
        self._seen = seen
        self._has_grown = has_grown
        self._needs = finder.repair.find_needs()

    def finish(self, faults: Sequence[FaultRecord], *, is_skipped: bool | None) -> Finished:
        """Complete the faults, and drop those that are not worth a report (see `_is_harmless`)."""
        result = Finished()
        for number, fault in enumerate(self.add_fixes(faults)):
            reach = self._find_reach(number, fault)
            gradients, total = tuple(self._seen.gradients), self._seen.total
            fault = replace(fault, rank=find_rank() or 0, effect=Effect(reach, gradients, total, is_skipped))
            if reach is None:
                result.unused.append(fault)
            elif not _is_harmless(fault):
                result.faults.append(fault)
        if not all(map(self._is_search, result.faults)):
            # last come faults that end by themselves once the loss scale has come down
            result.faults.sort(key=self._ends_by_itself)
        elif result.faults:
            result.searches, result.faults = [self._mark_search(result.faults[0])], []
        return result

    def add_fixes(self, faults: Sequence[FaultRecord]) -> list[FaultRecord]:
        """Return the faults with their causes and fixes."""
        if not faults:
            return []
        shared = self._find_shared_fix()
        are_mended = bool(self._seen.mended) and all(self._seen.mended)
        fixed = []
        for number, fault in enumerate(faults):
            is_mended = are_mended and number in self._seen.reaching_gradients
            fault = diagnose(fault, Course(self._has_grown, is_mended))
            fixed.append(replace(fault, fix=self._make_fix(fault, shared, self._needs)))
        return fixed

    def _find_shared_fix(self) -> Fix:
        """Return the fix that the faults of the step share."""
        # Layers whose values are nearly too large in this step may overflow in another: put them into the list, too.
        culprits = list(self._needs.culprits)
        for culprit in self._needs.culprits:
            culprits += [culprit._replace(module=module) for module in self._find_siblings(culprit)]
        repair = self._finder.repair
        # What float32 cannot hold in the backward pass matters only if a gradient is not finite in float32 either. If
        # all gradients are finite in float32, a later op has masked it.
        beyond = repair.beyond or (repair.beyond_backward if self._seen.is_lost else "")
        return replace(
            self._find_scope(culprits),
            lines=tuple(dict.fromkeys(culprit.site for culprit in self._needs.culprits if culprit.site)),
            beyond=beyond or None,
            is_scale_enough=self._needs.is_scale_enough,
        )

    def _find_scope(self, culprits: Sequence[Culprit]) -> Fix:
        """Return which modules, ops and lines have to run in float32."""
        # at an opt_level that casts the model, only the module rules of a list act
        has_lists = self._session.oplists is not None and self._session.casts is not None
        return find_scope(culprits, self._session.models(), has_lists=has_lists)

    def _find_siblings(self, culprit: Culprit) -> list[str]:
        """Return the modules in which the line of a culprit gives values that are too large, or nearly too large.

        If not the size but the rounding of the values is the reason, return all modules in which the line ran.
        """
        is_of_rounding = culprit in self._finder.repair.rounding
        siblings: list[str] = []
        for (site, aten, dtype), peaks in self._finder.peaks.items():
            if (site, aten) != (culprit.site, culprit.aten):
                continue
            for module, largest in peaks.items():
                if is_of_rounding or largest > LARGEST[dtype] / _NEAR:
                    siblings.append(module)
        return siblings

    def _make_fix(self, fault: FaultRecord, shared: Fix, needs: Needs) -> Fix:
        """Return the fix for one fault, given the shared fix."""
        origin = fault.origin
        fix = replace(shared, scale=needs.scale)
        if fault.value is Value.ZERO:
            fix = replace(fix, scale=needs.scale_of_zeros)
        elif fault.is_in_backward and self._is_of_sum(1.0):
            fix = replace(fix, summed=self._seen.summed, scale=needs.fitting)
        if origin.came_in and origin.parameter and fault.evidence.in_float32 is None:
            # without a finite master, no repair was tried: name the op that read the weight or buffer
            scope = self._find_scope([_of_weight(fault)])
            fix = replace(fix, regions=scope.regions, ops=scope.ops, alternative=scope.alternative, sites=scope.sites)
        return fix

    def _is_of_sum(self, scale: float) -> bool:
        """Return whether a sum in the loss is why gradients need a loss scale of `scale` or less.

        The sum is the reason if the gradients would fit at a scale of 1 with a mean in its place.
        """
        fitting, summed = self._needs.fitting, self._seen.summed
        return fitting is not None and fitting <= scale and summed >= _FEW and summed * fitting >= 1

    def _find_reach(self, number: int, fault: FaultRecord) -> Reach | None:
        """Return how far a fault has spread; None if only into gradients that no optimizer has used yet.

        If a loss or gradient is not finite, and no fault is known to have reached it, each fault counts as having done
        so.
        """
        if fault.phase is Phase.STEP:
            return Reach.WEIGHTS
        seen = self._seen
        if seen.gradients and number in (seen.reaching_gradients or (number,)):
            return Reach.GRADIENTS
        if seen.is_loss_bad and number in (seen.reaching_loss or (number,)):
            return Reach.LOSS
        return None if number in seen.reaching_unused else Reach.SWALLOWED

    # ---- the search for a loss scale ---------------------------------------------------------------------------------

    def _is_search(self, fault: FaultRecord) -> bool:
        """Return whether the step was skipped because a dynamic loss scale is too large.

        This cannot be computed for a gradient that no op of torch wrote, or whose op cannot run in float32. It is
        assumed there, as long as the scale can fall further.
        """
        loss_scale = fault.evidence.loss_scale
        bounds = [scaler.min_loss_scale or 0.0 for scaler in self._session.scalers if scaler.is_dynamic]
        # A loss scale of 1 or less is not too large, so it is not the reason for a skipped step.
        if not bounds or not fault.effect.skipped or not fault.is_in_backward or loss_scale <= 1:
            return False
        lowest = max(1.0, min(bounds))
        is_unseen = fault.origin.came_in and not (fault.origin.aten and fault.origin.parameter)
        is_unseen = is_unseen or fault.evidence.is_untested
        is_above_one = self._needs.fitting is None or self._needs.fitting > 1  # at 1, small gradients have no room
        fits = (fault.fix.scale or 0.0) >= lowest and is_above_one
        return fits or (is_unseen and loss_scale > lowest)

    def _mark_search(self, fault: FaultRecord) -> FaultRecord:
        summed = self._seen.summed if self._is_of_sum(_LITTLE) else None
        effect, fix = replace(fault.effect, is_search=True), replace(fault.fix, summed=summed)
        return replace(fault, effect=effect, fix=fix)

    def _ends_by_itself(self, fault: FaultRecord) -> bool:
        """Return whether a fault, taken alone, only shows that a dynamic loss scale is too large."""
        is_dynamic = any(scaler.is_dynamic for scaler in self._session.scalers)
        evidence = fault.evidence
        if not is_dynamic or not fault.is_in_backward or evidence.is_of_rounding or fault.value is Value.ZERO:
            return False
        if evidence.in_float32 is None:
            return False
        return evidence.in_float32 <= LARGEST.get(fault.origin.out or "", 0.0) * evidence.loss_scale


def _of_weight(fault: FaultRecord) -> Culprit:
    """Return the op that read the weight of a fault."""
    origin = fault.origin
    return Culprit(
        module=origin.module or "",
        is_in_module=bool(origin.module),
        op=origin.op or "",
        listed=origin.listed or "",
        aten=origin.aten or "",
        site=origin.site or "",
        rule="weights",
    )


def _is_harmless(fault: FaultRecord) -> bool:
    """Return whether a fault that has reached neither loss nor gradients needs no report.

    It needs none if it would be there in float32, too, as in the logarithm of a mask; if rounding in the backward pass
    led to it; or if it came in with a tensor that is wider than 16 bits and no part of a model.
    """
    if fault.effect.reach is not Reach.SWALLOWED:
        return False
    origin, evidence = fault.origin, fault.evidence
    if origin.came_in:
        return not origin.parameter and not origin.is_given_low
    if evidence.is_of_rounding and fault.is_in_backward:
        return True
    return fault.value is not Value.ZERO and fault.phase is not Phase.STEP and not evidence.fits_in_float32
