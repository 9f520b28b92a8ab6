"""Slots: the positions in which a program holds functions, such as a global, a key of a dict or an attribute.

Slots other than `Attribute` are read and written with the accessors of the builtin types, such as `dict.__setitem__`.
So no property, descriptor, `__getattr__` or metaclass of the program runs.
"""

import functools
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

ABSENT = object()
"""The value of an empty slot."""

# `vars(module)` and `vars(class)`, without running code of a subclass of ModuleType or of a metaclass
namespace_of: Callable[[Any], dict[str, Any]] = vars(types.ModuleType)["__dict__"].__get__
attributes_of: Callable[[type], Mapping[str, Any]] = vars(type)["__dict__"].__get__


class Slot:
    """A position that holds a function, or a container with functions, such as the tuple `__defaults__`.

    Attributes:
        key: the name, key, index or member that identifies the position.
    """

    __slots__ = ("key",)

    def __init__(self, key: Any) -> None:
        self.key = key

    def owner(self) -> Any:
        """Return the module, class or layer (`nn.Module`) that has the slot as an attribute.

        None for every other slot (entries of other containers, default arguments, partials), and if the owner was
        freed.
        """
        return None

    def read(self) -> Any:
        """Return the value, or ABSENT if the slot is empty."""
        raise NotImplementedError

    def write(self, value: Any) -> None:
        """Replace the value."""
        raise NotImplementedError


class Attribute(Slot):
    """An attribute that a patch replaces. Writing ABSENT deletes it."""

    __slots__ = ("_owner",)

    def __init__(self, owner: Any, name: str) -> None:
        super().__init__(name)
        self._owner = owner

    def owner(self) -> Any:
        return self._owner

    def read(self) -> Any:
        return vars(self._owner).get(self.key, ABSENT)

    def write(self, value: Any) -> None:
        if value is ABSENT:
            delattr(self._owner, self.key)
        else:
            setattr(self._owner, self.key, value)


class Entry(Slot):
    """An entry of a container: a value of a dict or a list, a key of a dict, or a member of a set.

    Args:
        key: the key of the dict, the index in the list, or the member of the set.
        is_key: the key of the dict is the function. A write replaces the key, and keeps its place in the dict's order.
        module: the module whose namespace the dict is; None for any other dict.
    """

    __slots__ = ("_container", "_is_key", "_module")

    def __init__(
        self,
        container: dict[Any, Any] | list[Any] | set[Any],
        key: Any,
        *,
        is_key: bool = False,
        module: types.ModuleType | None = None,
    ) -> None:
        super().__init__(key)
        self._container: Any = container
        self._is_key = is_key
        self._module = module

    def owner(self) -> Any:
        return self._module

    def read(self) -> Any:
        # The program may have shortened the list, or removed the member or the key, since the slot was made. Then the
        # slot is empty, and an undo writes nothing to it.
        if type(self._container) is list:
            return self._container[self.key] if self.key < list.__len__(self._container) else ABSENT
        if type(self._container) is set:
            return self.key if set.__contains__(self._container, self.key) else ABSENT
        if self._is_key:
            return self.key if dict.__contains__(self._container, self.key) else ABSENT
        return dict.get(self._container, self.key, ABSENT)

    def write(self, value: Any) -> None:
        if type(self._container) is list:
            list.__setitem__(self._container, self.key, value)
        elif type(self._container) is set:
            before, self.key = self.key, value
            set.add(self._container, value)
            set.discard(self._container, before)
        elif self._is_key:
            self._write_key(value)
        else:
            dict.__setitem__(self._container, self.key, value)

    def _write_key(self, value: Any) -> None:
        """Replace the key, and keep the order of the dict."""
        if issubclass(type(self._container), OrderedDict):
            self._write_ordered_key(value)
            return
        items = [(value if key is self.key else key, item) for key, item in dict.items(self._container)]
        self.key = value
        dict.update(self._container, items)  # add the new key first: another thread may look it up already
        # A new key goes to the end of a dict, so the dict is emptied and filled again to keep its order.
        try:
            dict.clear(self._container)
        finally:  # fill it even if an interrupt comes
            dict.update(self._container, items)

    def _write_ordered_key(self, value: Any) -> None:
        """Replace the key of an OrderedDict, which keeps its order in a list that the accessors of dict do not know."""
        container, before = self._container, self.key
        keys = list(OrderedDict.keys(container))
        later_keys = keys[[key is before for key in keys].index(True) + 1 :]
        OrderedDict.__setitem__(container, value, dict.__getitem__(container, before))
        self.key = value
        OrderedDict.__delitem__(container, before)
        for key in later_keys:
            OrderedDict.move_to_end(container, key)


class _Access(NamedTuple):
    """How the attributes of one kind of object are read and written."""

    read: Callable[[Any, str], Any]
    write: Callable[[Any, str, Any], None]
    is_public: bool = True
    """Whether users look such attributes up, as `layer.act`. False for `__defaults__` and `func`."""


def _set_layer_attribute(layer: Any, name: str, value: Any) -> None:
    vars(layer)[name] = value


def _set_partial_function(partial: Any, name: str, value: Any) -> None:
    # `func` of a partial is read-only, so set it as unpickling does
    state = (value, partial.args, partial.keywords, vars(partial) or None)
    functools.partial.__setstate__(partial, state)  # type: ignore[attr-defined]


# type.__setattr__ and not setattr, because a metaclass may override `__setattr__`
_OF_CLASS = _Access(lambda owner, name: attributes_of(owner).get(name, ABSENT), type.__setattr__)
# the `__dict__` and not setattr, because nn.Module overrides `__setattr__`
_OF_LAYER = _Access(lambda layer, name: vars(layer).get(name, ABSENT), _set_layer_attribute)
_OF_FUNCTION = _Access(getattr, setattr, is_public=False)
_OF_PARTIAL = _Access(getattr, _set_partial_function, is_public=False)


class WeakAttribute(Slot):
    """An attribute of an object that the slot does not keep alive.

    Args:
        holder: a class, a layer (its `__dict__`), a function (`__defaults__`), or a partial (`func`).
    """

    __slots__ = ("_access", "_holder")

    def __init__(self, holder: Any, name: str) -> None:
        super().__init__(name)
        self._holder = weakref.ref(holder)
        self._access = _OF_LAYER
        if issubclass(type(holder), type):
            self._access = _OF_CLASS
        elif type(holder) is types.FunctionType:
            self._access = _OF_FUNCTION
        elif type(holder) is functools.partial:
            self._access = _OF_PARTIAL

    def owner(self) -> Any:
        return self._holder() if self._access.is_public else None

    def read(self) -> Any:
        holder = self._holder()
        return ABSENT if holder is None else self._access.read(holder, self.key)

    def write(self, value: Any) -> None:
        holder = self._holder()
        if holder is not None:
            self._access.write(holder, self.key, value)
