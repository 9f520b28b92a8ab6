"""The name that scripts import from Apex's `apex.amp.compat`, most of them by an editor's suggestion."""

from typing import Any


def filter_attrs(module: Any, attrs: list[str]) -> list[str]:
    """Return those names that `module` has."""
    return [name for name in attrs if hasattr(module, name)]
