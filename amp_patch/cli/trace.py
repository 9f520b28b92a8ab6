"""`amp-patch trace`: finds the first value of a script that does not fit into its dtype (a *fault*), the op that made
it, the reason, and a remedy.

The script runs unmodified, as under `amp-patch run`, until the step with the first fault has ended, the last of the
--steps has ended, or the script ends by itself. With `--fix`, it then runs again with a repair, such as a list against
the fault, to see whether the repair is enough.
"""

import argparse
import traceback

from ..errors import AmpError
from ..terminal import print_error
from . import armed, trace_armed
from .ranks import refuse_ranks
from .scripts import ScriptRunner, add_script, write_all
from .trace_fix import fix
from .traced_run import FAULT, TROUBLE, run_traced
from .values import new_file, steps

EXAMPLES = (
    "amp-patch trace train.py --fix fix.yaml",
    "amp-patch trace --armed train.py  # at full speed, for a step that goes wrong after hours",
)
"""Command lines that the help shows."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = (
        "exit codes: 0 every value fits, or with --fix the repair is enough; 1 a value does not fit, or training loses"
        " quietly in 16 bits, or misuses GradScaler or autocast, or raises because of dtypes; 2 the script failed,"
        " or could not be checked"
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
    armed.add_options(parser)
    usage = f"[--steps A:B] [--underflow SHARE] [--ignore OP] [--json FILE] [--fix FILE] {armed.USAGE}"
    add_script(parser, usage=usage, has_report=True)


def run(arguments: argparse.Namespace) -> int:
    """Run the script, print the findings, and return an exit code.

    0: every value fits, or with --fix the repair is enough. 1 (`FAULT`): a value does not fit, or is lost quietly (16
    bits lose it although it is finite), or the script misuses GradScaler or autocast, or raises because of dtypes. 2
    (`TROUBLE`): the script failed or could not be checked, or this command failed.
    """
    try:
        if arguments.armed:
            return trace_armed.trace(arguments)
        armed.read_options(arguments)
        return _trace(arguments)
    except (AmpError, OSError) as error:
        print_error(arguments.parser.prog, "failed", str(error))
    except Exception:
        traceback.print_exc()
    return TROUBLE


def _trace(arguments: argparse.Namespace) -> int:
    repeating_runner = None
    if arguments.fix is not None:  # before the first run, which may take long, to report usage errors of --fix at once
        refuse_ranks(arguments.parser, "trace --fix")
        repeating_runner = ScriptRunner(arguments, is_repeated=True)
    first, last = arguments.steps or (0, None)
    traced = run_traced(ScriptRunner(arguments), arguments, first, last)
    traced.print_search()
    traced.print_misuses()
    traced.print_faults()
    traced.print_raised()
    if arguments.json is not None and traced.watched.recordings:
        write_all(traced.watched.recordings, arguments.json)  # after the report, because writing may fail
    code = FAULT
    if traced.faults and traced.is_interrupted:
        raise KeyboardInterrupt
    if not traced.faults and not traced.raised:
        code = traced.report_none()
        if code == 0 and traced.misuses:
            code = FAULT
    if code != FAULT or repeating_runner is None:
        return code
    try:
        return fix(repeating_runner, arguments, traced)
    finally:
        repeating_runner.print_files()


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
