"""What holds between the values of a recording, which its readers rely on: of a file that somebody may have edited."""

from collections.abc import Iterator

from .comparing.exponents import CLASSES
from .records import (
    ComparedRecord,
    ComparisonRecord,
    CurveRecord,
    GradientRecord,
    LayerRecord,
    Recording,
)

EXPONENTS = range(-1100, 1100)
"""Powers of two that a float64 may have, and some."""


def find_problem(recording: Recording) -> str | None:
    """Return what is wrong first, or None."""
    return next(_find_problems(recording), None)


def _find_problems(recording: Recording) -> Iterator[str]:
    for record in recording.records:
        if isinstance(record, GradientRecord):
            yield from _check_gradients(record)
        if isinstance(record, CurveRecord):
            yield from _check_curve(record)
    comparisons = recording.of(ComparisonRecord)
    if comparisons:
        yield from _check_comparison(recording, comparisons)


def _check_gradients(record: GradientRecord) -> Iterator[str]:
    last = record.lowest + len(record.counts) // CLASSES
    if record.counts and (record.lowest not in EXPONENTS or last not in EXPONENTS):
        yield f"gradients of {record.run!r} reach from 2**{record.lowest} to 2**{last}"
    if len(record.counts) % CLASSES or any(count < 0 for count in record.counts):
        yield f"gradients of {record.run!r} are not counted by {CLASSES} classes"
    if record.counts and not any(record.counts):
        yield f"gradients of {record.run!r} are counted, and there are none"


def _check_curve(record: CurveRecord) -> Iterator[str]:
    if len(record.scales) != len(record.losses):
        yield f"{record.run!r} has {len(record.losses)} losses and {len(record.scales)} loss scales"
    if any(step not in range(len(record.losses)) for step in record.skipped):
        yield f"{record.run!r} skipped a step that it did not take"


def _check_comparison(recording: Recording, comparisons: list[ComparisonRecord]) -> Iterator[str]:
    if len(comparisons) > 1:
        yield f"{len(comparisons)} comparisons"
    about = comparisons[0]
    names = [run.run for run in recording.of(ComparedRecord)]
    if about.reference not in names:
        yield f"the reference {about.reference!r} is not among the runs"
    if len(set(names)) < len(names):
        yield "two runs have one name"
    if not about.seeds:
        yield "no seeds"
    if about.steps < 1:
        yield f"{about.steps} steps"
    for curve in recording.of(CurveRecord):
        if curve.run not in names:
            yield f"a curve of {curve.run!r}, which is not among the runs"
    for layer in recording.of(LayerRecord):
        if layer.run not in names:
            yield f"a layer of {layer.run!r}, which is not among the runs"
