"""`explain_raised`: the record of an exception of the script, if dtypes or the use of a GradScaler are its reason."""

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
from .edits import Script, Spelling, choose_edits
from .expressions import Source, find_expression, read_source
from .failing_call import FailingCall, Levels, find_failing_calls, name_of_call
from .fault_record import CASTS, Phase
from .folding import OpCall
from .module_casts import casts
from .naming import name_tensors
from .observe import Observer
from .origins import Made
from .placing import name_all
from .raised_record import Operand, OperandOrigin, RaisedCause, RaisedRecord
from .rules import short
from .scaler_errors import ScalerErrors, describe_optimizer
from .sites import is_of_user
from .spellings import find_texts
from .tensors import storage_of

_FOLLOWED_RULES = ("promote", "sequence_promote", "match_self")
_MAX_MESSAGE = 500
_MAX_OPERANDS = 6


@dataclass(frozen=True)
class Scene:
    """What is known when an exception has left the script.

    Attributes:
        session, observer, scalers: of the run.
        step: the number of the step.
    """

    session: Session
    observer: Observer
    scalers: ScalerErrors
    step: int

    @property
    def has_lists(self) -> bool:
        """Whether lists of ops act at this level."""
        return self.session.casts is not None

    @property
    def low(self) -> torch.dtype | None:
        """The low dtype of the run; None without one."""
        with contextlib.suppress(Exception):  # a script without autocast has none
            return self.session.low_here()
        return None

    @property
    def low_name(self) -> str:
        """The name of the shipped list for the low dtype of the run."""
        return "bfloat16" if self.low is torch.bfloat16 else "float16"


def explain_raised(error: BaseException, scene: Scene) -> RaisedRecord | None:
    """Return the record of an exception; None if its reason is another one, or is not known.

    Calls that raised are run again. If the script raised an exception for another one, that one is looked at next.
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
    """Return the exception for which the script raised another one; None if it caught that one and went on."""
    caught = error.__context__
    if error.__cause__ is not None or caught is None:
        return error.__cause__
    handler, last = caught.__traceback__, Levels(error).all[-1:]
    if handler is None or not last or last[0].frame is not handler.tb_frame:
        return None
    found = find_expression(last[0].frame, last[0].index)
    return caught if found is not None and isinstance(found[0], ast.Raise) else None


def _explain(error: BaseException, scene: Scene) -> RaisedRecord | None:
    if not is_of_dtypes(error):
        return None
    levels = Levels(error)
    # Its regions have ended, so a script with torch.autocast runs without casts already.
    is_plain = scene.session.gives_way and not torch.is_autocast_enabled(scene.session.device_type)
    with contextlib.nullcontext() if is_plain else current.without_casts():
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
    """Return a record with the facts that every exception has."""
    inner, own = levels.innermost, levels.own
    site = "" if inner is None else inner.place
    return RaisedRecord(
        error=type(error).__name__,
        message=" ".join(str(error).split())[:_MAX_MESSAGE],
        cause=RaisedCause.MIXED,
        step=scene.step,
        phase=Phase.FORWARD,
        op="",
        module=levels.find_module(scene.observer) or None,
        site=site or None,
        called_from=own.place if own is not None and inner is not None and inner.is_in_package else None,
        list_name=scene.low_name,
        rank=find_rank() or 0,
    )


# ---- operands --------------------------------------------------------------------------------------------------------


class Operands:
    """Finds what gave tensors their dtypes."""

    def __init__(self, levels: Levels, session: Session, observer: Observer, failing: OpCall | None) -> None:
        self._levels, self._session, self._observer, self._failing = levels, session, observer, failing
        self._weights = {storage_of(tensor): (name, tensor) for name, tensor in name_tensors(session.models())}
        self._weights.pop(0, None)

    @property
    def low(self) -> torch.dtype | None:
        """The dtype of models in 16 bits, of which at least half of the parameters are; None for other models."""
        weights = [weight.dtype for model in self._session.models() for weight in model.parameters()]
        kinds = [dtype for dtype in LOW_DTYPES if 2 * weights.count(dtype) >= len(weights) > 0]
        return next(iter(kinds), None)

    def is_weight(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a parameter or buffer of a model, or a view of one."""
        return isinstance(tensor, nn.Parameter) or storage_of(tensor) in self._weights

    def name_weight(self, tensor: Tensor) -> str:
        """Return the name of a parameter or buffer; "" for another tensor."""
        return self._weights.get(storage_of(tensor), ("", None))[0]

    def describe(self, name: str, tensor: Tensor, *, is_stand_in: bool = False) -> Operand:
        """Return the operand for a tensor."""
        storage, dtype = storage_of(tensor), short(tensor.dtype)
        made = self._observer.origins.last if is_stand_in else self._observer.origins.find(tensor)
        while made is not None and made.parent is not None and made.call is self._failing:
            made = made.parent  # the call that raised has copied it
        if made is None or storage in self._weights or casts.find(tensor):
            return self._describe_outside(name, dtype, storage, tensor)
        root = made.find_root()
        if root.call is None and made.call is not None:
            return self._describe_taken_over(name, dtype, made.call, root)
        if root.call is None:
            return self._describe_outside(name, dtype, root.storage, None)
        return self._describe_call(name, dtype, root.call, root)

    def _describe_outside(self, name: str, dtype: str, storage: int, tensor: Tensor | None) -> Operand:
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
        """Return the operand for a tensor that an op made in the dtype of a tensor from outside."""
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
    """A call that raised an exception."""

    error: BaseException
    levels: Levels
    scene: Scene
    call: FailingCall

    @property
    def tensors(self) -> list[Tensor]:
        """The operands."""
        return [tensor for _, tensor in self.call.operands]


def _explain_call(case: _Case, empty: RaisedRecord) -> RaisedRecord | None:
    """Return the record of a call that works in other dtypes."""
    call, levels, scene = case.call, case.levels, case.scene
    covered = levels.find_covered()
    operands = Operands(levels, scene.session, scene.observer, covered)
    weights = [operands.is_weight(tensor) for tensor in case.tensors]
    trials = try_dtypes(call, case.error, weights, Lows(operands.low, scene.low or torch.float16))
    if trials is None:
        return None
    forward = call.forward
    if call.is_check and levels.caller is not None:  # the line that passed the operands is the one to change
        levels = levels.caller
        case, empty = replace(case, levels=levels), _make_record(case.error, levels, scene)
    texts = (
        _find_texts_of_forward(case, forward)
        if forward is not None
        else find_texts(levels, case.tensors, weights, scene.observer.origins)
    )
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
    described_optimizer = describe_optimizer(levels, scene.session)
    if described_optimizer is not None:
        lines, edit = described_optimizer
        return replace(record, phase=Phase.STEP, operands=(), details=tuple(lines), edits=(edit,))
    entries = tuple(_choose_entries(case, trials, listed, covered))
    region = _find_region(case, operands.low) if not _is_reached(case, covered) else ""
    script = Script(record.site or "", record.called_from, levels.innermost, region, record.module or "")
    if record.called_from is not None:
        own_texts = find_texts(levels.down_to_own(), case.tensors, weights, scene.observer.origins)
        if any(text and not is_weight for text, is_weight in zip(own_texts, weights, strict=True)):
            texts, script = own_texts, replace(script, site=record.called_from, called_from=None, level=levels.own)
    edits = tuple(choose_edits(call, trials, Spelling(names, texts, weights), script))
    return replace(record, entries=entries, regions=tuple(_choose_regions(record, case, trials, covered)), edits=edits)


def _find_region(case: _Case, low: torch.dtype | None) -> str:
    """Return the edit that runs the model under torch.autocast, if the call works there; else ""."""
    outside, session = case.levels.find_call_of_model(), case.scene.session
    if low is None or outside is None or not session.gives_way:
        return ""
    if not runs_under_autocast(case.call, session.device_type, low):
        return ""
    return f'{outside.place}: with torch.autocast("{session.device_type}", dtype={low}): around this line'


def _keep_floating(described: Sequence[Operand], tensors: Sequence[Tensor]) -> Iterator[Operand]:
    """Yield the floating operands: all, or of many the first of each dtype and origin."""
    kept = [operand for operand, tensor in zip(described, tensors, strict=True) if tensor.is_floating_point()]
    if len(kept) > _MAX_OPERANDS:
        kept = list({(operand.dtype, operand.origin, operand.rule): operand for operand in reversed(kept)}.values())[
            ::-1
        ]
    yield from dict.fromkeys(kept)


def _find_texts_of_forward(case: _Case, forward: OpCall) -> list[str]:
    """Return how the line of the forward pass writes the arguments that its backward op got."""
    first, second = _find_arguments(case, forward)
    by_name = {"self": first, "input": first, "target": second, "weight": second, "mat2": second, "mat1": first}
    return [by_name.get(name, "") for name, _ in case.call.operands]


def _find_arguments(case: _Case, forward: OpCall) -> tuple[str, str]:
    """Return how the line of a forward pass writes its first two arguments; "" where that is not known."""
    file, _, line = forward.site.place.rpartition(":")
    source = _find_source(case.levels, file)
    calls = [] if source is None or not line.isdecimal() else source.calls_at(int(line))
    # A module such as nn.HuberLoss has any name in the script, and its call is the one with several arguments.
    named = [call for call in calls if ast.unparse(call.func).rpartition(".")[2] == forward.op.rpartition(".")[2]]
    binary = [call for call in calls if len(call.args) > 1]
    inside = {part for call in binary for part in ast.walk(call) if part is not call}
    binary = [call for call in binary if call not in inside]
    if source is not None and (named or len(binary) == 1):
        first, second, *_ = [*map(source.spell, (named or binary)[0].args), "", ""]
        return first, second
    return "", ""


def _find_source(levels: Levels, name: str) -> Source | None:
    """Return the syntax tree of a file of the script, by its name without a folder."""
    for level in levels.of_user:
        if level.place.rpartition(":")[0] == name:
            return read_source(level.file, level.frame.f_globals)
    files = [getattr(module, "__file__", None) for module in tuple(sys.modules.values())]
    same = [file for file in files if file and os.path.basename(file) == name and is_of_user(file)]
    return read_source(same[0]) if len(same) == 1 else None


# ---- remedies --------------------------------------------------------------------------------------------------------


def _name_for_lists(levels: Levels, call: FailingCall, covered: OpCall | None) -> str:
    """Return the name of the call in lists; "" if no list can name it."""
    forward = call.forward or covered
    candidates = [name for name, is_torch in levels.find_names() if is_torch]
    if forward is not None:
        candidates = [forward.op.removeprefix("aten."), forward.listed]
    if call.forward is None:
        candidates.append(call.name)
    for name in candidates:
        bare = name.rpartition(".")[2]
        if bare and op_names.find_or_none(bare):
            return bare
    return ""


def _is_reached(case: _Case, covered: OpCall | None) -> bool:
    call, last = case.call, case.scene.observer.origins.last
    if call.forward is not None:
        return call.forward.is_reached
    if covered is not None:
        return covered.is_reached
    if call.is_reached is not None:
        return call.is_reached
    return last is not None and last.call is not None and last.call.is_reached


def _choose_entries(case: _Case, trials: Trials, listed: str, covered: OpCall | None) -> Iterator[str]:
    """Yield the lines of lists that repair the call."""
    kinds = {tensor.dtype for tensor in case.tensors if tensor.is_floating_point()}
    if not listed or not case.scene.has_lists or not _is_reached(case, covered) or not kinds <= set(CASTABLE):
        return
    # In place, a rule of promotion casts the other arguments to the dtype of the first.
    promoting = Trial.WIDEST if case.call.written is None else Trial.WRITTEN
    if case.call.has_out:
        return  # no rule acts on a call with out=
    if trials.is_mixed and promoting in trials.targets:
        yield f"promote: [{listed}]"
    elif Trial.FLOAT32 in trials.targets and case.call.written is None:
        yield f"blacklist: [{listed}]"


def _choose_regions(record: RaisedRecord, case: _Case, trials: Trials, covered: OpCall | None) -> Iterator[str]:
    """Yield the module rule that repairs the call, if it runs in a submodule."""
    session = case.scene.session
    casts_model = session.policy.cast_model_type is not None
    own_name, _ = name_all(session.models()).get(record.module or "", ("", None))
    if not own_name or not (casts_model or _is_reached(case, covered)):
        return
    for trial in (Trial.WIDEST, Trial.FLOAT32):
        if torch.float32 in trials.targets.get(trial, ()):
            yield f"modules: [{{match: {json.dumps(own_name)}, run: float32}}]"
            return
