"""HTML as text that cannot be mistaken: what is not markup already is escaped."""

import html
from collections.abc import Iterable

VOID = ("meta", "link", "input", "br")
VOID_DRAWN = ("rect", "line", "path", "polyline", "polygon")
"""Elements without children, of HTML and of SVG."""


class Markup(str):
    """Text that is HTML, and is not escaped."""

    __slots__ = ()


def element(name: str, /, *children: str, **attributes: object) -> Markup:
    """Return an element. Of the attributes, None and False are left out and True has no value; `class_` is `class`, and
    `data_v` is `data-v`.
    """
    start = name
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        start += f" {key.rstrip('_').replace('_', '-')}"
        if isinstance(value, float):
            value = f"{value:.6g}"
        if value is not True:
            start += f'="{html.escape(str(value))}"'
    if children or name not in (*VOID, *VOID_DRAWN):
        return Markup(f"<{start}>{join(children)}</{name}>")
    if name in VOID_DRAWN:
        return Markup(f"<{start}/>")
    return Markup(f"<{start}>")


def join(children: Iterable[str]) -> Markup:
    """Return children one after another."""
    text = ""
    for child in children:
        if not isinstance(child, Markup):
            child = html.escape(child)
        text += child
    return Markup(text)
