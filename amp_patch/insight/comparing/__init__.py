"""Runs of one training side by side: losses, time, memory, gradients and layers. Nothing here imports torch at once."""

from collections.abc import Callable, Sequence

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
    reference: str = "O0",
    tell: Callable[[str], None] = lambda line: None,
) -> Comparison:
    """Run a training in several ways for so many steps from each of the seeds 0, 1, ..., and compare them.

    `train` takes no arguments: it makes its model and data, calls `amp.initialize` or enters `torch.autocast`, takes
    steps, and is left when it has taken enough. A run is a level, or "as-is" for the training's own, with op lists to
    be laid over its own: "O4+my_lists.yaml". None asks for O0, O1, O2, O4 and O5; of a training by torch.autocast, for
    as-is, O0, O1 and O4. It trains each run once from each seed, the reference twice, and each for two steps more.

    Raises SessionError if a session is in force, or if no run took a step; a run that fails has its reason in its row.
    Raises ArgumentTypeError or ArgumentValueError for arguments that are none of these.
    """
    if runs is not None:
        check_names(runs, "runs")
    check_count(steps, "steps")
    check_count(seeds, "seeds")
    campaign = Campaign(FunctionRunner(train), plan_runs(runs, reference, steps, range(seeds)), tell)
    campaign.run()
    return campaign.comparison()
