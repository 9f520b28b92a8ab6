"""`forwarded`: makes properties of a wrapper that read and set attributes of the object inside it."""

from typing import Any


def forwarded(holder: str, name: str) -> Any:
    """Return a property that reads and sets `self.<holder>.<name>`."""

    def get(self: Any) -> Any:
        return getattr(getattr(self, holder), name)

    def set_(self: Any, value: Any) -> None:
        setattr(getattr(self, holder), name, value)

    return property(get, set_)
