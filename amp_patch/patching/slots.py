"""Slots: what may refer to a function, each of which can be read and written without running anybody's code."""

import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

ABSENT = object()

namespace_of: Callable[[Any], dict[str, Any]] = vars(types.ModuleType)["__dict__"].__get__
attributes_of: Callable[[type], Mapping[str, Any]] = vars(type)["__dict__"].__get__


def contents_of(cell: types.CellType) -> Any:
    """Return the value of a closure's variable, or ABSENT."""
    try:
        return cell.cell_contents
    except ValueError:  # it has not been assigned yet, or was deleted
        return ABSENT


class Item:
    """An item of a dict or a list. A module's namespace is a dict whose items are the module's attributes."""

    __slots__ = ("_module", "container", "key")

    def __init__(self, container: dict[Any, Any] | list[Any], key: Any, module: types.ModuleType | None = None) -> None:
        self.container = container
        self.key = key
        self._module = module

    def owner(self) -> Any:
        return self._module

    def read(self) -> Any:
        if isinstance(self.container, dict):
            return dict.get(self.container, self.key, ABSENT)
        return list.__getitem__(self.container, self.key) if self.key < list.__len__(self.container) else ABSENT

    def write(self, value: Any) -> None:
        if isinstance(self.container, dict):
            dict.__setitem__(self.container, self.key, value)
        else:
            list.__setitem__(self.container, self.key, value)


class Key:
    """A key of a dict, which stays where it is in the order."""

    __slots__ = ("_now", "_table")
    key = "a key"

    def __init__(self, table: dict[Any, Any], key: Any) -> None:
        self._table = table
        self._now = key

    def owner(self) -> Any:
        return None

    def read(self) -> Any:
        return self._now if dict.__contains__(self._table, self._now) else ABSENT

    def write(self, value: Any) -> None:
        items = [(value if key is self._now else key, item) for key, item in dict.items(self._table)]
        self._now = value
        dict.update(self._table, items)  # before anything goes: other threads may look something up
        try:
            dict.clear(self._table)
        finally:  # also if an interrupt comes
            dict.update(self._table, items)


class ClassAttribute:
    """An attribute that a class itself holds. The class is not kept alive."""

    __slots__ = ("_class", "key")

    def __init__(self, owner: type, key: str) -> None:
        self._class = weakref.ref(owner)
        self.key = key

    def owner(self) -> Any:
        return self._class()

    def read(self) -> Any:
        owner = self._class()
        return ABSENT if owner is None else attributes_of(owner).get(self.key, ABSENT)

    def write(self, value: Any) -> None:
        owner = self._class()
        if owner is not None:
            type.__setattr__(owner, self.key, value)


class InstanceAttribute:
    """An attribute in the `__dict__` of a module of a model. The model is not kept alive."""

    __slots__ = ("_module", "key")

    def __init__(self, owner: nn.Module, key: str) -> None:
        self._module = weakref.ref(owner)
        self.key = key

    def owner(self) -> Any:
        return self._module()

    def read(self) -> Any:
        owner = self._module()
        return ABSENT if owner is None else vars(owner).get(self.key, ABSENT)

    def write(self, value: Any) -> None:
        owner = self._module()
        if owner is not None:
            vars(owner)[self.key] = value


class Defaults:
    """The positional defaults of a function, one tuple. The function is not kept alive."""

    __slots__ = ("_function",)
    key = "__defaults__"

    def __init__(self, function: types.FunctionType) -> None:
        self._function = weakref.ref(function)

    def owner(self) -> Any:
        return None  # an attribute, but none that is a function

    def read(self) -> Any:
        function = self._function()
        return ABSENT if function is None else function.__defaults__

    def write(self, value: Any) -> None:
        function = self._function()
        if function is not None:
            function.__defaults__ = value


class Cell:
    """A variable that functions share with the function they were defined in."""

    __slots__ = ("_cell",)
    key = "cell_contents"

    def __init__(self, cell: types.CellType) -> None:
        self._cell = cell

    def owner(self) -> Any:
        return None

    def read(self) -> Any:
        return contents_of(self._cell)

    def write(self, value: Any) -> None:
        self._cell.cell_contents = value
