"""Tables: cells stand below each other, and no line ends in spaces."""

from amp_patch.tables import RowPrinter, align, format_table


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


def test_rows_are_printed_one_by_one_below_their_heading(capsys) -> None:
    rows = [("matmul", "3"), ("mm", "12345")]
    table = RowPrinter(("op", "size"), (6,))
    assert capsys.readouterr().out == "" and table.rows == 0
    table.print_row(rows[0])
    assert capsys.readouterr().out == "op      size\n------  ----\nmatmul     3\n"
    table.print_row(rows[1])
    assert capsys.readouterr().out == "mm      12345\n" and table.rows == 2
