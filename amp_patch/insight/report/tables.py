"""HTML tables, which the page's JavaScript (`report.js`) sorts and filters."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .markup import Markup, break_names, element, join

_LONG = 24
"""The most characters of a text that stays on one line. A longer text may break into several lines."""


class Cell(NamedTuple):
    """A cell.

    Attributes:
        text: its text.
        value: the number that rows are sorted by; None to sort them by the text.
        heat: how strongly the cell is marked, from 0 to 1; None for no mark.
    """

    text: str
    value: float | None = None
    heat: float | None = None


def make_table(
    name: str,
    heading: Sequence[str],
    rows: Iterable[Sequence[Cell]],
    *,
    label: str,
    left: int = 1,
    filter_by: str = "",
) -> Markup:
    """Return a table in a box that scrolls, with a button in each heading. The first `left` columns are left-aligned.

    `filter_by` is the label of a field above the box that filters the rows. Without a label, there is no such field.
    """
    body: list[Markup] = []
    for row in rows:
        cells: list[Markup] = []
        for column, cell in enumerate(row):
            cells.append(_draw_cell(cell, is_first=column == 0, is_left=column < left))
        body.append(element("tr", *cells))
    head: list[Markup] = []
    for column, text in enumerate(heading):
        style = None
        if column < left:
            style = "l"
        button = element("button", text, type="button")
        head.append(element("th", button, scope="col", class_=style, aria_sort="none"))
    table = element("table", element("thead", element("tr", *head)), element("tbody", *body), id=name)
    box = element("div", table, class_="box", role="region", aria_label=label, tabindex="0")
    if not filter_by:
        return box
    return join([_make_filter(name, filter_by, len(body)), box])


def _draw_cell(cell: Cell, *, is_first: bool, is_left: bool) -> Markup:
    attributes: dict[str, object] = {"data_v": _sortable(cell.value)}
    styles: list[str] = []
    if cell.heat is not None:
        styles.append("hot")
        attributes["style"] = f"--e:{cell.heat:.2f}"
    if is_left:
        styles.append("l")
    text = cell.text
    if len(text) > _LONG:
        text = break_names(text)
        styles.append("long")
    attributes["class_"] = " ".join(styles) or None
    if is_first:
        return element("th", text, **attributes, scope="row")
    return element("td", text, **attributes)


def _make_filter(name: str, label: str, rows: int) -> Markup:
    field = element(
        "input", type="search", id=f"{name}-filter", data_table=name, autocomplete="off", spellcheck="false"
    )
    count = element("output", f"{rows} of {rows} rows", for_=f"{name}-filter", aria_live="polite")
    return element("p", element("label", label, for_=f"{name}-filter"), " ", field, " ", count, class_="filter")


def _sortable(value: float | None) -> str | None:
    """Return a number as text that JavaScript's `Number` reads; None without a number."""
    if value is None:
        return None
    return repr(value).replace("inf", "Infinity").replace("nan", "NaN")
