"""Describes the samples of a flight recorder in words: magnitudes that have grown, and when they become too large.

Messages say that a dtype ends where its range ends: "float16 ends in about 90 steps" means that the magnitude will
then be larger than the largest float16. Needs no torch.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from ...tables import count_of, star_numbers
from ..fault_record import FaultRecord
from ..flight_record import FlightKind, FlightRecord
from ..recordings import Recording
from ..remedies import format_scale
from ..short_dtypes import LARGEST, spell_out
from ..text import star_layers
from .growth import MIN_SAMPLES, Growth, find_growth

_LARGEST_FLOAT32 = 3.4028234663852886e38
_MOST_LINES = 5

SMALLEST_NORMAL = 2.0**-14
"""The smallest float16 number with full precision."""

ZEROS_ROSE = 0.25
"""The zeros in a gradient are reported if their share, from 0 to 1, has risen by at least this difference."""

FAR = 8.0
"""A rise by this many powers of two is reported in any case."""

STEADY = 2.0
"""A rise by this many powers of two is reported if it leads to a large output or value, or to inf or NaN."""

LARGE = 64.0
"""An output is large from here on: about a fourth of the square root of the largest float16. In attention, a sum of 16
products of two such values reaches that largest number.
"""

SCALE_FELL = 64.0
"""A loss scale has fallen if it is smaller than its median by at least this factor."""


@dataclass(frozen=True, slots=True)
class Grown:
    """A module output, gradient or value that has grown.

    Attributes:
        record: its samples.
        growth: the fit to the samples.
        ends_in: in how many steps it will pass the largest number of the run's 16-bit dtype (see `find_limit`); 0 if it
            has, None if no forecast reaches so far.
    """

    record: FlightRecord
    growth: Growth
    ends_in: int | None

    @property
    def is_over(self) -> bool:
        """Whether the last sample is inf or NaN."""
        return not math.isfinite(self.record.largest[-1])

    def find_end(self) -> tuple[int, float]:
        """Return the first step whose sample is inf or NaN, and that sample. There must be one."""
        samples = zip(self.record.steps, self.record.largest, strict=True)
        return next((step, largest) for step, largest in samples if not math.isfinite(largest))


def find_grown(records: Iterable[FlightRecord]) -> list[Grown]:
    """Return the magnitudes that have grown up to their last sample, or first inf or NaN, the most urgent first.

    Magnitudes of a healthy training may grow, too, from a small beginning to a moderate size. A growth counts only if a
    forecast passes `find_limit`, if the fit rises by `FAR`, or if it rises by `STEADY` to a large
    output or value, or to inf or NaN.
    """
    grown = []
    for record in records:
        if record.subject is FlightKind.SCALE:
            continue
        growth = _find_growth(record)
        if growth is None:
            continue
        item = Grown(record, growth, growth.forecast(find_limit(record)))
        # a forecast says nothing of a value that is inf already
        is_steady = growth.rise >= STEADY and (item.is_over or _is_large(item))
        if is_steady or growth.rise >= FAR or (item.ends_in is not None and not item.is_over):
            grown.append(item)
    return sorted(grown, key=_order)


def _find_growth(record: FlightRecord) -> Growth | None:
    """Return the growth over all samples. If the last one is inf or NaN, return the growth before the first inf or NaN.

    (After the first, larger values are inf, so finite samples may show no growth.) Without a growth before it, return
    the growth over all samples.
    """
    if not math.isfinite(record.largest[-1]):
        finite = next(place for place, largest in enumerate(record.largest) if not math.isfinite(largest))
        growth = find_growth(record.steps[:finite], record.largest[:finite])
        if growth is not None:
            return growth
    return find_growth(record.steps, record.largest)


def _is_large(grown: Grown) -> bool:
    return grown.record.subject is not FlightKind.GRADIENT and grown.growth.end >= LARGE


def _order(grown: Grown) -> tuple[int, float, float]:
    """Return a sort key: the earliest inf or NaN first, then the nearest end, then the largest growth."""
    if grown.is_over:
        return 0, grown.find_end()[0], -grown.growth.rise
    if grown.ends_in is not None:
        return 1, grown.ends_in, -grown.growth.rise
    return 2, 0.0, -grown.growth.rise


def find_limit(record: FlightRecord) -> float:
    """Return the largest number of the run's 16-bit dtype, to which the next op may cast. For a run without such a
    dtype, return the largest float32.
    """
    return LARGEST.get(record.low, _LARGEST_FLOAT32)


def describe_flight(records: Sequence[FlightRecord], fault: FaultRecord | None = None) -> list[str]:
    """Return lines about magnitudes that have grown, gradients that vanish, and loss scales that fell.

    Layers whose names differ only in numbers share a line. At most `_MOST_LINES` lines name magnitudes that have grown,
    first those of the fault's module; one more line counts the rest.
    """
    grown = find_grown(records)
    groups: dict[tuple[FlightKind, str], list[Grown]] = {}
    for item in grown:
        groups.setdefault((item.record.subject, star_layers(item.record.name)), []).append(item)
    lines = [_describe_group(group) for group in _put_first(groups.values(), fault)]
    shown = lines[:_MOST_LINES]
    if len(lines) > len(shown):
        shown.append(f"and {len(lines) - len(shown)} more that grew")
    return [*shown, *_describe_zeros(records), *_describe_scales(records)]


def is_flight(recording: Recording) -> bool:
    """Return whether all records of a recording are samples of a `FlightRecorder`, and there are any."""
    return bool(recording.flight) and len(recording.flight) == len(recording.records)


def summarize(records: Sequence[FlightRecord], fault: FaultRecord | None = None) -> str:
    """Return as text how many steps were sampled, then the lines of `describe_flight`, or that nothing has grown.

    Fewer than `MIN_SAMPLES` steps are too few for this: then the text says so.
    """
    steps = sorted({step for record in records for step in record.steps})
    if not steps:
        return "no samples: no sampled step has ended"
    title = f"{count_of(len(steps), 'sample')} of steps {steps[0]:,} to {steps[-1]:,}"
    if len(steps) < MIN_SAMPLES:
        return f"{title}: too few to see growth, which takes {MIN_SAMPLES}; sample more often"
    lines = describe_flight(records, fault)
    # without this line, "nothing has grown" would seem to include outputs
    if not any(record.subject is FlightKind.OUTPUT for record in records):
        lines.append("no output was sampled (compiled code, for example, calls no hooks)")
    if not lines:
        return f"{title}: nothing has grown{_describe_headroom(records)}"
    return "\n".join([f"{title}:", *(f"  {line}" for line in lines)])


def _describe_headroom(records: Iterable[FlightRecord]) -> str:
    """Return how near a float16 run is to overflow: its largest finite output in the last samples, as text.

    Return "" if the run does not use float16, or if no such output is known.
    """
    outputs = [record for record in records if record.subject is FlightKind.OUTPUT and record.low == "f16"]
    finite = [record for record in outputs if math.isfinite(record.largest[-1])]
    if not finite:
        return ""
    largest = max(finite, key=lambda record: record.largest[-1])
    number = format_magnitude(largest.largest[-1])
    return f"; {name_subject(largest)} is the largest with {number}, and float16 ends at 65,504"


def _put_first(groups: Iterable[list[Grown]], fault: FaultRecord | None) -> list[list[Grown]]:
    """Return the groups, first those with the module of a fault."""
    module = None if fault is None else fault.origin.module
    if module is None:
        return list(groups)
    return sorted(groups, key=lambda group: all(item.record.name != module for item in group))


def _describe_group(group: Sequence[Grown]) -> str:
    first = group[0]  # the most urgent: groups are sorted by `_order`
    growth = first.growth
    text = f"{name_subject(first.record)} grew from {format_magnitude(growth.start)} to {format_magnitude(growth.end)}"
    if first.is_over:
        text += f" from step {growth.first_step:,} to {growth.last_step:,}"
    else:
        text += f" over the last {growth.last_step - growth.first_step:,} steps"
    if len(group) > 1:
        text += f" (and {len(group) - 1} more of {star_numbers(item.record.name for item in group)})"
    limit = spell_out(first.record.low or "f32")
    if first.is_over:
        step, largest = first.find_end()
        return f"{text}, and was first {'NaN' if math.isnan(largest) else 'inf'} in step {step:,}"
    if first.ends_in == 0:
        return f"{text}, beyond the end of {limit}"
    if first.ends_in is not None:
        is_scaled = first.record.subject is FlightKind.GRADIENT and first.record.low == "f16"
        alone = " even at a loss scale of 1" if is_scaled else ""
        text += f"; at this pace {limit} ends{alone} in about {_round_steps(first.ends_in):,} steps"
    return text


def name_subject(record: FlightRecord) -> str:
    """Return what a record is about, as the subject of a sentence."""
    if record.subject is FlightKind.VALUE:
        return record.name
    owner = record.name or "the model itself"
    if record.subject is FlightKind.SCALE:
        return f"the loss scale {record.name}".rstrip()
    if record.subject is FlightKind.GRADIENT:
        return f"the gradient of {owner}"
    return f"the output of {owner}"


def _describe_zeros(records: Iterable[FlightRecord]) -> Iterator[str]:
    """Yield one line if zeros have risen in float16 gradients. It names the gradient where they rose most."""
    scales = [record.largest[-1] for record in records if record.subject is FlightKind.SCALE]
    # the largest of several scales: with a smaller one, gradients would be zero sooner
    scale = max((scale for scale in scales if math.isfinite(scale)), default=1.0)
    lost = []
    for record in records:
        is_sampled = record.subject is FlightKind.GRADIENT and len(record.steps) >= MIN_SAMPLES
        # the last sample that is not zero; where a dead ReLU has made zeros, it is usually not small
        last = next((largest for largest in reversed(record.largest) if largest > 0), math.inf)
        if not is_sampled or record.low != "f16" or not last * scale < SMALLEST_NORMAL:
            continue
        part = len(record.steps) // 4
        before, after = median(record.zeros[:part]), median(record.zeros[-part:])
        if after - before >= ZEROS_ROSE:
            lost.append((after - before, record, before, after))
    if lost:
        _, record, before, after = max(lost, key=lambda entry: entry[0])
        text = f"zeros in {name_subject(record)} rose from {before:.0%} to {after:.0%}"
        if len(lost) > 1:
            text += f" (and in {count_of(len(lost) - 1, 'more gradient')})"
        yield f"{text}: float16 ends below 6e-08; a larger loss scale keeps small gradients"


def _describe_scales(records: Iterable[FlightRecord]) -> Iterator[str]:
    for record in records:
        if record.subject is FlightKind.SCALE and len(record.steps) >= MIN_SAMPLES:
            # the median, because a dynamic scale begins high and comes down in its first steps
            usual, last = median(record.largest), record.largest[-1]
            if last * SCALE_FELL <= usual:
                yield f"{name_subject(record)} fell from {format_scale(usual)} to {format_scale(last)}"


def format_magnitude(number: float) -> str:
    """Return a number with three digits, such as 0.0123, 40,000 or 3.1e+08."""
    rounded = float(f"{number:.3g}")
    return f"{rounded:,.0f}" if 1000 <= rounded < 1e6 else f"{rounded:.3g}"


def _round_steps(steps: int) -> int:
    """Return a forecast with two digits, because it is no more exact than that. Return at least 1."""
    return int(float(f"{steps:.2g}")) or 1
