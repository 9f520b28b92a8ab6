"""Completion of command lines in a shell, by argcomplete, which the extra `completion` installs.

The shell runs the command each time Tab is pressed, so nothing here imports torch.
"""

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .. import config
from ..errors import MissingExtraError

_LISTS = frozenset({"lists", "extends", "left", "right"})
"""The arguments that name op lists."""


def is_completing() -> bool:
    """Return whether a shell has started this process to ask for completions."""
    return "_ARGCOMPLETE" in os.environ


def complete(build_parser: Callable[[Sequence[str]], argparse.ArgumentParser]) -> None:
    """Write the completions of the command line in COMP_LINE, and end the process."""
    try:
        import argcomplete
        from argcomplete.completers import ChoicesCompleter, FilesCompleter
    except ModuleNotFoundError:
        raise MissingExtraError('completion needs argcomplete; run: pip install "amp_patch[completion]"') from None
    # COMP_LINE is the line so far, so the parser has the arguments of the command that is being typed, and no others
    parser = build_parser(os.environ.get("COMP_LINE", "").split()[1:])
    yaml_files = FilesCompleter(("yaml", "yml"))

    def complete_lists(**given: Any) -> list[str]:
        return [*config.shipped.shipped_names(), *yaml_files(**given)]

    for action in _actions(parser):
        if action.dest == "opt_level":
            levels = [level.name for level in config.levels.read_levels()]
            action.completer = ChoicesCompleter(levels)  # type: ignore[attr-defined, arg-type]
        elif action.dest in _LISTS:
            action.completer = complete_lists  # type: ignore[attr-defined]
        elif action.dest == "script":
            action.completer = FilesCompleter(("py",))  # type: ignore[attr-defined]
    argcomplete.autocomplete(parser)


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield all arguments of a parser and of its subparsers."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _actions(below)
