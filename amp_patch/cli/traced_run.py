"""`TracedRun`: a run of a script under a tracer. It prints the report of `amp-patch trace`."""

import argparse
from typing import TYPE_CHECKING

from ..script_settings import Settings
from ..tables import count_of
from ..terminal import print_error, print_report
from .scripts import ScriptRunner, WatchedRun

if TYPE_CHECKING:
    from ..insight import FaultRecord, MisuseRecord, QuietRecord, RaisedRecord, Recording

FAULT, TROUBLE = 1, 2
"""Exit codes. FAULT: something is reported, such as a value that does not fit. TROUBLE: the script failed, or nothing
could be checked.
"""


class TracedRun:
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
        """Whether Ctrl-C or SIGTERM ended the run."""
        return self.watched.is_interrupted

    @property
    def faults(self) -> "list[tuple[FaultRecord, Recording]]":
        """The faults of all processes, each with its recording, sorted by `_order`."""
        pairs = [(fault, recording) for recording in self.watched.recordings for fault in recording.faults]
        return sorted(pairs, key=lambda pair: _order(pair[0]))

    @property
    def raised(self) -> "list[tuple[RaisedRecord, Recording]]":
        """The explained exceptions (`Recording.raised`), each with its recording, sorted by step and then by rank."""
        pairs = [(raised, recording) for recording in self.watched.recordings for raised in recording.raised]
        return sorted(pairs, key=lambda pair: (pair[0].step, pair[0].rank))

    @property
    def quiet(self) -> "list[tuple[QuietRecord, Recording]]":
        """The quiet losses (16 bits lose a value, and every value is finite), each with its recording.

        From the first recording only: data-parallel ranks usually lose the same.
        """
        return [(lost, recording) for recording in self.watched.recordings[:1] for lost in recording.quiet]

    @property
    def _searches(self) -> "list[FaultRecord]":
        """The faults of steps that were skipped while a dynamic loss scale came down, in search of a scale that fits.

        From the first recording only: data-parallel ranks skip the same steps.
        """
        return [fault for recording in self.watched.recordings[:1] for fault in recording.searches]

    @property
    def _checked(self) -> int:
        """The number of steps that were checked; 0 or less for none."""
        return max(self.watched.steps, default=0) - max(self._first, self._steps_before)

    @property
    def _steps_before(self) -> int:
        """The number of steps that the script took before it used a model or torch.autocast. They are not checked."""
        return max((recording.run.steps_before for recording in self.watched.recordings), default=0)

    @property
    def are_all_skipped(self) -> bool:
        """Whether the script ended without an error, and a falling dynamic loss scale skipped all checked steps."""
        return 0 < self._checked <= len(self._searches) and not self.watched.code

    def print_search(self) -> None:
        """Print how a dynamic loss scale came down, if it did."""
        from ..insight import describe_search

        if self._searches:
            print_report(describe_search(self._searches, is_all=not self.faults and self.are_all_skipped))

    def print_faults(self) -> None:
        """Print the first fault in full, the next few in short, and the quiet losses. Print nothing without a fault."""
        from ..insight import describe_further, format_fault

        if not self.faults:
            return
        fault, recording = self.faults[0]
        print_report(format_fault(fault, recording.run), [False])
        for line in describe_further([fault for fault, _ in self.faults]):
            print_report(line)
        self.print_quiet()

    def print_quiet(self) -> None:
        """Print the quiet losses."""
        from ..insight import format_quiet

        for lost, recording in self.quiet:
            print()
            print_report(format_quiet(lost, recording.run), [False])

    def print_raised(self) -> None:
        """Print the first explained exception, and the quiet losses, unless `print_faults` prints them."""
        from ..insight import format_raised

        for raised, recording in self.raised[:1]:
            if self.faults:
                print()
            print_report(format_raised(raised, recording.run), [False])
        if self.raised and not self.faults:
            self.print_quiet()

    @property
    def misuses(self) -> "list[MisuseRecord]":
        """How the script misuses GradScaler and autocast. The first recording is enough: ranks run the same script."""
        return [misuse for recording in self.watched.recordings[:1] for misuse in recording.misuses]

    def print_misuses(self) -> None:
        """Print how the script uses GradScaler and autocast wrongly."""
        from ..insight import format_misuses

        if self.misuses:
            print_report(format_misuses(self.misuses), [False])

    def report_none(self) -> int:
        """Print the result of a run without faults, with its quiet losses or its failure. Return the exit code.

        Prints nothing if all steps were skipped. Raises KeyboardInterrupt if Ctrl-C or SIGTERM ended the run.
        """
        from ..insight import note_float32

        if self.are_all_skipped:
            return 0  # `print_search` says so
        has_checked = bool(self.watched.recordings) and self._checked > 0
        if has_checked and (self.is_interrupted or not self.watched.code):
            fitting = self._checked - len(self._searches)
            is_good = None if self.quiet or self.misuses else True
            notes = note_float32(self.watched.recordings[0])
            print_report("\n".join([f"every value fits, in {count_of(fitting, 'step')}", *notes]), [is_good])
            self.print_quiet()
            code = FAULT if self.quiet else 0
        # the script has failed, or no step was checked, as in a script that changes weights without an optimizer
        elif self.quiet:
            self.print_quiet()
            code = FAULT
        else:
            code = TROUBLE
        if self.is_interrupted:
            raise KeyboardInterrupt
        if code == TROUBLE:
            print_error(self._prog, "failed", self._describe_end())
        return code

    def _describe_end(self) -> str:
        """Return how the script ended: before a step could be checked, or with an error."""
        code, steps = self.watched.code, max(self.watched.steps, default=0)
        ended = f"the script ended with exit code {code}" if code else "the script ended"
        if not self.watched.recordings:
            return ended if code else "the script called no model and no amp.initialize"
        if not steps:
            question = "" if code else ". Are weights changed by hand?"
            return f"{ended} without an optimizer step; the values that it computed fit{question}"
        if self._checked <= 0:
            taken = count_of(steps, "optimizer step")
            if self._first < self._steps_before:
                return f"{ended} after {taken}, all before it used a model or torch.autocast"
            return f"{ended} after {taken}, but steps from {self._first} on were to be checked"
        return f"{ended} after {count_of(self._checked, 'step')}, in which every value fits"


def _order(fault: "FaultRecord") -> tuple[int, bool, bool]:
    """Return the sort key of a fault: the step, and in a step, the likeliest cause of the other faults first.

    A fault that a rank may have received from another rank comes after the other faults of its step, and last if its
    module is unknown.
    """
    may_be_received = fault.may_come_from_another_rank
    return fault.step, may_be_received, may_be_received and fault.origin.module is None


def run_traced(
    runner: ScriptRunner,
    arguments: argparse.Namespace,
    first: int,
    last: int | None,
    settings: Settings | None = None,
) -> TracedRun:
    """Run the script under a tracer that checks the steps from `first` to before `last`, or to the end if it is None.

    The script is ended soon after its first fault, or after an explained exception.
    """
    from ..insight.runs import Run

    options = {
        "first": first,
        "last": last,
        "underflow": arguments.underflow,
        "ignore": arguments.ignore,
        "counts_skipped": arguments.steps is not None,
    }
    # If the runner keeps the files of the script in a scratch folder, each run replaces the folder "last-run".
    run = Run("tracer:Tracer", options, settings or Settings(), name="last-run")
    watched = runner.watch(run, until=lambda recording: bool(recording.faults or recording.raised))
    return TracedRun(watched, first, arguments.parser.prog)
