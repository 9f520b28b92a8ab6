"""Prints reports and errors: in colour on a terminal that supports it, and without colour to a file, a pipe or a
notebook.

The environment variables NO_COLOR and FORCE_COLOR override this if they are not empty; NO_COLOR wins
(https://no-color.org, https://force-color.org).
"""

import os
import re
import sys
from collections.abc import Sequence
from typing import TextIO

from .tables import wrap_sentences

_STYLE = re.compile(r"\x1b\[[0-9;]*m")
# Characters that a terminal executes or cannot show: control characters except tabs and new lines, characters that
# change the direction of text, and lone surrogates.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")

BOLD, RED, GREEN = "1", "1;31", "1;32"  # as in the escape sequence `\x1b[1m`


def wants_colour(stream: TextIO) -> bool:
    """Return whether text that is written to a stream should be in colour."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    if os.environ.get("TERM") == "dumb" or (os.name == "nt" and "WT_SESSION" not in os.environ):
        return False
    return stream.isatty()


def paint(text: str, style: str, stream: TextIO) -> str:
    """Return text in a style, such as BOLD, or as it is if `stream` should get no colour."""
    return f"\x1b[{style}m{text}\x1b[0m" if wants_colour(stream) else text


def make_printable(text: str) -> str:
    """Return text that is safe to print: without colours, and with control characters escaped as in a Python string."""
    return _CONTROL.sub(lambda match: repr(match[0])[1:-1], _STYLE.sub("", text))


def print_report(text: str, judged: Sequence[bool | None] = ()) -> None:
    """Print text to stdout, with sentences wrapped, and flush it.

    The first lines of the text may be verdicts. In colour, the beginning of a verdict is green if it is good, red if it
    is bad, or else bold; and the heading of a table (the line above dashes) is bold.

    Args:
        judged: for each verdict, whether it is good; None for neither good nor bad.
    """
    lines = make_printable(text).split("\n")
    shown = [_paint_verdict(line, is_good) for line, is_good in zip(lines, judged, strict=False)]
    below = lines[len(shown) :]
    rest = wrap_sentences("\n".join(below)).split("\n") if below else []
    for number, following in enumerate(rest[1:]):
        if re.fullmatch(r" *-{3,}(  +-+)*", following):
            rest[number] = paint(rest[number], BOLD, sys.stdout)
    print("\n".join([*shown, *rest]), flush=True)


def print_verdict(line: str, is_good: bool | None = None) -> None:
    """Print one verdict to stdout, as `print_report` does, and flush it."""
    print(_paint_verdict(make_printable(line), is_good), flush=True)


def _paint_verdict(line: str, is_good: bool | None) -> str:
    """Return a verdict, wrapped, with its beginning (the first line, up to a bracket or a semicolon) in colour."""
    style = {True: GREEN, False: RED, None: BOLD}[is_good]
    wrapped = wrap_sentences(line)
    end = min(index for index in (*map(wrapped.find, (" (", ";", "\n")), len(wrapped)) if index >= 0)
    return paint(wrapped[:end], style, sys.stdout) + wrapped[end:]


def print_error(prog: str, kind: str, text: str) -> None:
    """Print `prog: kind: text` to stderr."""
    print(f"{prog}: {paint(f'{kind}:', RED, sys.stderr)} {make_printable(text)}", file=sys.stderr)
