"""`amp-patch trace --fix`: tries to repair what a traced run has reported, and runs the script with the repair.

For a fault (a value that does not fit into its dtype) or an exception, the repair is an op list. For a quiet loss (16
bits lose values although all are finite), the repair is another level, or a list with rules for modules.
"""

import argparse
import os
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from .. import config
from ..files import write_file
from ..script_settings import NoRegionError, Settings
from ..tables import count_of
from ..terminal import print_report
from .scripts import ScriptRunner, describe_command
from .trace_raised import find_entries
from .traced_run import FAULT, TracedRun, run_traced

if TYPE_CHECKING:
    from ..insight import FaultRecord, RaisedRecord, Recording, remedies

FURTHER = 10
"""The number of steps after the fault that must be without a fault for a list to be enough, unless --steps is given or
the script ends before.

Steps that a dynamic loss scale skips do not count, because they prove nothing about the list.
"""

_ROUNDS = 5
"""The largest number of lists that are tried. Each has more entries than the one before, or alternative entries."""


def fix(runner: ScriptRunner, arguments: argparse.Namespace, traced: TracedRun) -> int:
    """Try to repair what a traced run has reported, by a list or by a level.

    Return the exit code: 0 if the repair is enough.
    """
    if traced.faults:
        return _fix_fault(runner, arguments, *traced.faults[0])
    if traced.raised:
        return _fix_raised(runner, arguments, traced)
    return _fix_quiet(runner, arguments, traced)


def _fix_fault(
    runner: ScriptRunner, arguments: argparse.Namespace, fault: "FaultRecord", recording: "Recording"
) -> int:
    """Write a list against a fault, and run the script with it. Add entries while a fault remains.

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
        traced = run_traced(runner, arguments, first, end, Settings(None, (str(path),)))
        if not traced.faults:
            return _report_fixed(traced, path, arguments)
        fault, recording = traced.faults[0]
        further = find_remedy(fault, recording.run)
        next_remedy = remedies.merge(remedy, replace(further, sites=()))  # an edit of the script adds no entry
        if next_remedy == remedy and alternative.has_list:
            next_remedy, alternative = alternative, replace(alternative, ops=())  # without ops, it is not tried again
        # if no entry can be added, another round would have the same result
        if next_remedy == remedy or traced.is_interrupted:
            break
        remedy = next_remedy
    print_report(f"{path.name} is not enough: this fault remains\n{format_fault(fault, recording.run)}", [False])
    _keep_with_note(path)
    if traced.is_interrupted:
        raise KeyboardInterrupt
    return FAULT


def _locate(name: str, lists: list[str], folder: Path) -> str:
    """Return the value of `extends` for a list in `folder`: the name of a shipped list, or the path of a file.

    Args:
        name: the list that the run used: the name of a shipped list, or a file, perhaps without its folder.
        lists: the lists of the command line. The file is looked for among them, and in the working directory.

    Returns "" if the file is not found: only the script knows its path then. The new list extends nothing in this case,
    and is used on top of the script's lists.
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


def _keep_with_note(path: Path) -> None:
    """Add a comment to the file of a list that the list is not enough, and print that the file stays."""
    command, *entries = path.read_text(encoding="utf-8").splitlines()
    write_file(path, "\n".join([command, "# not enough by itself: see what this command reports", *entries, ""]))
    print_report(f"{path.name} is left with these entries, and a comment in it says that they are not enough")


def _report_fixed(traced: TracedRun, path: Path, arguments: argparse.Namespace) -> int:
    """Print whether a list is enough, after a run with the list that had no fault. Return the exit code."""
    traced.print_search()
    if traced.are_all_skipped:  # a run whose steps were all skipped proves nothing about the list
        return FAULT
    code = traced.report_none()
    if code != 0:
        return code
    settings = Settings(None, (str(path),))
    if not _agrees_with_float32(path.name, settings, arguments, max(traced.watched.steps)):
        _keep_with_note(path)
        return FAULT
    print_report(
        f"{path.name} is enough for these steps: pass it to amp-patch run as --lists, or to amp.initialize as"
        " lists=...",
        [True],
    )
    # the command stays on one line, to be copied
    print(f"to see whether it trains as float32 does: {_format_compare(path, arguments)}", flush=True)
    return 0


def _fix_raised(runner: ScriptRunner, arguments: argparse.Namespace, traced: TracedRun) -> int:
    """Write a list against an exception, and run the script with it. Return 0 if the list is enough."""
    from ..insight import find_base, format_fault, format_raised

    path: Path = arguments.fix
    raised, recording = traced.raised[0]
    if not raised.choices:
        print("\nno list was written: no list helps here; edit the script instead", flush=True)
        return FAULT
    base = _locate(find_base(raised, recording.run), arguments.lists, path.parent)
    runs: list[TracedRun] = []

    def run_again(entries: Sequence[str]) -> "RaisedRecord | None":
        lines = [f"# {describe_command(arguments)}", *([f"extends: {base}"] if base else []), *entries, ""]
        write_file(path, "\n".join(lines))
        print(f"\nwritten: {path}; the script runs again with it", flush=True)
        first, last = arguments.steps or (0, raised.step + 1 + FURTHER)
        runs.append(run_traced(runner, arguments, first, last, Settings(None, (str(path),))))
        return next((left for left, _ in runs[-1].raised), None)

    left = find_entries(raised, run_again)
    if runs[-1].is_interrupted:
        raise KeyboardInterrupt
    if left is not None:
        print_report(f"{path.name} is not enough: this is left\n{format_raised(left, recording.run)}", [False])
        _keep_with_note(path)
        return FAULT
    if runs[-1].faults:
        fault, with_fault = runs[-1].faults[0]
        print_report(f"{path.name} is not enough: this fault is left\n{format_fault(fault, with_fault.run)}", [False])
        _keep_with_note(path)
        return FAULT
    if not runs[-1].watched.code and not any(runs[-1].watched.steps):  # there are no losses to compare
        print_report(f"{path.name} is enough: the script runs to its end with it", [True])
        return 0
    return _report_fixed(runs[-1], path, arguments)


def _fix_quiet(runner: ScriptRunner, arguments: argparse.Namespace, traced: TracedRun) -> int:
    """Run the script at a level, or with a list, that keeps the values that are lost quietly.

    Return 0 if that is enough. Return `FAULT` if it is not, if trace knows neither, or if the script only misuses
    GradScaler or autocast.
    """
    from ..insight import find_level, find_quiet_remedy

    levels = [find_level(lost, recording.run) for lost, recording in traced.quiet]
    level = next(filter(None, levels), "")
    if level:
        return _fix_by_level(runner, arguments, traced, level)
    if not traced.quiet:
        print("\nno list was written: no list helps against a misuse; edit the script instead", flush=True)
        return FAULT
    remedy = find_quiet_remedy([lost for lost, _ in traced.quiet], traced.quiet[0][1].run)
    if not remedy.has_list:
        print("\nno list was written: trace knows none that keeps this; edit the script as it says", flush=True)
        return FAULT
    return _fix_by_modules(runner, arguments, traced, remedy)


def _fix_by_modules(
    runner: ScriptRunner, arguments: argparse.Namespace, traced: TracedRun, remedy: "remedies.Remedy"
) -> int:
    """Write a list against quiet losses, and run the script with it. Return 0 if it is enough."""
    path: Path = arguments.fix
    remedy = replace(remedy, extends=_locate(remedy.extends, arguments.lists, path.parent))
    write_file(path, _format_list(remedy, describe_command(arguments)))
    print(f"\nwritten: {path}; the script runs again with it", flush=True)
    again = _run_as_long(runner, arguments, traced, Settings(None, (str(path),)))
    if again.faults or again.quiet:
        print_report(f"{path.name} is not enough: this is left\n{_format_first(again)}", [False])
        _keep_with_note(path)
        return FAULT
    return _report_fixed(again, path, arguments)


def _fix_by_level(runner: ScriptRunner, arguments: argparse.Namespace, traced: TracedRun, level: str) -> int:
    """Run the script at a level that keeps the values that are lost quietly. Return 0 if it is enough."""
    print(f"\nno list keeps what is lost; the script runs again at {level}", flush=True)
    again = _run_as_long(runner, arguments, traced, Settings(level))
    name = f'opt_level="{level}"'
    if again.faults or again.quiet:
        print_report(f"{name} is not enough\n{_format_first(again)}", [False])
        return FAULT
    again.print_search()
    if again.are_all_skipped:  # a run whose steps were all skipped proves nothing about the level
        return FAULT
    code = again.report_none()
    if code != 0 or not _agrees_with_float32(name, Settings(level), arguments, max(again.watched.steps)):
        return code or FAULT
    print_report(f"{name} is enough for these steps", [True])
    return 0


def _run_as_long(
    runner: ScriptRunner, arguments: argparse.Namespace, traced: TracedRun, settings: Settings
) -> TracedRun:
    """Run the script with other settings under a tracer, for as many steps as it ran before, or for --steps."""
    first, last = arguments.steps or (0, max(traced.watched.steps))
    return run_traced(runner, arguments, first, last, settings)


def _format_first(traced: TracedRun) -> str:
    """Return the first fault of a run as text, or else its first quiet loss."""
    from ..insight import format_fault, format_quiet

    if traced.faults:
        fault, recording = traced.faults[0]
        return format_fault(fault, recording.run)
    lost, recording = traced.quiet[0]
    return format_quiet(lost, recording.run)


def _agrees_with_float32(name: str, settings: Settings, arguments: argparse.Namespace, steps: int) -> bool:
    """Train with a repair and in float32, both without a tracer. Return whether the losses agree. Print the result.

    If there are no losses to compare, print the reason, and return True: the repair still counts as enough.

    Args:
        name: the name of the repair, for messages.
        settings: the settings that apply it.
        steps: the number of steps to train.
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
        print_report(f"{name} is not enough: every value fits, but {reason}", [False])
        return False
    moves = f"{agreement.describe_losses(repaired)} with {name}, {agreement.describe_losses(plain)} in float32"
    print(f"loss in {count_of(len(repaired.losses), 'step')}: {moves}", flush=True)
    return True


def _format_compare(path: Path, arguments: argparse.Namespace) -> str:
    """Return the command that compares a training with the list to one in float32, with options of this trace."""
    command = ["amp-patch", "compare"]
    command += ["-m", arguments.module] if arguments.module else [arguments.script]
    command += ["--runs", f"{config.levels.find_plain_level().name},as-is+{os.path.relpath(path)}"]
    for name in arguments.lists:
        command += ["--lists", name]
    command += [option for option in ("--everywhere", "--force") if getattr(arguments, option[2:])]
    if arguments.rest:
        command += ["--", *arguments.rest]
    return shlex.join(command)
