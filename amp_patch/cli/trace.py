"""`amp-patch trace`: the first value of a script that does not fit, the op that made it, why, and what to try.

The script runs unmodified, as under `amp-patch run`, up to the end of the step that has the fault. With `--fix` it then
runs again, with a list of what is advised, to say whether that is enough.
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
from .scripts import ScriptRunner, Watched, add_script, describe_command, write_all
from .values import new_file, steps

if TYPE_CHECKING:
    from ..insight import FaultRecord, Recording, remedies

FAULT, TROUBLE = 1, 2
FURTHER = 10
"""So many steps beyond the one that had the fault are looked at with a list, unless --steps says which. Those that a
dynamic loss scale skips do not count: in them no list is at fault, and none is proved.
"""

_ROUNDS = 5  # lists that are tried, each with more than the one before, and the other of two

_PERHAPS_BY_TUNE = frozenset({"scale", "gradients", "list", "weights"})  # remedies beside which there may be a list


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = (
        "exit codes: 0 every value fits, or with --fix the list is enough; 1 a value does not fit; 2 the script could"
        " not be checked"
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


def run(arguments: argparse.Namespace) -> int:
    """Run the script, print what was found; return 0, or 1 for a fault, or 2 where nothing could be looked at, also by
    an error of this command.
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

    if arguments.fix is not None:
        refuse_ranks(arguments.parser, "trace --fix")
    first, last = arguments.steps or (0, None)
    repeated = None
    if arguments.fix is not None:
        repeated = ScriptRunner(arguments, is_repeated=True)
    found = _watch(ScriptRunner(arguments), arguments, first, last)
    faults = _find_faults(found)
    _tell_of_search(found, is_all=not faults and _are_all_skipped(found, first))
    if faults:
        fault, recording = faults[0]
        print(format_fault(fault, recording.run), flush=True)
        for line in describe_further([one for one, _ in faults]):
            print(line, flush=True)
    if arguments.json is not None and found.recordings:  # which may fail: what was found has been said
        write_all(found.recordings, arguments.json)
    if not faults:
        return _tell_of_none(found, first, arguments.parser.prog)
    if found.is_interrupted:
        raise KeyboardInterrupt
    if repeated is None:
        return FAULT
    try:
        return _fix(repeated, arguments, fault, recording)
    finally:
        repeated.tell_of_files()


def _watch(
    runner: ScriptRunner, arguments: argparse.Namespace, first: int, last: int | None, lists: tuple[str, ...] = ()
) -> Watched:
    from ..insight.runs import Run

    options = {
        "first": first,
        "last": last,
        "underflow": arguments.underflow,
        "ignore": arguments.ignore,
        "counts_skipped": arguments.steps is not None,
    }
    run = Run("tracer:Tracer", options, Settings(None, lists), name="last-run")
    return runner.watch(run, until=_has_fault)


def _fix(runner: ScriptRunner, arguments: argparse.Namespace, fault: "FaultRecord", recording: "Recording") -> int:
    """Write a list against a fault, run the script with it, and add what is found then; return 0 if it is enough."""
    from ..insight import format_fault, remedies

    path: Path = arguments.fix
    remedy = remedies.find_remedy(fault, recording.run)
    if not remedy.has_list:
        reason = "none helps against this"
        if remedy.kind in _PERHAPS_BY_TUNE:
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
        found = _watch(runner, arguments, first, end, (str(path),))
        faults = _find_faults(found)
        if not faults:
            return _tell_of_fixed(found, first, path, arguments)
        fault, recording = faults[0]
        more = remedies.add(remedy, remedies.find_remedy(fault, recording.run))
        if more == remedy and alternative.has_list:
            more, alternative = alternative, replace(alternative, ops=())
        if more == remedy or found.is_interrupted:
            break
        remedy = more
    print(f"{path.name} is not enough: this fault remains\n{format_fault(fault, recording.run)}", flush=True)
    if found.is_interrupted:
        raise KeyboardInterrupt
    return FAULT


def _locate(name: str, lists: list[str], folder: Path) -> str:
    """Return by what a list in a folder extends another: a shipped one by name, a file by its path; "" if the script
    alone knows where that is, over whose own lists this one is laid.
    """
    if name in config.shipped.shipped_names():
        return name
    files = [Path(one) for one in (*lists, os.path.abspath(name)) if Path(one).name == Path(name).name]
    return next((os.path.relpath(file, folder) for file in files if file.is_file()), "")


def _format_list(remedy: "remedies.Remedy", command: str) -> str:
    from ..insight import remedies

    lines = [f"# {command}"]
    if remedy.extends:
        lines.append(f"extends: {remedy.extends}")
    return "\n".join([*lines, *remedies.format_entries(remedy), ""])


def _tell_of_fixed(found: Watched, first: int, path: Path, arguments: argparse.Namespace) -> int:
    """Say that a list is enough, if there was anything to look at with it."""
    _tell_of_search(found, is_all=_are_all_skipped(found, first))
    if _are_all_skipped(found, first):
        return FAULT
    code = _tell_of_none(found, first, arguments.parser.prog)
    if code == 0 and not _agrees(path, arguments, max(found.steps)):
        return FAULT
    if code == 0:
        print(
            f"{path.name} is enough for these steps: pass it to amp-patch run as --lists, or to amp.initialize as"
            f" lists=...\nto see whether it trains as float32 does: {_format_compare(path, arguments)}",
            flush=True,
        )
    return code


def _agrees(path: Path, arguments: argparse.Namespace, steps: int) -> bool:
    """Train with a list, and in float32, untraced; say how the losses of both move, and tell whether they agree."""
    from ..insight import agreement
    from ..insight.runs import Run, RunFailedError

    runner, curves = ScriptRunner(arguments, is_quiet=True, is_repeated=True), []
    for settings in (Settings(None, (str(path),)), Settings(config.levels.find_plain_level().name)):
        try:
            recording = runner(Run("comparing.probes:CurveProbe", {"steps": steps}, settings, seed=0))
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
        print(f"{path.name} is not enough: every value fits, but {reason}", flush=True)
        return False
    moves = f"{agreement.describe_losses(repaired)} with {path.name}, {agreement.describe_losses(plain)} in float32"
    print(f"loss in {count_of(len(repaired.losses), 'step')}: {moves}", flush=True)
    return True


def _format_compare(path: Path, arguments: argparse.Namespace) -> str:
    """Return the command that compares the script with a list to float32, with all that it was traced with."""
    command = ["amp-patch", "compare"]
    command += ["-m", arguments.module] if arguments.module else [arguments.script]
    command += ["--runs", f"{config.levels.find_plain_level().name},as-is+{os.path.relpath(path)}"]
    for name in arguments.lists:
        command += ["--lists", name]
    command += [option for option in ("--everywhere", "--force") if getattr(arguments, option[2:])]
    if arguments.rest:
        command += ["--", *arguments.rest]
    return shlex.join(command)


def _find_faults(found: Watched) -> "list[tuple[FaultRecord, Recording]]":
    """Return the faults that are to be told, in their order, each with the recording that has it."""
    from ..insight import FaultRecord

    pairs = [(fault, one) for one in found.recordings for fault in one.of(FaultRecord) if not fault.is_search]
    return sorted(pairs, key=lambda pair: _order(pair[0]))


def _order(fault: "FaultRecord") -> tuple[int, bool, bool]:
    """Return by what the faults of several ranks are sorted: what only came in may have come from another of them."""
    is_let_in = fault.cause == "came in" and not fault.parameter
    return fault.step, is_let_in, is_let_in and not fault.module


def _has_fault(recording: "Recording") -> bool:
    from ..insight import FaultRecord

    return any(not fault.is_search for fault in recording.of(FaultRecord))


def _find_searches(found: Watched) -> "list[FaultRecord]":
    """Return what is known of the steps that were skipped as a dynamic loss scale came down."""
    from ..insight import FaultRecord

    return [fault for one in found.recordings[:1] for fault in one.of(FaultRecord) if fault.is_search]


def _tell_of_search(found: Watched, *, is_all: bool) -> None:
    from ..insight import describe_search

    searches = _find_searches(found)
    if searches:
        print(describe_search(searches, is_all=is_all), flush=True)


def _tell_of_none(found: Watched, first: int, prog: str) -> int:
    steps_taken = _count_seen(found, first)
    if _are_all_skipped(found, first):
        return 0
    if found.recordings and steps_taken > 0 and (found.is_interrupted or not found.code):
        checked = steps_taken - len(_find_searches(found))
        print(f"every value fits, in {count_of(checked, 'step')}", flush=True)
        if not found.is_interrupted:
            return 0
    if found.is_interrupted:
        raise KeyboardInterrupt
    ended = f"the script ended with exit code {found.code}" if found.code else "the script ended"
    if not found.recordings:
        problem = ended if found.code else "the script called no model and no amp.initialize"
    elif not max(found.steps):
        problem = f"{ended} without an optimizer step; the values that it computed fit"
        if not found.code:
            problem += ". Are weights changed by hand?"
    elif steps_taken <= 0:
        taken = count_of(max(found.steps), "optimizer step")
        problem = f"{ended} after {taken}, but steps from {first} on were to be checked"
    else:
        problem = f"{ended} after {count_of(steps_taken, 'step')}, in which every value fits"
    print_error(prog, "failed", problem)
    return TROUBLE


def _are_all_skipped(found: Watched, first: int) -> bool:
    """Tell whether the script ended well, and each of its steps was skipped as a dynamic loss scale came down."""
    return 0 < _count_seen(found, first) <= len(_find_searches(found)) and not found.code


def _count_seen(found: Watched, first: int) -> int:
    """Return how many steps were looked at, from `first` on: none before the script entered what was to be changed."""
    begun = max((one.run.steps_before for one in found.recordings), default=0)
    return max(found.steps, default=0) - max(first, begun)


def _share(text: str) -> float:
    try:
        share = float(text.removesuffix("%"))
    except ValueError:
        share = -1.0
    if text.endswith("%"):
        share /= 100
    if not 0 <= share < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share: write 5% or 0.05")
    return share
