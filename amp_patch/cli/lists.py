"""`amp-patch lists`: show op lists, check list files, compare lists, explain what they say of one op; begin a list of
one's own.

Exit codes: 0 right, 1 a list has faults or two lists differ, 2 trouble: what was asked for cannot be told, since a list
is not there or cannot be used.
"""

import argparse
import sys
from collections.abc import Callable

from ..errors import OpListError
from . import lists_check, lists_diff, lists_explain, lists_init, lists_show

TASKS = {
    "show": lists_show,
    "check": lists_check,
    "diff": lists_diff,
    "explain": lists_explain,
    "init": lists_init,
}
"""Each a module with `SUMMARY`, `add_arguments(parser)` and `run(arguments)`, which returns the exit code."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the tasks and their arguments."""
    tasks = parser.add_subparsers(metavar="TASK", required=True)
    for name, module in TASKS.items():
        summary = module.SUMMARY
        task = tasks.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        module.add_arguments(task)
        task.set_defaults(task=module.run)


def run(arguments: argparse.Namespace) -> int:
    """Do one task and return its exit code."""
    task: Callable[[argparse.Namespace], int] = arguments.task
    try:
        return task(arguments)
    except OpListError as error:  # not 1, which would say that there is an answer
        print(f"{arguments.parser.prog}: failed: {error}", file=sys.stderr)
        return 2
