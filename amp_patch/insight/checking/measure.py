"""`Measurer`: makes the runs of a check, and reads a contract from them."""

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
from .bands import CURVES, Variants, find_relative, norm_of
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
_UPDATES = "comparing.probes:LayerProbe"

REPEATED = "once more"
"""The title of a run that repeats the first one exactly."""


class Measurer:
    """Makes runs of one script.

    Args:
        runner: makes a run.
        question: the script, and how to run it.
        tell: called with a line when a run begins.
    """

    def __init__(self, runner: Runner, question: Question, tell: Callable[[str], None]) -> None:
        self._runner = runner
        self._question = question
        self._tell = tell
        self._done = 0

    def run(self, title: str, *, in_float32: bool = False, keeps_files: bool = False, **options: object) -> Measured:
        """Make a run. Raises RunFailedError if it ends too early, and SessionError if no optimizer took a step."""
        self._done += 1
        self._tell(f"run {self._done}: {title}")
        settings = self._question.settings
        if in_float32:
            settings = Settings(levels.find_plain_level().name, settings.lists)
        options.setdefault("steps", self._question.steps)
        name = title if keeps_files else ""
        recording = self._runner(Run(_PROBE, options, settings, self._question.seed, name, in_float32))
        return _read(recording)

    def find_lost(self) -> ComparedRecord:
        """Make the run that finds changes of 16-bit tensors which rounding loses."""
        self._done += 1
        self._tell(f"run {self._done}: which updates are lost")
        recording = self._runner(Run(_UPDATES, {}, self._question.settings, self._question.seed))
        return recording.of(ComparedRecord)[0]

    def measure_again(self) -> Contract:
        """Make the runs of a check, and return their results as a contract without bands."""
        measured = self.run("the script", keeps_files=True)
        return self._make_contract(measured, [], None, self._try_lost())

    def write(self) -> Contract:
        """Make the runs of a new contract, and return it. Four of them measure the noise, which sets its bands."""
        base = self.run("the script", keeps_files=True)
        if not base.ops:
            raise SessionError(
                "the second step has no ops to promise: let the script take two steps or more, with a forward pass in"
                " each"
            )
        threads = base.recording.run.threads
        other = 2 if threads == 1 else 1
        variants = [
            self.run(REPEATED),
            self.run("weights off by one unit in the last place", is_noise=True),
            self.run(f"{other} threads" if other > 1 else "one thread", threads=other),
            self.run("both", is_noise=True, threads=other),
        ]
        return self._make_contract(base, variants, self._try_float32(), self._try_lost())

    def _try_float32(self) -> Measured | None:
        """Make the first two steps of a run in float32; None if that run fails. Raises NoRegionError."""
        try:
            return self.run("float32", in_float32=True, steps=2)
        except NoRegionError:
            raise
        except (RunFailedError, SessionError):
            return None

    def _try_lost(self) -> ComparedRecord | None:
        """Make the run of `find_lost`; None if it fails."""
        try:
            return self.find_lost()
        except RunFailedError:
            return None

    def _make_contract(
        self,
        base: Measured,
        variants: Sequence[Measured],
        float32: Measured | None,
        lost: ComparedRecord | None,
    ) -> Contract:
        asked, run = self._question, base.recording.run
        about = ContractRecord(
            schema=SCHEMA,
            script=asked.script,
            opt_level=asked.settings.opt_level or "",
            lists=asked.lists,
            everywhere=asked.everywhere,
            steps=asked.steps,
            seed=asked.seed,
            amp_patch=asked.version,
            torch=run.torch,
            level=run.opt_level,
            low=run.low or run.script_low,
            device=run.device,
        )
        noise = Variants([base, *variants])
        hardware = HardwareRecord(
            run.hardware,
            run.threads,
            kept=None if lost is None else round_number(lost.kept, 2),
            kept_worst="" if lost is None else lost.kept_worst,
            problem=noise.find_problem(),
        )
        modules = [_describe_module(name, base, float32, noise) for name in base.modules]
        curves = [noise.make_curve(name) for name in CURVES]
        numbers = Numbers(hardware, modules, [curve for curve in curves if curve.values])
        optimizers = base.recording.of(OptimizerRecord)
        return Contract(about, optimizers, _promise(base, variants), {run.hardware: numbers})


def _read(recording: Recording) -> Measured:
    curves = recording.of(CurveRecord)
    norms = recording.of(StepNormsRecord)
    has_steps = any(each.updates for each in norms) or any(curve.losses for curve in curves)
    if not has_steps:
        raise SessionError("nothing to check: no optimizer took a step")
    modules = {record.module: record for record in recording.of(ModuleNumbersRecord)}
    return Measured(recording, read_ops(recording.ops), modules, curves[0] if curves else None, norms[0])


def _promise(base: Measured, variants: Iterable[Measured]) -> list[ContractOp]:
    """Return the ops of a run. An op is promised if its calls are the same in all variants."""
    unstable: set[tuple[str, str]] = set()
    for variant in variants:
        differences = find_differences(base.ops, variant.ops)
        pairs = [op for pair in (*differences.moved, *differences.changed) for op in pair]
        for op in (*pairs, *differences.vanished, *differences.appeared):
            unstable.add((op.module, op.op))
    return [replace(op, is_promised=(op.module, op.op) not in unstable) for op in base.ops]


def _describe_module(name: str, base: Measured, float32: Measured | None, noise: Variants) -> ModuleRecord:
    seen = base.modules[name]
    error = None
    if float32 is not None and name in float32.modules:
        error = find_relative(float32.modules[name].output, seen.output)
        if error is not None and not math.isfinite(error):
            error = None
    return ModuleRecord(
        module=name,
        type=seen.type,
        dtype=seen.dtype,
        error=round_number(error, 2),
        weights=round_number(norm_of(seen.weights)),
        weights_band=noise.find_band(name, "weights"),
        output=round_number(norm_of(seen.output)),
        output_band=noise.find_band(name, "output"),
        gradient=round_number(norm_of(seen.gradient)),
        gradient_band=noise.find_band(name, "gradient"),
        update=round_number(seen.update),
        update_band=noise.find_band(name, "update"),
        last_gradient=round_number(seen.last_gradient),
        last_gradient_band=noise.find_band(name, "last_gradient"),
        last_update=round_number(seen.last_update),
        last_update_band=noise.find_band(name, "last_update"),
        of_weights=pack(seen.weights),
        of_output=pack(seen.output),
        of_gradient=pack(seen.gradient),
    )
