"""Finds contradictions in a recording. Users may edit its file, and other code relies on the values."""

from collections.abc import Iterable, Iterator, Sequence

from .flight_record import FlightRecord
from .records import (
    CLASSES,
    ComparedRecord,
    ComparisonRecord,
    CurveRecord,
    GradientRecord,
    LayerRecord,
    OpErrorRecord,
)

EXPONENTS = range(-1100, 1100)
"""More powers of two than float64 has."""


def find_problem(records: Iterable[object]) -> str | None:
    """Return the first contradiction in or between the records of a file, in words; None if there is none."""
    return next(_find_problems(list(records)), None)


def _find_problems(records: Sequence[object]) -> Iterator[str]:
    for record in records:
        if isinstance(record, GradientRecord):
            yield from _check_gradients(record)
        if isinstance(record, CurveRecord):
            yield from _check_curve(record)
        if isinstance(record, FlightRecord):
            yield from _check_flight(record)
    comparisons = [record for record in records if isinstance(record, ComparisonRecord)]
    if comparisons:
        yield from _check_comparison(records, comparisons)


def _check_gradients(record: GradientRecord) -> Iterator[str]:
    # The axis of the chart has a label for every tenth power: with a far too large range, drawing would not end.
    last = record.lowest + len(record.counts) // CLASSES
    if record.counts and (record.lowest not in EXPONENTS or last not in EXPONENTS):
        yield f"gradients of {record.run!r} reach from 2**{record.lowest} to 2**{last}"
    if len(record.counts) % CLASSES:
        yield f"gradients of {record.run!r} do not have {CLASSES} counts for each power of two"
    if any(count < 0 for count in record.counts):
        yield f"gradients of {record.run!r} have a negative count"
    if record.counts and not any(record.counts):
        yield f"gradients of {record.run!r} have only counts of zero"


def _check_curve(record: CurveRecord) -> Iterator[str]:
    if len(record.scales) != len(record.losses):
        yield f"{record.run!r} has {len(record.losses)} losses and {len(record.scales)} loss scales"
    if any(step not in range(len(record.losses)) for step in record.skipped):
        yield f"{record.run!r} has a skipped step that is not among its {len(record.losses)} steps"


def _check_flight(record: FlightRecord) -> Iterator[str]:
    if {len(record.largest), len(record.zeros), len(record.near)} != {len(record.steps)} or not record.steps:
        yield f"{record.name!r} has no samples, or `steps`, `largest`, `zeros` and `near` have different lengths"
    if any(later <= step for step, later in zip(record.steps, record.steps[1:], strict=False)):
        yield f"the samples of {record.name!r} are not in the order of their steps"


def _check_comparison(records: Sequence[object], comparisons: Sequence[ComparisonRecord]) -> Iterator[str]:
    if len(comparisons) > 1:
        yield f"{len(comparisons)} comparisons"
    about = comparisons[0]
    names = [record.run for record in records if isinstance(record, ComparedRecord)]
    if about.reference not in names:
        yield f"the reference {about.reference!r} is not among the runs"
    if len(set(names)) < len(names):
        yield "two runs have one name"
    if not about.seeds:
        yield "no seeds"
    if about.steps < 1:
        yield f"{about.steps} steps"
    for record in records:
        if isinstance(record, CurveRecord) and record.run not in names:
            yield f"a curve of {record.run!r}, which is not among the runs"
        if isinstance(record, LayerRecord) and record.run not in names:
            yield f"a layer of {record.run!r}, which is not among the runs"
        if isinstance(record, OpErrorRecord) and record.run not in names:
            yield f"an op of {record.run!r}, which is not among the runs"
