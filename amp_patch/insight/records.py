"""What is recorded of a run: one frozen schema, written as lines of JSON and read again.

A file holds a line for each record, `{"kind": "run" | "op" | ..., ...}`, the run first; each rank writes its own.
"""

import importlib
import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_args

from ..errors import RecordError
from ..files import write_file
from .json_values import plain, read_lines

SCHEMA = 1
"""The version of the schema, which goes up with every change that an older reader would misread."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Under what was recorded. `low` is a dtype's name, "" where nothing is cast; `digest` that of the op lists;
    `is_native`: by no `amp.initialize`, but what the script does by itself; `prefixes`: of several models, what the
    names of their modules begin with; `steps_before`: how many steps the script took before it entered what was to be
    watched; `needs_scaler`: in float16 it would need a loss scale, and it has none.
    """

    kind: ClassVar[str] = "run"

    torch: str
    device: str
    opt_level: str
    low: str
    lists: tuple[str, ...]
    digest: str
    rank: int
    schema: int = SCHEMA
    is_native: bool = False
    prefixes: tuple[str, ...] = ()
    steps_before: int = 0
    needs_scaler: bool = False


@dataclass(frozen=True, slots=True)
class OpRecord:
    """Calls that are alike in everything but their number.

    Attributes:
        step: of the recording, from 0.
        phase: "forward", "backward", "recompute" (of a checkpoint) or "step" (of an optimizer that calls a closure).
        module: qualified name of the innermost module that ran; "" outside of all.
        op: the spelling that was called, such as "F.linear"; "aten.add" for an op that is on no list.
        rule: the list the op is on, or what else decided; "" if nothing did.
        entry: `file.yaml:line` of the rule, "" without one.
        region: "low", "float32" or "off" where a region decided in the place of the lists, else "".
        given, ran, out: dtypes of the tensors that the caller gave, of the floating ones that kernels got, and of those
            that came out; in order, but `ran`, which has each once.
        site: `file.py:line` of the user's code.
        calls, casts, avoided: how many there were; casts that copied a tensor to another dtype; tensors that would
            have been cast, but for a copy that was there already.
    """

    kind: ClassVar[str] = "op"

    step: int
    phase: str
    module: str
    op: str
    rule: str
    entry: str
    region: str
    given: tuple[str, ...]
    ran: tuple[str, ...]
    out: tuple[str, ...]
    site: str
    calls: int = 1
    casts: int = 0
    avoided: int = 0


@dataclass(frozen=True, slots=True)
class UndoneCastRecord:
    """Casts that undo each other: from `outside` to `between` for `producer`, and what it gave back for `consumer`."""

    kind: ClassVar[str] = "undone"

    step: int
    module: str
    producer: str
    consumer: str
    outside: str
    between: str
    calls: int = 1


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The end of a step: the loss scales by then, and whether it was skipped; None where the host does not know yet."""

    kind: ClassVar[str] = "step"

    step: int
    skipped: bool | None
    loss_scales: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class FaultRecord:
    """A value that does not fit into its dtype, and the op that produced it: the first fault of a step.

    Attributes:
        step: the number of the step, from 0, counted by the optimizer that steps first.
        phase: as in `OpRecord`.
        value: "inf", "nan", "inf or NaN", or "zero" for values that are zero in 16 bits but not in float32.
        cause: "precision" (float32 holds the result of the op for these inputs), "mathematics" (it does not),
            "came in" (an input did not fit, and no recorded op produced it), "step" (an optimizer produced it from
            finite weights and gradients) or "divergence" (losses or weights have grown without bound, or beyond
            bfloat16).
        module, op, rule, entry, region, site: those of the call. For an op of the backward pass, of the forward call.
        listed: the name of the op in the lists; "" for an op on no list.
        aten, node: the op that torch ran, and its node of the backward pass; "" if unknown.
        given, out: dtypes of the inputs and of the output.
        share: the share of values in the output that do not fit, from 0 to 1.
        largest: the largest finite magnitude among the inputs; `in_float32`: among the results in float32.
        parameter: the name of the parameter or buffer that came in, or whose gradient did; "" for another tensor.
        loss_scale: the loss scale of the step; 1 for a value of the backward pass that does not go with it.
        trail: the ops before it, latest first, with the largest magnitude in the result of each.
        rank: the rank of the process.
        reach: "swallowed" (loss and gradients are finite), "loss", "gradients", or "weights" of a step; "" if the step
            did not end.
        gradients: names of the parameters whose gradients are not finite; `of`: the number of parameters with a
            gradient.
        skipped: whether the step was skipped; None if it did not end.
        is_search: whether a dynamic loss scale was too large and the step was skipped; the scale falls by itself.
        regions, ops, sites: what has to run in float32 so that the values of the step fit: modules, as in module rules;
            names of ops, as in lists; lines of the script to which neither applies.
        alternative: ops that are enough instead of these modules.
        lines: lines of the script that run what has to be in float32.
        is_of_rounding: whether the value fits only if ops before it run in float32 too.
        lost: a number in the script that is zero in 16 bits, and matters; 0: none.
        beyond: the op whose result float32 does not hold either, once the rest runs in float32; "" for none.
        scale: the loss scale, a power of two, under which the gradients of the step fit, or do not become zero; None
            if the scale does not matter.
        is_scale_enough: whether that scale is enough, without regions, ops and sites.
        summed: how many times larger the loss is than the mean of its terms, where that is why no loss scale above 1
            fits; else 0.
        eps, lr: those of the optimizer whose step produced the value.
    """

    kind: ClassVar[str] = "fault"

    step: int
    phase: str
    value: str
    cause: str
    module: str = ""
    op: str = ""
    rule: str = ""
    entry: str = ""
    listed: str = ""
    region: str = ""
    site: str = ""
    aten: str = ""
    node: str = ""
    given: tuple[str, ...] = ()
    out: str = ""
    share: float = math.nan
    largest: float = math.nan
    in_float32: float = math.inf
    parameter: str = ""
    loss_scale: float = 1.0
    trail: tuple[tuple[str, float], ...] = ()
    rank: int = 0
    reach: str = ""
    gradients: tuple[str, ...] = ()
    of: int = 0
    skipped: bool | None = None
    is_search: bool = False
    regions: tuple[str, ...] = ()
    ops: tuple[str, ...] = ()
    alternative: tuple[str, ...] = ()
    sites: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    is_of_rounding: bool = False
    lost: float = 0.0
    beyond: str = ""
    scale: float | None = None
    is_scale_enough: bool = False
    summed: float = 0.0
    eps: float | None = None
    lr: float | None = None

    def __str__(self) -> str:
        return _show("fault_as_text", self)

    def _repr_html_(self) -> str:
        return _show("show_fault", self)


# ---- runs that are compared ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ComparisonRecord:
    """What was compared: runs with `reference`, for so many steps from each seed, on what machine, by what command; and
    which runs that are compared by default were left out, and why.
    """

    kind: ClassVar[str] = "comparison"

    reference: str
    steps: int
    seeds: tuple[int, ...]
    machine: str
    command: str
    left_out: str = ""


@dataclass(frozen=True, slots=True)
class ComparedRecord:
    """One run of a comparison.

    Attributes:
        run: its name, such as "O4" or "O4+my_lists.yaml".
        opt_level, low, lists, digest: as in `RunRecord`; empty where it never began.
        peak: bytes in use at the peak of a step, weights and optimizer included; None where that is not known.
        loss_scale: that of the step whose layers are compared; None where they are not.
        has_equal_weights: whether that step began with the weights of the reference, but for rounding.
        failed: why it ended early, "" if it did not.
    """

    kind: ClassVar[str] = "compared"

    run: str
    opt_level: str = ""
    low: str = ""
    lists: tuple[str, ...] = ()
    digest: str = ""
    peak: int | None = None
    loss_scale: float | None = None
    has_equal_weights: bool = True
    failed: str = ""


@dataclass(frozen=True, slots=True)
class CurveRecord:
    """A run from one seed, a value for each step: the loss, and the first loss scale when the step had ended.

    `ms` is the median time of a step, `skipped` the numbers of the steps that were skipped. `is_noise` is said of the
    run of the reference whose weights are off by one unit in the last place.
    """

    kind: ClassVar[str] = "curve"

    run: str
    seed: int
    losses: tuple[float, ...]
    scales: tuple[float, ...]
    skipped: tuple[int, ...]
    ms: float
    is_noise: bool = False


@dataclass(frozen=True, slots=True)
class LayerRecord:
    """By how much a layer is off the same layer of the reference, in one step from equal weights: the norm of the
    difference over the norm, of what it was given, of its output and of its weights' gradients. None where there is
    nothing to compare.
    """

    kind: ClassVar[str] = "layer"

    run: str
    module: str
    input: float | None
    output: float | None
    gradient: float | None


@dataclass(frozen=True, slots=True)
class GradientRecord:
    """Unscaled gradients of all weights in one step, counted by magnitude: see `comparing.exponents`."""

    kind: ClassVar[str] = "gradients"

    run: str
    lowest: int
    counts: tuple[int, ...]
    zeros: int
    nonfinite: int


@dataclass(frozen=True, slots=True)
class SampleRecord:
    """Values of a layer at positions that are the same in each run: of its input, its output, and its weights'
    gradients. They are compared, and not kept. The record of module "" has values of all weights as its output.
    """

    kind: ClassVar[str] = "sample"

    module: str
    input: tuple[float, ...]
    output: tuple[float, ...]
    gradient: tuple[float, ...]


# ---- runs by which lists are tuned -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CheckedStepRecord:
    """A step of an optimizer whose losses and gradients are to be compared with those of another run.

    Attributes:
        step: of this optimizer, from 0.
        optimizer: its number, in the order in which they step first.
        losses: those scaled since the step before, unscaled: float32 means of their elements.
        skipped: whether the step was skipped for an overflow.
        loss_scale: of the first scaler, at the step.
        is_dynamic: whether it follows the gradients.
    """

    kind: ClassVar[str] = "checked"

    step: int
    optimizer: int
    losses: tuple[float, ...]
    skipped: bool
    loss_scale: float
    is_dynamic: bool


@dataclass(frozen=True, slots=True)
class SketchRecord:
    """The unscaled gradient of a parameter at a step, small enough to keep.

    Attributes:
        step, optimizer: as in CheckedStepRecord.
        parameter: its qualified name.
        norm, largest: of the gradient, L2 and largest magnitude, float32.
        sketch: at most 4,096 float32 values, little-endian in base64: the gradient itself, or sums of its elements with
            fixed signs. The norm of the difference of two sketches is about that of the gradients.
    """

    kind: ClassVar[str] = "sketch"

    step: int
    optimizer: int
    parameter: str
    norm: float
    largest: float
    sketch: str


@dataclass(frozen=True, slots=True)
class LowOpRecord:
    """What would become of an op in 16 bits, by calls in float32 with rounded arguments and results.

    Attributes:
        module: the pattern that matches the innermost named module it ran in; "**": the model itself; "": outside.
        op: the entry of the op lists that has it run low; the function's name if it is on none.
        is_listed: whether there is such an entry.
        overflow_in, overflow: largest share of the values that went in, and came out, that overflow.
        error: largest relative error of a result (L2).
        gradient_error: that of the scaled gradient of a result, rounded.
        gradient: largest magnitude in the unscaled gradient of a result.
        effect: by how much rounding moves the loss, to first order: sum over calls of |sum of gradient times error|.
    """

    kind: ClassVar[str] = "low_op"

    module: str
    op: str
    is_listed: bool
    overflow_in: float
    overflow: float
    error: float
    gradient_error: float
    gradient: float
    effect: float


@dataclass(frozen=True, slots=True)
class ModulesRecord:
    """Qualified names of all modules below the models, and of those among them whose forward ran."""

    kind: ClassVar[str] = "modules"

    names: tuple[str, ...]
    ran: tuple[str, ...]


# ---- files -----------------------------------------------------------------------------------------------------------

Record = (
    RunRecord
    | OpRecord
    | UndoneCastRecord
    | StepRecord
    | FaultRecord
    | ComparisonRecord
    | ComparedRecord
    | CurveRecord
    | LayerRecord
    | GradientRecord
    | SampleRecord
    | CheckedStepRecord
    | SketchRecord
    | LowOpRecord
    | ModulesRecord
)
R = TypeVar("R")
_KINDS: dict[str, type[Record]] = {cls.kind: cls for cls in get_args(Record)}


@dataclass(slots=True)
class Recording:
    """The records of one process: the run, then its records in order."""

    run: RunRecord
    records: list[Record]

    def __str__(self) -> str:
        return _show("recording_as_text", self)

    def __repr__(self) -> str:
        return f"<{_show('recording_in_a_line', self)}; print() shows it>"

    def _repr_html_(self) -> str:
        return _show("show_recording", self)

    def of(self, kind: type[R]) -> list[R]:
        """Return the records of a class."""
        return [record for record in self.records if isinstance(record, kind)]

    @property
    def ops(self) -> list[OpRecord]:
        """The calls of ops."""
        return self.of(OpRecord)

    @property
    def undone(self) -> list[UndoneCastRecord]:
        """The casts that undo each other."""
        return self.of(UndoneCastRecord)

    @property
    def steps(self) -> list[StepRecord]:
        """The ends of the recorded steps."""
        return self.of(StepRecord)

    def to_jsonl(self, path: str | os.PathLike[str]) -> None:
        """Write all records to a file, one JSON line each."""
        write_file(path, self.format())

    def format(self) -> str:
        """Return all records, one JSON line each. inf and NaN are strings, since JSON has no such numbers."""
        lines = [_format(self.run, records=len(self.records)), *map(_format, self.records)]
        return "\n".join([*lines, ""])

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "Recording":
        """Read a file that `to_jsonl` wrote. Raises RecordError, with the line, for any other file."""
        run: RunRecord | None = None
        records: list[Record] = []
        number, lines = None, 0
        for data, record in read_lines(Path(path), _KINDS):
            if isinstance(record, RunRecord):
                if record.schema > SCHEMA:
                    raise RecordError(
                        f"{path}: schema {record.schema} is newer than {SCHEMA}, the newest of this version: upgrade"
                    )
                run = record
                number = data.get("records")
                if number is not None and not isinstance(number, int):
                    raise RecordError(f"{path}: the number of records is no whole number: this is not a recording")
            else:
                lines += 1
                if record is not None:
                    records.append(record)
        if run is None:
            raise RecordError(f"{path}: no record of kind 'run': this is not a recording, or only a part of one")
        if number not in (None, lines):  # None: an earlier version wrote it
            raise RecordError(f"{path}: {lines} of {number} records: this is only a part of a recording")
        recording = cls(run, records)
        problem = importlib.import_module(".record_checks", __package__).find_problem(recording)
        if problem:
            raise RecordError(f"{path}: not a recording ({problem})")
        return recording


def _format(record: Record, **more: int) -> str:
    """Return a record as a line of JSON."""
    return json.dumps(plain({"kind": record.kind, **asdict(record), **more}), allow_nan=False)


def _show(maker: str, shown: Any) -> str:
    """Return what print or a notebook shows; what makes that imports this module."""
    return str(getattr(importlib.import_module(".notebook", __package__), maker)(shown))
