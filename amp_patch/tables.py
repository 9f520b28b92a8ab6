"""Formats tables of text, and texts with counts and numbers."""

import re
from collections.abc import Iterable, Sequence


def align(rows: Iterable[Sequence[str]], left: int | None = None, gap: int = 2) -> list[str]:
    """Return rows, which have the same number of cells, as lines with aligned columns.

    Args:
        left: the number of columns that are aligned to the left; the others are aligned to the right. None: all are
            aligned to the left.
        gap: the number of spaces between columns.
    """
    cells = list(rows)
    widths = _find_widths(cells)
    lines = []
    for row in cells:
        padded = []
        for column, (cell, width) in enumerate(zip(row, widths, strict=True)):
            if left is None or column < left:
                padded.append(cell.ljust(width))
            else:
                padded.append(cell.rjust(width))
        lines.append((" " * gap).join(padded).rstrip())
    return lines


def _find_widths(cells: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*cells, strict=True)]


def format_table(heading: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """Return a heading, a line of dashes and rows as one text with aligned columns."""
    cells = [heading, *rows]
    dashes = ["-" * width for width in _find_widths(cells)]
    return "\n".join(align([heading, dashes, *cells[1:]], left))


def count_of(number: int, noun: str) -> str:
    """Return a number with a noun, such as "1 step" or "2 steps"."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}s"


def natural_order(text: str) -> list[tuple[int, str]]:
    """Return a sort key for a name that compares numbers in it as numbers: block.9 comes before block.10."""
    key = []
    for part in re.findall(r"\d+|[^\d.]+", text):
        if part.isdecimal():
            key.append((int(part), ""))
        else:
            key.append((-1, part))
    return key


def star_numbers(texts: Iterable[str]) -> str:
    """Return one text for texts that differ only in numbers, with `*` for each number in which they differ.

    For `block.0.norm` and `block.1.norm`, this is `block.*.norm`.
    """
    parts = zip(*(re.split(r"(\d+)", text) for text in texts), strict=True)
    return "".join(each[0] if len(set(each)) == 1 else "*" for each in parts)
