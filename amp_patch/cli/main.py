"""The `amp-patch` command: one parser over the subcommands in `COMMANDS`, each imported when it is asked for.

Exit codes: 0 done, 1 the work failed (an `AmpError`, said in one line) or found fault, 2 the command line cannot be
used or an optional extra is missing.
"""

import argparse
import importlib
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import AmpError


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand, in the module of its name: `add_arguments(parser)`, and `run(arguments)`, which returns the exit
    code, or None for 0.

    With `has_rest`, what follows `--` on the command line is not parsed: it is in `arguments.rest`, a list.
    """

    name: str
    summary: str
    has_rest: bool = False

    def load(self) -> Any:
        """Import its module and return it."""
        return importlib.import_module(f"{__package__}.{self.name}")


COMMANDS: tuple[Command, ...] = (
    Command("compare", "Run a script at several levels, and compare losses, time, memory, gradients and layers.", True),
    Command("demo", "Run a technique on real data: by default handwritten digits, trained at each opt_level."),
    Command("doctor", "Read training scripts, without running them, for what goes wrong, and look the machine over."),
    Command("explain", "Run a script for a step, and say which op ran in which precision, and why.", True),
    Command("lists", "Show, check, compare and explain op lists."),
    Command("run", "Run a script written for NVIDIA Apex, unmodified."),
    Command("trace", "Run a script until a value does not fit, and say which op made it, why, and what to try.", True),
    Command("tune", "Find the fewest modules or ops of a script that must stay in float32.", True),
)


def build_parser(argv: Sequence[str], commands: Sequence[Command] = COMMANDS) -> argparse.ArgumentParser:
    """Return the parser of all commands, with the arguments of those that `argv` may mean.

    Parsed arguments carry their `Command` and its parser by those names.
    """
    parser = argparse.ArgumentParser(prog="amp-patch", description="Apex-style mixed precision by reversible patches.")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in commands:
        subparser = subparsers.add_parser(command.name, help=command.summary, description=command.summary)
        if command.name in argv:
            command.load().add_arguments(subparser)
        subparser.set_defaults(command=command, parser=subparser)
    return parser


def _parse(argv: list[str]) -> argparse.Namespace:
    """Split the command line where `--` parts it, and parse the first part."""
    has_rest = any(command.has_rest for command in COMMANDS if command.name in argv[:1])
    end = argv.index("--") if has_rest and "--" in argv else len(argv)
    parser, rest = build_parser(argv), argv[end + 1 :]
    arguments, unknown = parser.parse_known_args(argv[:end])
    if unknown:
        hint = "; arguments of the script go after --, as in: train.py -- --epochs 3" if has_rest else ""
        arguments.parser.error(f"unrecognized arguments: {shlex.join(unknown)}{hint}")
    arguments.rest = rest
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; bad usage leaves through `SystemExit(2)`, as argparse does."""
    argv = sys.argv[1:] if argv is None else argv
    arguments = _parse(list(argv))
    try:
        code: int = arguments.command.load().run(arguments) or 0
        sys.stdout.flush()
        return code
    except AmpError as error:
        is_extra = isinstance(error, ModuleNotFoundError)
        print(f"{arguments.parser.prog}: {'error' if is_extra else 'failed'}: {error}", file=sys.stderr)
        return 2 if is_extra else 1
    except BrokenPipeError:  # what reads our output, such as head, has seen enough
        return 1
