"""`amp-patch lists`: shows op lists, checks list files, compares lists, explains the rules of an op, and starts a list.

Exit codes: 0: no fault or difference. 1: a list has faults, or two lists differ. 2: a list cannot be read or used, or
an argument is wrong.
"""

import argparse
import sys
from collections.abc import Callable

from ..errors import OpListError
from . import lists_check, lists_diff, lists_explain, lists_init, lists_show
from .parser import Parser

TASKS = {
    "show": lists_show,
    "check": lists_check,
    "diff": lists_diff,
    "explain": lists_explain,
    "init": lists_init,
}
"""The module of each task, with `SUMMARY`, `EXAMPLES`, `add_arguments(parser)`, and `run(arguments)`, which returns an
exit code.
"""

EXAMPLES = (
    "amp-patch lists init mine.yaml",
    "amp-patch lists explain softmax",
)
"""Command lines that the help shows."""


def add_arguments(parser: Parser) -> None:
    """Declare the tasks and their arguments."""
    tasks = parser.add_subparsers(metavar="TASK", required=True)
    for name, module in TASKS.items():
        summary = module.SUMMARY
        task = tasks.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        module.add_arguments(task)
        task.examples = module.EXAMPLES
        task.set_defaults(task=module.run)


def run(arguments: argparse.Namespace) -> int:
    """Run a task and return its exit code."""
    task: Callable[[argparse.Namespace], int] = arguments.task
    try:
        return task(arguments)
    except OpListError as error:  # 2 and not 1, which would mean that lists have faults or differ
        print(f"{arguments.parser.prog}: failed: {error}", file=sys.stderr)
        return 2
