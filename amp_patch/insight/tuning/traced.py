"""`Traced`: what a traced run says of a list: whether every value fits, in more steps than the search compares."""

from dataclasses import dataclass

from ...tables import count_of
from ..fault_text import describe_briefly
from ..records import FaultRecord, Recording, StepRecord

TRACED = 20
"""So many steps are traced at least. Those that a dynamic loss scale skips do not count."""


@dataclass(frozen=True, slots=True)
class Traced:
    """What came of a traced run: in words, and the first fault; None for none, or where nothing was traced."""

    text: str
    fault: FaultRecord | None = None


def read_trace(recording: Recording) -> Traced:
    """Return what a recording of a `Tracer` with `keeps_steps` says."""
    steps = len(recording.of(StepRecord))
    fault = next((fault for fault in recording.of(FaultRecord) if not fault.is_search), None)
    if fault is not None:
        return Traced(f"traced: {describe_briefly(fault)}; amp-patch trace says more", fault)
    searched = sum(fault.is_search for fault in recording.of(FaultRecord))
    if steps <= searched:
        return Traced(f"traced: {count_of(steps, 'step')}, all of them skipped by the loss scale")
    return Traced(f"traced: every value fits in {count_of(steps - searched, 'step')}")
