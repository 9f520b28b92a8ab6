"""`explain_raised`: makes the record of an exception that dtypes, or the use of a GradScaler, explain."""

import ast
import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..config import op_names
from ..dtypes import CASTABLE, LOW_DTYPES
from ..reporting import find_rank
from ..session import Session, current
from .dtype_trials import Lows, Trial, Trials, is_of_dtypes, runs_under_autocast, try_dtypes
from .edits import CallSite, Spelling, choose_edits
from .expressions import Source, find_expression, read_source
from .failing_call import FailingCall, Level, Levels, find_failing_calls, name_of_call
from .fault_record import CASTS, Phase
from .folding import OpCall
from .module_casts import casts
from .naming import name_tensors
from .observe import Observer
from .origins import Made
from .placing import name_all
from .raised_record import Operand, OperandOrigin, RaisedCause, RaisedRecord
from .rules import short
from .scaler_errors import ScalerErrors, advise_optimizer, describe_dtypes, find_optimizer, is_of_own_optimizer
from .sites import is_of_user
from .spellings import find_texts
from .tensors import storage_of

_FOLLOWED_RULES = ("promote", "sequence_promote", "match_self")
"""Rules under which the result takes the dtype of an argument."""

_MAX_MESSAGE = 500
_MAX_OPERANDS = 6
_ENGINE = "torch/autograd/graph.py"  # the file of a frame in each backward pass
_CHECKPOINT = "torch/utils/checkpoint.py"  # the file of a frame in each recomputation


@dataclass(frozen=True)
class Scene:
    """The state of the run when an exception has left the script.

    Attributes:
        session: the session of the run.
        observer: knows the ops that have run.
        scalers: knows the calls that GradScaler has refused.
        step: the number of the step.
    """

    session: Session
    observer: Observer
    scalers: ScalerErrors
    step: int

    @property
    def has_lists(self) -> bool:
        """Whether lists of ops act at the opt_level of the session."""
        return self.session.casts is not None

    @property
    def low(self) -> torch.dtype | None:
        """The 16-bit dtype of the run; None without one."""
        with contextlib.suppress(Exception):  # a script without autocast has none
            return self.session.low_here()
        return None

    @property
    def low_name(self) -> str:
        """The name of the shipped list for the 16-bit dtype of the run; "float16" without such a dtype."""
        return "bfloat16" if self.low is torch.bfloat16 else "float16"


def explain_raised(error: BaseException, scene: Scene) -> RaisedRecord | None:
    """Return the record of an exception; None if neither dtypes nor the use of a GradScaler explain it.

    Runs the calls again that may have raised the exception. If they do not explain it, looks at the exception that led
    the script to raise this one, and so on.
    """
    seen: set[int] = set()
    reason: BaseException | None = error
    while reason is not None and id(reason) not in seen:
        seen.add(id(reason))
        with contextlib.suppress(Exception):  # a report must not replace the exception that it is about
            record = _explain(reason, scene)
            if record is not None:
                return record
        reason = _find_reason(reason)
    return None


def _find_reason(error: BaseException) -> BaseException | None:
    """Return the exception that led to `error`: its `__cause__`, or one that the script had caught. None without one.

    A caught exception counts only if `error` comes from a `raise` in the same function.
    """
    caught = error.__context__
    if error.__cause__ is not None or caught is None:
        return error.__cause__
    levels = Levels(error).all
    if caught.__traceback__ is None or not levels:
        return None
    last = levels[-1]
    # The traceback of an exception begins at the function that has caught it.
    if last.frame is not caught.__traceback__.tb_frame:
        return None
    expression = find_expression(last.frame, last.index)
    return caught if expression is not None and isinstance(expression[0], ast.Raise) else None


def _explain(error: BaseException, scene: Scene) -> RaisedRecord | None:
    """Return the record of an exception; None if nothing explains it. Do not look at the exceptions that led to it."""
    if not is_of_dtypes(error):
        return None
    levels = Levels(error)
    # Without amp.initialize, casts happen in blocks of torch.autocast, and the exception has ended these.
    has_no_casts = scene.session.gives_way and not torch.is_autocast_enabled(scene.session.device_type)
    with contextlib.nullcontext() if has_no_casts else current.without_casts():
        empty = _make_record(error, levels, scene)
        record = scene.scalers.explain(error, levels, empty, scene.session)
        if record is not None:
            return record
        for call in find_failing_calls(levels, scene.observer):
            record = _explain_call(_Case(error, levels, scene, call), empty)
            if record is not None:
                return record
    return None


def _make_record(error: BaseException, levels: Levels, scene: Scene) -> RaisedRecord:
    """Return a record with the facts that every exception has. The `cause` in it is only a placeholder."""
    inner, own = levels.innermost, levels.own
    site = "" if inner is None else inner.place
    return RaisedRecord(
        error=type(error).__name__,
        message=" ".join(str(error).split())[:_MAX_MESSAGE],
        cause=RaisedCause.MIXED,
        step=scene.step,
        phase=_find_phase(levels),
        op="",
        module=levels.find_module(scene.observer) or None,
        site=site or None,
        called_from=own.place if own is not None and inner is not None and inner.is_in_package else None,
        list_name=scene.low_name,
        rank=find_rank() or 0,
    )


def _find_phase(levels: Levels) -> Phase:
    """Return the phase of the op that raised: forward, backward or recompute. `_explain_call` finds optimizer steps."""
    inside = _find_inside_backward(levels)
    if not inside:
        return Phase.FORWARD
    return Phase.RECOMPUTE if any(level.file.endswith(_CHECKPOINT) for level in inside) else Phase.BACKWARD


def _find_inside_backward(levels: Levels) -> list[Level]:
    """Return the frames inside of a backward pass; [] if none runs."""
    start = next((place for place, level in enumerate(levels.all) if level.file.endswith(_ENGINE)), len(levels.all))
    return levels.all[start:]


# ---- operands --------------------------------------------------------------------------------------------------------


class Operands:
    """Finds what gave tensors their dtypes.

    Args:
        levels: the frames of the exception.
        failing: the listed call that raised; None for a call on no list.
    """

    def __init__(self, levels: Levels, session: Session, observer: Observer, failing: OpCall | None) -> None:
        self._levels, self._session, self._observer, self._failing = levels, session, observer, failing
        self._weights = {storage_of(tensor): (name, tensor) for name, tensor in name_tensors(session.models())}
        self._weights.pop(0, None)

    @property
    def low(self) -> torch.dtype | None:
        """The 16-bit dtype that at least half of all parameters have; None without one."""
        weights = [weight.dtype for model in self._session.models() for weight in model.parameters()]
        kinds = [dtype for dtype in LOW_DTYPES if 2 * weights.count(dtype) >= len(weights) > 0]
        return next(iter(kinds), None)

    def is_weight(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a Parameter, or shares memory with a parameter, buffer or gradient of a model."""
        return isinstance(tensor, nn.Parameter) or storage_of(tensor) in self._weights

    def name_weight(self, tensor: Tensor) -> str:
        """Return the name of a parameter, buffer or gradient of a model; "" for another tensor."""
        return self._weights.get(storage_of(tensor), ("", None))[0]

    def describe(self, name: str, tensor: Tensor, *, is_stand_in: bool = False) -> Operand:
        """Return the operand for a tensor. `is_stand_in`: see `FailingCall.stand_in`."""
        storage, dtype = storage_of(tensor), short(tensor.dtype)
        made = self._observer.origins.last if is_stand_in else self._observer.origins.find(tensor)
        while made is not None and made.parent is not None and made.call is self._failing:
            made = made.parent  # a cast within the call that raised: look at the argument of the call
        if made is None or storage in self._weights or casts.find(tensor):
            return self._describe_outside(name, dtype, storage, tensor)
        root = made.find_root()
        if root.call is None and made.call is not None:
            return self._describe_taken_over(name, dtype, made.call, root)
        if root.call is None:
            return self._describe_outside(name, dtype, root.storage, None)
        return self._describe_call(name, dtype, root.call, root)

    def _describe_outside(self, name: str, dtype: str, storage: int, tensor: Tensor | None) -> Operand:
        """Return the operand for a tensor that no known op made. If `tensor` is None, `storage` identifies it."""
        weight = self._weights.get(storage)
        if weight is not None:
            return self.describe_weight(name, *weight)
        variable, site = self._levels.find_variable(storage, tensor)
        rule = "" if tensor is None else casts.find(tensor)
        if rule:
            return Operand(name, dtype, OperandOrigin.WEIGHT, name, "", "", rule)
        origin = OperandOrigin.INPUT if variable else OperandOrigin.UNKNOWN
        return Operand(name, dtype, origin, variable, "", site)

    def _describe_taken_over(self, name: str, dtype: str, call: OpCall, root: Made) -> Operand:
        """Return the operand for the result of an op that took the dtype of an input. No known op made this input."""
        source = self._describe_outside("", dtype, root.storage, None)
        rule = ""
        if source.made_by:
            rule = f"in the dtype of {source.made_by}"
            rule += f", cast by {source.rule or source.entry}" if source.rule.startswith(".") or source.entry else ""
        op = call.op.removeprefix("aten.")
        return Operand(name, dtype, OperandOrigin.OP, op, call.module, call.site.place, rule)

    def describe_weight(self, name: str, weight_name: str, weight: Tensor) -> Operand:
        """Return the operand for a parameter, a buffer or a gradient of the models."""
        rule, entry, dtype = casts.find(weight), "", short(weight.dtype)
        if weight.dtype in LOW_DTYPES and self._session.policy.cast_model_type is not None:
            rule, entry = "cast_model_type", self._session.policy.opt_level or ""
        return Operand(name, dtype, OperandOrigin.WEIGHT, weight_name, "", "", rule, entry)

    def _describe_call(self, name: str, dtype: str, call: OpCall, made: Made) -> Operand:
        """Return the operand for a tensor whose dtype a known op decided."""
        op = call.op.removeprefix("aten.")
        kind = OperandOrigin.OP
        if op in CASTS:
            kind, op = OperandOrigin.CAST, "cast"
        if call.rule and (call.target is made.dtype or call.rule not in _FOLLOWED_RULES):
            kind = OperandOrigin.RULE
        if call.phase == "backward":
            op = f"the backward pass of {op}"
        return Operand(name, dtype, kind, op, call.module, call.site.place, call.rule, call.entry)


# ---- a call ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Case:
    """A call that may have raised an exception, with the frames and the state of the run."""

    error: BaseException
    levels: Levels
    scene: Scene
    call: FailingCall

    @property
    def tensors(self) -> list[Tensor]:
        """The operands."""
        return [tensor for _, tensor in self.call.operands]


def _explain_call(case: _Case, empty: RaisedRecord) -> RaisedRecord | None:
    """Return the record of a call that raises again, and works in other dtypes; None for any other call."""
    # code of the user in a backward pass is a hook or a recomputation, and no gradient of a forward op
    if any(level.is_of_user for level in _find_inside_backward(case.levels)):
        case = replace(case, call=replace(case.call, forward=None))
    call, levels, scene = case.call, case.levels, case.scene
    covered = levels.find_covered()
    operands = Operands(levels, scene.session, scene.observer, covered)
    weights = [operands.is_weight(tensor) for tensor in case.tensors]
    trials = try_dtypes(call, case.error, weights, Lows(operands.low, scene.low or torch.float16))
    if trials is None:
        return None
    forward = call.forward
    if call.is_check and levels.caller is not None:  # the operands usually come from the caller, so its line is edited
        levels = levels.caller
        case, empty = replace(case, levels=levels), _make_record(case.error, levels, scene)
    if forward is not None:
        texts = _find_texts_of_forward(case, forward)
    else:
        texts = find_texts(levels, case.tensors, weights, scene.observer.origins)
    names = [
        text or operands.name_weight(tensor) or name for text, (name, tensor) in zip(texts, call.operands, strict=True)
    ]
    described = [
        operands.describe(name, tensor, is_stand_in=tensor is call.stand_in)
        for name, tensor in zip(names, case.tensors, strict=True)
    ]
    listed = _name_for_lists(levels, call, covered)
    record = replace(
        empty,
        cause=RaisedCause.MIXED if trials.is_mixed else RaisedCause.UNSUPPORTED,
        op=listed or name_of_call(levels) or call.name,
        operands=tuple(_keep_floating(described, case.tensors)),
    )
    if forward is not None:
        record = replace(
            record,
            phase=Phase.BACKWARD,
            module=forward.module or None,
            site=forward.site.place or None,
            raised_at=empty.site,
        )
    optimizer = find_optimizer(levels)
    if optimizer is not None:
        record = replace(record, phase=Phase.STEP, details=tuple(describe_dtypes(optimizer, scene.session)))
        if not is_of_own_optimizer(levels):
            return replace(record, operands=(), edits=(advise_optimizer(optimizer, scene.observer.origins),))
    region = _find_region(case, operands.low) if not _is_reached(case, covered) else ""
    return replace(
        record,
        entries=tuple(_choose_entries(case, trials, listed, covered)),
        regions=tuple(_choose_regions(record, case, trials, covered)),
        edits=tuple(_choose_edits(record, case, trials, Spelling(names, texts, weights), region)),
    )


def _choose_edits(record: RaisedRecord, case: _Case, trials: Trials, spelling: Spelling, region: str) -> Iterator[str]:
    """Yield the edits of the script that repair the call. If a package made the call, and a line of
    the user's own code passed an operand to it, the edits are for that line.
    """
    levels, weights = case.levels, spelling.weights
    # for an op of the backward pass, the line to edit is in the forward pass, and not in a frame of the traceback
    level = levels.innermost if case.call.forward is None else None
    place = CallSite(record.site or "", record.called_from, level, region, record.module or "")
    if record.called_from is not None:
        own_texts = find_texts(levels.down_to_own(), case.tensors, weights, case.scene.observer.origins)
        if any(text and not is_weight for text, is_weight in zip(own_texts, weights, strict=True)):
            spelling = replace(spelling, texts=own_texts)
            place = replace(place, site=record.called_from, called_from=None, level=levels.own)
    yield from choose_edits(case.call, trials, spelling, place)


def _find_region(case: _Case, low: torch.dtype | None) -> str:
    """Return the edit that calls a 16-bit model under torch.autocast. Return "" if it would not help, and in a session
    of `amp.initialize`.
    """
    outside, session = case.levels.find_call_of_model(), case.scene.session
    if low is None or outside is None or not session.gives_way:
        return ""
    if not runs_under_autocast(case.call, session.device_type, low):
        return ""
    return f'{outside.place}: with torch.autocast("{session.device_type}", dtype={low}): around this line'


def _keep_floating(described: Sequence[Operand], tensors: Sequence[Tensor]) -> Iterator[Operand]:
    """Yield each floating operand once. Of more than six, only the first of each dtype, origin and rule."""
    kept = [operand for operand, tensor in zip(described, tensors, strict=True) if tensor.is_floating_point()]
    if len(kept) > _MAX_OPERANDS:
        firsts: dict[tuple[str, str, str], Operand] = {}
        for operand in kept:
            firsts.setdefault((operand.dtype, operand.origin, operand.rule), operand)
        kept = list(firsts.values())
    yield from dict.fromkeys(kept)


def _find_texts_of_forward(case: _Case, forward: OpCall) -> list[str]:
    """Return how the line of the forward pass writes each operand of its backward op; "" where that is not known."""
    first, second = _find_arguments(case, forward)
    by_name = {"self": first, "input": first, "target": second, "weight": second, "mat2": second, "mat1": first}
    return [by_name.get(name, "") for name, _ in case.call.operands]


def _find_arguments(case: _Case, forward: OpCall) -> tuple[str, str]:
    """Return how the line of a forward pass writes its first two arguments; "" where that is not known."""
    file, _, line = forward.site.place.rpartition(":")
    source = _find_source(case.levels, file)
    calls = [] if source is None or not line.isdecimal() else source.calls_at(int(line))
    # A module such as nn.HuberLoss has another name than its op. Then take the line's only call with several arguments.
    named = [call for call in calls if ast.unparse(call.func).rpartition(".")[2] == forward.op.rpartition(".")[2]]
    binary = [call for call in calls if len(call.args) > 1]
    inside = {part for call in binary for part in ast.walk(call) if part is not call}
    binary = [call for call in binary if call not in inside]
    if source is not None and (named or len(binary) == 1):
        arguments = (named or binary)[0].args
        if not any(isinstance(argument, ast.Starred) for argument in arguments):  # `*pair` is several operands
            first, second, *_ = [*map(source.spell, arguments), "", ""]
            return first, second
    return "", ""


def _find_source(levels: Levels, name: str) -> Source | None:
    """Return the source of the user's file with this name (without a folder).

    A file in the traceback comes first, then the file of an imported module. Return None if several modules have such
    a file, or none has.
    """
    for level in levels.of_user:
        if level.place.rpartition(":")[0] == name:
            return read_source(level.file, level.frame.f_globals)
    files = [getattr(module, "__file__", None) for module in tuple(sys.modules.values())]
    same = [file for file in files if file and os.path.basename(file) == name and is_of_user(file)]
    return read_source(same[0]) if len(same) == 1 else None


# ---- remedies --------------------------------------------------------------------------------------------------------


def _name_for_lists(levels: Levels, call: FailingCall, covered: OpCall | None) -> str:
    """Return the name that lists have for the call; "" if no list can name it."""
    forward = call.forward or covered
    candidates = [name for name, is_torch in levels.find_names() if is_torch]
    if forward is not None:
        candidates = [forward.op.removeprefix("aten."), forward.listed]
    if call.forward is None:
        candidates.append(call.name)
    for name in candidates:
        bare = name.rpartition(".")[2]
        if bare and op_names.find_known_spellings(bare):
            return bare
    return ""


def _is_reached(case: _Case, covered: OpCall | None) -> bool:
    """Return whether lists act where the call ran. If that is not known, return whether they act at the latest op."""
    call, last = case.call, case.scene.observer.origins.last
    if call.forward is not None:
        return call.forward.is_reached
    if covered is not None:
        return covered.is_reached
    if call.is_reached is not None:
        return call.is_reached
    return last is not None and last.call is not None and last.call.is_reached


def _choose_entries(case: _Case, trials: Trials, listed: str, covered: OpCall | None) -> Iterator[str]:
    """Yield the line of a list that repairs the call, if there is one."""
    kinds = {tensor.dtype for tensor in case.tensors if tensor.is_floating_point()}
    if not listed or not case.scene.has_lists or not _is_reached(case, covered) or not kinds <= set(CASTABLE):
        return
    # under `promote`, an op in place casts its other arguments to the dtype of the first
    promoting = Trial.WIDEST if case.call.written is None else Trial.WRITTEN
    if case.call.has_out:
        return  # no rule acts on a call with out=
    if trials.is_mixed and promoting in trials.targets:
        yield f"promote: [{listed}]"
    elif Trial.FLOAT32 in trials.targets and case.call.written is None:
        yield f"blacklist: [{listed}]"


def _choose_regions(record: RaisedRecord, case: _Case, trials: Trials, covered: OpCall | None) -> Iterator[str]:
    """Yield the module rule that repairs the call, if it ran in a submodule and there is one."""
    session = case.scene.session
    casts_model = session.policy.cast_model_type is not None
    own_name, _ = name_all(session.models()).get(record.module or "", ("", None))
    if not own_name or not (casts_model or _is_reached(case, covered)):
        return
    for trial in (Trial.WIDEST, Trial.FLOAT32):
        if torch.float32 in trials.targets.get(trial, ()):
            yield f"modules: [{{match: {json.dumps(own_name)}, run: float32}}]"
            return
