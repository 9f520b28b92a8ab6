"""`Campaign`: the runs of a comparison, one after another, each so often that nothing disturbs its clock."""

import math
import platform
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ...errors import SessionError
from ...script_settings import NoRegionError, Settings
from ..records import (
    ComparedRecord,
    ComparisonRecord,
    CurveRecord,
    GradientRecord,
    LayerRecord,
    Record,
    Recording,
    RunRecord,
    SampleRecord,
)
from ..runs import Run, RunFailedError, Runner
from .comparison import Comparison

CURVES = "comparing.probes:CurveProbe"
LAYERS = "comparing.probes:LayerProbe"
AS_IS = "as-is"
"""The name of a run at the script's own level, or with its own autocast."""

LEVELS = ("O0", "O1", "O2", "O4", "O5")
NATIVE_RUNS = (AS_IS, "O0", "O1", "O4")
"""What is compared by default: of a training that calls `initialize`, and of one by torch.autocast."""

CLOSE = 0.02
"""Weights that were rounded to 16 bits are closer to the reference's than this."""


class Plan(NamedTuple):
    """What is asked for: runs by name, the name of one of them, steps of each, and seeds; a command, to be shown.

    `native_runs` take the place of the runs where the training turns out to be one by torch.autocast.
    """

    runs: dict[str, Settings]
    reference: str
    steps: int
    seeds: tuple[int, ...]
    command: str = ""
    native_runs: dict[str, Settings] | None = None


def plan_runs(
    asked: Sequence[str | Settings] | None, reference: str, steps: int, seeds: Sequence[int], command: str = ""
) -> Plan:
    """Return the plan of runs such as "O4" or "O4+my_lists.yaml+more.yaml"; equal ones are told apart by number. None
    asks for those that suit the training.

    The reference is run first where it is not among them.
    """
    first = parse_run(reference)
    runs = _name_runs(LEVELS if asked is None else asked, first)
    native_runs = _name_runs(NATIVE_RUNS, first) if asked is None else None
    return Plan(runs, name_of(first), steps, tuple(seeds), command, native_runs)


def _name_runs(asked: Sequence[str | Settings], first: Settings) -> dict[str, Settings]:
    each = [parse_run(one) if isinstance(one, str) else one for one in asked]
    runs: dict[str, Settings] = {}
    for settings in each if first in each else [first, *each]:
        name = name_of(settings)
        number = sum(known == name or known.startswith(f"{name} (") for known in runs)
        runs[f"{name} ({number + 1})" if number else name] = settings
    return runs


def parse_run(text: str) -> Settings:
    """Read a level, or "as-is" for the training's own, and lists that are laid over its own: "O4+my_lists.yaml"."""
    level, *lists = text.split("+")
    return Settings(None if level == AS_IS else level, tuple(lists))


def name_of(settings: Settings) -> str:
    """Return a run's name, with lists by the names of their files."""
    return "+".join([settings.opt_level or AS_IS, *(Path(one).name for one in settings.lists)])


class Campaign:
    """Runs what is planned. `tell` is called with a line as each run begins.

    Each run trains once from each seed, watched for its losses and its time alone, and then, from the first seed, for
    two steps more in which layers, gradients and memory are looked at. The reference trains once more from each seed,
    with weights that are moved by one unit in the last place before each step: what differs then is noise.
    """

    def __init__(self, runner: Runner, plan: Plan, tell: Callable[[str], None] = lambda line: None) -> None:
        self._runner = runner
        self._plan = plan
        self._tell = tell
        self._header: RunRecord | None = None
        self._compared = {name: ComparedRecord(name, failed="did not run") for name in plan.runs}
        self._curves: dict[str, list[CurveRecord]] = {name: [] for name in plan.runs}
        self._found: list[Record] = []
        self._samples: dict[str, SampleRecord] = {}
        self._done = 0

    def _settle_runs(self) -> None:
        """Decide which runs there are, now that the reference has run: those for torch.autocast if it had that."""
        plan = self._plan
        is_native = self._header is not None and self._header.is_native
        runs = plan.native_runs if is_native and plan.native_runs is not None else plan.runs
        self._plan = plan._replace(runs=runs, native_runs=None)
        not_run = {name: ComparedRecord(name, failed="did not run") for name in runs}
        self._compared = {name: self._compared.get(name, record) for name, record in not_run.items()}
        self._curves = {name: self._curves.get(name, []) for name in runs}

    def run(self) -> None:
        """Run all. What a run raises is noted, an interrupt leaves."""
        plan = self._plan
        self._train(plan.reference, plan.seeds[0])
        self._settle_runs()
        order = sorted(self._plan.runs, key=lambda name: name != plan.reference)
        for seed in plan.seeds:
            for name in order:
                is_done = name == plan.reference and seed == plan.seeds[0]
                if not is_done and self._compared[name].failed in ("", "did not run"):
                    self._train(name, seed)
                if name == plan.reference and not self._compared[name].failed:
                    self._train(name, seed, is_noise=True)
                if seed == plan.seeds[0] and not self._compared[name].failed:
                    self._look_at_layers(name, seed)

    def comparison(self) -> Comparison:
        """Return what there is so far. Raises SessionError, with the reasons, where no run has taken a step."""
        curves = [curve for each in self._curves.values() for curve in each if curve.losses]
        if self._header is None or not curves:
            runs_by_reason: dict[str, list[str]] = {}
            for one in self._compared.values():
                runs_by_reason.setdefault(one.failed, []).append(one.run)
            reasons = [f"{', '.join(runs)}: {reason}" for reason, runs in runs_by_reason.items()]
            raise SessionError(f"nothing to compare: no run took a step ({'; '.join(reasons)})")
        plan = self._plan
        about = ComparisonRecord(
            plan.reference, plan.steps, plan.seeds, _name_machine(self._header.device), plan.command
        )
        return Comparison(Recording(self._header, [about, *self._compared.values(), *curves, *self._found]))

    def _train(self, name: str, seed: int, *, is_noise: bool = False) -> None:
        self._say(f"{name}{', weights off by one unit' if is_noise else ''}, seed {seed}")
        recording, failed = self._watch(name, CURVES, {"steps": self._plan.steps, "is_noise": is_noise}, seed)
        if not is_noise:
            self._describe(name, recording, failed)
        for curve in () if recording is None or (failed and is_noise) else recording.of(CurveRecord):
            self._curves[name].append(replace(curve, run=name, seed=seed))

    def _look_at_layers(self, name: str, seed: int) -> None:
        scales = [curve.scales[-1] for curve in self._curves[name] if curve.scales]
        self._say(f"{name}, layers and memory")
        recording, failed = self._watch(name, LAYERS, {"loss_scale": scales[0] if scales else None}, seed)
        if recording is None or failed:
            self._compared[name] = replace(self._compared[name], failed=failed)
            return
        samples = {record.module: record for record in recording.of(SampleRecord)}
        if name == self._plan.reference:
            self._samples = samples
        (seen,) = recording.of(ComparedRecord)
        is_equal = name == self._plan.reference or self._has_equal_weights(samples)
        self._compared[name] = replace(
            self._compared[name], peak=seen.peak, loss_scale=seen.loss_scale, has_equal_weights=is_equal
        )
        self._found.extend(replace(record, run=name) for record in recording.of(GradientRecord))
        if is_equal and name != self._plan.reference:
            self._found.extend(
                LayerRecord(name, module, *_compare(sample, samples[module]))
                for module, sample in self._samples.items()
                if module and module in samples
            )

    def _has_equal_weights(self, samples: dict[str, SampleRecord]) -> bool:
        found, own = samples.get(""), self._samples.get("")
        error = None if found is None or own is None else find_error(own.output, found.output)
        return error is not None and error < CLOSE

    def _watch(self, name: str, probe: str, options: dict[str, object], seed: int) -> tuple[Recording | None, str]:
        """Return what a probe recorded, and why the run failed."""
        try:
            return self._runner(Run(probe, options, self._plan.runs[name], seed)), ""
        except RunFailedError as error:
            return error.recording, str(error)
        except NoRegionError:  # no run has anything to change
            raise
        except Exception as error:  # of a function that trains: a run of its own has failed, the others go on
            return None, (f"{type(error).__name__}: {error}".splitlines() or [""])[0]

    def _describe(self, name: str, recording: Recording | None, failed: str) -> None:
        if recording is None:
            self._compared[name] = replace(self._compared[name], failed=failed)
            return
        run = recording.run
        if self._header is None or name == self._plan.reference:
            self._header = run
        known = self._compared[name]
        self._compared[name] = replace(
            known, opt_level=run.opt_level, low=run.low, lists=run.lists, digest=run.digest, failed=failed
        )

    def _say(self, what: str) -> None:
        self._done += 1
        runs = len(self._plan.runs)
        total = (runs + 1) * len(self._plan.seeds) + runs
        is_settled = self._plan.native_runs is None
        self._tell(f"[{self._done}/{total if is_settled else '?'}] {what}")


def _compare(reference: SampleRecord, own: SampleRecord) -> tuple[float | None, ...]:
    return (
        find_error(reference.input, own.input),
        find_error(reference.output, own.output),
        find_error(reference.gradient, own.gradient),
    )


def find_error(reference: Sequence[float], values: Sequence[float]) -> float | None:
    """Return the norm of the difference over that of the reference: 0 if all are equal, inf if a value is not finite or
    the reference is zero, None without values or where their numbers differ.
    """
    if not reference or len(reference) != len(values):
        return None
    if not all(map(math.isfinite, (*reference, *values))):
        return 0.0 if list(reference) == list(values) else math.inf
    difference = math.hypot(*(a - b for a, b in zip(reference, values, strict=True)))
    norm = math.hypot(*reference)
    return 0.0 if difference == 0 else difference / norm if norm else math.inf


def _name_machine(device: str) -> str:
    """The name of the device that was trained on, and of the CPU."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
        cpu = names[0] if names else cpu
    if device == "cpu":
        return cpu
    import torch

    get_name = getattr(getattr(torch, device, None), "get_device_name", None)
    return cpu if get_name is None else f"{get_name()}, {cpu}"
