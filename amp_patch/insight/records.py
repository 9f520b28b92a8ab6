"""What is recorded of a run: one frozen schema, written as lines of JSON and read again.

A file holds a line for each record, `{"kind": "run" | "op" | "step", ...}`, the run first; each rank writes its own.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_args, get_origin

from ..errors import RecordError

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
        phase: "forward", "backward", "recompute" (of a checkpoint) or "step" (of an optimizer).
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
        calls: how many there were.
        overflow_in, overflow: largest share of the values that went in, and came out, that overflow.
        underflow: largest share of results that become 0.
        error: largest relative error of a result (L2).
        gradient_error: that of the scaled gradient of a result, rounded.
        gradient: largest magnitude in the unscaled gradient of a result.
        effect: by how much rounding moves the loss, to first order: sum over calls of |sum of gradient times error|.
    """

    kind: ClassVar[str] = "low_op"

    module: str
    op: str
    is_listed: bool
    calls: int
    overflow_in: float
    overflow: float
    underflow: float
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


Record = (
    RunRecord
    | OpRecord
    | UndoneCastRecord
    | StepRecord
    | CheckedStepRecord
    | SketchRecord
    | LowOpRecord
    | ModulesRecord
)
R = TypeVar("R", bound=Record)
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
        with Path(path).open("w", encoding="utf-8") as file:
            for record in (self.run, *self.records):
                file.write(json.dumps({"kind": record.kind, **asdict(record)}) + "\n")

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
        raise RecordError(f"{path}: {error}") from None
    for number, line in enumerate(lines, 1):
        try:
            data = json.loads(line)
            kind = _KINDS.get(data.pop("kind", None))
            if kind is not None:  # a later version may have others
                record = kind(**{name: _frozen(data[name]) for name in data if name in kind.__slots__})
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


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
