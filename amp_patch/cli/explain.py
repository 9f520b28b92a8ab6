"""`amp-patch explain`: shows the precision in which the ops of a script ran, the rules that decided it, and the casts.

The script runs unmodified, as under `amp-patch run`, until the steps to record have ended.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import SessionError
from ..tables import WIDTH, count_of
from ..terminal import print_report
from .ranks import name_for_node
from .scripts import ScriptRunner, WatchedRun, add_script, describe_command, write_all
from .values import add_wide, new_file, steps

if TYPE_CHECKING:
    from ..insight import Recording

EXAMPLES = (
    "amp-patch explain train.py --by op",
    "amp-patch explain train.py --html report.html",
)
"""Command lines that the help shows."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--steps",
        type=steps,
        metavar="A:B",
        help="optimizer steps to record, from 0 (default: 1:2; with --lists or --opt-level, the second step after the"
        " script first enters torch.autocast)",
    )
    parser.add_argument(
        "--by",
        choices=("module", "op", "entry"),
        default="module",
        help="what each row stands for (default: %(default)s)",
    )
    parser.add_argument("--all", action="store_true", help="show each layer, and ops that run as in plain torch")
    parser.add_argument("--json", type=new_file, metavar="FILE", help="also write the records as JSON lines")
    parser.add_argument("--html", type=new_file, metavar="FILE", help="write a report as one HTML page")
    parser.add_argument("--from", dest="source", type=Path, metavar="FILE", help="print a file written by --json")
    add_wide(parser)
    add_script(
        parser,
        usage="[--steps A:B] [--by module|op|entry] [--all] [--wide] [--json FILE] [--html FILE]",
        is_repeated=False,
        has_report=True,
    )
    parser.usage = f"{parser.usage}\n       %(prog)s --from FILE [--by module|op|entry] [--all] [--wide] [--html FILE]"


def run(arguments: argparse.Namespace) -> int:
    """Run the script and print its recording. With --from, print a file instead. Return 0, or 1 if the script failed.

    Raises SessionError if nothing was recorded, and KeyboardInterrupt after Ctrl-C.
    """
    from ..insight import Recording, format_raised, format_recording
    from ..insight.runs import Run

    width = None if arguments.wide else WIDTH
    if arguments.source is not None:
        recording = Recording.read(arguments.source)
        text = str(recording)  # a recording of trace or compare has no ops
        if recording.ops:
            text = format_recording(recording, arguments.by, with_all=arguments.all, width=width)
        print_report(text)
        _write_html(recording, arguments)
        return 0
    first, last = arguments.steps or (1, 2)
    options = {"first": first, "last": last, "counts_before": arguments.steps is not None}
    watched = ScriptRunner(arguments).watch(Run("recorder:Recorder", options))
    code, recordings = watched.code, watched.recordings
    # Ctrl-C came before an op was recorded, so there is nothing to print
    if watched.is_interrupted and not any(recording.ops for recording in recordings):
        raise KeyboardInterrupt
    _print_misuses(recordings[:1])
    _check_ops(watched, first, last)
    if arguments.json is not None:
        write_all(recordings, arguments.json)
    # of several processes, print the first that raised an explained exception, or else the first process
    recording = next((each for each in recordings if each.raised), recordings[0])
    if not recording.ops:
        print_report(format_raised(recording.raised[0], recording.run))
        return 1
    print_report(format_recording(recording, arguments.by, with_all=arguments.all, width=width))
    if recording.run.script_low:
        low = recording.run.script_low
        print_report(
            f"\nthe weights are {low} by the script itself, without amp: ops run in {low} where their inputs are, and"
            " lists do not act on them; `amp-patch compare` shows what this loses"
        )
    elif recording.run.is_native and not recording.run.low:
        print_report(
            "\nthis ran without mixed precision: give later steps if the script enters torch.autocast later;"
            " --everywhere --opt-level O4 shows what it would run in bfloat16"
        )
    _write_html(recording, arguments)
    if len(recordings) > 1:
        which = "the first" if recording is recordings[0] else "one"
        print(f"\nthis is {which} of {len(recordings)} processes")
    if len(recording.steps) < last - first and not recording.raised:
        print(f"\nthe script ended after {len(recording.steps)} of {last - first} steps")
    if watched.is_interrupted:
        raise KeyboardInterrupt
    # a script may also fail without an explained exception; one that the command ended after its steps has code 0
    return int(code != 0)


def _check_ops(watched: WatchedRun, first: int, last: int) -> None:
    """Raise SessionError, with the reason, if there is nothing to print: the first process recorded no op, and no
    process recorded an exception that it explains (`Recording.raised`).
    """
    code, recordings = watched.code, watched.recordings
    has_ops = bool(recordings) and bool(recordings[0].ops)
    if has_ops or any(recording.raised for recording in recordings):
        return
    if code:
        raise SessionError(
            f"nothing to explain: the script ended with exit code {code} before a step was recorded"
            f"{_hint_at_steps(watched.steps, first)}"
        )
    if not recordings:
        raise SessionError("nothing to explain: the script called no model and no amp.initialize")
    taken = watched.steps[0]
    if taken >= last:
        raise SessionError(
            f"nothing to explain: steps {first}:{last} ended before the script entered torch.autocast; give --steps"
            f" {taken}:{taken + 1}"
        )
    raise SessionError(
        f"nothing to explain: the script took {count_of(taken, 'optimizer step')}, but steps"
        f" {first}:{last} were to be recorded; give --steps 0:1"
    )


def _hint_at_steps(taken: list[int], first: int) -> str:
    """Return the advice to record the step in which the script failed.

    `taken`: the number of steps that each process took before the failure. Return "" if no process is known, or if the
    script failed in the step right before step `first`, or later.
    """
    last = max(taken, default=0)
    return f"; give --steps {last}:{last + 1}" if taken and last < first - 1 else ""


def _print_misuses(recordings: "Sequence[Recording]") -> None:
    """Print how the script uses GradScaler and autocast wrongly."""
    from ..insight import format_misuses

    for recording in recordings:
        if recording.misuses:
            print_report(format_misuses(recording.misuses))


def _write_html(recording: "Recording", arguments: argparse.Namespace) -> None:
    from ..insight.report import write_report

    if arguments.html is not None:
        write_report(recording, name_for_node(arguments.html), command=describe_command(arguments))
