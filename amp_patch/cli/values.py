"""Reads and checks the values of options: levels, op lists, numbers, files. Declares --wide, which commands share.

A function that returns the value of an option raises argparse.ArgumentTypeError if its text cannot be used.

torch is imported only to read the content of op lists, and the levels of the file that AMP_PATCH_PRESETS names.
"""

import argparse
import os
from pathlib import Path

from .. import config
from ..errors import AmpError, did_you_mean
from ..files import check_writable
from ..tables import WIDTH


def opt_level(text: str) -> str:
    """Return `text` if a level has this name: a shipped level, or one of the file that AMP_PATCH_PRESETS names."""
    known = tuple(level.name for level in config.levels.read_levels())
    if text in known:
        return text
    if not os.environ.get("AMP_PATCH_PRESETS"):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not an opt_level ({', '.join(known)}).{did_you_mean(text, known)}"
        )
    try:
        config.make_policy(text, {})
    except AmpError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def get_level(name: str) -> "config.levels.Level":
    """Return the facts of a level whose name `opt_level` has checked. Imports torch if AMP_PATCH_PRESETS is set."""
    if not os.environ.get("AMP_PATCH_PRESETS"):
        return next(level for level in config.levels.read_levels() if level.name == name)
    return config.make_policy(name, {}).as_level()


def oplist(text: str) -> str:
    """Return `text` if it names a shipped list, else the absolute path of the file, which must exist.

    A suffix `@version` is kept. The path is absolute because scripts may change their working directory. The content is
    checked later, by `check_lists`.
    """
    try:
        path = config.list_names.locate(text, Path.cwd())
    except AmpError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if config.list_names.is_shipped(text):
        return text
    if not path.is_file():
        beside = [file.name for file in path.parent.glob("*.y*ml")]
        raise argparse.ArgumentTypeError(f"{text!r}: no such file.{did_you_mean(path.name, beside)}")
    version = text.removeprefix(os.fspath(config.list_names.split_version(text)[0]))
    return f"{os.path.abspath(path)}{version}"


def check_lists(parser: argparse.ArgumentParser, option: str, *lists: str) -> None:
    """Report a usage error if one of these op lists is a file with an error in it. Reading files imports torch."""
    for name in lists:
        # `oplist` returns files as absolute paths; shipped lists need no check
        if os.path.isabs(name):
            try:
                # a file that extends no list is used on top of the script's lists; here a shipped list stands for them
                config.load_oplists(("apex", name))
            except AmpError as error:
                parser.error(f"argument {option}: {error}")


def add_wide(parser: argparse.ArgumentParser) -> None:
    """Declare --wide."""
    about = f"print all columns and whole names (default: what fits {WIDTH} characters)"
    parser.add_argument("--wide", action="store_true", help=about)


def at_least(least: int, text: str) -> int:
    """Return the whole number in a text, which must be `least` or more."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {least} or more")
    return int(text)


def positive(text: str) -> int:
    """Return the whole number in a text, which must be 1 or more."""
    return at_least(1, text)


_OUTPUTS = ("fix", "html", "json", "jsonl", "out", "write")
"""The options that name a file to write."""

_WRITTEN = (b"# amp-patch ", b'{"kind": ', b'[\n{"kind": ', b'{\n "holds": ')
"""The beginnings of the lists, records and verdicts that commands write. Their pages in HTML contain `_TITLE`."""

_TITLE = b"<title>amp_patch: "


def new_file(text: str) -> Path:
    """Return the absolute path of a file that the command can write when it ends, in a folder that exists.

    A file that exists is accepted only if it is empty, or if a command has written it.
    """
    path = Path(text).absolute()
    try:
        if path.is_file() and not _is_written_by_command(path):
            raise argparse.ArgumentTypeError(
                f"{text!r} exists already, and no command of amp-patch has written it: give another name, or remove it"
                " first"
            )
        check_writable(path)
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise argparse.ArgumentTypeError(f"{text!r} must be a file in a folder that exists") from None
    except OSError as error:
        reason = str(error.strerror).lower()
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: {reason}") from None
    return path


def _is_written_by_command(path: Path) -> bool:
    """Return whether a file is empty, or begins as the files that commands write."""
    with path.open("rb") as file:
        beginning = file.read(4096)
    return not beginning or beginning.startswith(_WRITTEN) or _TITLE in beginning


def check_outputs(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Exit with a usage error if a file that the command is to write is one that it reads, too."""
    given = vars(arguments)
    read = [value for name, value in given.items() if name not in (*_OUTPUTS, "rest")]
    paths = [path for value in read for path in (value if isinstance(value, (list, tuple)) else [value])]
    files = [Path(path) for path in paths if isinstance(path, (str, Path)) and os.path.isfile(path)]
    for name in _OUTPUTS:
        output = given.get(name)
        if isinstance(output, Path) and output.exists() and any(map(output.samefile, files)):
            parser.error(
                f"argument --{name}: this command reads {output.name}, and would overwrite it: give another name"
            )


def steps(text: str) -> tuple[int, int]:
    """Return the first step of a range such as `1:3`, and the first step after the range. `1` means `1:2`."""
    if text.isdecimal():
        return int(text), int(text) + 1
    first, _, last = text.partition(":")
    if not first.isdecimal() or not last.isdecimal() or int(last) <= int(first):
        problem = f"{text!r} is not a range of steps"
        raise argparse.ArgumentTypeError(f"{problem}: write 1:3 for steps 1 and 2, or 1 for step 1 alone")
    return int(first), int(last)
