"""HTML as text that cannot be mistaken: what is not markup already is escaped."""

import html

VOID = ("meta", "link", "input", "br", "rect", "line", "path", "polyline", "polygon")


class Markup(str):
    """Text that is HTML, and is not escaped."""

    __slots__ = ()


def element(name: str, /, *children: str, **attributes: object) -> Markup:
    """Return an element. Of the attributes, None and False are left out and True has no value; `class_` is `class`, and
    `data_v` is `data-v`.
    """
    written = "".join(
        f" {_name(key)}" + ("" if value is True else f'="{html.escape(_text(value))}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if name in VOID and not children:
        return Markup(f"<{name}{written}>" if name[0] in "milb" and name != "line" else f"<{name}{written}/>")
    return Markup(f"<{name}{written}>{join(children)}</{name}>")


def join(children: "list[str] | tuple[str, ...]") -> Markup:
    """Return children one after another."""
    return Markup("".join(child if isinstance(child, Markup) else html.escape(child) for child in children))


def _name(key: str) -> str:
    return key.rstrip("_").replace("_", "-")


def _text(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
