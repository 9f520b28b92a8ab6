"""`TuneOptions`: the checked options of a search."""

import os
from collections.abc import Callable
from dataclasses import dataclass

from ...errors import ArgumentValueError, did_you_mean
from ..runs import check_count

UNITS = ("modules", "ops", "both")


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions:
    """The options of `tune` and `Tuner`, which take them as keyword arguments.

    Attributes:
        opt_level: the opt_level to tune for; None: the training's own, or its blocks of `torch.autocast`.
        extends: the list to start from, a shipped name or a path; None: the script's own lists.
        units: what entries of the list may name: "modules"; "ops"; or "both", that is modules, and ops that run
            in no submodule.
        tolerance: largest relative error (L2) of each parameter's gradient; a fifth of it for the loss.
        steps: number of steps in which runs are compared. Each step starts from the initial weights of the training.
            The list that is found is traced for at least 20 steps.
        seed: seed of each run.
        max_runs: limit on the runs of the search. The runs that trace its result do not count.
        out: path of the list. Its `extends` is relative to the folder of this path. `tune` writes the list; `Tuner`
            does not.
        log: called with a line of text for each run.

    Raises:
        ArgumentTypeError, ArgumentValueError: an option is wrong.
    """

    opt_level: str | None = None
    extends: str | os.PathLike[str] | None = None
    units: str = "modules"
    tolerance: float = 0.1
    steps: int = 2
    seed: int = 0
    max_runs: int = 40
    out: str | os.PathLike[str] | None = None
    log: Callable[[str], object] = print

    def __post_init__(self) -> None:
        if self.units not in UNITS:
            raise ArgumentValueError(
                f"units={self.units!r} is not one of {', '.join(UNITS)}.{did_you_mean(self.units, UNITS)}"
            )
        check_count(self.steps, "steps")
        check_count(self.max_runs, "max_runs", 2)
        if not isinstance(self.tolerance, (int, float)) or not self.tolerance > 0:
            raise ArgumentValueError(
                f"tolerance={self.tolerance!r} must be a number above 0: pass 0.1 for a tenth of a gradient"
            )
