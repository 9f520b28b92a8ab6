"""`Comparison`: what was measured of several runs, written as text, records, picture or page."""

import os

from ..records import Recording
from .picture import draw_comparison
from .summary import Summary
from .text import format_comparison, heading


class Comparison(Summary):
    """Runs compared with one of them. Made by `compare`, or read from what one wrote."""

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "Comparison":
        """Read what `to_jsonl` wrote. Raises RecordError for anything else."""
        return cls(Recording.read(path))

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        return f"<Comparison: {heading(self)}; print() shows it>"

    def table(self) -> str:
        """Return a row for each run as text, and what there is to know of all."""
        return format_comparison(self)

    def _repr_html_(self) -> str:
        from ..notebook import show_comparison  # which imports what is beside this module

        return show_comparison(self)

    def to_jsonl(self, path: str | os.PathLike[str]) -> None:
        """Write all records to a file, a line of JSON each."""
        self.recording.to_jsonl(path)

    def save_png(self, path: str | os.PathLike[str]) -> None:
        """Draw differences of the losses, time and memory. Raises MissingExtraError without matplotlib."""
        draw_comparison(self, path)

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Write one page that needs no other file and no network."""
        from ..report import write_report  # which imports what is beside this module

        write_report(self.recording, path)
