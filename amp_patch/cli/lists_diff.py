"""`amp-patch lists diff`: the ops on which two lists differ."""

import argparse

from .. import config
from ..tables import align
from .lists_printing import LIST, as_data, as_json, print_lines

SUMMARY = "print the ops on which two lists differ; exit code 0 if they are equal, 1 if not, 2 if one cannot be read"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the task."""
    for name in ("left", "right"):
        help_text = f"{LIST}, or several separated by commas; later ones win"
        parser.add_argument(name, metavar="LISTS", help=help_text)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the differences; return 1 if there are any."""
    left, right = (config.load_oplists(spec.split(",")) for spec in (arguments.left, arguments.right))
    found = config.explain.compare(left, right)
    if arguments.json:
        data = {"left": left.names, "right": right.names, "differences": [as_data(difference) for difference in found]}
        print_lines(as_json(data))
    else:
        print_lines(align((one.op, f"{_name(one.left)} -> {_name(one.right)}") for one in found))
    return 1 if found else 0


def _name(kind: str) -> str:
    return "(unlisted)" if kind == "unlisted" else kind
