"""`amp-patch trace`: the first value of a script that does not fit, the op that made it, why, and what to try.

The script runs unmodified, as under `amp-patch run`, up to the end of the step that has the fault.
"""

import argparse
import math
from typing import TYPE_CHECKING

from ..tables import count_of
from ..terminal import print_error
from .scripts import ScriptRunner, Watched, add_script, write_all
from .values import new_file, steps

if TYPE_CHECKING:
    from ..insight import FaultRecord, Recording

FAULT, TROUBLE = 1, 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = "exit codes: 0 every value fits, 1 one does not, 2 the script could not be looked at"
    parser.add_argument(
        "--steps",
        type=steps,
        metavar="A:B",
        help="optimizer steps to look at, from 0 (default: all, to the first fault)",
    )
    parser.add_argument(
        "--underflow",
        type=_share,
        metavar="SHARE",
        help="the share of an op's values that may be zero in 16 bits alone, such as 5%%; more is a fault",
    )
    parser.add_argument(
        "--ignore", action="append", default=[], metavar="OP", help="an op whose values may be what they are"
    )
    parser.add_argument("--json", type=new_file, metavar="FILE", help="write what was found too, a line of JSON each")
    add_script(parser, usage="[--steps A:B] [--underflow SHARE] [--ignore OP] [--json FILE]")


def run(arguments: argparse.Namespace) -> int:
    """Run the script, print what was found; return 0, or 1 for a fault, or 2 where nothing could be looked at."""
    from ..insight import FaultRecord, format_fault
    from ..insight.runs import Run

    first, last = arguments.steps or (0, None)
    options = {"first": first, "last": last, "underflow": arguments.underflow, "ignore": arguments.ignore}
    found = ScriptRunner(arguments).watch(Run("tracer:Tracer", options), until=_has_fault)
    if arguments.json is not None and found.recordings:
        write_all(found.recordings, arguments.json)
    faults = [(fault, one.run) for one in found.recordings for fault in one.of(FaultRecord)]
    searched = [fault for fault, _ in faults if fault.is_search]
    if searched:
        times, scale = count_of(len(searched), "step"), math.log2(searched[0].loss_scale)
        print(f"no fault: {times} skipped as the dynamic loss scale came down from 2**{scale:.0f}")
    faults = sorted((pair for pair in faults if not pair[0].is_search), key=lambda pair: _order(pair[0]))
    if faults:
        print(format_fault(*faults[0]))
        if len(faults) > 1:
            print(f"\n{len(faults) - 1} more of its kind: --json has them")
        if found.is_interrupted:
            raise KeyboardInterrupt
        return FAULT
    return _tell_of_none(found, first, arguments.parser.prog)


def _order(fault: "FaultRecord") -> tuple[int, bool, bool]:
    """Return by what the faults of several ranks are sorted: what only came in may have come from another of them."""
    is_let_in = fault.cause == "came in" and not fault.parameter
    return fault.step, is_let_in, is_let_in and not fault.module


def _has_fault(recording: "Recording") -> bool:
    from ..insight import FaultRecord

    return any(not fault.is_search for fault in recording.of(FaultRecord))


def _tell_of_none(found: Watched, first: int, prog: str) -> int:
    steps_taken = max(found.steps, default=0) - first
    ended = f"the script ended with exit code {found.code}" if found.code else "the script ended"
    if found.recordings and steps_taken > 0 and (found.is_interrupted or not found.code):
        print(f"every value fits, in {count_of(steps_taken, 'step')}", flush=True)
        if not found.is_interrupted:
            return 0
    if found.is_interrupted:
        raise KeyboardInterrupt
    if not found.recordings:
        problem = ended if found.code else "the script called no model and no amp.initialize"
    elif steps_taken <= 0:
        taken = count_of(max(found.steps), "optimizer step")
        problem = f"{ended} after {taken}, and steps from {first} on were to be looked at"
    else:
        problem = f"{ended} after {count_of(steps_taken, 'step')}, in which every value fits"
    print_error(prog, "failed", problem)
    return TROUBLE


def _share(text: str) -> float:
    number = text.removesuffix("%")
    try:
        share = float(number) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share: write 5% or 0.05")
    return share
