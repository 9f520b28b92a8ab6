"""`Measurer`: makes the runs of `amp-patch check`, and makes a `Contract` of their results.

The *band* of a number is how far a later run may be from it: see `bands`.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from ...config import levels
from ...errors import SessionError
from ...script_settings import NoRegionError, Settings
from ..numbers_record import ModuleNumbersRecord, OptimizerRecord, StepNormsRecord
from ..recordings import Recording
from ..records import ComparedRecord, CurveRecord
from ..runs import Run, RunFailedError, Runner
from .bands import CURVES, Variants, compare_sketches, norm_of
from .contract import (
    SCHEMA,
    Contract,
    ContractOp,
    ContractRecord,
    HardwareRecord,
    ModuleRecord,
    Numbers,
    pack,
    round_number,
)
from .measured import Measured
from .op_differences import find_differences, read_ops
from .question import Question

_PROBE = "checking.probe:ContractProbe"
_PROBE_OF_UPDATES = "comparing.probes:LayerProbe"

REPEATED = "once more"
"""The title of the run that repeats the first one with the same settings."""


class Measurer:
    """Makes runs of one script.

    Args:
        runner: makes a run when it is called.
        question: the script, and how to run it.
        tell: called when a run begins, with a line such as "run 2: once more".
    """

    def __init__(self, runner: Runner, question: Question, tell: Callable[[str], None]) -> None:
        self._runner = runner
        self._question = question
        self._tell = tell
        self._done = 0

    def run(self, title: str, *, in_float32: bool = False, keeps_files: bool = False, **options: object) -> Measured:
        """Make a run, and return its results.

        Raises RunFailedError if the run ends too early, SessionError if no optimizer took a step, and NoRegionError if
        the script trains without mixed precision.

        Args:
            title: the name of the run, for the user.
            in_float32: run at the float32 opt_level, and not at the one of the question.
            keeps_files: keep the files that the script writes.
            options: arguments of `ContractProbe`; by default, `steps` is the question's.
        """
        self._done += 1
        self._tell(f"run {self._done}: {title}")
        settings = self._question.settings
        if in_float32:
            settings = Settings(levels.find_plain_level().name, settings.lists)
        options.setdefault("steps", self._question.steps)
        name = title if keeps_files else ""
        recording = self._runner(Run(_PROBE, options, settings, self._question.seed, name, in_float32))
        return _read(recording)

    def find_lost_updates(self) -> ComparedRecord:
        """Make a run that measures how many changes of 16-bit tensors are lost by rounding.

        Return the record whose `kept` is the share that survives: see `ComparedRecord`. Raises RunFailedError if the
        run ends too early.
        """
        self._done += 1
        self._tell(f"run {self._done}: which updates are lost")
        recording = self._runner(Run(_PROBE_OF_UPDATES, {}, self._question.settings, self._question.seed))
        return recording.of(ComparedRecord)[0]

    def measure_again(self) -> Contract:
        """Make the runs of a check, and return their results as a contract without bands."""
        measured = self.run("the script", keeps_files=True)
        return self._make_contract(measured, [], None, self._try_lost_updates())

    def write(self) -> Contract:
        """Make the runs of a new contract, and return it. Its bands come from four variants of the first run.

        Raises the errors of `run`, and SessionError if no ops ran in the second step.
        """
        base = self.run("the script", keeps_files=True)
        if not base.ops:
            raise SessionError(
                "a contract has the dtypes of the ops of the second step, and there were none: let the script take two"
                " steps or more, with a forward pass in each"
            )
        other_threads = 2 if base.recording.run.threads == 1 else 1
        variants = [
            self.run(REPEATED),
            self.run("weights off by one unit in the last place", is_noise=True),
            self.run(f"{other_threads} threads" if other_threads > 1 else "one thread", threads=other_threads),
            self.run("both", is_noise=True, threads=other_threads),
        ]
        return self._make_contract(base, variants, self._try_float32(), self._try_lost_updates())

    def _try_float32(self) -> Measured | None:
        """Make a run of two steps in float32, and return its results; None if the run fails or takes no step.

        Raises NoRegionError if the script trains without mixed precision.
        """
        try:
            return self.run("float32", in_float32=True, steps=2)
        except NoRegionError:
            raise
        except (RunFailedError, SessionError):
            return None

    def _try_lost_updates(self) -> ComparedRecord | None:
        """Return the result of `find_lost_updates`, or None if its run fails."""
        try:
            return self.find_lost_updates()
        except RunFailedError:
            return None

    def _make_contract(
        self,
        base: Measured,
        variants: Sequence[Measured],
        float32: Measured | None,
        lost: ComparedRecord | None,
    ) -> Contract:
        """Return the results of runs as a contract.

        Args:
            base: the run whose ops and numbers the contract has.
            variants: the runs that give the bands; none for a check.
            float32: a run in float32, for the errors of outputs; None if they are not measured.
            lost: the result of `find_lost_updates`; None if its run failed.
        """
        question, run = self._question, base.recording.run
        about = ContractRecord(
            schema=SCHEMA,
            script=question.script,
            opt_level=question.settings.opt_level or "",
            lists=question.lists,
            everywhere=question.everywhere,
            steps=question.steps,
            seed=question.seed,
            amp_patch=question.version,
            torch=run.torch,
            level=run.opt_level,
            low=run.low or run.script_low,
            device=run.device,
        )
        bands = Variants([base, *variants])
        hardware = HardwareRecord(
            run.hardware,
            run.threads,
            kept=None if lost is None else round_number(lost.kept, 2),
            kept_worst="" if lost is None else lost.kept_worst,
            problem=bands.find_problem(),
        )
        modules = [_make_module_record(name, base, float32, bands) for name in base.modules]
        curves = [bands.make_curve(name) for name in CURVES]
        numbers = Numbers(hardware, modules, [curve for curve in curves if curve.values])
        optimizers = base.recording.of(OptimizerRecord)
        return Contract(about, optimizers, _promise_ops(base, variants), {run.hardware: numbers})


def _read(recording: Recording) -> Measured:
    """Return the results in a recording. Raises SessionError if no optimizer took a step."""
    curves = recording.of(CurveRecord)
    norms = recording.of(StepNormsRecord)
    has_steps = any(record.updates for record in norms) or any(curve.losses for curve in curves)
    if not has_steps:
        raise SessionError("nothing to check: no optimizer took a step")
    modules = {record.module: record for record in recording.of(ModuleNumbersRecord)}
    return Measured(recording, read_ops(recording.ops), modules, curves[0] if curves else None, norms[0])


def _promise_ops(base: Measured, variants: Iterable[Measured]) -> list[ContractOp]:
    """Return the ops of `base`. `is_promised` is False for ops whose calls in their module differ in a variant."""
    differing: set[tuple[str, str]] = set()  # module and name of the op
    for variant in variants:
        differences = find_differences(base.ops, variant.ops)
        pairs = [op for pair in (*differences.moved, *differences.changed) for op in pair]
        for op in (*pairs, *differences.vanished, *differences.appeared):
            differing.add((op.module, op.op))
    return [replace(op, is_promised=(op.module, op.op) not in differing) for op in base.ops]


def _make_module_record(name: str, base: Measured, float32: Measured | None, bands: Variants) -> ModuleRecord:
    """Return the numbers of a module in `base`, with their bands, and the error of its output against float32."""
    numbers = base.modules[name]
    error = None
    if float32 is not None and name in float32.modules:
        error = compare_sketches(float32.modules[name].output, numbers.output)
        if error is not None and not math.isfinite(error):
            error = None
    return ModuleRecord(
        module=name,
        type=numbers.type,
        dtype=numbers.dtype,
        error=round_number(error, 2),
        weights=round_number(norm_of(numbers.weights)),
        weights_band=bands.find_band(name, "weights"),
        output=round_number(norm_of(numbers.output)),
        output_band=bands.find_band(name, "output"),
        gradient=round_number(norm_of(numbers.gradient)),
        gradient_band=bands.find_band(name, "gradient"),
        update=round_number(numbers.update),
        update_band=bands.find_band(name, "update"),
        last_gradient=round_number(numbers.last_gradient),
        last_gradient_band=bands.find_band(name, "last_gradient"),
        last_update=round_number(numbers.last_update),
        last_update_band=bands.find_band(name, "last_update"),
        of_weights=pack(numbers.weights),
        of_output=pack(numbers.output),
        of_gradient=pack(numbers.gradient),
    )
