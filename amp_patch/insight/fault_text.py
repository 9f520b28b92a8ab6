"""A fault as text: the value that does not fit, its origin, and the remedy."""

from collections.abc import Iterator, Sequence

from ..tables import align, count_of
from .advice import advise
from .causes import describe_cause, find_remedy
from .fault_record import FaultRecord, Phase, Reach, Value
from .misuse_record import format_misuse
from .quiet_text import format_quiet
from .raised_text import format_raised
from .recordings import Recording
from .records import RunRecord
from .remedies import format_scale
from .short_dtypes import spell_out
from .trouble_record import format_trouble

_MOST_FURTHER = 5
_MOST_NAMES = 3
_SKIPPED = {None: "", True: "; the step was skipped", False: "; the step was taken"}


def format_fault(fault: FaultRecord, run: RunRecord | None) -> str:
    """Return a fault as text. A list that it suggests extends the last list of `run`, or else a shipped list."""
    rows = [(f"  {name}", text) for name, text in describe_fault(fault, run)]
    return "\n".join([entitle_fault(fault), *align(rows)])


def format_traced(recording: Recording) -> str:
    """Return as text the steps of a run that went wrong (its `TroubleRecord`s), then the report of `format_faults`.

    If steps went wrong and the run has no faults, the part about faults is left out: it would say that all is well.
    """
    troubles = [format_trouble(trouble, (), ()) for trouble in recording.troubles]
    if troubles and not recording.faults:
        return "\n".join([*troubles, *_format_others(recording)])
    return "\n".join([*troubles, format_faults(recording)])


def format_faults(recording: Recording) -> str:
    """Return the report of a traced run: its first fault in full, and the next few in short.

    Without faults, it counts the steps that were skipped while a dynamic loss scale came down, and the steps in which
    every value fits. Quiet losses, exceptions and misuses follow.
    """
    faults, searches, others = recording.faults, recording.searches, _format_others(recording)
    if faults:
        return "\n".join([format_fault(faults[0], recording.run), *describe_further(faults), *others])
    lines = [describe_search(searches, is_all=len(searches) >= len(recording.steps))] if searches else []
    skipped = sum(step.skipped is True for step in recording.steps)
    fitting = len(recording.steps) - max(skipped, len(searches))
    if fitting > 0:
        lines.append(f"every value fits, in {count_of(fitting, 'step')}")
        lines += note_float32(recording)
    elif not searches and not recording.raised:
        # an armed run records only steps that went wrong
        lines.append("no fault" if recording.flight else "no fault, and no step was recorded")
    return "\n".join([*lines, *others])


def _format_others(recording: Recording) -> list[str]:
    """Return the reports of quiet losses, exceptions and misuses."""
    others = [format_quiet(lost, recording.run) for lost in recording.quiet]
    others += [format_raised(raised, recording.run) for raised in recording.raised]
    others += map(format_misuse, recording.misuses)
    return others


def note_float32(recording: Recording) -> list[str]:
    """Return a line that says that a run cast nothing to 16 bits, or no line if the run used 16 bits."""
    run = recording.run
    if run.low or run.script_low or recording.quiet:  # a script may cast by hand, as by `.half()`
        return []
    if run.is_native:
        return [
            "these steps ran without mixed precision, so they say nothing about 16 bits; --everywhere --opt-level O4"
            " checks the script in bfloat16"
        ]
    return [f"{run.opt_level} casts nothing to 16 bits; --opt-level O1 or O4 checks the script in 16 bits"]


def describe_search(faults: Sequence[FaultRecord], *, is_all: bool) -> str:
    """Return the report of the steps that were skipped while a dynamic loss scale came down.

    `faults` has one fault of each such step. `is_all`: whether no other step was recorded.
    """
    first, steps = faults[0], count_of(len(faults), "step")
    scale = format_scale(first.evidence.loss_scale)
    text = f"no fault: {steps} skipped as the dynamic loss scale came down from {scale}"
    if first.fix.summed is not None:
        text += (
            f"\nthe loss is about {first.fix.summed:.3g} times the mean of its terms; if the script takes the mean,"
            " a larger loss scale fits"
        )
    if is_all:
        text += "\na skipped step is not checked completely: run more steps"
    return text


def describe_further(faults: Sequence[FaultRecord]) -> list[str]:
    """Return the lines about the faults after the first: a heading, a line for each of up to five different faults, and
    the number of the others. Return no line if there are none.
    """
    lines: list[str] = []
    for fault in faults:
        where = f"{fault.phase}, {_describe_call(fault)}" if fault.origin.aten else str(fault.phase)
        lines.append(f"  step {fault.step}, {where}: {fault.value}")
    lines = list(dict.fromkeys(lines))[1:]  # the same op may give a fault in each pass of a step
    if not lines:
        return []
    shown = lines[:_MOST_FURTHER]
    if len(lines) > len(shown):
        shown.append(f"  and {len(lines) - len(shown)} more")
    return ["also:", *shown]


def describe_briefly(fault: FaultRecord) -> str:
    """Return a fault in one line."""
    origin = fault.origin
    subject = _describe_call(fault) if origin.aten else origin.op or origin.parameter or ""
    return f"step {fault.step}, {fault.phase}: {fault.value} ({fault.cause}), {subject}"


def entitle_fault(fault: FaultRecord) -> str:
    """Return the first line of a fault: step, phase, and whether a value was lost to zero or does not fit.

    It begins with the rank, unless this is 0.
    """
    sight = "first value lost to zero" if fault.value is Value.ZERO else "first value that does not fit"
    title = f"step {fault.step}, {fault.phase}: {sight}"
    if fault.rank:
        return f"rank {fault.rank}, {title}"
    return title


def describe_fault(fault: FaultRecord, run: RunRecord | None) -> Iterator[tuple[str, str]]:
    """Yield the lines of a fault, each as its name and its text. The name is "" if it continues the line before."""
    if fault.origin.aten:
        yield "op", _describe_op(fault)
        yield "call", _describe_call(fault)
        yield "rule", _describe_rule(fault)
    elif fault.phase is Phase.STEP:
        yield "op", f"{fault.origin.op}.step(), from finite weights and gradients"
    yield "cause", describe_cause(fault)
    yield "reach", _describe_reach(fault)
    trail = fault.evidence.trail
    if trail:
        # records have the latest op first, and the report has it last
        steps = [f"{label.replace('_to_copy', 'cast')} {largest:.3g}" for label, largest in reversed(trail)]
        steps.append(f"{fault.origin.aten or ''} {fault.value}")
        yield "trail", f"max |x|: {' -> '.join(steps)}"
    name = "try"
    for line in advise(find_remedy(fault, run), fault, run):
        yield name, line
        name = ""


def _describe_op(fault: FaultRecord) -> str:
    origin = fault.origin
    dtypes = f"{', '.join(map(spell_out, origin.given)) or 'nothing'} -> {spell_out(origin.out or '')}"
    text = f"aten::{origin.aten} {dtypes}"
    if origin.node and fault.is_in_backward:
        text += f" ({origin.node})"
    return text


def _describe_call(fault: FaultRecord) -> str:
    """Return the call of the script that ran an op, with its line and module."""
    origin = fault.origin
    call = (origin.op or "").removeprefix("aten.")  # listed ops have names as in lists, others such as "aten.mul"
    if call == "_to_copy":
        call = "cast"
    if fault.is_in_backward:
        call = f"the backward pass of {call}"
    place = origin.site or "no line of the script"
    module = f"module {origin.module}" if origin.module else "in no submodule"
    return f"{call} at {place}, {module}"


def _describe_rule(fault: FaultRecord) -> str:
    origin = fault.origin
    text = origin.rule or "on no list"
    if origin.region:
        text += f" ({origin.region})"
    if origin.entry:
        text += f", {origin.entry}"
    return text


def _describe_reach(fault: FaultRecord) -> str:
    effect, skipped = fault.effect, _SKIPPED[fault.effect.skipped]
    if effect.reach is None:
        return "not known: the step did not end"
    if effect.reach is Reach.WEIGHTS:
        if fault.origin.aten:  # an op in the step of an optimizer that amp_patch does not know
            return "the step of an optimizer"
        return f"the weights: {fault.origin.parameter or 'of no model'}"
    if effect.reach is Reach.LOSS:
        return f"the loss{skipped}"
    if effect.reach is Reach.GRADIENTS:
        return _describe_gradients(effect.gradients, effect.of) + skipped
    if effect.gradients:
        return f"none that was seen: the gradients that are not finite come from another fault{skipped}"
    return f"swallowed: loss and gradients are finite, but may differ from float32{skipped}"


def _describe_gradients(names: Sequence[str], total: int) -> str:
    """Return as text how many of `total` gradients are not finite, and the first of their names."""
    shown = list(names[:_MOST_NAMES])
    if len(names) > _MOST_NAMES:
        shown.append("...")
        if len(names) == total:
            return f"gradients of all {total} parameters"
    return f"gradients of {len(names)} of {total} parameters ({', '.join(shown)})"
