"""`Traced`: the result of a run that traces more steps with a list than the search compares."""

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
    """The result of a traced run in words, and its first fault; None without a fault, or if the run was not made."""

    text: str
    fault: FaultRecord | None = None


def read_trace(recording: Recording) -> Traced:
    """Return the result of a run that a `Tracer` with `keeps_steps` recorded."""
    steps = len(recording.of(StepRecord))
    if recording.faults:
        first = recording.faults[0]
        return Traced(f"traced: {describe_briefly(first)}; amp-patch trace says more", first)
    searched = len(recording.searches)
    if steps <= searched:
        return Traced(f"traced: {count_of(steps, 'step')}, all of them skipped by the loss scale")
    return Traced(f"traced: every value fits in {count_of(steps - searched, 'step')}")
