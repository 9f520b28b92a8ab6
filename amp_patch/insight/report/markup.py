"""Functions that make HTML and SVG elements as strings. Text that is not `Markup` is escaped."""

import html
import re
from collections.abc import Iterable

VOID = ("meta", "link", "input", "br", "wbr")
VOID_DRAWN = ("rect", "line", "path", "polyline", "polygon")
"""Elements that have no end tag if they have no children: VOID of HTML, VOID_DRAWN of SVG."""

_HYPHENATED = re.compile(r"(\S*-\S*)")
_JOINT = re.compile(r"(?<=\D\.)(?=\S)|(?<=\.)(?=[^\s\d])|(?<=[^\W_]_)(?=[^\W_])")
"""Matches after a dot that is not in a number, and after an underscore inside a name."""


class Markup(str):
    """Text that is HTML already, so it is not escaped."""

    __slots__ = ()


def element(name: str, /, *children: str, **attributes: object) -> Markup:
    """Return an element.

    Attributes that are None or False are left out, and True stands for an attribute without a value. A float is written
    with 6 significant digits. The name `class_` becomes `class`, and `data_v` becomes `data-v`.
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
    """Return the children as one text, one after another. Escapes children that are not `Markup`."""
    text = ""
    for child in children:
        if not isinstance(child, Markup):
            child = html.escape(child)
        text += child
    return Markup(text)


def keep_words(text: str) -> Markup:
    """Return text in which a browser breaks no line inside a word with a hyphen, such as `--json` or `2e-05`.

    A non-breaking hyphen, U+2011, would spoil commands that readers copy.
    """
    parts: list[str] = _HYPHENATED.split(text)
    parts[1::2] = [element("span", word, class_="word") for word in parts[1::2]]
    return join(parts)


def break_names(text: str) -> Markup:
    """Return text in which a browser may break lines after dots and underscores inside of names (see `_JOINT`).

    Words with a hyphen are kept whole, as by `keep_words`.
    """
    return Markup(element("wbr").join(map(keep_words, _JOINT.split(text))))
