"""Write docs/cli.md: the reference of the command line, from the parsers of the commands.

python tools/generate_cli_page.py            write the file
python tools/generate_cli_page.py --print    print it instead
"""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

from amp_patch.cli.main import COMMANDS, build_parser
from amp_patch.cli.parser import Parser, wrap_usage

PAGE = Path(__file__).resolve().parent.parent / "docs" / "cli.md"
HEAD = """\
# Command line

Run `amp-patch`, or `python -m amp_patch`. `tools/generate_cli_page.py` generates this page from the parsers;
`amp-patch COMMAND --help` prints the same text.

Exit codes: 0 success, 1 the command failed or found a fault, 2 wrong usage, 130 Ctrl-C, 143 SIGTERM. Ctrl-C and SIGTERM
also end the script that a command runs. Commands with other exit codes say so below.
"""


def make_page() -> str:
    """Return the page."""
    lines = [HEAD]
    for command in COMMANDS:  # a parser has the arguments of the one command that it is built for
        parsers = build_parser([command.name])._actions
        (choices,) = (action.choices for action in parsers if isinstance(action, argparse._SubParsersAction))
        lines += _describe(choices[command.name], 2)
    return "\n".join(lines)


def _describe(parser: Parser, level: int) -> Iterator[str]:
    """Yield the lines of a parser, then those of the commands below it."""
    nested = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    options = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    yield f"{'#' * level} {parser.prog}\n"
    yield f"{_text(parser, parser.description or '')}\n"
    yield f"```text\n{_usage(parser)}\n```\n"
    rows = [_row(parser, action) for action in options if action not in nested and action.dest != "help"]
    if rows:
        yield from (*rows, "")
    if parser.epilog:
        text = parser.epilog.strip()
        yield f"```text\n{text}\n```\n" if "\n" in text else f"{text[0].upper()}{text[1:]}\n"
    if parser.examples:
        lines = [line for example in parser.examples for line in _example(example)]
        yield "\n".join(["Examples:\n", "```sh", *lines, "```\n"])
    for action in nested:
        for child in dict.fromkeys(action.choices.values()):
            yield from _describe(child, level + 1)


WIDTH = 76
"""Columns of a block of code that a page of 1280 pixels shows without scrolling."""


def _usage(parser: argparse.ArgumentParser) -> str:
    """Return each form on lines of its own, however wide the terminal is; an option and its value stay together."""
    parser.formatter_class = lambda prog: argparse.HelpFormatter(prog, width=10_000)  # type: ignore[assignment]
    forms = parser.format_usage().strip().removeprefix("usage: ").splitlines()
    return "\n".join(line for form in forms for line in wrap_usage(form.strip(), WIDTH))


def _example(example: str) -> Iterator[str]:
    """Yield a command line, below its comment."""
    command, _, comment = example.partition("  # ")
    if comment:
        yield f"# {comment}"
    yield command


def _row(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    values = action.metavar or ("{" + ",".join(map(str, action.choices)) + "}" if action.choices else None)
    takes = action.nargs != 0
    if action.option_strings:
        name = ", ".join(action.option_strings) + (f" {values or action.dest.upper()}" if takes else "")
    else:
        name = str(values or action.dest)
    return f"* `{name}`: {_text(parser, action.help or '', action)}".removesuffix(": ")


def _text(parser: argparse.ArgumentParser, text: str, action: argparse.Action | None = None) -> str:
    values = {} if action is None else {**vars(action), "prog": parser.prog}
    values = {name: getattr(value, "__name__", value) for name, value in values.items()}
    said = " ".join((text % values if action is not None else text).split())
    return re.sub(r"(?<!`)(--[a-z][\w-]*)", r"`\1`", said).replace("*", r"\*").replace("<", "&lt;")


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--print", action="store_true", dest="to_stdout")
    if arguments.parse_args().to_stdout:
        print(make_page(), end="")
    else:
        PAGE.write_text(make_page(), encoding="utf-8")
