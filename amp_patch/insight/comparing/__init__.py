"""Compares runs of one training: losses, time, memory, gradients and layers. Importing this does not import torch."""

from collections.abc import Callable, Sequence

from ...errors import ArgumentTypeError, PolicyError
from ...script_settings import Settings
from ..runs import FunctionRunner, check_count, check_names
from .campaign import Campaign as Campaign
from .campaign import Plan as Plan
from .campaign import parse_run as parse_run
from .campaign import plan_runs as plan_runs
from .comparison import Comparison as Comparison


def compare(
    train: Callable[[], object],
    runs: Sequence[str | Settings] | None = None,
    *,
    steps: int = 50,
    seeds: int = 1,
    reference: str | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> Comparison:
    """Train in several ways, for `steps` steps from each seed, and compare the runs with one of them, the reference.

    `train` is called many times: once for each run and seed, and once for each run to measure layers, memory and
    updates. For the reference, it is called once more for each seed to measure noise, and once more to measure what
    the reference has learned. Files that `train` writes are overwritten each time.

    Args:
        train: a function without arguments. It creates its model and data, calls `amp.initialize` or enters
            `torch.autocast`, and trains. It is stopped after `steps` steps.
        runs: a level for each run, or "as-is" for the settings of `train` itself. Op lists may follow:
            "O4+my_lists.yaml". None chooses by what `train` does: O0, O1, O2, O4 and O5 if it calls `amp.initialize`;
            as-is, O0, O1 and O4 if it enters torch.autocast (no O1 if it uses bfloat16 without a GradScaler); O0 and
            "script" (`train` unchanged) if it makes its weights 16-bit itself.
        steps: the number of steps of a run.
        seeds: the number of seeds: 0, 1, ... If the first two give the reference the same losses, no more are used.
        reference: one of the runs, or a further one; O0 by default.
        tell: called with a line of text when a run begins.

    Raises SessionError if a session is in force, if no run took a step, or if the reference fails in float32 for a
    reason that has nothing to do with dtypes. Other runs that fail have their reasons in their rows.
    Raises PolicyError for an unknown level, OpListError for a list that cannot be read, and ArgumentTypeError
    or ArgumentValueError for other wrong arguments.
    """
    from ...config import levels, load_oplists  # imports torch

    if reference is None:
        reference = levels.find_plain_level().name
    if runs is not None:
        check_names(runs, "runs")
    for run in (*(runs or ()), reference):
        if not isinstance(run, (str, Settings)):
            raise ArgumentTypeError(f"{run!r} is not a run: pass a level such as 'O4', or 'as-is'")
    check_count(steps, "steps")
    check_count(seeds, "seeds")
    plan = plan_runs(runs, reference, steps, range(seeds))
    for settings in plan.runs.values():
        if settings.opt_level is not None:
            _check_level(settings.opt_level)
        if settings.lists:
            load_oplists(settings.lists)  # raises if a file cannot be read
    campaign = Campaign(FunctionRunner(train), plan, tell)
    campaign.run()
    return campaign.comparison()


def _check_level(level: str) -> None:
    from ...config import make_policy  # imports torch

    try:
        make_policy(level, {})
    except PolicyError as error:
        raise PolicyError(f"{error} A run may also be as-is.") from None
