"""`filter_attrs`, the only name that scripts import from Apex's `apex.amp.compat`."""

from typing import Any


def filter_attrs(module: Any, attrs: list[str]) -> list[str]:
    """Return the names in `attrs` that `module` has."""
    return [name for name in attrs if hasattr(module, name)]
