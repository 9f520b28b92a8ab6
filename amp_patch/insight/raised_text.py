"""An exception of the script as text: the call, the operands with the origins of their dtypes, and the remedies."""

from collections.abc import Iterator

from ..tables import align
from .raised_record import Operand, OperandOrigin, RaisedCause, RaisedRecord
from .records import RunRecord
from .short_dtypes import spell_out

_CELL = "Cell In["  # how IPython begins the place of a line
_CAUSES = {
    RaisedCause.MIXED: "the operands have different dtypes, and the call takes operands of one dtype",
    RaisedCause.UNSUPPORTED: "the call does not take operands of this dtype",
    RaisedCause.LOW_WEIGHTS: "a GradScaler unscales float32 gradients, and these weights have float16 ones",
    RaisedCause.NO_GRADIENTS: "the optimizer has nothing to step on",
    RaisedCause.SCALER_ORDER: (
        "GradScaler refuses this call: a step calls scale, backward, unscale_ (at most once), step and update, in this"
        " order"
    ),
    RaisedCause.TWO_SCALES: "a GradScaler and amp_patch would both scale the loss",
}


def format_raised(raised: RaisedRecord, run: RunRecord | None) -> str:
    """Return an exception as text. `run` is the run of the script; None: unknown."""
    rows = [(f"  {name}", text) for name, text in describe_raised(raised, run)]
    return "\n".join([entitle_raised(raised), *align(rows)])


def entitle_raised(raised: RaisedRecord) -> str:
    """Return the first line of an exception: its step, phase and class."""
    title = f"step {raised.step}, {raised.phase}: the script raised {raised.error}"
    if raised.rank:
        return f"rank {raised.rank}, {title}"
    return title


def describe_raised(raised: RaisedRecord, run: RunRecord | None) -> Iterator[tuple[str, str]]:
    """Yield the lines of an exception, each with its name, or "" if it continues the line before."""
    yield "error", raised.message
    yield "call", _describe_call(raised)
    yield "cause", f"{raised.cause}: {_CAUSES[raised.cause]}"
    name = "operands"
    for operand in raised.given:
        yield name, describe_operand(operand)
        name = ""
    name = "because"
    for line in raised.details:
        yield name, line
        name = ""
    name = "try"
    for line in _advise(raised, run):
        yield name, line
        name = ""


def _describe_call(raised: RaisedRecord) -> str:
    call = raised.op or "a call"
    # without `raised_at`, the script itself has made the call during the backward pass, as in a hook
    if raised.phase == "backward" and raised.raised_at:
        call = f"the backward pass of {call}"
    text = f"{call} at {raised.site or 'no line of the script'}"
    if raised.module:
        text += f", module {raised.module}"
    if raised.raised_at and raised.raised_at != raised.site:
        text += f", raised at {raised.raised_at}"
    if raised.called_from:
        text += f", called from {raised.called_from}"
    return text


def describe_operand(operand: Operand) -> str:
    """Return the name of an operand, its dtype, and the origin of the dtype."""
    return f"{operand.name}: {spell_out(operand.dtype)}, {_ORIGINS[OperandOrigin(operand.origin)](operand)}"


def _describe_rule(operand: Operand) -> str:
    rule = ", ".join(filter(None, (operand.rule, operand.entry)))
    return f"made by {operand.made_by}{_where(operand)} ({rule})"


def _describe_cast(operand: Operand) -> str:
    return f"cast{_where(operand)}"


def _describe_op(operand: Operand) -> str:
    text = f"made by {operand.made_by}{_where(operand)}"
    return f"{text} ({operand.rule})" if operand.rule else text


def _describe_weight(operand: Operand) -> str:
    text = "a weight" if operand.made_by == operand.name else f"the weight {operand.made_by}"
    if operand.made_by.startswith("the gradient of "):
        text = operand.made_by
    if operand.rule.startswith("."):
        return f"{text}, cast by {operand.rule}"
    if operand.rule:
        return f"{text}, cast by {operand.entry} ({operand.rule})"
    if operand.dtype == "f32" or text == operand.made_by:  # a gradient has the dtype of its weight
        return text
    return f"{text}; no call that casts it, such as model.half(), was seen"


def _describe_input(operand: Operand) -> str:
    return f"came in as {operand.made_by} at {operand.site}"


def _describe_unknown(operand: Operand) -> str:
    return "made by no op that was seen"


def _where(operand: Operand) -> str:
    text = f" at {operand.site}" if operand.site else ""
    return f"{text}, module {operand.module}" if operand.module else text


_ORIGINS = {
    OperandOrigin.RULE: _describe_rule,
    OperandOrigin.CAST: _describe_cast,
    OperandOrigin.OP: _describe_op,
    OperandOrigin.WEIGHT: _describe_weight,
    OperandOrigin.INPUT: _describe_input,
    OperandOrigin.UNKNOWN: _describe_unknown,
}


def _advise(raised: RaisedRecord, run: RunRecord | None) -> Iterator[str]:
    """Yield the remedies as lines: entries for an op list and how to use the list, and edits of the script."""
    is_native, in_notebook = run is not None and run.is_native, (raised.site or "").startswith(_CELL)
    if raised.choices:
        below = "" if is_native else f", below `extends: {find_base(raised, run)}`"
        yield f"in a list of your own, fix.yaml{below}:"
        yield f"  {'   or   '.join(raised.choices)}"
        if is_native:
            use = 'amp_patch.native.install(lists="fix.yaml")' if in_notebook else "amp-patch run --lists fix.yaml"
            unchanged = "the cells as they are" if in_notebook else "the script as it is"
            yield f"and {use}, which leaves {unchanged}"
        else:
            more = "" if in_notebook else ", or --lists fix.yaml to amp-patch"
            yield f'and pass lists="fix.yaml" to amp.initialize{more}'
    for number, edit in enumerate(raised.edits):
        yield f"or instead, {edit}" if raised.choices and not number else edit


def find_base(raised: RaisedRecord, run: RunRecord | None) -> str:
    """Return the name of the list that a new list extends: the last list of the run, or else the one in the record."""
    if run is not None and run.lists:
        return run.lists[-1]
    return raised.list_name
