"""Tables of text."""

from collections.abc import Iterable, Sequence


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


def count_of(number: int, noun: str) -> str:
    """Return "1 step", or "2 steps"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
