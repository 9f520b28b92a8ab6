"""What is recorded of a run: one frozen schema, written as lines of JSON and read again.

A file holds a line for each record, `{"kind": "run" | "op" | ..., ...}`, the run first; each rank writes its own.
"""

import json
import math
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_args, get_origin

from ..errors import RecordError
from .compared_records import ComparedRecord as ComparedRecord
from .compared_records import ComparisonRecord as ComparisonRecord
from .compared_records import CurveRecord as CurveRecord
from .compared_records import GradientRecord as GradientRecord
from .compared_records import LayerRecord as LayerRecord
from .compared_records import SampleRecord as SampleRecord
from .tuned_records import CheckedStepRecord as CheckedStepRecord
from .tuned_records import LowOpRecord as LowOpRecord
from .tuned_records import ModulesRecord as ModulesRecord
from .tuned_records import SketchRecord as SketchRecord

SCHEMA = 1
"""The version of the schema, which goes up with every change that an older reader would misread."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Under what was recorded. `low` is a dtype's name, "" where nothing is cast; `digest` that of the op lists."""

    kind: ClassVar[str] = "run"

    torch: str
    device: str
    opt_level: str
    low: str
    lists: tuple[str, ...]
    digest: str
    rank: int
    schema: int = SCHEMA


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
    """A value that does not fit, where it came from: the first of its kind on the way of the numbers.

    Attributes:
        step: of the run, from 0, by the optimizer that steps first.
        phase: as in `OpRecord`.
        value: "inf", "nan", "inf or NaN", or "zero" for values that float32 holds and 16 bits do not.
        cause: "precision" (float32 holds what the op gives for these inputs), "mathematics" (it does not) or "came in"
            (an input did not fit, and no recorded op made it).
        module, op, rule, entry, region, site: of the call; for an op of the backward pass of the forward call.
        listed: the name by which the lists have the op, "" for one that is on none.
        aten, node: what torch ran, and the node of the backward pass that it ran in; "" where nothing of it was seen.
        given, out: dtypes of its inputs and of its output.
        share: of the values of the output that are so, from 0 to 1.
        largest: the largest finite magnitude among its inputs; `in_float32`: among what it gives in float32.
        parameter: the name of the parameter or buffer that came in, or whose gradient did; "" for another tensor.
        loss_scale: in force then.
        trail: ops before it, the latest first, with the largest magnitude that each gave.
        reach: "swallowed" (loss and gradients are finite), "loss" or "gradients"; "" if the step did not end.
        gradients: names of the parameters whose gradients are not finite; `of`: how many there are with a gradient.
        skipped: whether the step was; None if it did not end.
        is_search: a dynamic loss scale that was too large, for a step that was skipped: it becomes smaller by itself.
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
    """The records of one process, in order, after that of the run."""

    run: RunRecord
    records: list[Record]

    def of(self, kind: type[R]) -> list[R]:
        """Return the records of one class."""
        return [record for record in self.records if isinstance(record, kind)]

    @property
    def ops(self) -> list[OpRecord]:
        """Calls of ops."""
        return self.of(OpRecord)

    @property
    def undone(self) -> list[UndoneCastRecord]:
        """Casts that undo each other."""
        return self.of(UndoneCastRecord)

    @property
    def steps(self) -> list[StepRecord]:
        """The ends of the recorded steps."""
        return self.of(StepRecord)

    def to_jsonl(self, path: str | os.PathLike[str]) -> None:
        """Write all records to a file, a line of JSON each."""
        Path(path).write_text(self.format(), encoding="utf-8")

    def format(self) -> str:
        """Return all records, a line of JSON each; inf and NaN are strings there, since JSON has no such numbers."""
        records = (self.run, *self.records)
        lines = [json.dumps(_plain({"kind": record.kind, **asdict(record)}), allow_nan=False) for record in records]
        return "\n".join([*lines, ""])

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "Recording":
        """Read what `to_jsonl` wrote. Raises RecordError, with the line, for anything else."""
        run: RunRecord | None = None
        records: list[Record] = []
        for record in _read(Path(path)):
            if isinstance(record, RunRecord):
                if record.schema > SCHEMA:
                    raise RecordError(
                        f"{path}: schema {record.schema} is of a later version, which reads {SCHEMA} at most"
                    )
                run = record
            else:
                records.append(record)
        if run is None:
            raise RecordError(f"{path}: no record of kind 'run': this is no recording, or only a part of one")
        return cls(run, records)


def _read(path: Path) -> Iterator[Record]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    for number, line in enumerate(lines, 1):
        try:
            data = json.loads(line)
            kind = _KINDS.get(data.pop("kind", None))
            if kind is not None:  # a later version may have others
                types = {field.name: field.type for field in fields(kind)}
                record = kind(**{name: _frozen(data[name], types[name]) for name in data if name in types})
                _check(record)
                yield record
        except (ValueError, AttributeError, TypeError) as error:
            raise RecordError(f"{path}:{number}: not a line of a recording ({error})") from None


def _check(record: Record) -> None:
    """Raise TypeError for a value that is not of the type that its field has."""
    for field in fields(record):
        value, kind = getattr(record, field.name), field.type
        kinds: Any = tuple if get_origin(kind) is tuple else kind
        if not isinstance(value, kinds):
            raise TypeError(f"{field.name} is {value!r}")


def _frozen(value: Any, kind: Any) -> Any:
    """A value of JSON as one of a field's type."""
    if isinstance(value, list):
        element = get_args(kind)[0] if get_origin(kind) is tuple else None
        return tuple(_frozen(one, element) for one in value)
    is_float = kind is float or float in get_args(kind)
    return float(value) if is_float and value in _NONFINITE else value


_NONFINITE = ("inf", "-inf", "nan")


def _plain(value: Any) -> Any:
    """A value as JSON can hold it."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, tuple) else value
