"""`Tuner`: finds a list that keeps few modules or ops in float32, with one run in float32 and runs of candidates.

The reference run finds what overflows in 16 bits and what loses most precision. The first candidate keeps these in
float32. More is added until the gradients are right; then entries that are not needed are removed. The written list is
the file that the best run has read, with comments in front.
"""

import contextlib
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ...config import shipped
from ...errors import ArgumentValueError, SessionError, did_you_mean
from ...script_settings import Settings
from ...tables import count_of
from ..records import CheckedStepRecord, Recording
from ..runs import FunctionRunner, Run, Runner, check_count
from .entries import Entry, format_list, prune
from .ranking import UNITS, Ranking
from .reference import WHOLE_MODEL
from .result import Trial, TuneResult, choose_best, describe_worst, format_header
from .search import find_fewest
from .verdict import Verdict, find_non_finite, judge

FINE = 1e-3
"""A tolerance below this is compared with what float32 itself can hold."""


class Tuner:
    """Finds the fewest modules or ops of a training that must stay in float32.

    Args:
        runner: runs the training.
        opt_level: the level to tune for; None: the script's own.
        extends: the list to start from, a shipped name or a path; None: the script's own lists.
        units: "modules", "ops" (also outside of modules), or "both": modules, and ops outside of modules.
        tolerance: largest relative error (L2) of each parameter's gradient; a fifth of it for the loss.
        steps: number of steps to compare, each from the initial weights of the training.
        seed: seed of each run.
        max_runs: limit on all runs.
        out: path at which the list will be written; its `extends` is relative to that path.
        log: called with a line for each run.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        opt_level: str | None = "O1",
        extends: str | os.PathLike[str] | None = None,
        units: str = "modules",
        tolerance: float = 0.1,
        steps: int = 2,
        seed: int = 0,
        max_runs: int = 40,
        out: str | os.PathLike[str] | None = None,
        log: Callable[[str], object] = print,
    ) -> None:
        if units not in UNITS:
            raise ArgumentValueError(f"units={units!r} is not one of {', '.join(UNITS)}.{did_you_mean(units, UNITS)}")
        check_count(steps, "steps")
        check_count(max_runs, "max_runs", 2)
        if not isinstance(tolerance, (int, float)) or not tolerance > 0:
            raise ArgumentValueError(
                f"tolerance={tolerance!r} must be a number above 0: pass 0.1 for a tenth of a gradient"
            )
        self._runner = runner
        self._opt_level = opt_level
        self._extends = extends
        self._units = units
        self._tolerance = tolerance
        self._steps = steps
        self._seed = seed
        self._max_runs = max_runs
        self._out = None if out is None else Path(out).absolute()
        self._log = log
        self._runs = 0
        self._trials: dict[tuple[Entry, ...], Trial] = {}
        self._loss_scale: float | None = None

    def run(self) -> TuneResult:
        """Search, and return the best list.

        Raises:
            RunFailedError: the run in float32 ended early.
            SessionError: there is nothing to tune, or the run in float32 is not finite.
            KeyboardInterrupt: during the run in float32. A later Ctrl-C ends the search.
        """
        with self._folder() as folder:
            self._file = folder / f".amp-patch-tune-{os.getpid()}.yaml"
            try:
                self._refer(folder)
                return self._search()
            finally:
                self._file.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _folder(self) -> Iterator[Path]:
        """Give the folder in which candidates are written: that of the list, to which paths in it are relative."""
        if self._out is not None:
            yield self._out.parent
            return
        with tempfile.TemporaryDirectory(prefix="amp-patch-") as folder:
            yield Path(folder)

    # ---- runs --------------------------------------------------------------------------------------------------------

    def _refer(self, folder: Path) -> None:
        """Run in float32, and learn what there is."""
        self._bases = [] if self._extends is None else [_spell(os.fspath(self._extends), folder, self._out)]
        everything = [Entry("module", WHOLE_MODEL)]
        self._reference = self._watch("tuning.reference:Reference", format_list(self._bases, everything, {}))
        if self._extends is None:
            own = self._reference.run.lists[:-1]
            self._bases = [_spell(name, folder, self._out) for name in own]
        if fault := find_non_finite(self._reference):
            raise SessionError(f"nothing to tune: in float32, too, {fault}")
        taken = len(self._reference.of(CheckedStepRecord))
        if not taken:
            raise SessionError("nothing to tune: the run ended before a step was taken")
        self._ranking = Ranking(self._reference, self._units)
        self._log(f"run {self._runs}: float32, {count_of(taken, 'step')}")

    def _watch(self, probe: str, text: str, **options: object) -> Recording:
        """Run once under a list."""
        if self._runs >= self._max_runs:
            raise _EnoughRunsError
        self._runs += 1
        self._file.write_text(text, encoding="utf-8")
        settings = Settings(self._opt_level, (str(self._file),) if text else ())
        return self._runner(Run(probe, {"steps": self._steps, **options}, settings, self._seed))

    def _format(self, entries: Sequence[Entry]) -> str:
        return format_list(self._bases, entries, {entry: self._ranking.explain(entry) for entry in entries})

    def _passes(self, entries: Sequence[Entry]) -> bool:
        """Test entries, once."""
        candidate = prune(entries)
        if candidate not in self._trials:
            verdict = self._try(candidate)
            lower = self._ranking.find_scale_of_loss(self._loss_scale)
            if verdict.is_skipped and not self._trials and lower is not None:
                self._log(f"run {self._runs}: {verdict.fault}; again at {lower:g}")
                self._loss_scale = lower
                verdict = self._try(candidate)
            trial = Trial(self._runs, candidate, self._ranking.count_modules(candidate), verdict)
            self._trials[candidate] = trial
            self._log(str(trial))
        return self._trials[candidate].verdict.passed

    def _try(self, candidate: Sequence[Entry]) -> Verdict:
        """Run under a candidate. What the training raises counts, too: it may come of an overflow."""
        try:
            run = self._watch("tuning.check:Check", self._format(candidate), loss_scale=self._loss_scale)
            return judge(self._reference, run, self._tolerance)
        except _EnoughRunsError:
            raise
        except Exception as error:
            return Verdict(False, math.inf, "", math.inf, _describe(error))

    def _measure_noise(self) -> float:
        """Return by how much the worst gradient in float32 is off if each weight is off by one ulp."""
        text = format_list(self._bases, [Entry("module", WHOLE_MODEL)], {})
        noise = judge(self._reference, self._watch("tuning.reference:Reference", text, is_off=True), math.inf).worst
        self._log(f"run {self._runs}: float32 with all weights off by one ulp: worst {noise:.2g}")
        return noise

    # ---- the search --------------------------------------------------------------------------------------------------

    def _search(self) -> TuneResult:
        forced = self._ranking.find_forced()
        ranked = self._ranking.rank(forced)
        self._loss_scale = self._ranking.find_loss_scale(forced)
        reason, noise, is_searched, is_interrupted = "", None, False, False
        try:
            if self._tolerance < FINE and (noise := self._measure_noise()) >= self._tolerance:
                reason = "noise"
            else:
                found = find_fewest(self._passes, forced, ranked)
                is_searched = True
                if found is None and not self._passes(self._ranking.find_everything([*forced, *ranked])):
                    noise = self._measure_noise() if noise is None else noise
        except _EnoughRunsError:
            reason = f"stopped after {self._runs} runs (max_runs)"
        except KeyboardInterrupt:
            reason, is_interrupted = f"interrupted in run {self._runs}", True
        best = choose_best(list(self._trials.values()))
        result = self._conclude(best, "" if reason == "noise" else reason, noise, is_searched=is_searched)
        return replace(result, is_interrupted=is_interrupted)

    def _conclude(self, best: Trial | None, stopped: str, noise: float | None, *, is_searched: bool) -> TuneResult:
        tolerance = f"a tolerance of {self._tolerance:g}"
        floor = (
            ""
            if noise is None
            else f"; float32 itself is off by {noise:.2g} where its weights are off by one ulp (the noise floor)"
        )
        is_reached = best is not None and best.verdict.passed
        if is_reached and best is not None and not best.entries:
            message = f"nothing needs float32 at {tolerance}: {describe_worst(best.verdict)}"
        elif is_reached and best is not None:
            count = len(best.entries)
            message = f"{count} entr{'y' if count == 1 else 'ies'} in float32: {describe_worst(best.verdict)}"
            before = self._trials.get(())
            message += "" if before is None else f"; with none: {describe_worst(before.verdict)}"
        else:
            message = f"nothing reaches {tolerance}"
            message += "" if best is None else f"; the best: {describe_worst(best.verdict)}"
            message += floor + (self._ranking.find_hint() if is_searched else "")
        if stopped:
            message += f"; {stopped}" + (", so there may be entries that are not needed" if is_reached else "")
        if self._loss_scale is not None:
            message += f"; at a loss scale of {self._loss_scale:g}, since gradients overflow at the script's own"
        text = ""
        if best is not None and best.entries:
            text = format_header(self._reference.run, message, self._tolerance, self._runs) + self._format(best.entries)
        return TuneResult(
            () if best is None else best.entries, tuple(self._trials.values()), self._runs, is_reached, message, text
        )


class _EnoughRunsError(Exception):
    """The budget of runs is spent."""


def _describe(error: Exception) -> str:
    """Return an error as one line: the last, which with a traceback says what it was."""
    lines = str(error).strip().splitlines()
    return lines[-1].strip() if len(lines) > 1 else f"{type(error).__name__}: {error}"


def _spell(name: str, folder: Path, out: Path | None) -> str:
    """Return how a list in a folder names another: a shipped list by its name, others by a path."""
    if name in shipped.shipped_names():
        return name
    path = os.path.abspath(name)
    return path if out is None else Path(os.path.relpath(path, folder)).as_posix()


def tune(
    train: Callable[[], object],
    *,
    opt_level: str | None = "O1",
    extends: str | os.PathLike[str] | None = None,
    units: str = "modules",
    tolerance: float = 0.1,
    steps: int = 2,
    seed: int = 0,
    max_runs: int = 40,
    out: str | os.PathLike[str] | None = None,
    log: Callable[[str], object] = print,
) -> TuneResult:
    """Find the fewest modules or ops that must stay in float32 to keep gradients within a tolerance.

    `train` is a function without arguments that creates its model, calls `amp.initialize` and trains. It is called up
    to `max_runs` times, and stopped after `steps` steps. The other arguments, and the errors, are those of `Tuner`. The
    list is written to `out` if it has entries.
    """
    tuner = Tuner(
        FunctionRunner(train),
        opt_level=opt_level,
        extends=extends,
        units=units,
        tolerance=tolerance,
        steps=steps,
        seed=seed,
        max_runs=max_runs,
        out=out,
        log=log,
    )
    result = tuner.run()
    if out is not None and result.text:
        result.to_yaml(out)
    return result
