"""What a terminal is shown: colour where it wants some, and none in a file, a pipe or a notebook.

NO_COLOR and FORCE_COLOR, set to anything, decide (https://no-color.org, https://force-color.org), the former first.
"""

import os
import re
import sys
from typing import TextIO

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


def print_report(text: str) -> None:
    """Print text to stdout, at once; a line above a line of dashes, the head of a table, is bold."""
    lines = text.split("\n")
    for number, below in enumerate(lines[1:]):
        if re.fullmatch(r"-{3,}(  +-+)*", below):
            lines[number] = paint(lines[number], BOLD, sys.stdout)
    print("\n".join(lines), flush=True)


def print_error(prog: str, kind: str, text: str) -> None:
    """Print `prog: kind: text` to stderr."""
    print(f"{prog}: {paint(f'{kind}:', RED, sys.stderr)} {text}", file=sys.stderr)
