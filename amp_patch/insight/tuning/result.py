"""`TuneResult`: the list that `tune` found, and the runs that it made."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from ...files import write_file
from ...tables import format_table
from ..records import RunRecord
from ..report.markup import element, join
from .entries import ListEntry
from .verdict import Verdict


@dataclass(frozen=True, slots=True)
class Trial:
    """A run of the search with a candidate, which is a list with the entries below.

    Attributes:
        number: the number of the run.
        entries: the entries.
        size: the number of modules and ops that the entries keep in float32 (see `Ranking.count_modules`).
        verdict: whether the run passed, and its errors.
    """

    number: int
    entries: tuple[ListEntry, ...]
    size: int
    verdict: Verdict

    def __str__(self) -> str:
        names = ", ".join(entry.name for entry in self.entries) or "nothing in float32"
        outcome = f"fails, {self.verdict.fault}"
        if self.verdict.passed:
            outcome = f"passes, {describe_worst(self.verdict)}"
        return f"run {self.number}: {outcome}: {names}"


@dataclass(frozen=True, slots=True, repr=False)
class TuneResult:
    """The result of a search.

    Attributes:
        entries: the entries of the list; empty if there is no list.
        trials: one for each candidate that was tried, in order.
        runs: the number of runs of the search. Traced runs, which look for faults in more steps, do not count.
        is_reached: whether the run with these entries passed, and no fault was found in a traced run with them. A fault
            that the script's loss scale may have caused does not count. `message` says if no traced run was made.
        message: the result in words.
        text: the text of the list file; empty without entries.
        is_interrupted: whether Ctrl-C ended the search; the other attributes then hold the best result so far.
    """

    entries: tuple[ListEntry, ...]
    trials: tuple[Trial, ...]
    runs: int
    is_reached: bool
    message: str
    text: str
    is_interrupted: bool = False

    def __str__(self) -> str:
        return f"{self.message}; {self.runs} runs\n\n{self.text}".rstrip()

    def __repr__(self) -> str:
        return f"<TuneResult: {self.message}; {self.runs} runs; print() shows the list>"

    def _repr_html_(self) -> str:
        parts = [element("p", f"{self.message}; {self.runs} runs")]
        if self.text:
            parts.append(element("pre", self.text))
        return join(parts)

    def table(self) -> str:
        """Return a table of the trials as text, with a line for each trial."""
        rows = []
        for trial in self.trials:
            verdict = trial.verdict
            names = ", ".join(entry.name for entry in trial.entries) or "-"
            passes = "no"
            if verdict.passed:
                passes = "yes"
            worst, loss_error = f"{verdict.worst:.2g}", f"{verdict.loss_error:.2g}"
            rows.append((str(trial.number), passes, worst, verdict.parameter or "-", loss_error, names))
        return format_table(("run", "passes", "worst", "of", "loss", "in float32"), rows, left=6)

    def to_yaml(self, path: str | os.PathLike[str]) -> None:
        """Write `text`, the list, to a file."""
        write_file(path, self.text)


def choose_best(trials: Sequence[Trial]) -> Trial | None:
    """Return the smallest trial that passed; if none passed, the trial with the smallest error. None without trials."""
    passed = [trial for trial in trials if trial.verdict.passed]
    if passed:
        # among lists that keep the same number of modules in float32, the one with fewer lines is easier to maintain
        return min(passed, key=lambda trial: (trial.size, len(trial.entries), trial.verdict.worst))
    return min(trials, key=lambda trial: (trial.verdict.worst, trial.verdict.loss_error, trial.size), default=None)


def describe_worst(verdict: Verdict) -> str:
    """Return the largest error of a gradient, such as "worst parameter 0.03 (head.weight)".

    If the error is inf, return the fault.
    """
    if verdict.worst == float("inf"):
        return verdict.fault
    if not verdict.parameter:
        return f"worst parameter {verdict.worst:.2g}"
    return f"worst parameter {verdict.worst:.2g} ({verdict.parameter})"


def format_header(run: RunRecord, message: str, tolerance: float, runs: int) -> str:
    """Return the comments at the head of a list, which say how the list was made."""
    about = f"{run.opt_level} on {run.device}, torch {run.torch}, tolerance {tolerance:g} per parameter, {runs} runs"
    lines = [f"amp-patch tune: {about}", *" ".join(message.split()).split("; ")]
    return "".join(f"# {line}\n" for line in lines)
