"""Tables of text."""

import sys
from collections.abc import Iterable, Sequence

from .terminal import BOLD, paint


def align(rows: Iterable[Sequence[str]], left: int | None = None, gap: int = 2) -> list[str]:
    """Return rows of equally many cells as lines whose cells stand below each other, `gap` spaces apart.

    The first `left` columns are set to the left, by default all, and the others to the right.
    """
    cells = list(rows)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        padded = [
            cell.ljust(width) if left is None or column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append((" " * gap).join(padded).rstrip())
    return lines


def format_table(heading: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """Return rows as one text, aligned, below their heading and a line of dashes."""
    cells = [heading, *rows]
    dashes = ["-" * max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(align([heading, dashes, *cells[1:]], left))


class RowPrinter:
    """Prints a table row by row, each at once: `format_table` for rows that are minutes apart.

    A column is as wide as its heading, or as `widths` says; the first `left` columns are set to the left.
    """

    def __init__(self, heading: Sequence[str], widths: Sequence[int] = (), left: int = 1) -> None:
        wider = [*widths, *[0] * (len(heading) - len(widths))]
        self._widths = [max(len(name), width) for name, width in zip(heading, wider, strict=True)]
        self._heading = heading
        self._left = left
        self.rows = 0

    def print_row(self, cells: Sequence[str]) -> None:
        """Print a row, the first below the heading and a line of dashes."""
        dashes = ["-" * width for width in self._widths]
        heading, _, row = align([self._heading, dashes, cells], self._left)
        if not self.rows:
            print(f"{paint(heading, BOLD, sys.stdout)}\n{'  '.join(dashes)}")
        print(row, flush=True)
        self.rows += 1


def count_of(number: int, noun: str) -> str:
    """Return "1 step", or "2 steps"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
