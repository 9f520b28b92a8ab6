"""`Traced`: the result of tracing a training with the list that `Tuner` has found, over more steps than it compares."""

from dataclasses import dataclass

from ...tables import count_of
from ..fault_record import FaultRecord
from ..fault_text import describe_briefly
from ..recordings import Recording
from ..records import StepRecord

TRACED = 20
"""The least number of steps to trace. Steps that a dynamic loss scale skips do not count."""


@dataclass(frozen=True, slots=True)
class Traced:
    """The result of a traced run.

    Attributes:
        text: the result in words, such as "traced: every value fits in 20 steps".
        fault: the first fault. None if there is none, if the script's loss scale may be the reason for the fault, or if
            the run was not made.
    """

    text: str
    fault: FaultRecord | None = None


def read_trace(recording: Recording) -> Traced:
    """Return the result of a run that a `Tracer` with `keeps_steps` recorded."""
    steps = len(recording.of(StepRecord))
    if recording.faults:
        fault = recording.faults[0]
        return Traced(f"traced: {describe_briefly(fault)}; amp-patch trace says more", fault)
    # steps that the dynamic loss scale skipped on its search for a scale that fits
    skipped = len(recording.searches)
    if not steps:
        return Traced("traced: no step ended")
    if steps <= skipped:
        return Traced(f"traced: {count_of(steps, 'step')}, all of them skipped by the loss scale")
    return Traced(f"traced: every value fits in {count_of(steps - skipped, 'step')}")
