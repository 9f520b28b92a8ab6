"""Completion in a shell, by argcomplete, which the extra `completion` of this package installs.

The shell runs the command anew at each Tab, with COMP_LINE in its environment: nothing here imports torch.
"""

import argparse
import os
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .. import config
from ..errors import MissingExtraError

_RUNS = frozenset({"runs", "reference"})
_LISTS = frozenset({"lists", "extends", "left", "right"})


def is_completing() -> bool:
    """Tell whether a shell asks for completions."""
    return "_ARGCOMPLETE" in os.environ


def complete(build_parser: Callable[[Sequence[str]], argparse.ArgumentParser]) -> None:
    """Write the completions of the command line in COMP_LINE, and end the process."""
    try:
        import argcomplete
        from argcomplete.completers import FilesCompleter
    except ModuleNotFoundError:
        raise MissingExtraError('completion needs argcomplete; run: pip install "amp_patch[completion]"') from None
    line = os.environ.get("COMP_LINE", "")
    try:
        words = shlex.split(line)[1:]
    except ValueError:  # in the middle of quotes
        words = line.split()[1:]
    parser = build_parser(words)
    for each in _parsers(parser):
        for action in each._actions:
            _set_completer(action, FilesCompleter)
    argcomplete.autocomplete(parser)


def _parsers(parser: argparse.ArgumentParser) -> Iterable[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from _parsers(each)


def _set_completer(action: argparse.Action, files: Callable[..., Any]) -> None:
    """Have argcomplete offer what an argument takes: by default files."""
    completer: Any = None
    if action.dest == "opt_level":
        completer = _joined(config.shipped.shipped_levels())
    elif action.dest in _RUNS:
        completer = _joined(config.shipped.shipped_levels(), config.shipped.shipped_names())
    elif action.dest in _LISTS:
        completer = _or_files(config.shipped.shipped_names(), files(("yaml", "yml")))
    elif action.dest == "script":
        completer = files(("py",))
    elif action.type in (int, float):
        completer = _joined(())
    if completer is not None:
        action.completer = completer  # type: ignore[attr-defined]


def _joined(names: Sequence[str], added: Sequence[str] = ()) -> Callable[..., list[str]]:
    """Completes names, also behind a comma, and behind a plus what is added to them."""

    def complete_names(prefix: str, **_: object) -> list[str]:
        before = re.split(r"[^,+]*$", prefix)[0]
        return [f"{before}{name}" for name in (added if before.endswith("+") else names)]

    return complete_names


def _or_files(names: Iterable[str], files: Any) -> Callable[..., list[str]]:
    """Completes names, and files."""
    return lambda prefix, **given: [*names, *files(prefix=prefix, **given)]
