"""The page's tables of ops, of casts that undo each other, and of records of other kinds."""

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from ..records import Recording, UndoneCastRecord
from ..text import OP_COLUMNS, choose_ops, op_cells
from .markup import Markup, element
from .tables import Cell, make_table

_NUMBERS = ("calls", "casts", "avoided")


def make_ops(recording: Recording) -> Iterator[Markup]:
    """Yield the section of ops, if there are any."""
    ops = choose_ops(recording)
    if not ops:
        return
    heading = ("phase", *OP_COLUMNS)
    rows = [
        [
            Cell(text, float(text) if name in _NUMBERS else None)
            for name, text in zip(heading, (op.phase, *op_cells(op)), strict=True)
        ]
        for op in ops
    ]
    yield element(
        "section",
        element("h2", "Ops"),
        element("p", "Equal layers are one row, with * for their numbers; steps are added up."),
        make_table("ops", heading, rows, label="ops", left=8, filter_by="Filter ops"),
        *_undone(recording),
    )


def _undone(recording: Recording) -> Iterator[Markup]:
    if recording.undone:
        yield element("h3", "Casts that undo each other")
        yield make_records("undone", recording.of(UndoneCastRecord))


def make_others(recording: Recording, known: Sequence[type]) -> Iterator[Markup]:
    """Yield a section for each kind of records that no other section shows."""
    kinds = {type(record): None for record in recording.records if not isinstance(record, tuple(known))}
    for kind in kinds:
        records = [record for record in recording.records if type(record) is kind]
        yield element("section", element("h2", f"Records: {kind.kind}"), make_records(kind.kind, records))


def make_records(name: str, records: Sequence[Any]) -> Markup:
    """Return a table with a column for each field."""
    heading = [field.name for field in fields(records[0])]
    rows = [[_cell(getattr(record, field)) for field in heading] for record in records]
    return make_table(name, heading, rows, label=name, left=len(heading), filter_by="Filter" if len(rows) > 8 else "")


def _cell(value: object) -> Cell:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return Cell(f"{value:.6g}" if isinstance(value, float) else str(value), float(value))
    if isinstance(value, tuple):
        return Cell(", ".join(map(str, value)))
    if value is None:
        return Cell("-")
    return Cell(str(value))
