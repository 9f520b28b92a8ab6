"""`amp-patch lists`: show op lists, check list files, compare lists, and explain what they say of one op."""

import argparse
from collections.abc import Callable
from pathlib import Path

from .. import config
from . import lists_diff, lists_explain, lists_show
from .lists_printing import print_lines

_CHECK = "print every fault of list files as file:line:column: text; exit code 1 if there is one"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the four tasks and their arguments."""
    tasks = parser.add_subparsers(metavar="TASK", required=True)
    _add_task(tasks, "show", lists_show.SUMMARY, lists_show.add_arguments, lists_show.run)
    _add_task(tasks, "check", _CHECK, _add_check_arguments, _run_check)
    _add_task(tasks, "diff", lists_diff.SUMMARY, lists_diff.add_arguments, lists_diff.run)
    _add_task(tasks, "explain", lists_explain.SUMMARY, lists_explain.add_arguments, lists_explain.run)


def _add_task(
    tasks: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    summary: str,
    add_arguments: Callable[[argparse.ArgumentParser], None],
    task: Callable[[argparse.Namespace], int],
) -> None:
    parser = tasks.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    add_arguments(parser)
    parser.set_defaults(task=task)


def run(arguments: argparse.Namespace) -> int:
    """Do one task and return its exit code.

    Raises OpListError where lists cannot be read; `diff` says so itself and returns 2.
    """
    task: Callable[[argparse.Namespace], int] = arguments.task
    return task(arguments)


def _add_check_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="a list file; faults of files that it extends are printed too",
    )


def _run_check(arguments: argparse.Namespace) -> int:
    reports = [config.op_lists.check_oplists(path) for path in arguments.files]
    errors = dict.fromkeys(error for report in reports for error in report.errors)  # of a file that two extend, once
    # a fault may leave entries without effect that would have one, so only a file without faults is warned of
    warnings = dict.fromkeys(warning for report in reports if not report.errors for warning in report.warnings)
    print_lines([*errors, *warnings])
    return 1 if errors else 0
