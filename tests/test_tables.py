"""The cells of a table stand below each other, and no line ends in spaces. Tables and sentences fit a width.

Guards: tables.
"""

import pytest

from amp_patch.tables import Table, align, format_table, shorten, wrap_sentences


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


NAME = "backbone.layers.11.self_attention.query_key_value"
ROWS = [(NAME, "gelu", "0", "-", "train.py:9"), ("head", "linear", "0", "-", "train.py:99")]


@pytest.mark.parametrize("width", [30, 44, 60, 100])
def test_a_table_fits_a_width_by_what_it_leaves_out_and_shortens(width: int) -> None:
    table = Table(("module", "op", "casts", "none", "site"), ROWS, 2, {"module": 12})
    table.drop_empty(("casts",))
    left_out = table.leave_out(("site", "op"), width)
    table.shorten(width)
    lines = table.lines()
    assert max(map(len, lines)) <= width and "casts" not in lines[0] and "none" not in lines[0]
    assert left_out == ([] if width > 30 else ["site"]) and (NAME in lines[2]) == (width > 60)
    assert lines[2].split()[0].endswith("value") and len(lines) == 4


def test_zeros_are_no_reason_to_leave_out_other_columns() -> None:
    table = Table(("run", "loss"), [("O0", "0"), ("O1", "0")], 1, {})
    table.drop_empty()
    assert table.has("loss") and table.lines()[2] == "O0      0"


def test_a_short_text_keeps_its_end() -> None:
    assert len(shorten(NAME, 20)) == 20 and shorten(NAME, 20).endswith("key_value") and shorten("head", 20) == "head"


WORDS = "word " * 30


@pytest.mark.parametrize(
    ("line", "margin"),
    [("O4: " + WORDS, "  "), ("  cause  " + WORDS, " " * 9), ("  rule               " + WORDS, " " * 21)],
    ids=["a sentence", "behind a label", "behind a wide label"],
)
def test_sentences_are_wrapped(line: str, margin: str) -> None:
    lines = wrap_sentences(f"{line}\nend").split("\n")
    assert max(map(len, lines)) <= 100 and lines[-1] == "end" and len(lines) == 3
    assert lines[1].startswith(f"{margin}word") and " ".join(f"{lines[0]} {lines[1]}".split()) == " ".join(line.split())


@pytest.mark.parametrize("indent", [9, 11])
def test_sentences_below_a_label_are_wrapped_and_aligned(indent: int) -> None:
    lines = wrap_sentences(f"  cause  first\n{' ' * indent}{WORDS}\n{' ' * 9}modules: [{'a, ' * 50}]").split("\n")
    assert max(map(len, lines[:-1])) <= 100 and len(lines) == 4
    assert all(line.startswith(" " * indent + "word") for line in lines[1:3])


@pytest.mark.parametrize(
    "line",
    ["    code(" + "argument, " * 20 + ")", "a  b" * 40, "modules: [" + "{match: a, run: low}, " * 9 + "]", "-" * 200],
    ids=["code", "cells", "a list", "one word"],
)
def test_what_is_no_sentence_stays_in_one_line(line: str) -> None:
    assert wrap_sentences(line) == line
