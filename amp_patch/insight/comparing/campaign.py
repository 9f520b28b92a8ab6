"""`Campaign`: makes the runs of a comparison, one after another, because parallel runs would slow each other down."""

import functools
import math
import platform
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ...config import levels
from ...errors import SessionError
from ...script_settings import NoRegionError, Settings
from ...tables import count_of
from ..recordings import Record, Recording
from ..records import (
    ComparedRecord,
    ComparisonRecord,
    CurveRecord,
    GradientRecord,
    LayerRecord,
    OpErrorRecord,
    RunRecord,
    SampleRecord,
)
from ..runs import NO_STEP, Run, RunFailedError, Runner, may_depend_on_dtype
from .comparison import Comparison

CURVES = "comparing.probes:CurveProbe"
LAYERS = "comparing.probes:LayerProbe"
AS_IS = "as-is"
"""The name of a run with the script's own level, or its own regions of autocast."""

SCRIPT = "script"
"""The name of a run that keeps the script's own 16 bits: the unchanged run of a script that makes its weights 16-bit,
or the reference if it cannot run in float32.
"""

NOT_RUN = "did not run"
"""The value of `ComparedRecord.failed` for a run that never began."""

NOISE, FROZEN = "weights off by one unit", "weights put back"
"""Variants of the reference. `NOISE` shows the noise of losses. `FROZEN` sees the same batches, but learns nothing."""

CLOSE = 0.02
"""Weights count as equal, up to rounding to 16 bits, if their relative difference (L2) is below this."""

SHARE = 0.01
"""A layer counts for the largest error of gradients only if the norm of its gradients is at least this share of the
norm of all gradients.
"""


class Plan(NamedTuple):
    """The runs to compare.

    Attributes:
        runs: the settings of each run, by name.
        native_runs: the runs to make instead if the first run does not call `amp.initialize`.
        low_runs: the runs to make instead if the first run shows 16-bit weights, and no amp.
        reference: the name of the run with which the others are compared.
        steps: the number of steps of a run.
        seeds: the seeds of the runs.
        command: the command line to show in the results.
        is_asked: whether the user named the runs.
    """

    runs: dict[str, Settings]
    native_runs: dict[str, Settings]
    low_runs: dict[str, Settings]
    reference: str
    steps: int
    seeds: tuple[int, ...]
    command: str = ""
    is_asked: bool = True


def plan_runs(
    asked: Sequence[str | Settings] | None,
    reference: str,
    steps: int,
    seeds: Sequence[int],
    command: str = "",
    *,
    everywhere: bool = False,
) -> Plan:
    """Return the plan of runs such as "O4" or "O4+my_lists.yaml+more.yaml".

    If several runs have the same name, they are called "O4", "O4 (2)", and so on. The reference keeps its name.

    Args:
        asked: the runs that the user named; None for the default runs.
        reference: the run with which the others are compared. If it is not among the runs, it is added as the first.
        everywhere: whether runs put the whole training into one region of autocast (`--everywhere`).
    """
    plain = levels.find_plain_level().name
    with_amp = [level.name for level in levels.read_levels() if level.keeps_small_updates]
    with_autocast = [AS_IS, *(level.name for level in levels.read_levels() if level.fits_autocast)]
    with_low_weights = [plain, SCRIPT]
    if everywhere:
        patching = levels.find_patching_level("bfloat16").name
        with_amp = with_autocast = [plain, patching]
        with_low_weights = [plain, SCRIPT, patching]
    runs, native_runs, low_runs = (
        _name_runs(asked or default, reference) for default in (with_amp, with_autocast, with_low_weights)
    )
    return Plan(runs, native_runs, low_runs, name_run(reference), steps, tuple(seeds), command, asked is not None)


def _name_runs(asked: Sequence[str | Settings], reference: str) -> dict[str, Settings]:
    """Return the settings of the asked runs, by name. If the reference is not among them, it comes first."""
    all_runs: list[str | Settings] = list(asked)
    if parse_run(reference) not in map(parse_run, all_runs):
        all_runs.insert(0, reference)
    # "as-is" and "script" are two names of the same settings. The reference keeps the name that was asked for.
    reference_place = list(map(parse_run, all_runs)).index(parse_run(reference))
    settings_by_name: dict[str, Settings] = {}
    counts = Counter([name_run(reference)])
    for place, run in enumerate(all_runs):
        name = name_run(reference)
        if place != reference_place:
            name = name_run(run)
            counts[name] += 1
            if counts[name] > 1:
                name += f" ({counts[name]})"
        settings_by_name[name] = parse_run(run)
    return settings_by_name


def parse_run(run: str | Settings) -> Settings:
    """Return the settings of a run: Settings("O4", ("my_lists.yaml",)) for "O4+my_lists.yaml".

    The level is None for "as-is" and "script", which run at the script's own level.
    """
    if isinstance(run, Settings):
        return run
    level, *lists = run.split("+")
    if level in (AS_IS, SCRIPT):
        return Settings(None, tuple(lists))
    return Settings(level, tuple(lists))


def name_run(run: str | Settings) -> str:
    """Return the name of a run: "O4+my_lists.yaml" for "O4+lists/my_lists.yaml"."""
    if run == SCRIPT:
        return SCRIPT
    settings = parse_run(run)
    return "+".join([settings.opt_level or AS_IS, *(Path(path).name for path in settings.lists)])


@functools.cache
def is_in_float32(settings: Settings) -> bool:
    """Return whether a run is at O0."""
    return settings.opt_level == levels.find_plain_level().name


class Campaign:
    """Makes the runs of a plan. `tell` is called with a line when a run begins.

    Each run trains once from each seed, watched only for its losses and times. From the first seed, it also trains for
    a few steps to measure layers, ops, gradients and memory. Two variants of the reference are made, too:

    * From each seed, its weights are moved by one unit in the last place before each step. How its losses then differ
      is noise.
    * From the first seed, its weights are put back after each step. How its losses then differ is what it has learned.

    A run at O0 gets float32 where the training asks for 16 bits. A reference that cannot run in float32 keeps 16 bits,
    and is called "script".

    No further runs are made in three cases: the first two seeds give the reference equal losses; the reference fails in
    float32, and its error says nothing of dtypes; two runs fail for the same reason, and none has come to its end.
    """

    def __init__(self, runner: Runner, plan: Plan, tell: Callable[[str], None] = lambda line: None) -> None:
        self._runner = runner
        self._plan = plan
        self._tell = tell
        self._header: RunRecord | None = None  # of the reference, or of the first run that has one
        self._measured: list[Record] = []  # records about gradients, layers and ops
        self._samples: dict[str, SampleRecord] = {}  # of the layers of the reference, by module
        self._op_errors: dict[tuple[str, str, str, str], OpErrorRecord] = {}  # by dtype, module, op and line
        self._done = 0  # the number of runs that have begun
        self._left_out = ""  # which default runs are left out, and why
        self._reference = plan.reference  # the name of the reference
        self._not_float32 = ""  # why the reference keeps 16 bits
        self._total = 0  # known once the first run has shown which runs suit the training
        self._begin(plan.runs)

    def _begin(self, runs: dict[str, Settings]) -> None:
        """Set the runs to make, without results yet."""
        self._runs = runs
        self._compared = {name: ComparedRecord(name, failed=NOT_RUN) for name in runs}
        self._curves: dict[str, list[CurveRecord]] = {name: [] for name in runs}

    def run(self) -> None:
        """Make the runs of the plan. A run that fails is noted; an interrupt propagates.

        Raises RunFailedError (see `_stop_at`) if the reference fails in float32 for a reason other than dtypes.
        """
        seeds = self._plan.seeds
        failed = self._train_reference(seeds[0])
        reference = self._reference
        if failed is not None and is_in_float32(self._runs[reference]) and not may_depend_on_dtype(failed):
            self._stop_at(failed)
            return
        from_each_seed = len(self._runs) + 1  # all runs, and the noise of the reference
        only_from_first_seed = len(self._runs) + 1  # the layers of all runs, and the frozen weights of the reference
        self._total = from_each_seed * len(seeds) + only_from_first_seed
        # the reference first, because other runs are compared with its samples
        in_order = sorted(self._runs, key=lambda name: name != reference)
        for seed in seeds:
            for name in in_order:
                if self._fails_alike():
                    return
                has_trained = name == reference and seed == seeds[0]  # in `_train_reference`
                if not has_trained and self._compared[name].failed in ("", NOT_RUN):
                    self._train(name, seed)
                if name == reference and not self._compared[name].failed:
                    if self._has_same_losses():
                        return  # further seeds would give the same losses again
                    self._train(name, seed, NOISE)
                    if seed == seeds[0]:
                        self._train(name, seed, FROZEN)
                if seed == seeds[0] and not self._compared[name].failed:
                    self._look_at_layers(name, seed)

    def _stop_at(self, failed: RunFailedError) -> None:
        """Raise the error of the reference. Return if the error is only that the training took no step."""
        name = self._reference
        if str(failed).startswith(NO_STEP):
            return
        more = ""
        taken = max((len(curve.losses) for curve in self._curves[name]), default=0)
        if taken:
            more = f"\n--steps {taken} compares the {count_of(taken, 'step')} before it"
        raise RunFailedError(
            f"the training fails at the reference {name}, so no other level was run:\n{failed}{more}"
        ) from (failed.__cause__ or failed)

    def _train_reference(self, seed: int) -> RunFailedError | None:
        """Make the first run of the reference, choose the other runs that suit the training, and return the error of
        the reference, or None.
        """
        reference = self._reference
        failed = self._train(reference, seed)
        # the run may fail because it got float32 where the script asks for 16 bits, so try again with these 16 bits
        if failed is not None and failed.was_widened:
            self._not_float32 = str(failed).strip().splitlines()[-1].strip()  # the last line of a traceback
            self._curves[reference].clear()
            self._done -= 1  # both tries count as one run
            failed = self._train(reference, seed)
            if failed is not None:
                self._not_float32 = ""  # the training fails with its own 16 bits, too
        elif self._header is not None and is_in_float32(self._runs[reference]):
            self._not_float32 = ", ".join(self._header.not_widened)
        self._choose_native_runs()
        if self._not_float32:
            self._rename_reference()
        return failed

    def _rename_reference(self) -> None:
        """Call the reference "script", because it keeps 16 bits."""
        earlier_name, self._reference = self._reference, SCRIPT
        for by_name in (self._runs, self._compared, self._curves):
            renamed = {
                SCRIPT if name == earlier_name else name: value for name, value in by_name.items() if name != SCRIPT
            }
            by_name.clear()
            by_name.update(renamed)  # type: ignore[arg-type]
        self._change(SCRIPT, run=SCRIPT)
        self._curves[SCRIPT] = [replace(curve, run=SCRIPT) for curve in self._curves[SCRIPT]]

    def _choose_native_runs(self) -> None:
        """Plan other runs if the run of the reference has shown that the script does not use `amp.initialize`."""
        header, reference = self._header, self._reference
        if header is None or not header.is_native:
            return
        runs = dict(self._plan.low_runs if header.script_low else self._plan.native_runs)
        if runs == self._runs:
            return
        if header.needs_scaler and not self._plan.is_asked:
            self._leave_out_unscaled(runs)
        results = self._compared[reference], self._curves[reference]
        self._begin(runs)
        self._compared[reference], self._curves[reference] = results

    def _leave_out_unscaled(self, runs: dict[str, Settings]) -> None:
        """Take the float16 levels out of the default runs, except for the reference."""
        for level in levels.read_levels():
            if level.needs_loss_scale and level.name in runs and level.name != self._reference:
                del runs[level.name]
                self._left_out = (
                    f"{level.name} is left out: it is float16, whose gradients need a loss scale, and this training has"
                    " no GradScaler"
                )

    def _has_same_losses(self) -> bool:
        """Return whether the reference has the same losses from its first two seeds."""
        curves = self._curves[self._reference]
        losses = [curve.losses for curve in curves if not (curve.is_noise or curve.is_frozen)]
        return len(losses) > 1 and losses[0] == losses[1]

    def _fails_alike(self) -> bool:
        """Return whether two runs failed for the same reason, and no run has come to its end."""
        reasons = Counter(run.failed for run in self._compared.values() if run.failed not in ("", NOT_RUN))
        has_ended = any(not run.failed for run in self._compared.values())
        return not has_ended and max(reasons.values(), default=0) > 1

    def comparison(self) -> Comparison:
        """Return the results so far. Raises SessionError, with the reasons, if there are no losses."""
        curves = [curve for of_run in self._curves.values() for curve in of_run if curve.losses]
        if self._header is None or not curves:
            runs_by_reason: dict[str, list[str]] = {}
            for run in self._compared.values():
                reason = run.failed or "no optimizer took a step; are weights changed by hand?"
                runs_by_reason.setdefault(reason, []).append(run.run)
            reasons = [f"{', '.join(runs)}: {reason}" for reason, runs in runs_by_reason.items()]
            raise SessionError(f"nothing to compare: no run took a step ({'; '.join(reasons)})")
        plan, machine = self._plan, _name_machine(self._header.device)
        about = ComparisonRecord(
            self._reference, plan.steps, plan.seeds, machine, plan.command, self._left_out, self._not_float32
        )
        return Comparison(Recording(self._header, [about, *self._compared.values(), *curves, *self._measured]))

    def _train(self, name: str, seed: int, variant: str = "") -> RunFailedError | None:
        """Make a run for its losses and times, and return its error, or None if it did not fail.

        `variant` is `NOISE`, `FROZEN`, or "" for the run itself.
        """
        title = ", ".join(filter(None, (name, variant, f"seed {seed}")))
        self._announce(title)
        options: dict[str, object] = {"steps": self._plan.steps}
        if variant:
            options["is_noise" if variant == NOISE else "is_frozen"] = True
        recording, failed = self._watch(name, CURVES, options, seed, folder="" if variant else title)
        if variant and failed is not None:
            return failed  # the noise or the gain stays unknown, but the comparison goes on
        if not variant:
            self._change(name, failed=str(failed or ""))
        if recording is None:
            return failed
        run = recording.run
        if self._header is None or name == self._reference:
            self._header = run
        low = run.low
        # a run that gets float32 has no 16 bits, even if the script asks for them, but the reference may keep them
        if not is_in_float32(self._runs[name]) or self._not_float32:
            low = low or run.script_low
        self._change(name, opt_level=run.opt_level, low=low, lists=run.lists, digest=run.digest)
        for curve in recording.of(CurveRecord):
            if not run.is_timed:
                curve = replace(curve, ms=math.nan)
            self._curves[name].append(replace(curve, run=name, seed=seed))
        return failed

    def _look_at_layers(self, name: str, seed: int) -> None:
        """Make a short run for layers, memory and updates, and compare its layers with the reference's."""
        self._announce(f"{name}, layers and memory")
        loss_scale = None
        curves = [curve for curve in self._curves[name] if curve.scales]
        if curves:
            # the last scale of the training, because the first steps may overflow at the initial scale
            loss_scale = curves[0].scales[-1]
        options: dict[str, object] = {"loss_scale": loss_scale, "has_errors": name == self._reference}
        recording, failed = self._watch(name, LAYERS, options, seed)
        if recording is None or failed is not None:
            self._change(name, failed=str(failed or ""))
            return
        (measured,) = recording.of(ComparedRecord)
        self._change(name, peak=measured.peak, loss_scale=measured.loss_scale)
        self._change(name, kept=measured.kept, kept_worst=measured.kept_worst, lost_by=measured.lost_by)
        self._change(name, update_error=measured.update_error)
        self._measured.extend(replace(record, run=name) for record in recording.of(GradientRecord))
        samples = {record.module: record for record in recording.of(SampleRecord)}
        ops = recording.of(OpErrorRecord)
        if name == self._reference:
            self._op_errors = {(op.low, op.module, op.op, op.site): op for op in ops}
            self._samples = samples
        elif self._has_equal_weights(samples):
            if not any(op.is_random for op in ops):  # other random numbers would give other gradients
                error, worst = find_gradient_error(self._samples, samples)
                self._change(name, gradient_error=error, gradient_worst=worst)
            for op in ops:
                key = op.low, op.module, op.op, op.site
                if key in self._op_errors:
                    self._measured.append(replace(self._op_errors[key], run=name))
            for module, sample in self._samples.items():
                if module and module in samples:
                    self._measured.append(_compare_layer(name, sample, samples[module]))
        else:
            self._change(name, has_equal_weights=False)

    def _has_equal_weights(self, samples: dict[str, SampleRecord]) -> bool:
        """Return whether a run began with the weights of the reference, perhaps rounded, judged by its samples."""
        # the sample named "" holds weights before the first step
        if "" not in samples or "" not in self._samples:
            return False
        error = find_error(self._samples[""].output, samples[""].output)
        return error is not None and error < CLOSE

    def _watch(
        self, name: str, probe: str, options: dict[str, object], seed: int, folder: str = ""
    ) -> tuple[Recording | None, RunFailedError | None]:
        """Make a run with a probe, and return its recording and its error. A failed run may have both.

        `folder` becomes `Run.name`: the folder that keeps the files of the script.
        """
        try:
            settings = self._runs[name]
            in_float32 = is_in_float32(settings) and not (name == self._reference and self._not_float32)
            return self._runner(Run(probe, options, settings, seed, folder, in_float32)), None
        except RunFailedError as error:
            return error.recording, error
        except NoRegionError:  # the script uses no amp, so every run would fail
            raise
        except Exception as error:  # of the function that trains. Other runs can still succeed.
            failed = RunFailedError(f"{type(error).__name__}: {error}".partition("\n")[0])
            failed.__cause__ = error
            return None, failed

    def _change(self, name: str, **properties: Any) -> None:
        """Set properties of the `ComparedRecord` of a run."""
        self._compared[name] = replace(self._compared[name], **properties)

    def _announce(self, title: str) -> None:
        """Tell the user that a run begins, in a line such as "run 3 of 12: O4, seed 0"."""
        self._done += 1
        progress = f"run {self._done}"
        if self._total:
            progress += f" of {self._total}"
        self._tell(f"{progress}: {title}")


def _compare_layer(run: str, reference: SampleRecord, sample: SampleRecord) -> LayerRecord:
    """Return the errors of a layer in a run, from its samples there and in the reference."""
    return LayerRecord(
        run,
        reference.module,
        find_error(reference.input, sample.input),
        find_error(reference.output, sample.output),
        find_error(reference.gradient, sample.gradient),
    )


def find_gradient_error(
    reference: dict[str, SampleRecord], samples: dict[str, SampleRecord]
) -> tuple[float | None, str]:
    """Return the largest relative error of the gradients of a layer, and the layer; None and "" if no layer counts.

    A layer counts if both runs have equally many samples of its gradients, and these are not too small (see `SHARE`).
    """
    gradients = {
        module: sample.gradient
        for module, sample in reference.items()
        if sample.gradient and module in samples and len(sample.gradient) == len(samples[module].gradient)
    }
    norm_of_all = math.hypot(*(value for gradient in gradients.values() for value in gradient))
    errors: dict[str, float] = {}
    for module, gradient in gradients.items():
        if math.hypot(*gradient) >= SHARE * norm_of_all:
            errors[module] = find_error(gradient, samples[module].gradient) or 0.0
    if not errors:
        return None, ""
    worst = max(errors, key=lambda module: errors[module])
    return errors[worst], worst


def find_error(reference: Sequence[float], values: Sequence[float]) -> float | None:
    """Return the relative error (L2) of values, |values - reference| / |reference|.

    The error is None if there are no values or the lengths differ, and 0 if all values are equal. Otherwise, it is inf
    if a value is not finite or the reference is zero.
    """
    if not reference or len(reference) != len(values):
        return None
    if list(reference) == list(values):
        return 0.0
    if not all(map(math.isfinite, (*reference, *values))) or not any(reference):
        return math.inf
    return math.dist(reference, values) / math.hypot(*reference)


def _name_machine(device: str) -> str:
    """Return the name of the CPU. If `device` is another device whose name torch knows, that name precedes it."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        model = re.search(r"model name\s*: (.*)", info.read_text())
        if model is not None:
            cpu = model[1]
    if device == "cpu":
        return cpu
    import torch

    get_name = getattr(getattr(torch, device, None), "get_device_name", None)
    if get_name is None:
        return cpu
    return f"{get_name()}, {cpu}"
