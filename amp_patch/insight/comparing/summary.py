"""`Summary`: the numbers of a comparison, computed from its recording: a `Row` for each run, the noise and the gain."""

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ...errors import RecordError
from ..recordings import Recording
from ..records import ComparedRecord, ComparisonRecord, CurveRecord, GradientRecord, LayerRecord, OpErrorRecord
from .exponents import FORMATS, find_shares

LAST_STEPS = 20
"""A final loss is the mean over the last fifth of the steps, but over at most this many."""


MOST_KEPT = 0.5
"""A verdict gives the share of elements whose update survives the rounding to 16 bits (`ComparedRecord.kept`), if this
share is at most `MOST_KEPT`. If it is larger, the verdict gives the error of the updates instead.
"""


class Row(NamedTuple):
    """A run in numbers. None stands for an unknown number.

    Attributes:
        name: the name of the run.
        run: its record.
        steps: the number of its steps; of several seeds, the smallest.
        loss: the final loss, a mean over seeds.
        difference: how much larger the final loss is than in the reference, a mean over seeds; None for the reference.
        spread: the standard deviation of this difference over seeds.
        ms: the time of a step in milliseconds, the median over seeds.
        factor: the ratio of `ms` to the time of the reference.
        batches: the number of batches in the run of the first seed, including those that end in no step.
        skipped: the number of skipped steps of all seeds.
        scale: the last loss scale of the first seed.
        zero: the share of the reference's gradients that become zero in the dtype `run.low`, without a loss scale.
        zero_scaled: the same share with the loss scale `scale`.
        worst: the op in 16 bits that adds the largest error.
    """

    name: str
    run: ComparedRecord
    steps: int = 0
    loss: float | None = None
    difference: float | None = None
    spread: float | None = None
    ms: float | None = None
    factor: float | None = None
    batches: int = 0
    skipped: int = 0
    scale: float | None = None
    zero: float | None = None
    zero_scaled: float | None = None
    worst: OpErrorRecord | None = None


class Summary:
    """Runs that are compared with one of them, the reference.

    Args:
        recording: the recording of a comparison. Raises RecordError for any other.

    Attributes:
        about: the reference, the number of steps, the seeds, ...
        runs: a record for each run.
    """

    def __init__(self, recording: Recording) -> None:
        comparisons = recording.of(ComparisonRecord)
        if len(comparisons) != 1:
            count = "no record" if not comparisons else "several records"
            raise RecordError(f"{count} of kind 'comparison': this is not a recording of a comparison")
        self.recording = recording
        self.about = comparisons[0]
        self.runs = recording.of(ComparedRecord)

    @property
    def failed(self) -> list[ComparedRecord]:
        """The runs that ended early or did not begin."""
        return [run for run in self.runs if run.failed]

    def curves(self, name: str, *, is_noise: bool = False) -> dict[int, CurveRecord]:
        """Return the curves of a run by seed.

        With `is_noise`, return the curves of the variant whose weights are off by one unit in the last place.
        """
        curves = [curve for curve in self.recording.of(CurveRecord) if curve.run == name and not curve.is_frozen]
        return {curve.seed: curve for curve in curves if curve.is_noise is is_noise}

    def differences(self, name: str, *, is_noise: bool = False) -> list[list[float]]:
        """Return how much larger the losses of a run are than the reference's.

        There is a list for each seed that both have, with the difference in each step.
        """
        reference = self.curves(self.about.reference)
        differences = []
        for seed, curve in self.curves(name, is_noise=is_noise).items():
            if seed in reference:
                pairs = zip(curve.losses, reference[seed].losses, strict=False)
                differences.append([loss - reference_loss for loss, reference_loss in pairs])
        return differences

    def final_differences(self, name: str) -> list[float]:
        """Return how much larger the final loss of a run is than the reference's, for each seed.

        Only the steps that both have count.
        """
        return [mean(last(of_seed)) for of_seed in self.differences(name)]

    @property
    def gained(self) -> float | None:
        """The gain: by how much training has changed the final loss of the reference; None if not measured.

        It is the difference from a run on the same batches whose weights are put back after each step.
        """
        reference = self.curves(self.about.reference)
        for frozen in self.recording.of(CurveRecord):
            if frozen.is_frozen and frozen.run == self.about.reference and frozen.seed in reference:
                pairs = zip(frozen.losses, reference[frozen.seed].losses, strict=False)
                return abs(mean(last([untrained - trained for untrained, trained in pairs])))
        return None

    def first_difference(self, name: str) -> float | None:
        """Return how far the loss of the first step is from the reference's: the largest finite distance of all seeds.

        None if the run began with other weights than the reference, or if no distance is finite.
        """
        of_seeds = [abs(of_seed[0]) for of_seed in self.differences(name) if of_seed and math.isfinite(of_seed[0])]
        run = next(run for run in self.runs if run.run == name)
        return max(of_seeds, default=None) if run.has_equal_weights else None

    @property
    def noise(self) -> float | None:
        """The difference of losses if weights are off by one unit in the last place; None if not measured.

        For each seed, take the mean over all steps or over the last steps, whichever is larger. The noise is the mean
        over the seeds, but at least the rounding error of a loss in float32.
        """
        means = []
        for of_seed in self.differences(self.about.reference, is_noise=True):
            magnitudes = [abs(difference) for difference in of_seed]
            # noise grows in long trainings, and the final loss is the mean over the last steps
            means.append(max(mean(magnitudes), mean(last(magnitudes))))
        if not means:
            return None
        largest_loss = 0.0
        for curve in self.curves(self.about.reference).values():
            for loss in curve.losses:
                if math.isfinite(loss):
                    largest_loss = max(largest_loss, abs(loss))
        rounding = largest_loss * 2.0**-24  # half a unit in the last place of float32
        return max(mean(means), rounding)

    @property
    def time_noise(self) -> float:
        """The largest ratio of the times of a step in two runs of the reference from the same seed; 1 with one run."""
        noise = self.curves(self.about.reference, is_noise=True)
        largest = 1.0
        for seed, curve in self.curves(self.about.reference).items():
            if seed in noise:
                fast, slow = sorted((curve.ms, noise[seed].ms))
                if fast > 0:
                    largest = max(largest, slow / fast)
        return largest

    @property
    def gradients(self) -> GradientRecord | None:
        """The gradients of the reference, counted by magnitude; None if they were not counted."""
        records = self.recording.of(GradientRecord)
        return next((record for record in records if record.run == self.about.reference), None)

    def layers(self, name: str) -> list[LayerRecord]:
        """Return the layers of a run, the one with the op that adds the largest error first."""
        errors = self._errors_by_module(name)
        layers = [layer for layer in self.recording.of(LayerRecord) if layer.run == name]
        return sorted(layers, key=lambda layer: (errors.get(layer.module, 0.0), layer.output or 0.0), reverse=True)

    def ops(self, name: str) -> list[OpErrorRecord]:
        """Return the ops that ran in 16 bits in a run, the one that adds the largest error first."""
        ops = [op for op in self.recording.of(OpErrorRecord) if op.run == name]
        return sorted(ops, key=lambda op: op.error, reverse=True)

    def _errors_by_module(self, name: str) -> dict[str, float]:
        """Return the largest error that an op adds in each module."""
        errors: dict[str, float] = {}
        for op in self.ops(name):
            errors.setdefault(op.module, op.error)
        return errors

    def rows(self) -> list[Row]:
        """Return a row for each run, in order."""
        return [self._row(run) for run in self.runs]

    def _row(self, run: ComparedRecord) -> Row:
        """Return the numbers of a run. Without losses, each is 0 or None."""
        name, reference = run.run, self.about.reference
        row = Row(name, run)
        curves = [curve for curve in self.curves(name).values() if curve.losses]
        if not curves:
            return row
        ms, scale = _find_median(curve.ms for curve in curves), curves[0].scales[-1]
        row = row._replace(
            steps=min(len(curve.losses) for curve in curves),
            loss=mean(mean(last(curve.losses)) for curve in curves),
            ms=ms,
            batches=curves[0].batches,
            skipped=sum(len(curve.skipped) for curve in curves),
            scale=scale,
        )
        plain_ms = _find_median(curve.ms for curve in self.curves(reference).values())
        if ms is not None and plain_ms:
            row = row._replace(factor=ms / plain_ms)
        differences = self.final_differences(name)
        if differences and name != reference:
            row = row._replace(difference=mean(differences))
            if len(differences) > 1 and all(map(math.isfinite, differences)):
                row = row._replace(spread=statistics.stdev(differences))
        gradients = self.gradients
        if gradients is not None and gradients.counts:
            zero, zero_scaled = _find_zero_share(gradients, run.low), _find_zero_share(gradients, run.low, scale)
            row = row._replace(zero=zero, zero_scaled=zero_scaled)
        return row._replace(worst=next(iter(self.ops(name)), None))

    @property
    def are_seeds_equal(self) -> bool:
        """Whether all of several seeds gave the same losses, as they do if the training sets its own seed."""
        losses = [curve.losses for curve in self.curves(self.about.reference).values()]
        return len(losses) > 1 and len(set(losses)) == 1


def _find_median(times: Iterable[float]) -> float | None:
    """Return the median of the times of runs; None without times, or if a run was not timed."""
    given = list(times)
    if not given or any(map(math.isnan, given)):
        return None
    return statistics.median(given)


def _find_zero_share(gradients: GradientRecord, low: str, scale: float = 1.0) -> float | None:
    """Return the share of gradients that a dtype rounds to zero at a loss scale.

    None for a scale of 0, inf or NaN; 0.0 for a dtype that is not in `FORMATS`, such as float32.
    """
    if not 0 < scale < math.inf:
        return None
    if low not in FORMATS:
        return 0.0
    return find_shares(gradients, low, scale).zero


def is_off(run: ComparedRecord) -> bool:
    """Return whether a verdict gives the error of the updates, and not the share that survives: see `MOST_KEPT`."""
    return run.kept is not None and run.kept > MOST_KEPT and run.update_error is not None


def last(values: Sequence[float]) -> Sequence[float]:
    """Return the last fifth of values, at least one and at most `LAST_STEPS`."""
    return values[-max(1, min(LAST_STEPS, len(values) // 5)) :]


def mean(values: Iterable[float]) -> float:
    """Return the mean. It is NaN without values, with a NaN, or with inf of both signs."""
    given = list(values)
    if not given:
        return math.nan
    return sum(given) / len(given)


class Spread(NamedTuple):
    """The lowest, the median and the highest value of all seeds, for each step."""

    low: list[float]
    middle: list[float]
    high: list[float]


def find_spread(curves: Sequence[Sequence[float]], width: int) -> Spread:
    """Return the spread of running means over `width` steps, for the steps that all seeds have."""
    smooth = [_running_means(curve, width) for curve in curves]
    steps = list(zip(*smooth, strict=False))
    return Spread(list(map(min, steps)), list(map(statistics.median, steps)), list(map(max, steps)))


def _running_means(curve: Sequence[float], width: int) -> list[float]:
    return [mean(curve[max(0, end - width) : end]) for end in range(1, len(curve) + 1)]


def sizes(curves: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return curves with the magnitudes of their values."""
    return [list(map(abs, curve)) for curve in curves]


def smoothed_steps(summary: Summary) -> int:
    """Return the number of steps over which drawn curves are smoothed."""
    return max(1, summary.about.steps // 25)


class Colours(NamedTuple):
    """The colour of a run on a light page, and on a dark one. Both have a contrast of at least 3 to their page."""

    light: str
    dark: str


# After Okabe and Ito, whose colours colour-blind readers can tell apart; then some more.
COLOURS = (
    Colours("#000000", "#ECECEC"),
    Colours("#0072B2", "#4AA8E8"),
    Colours("#D55E00", "#F0803C"),
    Colours("#009E73", "#2FBF95"),
    Colours("#B88000", "#F0B429"),
    Colours("#C2649A", "#E08FBD"),
    Colours("#2F9AD6", "#9AD6F7"),
    Colours("#7F7F7F", "#9A9A9A"),
    Colours("#8C564B", "#C08A7C"),
    Colours("#6A3D9A", "#AA8EE0"),
)


def pick_colours(names: Iterable[str]) -> dict[str, Colours]:
    """Return the colours of each run. They repeat once all are used."""
    return dict(zip(names, itertools.cycle(COLOURS), strict=False))
