"""`amp-patch diff`: compares two contracts, or two recordings of `explain`, `trace` or `compare`."""

import argparse
from pathlib import Path

from ..terminal import print_report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("before", type=Path, metavar="BEFORE", help="a recording or a contract")
    parser.add_argument("after", type=Path, metavar="AFTER", help="another one")
    parser.usage = "%(prog)s BEFORE AFTER"


def run(arguments: argparse.Namespace) -> int:
    """Print what differs. Return 0 if nothing does, else 1, as diff does."""
    from ..insight.checking import describe_files

    lines = describe_files(arguments.before, arguments.after)
    print_report("\n".join(lines) if lines else "no difference")
    return int(bool(lines))
