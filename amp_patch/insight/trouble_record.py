"""`TroubleRecord`: a step that has gone wrong in an armed run, and what its repetition has shown.

An *armed* run trains at full speed. If a step goes wrong, the run tries to repeat it under a tracer.
"""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..tables import WIDTH, align
from .json_values import absent


@dataclass(frozen=True, slots=True)
class TroubleRecord:
    """A step with trouble in an armed run.

    Attributes:
        step: the number of the step, from 0.
        symptom: what was seen, such as "the loss is nan".
        loss: the loss; None if it was not read.
        loss_scale: the smallest loss scale, 1 without one.
        learning_rates: the learning rate of each group of the optimizer.
        rank: the rank of the process.
        then: what follows the step: "stop", "skip" or "go".
        micro_batch: the number, from 0, of the loss in whose forward or backward pass the first fault came; None if it
            came in no such pass, or if there was no fault.
        micro_batches: the number of losses in the repeated step.
        faults: the number of faults that were found.
        differences: how the repetition differs from the step; empty if it was the same.
        obstacle: why the step could not be repeated to its end; "" without an obstacle.
        has_stepped: whether weights had changed in this step already: in a step with a closure, or by another
            optimizer.
        is_repeated: False if this step was not repeated, because the previous step has made weights that are not
            finite.
    """

    kind: ClassVar[str] = "trouble"

    step: int
    symptom: str
    loss: float | None = absent("")
    loss_scale: float = 1.0
    learning_rates: tuple[float, ...] = ()
    rank: int = 0
    then: str = "stop"
    micro_batch: int | None = None
    micro_batches: int = 0
    faults: int = 0
    differences: tuple[str, ...] = ()
    obstacle: str = ""
    has_stepped: bool = False
    is_repeated: bool = True


_THEN = {
    "stop": "the script is stopped",
    "skip": "this step changes no weights, and the script goes on",
    "go": "the script goes on as it would have; once weights hold such values, no step is repeated",
}


_FLIGHT = "  flight  "  # the heading of the lines from the flight recorder, which are indented by its width


def format_trouble(trouble: TroubleRecord, faults: Sequence[str], flight: Sequence[str]) -> str:
    """Return the report of a step with trouble.

    Args:
        faults: the reports of its faults.
        flight: lines from the flight recorder, about the steps before.
    """
    rows = [(f"  {name}", text) for name, text in _describe(trouble)]
    lines = [part for line in flight for part in textwrap.wrap(line, WIDTH - len(_FLIGHT), subsequent_indent="  ")]
    rows += [(_FLIGHT.rstrip() if number == 0 else "  ", line) for number, line in enumerate(lines)]
    # rank 0 is not named, because it may be the only rank
    rank = f"rank {trouble.rank}, " if trouble.rank else ""
    return "\n".join([f"{rank}step {trouble.step}: {trouble.symptom}", *align(rows), *faults])


def _describe(trouble: TroubleRecord) -> Iterator[tuple[str, str]]:
    settings = []
    if trouble.loss is not None:
        settings.append(f"loss {trouble.loss:.6g}")
    if trouble.loss_scale != 1:
        settings.append(f"loss scale {trouble.loss_scale:g}")
    rates = sorted(set(trouble.learning_rates), reverse=True)
    if rates:
        shown = [f"{rate:.3g}" for rate in rates[:3]]
        if len(rates) > len(shown):
            shown.append(f"{len(rates) - len(shown)} more")
        settings.append(f"learning rate {' and '.join(shown)}")
    if settings:
        yield "state", ", ".join(settings)
    yield "replay", _describe_replay(trouble)
    then = _THEN[trouble.then]
    if trouble.then == "stop" and not trouble.has_stepped:
        then += "; weights are as they were before this step"
    if trouble.then == "skip" and trouble.has_stepped:
        then = "no more weights change in this step, and the script goes on"
    yield "then", then


def _describe_replay(trouble: TroubleRecord) -> str:
    if trouble.obstacle:
        return f"the step was not repeated to its end: {trouble.obstacle}"
    if not trouble.is_repeated:
        return "the step was not repeated: the step before made weights that are not finite"
    text = "the step was repeated under trace, bit for bit as the first time"
    if trouble.differences:
        text = f"the step was repeated under trace, but not as the first time: {'; '.join(trouble.differences)}"
    if not trouble.faults:
        source = "another rank did, or code outside of torch"
        if trouble.differences:
            source += ", or the repetition made none"
        return f"{text}. No op gave a value that does not fit: {source}"
    # the report counts micro-batches from 1, as in "2 of 4"
    if trouble.micro_batch is not None and trouble.micro_batches > 1:
        text += f"; the first fault is in micro-batch {trouble.micro_batch + 1} of {trouble.micro_batches}"
    return text
