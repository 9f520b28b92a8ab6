"""Slots: the positions in which programs hold functions.

Apart from `Attribute`, slots are read and written with C's own accessors: no property, no descriptor, no `__getattr__`
and no metaclass of the program runs.
"""

import functools
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

ABSENT = object()
"""The value of an empty slot."""

namespace_of: Callable[[Any], dict[str, Any]] = vars(types.ModuleType)["__dict__"].__get__
attributes_of: Callable[[type], Mapping[str, Any]] = vars(type)["__dict__"].__get__


class Slot:
    """A position that holds a function, or a container with functions.

    Attributes:
        key: the name, key, index or member that identifies the position.
    """

    __slots__ = ("key",)

    def __init__(self, key: Any) -> None:
        self.key = key

    def owner(self) -> Any:
        """Return the module, class or layer that has the slot as an attribute; None if there is none, or it is gone."""
        return None

    def read(self) -> Any:
        """Return the value, or ABSENT."""
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
    """An entry of a container: the value under a key of a dict or an index of a list, or the key itself.

    Args:
        key: of a set, the member.
        is_key: of a dict, the key is the function, and keeps its place in the order. Members of sets are always keys.
        module: the module whose namespace the dict is.
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
        if type(self._container) is list:  # it may have become shorter
            return self._container[self.key] if self.key < list.__len__(self._container) else ABSENT
        if type(self._container) is set:
            return self.key if set.__contains__(self._container, self.key) else ABSENT
        if self._is_key:  # deleted meanwhile by the program, it must not come back
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
        items = [(value if key is self.key else key, item) for key, item in dict.items(self._container)]
        self.key = value
        dict.update(self._container, items)  # before the keys go: other threads may look one up
        try:
            dict.clear(self._container)
        finally:  # even if an interrupt comes
            dict.update(self._container, items)


class _Access(NamedTuple):
    """How the attributes of one kind of object are read and written."""

    read: Callable[[Any, str], Any]
    write: Callable[[Any, str, Any], None]
    is_public: bool = True
    """False for attributes of functions and partials, which users do not look up."""


def _set_of_layer(layer: Any, name: str, value: Any) -> None:
    vars(layer)[name] = value


def _set_function(partial: Any, name: str, value: Any) -> None:
    # `func` is read-only, but a partial that is unpickled gets its state like this
    state = (value, partial.args, partial.keywords, vars(partial) or None)
    functools.partial.__setstate__(partial, state)  # type: ignore[attr-defined]


# type.__setattr__, because a metaclass may override it
_OF_CLASS = _Access(lambda owner, name: attributes_of(owner).get(name, ABSENT), type.__setattr__)
# not setattr, which nn.Module overrides
_OF_LAYER = _Access(lambda layer, name: vars(layer).get(name, ABSENT), _set_of_layer)
_OF_FUNCTION = _Access(getattr, setattr, is_public=False)
_OF_PARTIAL = _Access(getattr, _set_function, is_public=False)


class WeakAttribute(Slot):
    """An attribute of an object that is not kept alive.

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
