"""`forward`: attributes of a wrapper that belong to an object in it."""

from typing import Any


def forward(holder: str, name: str) -> Any:
    """Return a property: the attribute `name` of the object that is the attribute `holder`. It can be set."""

    def get(self: Any) -> Any:
        return getattr(getattr(self, holder), name)

    def set_(self: Any, value: Any) -> None:
        setattr(getattr(self, holder), name, value)

    return property(get, set_)
