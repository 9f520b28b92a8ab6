"""`Traced`: whether every value fits with a list, in more steps than the search compares."""

from dataclasses import dataclass

from ...tables import count_of
from ..fault_record import FaultRecord
from ..fault_text import describe_briefly
from ..recordings import Recording
from ..records import StepRecord

TRACED = 20
"""The least number of traced steps. Steps that a dynamic loss scale skips do not count."""


@dataclass(frozen=True, slots=True)
class Traced:
    """The result of a traced run in words, and the first fault; None without a fault, or without a run."""

    text: str
    fault: FaultRecord | None = None


def read_trace(recording: Recording) -> Traced:
    """Return the result of a `Tracer` with `keeps_steps`."""
    steps = len(recording.of(StepRecord))
    if recording.faults:
        first = recording.faults[0]
        return Traced(f"traced: {describe_briefly(first)}; amp-patch trace says more", first)
    searched = len(recording.searches)
    if steps <= searched:
        return Traced(f"traced: {count_of(steps, 'step')}, all of them skipped by the loss scale")
    return Traced(f"traced: every value fits in {count_of(steps - searched, 'step')}")
