"""`Tuner`: finds an op list that keeps few modules or ops in float32, with one run in float32 and runs of candidates.

The run in float32 shows which ops would overflow in 16 bits, and which would lose most precision. A *candidate* is an
op list whose entries keep modules or ops in float32. The first candidate has entries for what would overflow.
Entries are added until losses and gradients agree with the run in float32, and then needless entries are removed. These
runs compare a few steps. A traced run then checks more steps with the best list, and entries are added against the
faults that it finds. The written list has the entries of the best run.
"""

import contextlib
import inspect
import math
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ...config import levels, list_names
from ...errors import SessionError
from ...files import write_file
from ...script_settings import Settings
from ...tables import count_of
from ..causes import find_remedy
from ..fault_text import describe_briefly
from ..recordings import Recording
from ..records import CheckedStepRecord
from ..runs import FunctionRunner, Run, RunFailedError, Runner, may_depend_on_dtype
from .entries import ListEntry, find_entries, format_list, prune
from .float32_run import WHOLE_MODEL
from .options import TuneOptions
from .ranking import Ranking
from .result import Trial, TuneResult, choose_best, describe_worst, format_header
from .search import find_fewest
from .traced import TRACED, Traced, read_trace
from .verdict import Verdict, explain_non_finite, find_zero_gradients, judge

FLOAT32 = "tuning.float32_run:Float32Run"

_MAX_TRACED_RUNS = 4  # each has the entries that the faults of earlier traced runs need


class Tuner:
    """Finds few modules or ops of a training that have to stay in float32.

    Args:
        runner: runs the training.
        options: the fields of `TuneOptions`.
    """

    def __init__(self, runner: Runner, **options: Any) -> None:
        self.options = TuneOptions(**options)
        self._runner = runner
        self._runs = 0  # the number of runs of the search so far
        self._trials: dict[tuple[ListEntry, ...], Trial] = {}  # by the entries of the candidate
        self._loss_scale: float | None = None  # the initial scale in runs of candidates; None: the script's own
        self._from_traces: list[ListEntry] = []  # entries against the faults of traced runs, in all further candidates
        self._reasons: dict[ListEntry, str] = {}  # the faults of traced runs, by the entries that they need
        self._errors: list[str] = []  # the errors that the training raised with candidates
        self._everything: list[ListEntry] = []  # the candidate that keeps as much as possible in float32
        self._has_tried_everything = False
        # which 16 bits the run in float32 keeps because the script asks for them, or why; "" if it keeps none
        self._not_float32 = ""
        # set by `run`: the file of the candidate, the lists that it extends, and the recording of the run in float32
        self._file: Path
        self._bases: list[str] = []
        self._reference: Recording
        self._ranking: Ranking

    def run(self) -> TuneResult:
        """Search, and return the best list that was found.

        Raises:
            RunFailedError: the run in float32 ended early. If the training is a Python function
                (`insight.tune(train)`), its own exception may propagate instead.
            SessionError: there is nothing to tune, or the run in float32 is not finite.
            KeyboardInterrupt: Ctrl-C during the run in float32. A later Ctrl-C ends the search, with the best list so
                far.
        """
        with contextlib.ExitStack() as stack:
            if self.options.out is not None:  # paths in a list are relative to its folder
                folder = Path(self.options.out).absolute().parent
            else:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="amp-patch-")))
            self._file = folder / f".amp-patch-tune-{os.getpid()}.yaml"
            try:
                self._run_in_float32(folder)
                return self._search()
            finally:
                self._file.unlink(missing_ok=True)

    # ---- runs --------------------------------------------------------------------------------------------------------

    def _run_in_float32(self, folder: Path) -> None:
        """Make the run in float32. Raises SessionError if runs of candidates cannot be compared with it.

        `folder`: the folder of the list.
        """
        if self.options.extends is not None:
            self._bases = [self._spell(os.fspath(self.options.extends), folder)]
        list_text = format_list(self._bases, [ListEntry("module", WHOLE_MODEL)], {})
        try:
            self._reference = self._make_run(FLOAT32, list_text)
        except RunFailedError as error:
            if not error.was_widened and may_depend_on_dtype(error):
                raise
            if not error.was_widened:
                raise RunFailedError(f"the training fails in float32, so no list was tried:\n{error}") from error
            # it may have failed because it got float32 where the script asks for 16 bits: keep these 16 bits
            self._not_float32 = _last_line(error)
            self._reference = self._make_run(FLOAT32, list_text)
        if self._reference.run.not_widened:
            self._not_float32 = ", ".join(self._reference.run.not_widened)
        if self._not_float32:
            self.options.log(f"the run in float32 keeps 16 bits that the script itself makes: {self._not_float32}")
        if self.options.extends is None:
            # the lists of the script; the last list of the run is the tuner's own
            self._bases = [self._spell(name, folder) for name in self._reference.run.lists[:-1]]
        self._check_reference()
        self._ranking = Ranking(self._reference, self.options.units)
        steps = count_of(len(self._reference.of(CheckedStepRecord)), "step")
        self.options.log(f"run {self._runs}: float32, {steps}")

    def _check_reference(self) -> None:
        """Raise SessionError if there is nothing to tune, or if the run in float32 is not finite."""
        level = self._reference.run.opt_level
        without_ops = [known.name for known in levels.read_levels() if not known.patches_functions]
        if self.options.units == "ops" and level in without_ops:
            raise SessionError(
                f"nothing to tune: at {level}, which casts the model, lists have no ops: tune modules instead of ops"
            )
        fault = explain_non_finite(self._reference)
        if fault:
            raise SessionError(f"nothing to tune: with every module in float32, too, {fault}")
        if not self._reference.of(CheckedStepRecord):
            raise SessionError("nothing to tune: the run ended before a step was taken")
        with_zero_gradients, parameter_count = find_zero_gradients(self._reference)
        if len(with_zero_gradients) == parameter_count:
            raise SessionError(
                "nothing to tune: no parameter that an optimizer holds has a gradient other than zero. Check that the"
                " optimizer was made from the parameters of the model that is trained"
            )

    def _make_run(self, probe: str, list_text: str, **options: object) -> Recording:
        """Make a run of the search. Raises _EnoughRunsError if there were `max_runs` already."""
        if self._runs >= self.options.max_runs:
            raise _EnoughRunsError("max_runs")
        self._runs += 1
        return self._run(probe, list_text, steps=self.options.steps, **options)

    def _run(self, probe: str, list_text: str, **options: object) -> Recording:
        """Make a run under a probe, with a list of this text; without a list if the text is empty.

        `options`: arguments of the probe.
        """
        lists: tuple[str, ...] = ()
        if list_text:
            write_file(self._file, list_text)
            lists = (str(self._file),)
        settings = Settings(self.options.opt_level, lists)
        in_float32 = probe == FLOAT32 and not self._not_float32
        return self._runner(Run(probe, options, settings, self.options.seed, "last-run", in_float32))

    def _spell(self, name: str, folder: Path) -> str:
        """Return the name by which a list in `folder` can extend the list `name`: a shipped name, or a path."""
        if list_names.is_shipped(name):
            return name
        if self.options.out is None:
            return os.path.abspath(name)
        return Path(os.path.relpath(name, folder)).as_posix()

    def _format(self, entries: Sequence[ListEntry]) -> str:
        """Return the text of a list with these entries and their reasons."""
        reasons = {}
        for entry in entries:
            reason = self._reasons.get(entry) or self._ranking.find_reason(entry)
            reasons[entry] = reason or self._explain_by_run(entries, entry)
        return format_list(self._bases, entries, reasons)

    def _explain_by_run(self, entries: Sequence[ListEntry], needed: ListEntry) -> str:
        """Return the reason for `needed`, one of `entries`: what went wrong in the run without it, if there was one."""
        without = prune([entry for entry in entries if entry != needed])
        trial = self._trials.get(without)
        if trial is None or trial.verdict.passed:
            return "kept by the search; the error of no single op shows why"
        return f"without it: {trial.verdict.fault}"

    def _passes(self, entries: Sequence[ListEntry]) -> bool:
        """Return whether a run with these entries and `_from_traces` passes. A trial is not repeated."""
        candidate = prune([*entries, *self._from_traces])
        if candidate not in self._trials:
            verdict = self._try(candidate)
            if not self._trials and verdict.is_skipped:
                verdict = self._try_lower_scales(candidate, verdict)
            trial = Trial(self._runs, candidate, self._ranking.count_modules(candidate), verdict)
            self._trials[candidate] = trial
            self.options.log(str(trial))
            self._check_errors()
        return self._trials[candidate].verdict.passed

    def _try_lower_scales(self, candidate: Sequence[ListEntry], verdict: Verdict) -> Verdict:
        """Repeat the run of the first candidate, which skipped a step, at lower loss scales. Return the last verdict.

        If the candidate passes at none of these scales, the search goes on at `Ranking.find_scale_of_loss`, or if that
        is None, at the scale of the first run: at lower scales, more gradients become zero.
        """
        fallback = self._ranking.find_scale_of_loss(self._loss_scale) or self._loss_scale
        for lower_scale in self._ranking.find_lower_scales(self._loss_scale):
            # no scale makes a loss finite
            may_fit = verdict.is_skipped and math.isfinite(verdict.loss_error)
            if not may_fit or self._runs >= self.options.max_runs:
                break
            self.options.log(f"run {self._runs}: {verdict.fault}; again at {lower_scale:g}")
            self._loss_scale = lower_scale
            verdict = self._try(candidate)
        if not verdict.passed:
            self._loss_scale = fallback
        return verdict

    def _check_errors(self) -> None:
        """Once the last two errors that candidates raised are the same, try to keep everything in float32.

        Raises _EnoughRunsError if the training raises this error again, or raises none and does not pass.
        """
        has_same_twice = len(self._errors) > 1 and self._errors[-1] == self._errors[-2]
        if not has_same_twice or self._has_tried_everything:
            return
        self._has_tried_everything = True
        error, error_count = self._errors[-1], len(self._errors)
        if self._passes(self._everything):
            return
        if len(self._errors) == error_count:
            raise _EnoughRunsError(f"everything in float32 does not pass either, after {error}")
        if self._errors[-1] == error:
            raise _EnoughRunsError(f"the same error with every list: {error}")

    def _try(self, candidate: Sequence[ListEntry]) -> Verdict:
        """Make a run with a candidate, and judge it.

        An error of the training does not end the search, because an overflow may be its cause: the candidate fails.
        """
        try:
            run = self._make_run("tuning.check:Check", self._format(candidate), loss_scale=self._loss_scale)
            return judge(self._reference, run, self.options.tolerance)
        except _EnoughRunsError:
            raise
        except Exception as error:
            self._errors.append(_last_line(error))
            return Verdict(False, math.inf, "", math.inf, self._errors[-1])

    # ---- the search --------------------------------------------------------------------------------------------------

    def _search(self) -> TuneResult:
        """Try candidates, trace the best one, and return the result, also after Ctrl-C or too many runs."""
        forced = self._ranking.find_forced()
        ranked = self._ranking.rank(forced)
        self._everything = self._ranking.find_everything([*forced, *ranked])
        self._loss_scale = self._ranking.find_loss_scale(forced)
        stopped, is_interrupted = "", False
        traced = Traced("not traced")
        try:
            # if the list with all candidate entries does not pass, try the one that keeps the whole model in float32
            if find_fewest(self._passes, forced, ranked) is None:
                self._passes(self._everything)
            traced = self._trace()
        except _EnoughRunsError as enough:
            stopped = f"stopped after {self._runs} runs ({enough})"
        except KeyboardInterrupt:
            stopped, is_interrupted = f"interrupted in run {self._runs}", True
        trials = tuple(self._trials.values())
        best = self._choose_best()
        message = f"{self._describe(best, stopped)}; {traced.text}"
        if traced.fault is not None:
            message = f"a fault remains in a step that was not compared: {message}"
        if best is None:
            return TuneResult((), trials, self._runs, False, message, "", is_interrupted)
        text = ""
        if best.entries:
            text = format_header(self._reference.run, message, self.options.tolerance, self._runs) + self._format(
                best.entries
            )
        is_reached = best.verdict.passed and traced.fault is None
        return TuneResult(best.entries, trials, self._runs, is_reached, message, text, is_interrupted)

    def _choose_best(self) -> Trial | None:
        """Return the best trial among those that cover the entries in `_from_traces`."""
        trials = self._trials.values()
        return choose_best([trial for trial in trials if prune([*trial.entries, *self._from_traces]) == trial.entries])

    def _trace(self) -> Traced:
        """Trace more steps with the best list if it passes. If a fault needs more entries, try them and trace again."""
        # The search compares few steps, and the weights are set back after each. With the weights of later steps, other
        # values may overflow.
        for _ in range(_MAX_TRACED_RUNS):
            best = self._choose_best()
            if best is None or not best.verdict.passed:
                break
            traced = self._trace_once(best.entries)
            self.options.log(traced.text)
            if traced.fault is not None and traced.fault.is_in_backward and self._loss_scale is not None:
                # the cause may be the script's loss scale, which traced runs use: the search has used a lower one
                return Traced(traced.text)
            needed: list[ListEntry] = []
            if traced.fault is not None:
                needed = find_entries(find_remedy(traced.fault, self._reference.run), self.options.units)
                self._reasons.update(dict.fromkeys(needed, f"trace: {describe_briefly(traced.fault)}"))
            if set(needed) <= set(best.entries):
                return traced  # there is no fault, or no further entry helps against it
            self._from_traces = [*self._from_traces, *needed]
            self._passes(best.entries)  # makes a trial, which the next round may choose
        return Traced("not traced with these entries")

    def _trace_once(self, entries: Sequence[ListEntry]) -> Traced:
        """Make a traced run with these entries."""
        steps = max(TRACED, self.options.steps)
        try:
            recording = self._run(
                "tracer:Tracer", self._format(entries), last=steps, counts_skipped=False, keeps_steps=True
            )
        except RunFailedError as error:  # a fault may be the cause: the recording has it
            if error.recording is None:
                return Traced(f"not traced: {_last_line(error)}")
            recording = error.recording
        except Exception as error:
            return Traced(f"not traced: {_last_line(error)}")
        return read_trace(recording)

    def _describe(self, best: Trial | None, stopped: str) -> str:
        """Return the result of the search in words. `stopped` says why it ended early; "" if it did not."""
        steps = count_of(len(self._reference.of(CheckedStepRecord)), "step")
        tolerance = f"a tolerance of {self.options.tolerance:g}"
        if best is not None and best.verdict.passed:
            message = f"nothing needs float32 at {tolerance}: {describe_worst(best.verdict)}"
            if best.entries:
                noun = "entries"
                if len(best.entries) == 1:
                    noun = "entry"
                message = f"{len(best.entries)} {noun} in float32: {describe_worst(best.verdict)}"
                if () in self._trials:
                    message += f"; with none: {describe_worst(self._trials[()].verdict)}"
            if stopped:
                message += f"; {stopped}, so there may be entries that are not needed"
        else:
            message = f"nothing reaches {tolerance}"
            if stopped:
                message = f"nothing reached {tolerance} so far"
            if best is not None:
                message += f"; the best: {describe_worst(best.verdict)}"
            message += self._ranking.find_hint()
            if stopped:
                message += f"; {stopped}"
        if self._loss_scale is not None:
            message += f"; tried at a loss scale of {self._loss_scale:g}"
            if not any(trial.verdict.is_skipped for trial in self._trials.values()):
                message += ", at which gradients fit"
        message += f"; compared: {steps} from the first weights"
        with_zero_gradients, parameter_count = find_zero_gradients(self._reference)
        if with_zero_gradients:
            message += (
                f"; not judged: {len(with_zero_gradients)} of {parameter_count} parameters, such as"
                f" {with_zero_gradients[0]}, whose gradients are zero at these weights. Tune from trained weights to"
                " judge them"
            )
        return message


class _EnoughRunsError(Exception):
    """Ends the search: the budget of runs is spent, or no further run would help. The text says which."""


def _last_line(error: Exception) -> str:
    """Return an error as one line. If its text has several lines, as a traceback has, this is the last one."""
    lines = str(error).strip().splitlines()
    if len(lines) > 1:
        return lines[-1].strip()
    return f"{type(error).__name__}: {error}"


def tune(train: Callable[[], object], **options: Any) -> TuneResult:
    """Find few modules or ops that, in float32, are enough to keep gradients within a tolerance.

    `train` is a function without arguments that creates its model, calls `amp.initialize` or enters `torch.autocast`,
    and trains. It is called up to `max_runs` times, and each call is stopped after `steps` steps. Up to four further
    calls trace the result, over more steps. Files that `train` writes are written in each call. If the list has entries
    and `out` is given, it is written to `out`.

    Args:
        train: the function.
        options: the fields of `TuneOptions`, such as `opt_level="O4"`.

    Raises: as `TuneOptions` and `Tuner.run`.
    """
    tuner = Tuner(FunctionRunner(train), **options)
    result = tuner.run()
    out = tuner.options.out
    if out is not None and result.text:
        result.to_yaml(out)
    return result


def _name_keywords(function: Callable[..., object]) -> None:
    """Make help() and notebooks show the fields of `TuneOptions` in place of the `**options` of a function."""
    train, _ = inspect.signature(function).parameters.values()
    parameters = [train, *inspect.signature(TuneOptions).parameters.values()]
    setattr(function, "__signature__", inspect.signature(function).replace(parameters=parameters))  # noqa: B010


_name_keywords(tune)
