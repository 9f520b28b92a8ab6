"""The `amp-patch` command: parses the command line, and runs one of `COMMANDS`. The module of a command is imported
only if the command line names it, so `amp-patch --help` needs no torch.

Exit codes: 0 done; 1 the command failed (an `AmpError` or `OSError`, shown without a traceback), or reports a problem
or a difference; 2 the command line cannot be used, or an optional extra is missing; 130 after Ctrl-C; 143 after
SIGTERM. `check`, `diff`, `lists` and `trace` also return 2 if they end without a result.
`run` ends with the exit code of the script.
"""

import argparse
import contextlib
import importlib
import io
import signal
import sys
import threading
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .. import __version__
from ..errors import AmpError, MissingExtraError
from ..interrupts import TerminatedError
from ..terminal import print_error
from .completion import complete, is_completing
from .parser import Parser
from .values import check_outputs


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand. Its module has `EXAMPLES`, `add_arguments(parser)`, and `run(arguments)`, which returns the exit
    code, or None for 0.

    Attributes:
        has_rest: whether arguments after `--` belong to the script. They are not parsed, but put into the list
            `arguments.rest`.
    """

    name: str
    summary: str
    has_rest: bool = False

    def load(self) -> Any:
        """Import and return the module of the command."""
        return importlib.import_module(f"{__package__}.{self.name}")


COMMANDS: tuple[Command, ...] = (
    Command("check", "Write a contract of precision and numbers for a script, or check the script against it.", True),
    Command("compare", "Run a script at several levels, and compare losses, time, memory, gradients and layers.", True),
    Command("diff", "Compare two recordings or contracts: which ops moved to another precision, appeared or vanished."),
    Command("doctor", "Check training scripts without running them, and report what this machine computes in 16 bits."),
    Command("explain", "Run a script for a step, and print which op ran in which precision, and why.", True),
    Command("lists", "Show, check, compare and explain op lists."),
    Command("run", "Run an Apex script unmodified, or any amp script at another level or with other lists."),
    Command("trace", "Run a script until a value is inf or NaN, and say which op made it, why, and what to try.", True),
    Command("tune", "Find the fewest modules or ops of a script that must stay in float32.", True),
)


REST_HINT = "; arguments of the script go after --, as in: train.py -- --epochs 3"
EPILOG = """amp-patch COMMAND --help describes a command.

Completion in a shell:
  pip install "amp_patch[completion]"
  eval "$(register-python-argcomplete amp-patch)"
"""
EXAMPLES = (
    "amp-patch trace train.py  # where does the first inf or NaN come from?",
    "amp-patch compare train.py --html out.html  # what does each level cost and save?",
)
INTERRUPTED, TERMINATED = 130, 143
"""The exit codes after Ctrl-C and after SIGTERM: 128 plus the number of the signal, as in shells."""


def build_parser(argv: Sequence[str], commands: Sequence[Command] = COMMANDS) -> Parser:
    """Return the parser of all commands. Only the command at the start of `argv` gets its arguments declared.

    The parsed arguments have the attributes `command`, a `Command`, and `parser`, the parser of that command.
    """
    parser = Parser(
        prog="amp-patch",
        description="Find out why mixed precision breaks your PyTorch training, and run Apex scripts.",
        epilog=EPILOG,
    )
    parser.examples = EXAMPLES
    parser.rest_hint = "; options go after their command, as in: amp-patch trace train.py --steps 2"
    parser.add_argument("--version", action="version", version=f"amp-patch {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in commands:
        subparser = subparsers.add_parser(command.name, help=command.summary, description=command.summary)
        if command.has_rest:
            subparser.rest_hint = REST_HINT
        if command.name in argv[:1]:
            module = command.load()
            module.add_arguments(subparser)
            subparser.examples = module.EXAMPLES
        subparser.set_defaults(command=command, parser=subparser)
    return parser


def _parse(argv: list[str]) -> argparse.Namespace:
    """Parse the command line; for a command that `has_rest`, only up to `--`."""
    has_rest = any(command.has_rest for command in COMMANDS if command.name in argv[:1])
    end = len(argv)
    if has_rest and "--" in argv:
        end = argv.index("--")
    parser = build_parser(argv)
    # report an unknown option in front of the command: argparse would only report that COMMAND is missing
    if argv[0].startswith("-") and not any(option.startswith(argv[0]) for option in parser.own_options):
        parser.refuse(argv[:1])
    arguments = parser.parse_args(argv[:end])
    arguments.rest = argv[end + 1 :]
    check_outputs(arguments.parser, arguments)
    return arguments


@contextlib.contextmanager
def _terminable() -> Iterator[list[int]]:
    """Context manager: SIGTERM ends a command as Ctrl-C does, so that its script ends too, and results are kept.

    Yields a list that gets an item for each SIGTERM that is received. Outside of the main thread, no handler is set.
    """
    received: list[int] = []

    def stop(number: int, frame: types.FrameType | None) -> None:
        received.append(number)
        raise TerminatedError

    if threading.current_thread() is not threading.main_thread():  # only the main thread can set handlers
        yield received
        return
    earlier_handler = signal.signal(signal.SIGTERM, stop)
    try:
        yield received
    finally:
        signal.signal(signal.SIGTERM, earlier_handler)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code. A usage error raises `SystemExit(2)`, and `--help` raises
    `SystemExit(0)`, as in argparse.
    """
    if argv is None:
        argv = sys.argv[1:]
    if isinstance(sys.stdout, io.TextIOWrapper):
        # a name in the output may have characters that the encoding of stdout lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    with _terminable() as received:
        code = _run(list(argv))
    if received and code == INTERRUPTED:
        return TERMINATED
    return code


def _run(argv: list[str]) -> int:
    """Run a command, print the error that ends it, and return its exit code."""
    prog = " ".join(["amp-patch", *(command.name for command in COMMANDS if command.name in argv[:1])])
    try:
        if is_completing():
            complete(build_parser)
        if not argv:
            build_parser(argv).print_help()
            return 0
        arguments = _parse(argv)
        code: int = arguments.command.load().run(arguments) or 0
        sys.stdout.flush()
        return code
    except MissingExtraError as error:
        print_error(prog, "error", str(error))
        return 2
    except AmpError as error:
        print_error(prog, "failed", str(error))
        return 1
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the program that reads our output, such as head, has ended
        return 1
    # an error of the command's own files: the script runs in another process, and its errors do not come here
    except OSError as error:
        print_error(prog, "failed", ": ".join(map(str, filter(None, (error.filename, error.strerror or error)))))
        return 1
