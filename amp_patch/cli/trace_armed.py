"""`amp-patch trace --armed`: runs a script at full speed. If a step goes wrong, the script's process repeats the step
under a tracer.
"""

import argparse
from typing import TYPE_CHECKING

from ..tables import count_of
from ..terminal import print_error
from . import armed
from .scripts import ScriptRunner, WatchedRun, write_all

if TYPE_CHECKING:
    from ..insight import Recording

TROUBLE, FAILED = 1, 2
"""Exit codes. TROUBLE: a step went wrong, or the script misuses GradScaler or autocast. FAILED: the script failed, or
called no model.
"""


def trace(arguments: argparse.Namespace) -> int:
    """Run the script armed, and return 0, `TROUBLE` or `FAILED`. The script's own processes report steps that go wrong.

    This command prints wrong uses of GradScaler and autocast, and how a run without such a step ended.
    """
    from ..insight import format_misuses
    from ..insight.runs import Run

    for name in ("steps", "underflow", "fix"):
        if getattr(arguments, name) is not None:
            arguments.parser.error(f"--{name} does not go with --armed")
    options = armed.read_options(arguments)
    # with `--then stop`, this command ends all ranks: a rank that ended alone would leave the others waiting
    is_stopping = options["then"] == "stop"

    def is_enough(recording: "Recording") -> bool:
        return is_stopping and bool(recording.troubles)

    run = Run(armed.PROBE, {**options, "ignore": arguments.ignore})
    watched = ScriptRunner(arguments).watch(run, until=is_enough)
    misuses = [misuse for recording in watched.recordings[:1] for misuse in recording.misuses]
    if misuses:
        print(format_misuses(misuses), flush=True)
    if arguments.json is not None and watched.recordings:
        write_all(watched.recordings, arguments.json)
    return _report(watched, arguments.parser.prog) or (TROUBLE if misuses else 0)


def _report(watched: WatchedRun, prog: str) -> int:
    """Return the exit code. Print how the run ended, unless a step went wrong: then the script's processes print it.

    Raises KeyboardInterrupt if Ctrl-C or SIGTERM ended a run in which no step went wrong.
    """
    if any(recording.troubles for recording in watched.recordings):
        return TROUBLE
    if watched.is_interrupted:
        raise KeyboardInterrupt
    steps = max(watched.steps, default=0)
    if watched.code:
        print_error(prog, "failed", f"the script ended with exit code {watched.code} after {count_of(steps, 'step')}")
        return FAILED
    if not watched.recordings:
        print_error(prog, "failed", "the script called no model and no amp.initialize")
        return FAILED
    print(f"no step went wrong, in {count_of(steps, 'step')}", flush=True)
    return 0
