"""`amp-patch diff`: compares two contracts, two recordings of `explain`, or two of `compare`.

A contract and a recording of `explain` can also be compared, by their ops.
"""

import argparse
from pathlib import Path

from ..errors import AmpError
from ..terminal import print_error, print_report

EXAMPLES = (
    "amp-patch diff before.jsonl after.jsonl  # two files of: amp-patch explain train.py --json FILE",
    "amp-patch diff numerics.json new.json  # two contracts of: amp-patch check train.py --write FILE",
)
"""Command lines that the help shows."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("before", type=Path, metavar="BEFORE", help="a recording or a contract")
    parser.add_argument("after", type=Path, metavar="AFTER", help="another recording or contract, to compare it with")
    parser.usage = "%(prog)s BEFORE AFTER"


def run(arguments: argparse.Namespace) -> int:
    """Print the differences. Return 0 if there are none, 1 if there are some, 2 if the files cannot be compared."""
    from ..insight.checking import describe_files

    try:
        lines = describe_files(arguments.before, arguments.after)
    except AmpError as error:
        print_error(arguments.parser.prog, "not compared", str(error))
        return 2
    print_report("\n".join(lines) if lines else "no difference")
    return int(bool(lines))
