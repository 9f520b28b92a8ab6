"""The cells of a table stand below each other, and no line ends in spaces.

Guards: tables.
"""

from amp_patch.tables import align, format_table


def test_cells_stand_below_each_other() -> None:
    rows = [("a", "long cell", ""), ("bcd", "x", "y"), ("", "", "")]
    assert align(rows) == ["a    long cell", "bcd  x          y", ""]
    assert align(rows, gap=3) == ["a     long cell", "bcd   x           y", ""]
    assert align(rows, left=1) == ["a    long cell", "bcd          x  y", ""]


def test_no_rows_give_no_lines() -> None:
    assert align([]) == []


def test_a_heading_is_underlined() -> None:
    assert format_table(("op", "size"), [("matmul", "3"), ("mm", "12345")]) == "\n".join(
        ["op       size", "------  -----", "matmul      3", "mm      12345"]
    )
    assert format_table(("op", "size"), []) == "op  size\n--  ----"
