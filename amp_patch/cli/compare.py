"""`amp-patch compare`: runs a script at several levels, and compares losses, time, memory, gradients and layers.

The script runs unmodified, as under `amp-patch run`: for each of the --runs, once from each seed to measure losses and
times, and once more from the first seed to measure layers, which makes steps slower. Further runs of the reference show
how much of a difference is noise, and what the training has learned (see `insight.comparing.campaign`).
"""

import argparse
import sys
from typing import TYPE_CHECKING

from .. import config
from ..doctor import get_advice
from ..errors import SessionError
from ..tables import WIDTH
from ..terminal import print_report
from .run import check_everywhere
from .scripts import ScriptRunner, add_script, describe_command
from .values import add_wide, check_lists, get_level, new_file, oplist, opt_level, positive

if TYPE_CHECKING:
    from ..insight.comparing import Campaign, Comparison

EXAMPLES = (
    "amp-patch compare train.py --runs O0,O4 --steps 20",
    "amp-patch compare --everywhere train.py --html report.html  # a script without mixed precision",
)
"""Command lines that the help shows."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--runs",
        type=_runs,
        default=None,
        metavar="RUNS",
        help="levels, with +LIST for op lists, and as-is for the script unchanged (default: O0,O1,O2,O4,O5; with"
        " torch.autocast as-is,O0,O1,O4; with --everywhere O0,O4)",
    )
    parser.add_argument(
        "--reference", type=_run, metavar="RUN", help="the run to compare with (default: O0, else the first)"
    )
    parser.add_argument("--steps", type=positive, default=50, help="optimizer steps of a run (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first run (default: %(default)s)")
    parser.add_argument(
        "--seeds", type=positive, default=1, help="seeds per run, from --seed on (default: %(default)s)"
    )
    parser.add_argument("--html", type=new_file, metavar="FILE", help="write a report as one HTML page")
    parser.add_argument("--jsonl", type=new_file, metavar="FILE", help="write the records as JSON lines")
    add_wide(parser)
    add_script(
        parser,
        usage="[--runs LEVEL[+LIST...],...] [--steps N] [--seeds N] [--html FILE] [--jsonl FILE] [--wide]",
        has_level=False,
        has_report=True,
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the script, print the table and write the files. Return 0, or 1 if a run failed, or 130 after Ctrl-C.

    If no run took a step, raises SessionError, or KeyboardInterrupt after Ctrl-C.
    """
    from ..insight.comparing import Campaign, plan_runs

    if arguments.opt_level is not None:
        arguments.parser.error("compare takes no --opt-level: name levels with --runs, such as --runs O0,O4")
    asked, reference = arguments.runs, arguments.reference
    if reference is None:
        reference = config.levels.find_plain_level().name
        if asked is not None and reference not in asked:
            reference = asked[0]
    if arguments.everywhere:
        for level in (name.split("+")[0] for name in [*(asked or ()), reference]):
            # a run in float32 gets no region around the script, so --everywhere allows its level
            if level not in ("as-is", "script") and not get_level(level).is_plain:
                check_everywhere(arguments.parser, level, [])
    seeds = range(arguments.seed, arguments.seed + arguments.seeds)
    lists = [path for run_name in [*(asked or ()), reference] for path in run_name.split("+")[1:]]
    check_lists(arguments.parser, "--runs", *lists)
    command = describe_command(arguments)
    plan = plan_runs(asked, reference, arguments.steps, seeds, command, everywhere=arguments.everywhere)
    prefix = arguments.parser.prog
    runner = ScriptRunner(arguments, is_quiet=True, is_repeated=True)
    campaign = Campaign(runner, plan, lambda line: print(f"{prefix}: {line}", file=sys.stderr))
    try:
        return _compare(campaign, arguments)
    finally:
        runner.print_files()


def _compare(campaign: "Campaign", arguments: argparse.Namespace) -> int:
    """Make the runs, print and write the results, and return the exit code. Ctrl-C ends the runs early."""
    prefix, is_interrupted = arguments.parser.prog, False
    try:
        campaign.run()
    except KeyboardInterrupt:
        is_interrupted = True
    try:
        comparison = campaign.comparison()
    except SessionError:  # no run took a step
        if is_interrupted:
            raise KeyboardInterrupt from None
        raise
    if is_interrupted:
        print(f"{prefix}: interrupted; these are the results so far", file=sys.stderr)
    print_report(comparison.table(None if arguments.wide else WIDTH), comparison.judged)
    if not is_interrupted:
        print_report(f"advice: {_advise(comparison)}")
    for path, save in (
        (arguments.jsonl, comparison.to_jsonl),
        (arguments.html, comparison.save_html),
    ):
        if path is not None:
            save(path)
            print(f"written: {path}", file=sys.stderr)
    if is_interrupted:
        return 130
    return int(bool(comparison.failed))


def _advise(comparison: "Comparison") -> str:
    """Return advice on a level for this machine. It recommends no 16-bit level whose run failed, is worse than the
    reference or was not faster.
    """
    advice, verdicts, speeds = get_advice(comparison.recording.run.device), comparison.verdicts, comparison.speeds
    if not advice.levels:
        return advice.text
    good, bad, not_faster = [], [], []  # the runs at the advised levels, or in the dtype of these levels
    for run in comparison.runs:
        if run.run == comparison.about.reference:
            continue
        if run.run.startswith(advice.levels) or (run.low and run.low == advice.low):
            is_good = verdicts.get(run.run)
            if is_good is False:
                bad.append(run.run)
            elif speeds.get(run.run) is False:
                not_faster.append(run.run)
            elif is_good:
                good.append(run.run)
    if good and (bad or not_faster):
        return f"use {' or '.join(good)}" + (f", and not {' or '.join(bad)}" if bad else "")
    keep = f"keep {comparison.about.reference}"
    if bad:
        return f"{keep}: see the verdict on {' and '.join([*bad, *not_faster])}"
    if not_faster:
        names = " and ".join(not_faster)
        return f"{keep}, unless memory matters more than time: a step of {names} takes as long or longer"
    fitting = [
        level.name for level in config.levels.read_levels() if level.name in advice.levels and level.fits_autocast
    ]
    if comparison.recording.run.is_native and fitting:
        return advice.name_only(fitting)
    return advice.text


def _runs(text: str) -> list[str]:
    """Return the names of the runs in a text such as "O0,O4+my_lists.yaml"."""
    return [_run(part.strip()) for part in text.split(",")]


def _run(text: str) -> str:
    """Return a checked name of a run, such as `O4+my_lists.yaml` or `as-is`, with absolute paths of its lists."""
    level, *lists = text.split("+")
    if level not in ("as-is", "script"):
        level = opt_level(level)
    return "+".join([level, *map(oplist, lists)])
