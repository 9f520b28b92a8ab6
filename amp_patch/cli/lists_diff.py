"""`amp-patch lists diff`: prints the ops that follow different rules in two lists."""

import argparse
from collections.abc import Iterable, Iterator

from .. import config
from ..tables import WIDTH
from .lists_printing import LIST, as_data, fit_rows, print_json, print_lines
from .values import add_wide

SUMMARY = (
    "print the ops on which two lists, or two versions of torch, differ; exit code 0 if they are equal, 1 if not, 2 if"
    " one cannot be read"
)

EXAMPLES = (
    "amp-patch lists diff float16 bfloat16",
    "amp-patch lists diff autocast-cuda@2.11 autocast-cuda@2.12",
)
"""Command lines that the help shows."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the task."""
    help_text = f"{LIST}, or several separated by commas; later ones win. NAME@2.11: as it is for that torch"
    parser.add_argument("left", metavar="LISTS", help=help_text)
    parser.add_argument("right", metavar="LISTS", help="what to compare it with, written in the same way")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_wide(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the differences. Return 1 if there are any, else 0."""
    left, right = (
        config.load_oplists(names.split(","), may_be_overlay=True) for names in (arguments.left, arguments.right)
    )
    differences = config.explain.compare(left, right)
    missing = tuple(config.explain.compare_missing(left, right))
    if arguments.json:
        in_both = [*differences, *missing]
        print_json({"left": left.names, "right": right.names, "differences": list(map(as_data, in_both))})
    else:
        rows = [*_list_rows(differences, ""), *_list_rows(missing, "this torch has no such op")]
        print_lines(fit_rows(rows, None if arguments.wide else WIDTH))
    return int(bool(differences or missing))


def _list_rows(differences: "Iterable[config.explain.Difference]", remark: str) -> Iterator[tuple[str, str, str]]:
    """Yield the rows of a table: the op, its two rules, and a remark."""
    for row in differences:
        yield row.op, f"{_describe(row.left)} -> {_describe(row.right)}", remark


def _describe(rule: str) -> str:
    return "(unlisted)" if rule == "unlisted" else rule
