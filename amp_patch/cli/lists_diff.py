"""`amp-patch lists diff`: prints the ops that follow different rules in two lists."""

import argparse

from .. import config
from ..tables import align
from .lists_printing import LIST, as_data, print_json, print_lines

SUMMARY = "print the ops on which two lists differ; exit code 0 if they are equal, 1 if not, 2 if one cannot be read"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the task."""
    for name in ("left", "right"):
        help_text = f"{LIST}, or several separated by commas; later ones win"
        parser.add_argument(name, metavar="LISTS", help=help_text)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the differences. Return 1 if there are any, else 0."""
    left, right = (
        config.load_oplists(names.split(","), may_be_overlay=True) for names in (arguments.left, arguments.right)
    )
    differences = config.explain.compare(left, right)
    if arguments.json:
        print_json({"left": left.names, "right": right.names, "differences": list(map(as_data, differences))})
    else:
        rows = [(row.op, f"{_describe(row.left)} -> {_describe(row.right)}") for row in differences]
        print_lines(align(rows))
    return int(bool(differences))


def _describe(rule: str) -> str:
    return "(unlisted)" if rule == "unlisted" else rule
