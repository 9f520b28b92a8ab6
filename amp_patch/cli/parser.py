"""`Parser`: argparse's parser, with errors that also say what to do, and with examples at the end of its help."""

import argparse
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from ..errors import did_you_mean, find_meant
from ..terminal import print_error

WIDTH = 100
"""Help texts are wrapped at this number of characters, if the terminal is not narrower."""

_PART = re.compile(r"\[(?:[^\[\]]|\[[^\[\]]*\])*\]|\([^()]*\)|\S+")


def wrap_usage(form: str, width: int, indent: str = "    ") -> list[str]:
    """Return one form of a usage text as lines of at most `width` characters.

    A part in brackets stays on one line, even if the line becomes longer, and so does a word.
    """
    lines: list[str] = []
    line = ""
    for part in _PART.findall(form):
        if line and len(line) + 1 + len(part) > width:
            lines.append(line)
            line = indent + part
            continue
        line = f"{line} {part}".lstrip() if not lines else f"{line} {part}"
    return [*lines, line]


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Wraps a help text at the width of the terminal, or at `WIDTH` characters if the terminal is wider.

    Descriptions and epilogs of several lines keep their lines.
    """

    def __init__(self, prog: str, **options: Any) -> None:
        options.setdefault("width", min(WIDTH, shutil.get_terminal_size((WIDTH, 0)).columns))
        super().__init__(prog, **options)

    def _format_usage(self, usage: Any, actions: Any, groups: Any, prefix: str | None) -> str:
        """Wrap the usage text that a command gives. argparse would print it as it is."""
        if usage is None or usage is argparse.SUPPRESS:
            return super()._format_usage(usage, actions, groups, prefix)
        prefix = "usage: " if prefix is None else prefix
        margin = " " * len(prefix)
        forms = [form.strip() for form in (usage % {"prog": self._prog}).splitlines()]
        lines = [line for form in forms for line in wrap_usage(form, self._width - len(prefix))]
        return f"{prefix}{f'{chr(10)}{margin}'.join(lines)}\n\n"

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Wrap a description of one line, and keep the lines of a longer text."""
        if "\n" in text:
            return super()._fill_text(text, width, indent)
        return argparse.HelpFormatter._fill_text(self, text, width, indent)


class Parser(argparse.ArgumentParser):
    """Reports unknown arguments, and suggests an option or a choice that the user may have meant.

    Attributes:
        rest_hint: text at the end of the error about unknown arguments, used if no known option has a similar name.
        examples: command lines that the help ends with.
    """

    rest_hint = ""
    examples: Sequence[str] = ()
    _given: Sequence[str] = ()  # the arguments to parse

    def __init__(self, *arguments: Any, **options: Any) -> None:
        options.setdefault("formatter_class", HelpFormatter)
        super().__init__(*arguments, **options)

    def format_help(self) -> str:
        """Return the help text, with the examples at its end."""
        text = super().format_help()
        if not self.examples:
            return text
        return "\n".join([text, "Examples:", *(f"  {example}" for example in self.examples), ""])

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse all arguments. Unlike argparse's method, this one reports unknown arguments as an error."""
        if args is None:
            args = sys.argv[1:]
        self._given = list(args)
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.refuse(unknown)
        return parsed, unknown

    @property
    def own_options(self) -> list[str]:
        """The names of all options of this parser."""
        return list(self._option_string_actions)

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """Report unknown arguments, and exit with 2."""
        option = next((argument.partition("=")[0] for argument in unknown if argument.startswith("-")), "")
        known = self.own_options
        hint = self.rest_hint
        # compared without the dashes, which would make all options look similar
        if find_meant(option.lstrip("-"), [name.lstrip("-") for name in known]):
            hint = f".{did_you_mean(option, known)}"
        self._exit_with_error(f"unrecognized arguments: {shlex.join(unknown)}{hint}")

    def error(self, message: str) -> NoReturn:
        """Report an error, and exit with 2.

        If there is an unknown long option, it is reported instead, because it probably caused the error.
        """
        unknown = self._find_unknown()
        if unknown:
            self.refuse(unknown)
        self._exit_with_error(message)

    def _find_unknown(self) -> list[str]:
        """Return the unknown long options on the command line.

        Returns an empty list if a subparser or a script takes the rest of the line, because unknown options may be its
        own.
        """
        if any(action.nargs in (argparse.PARSER, argparse.REMAINDER) for action in self._actions):
            return []
        unknown = []
        for argument in self._given:
            name = argument.partition("=")[0]
            is_long = name.startswith("--") and name != "--"
            if is_long and not any(option.startswith(name) for option in self.own_options):
                unknown.append(name)
        return unknown

    def _exit_with_error(self, message: str) -> NoReturn:
        print_error(self.prog, "error", f"{message}\nsee {self.prog} --help")
        self.exit(2)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        # unlike argparse's own error, this one suggests a choice
        names = list(map(str, action.choices))
        listed = f"({', '.join(names)}).{did_you_mean(str(value), names)}"
        if isinstance(action, argparse._SubParsersAction):
            raise argparse.ArgumentError(None, f"{value!r} is not a {str(action.metavar).lower()} {listed}")
        raise argparse.ArgumentError(action, f"{value!r} is not one of the choices {listed}")
