"""`Verdict`: whether a run agrees with the run in float32.

Gradients must agree within a tolerance, and losses within a fifth of the tolerance.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ..recordings import Recording
from ..records import CheckedStepRecord, SketchRecord
from .sketches import distance

SMALL = 1e-5
"""A gradient whose norm is at most this share of the largest norm in its step is not compared."""

LOSS_SHARE = 0.2
"""The share of the tolerance that is allowed for the relative error of a loss."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a run agrees with the run in float32, and its largest errors.

    Attributes:
        passed: whether gradient errors are within the tolerance, and loss errors within `LOSS_SHARE` of it.
        worst: the largest relative error (L2) of a gradient; inf if a gradient or a step cannot be compared.
        parameter: the name of the parameter whose gradient has this error; "" without one.
        loss_error: the largest relative error of a loss; inf if a loss or a step cannot be compared.
        fault: why the run did not pass, in words; "" if it passed.
        is_skipped: whether the run did not pass because it skipped a step for an overflow.
    """

    passed: bool
    worst: float
    parameter: str
    loss_error: float
    fault: str
    is_skipped: bool = False


def judge(reference: Recording, run: Recording, tolerance: float) -> Verdict:
    """Compare `run` with `reference`, the run in float32, and return whether they agree."""
    reference_steps, steps = _steps_by_number(reference), _steps_by_number(run)
    missing = [key for key in reference_steps if key not in steps]
    if missing:
        fault = f"it took {len(reference_steps) - len(missing)} of {len(reference_steps)} steps"
        return Verdict(False, math.inf, "", math.inf, fault)
    loss_error = max((_compare_losses(step, steps[key]) for key, step in reference_steps.items()), default=0.0)
    for key, step in reference_steps.items():
        if steps[key].skipped and not step.skipped:
            fault = f"step {step.step} was skipped for an overflow at loss scale {steps[key].loss_scale:g}"
            parameter = _first_non_finite_parameter(run, step)
            return Verdict(False, math.inf, parameter, loss_error, fault, is_skipped=True)
    worst, parameter = max(_find_gradient_errors(reference, run), default=(0.0, ""))
    fault = ""
    if loss_error > tolerance * LOSS_SHARE:
        fault = f"a loss is off by {loss_error:.2g}, more than {tolerance * LOSS_SHARE:.2g}"
    if worst > tolerance:
        fault = f"the gradient of {parameter} is off by {worst:.2g}"
    return Verdict(not fault, worst, parameter, loss_error, fault)


def explain_non_finite(run: Recording) -> str:
    """Return in words which loss or gradient of a run is not finite; "" if none is."""
    for step in run.of(CheckedStepRecord):
        for loss in step.losses:
            if not math.isfinite(loss):
                return f"a loss of step {step.step} is {loss}"
    for gradient in run.of(SketchRecord):
        if not math.isfinite(gradient.norm):
            return f"the gradient of {gradient.parameter} in step {gradient.step} has the norm {gradient.norm}"
    return ""


def find_zero_gradients(reference: Recording) -> tuple[list[str], int]:
    """Return the parameters whose gradients are zero in every step, and the number of all parameters with gradients.

    A gradient of zero has no relative error, so such parameters cannot be judged. For example, a layer whose weights
    start at zero (LoRA's B) makes the gradients of the layers before it zero.
    """
    is_zero: dict[tuple[int, str], bool] = {}
    for gradient in reference.of(SketchRecord):
        key = gradient.optimizer, gradient.parameter
        is_zero[key] = is_zero.get(key, True) and gradient.norm == 0.0
    return [parameter for (_, parameter), zero in is_zero.items() if zero], len(is_zero)


def _steps_by_number(run: Recording) -> dict[tuple[int, int], CheckedStepRecord]:
    """Return the steps of a run. The keys are the number of the optimizer and the number of the step."""
    return {(record.optimizer, record.step): record for record in run.of(CheckedStepRecord)}


def _first_non_finite_parameter(run: Recording, step: CheckedStepRecord) -> str:
    """Return the first parameter whose gradient is not finite in a step, or ""."""
    for gradient in run.of(SketchRecord):
        is_of_step = (gradient.step, gradient.optimizer) == (step.step, step.optimizer)
        if is_of_step and not math.isfinite(gradient.norm):
            return gradient.parameter
    return ""


def _compare_losses(reference: CheckedStepRecord, step: CheckedStepRecord) -> float:
    """Return the largest relative error of the losses of a step. Return inf if a loss of either run is not finite, or
    if the numbers of losses differ.
    """
    if len(reference.losses) != len(step.losses):
        return math.inf
    largest = 0.0
    for exact, loss in zip(reference.losses, step.losses, strict=True):
        if not (math.isfinite(exact) and math.isfinite(loss)):
            return math.inf
        largest = max(largest, abs(exact - loss) / max(abs(exact), 1e-30))
    return largest


def _find_gradient_errors(reference: Recording, run: Recording) -> Iterator[tuple[float, str]]:
    """Yield the relative error of each gradient that is not too small (see `SMALL`), and the name of its parameter.

    The error is inf if the gradient is missing in `run`, or is not finite in one of the runs.
    """
    gradients = {(record.optimizer, record.step, record.parameter): record for record in run.of(SketchRecord)}
    exact_gradients = reference.of(SketchRecord)
    largest_norms: dict[tuple[int, int], float] = {}  # in each step, by optimizer and step
    for exact in exact_gradients:
        key = exact.optimizer, exact.step
        if math.isfinite(exact.norm):
            largest_norms[key] = max(largest_norms.get(key, 0.0), exact.norm)
    for exact in exact_gradients:
        if exact.norm == 0.0 or exact.norm <= SMALL * largest_norms.get((exact.optimizer, exact.step), 0.0):
            continue
        error = math.inf
        gradient = gradients.get((exact.optimizer, exact.step, exact.parameter))
        if gradient is not None and math.isfinite(exact.norm):
            error = distance(exact.sketch, gradient.sketch) / exact.norm
        if math.isnan(error):
            error = math.inf
        yield error, exact.parameter
