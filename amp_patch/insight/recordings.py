"""`Recording`: the records of a run, or of a comparison of runs, written as lines of JSON and read again.

A file holds a line for each record, `{"kind": "run" | "op" | ..., ...}`, the run first.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, get_args

from ..errors import RecordError
from ..files import write_file
from . import display
from .fault_record import FaultRecord
from .flight_record import FlightRecord
from .json_values import flatten, plain, read_lines
from .misuse_record import MisuseRecord
from .numbers_record import ModuleNumbersRecord, OptimizerRecord, StepNormsRecord
from .quiet_record import QuietRecord
from .raised_record import RaisedRecord
from .record_checks import find_problem
from .records import (
    SCHEMA,
    CheckedStepRecord,
    ComparedRecord,
    ComparisonRecord,
    CurveRecord,
    GradientRecord,
    LayerRecord,
    LowOpRecord,
    ModulesRecord,
    OpErrorRecord,
    OpRecord,
    RunRecord,
    SampleRecord,
    SketchRecord,
    StepRecord,
    UndoneCastRecord,
)
from .trouble_record import TroubleRecord

Record = (
    RunRecord
    | OpRecord
    | UndoneCastRecord
    | StepRecord
    | FaultRecord
    | QuietRecord
    | RaisedRecord
    | MisuseRecord
    | FlightRecord
    | ComparisonRecord
    | ComparedRecord
    | CurveRecord
    | LayerRecord
    | OpErrorRecord
    | GradientRecord
    | SampleRecord
    | CheckedStepRecord
    | SketchRecord
    | LowOpRecord
    | ModulesRecord
    | TroubleRecord
    | OptimizerRecord
    | ModuleNumbersRecord
    | StepNormsRecord
)
R = TypeVar("R")
_KINDS: dict[str, type[Record]] = {cls.kind: cls for cls in get_args(Record)}


@dataclass(slots=True)
class Recording:
    """The record of the run (in a comparison, of one of its runs), then the other records in order."""

    run: RunRecord
    records: list[Record]

    def __str__(self) -> str:
        return display.as_text(self)

    def __repr__(self) -> str:
        return f"<{display.as_line(self)}; print() shows it>"

    def _repr_html_(self) -> str:
        return display.as_html(self)

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

    @property
    def faults(self) -> list[FaultRecord]:
        """The faults, without those that only belong to the search for a loss scale."""
        return [fault for fault in self.of(FaultRecord) if not fault.effect.is_search]

    @property
    def searches(self) -> list[FaultRecord]:
        """The first fault of each step that was skipped while a dynamic loss scale was, or may have been, too large."""
        return [fault for fault in self.of(FaultRecord) if fault.effect.is_search]

    @property
    def quiet(self) -> list[QuietRecord]:
        """The quiet losses: values that 16 bits make wrong, although all of them are finite."""
        return self.of(QuietRecord)

    @property
    def troubles(self) -> list[TroubleRecord]:
        """The steps that went wrong in an armed run: see `TroubleRecord`."""
        return self.of(TroubleRecord)

    @property
    def raised(self) -> list[RaisedRecord]:
        """The exception that ended the run, if dtypes or the use of a GradScaler explain it."""
        return self.of(RaisedRecord)

    @property
    def misuses(self) -> list[MisuseRecord]:
        """How the script uses GradScaler and autocast wrongly."""
        return self.of(MisuseRecord)

    @property
    def flight(self) -> list[FlightRecord]:
        """The samples of a flight recorder, such as the magnitudes of modules."""
        return self.of(FlightRecord)

    def to_jsonl(self, path: str | os.PathLike[str]) -> None:
        """Write the run and all records to a file, one JSON line each."""
        write_file(path, self.format())

    def format(self) -> str:
        """Return the run and all records, one JSON line each. inf and NaN are strings: JSON has no such numbers."""
        lines = [_format(self.run, records=len(self.records)), *map(_format, self.records)]
        return "\n".join([*lines, ""])

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "Recording":
        """Read a file that `to_jsonl` wrote.

        Raises RecordError for any other file, for a newer schema, and if there is no file.
        """
        run: RunRecord | None = None
        records: list[Record] = []
        declared, lines = None, 0
        for data, record in read_lines(Path(path), _KINDS):
            if isinstance(record, RunRecord):
                if record.schema > SCHEMA:
                    raise RecordError(
                        f"{path}: schema {record.schema} is newer than {SCHEMA}, the newest of this version: upgrade"
                    )
                run = record
                declared = data.get("records")
                if declared is not None and not isinstance(declared, int):
                    raise RecordError(f"{path}: the number of records is no whole number: this is not a recording")
            else:
                lines += 1
                if record is not None:  # None: a kind of a later version
                    records.append(record)
        if run is None:
            raise RecordError(f"{path}: no record of kind 'run': this is not a recording, or only a part of one")
        # the end of the file may be missing, for example after a copy that was broken off
        if declared not in (None, lines):
            raise RecordError(f"{path}: {lines} of {declared} records: this is only a part of a recording")
        problem = find_problem(records)
        if problem:
            raise RecordError(f"{path}: not a recording ({problem})")
        return cls(run, records)


def _format(record: Record, **more: int) -> str:
    """Return a record as a line of JSON."""
    return json.dumps(plain({"kind": record.kind, **flatten(record), **more}), allow_nan=False)
