"""The parser of the command and of each subcommand: argparse's, whose errors are one sentence with the remedy."""

import argparse
import shlex
from collections.abc import Sequence
from typing import Any, NoReturn

from ..errors import did_you_mean
from ..terminal import print_error


class Parser(argparse.ArgumentParser):
    """Refuses what it does not know, with the option that may have been meant.

    `rest_hint` ends what is said of unknown arguments that resemble none it knows.
    """

    rest_hint = ""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse all; what is unknown is an error."""
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
        # by their names alone, as all options begin alike
        is_close = did_you_mean(option.lstrip("-"), [one.lstrip("-") for one in known])
        meant = f".{did_you_mean(option, known)}" if is_close else ""
        self.error(f"unrecognized arguments: {shlex.join(unknown)}{meant or self.rest_hint}")

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and where help is; exit with 2."""
        print_error(self.prog, "error", f"{message}\n{self.prog} --help tells more")
        self.exit(2)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        names = list(map(str, action.choices))
        listed = f"({', '.join(names)}).{did_you_mean(str(value), names)}"
        if isinstance(action, argparse._SubParsersAction):
            raise argparse.ArgumentError(None, f"{value!r} is not a {str(action.metavar).lower()} {listed}")
        raise argparse.ArgumentError(action, f"{value!r} is no choice {listed}")
