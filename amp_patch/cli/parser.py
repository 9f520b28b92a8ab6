"""The parser of the command and of each subcommand: argparse's, whose errors are one sentence with the remedy."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from ..errors import did_you_mean, find_meant
from ..terminal import print_error


class Parser(argparse.ArgumentParser):
    """Refuses what it does not know, with the option that may have been meant.

    `rest_hint` ends what is said of unknown arguments that resemble none it knows.
    """

    rest_hint = ""
    _given: Sequence[str] = ()

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse all; what is unknown is an error."""
        if args is None:
            args = sys.argv[1:]
        self._given = list(args)
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.refuse(unknown)
        return parsed, unknown

    @property
    def own_options(self) -> list[str]:
        """All names of its options."""
        return list(self._option_string_actions)

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """Say that it knows no such arguments, as `error` does."""
        option = next((one.partition("=")[0] for one in unknown if one.startswith("-")), "")
        known = self.own_options
        hint = self.rest_hint
        # by their names alone, as all options begin alike
        if find_meant(option.lstrip("-"), [one.lstrip("-") for one in known]):
            hint = f".{did_you_mean(option, known)}"
        self._leave(f"unrecognized arguments: {shlex.join(unknown)}{hint}")

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, or which option is unknown, whose value was taken for another; exit with 2."""
        unknown = self._find_unknown()
        if unknown:
            self.refuse(unknown)
        self._leave(message)

    def _find_unknown(self) -> list[str]:
        """The long options given that no own one begins with, unless some are for others to parse."""
        if any(action.nargs in (argparse.PARSER, argparse.REMAINDER) for action in self._actions):
            return []
        unknown = []
        for argument in self._given:
            name = argument.partition("=")[0]
            is_long = name.startswith("--") and name != "--"
            if is_long and not any(option.startswith(name) for option in self.own_options):
                unknown.append(name)
        return unknown

    def _leave(self, message: str) -> NoReturn:
        print_error(self.prog, "error", f"{message}\nsee {self.prog} --help")
        self.exit(2)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        names = list(map(str, action.choices))
        listed = f"({', '.join(names)}).{did_you_mean(str(value), names)}"
        if isinstance(action, argparse._SubParsersAction):
            raise argparse.ArgumentError(None, f"{value!r} is not a {str(action.metavar).lower()} {listed}")
        raise argparse.ArgumentError(action, f"{value!r} is not one of the choices {listed}")
