"""`amp-patch lists schema`: the JSON Schema by which an editor completes and checks list files."""

import argparse
import importlib

from .. import config
from ..errors import OpListError
from .lists_printing import as_json, print_lines

SUMMARY = "print the JSON Schema of list files, with the ops of the installed torch: editors complete and check by it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the task."""
    parser.add_argument(
        "--import",
        dest="packages",
        action="append",
        default=[],
        metavar="PACKAGE",
        help="import a package, such as torchvision, and know its ops by name; may be repeated",
    )
    parser.add_argument("--presets", action="store_true", help="print the schema of presets files instead")


def run(arguments: argparse.Namespace) -> int:
    """Print the schema."""
    if arguments.presets:
        print_lines(as_json(config.schema.make_presets_schema()))
        return 0
    for package in arguments.packages:
        try:
            importlib.import_module(package)
        except Exception as error:  # the package's own code runs
            raise OpListError(f"--import {package}: it cannot be imported here: {error}") from error
    print_lines(as_json(config.schema.make_list_schema(arguments.packages)))
    return 0
