"""`amp-patch lists check`: prints each fault in lists. For a list without faults, prints its entries without effect."""

import argparse
import os
from pathlib import Path

from .. import config
from ..errors import OpListError
from .lists_printing import LIST, as_data, print_json, print_lines

SUMMARY = (
    "print every fault of lists as file:line:column: text; exit code 0 without faults, 1 with faults, 2 if one"
    " of these lists cannot be read"
)

EXAMPLES = (
    "amp-patch lists check mine.yaml",
    "amp-patch lists check mine.yaml --json",
)
"""Command lines that the help shows."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the task."""
    help_text = f"{LIST}; the files it extends are checked too"
    parser.add_argument("lists", nargs="+", metavar="NAME|FILE", help=help_text)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the faults. Return 0 if there are none, else 1, or 2 if a named list does not exist or cannot be read."""
    errors: list[config.op_lists.ListProblem] = []
    warnings: list[config.op_lists.ListProblem] = []
    lines_without_faults: list[str] = []
    are_all_readable = True
    for name in arguments.lists:
        try:
            path, version = config.op_lists.locate(name, Path()), config.op_lists.split_version(name)[1]
        except OpListError as error:
            are_all_readable = False
            errors.append(config.op_lists.ListProblem(error.message, None, None, None))
            continue
        # an unreadable file is reported as a fault below, and also changes the exit code
        are_all_readable &= os.path.isfile(path) and os.access(path, os.R_OK)
        report = config.op_lists.check_oplists(path, version)
        errors += report.errors
        # a fault may be the only reason why an entry has no effect, so warnings would mislead
        if not report.errors:
            warnings += report.warnings
            lines_without_faults.append(_describe(name, report))
    # two lists may extend the same file, so print each line only once
    errors = list(dict.fromkeys(errors))
    warnings = list(dict.fromkeys(warnings))
    if arguments.json:
        faults = list(map(as_data, errors))
        print_json({"lists": arguments.lists, "faults": faults, "warnings": list(map(as_data, warnings))})
    else:
        print_lines(map(str, [*errors, *warnings]))
        if not errors:
            print_lines(lines_without_faults)
    if not are_all_readable:
        return 2
    return int(bool(errors))


def _describe(name: str, report: "config.op_lists.Diagnostics") -> str:
    """Return a line about a list without faults, with the files that the list extends."""
    bases = [path.name for path in report.files][1:]
    if bases:
        return f"{name}: no faults; it extends {', '.join(bases)}"
    return f"{name}: no faults; it extends no list, so it applies alone or on top of the lists before it"
