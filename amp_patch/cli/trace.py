"""`amp-patch trace`: finds the first value of a script that does not fit into its dtype (a *fault*), the op that made
it, the reason, and a remedy.

The script runs unmodified, as under `amp-patch run`, until the step with the fault has ended. With `--fix`, it then
runs again with a list against the fault, to see whether the list is enough.
"""

import argparse
import os
import shlex
import traceback
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from .. import config
from ..errors import AmpError
from ..files import write_file
from ..script_settings import NoRegionError, Settings
from ..tables import count_of
from ..terminal import print_error
from .ranks import refuse_ranks
from .scripts import ScriptRunner, WatchedRun, add_script, describe_command, write_all
from .values import new_file, steps

if TYPE_CHECKING:
    from ..insight import FaultRecord, MisuseRecord, QuietRecord, Recording, remedies

FAULT, TROUBLE = 1, 2
"""Exit codes: a value does not fit; the script could not be checked."""

FURTHER = 10
"""The number of steps after the fault that a list must get through without a fault, unless --steps is given.

Steps that a dynamic loss scale skips do not count, because they prove nothing about the list.
"""

_ROUNDS = 5
"""The largest number of lists that are tried. Each has more entries than the one before, or alternative entries."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = (
        "exit codes: 0 every value fits, or with --fix the list is enough; 1 a value does not fit, or training loses"
        " quietly in 16 bits, or misuses GradScaler or autocast; 2 the script could not be checked"
    )
    parser.add_argument(
        "--steps",
        type=steps,
        metavar="A:B",
        help="optimizer steps to check, from 0 (default: all, up to the first fault)",
    )
    parser.add_argument(
        "--underflow",
        type=_share,
        metavar="SHARE",
        help="report ops where more than this share of the values, such as 5%%, is zero only in 16 bits",
    )
    parser.add_argument("--ignore", action="append", default=[], metavar="OP", help="accept every value of this op")
    parser.add_argument("--json", type=new_file, metavar="FILE", help="also write the faults as JSON lines")
    parser.add_argument(
        "--fix",
        type=new_file,
        metavar="FILE",
        help="write a list that repairs the fault, run the script with it and in float32, and say whether it is enough",
    )
    usage = "[--steps A:B] [--underflow SHARE] [--ignore OP] [--json FILE] [--fix FILE]"
    add_script(parser, usage=usage, has_report=True)


class _TracedRun:
    """The result of running the script under a tracer.

    Args:
        watched: the exit code of the script, and the recording of each process.
        first: the number of the first step to check.
        prog: the name of the command, for messages.
    """

    def __init__(self, watched: WatchedRun, first: int, prog: str) -> None:
        self.watched = watched
        self._first = first
        self._prog = prog

    @property
    def is_interrupted(self) -> bool:
        """Whether Ctrl-C ended the run."""
        return self.watched.is_interrupted

    @property
    def faults(self) -> "list[tuple[FaultRecord, Recording]]":
        """The faults to report in order, each with its recording."""
        pairs = [(fault, recording) for recording in self.watched.recordings for fault in recording.faults]
        return sorted(pairs, key=lambda pair: _order(pair[0]))

    @property
    def quiet(self) -> "list[tuple[QuietRecord, Recording]]":
        """The quiet losses (16 bits lose a value, and every value is finite), each with its recording.

        The first recording is enough, because all ranks lose the same.
        """
        return [(lost, recording) for recording in self.watched.recordings[:1] for lost in recording.quiet]

    @property
    def _searches(self) -> "list[FaultRecord]":
        """The faults of steps that were skipped while a dynamic loss scale came down, in search of a scale that fits.

        The first recording is enough, because all ranks skip the same steps.
        """
        return [fault for recording in self.watched.recordings[:1] for fault in recording.searches]

    @property
    def _checked(self) -> int:
        """The number of steps that were checked. Steps before the first region of torch.autocast were not."""
        begun = max((recording.run.steps_before for recording in self.watched.recordings), default=0)
        return max(self.watched.steps, default=0) - max(self._first, begun)

    @property
    def are_all_skipped(self) -> bool:
        """Whether the script ended without an error, and a dynamic loss scale that came down skipped all its steps."""
        return 0 < self._checked <= len(self._searches) and not self.watched.code

    def print_search(self) -> None:
        """Print how a dynamic loss scale came down, if it did."""
        from ..insight import describe_search

        if self._searches:
            print(describe_search(self._searches, is_all=not self.faults and self.are_all_skipped), flush=True)

    def print_quiet(self) -> None:
        """Print the quiet losses."""
        from ..insight import format_quiet

        for lost, recording in self.quiet:
            print(f"\n{format_quiet(lost, recording.run)}", flush=True)

    @property
    def misuses(self) -> "list[MisuseRecord]":
        """How the script uses GradScaler and autocast wrongly. Ranks do the same."""
        return [misuse for recording in self.watched.recordings[:1] for misuse in recording.misuses]

    def print_misuses(self) -> None:
        """Print how the script uses GradScaler and autocast wrongly."""
        from ..insight import format_misuses

        if self.misuses:
            print(format_misuses(self.misuses), flush=True)

    def report_none(self) -> int:
        """Print that no fault was found, or why nothing could be checked. Return the exit code."""
        if self.are_all_skipped:
            return 0  # `print_search` has said so
        has_checked = bool(self.watched.recordings) and self._checked > 0
        if has_checked and (self.is_interrupted or not self.watched.code):
            fitting = self._checked - len(self._searches)
            print(f"every value fits, in {count_of(fitting, 'step')}", flush=True)
            self.print_quiet()
            if not self.is_interrupted:
                return FAULT if self.quiet else 0
        elif self.quiet:  # weights may be changed by hand, without an optimizer
            self.print_quiet()
            return FAULT
        if self.is_interrupted:
            raise KeyboardInterrupt
        print_error(self._prog, "failed", self._describe_end())
        return TROUBLE

    def _describe_end(self) -> str:
        """Return how the script ended before it could be checked."""
        code, steps = self.watched.code, max(self.watched.steps, default=0)
        ended = f"the script ended with exit code {code}" if code else "the script ended"
        if not self.watched.recordings:
            return ended if code else "the script called no model and no amp.initialize"
        if not steps:
            question = "" if code else ". Are weights changed by hand?"
            return f"{ended} without an optimizer step; the values that it computed fit{question}"
        if self._checked <= 0:
            taken = count_of(steps, "optimizer step")
            return f"{ended} after {taken}, but steps from {self._first} on were to be checked"
        return f"{ended} after {count_of(self._checked, 'step')}, in which every value fits"


def _order(fault: "FaultRecord") -> tuple[int, bool, bool]:
    """Return the key that sorts the faults of several ranks, the likeliest cause of the others first.

    A rank may have received a bad value from another rank; such a fault comes after the fault of that other rank.
    """
    may_be_received = fault.may_come_from_another_rank
    return fault.step, may_be_received, may_be_received and fault.origin.module is None


def run(arguments: argparse.Namespace) -> int:
    """Run the script, and print the faults and quiet losses. Return an exit code.

    0: every value fits, or with --fix the repair is enough. 1 (`FAULT`): a value does not fit, or is lost quietly.
    2 (`TROUBLE`): the script could not be checked, or this command failed.
    """
    try:
        return _trace(arguments)
    except (AmpError, OSError) as error:
        print_error(arguments.parser.prog, "failed", str(error))
    except Exception:
        traceback.print_exc()
    return TROUBLE


def _trace(arguments: argparse.Namespace) -> int:
    from ..insight import describe_further, format_fault

    repeating_runner = None
    if arguments.fix is not None:  # report usage errors of --fix before the first run, which may take long
        refuse_ranks(arguments.parser, "trace --fix")
        repeating_runner = ScriptRunner(arguments, is_repeated=True)
    first, last = arguments.steps or (0, None)
    traced = _run_traced(ScriptRunner(arguments), arguments, first, last)
    faults = traced.faults
    traced.print_search()
    traced.print_misuses()
    if faults:
        fault, recording = faults[0]
        print(format_fault(fault, recording.run), flush=True)
        for line in describe_further([fault for fault, _ in faults]):
            print(line, flush=True)
        traced.print_quiet()
    if arguments.json is not None and traced.watched.recordings:
        write_all(traced.watched.recordings, arguments.json)  # after the report, because writing may fail
    if not faults:
        code = traced.report_none()
        if code == 0 and traced.misuses:
            code = FAULT
        if code != FAULT or repeating_runner is None:
            return code
        try:
            return _fix_quiet(repeating_runner, arguments, traced)
        finally:
            repeating_runner.print_files()
    if traced.is_interrupted:
        raise KeyboardInterrupt
    if repeating_runner is None:
        return FAULT
    try:
        return _fix(repeating_runner, arguments, fault, recording)
    finally:
        repeating_runner.print_files()


def _run_traced(
    runner: ScriptRunner,
    arguments: argparse.Namespace,
    first: int,
    last: int | None,
    settings: Settings | None = None,
) -> _TracedRun:
    """Run the script under a tracer that checks the steps from `first` up to, but not including, `last`."""
    from ..insight.runs import Run

    options = {
        "first": first,
        "last": last,
        "underflow": arguments.underflow,
        "ignore": arguments.ignore,
        "counts_skipped": arguments.steps is not None,
    }
    # The files that repeated runs write go to a folder of this name. One name for all, so that the last run's are kept.
    run = Run("tracer:Tracer", options, settings or Settings(), name="last-run")
    watched = runner.watch(run, until=lambda recording: bool(recording.faults))
    return _TracedRun(watched, first, arguments.parser.prog)


# ---- --fix -----------------------------------------------------------------------------------------------------------


def _fix(runner: ScriptRunner, arguments: argparse.Namespace, fault: "FaultRecord", recording: "Recording") -> int:
    """Write a list against a fault, and run the script with it. Each fault that remains adds entries to the list.

    Return the exit code: 0 if the list is enough.
    """
    from ..insight import find_remedy, format_fault, remedies

    path: Path = arguments.fix
    remedy = find_remedy(fault, recording.run)
    if not remedy.has_list:
        reason = "none helps against this"
        if remedy.may_need_list:
            reason = "trace knows none that helps; amp-patch tune --units both may find one"
        print(f"\nno list was written: {reason}", flush=True)
        return FAULT
    remedy = replace(remedy, extends=_locate(remedy.extends, arguments.lists, path.parent))
    alternative = replace(remedy, regions=(), ops=remedy.alternative, alternative=())
    last = 0
    for _ in range(_ROUNDS):
        last = max(last, fault.step + 1 + FURTHER)
        first, end = arguments.steps or (0, last)
        write_file(path, _format_list(remedy, describe_command(arguments)))
        print(f"\nwritten: {path}; the script runs again with it", flush=True)
        traced = _run_traced(runner, arguments, first, end, Settings(None, (str(path),)))
        if not traced.faults:
            return _report_fixed(traced, path, arguments)
        fault, recording = traced.faults[0]
        next_remedy = remedies.merge(remedy, find_remedy(fault, recording.run))
        if next_remedy == remedy and alternative.has_list:
            next_remedy, alternative = alternative, replace(alternative, ops=())  # try the alternative once
        # if no entry can be added, another round would have the same result
        if next_remedy == remedy or traced.is_interrupted:
            break
        remedy = next_remedy
    print(f"{path.name} is not enough: this fault remains\n{format_fault(fault, recording.run)}", flush=True)
    if traced.is_interrupted:
        raise KeyboardInterrupt
    return FAULT


def _locate(name: str, lists: list[str], folder: Path) -> str:
    """Return the value of `extends` for a list in `folder`: the name of a shipped list, or the path of a file.

    Args:
        name: the list that the run used: the name of a shipped list, or a file, of which recordings may have no folder.
        lists: the lists of the command line, among which the file is looked for.

    Returns "" if the file is not found, because only the script knows its path. The new list then extends nothing, and
    is used on top of the script's lists.
    """
    if config.list_names.is_shipped(name):
        return name
    candidates = [Path(path) for path in (*lists, os.path.abspath(name)) if Path(path).name == Path(name).name]
    return next((os.path.relpath(file, folder) for file in candidates if file.is_file()), "")


def _format_list(remedy: "remedies.Remedy", command: str) -> str:
    """Return the text of a list, with the command that made it in a comment."""
    from ..insight import remedies

    lines = [f"# {command}"]
    if remedy.extends:
        lines.append(f"extends: {remedy.extends}")
    return "\n".join([*lines, *remedies.format_entries(remedy), ""])


def _report_fixed(traced: _TracedRun, path: Path, arguments: argparse.Namespace) -> int:
    """Print whether a list is enough, after a run with it that had no fault. Return the exit code."""
    traced.print_search()
    if traced.are_all_skipped:  # without a step that was taken, the run proves nothing about the list
        return FAULT
    code = traced.report_none()
    if code != 0:
        return code
    settings = Settings(None, (str(path),))
    if not _agrees_with_float32(path.name, settings, arguments, max(traced.watched.steps)):
        return FAULT
    print(
        f"{path.name} is enough for these steps: pass it to amp-patch run as --lists, or to amp.initialize as"
        f" lists=...\nto see whether it trains as float32 does: {_format_compare(path, arguments)}",
        flush=True,
    )
    return 0


def _fix_quiet(runner: ScriptRunner, arguments: argparse.Namespace, traced: _TracedRun) -> int:
    """Run the script at the level that keeps the values that are lost quietly. Return 0 if that level is enough."""
    from ..insight import find_level, format_quiet

    levels = [find_level(lost, recording.run) for lost, recording in traced.quiet]
    level = next(filter(None, levels), "")
    if not level:
        print("\nno list was written: no list keeps what is lost here, but an edit of the script does", flush=True)
        return FAULT
    print(f"\nno list keeps what is lost; the script runs again at {level}", flush=True)
    first, last = arguments.steps or (0, max(traced.watched.steps))
    again = _run_traced(runner, arguments, first, last, Settings(level))
    name = f'opt_level="{level}"'
    if again.faults or again.quiet:
        left = [format_quiet(lost, recording.run) for lost, recording in again.quiet]
        print("\n".join([f"{name} is not enough", *left[:1]]), flush=True)
        return FAULT
    code = again.report_none()
    if code != 0 or not _agrees_with_float32(name, Settings(level), arguments, max(again.watched.steps)):
        return code or FAULT
    print(f"{name} is enough for these steps", flush=True)
    return 0


def _agrees_with_float32(name: str, settings: Settings, arguments: argparse.Namespace, steps: int) -> bool:
    """Train with a repair and in float32, both without a tracer. Print the losses, and return whether they agree.

    Returns True if there is nothing to compare: then it prints the reason, and the repair still counts as enough.

    Args:
        name: the name of the repair, for messages.
        settings: the settings that apply it.
    """
    from ..insight import agreement
    from ..insight.runs import Run, RunFailedError

    runner, curves = ScriptRunner(arguments, is_quiet=True, is_repeated=True), []
    for each in (settings, Settings(config.levels.find_plain_level().name)):
        try:
            recording = runner(Run("comparing.probes:CurveProbe", {"steps": steps}, each, seed=0))
        except (RunFailedError, NoRegionError) as error:
            print(f"not compared with float32: {error}", flush=True)
            return True
        curves += agreement.find_curves(recording)
    if len(curves) < 2:
        print("not compared with float32: the script has no loss that was seen", flush=True)
        return True
    repaired, plain = curves
    reason = agreement.find_disagreement(repaired, plain)
    if reason:
        print(f"{name} is not enough: every value fits, but {reason}", flush=True)
        return False
    moves = f"{agreement.describe_losses(repaired)} with {name}, {agreement.describe_losses(plain)} in float32"
    print(f"loss in {count_of(len(repaired.losses), 'step')}: {moves}", flush=True)
    return True


def _format_compare(path: Path, arguments: argparse.Namespace) -> str:
    """Return the command that compares a training with the list to one in float32, with the options of this trace."""
    command = ["amp-patch", "compare"]
    command += ["-m", arguments.module] if arguments.module else [arguments.script]
    command += ["--runs", f"{config.levels.find_plain_level().name},as-is+{os.path.relpath(path)}"]
    for name in arguments.lists:
        command += ["--lists", name]
    command += [option for option in ("--everywhere", "--force") if getattr(arguments, option[2:])]
    if arguments.rest:
        command += ["--", *arguments.rest]
    return shlex.join(command)


def _share(text: str) -> float:
    """Return a share, given as `5%` or `0.05`."""
    try:
        share = float(text.removesuffix("%"))
    except ValueError:
        share = -1.0
    if text.endswith("%"):
        share /= 100
    if not 0 <= share < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share: write 5% or 0.05")
    return share
