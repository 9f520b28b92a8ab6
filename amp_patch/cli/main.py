"""The `amp-patch` command: one parser over the subcommands in `COMMANDS`.

Exit codes: 0 done, 1 the work failed (an `AmpError`, said in one line) or found fault, 2 the command line cannot be
used or an optional extra is missing.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..errors import AmpError
from . import demo, doctor, lists, run


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand: `run` gets the arguments that `add_arguments` declared; it returns the exit code, or None for 0.

    `is_transparent`: what it raises is its script's, and passes through.
    """

    name: str
    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int | None]
    is_transparent: bool = False


COMMANDS: tuple[Command, ...] = (
    Command("demo", demo.SUMMARY, demo.add_arguments, demo.run),
    Command("doctor", doctor.SUMMARY, doctor.add_arguments, doctor.run),
    Command("lists", lists.SUMMARY, lists.add_arguments, lists.run),
    Command("run", run.SUMMARY, run.add_arguments, run.run, is_transparent=True),
)


def build_parser(commands: Sequence[Command] = COMMANDS) -> argparse.ArgumentParser:
    """Return the parser of all commands; parsed arguments carry their `Command` and its parser by those names."""
    parser = argparse.ArgumentParser(prog="amp-patch", description="Apex-style mixed precision by reversible patches.")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in commands:
        subparser = subparsers.add_parser(command.name, help=command.summary, description=command.summary)
        command.add_arguments(subparser)
        subparser.set_defaults(command=command, parser=subparser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; bad usage leaves through `SystemExit(2)`, as argparse does."""
    arguments = build_parser().parse_args(argv)
    command: Command = arguments.command
    if command.is_transparent:
        command.run(arguments)
        return 0
    try:
        code = command.run(arguments) or 0
        sys.stdout.flush()
        return code
    except demo.MissingExtraError as error:
        print(f"{arguments.parser.prog}: error: {error}", file=sys.stderr)
        return 2
    except AmpError as error:
        print(f"{arguments.parser.prog}: failed: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # what reads our output, such as head, has seen enough
        return 1
