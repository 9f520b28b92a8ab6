"""`Assessment`: the verdict on a run in words, compared with the reference.

The verdict says whether the run trains as well, how fast it is, and how much memory it needs. Differences of losses are
judged by two measurements of the reference (see `Summary`): the *noise*, the difference that one unit in the last place
of the weights makes, and the *gain*, the change of the loss by training.
"""

import math

from ...tables import count_of
from ..records import ComparedRecord
from .summary import Row, Summary, is_off

WITHIN = 2.0
"""A difference up to this multiple of the noise is within noise."""

ALIKE = 1e-2
"""A difference of at most this share of the reference's loss means nothing, unless it is large compared with the
gain.
"""

ALIKE_IN_SEEDS = 1e-3
"""The same share for runs from at least `SEEDS` seeds. One seed cannot show such small differences."""

ALIKE_IN_GAIN = 0.1
"""A difference is large compared with the gain if it is above this share of the gain."""

# ALIKE_IN_GAIN, RESOLVED and OFF were chosen by measurements of the first 50 steps, at O1, O2, O4 and O5.
# Trainings without a fault (examples/, the training of docs/levels.md, GPTs, a transformer, a GAN, a VAE, convolutions
# with warm-up): losses are off by 2e-5 to 0.06 of the gain, gradients of a layer by 3e-4 to 0.085. Where the gain is
# only 10 to 17 times the difference of the first losses, losses are off by 0.08 to 0.32 of the gain.
# Trainings with a fault (float16 gradients that underflow, large constants, sines of large numbers): losses are off by
# 0.26 to 1.0 of the gain, gradients by 0.95 to 1.4.

LEARNED = 10.0
"""The reference has learned something if it gained more than this multiple of the noise."""

RESOLVED = 20.0
"""A difference that is large compared with the gain is judged only if the gain is more than this multiple of the
difference of the first losses. The first losses differ by rounding alone, because the runs start from equal weights.
"""

OFF = 0.3
"""A run is worse if the relative error of a layer's gradients in the first step is above this, and finite."""

DROPPED = 0.05
"""A run is worse if it drops more than this share of its batches, and more than one batch. A batch is dropped if no
step uses it.
"""

MOST_SKIPS = 20
"""A loss scale that starts at 2**16 usually fits after at most this many skipped steps. A run is worse if it skips all
of its steps, and these are more than this.
"""

WITHIN_NOISE = "within noise"

TIMED_STEPS = 10
"""Times are not judged if the run took fewer steps than this."""

SEEDS = 3
"""From this number of seeds on, their spread shows whether a difference means something."""

CLEAR, CLEAR_OF_NOISE = 0.1, 10.0
"""A difference is too large for chance if it is above `CLEAR` times the loss (or times the gain, if that is smaller),
and above `CLEAR_OF_NOISE` times the noise.
"""

_ALIKE_IN_COST = 0.05  # times and memory that differ by a smaller share count as equal


class Assessment:
    """Compares a run with the reference, in words."""

    def __init__(self, summary: Summary, row: Row) -> None:
        self.row = row
        self._summary = summary
        self._reference = summary.about.reference  # the name of the run
        self._reference_row = next(known for known in summary.rows() if known.name == self._reference)
        self._has_seeds = len(summary.about.seeds) >= SEEDS and not summary.are_seeds_equal
        # the loss of the reference, and how much larger the loss of the run is
        self._reference_loss = self._difference = math.nan
        if self._reference_row.loss is not None:
            self._reference_loss = self._reference_row.loss
        if row.difference is not None:
            self._difference = row.difference

    @property
    def _is_all_skipped(self) -> bool:
        """Whether every step from every seed was skipped."""
        steps = sum(len(curve.losses) for curve in self._summary.curves(self.row.name).values())
        return 0 < steps == self.row.skipped

    @property
    def may_be_chance(self) -> bool:
        """Whether the losses differ, but so little that it may be chance, and too few seeds were run to tell."""
        if not math.isfinite(self._difference) or self._find_reason() or self._has_seeds:
            return False
        if self._judge_training():
            return False
        return not self._is_clear(abs(self._difference))

    def _is_clear(self, difference: float) -> bool:
        """Return whether a difference of losses is too large to be chance."""
        noise, size, gained = self._summary.noise or 0.0, abs(self._reference_loss), self._summary.gained
        if gained is not None:
            size = min(size, gained)  # a large constant in the loss says nothing about the training
        return difference > CLEAR * size and difference > CLEAR_OF_NOISE * noise

    def of_loss(self) -> str:
        """Return in words whether the run trains as well as the reference."""
        reference = self._reference
        if not math.isfinite(self._reference_loss):
            return f"not judged, {reference} has no finite loss"
        if not math.isfinite(self._difference):
            return f"worse than {reference} (the loss is not finite)"
        verdict = self._judge_training()
        if verdict:
            return verdict
        if self._difference == 0:
            return f"as good as {reference} (the same loss)"
        shown = f"loss {self._describe_difference()}"  # such as "loss 0.5% higher"
        # the number of seeds with a clearly larger loss than the same seed of the reference
        worse_seeds = sum(map(self._is_clear, self._summary.final_differences(self.row.name)))
        if self._has_seeds and worse_seeds and self._difference > 0:
            seeds = count_of(len(self._summary.about.seeds), "seed")
            return f"worse than {reference} in {worse_seeds} of {seeds} ({shown})"
        reason = self._find_reason()
        noise, size = self._summary.noise or 0.0, abs(self._reference_loss)
        if reason == WITHIN_NOISE and abs(self._difference) > ALIKE * size:
            share = f"which is {noise / size:.0%} of the loss" if size else "and the loss is 0"
            return f"not told apart from {reference} ({shown}, {reason}, {share})"
        if reason:
            return f"as good as {reference} ({shown}, {reason})"
        if self._difference > 0 and self.row.skipped:
            shown += f", {count_of(self.row.skipped, 'step')} of {self.row.steps} skipped"
        if self._has_seeds:
            verdict = "better"
            if self._difference > 0:
                verdict = "worse"
            return f"{verdict} than {reference} ({shown}, beyond the spread of the seeds)"
        if self._difference < 0:
            return f"no worse than {reference} ({shown})"
        if self.may_be_chance:
            return f"perhaps worse than {reference} ({shown})"
        return f"worse than {reference} ({shown})"

    def _judge_training(self) -> str:
        """Return a verdict from dropped batches, skipped steps, lost updates, gradients, or the gain.

        Returns "" if these say nothing, so that the last losses decide.
        """
        reference, run, steps = self._reference, self.row.run, self.row.steps
        dropped = self._count_dropped()
        if dropped:
            batches = f"{dropped} of {self.row.batches} batches"
            return f"worse than {reference} (it drops {batches}, so its loss is of other data)"
        if self._is_all_skipped:
            if self._summary.gained is not None and steps > MOST_SKIPS:
                return f"worse than {reference} (all {steps} steps are skipped, so nothing is learned)"
            return f"not judged against {reference}, since nothing was learned (loss {self._describe_difference()})"
        if run.kept is not None:
            return f"worse than {reference} ({_describe_lost_updates(run)})"
        error = run.gradient_error
        # inf may only say that the step of the measurement was skipped
        if error is not None and OFF < error < math.inf:
            return (
                f"worse than {reference} (gradients of {run.gradient_worst} are off by {error:.2g} in the first step)"
            )
        return self._judge_gain()

    def _judge_gain(self) -> str:
        """Return the verdict "not judged" if the reference has learned too little to compare losses; else ""."""
        gained, noise = self._summary.gained, self._summary.noise
        if gained is None or noise is None:
            return ""
        if gained <= LEARNED * noise:
            return f"not judged: {self._reference} has learned nothing in these steps"
        rounding = self._summary.first_difference(self.row.name)
        seems_worse = abs(self._difference) > ALIKE_IN_GAIN * gained
        if seems_worse and rounding is not None and gained <= RESOLVED * rounding:
            return (
                f"not judged: {self._reference} has learned too little in these steps (its loss gained {gained:.1e};"
                f" rounding alone is {rounding:.1e})"
            )
        return ""

    def _count_dropped(self) -> int:
        """Return how many batches no step uses; 0 if they are only a few.

        With gradient accumulation, a step uses several batches. How many is taken from the reference.
        """
        reference = self._reference_row
        if not (reference.batches and reference.steps and self.row.batches):
            return 0
        batches_in_steps = round(self.row.steps * reference.batches / reference.steps)
        dropped = self.row.batches - batches_in_steps
        return dropped if dropped > max(1, DROPPED * self.row.batches) else 0

    def _find_reason(self) -> str:
        """Return why the difference of the losses means nothing, such as "within noise"; "" if it means something."""
        size, noise = abs(self._difference), self._summary.noise
        if noise is not None and size <= WITHIN * noise:
            return WITHIN_NOISE
        share = ALIKE
        if self._has_seeds:
            share = ALIKE_IN_SEEDS
        gained = self._summary.gained
        is_large_beside_gain = gained is not None and size > ALIKE_IN_GAIN * gained
        if size <= share * abs(self._reference_loss) and not is_large_beside_gain:
            return f"below {share * 100:g}%"
        if self._has_seeds and self._is_within_seeds():
            return "within the spread of the seeds"
        return ""

    def _describe_difference(self) -> str:
        """Return the difference of the losses in words, such as "0.5% higher"."""
        size, loss = abs(self._difference), abs(self._reference_loss)
        if not size:
            return "the same"
        direction = "lower"
        if self._difference > 0:
            direction = "higher"
        gained = self._summary.gained
        # small compared with a loss that has a large constant, but not compared with the gain
        if gained and ALIKE_IN_GAIN * gained < size < ALIKE * loss:
            return f"{direction} by {size / gained:.0%} of what {self._reference} gained"
        if loss and size / loss < 1e-4:
            return f"less than 0.01% {direction}"
        if loss and size / loss < 100:
            return f"{size / loss:.2%} {direction}"
        return f"{size:.1e} {direction}"

    def _is_within_seeds(self) -> bool:
        """Return whether the mean difference over the seeds is at most two standard errors. False if not known."""
        seeds = len(self._summary.differences(self.row.name))
        if self.row.spread is None or seeds < SEEDS:
            return False
        return abs(self._difference) <= 2 * self.row.spread / math.sqrt(seeds)

    def is_faster(self) -> bool | None:
        """Return whether the run is faster than the reference, by more than the noise of times.

        None if times are not judged: see `of_time`.
        """
        factor = self.row.factor
        if self._is_all_skipped or factor is None or self.row.steps < TIMED_STEPS:
            return None
        if self._reference_row.ms is None or self.row.ms is None:
            return None
        return factor < 1 / self._find_time_noise()

    def _find_time_noise(self) -> float:
        """Return the factor up to which times of a step count as equal."""
        return max(self._summary.time_noise, 1 + _ALIKE_IN_COST)

    def of_time(self) -> str:
        """Return in words whether the run is faster than the reference."""
        factor, time_noise = self.row.factor, self._summary.time_noise
        if self._is_all_skipped:
            return "time and memory not judged, since every step was skipped"
        for row in (self._reference_row, self.row):
            if row.ms is None:
                return f"time not judged, since {row.name} gives the script float32 op by op"
        if factor is None or self.row.steps < TIMED_STEPS:
            return f"time not judged after {count_of(self.row.steps, 'step')}: {TIMED_STEPS} are enough"
        noise = self._find_time_noise()
        if 1 / noise <= factor <= noise:
            return f"time within noise (two runs of {self._reference}: a factor of {time_noise:.2f})"
        verdict = "slower"
        if factor < 1:
            verdict = "faster"
        return f"{verdict} (a step takes {factor:.2f} times as long)"

    def of_memory(self) -> str:
        """Return in words how much memory the run needs.

        Return "" if it needs about as much as the reference, if this is not known, or if every step was skipped.
        """
        peak, reference_peak = self.row.run.peak, self._reference_row.run.peak
        if self._is_all_skipped or peak is None or not reference_peak:
            return ""
        factor = peak / reference_peak
        if abs(factor - 1) <= _ALIKE_IN_COST:
            return ""
        return f"; {factor:.2f} times the peak memory"


def _describe_lost_updates(run: ComparedRecord) -> str:
    """Return in words what a run loses of its updates: how many of them, or how far they are off."""
    updates = {
        "weights": "weight updates",
        "sum": f"sums at {run.kept_worst}",
        "line": f"updates at {run.kept_worst}",
    }.get(run.lost_by, f"updates of {run.kept_worst}")
    if is_off(run):
        return f"the {updates} are off by {run.update_error:.0%}"
    return f"{1 - (run.kept or 0.0):.0%} of the {updates} are lost"
