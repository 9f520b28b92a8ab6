"""A quiet loss as text: the call, the cause with how much is kept, the tensors, and the remedy.

In a *quiet loss*, 16 bits make values wrong, and all values stay finite.
"""

from collections.abc import Callable, Iterator, Sequence

from ..config import levels
from ..tables import align, count_of
from .quiet_record import GRADIENTS, WEIGHT_DECAY, WEIGHTS, QuietCause, QuietRecord
from .records import RunRecord
from .remedies import Remedy, RemedyKind, format_entries
from .short_dtypes import spell_out


def format_quiet(lost: QuietRecord, run: RunRecord | None) -> str:
    """Return a quiet loss as text. Without `run`, the remedy is for a script that uses `amp.initialize`."""
    rows = [(f"  {name}", text) for name, text in describe_quiet(lost, run)]
    return "\n".join([entitle_quiet(lost), *align(rows)])


def entitle_quiet(lost: QuietRecord) -> str:
    """Return the first line of a quiet loss: the steps in which it was seen."""
    steps = f"in {lost.steps} of {count_of(lost.looked, 'step')}"
    if lost.steps == lost.looked:
        steps = f"in each of {count_of(lost.looked, 'step')}" if lost.looked > 1 else "in this step"
    title = f"step {lost.step}: lost quietly in {spell_out(lost.dtype or '')}, {steps}"
    if lost.rank:
        return f"rank {lost.rank}, {title}"
    return title


def describe_quiet(lost: QuietRecord, run: RunRecord | None) -> Iterator[tuple[str, str]]:
    """Yield the lines of a quiet loss, each with its name, or "" if it continues the line before."""
    yield "call", _describe_call(lost)
    yield "cause", f"{lost.cause}: {_CAUSES[lost.cause](lost)}"
    if lost.tensor:
        more = f", and {lost.tensors - 1} more of {lost.of}" if lost.tensors > 1 else ""
        yield "tensor", f"{lost.tensor}{more}"
    name = "try"
    for line in _REMEDIES[lost.cause](lost, run):
        yield name, line
        name = ""


def _describe_call(lost: QuietRecord) -> str:
    call = "cast" if lost.op == "_to_copy" else lost.op or "a call"
    if lost.role and lost.role != GRADIENTS:
        call = f"{lost.op}.step()"
    if lost.cause is QuietCause.ZERO_GRADIENTS:
        call = f"the backward pass of {call}"
    module = f", module {lost.module}" if lost.module else ""
    return f"{call} at {lost.site or 'no line of the script'}{module}"


# ---- causes ----------------------------------------------------------------------------------------------------------


def _percent(share: float | None) -> str:
    if share is None:
        return "an unknown part"
    if 0 < share < 0.001:
        return "less than 0.1%"
    return f"{share:.1%}".replace(".0%", "%")


def _describe_update(lost: QuietRecord) -> str:
    low = spell_out(lost.dtype or "")
    if lost.role == WEIGHT_DECAY:
        return f"weight decay changes no element: 1 - lr * weight_decay is 1 in {low}"
    subject = {"": "a tensor that outlives the step", GRADIENTS: "gradients that backward passes add up"}
    if lost.is_temporary:
        subject[""] = "a sum within this call"
    of = f"of {subject.get(lost.role or '', lost.role)}, "
    if lost.kept == 0:
        return f"{of}no element changes: each change is at most half the distance to the next {low} number"
    return f"{of}{_percent(lost.kept)} of the elements change, and the change is off by {_percent(lost.error)}"


def _describe_collapsed(lost: QuietRecord) -> str:
    if lost.error is None:
        return f"{_percent(lost.kept)} of the evenly spaced values stay distinct"
    used = f" at {lost.used}" if lost.used else ""
    return f"rounded before an op that needs all digits: its result{used} is off by {_percent(lost.error)}"


def _describe_cancelled(lost: QuietRecord) -> str:
    if lost.error is not None and lost.error < 1:
        return f"made inexact by the rounding of the values it is made from: off by {_percent(lost.error)}"
    return f"smaller than the rounding of the values it is made from: off by {_percent(lost.error)}"


def _describe_zero(lost: QuietRecord) -> str:
    zero = None if lost.kept is None else 1 - lost.kept
    return f"{_percent(zero)} of the gradients are zero; most gradients of this call are zero, but not in float32"


def _describe_stale(lost: QuietRecord) -> str:
    return "the weight has changed since this copy of it was made"


_CAUSES: dict[QuietCause, Callable[[QuietRecord], str]] = {
    QuietCause.LOST_UPDATE: _describe_update,
    QuietCause.COLLAPSED: _describe_collapsed,
    QuietCause.CANCELLED: _describe_cancelled,
    QuietCause.ZERO_GRADIENTS: _describe_zero,
    QuietCause.STALE_COPY: _describe_stale,
}


# ---- remedies --------------------------------------------------------------------------------------------------------


def find_level(lost: QuietRecord, run: RunRecord | None) -> str:
    """Return the opt_level whose float32 masters keep what a step or a sum of gradients loses in 16 bits.

    Return "" for other losses, and for a script without `initialize`.
    """
    if not lost.role or _is_native(run):
        return ""
    return levels.find_master_level(spell_out(lost.dtype or "")).name


def find_quiet_remedy(lost: Sequence[QuietRecord], run: RunRecord | None) -> Remedy:
    """Return the remedy that runs the modules of quiet losses in float32. It has no regions if no such module is known.

    The list extends the last list of the run, or else a shipped one.
    """
    low = lost[0].dtype if run is None else run.low
    extends = run.lists[-1] if run is not None and run.lists else "bfloat16" if low == "bf16" else "float16"
    regions = dict.fromkeys(region for each in lost for region in each.regions)
    return Remedy(RemedyKind.LIST, extends, tuple(regions))


def _is_native(run: RunRecord | None) -> bool:
    return run is not None and run.is_native


def _repair_update(lost: QuietRecord, run: RunRecord | None) -> Iterator[str]:
    low = spell_out(lost.dtype or "")
    level = levels.find_master_level(low).name
    if not lost.role:
        if lost.is_temporary:
            yield (
                "float32 for the sum: dtype=torch.float32 for the tensor that this call adds to, and .float() on the"
                " values that it adds; or .float() on the tensor that gives both their dtype"
            )
        elif lost.op and "batch_norm" in lost.op:
            yield f"float32 for the module: .float() on {lost.module or 'it'} after the cast of the model to {low},"
            yield f'or opt_level="{level}", which keeps batchnorm in float32'
        else:
            yield f"float32 for this tensor: no cast of it to {low}, or .float() on it after the cast of its module"
            if lost.tensor:  # of a model
                yield "and if it is a weight: inputs of its dtype, by .float() on them, or the call in torch.autocast"
        return
    if lost.role not in (WEIGHTS, WEIGHT_DECAY, GRADIENTS):
        yield f"float32 for {lost.role}; torch's optimizers give their states the dtype of the weights, so:"
    if not _is_native(run):
        yield f'opt_level="{level}", which updates float32 masters'
        return
    yield f"float32 weights: no cast of the model to {low}, but its forward and the loss in torch.autocast;"
    yield f'or amp.initialize(model, optimizer, opt_level="{level}"), which updates float32 masters'


def _repair_collapsed(lost: QuietRecord, run: RunRecord | None) -> Iterator[str]:
    yield f"float32 at {lost.site or 'its line'}, until the values have become sines, cosines, indices or masks"
    if lost.regions:
        (line,) = format_entries(find_quiet_remedy([lost], run))
        yield f"or in a list of your own: {line}"


def _repair_cancelled(lost: QuietRecord, run: RunRecord | None) -> Iterator[str]:
    yield (
        f"float32 for the values that {lost.site or 'its line'} reads, from where they are computed: .float() on"
        " the logits before log_softmax, or on the values before their mean or square; at the difference itself it"
        " is too late"
    )


def _repair_zero(lost: QuietRecord, run: RunRecord | None) -> Iterator[str]:
    if _is_native(run):
        yield "a torch.amp.GradScaler; if there is one, a larger scale; or bfloat16, which needs no loss scale"
    else:
        yield 'a larger loss scale, such as loss_scale="dynamic"; or bfloat16, which needs none'


def _repair_stale(lost: QuietRecord, run: RunRecord | None) -> Iterator[str]:
    yield (
        "torch.autocast keeps copies of weights until its region ends: enter it in each step, around the forward and"
        " the loss alone; or torch.autocast(..., cache_enabled=False)"
    )


_REMEDIES: dict[QuietCause, Callable[[QuietRecord, RunRecord | None], Iterator[str]]] = {
    QuietCause.LOST_UPDATE: _repair_update,
    QuietCause.COLLAPSED: _repair_collapsed,
    QuietCause.CANCELLED: _repair_cancelled,
    QuietCause.ZERO_GRADIENTS: _repair_zero,
    QuietCause.STALE_COPY: _repair_stale,
}
