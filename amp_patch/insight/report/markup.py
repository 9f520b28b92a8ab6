"""HTML elements as strings. Text that is not `Markup` is escaped."""

import html
import re
from collections.abc import Iterable

VOID = ("meta", "link", "input", "br", "wbr")
VOID_DRAWN = ("rect", "line", "path", "polyline", "polygon")
"""Elements without children, of HTML and of SVG."""

_HYPHENATED = re.compile(r"(\S*-\S*)")


class Markup(str):
    """Text that is HTML already, so it is not escaped."""

    __slots__ = ()


def element(name: str, /, *children: str, **attributes: object) -> Markup:
    """Return an element.

    Attributes that are None or False are left out, and True stands for an attribute without a value. `class_` becomes
    `class`, and `data_v` becomes `data-v`.
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
    """Return children in a row."""
    text = ""
    for child in children:
        if not isinstance(child, Markup):
            child = html.escape(child)
        text += child
    return Markup(text)


def keep_words(text: str) -> Markup:
    """Return text whose words break at no hyphen, such as options of a command and arrows.

    A hyphen that does not break (U+2011) would spoil a command that is copied.
    """
    parts: list[str] = _HYPHENATED.split(text)
    parts[1::2] = [element("span", word, class_="word") for word in parts[1::2]]
    return join(parts)


def break_name(name: str) -> Markup:
    """Return the name of a module, which may break after each dot."""
    parts: list[str] = []
    for part in name.split("."):
        parts += [".", element("wbr"), part] if parts else [part]
    return join(parts)
