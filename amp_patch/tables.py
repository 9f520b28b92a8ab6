"""Formats tables and counts, and fits tables and sentences into a width. Sort keys and patterns for names such as
`block.10`.
"""

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence

WIDTH = 100
"""The width, in characters, into which commands fit their output where they can."""

_GAP = 2  # the number of spaces between the columns of a table
_EMPTY = ("", "-")  # cells without a text


def align(rows: Iterable[Sequence[str]], left: int | None = None, gap: int = _GAP) -> list[str]:
    """Return rows as lines with aligned columns. All rows must have the same number of cells.

    Args:
        left: the number of columns, from the first, that are aligned to the left. All further columns are aligned to
            the right. None: all columns are aligned to the left.
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


class Table:
    """A table that can be made narrower.

    Args:
        heading, rows: the cells.
        left: the number of columns that are aligned to the left.
        least: the least width of each column whose texts may be shortened, by its heading.
    """

    def __init__(
        self, heading: Sequence[str], rows: Iterable[Sequence[str]], left: int, least: Mapping[str, int]
    ) -> None:
        self._columns: dict[str, tuple[str, ...]] = dict.fromkeys(heading, ())
        self._columns.update(zip(heading, zip(*rows, strict=True), strict=False))
        self._left = set(heading[:left])
        self._least = least

    def has(self, name: str) -> bool:
        """Return whether the table has a column with this heading."""
        return name in self._columns

    def drop_empty(self, counts: Sequence[str] = ()) -> None:
        """Leave out columns without a text. Leave out columns with only zeros, too, if their heading is in `counts`."""
        for name, cells in [*self._columns.items()]:
            shown = [cell for cell in cells if cell not in _EMPTY]
            is_zero = name in counts and not any(cell.strip("0.%") for cell in shown)
            if not shown or is_zero:
                del self._columns[name]

    def leave_out(self, names: Sequence[str], width: int) -> list[str]:
        """Leave out columns, in the order of `names`, until the table can be shortened to `width`, or no name is left.
        Return the headings of the columns that were left out.
        """
        out: list[str] = []
        for name in names:
            if self.least_width() <= width:
                break
            if name in self._columns:
                del self._columns[name]
                out.append(name)
        return out

    def _widths(self) -> dict[str, int]:
        return {name: max(map(len, (name, *cells))) for name, cells in self._columns.items()}

    def least_width(self) -> int:
        """Return the width of the table once its texts are as short as they may become."""
        widths = {name: min(width, self._least.get(name, width)) for name, width in self._widths().items()}
        return sum(widths.values()) + _GAP * (len(widths) - 1)

    def shorten(self, width: int) -> None:
        """Shorten the longest texts until the table is `width` characters wide, or no text may become shorter."""
        widths = self._widths()
        surplus = sum(widths.values()) + _GAP * (len(widths) - 1) - width
        limits = {name: widths[name] for name in self._least if name in widths}
        while surplus > 0 and any(limits[name] > self._least[name] for name in limits):
            longest = max((name for name in limits if limits[name] > self._least[name]), key=lambda name: limits[name])
            limits[longest] -= 1
            surplus -= 1
        for name, limit in limits.items():
            self._columns[name] = tuple(shorten(cell, limit) for cell in self._columns[name])

    def rows(self) -> list[tuple[str, ...]]:
        """Return the cells of each row."""
        return list(zip(*self._columns.values(), strict=True))

    def lines(self) -> list[str]:
        """Return the heading, a line of dashes, and a line for each row."""
        left = sum(name in self._left for name in self._columns)
        return format_table([*self._columns], self.rows(), left).split("\n")


def shorten(text: str, width: int) -> str:
    """Return `text`, shortened to `width` characters (3 or more) if it is longer: its beginning, "...", and about twice
    as much of its end, where names often differ.
    """
    if len(text) <= width:
        return text
    kept = width - 3
    head = kept // 3
    return f"{text[:head]}...{text[len(text) - kept + head :]}"


_LABELLED = re.compile(r"( *(?:\S+(?: \S+)*:? {2,})?)(.*)")
_STEP = 2  # a line below a label may be indented by this much more than the text behind the label
_QUOTED = re.compile("`[^`]*`")
_IS_DATA = re.compile(r"\S {2,}\S|: [{\[]|^Traceback")


def wrap_sentences(text: str, width: int = WIDTH) -> str:
    """Return a text with its sentences wrapped to `width` characters. Tables, data, code and long words stay whole.

    A sentence stands at the beginning of a line, or after a short label and two spaces. If it becomes several lines,
    the second and later ones are indented by two spaces, or aligned with the sentence after the label. A line below
    that is aligned with this sentence already, or begins up to `_STEP` to the right of it, is wrapped in the same way.
    """
    wrapped: list[str] = []
    column = 0  # where the text behind the last label begins; 0 without a label above
    for line in text.split("\n"):
        indent = len(line) - len(line.lstrip())
        is_below = 0 < column <= indent <= column + _STEP
        wrapped += _wrap_line(line, width, is_below=is_below)
        if not is_below:
            label = _label_of(line)[0]
            column = 0 if label.isspace() or _IS_DATA.search(line[len(label) :]) else len(label)
    return "\n".join(wrapped)


def _label_of(line: str) -> tuple[str, str]:
    """Return the label of a line, with the spaces around it, and the text behind the label."""
    match = _LABELLED.fullmatch(line)
    assert match is not None  # the pattern fits every line
    return match[1], match[2]


def _wrap_line(line: str, width: int, *, is_below: bool = False) -> Iterator[str]:
    """Yield the lines to which a line is wrapped. `is_below`: it is aligned with the text behind a label above it."""
    label, sentence = _label_of(line)
    is_code = label.isspace() and not is_below  # such as in a traceback
    if len(line) <= width or len(label) > width // 4 or is_code or _IS_DATA.search(_QUOTED.sub("`", sentence)):
        yield line
        return
    margin = " " * len(label) or "  "
    yield from textwrap.wrap(line, width, subsequent_indent=margin, break_long_words=False, break_on_hyphens=False)


def wrap_item(text: str) -> list[str]:
    """Return a text wrapped to `WIDTH` characters, indented by two spaces, and by four from the second line on."""
    return textwrap.wrap(
        text, WIDTH, initial_indent="  ", subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )


def count_of(number: int, noun: str) -> str:
    """Return a number with a noun, such as "1 step" or "2 steps"."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}s"


def natural_order(text: str) -> list[tuple[int, str]]:
    """Return a sort key for names that compares their numbers as numbers: block.9 comes before block.10."""
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
