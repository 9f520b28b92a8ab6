"""`Comparison`: the measurements of several runs, to read as text, records or a page."""

import os

from .. import display
from ..recordings import Recording
from ..report import write_report
from .summary import Summary
from .text import format_comparison, heading, judge_runs


class Comparison(Summary):
    """Several runs, compared with a run among them, the reference: the result of `compare`, or of reading its file."""

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "Comparison":
        """Read a file that `to_jsonl` wrote. Raises RecordError for any other file."""
        return cls(Recording.read(path))

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        return f"<Comparison: {heading(self)}; print() shows it>"

    def table(self, width: int | None = None) -> str:
        """Return the verdicts, a table with a row for each run, and notes.

        The reference has no verdict unless it failed. Runs that have failed with the same error share one.

        Args:
            width: the most characters in a line of the table. To fit, the table leaves out columns that say nothing,
                then the least important ones, and shortens names. None: no limit.
        """
        return format_comparison(self, width)

    @property
    def judged(self) -> list[bool | None]:
        """Whether each verdict, a line at the beginning of the text, is good; None for neither good nor bad."""
        return [verdict.is_good for verdict in judge_runs(self)]

    @property
    def verdicts(self) -> dict[str, bool | None]:
        """Whether the verdict on each run is good, by the name of the run; None for neither good nor bad."""
        return {name: verdict.is_good for verdict in judge_runs(self) for name in verdict.runs}

    @property
    def speeds(self) -> dict[str, bool | None]:
        """Whether each run is faster than the reference, by the name of the run; None if times are not judged."""
        return {name: verdict.is_faster for verdict in judge_runs(self) for name in verdict.runs}

    def _repr_html_(self) -> str:
        return display.as_html(self)

    def to_jsonl(self, path: str | os.PathLike[str]) -> None:
        """Write all records to a file, one JSON line each."""
        self.recording.to_jsonl(path)

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Write one page that needs no other file and no network."""
        write_report(self.recording, path)
