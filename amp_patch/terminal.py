"""What a terminal is shown: colour where it wants some, and none in a file, a pipe or a notebook.

NO_COLOR and FORCE_COLOR, set to anything, decide (https://no-color.org, https://force-color.org), the former first.
"""

import os
import re
import sys
from typing import TextIO

_STYLE = re.compile(r"\x1b\[[0-9;]*m")
# what a terminal obeys or cannot show: control characters but for tabs and new lines, turns of the direction of text,
# and halves of characters
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")

BOLD, RED = "1", "1;31"


def wants_colour(stream: TextIO) -> bool:
    """Tell whether what reads a stream shows colour."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    if os.environ.get("TERM") == "dumb" or (os.name == "nt" and "WT_SESSION" not in os.environ):
        return False
    return stream.isatty()


def paint(text: str, style: str, stream: TextIO) -> str:
    """Return text for a stream, in a style if that shows colour."""
    return f"\x1b[{style}m{text}\x1b[0m" if wants_colour(stream) else text


def make_printable(text: str) -> str:
    """Return text without colours, in which other control characters are written as Python does in a string: a terminal
    shows it, and obeys nothing in it.
    """
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], _STYLE.sub("", text))


def print_report(text: str) -> None:
    """Print text to stdout, at once; a line above a line of dashes, the head of a table, is bold."""
    lines = make_printable(text).split("\n")
    for number, below in enumerate(lines[1:]):
        if re.fullmatch(r"-{3,}(  +-+)*", below):
            lines[number] = paint(lines[number], BOLD, sys.stdout)
    print("\n".join(lines), flush=True)


def print_error(prog: str, kind: str, text: str) -> None:
    """Print `prog: kind: text` to stderr."""
    print(f"{prog}: {paint(f'{kind}:', RED, sys.stderr)} {make_printable(text)}", file=sys.stderr)
