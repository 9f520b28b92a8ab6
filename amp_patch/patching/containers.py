"""`ContainerSearch`: finds functions in nested lists, tuples, sets and dicts, and in objects where nothing can replace
them.

Containers matter most to tensors that answer calls themselves: their `__torch_function__` is given the function that
the public name holds, and looks it up in one.
"""

import gc
import sys
import types
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, NamedTuple

from .exchanges import ExchangeList
from .patcher import Exchange
from .slots import Entry, Slot, WeakAttribute, namespace_of

_FIXED = frozenset({tuple, frozenset})
_LISTED = _FIXED | {list, set}
"""Types of containers, beside dicts, that are searched. Named tuples and the like cannot be made anew."""

_KEEPERS = frozenset({dict, tuple, list, set, frozenset})


class Unsearched(NamedTuple):
    """A value that may hold functions: a container, or an object of any other type.

    Attributes:
        prefix, name: name it in messages, as `prefix.name`.
        holder, key: its position: a class, dict or list, and a key. None: no position that can be written.
    """

    prefix: str
    name: str
    value: Any
    holder: Any = None
    key: Any = None


class ContainerSearch:
    """The second pass of a search: through the values that the first pass did not search.

    Args:
        exchanges: receives the exchanges.
    """

    def __init__(self, exchanges: ExchangeList, unsearched: Sequence[Unsearched]) -> None:
        self._exchanges = exchanges
        self._wanted = exchanges.wanted
        self._unsearched = unsearched
        self._holds_any = False
        self._exchanged: set[int] = set()  # ids of tuples and frozensets that are replaced by others

    def run(self) -> None:
        """Search the containers among the values."""
        contents = _contents_of([entry.value for entry in self._unsearched], self._exchanges.visited)
        self._holds_any = not self._wanted.isdisjoint(map(id, contents))
        if not self._holds_any:  # nearly always: this look at all of them at once is all it takes
            return
        visited = frozenset(self._exchanges.visited)  # not of this pass: a tuple may have several positions
        for entry in self._unsearched:
            if entry.holder is not None and self._holds_wanted(entry.value, visited):
                self._search(entry.value, entry.holder, entry.key)

    def find_unreplaced(self) -> list[str]:
        """Return the values that hold a function where it cannot be replaced, as `module.name (its class)`."""
        if not self._holds_any:
            return []
        searched = set(self._exchanges.visited)
        for module in list(sys.modules.values()):
            if issubclass(type(module), types.ModuleType):
                searched.add(id(namespace_of(module)))
        unreplaced = {}  # by the id of the value: the last of its names
        for entry in self._unsearched:
            if id(entry.value) not in self._exchanged and self._holds_wanted(entry.value, searched):
                unreplaced[id(entry.value)] = f"{entry.prefix}.{entry.name} ({type(entry.value).__name__})"
        return list(unreplaced.values())

    def _holds_wanted(self, value: Any, visited: Container[int]) -> bool:
        return not self._wanted.isdisjoint(map(id, _contents_of([value], visited)))

    def _search(self, container: Any, holder: Any, key: Any) -> None:
        """Search a container, and the containers in it. `holder` has it under `key`; None: in a tuple."""
        kind = type(container)
        if kind in _FIXED:
            self._replace_fixed(container, holder, key)
        is_dict = issubclass(kind, dict)
        if not (is_dict or kind in _LISTED) or not self._exchanges.is_first_visit(container):
            return
        if is_dict:
            self._exchanges.append_keys(container)
        members = list(dict.items(container)) if is_dict else list(enumerate(container))
        for index, member in members:
            is_wanted = id(member) in self._wanted
            if is_wanted and kind not in _FIXED:  # those in a tuple are replaced with it
                self._exchanges.append(Entry(container, member if kind is set else index), member)
                continue
            self._exchanges.append_partial(member)
            if kind in _FIXED:
                self._search(member, None, None)
            else:
                self._search(member, container, index)

    def _replace_fixed(self, container: Any, holder: Any, key: Any) -> None:
        """Exchange a tuple or frozenset for a new one that holds the replacements."""
        replaced, function = self._copy_with_replacements(container)
        if function is None or holder is None:
            return
        kind = type(holder)
        slot: Slot
        if kind is list or issubclass(kind, dict):
            slot = Entry(holder, key)
        elif issubclass(kind, type):
            slot = WeakAttribute(holder, key)
        else:  # a set
            return
        self._exchanges.exchanges.append((id(function), Exchange(slot, container, replaced, container)))
        self._exchanged.add(id(container))

    def _copy_with_replacements(self, container: Any) -> tuple[Any, Callable[..., Any] | None]:
        """Return a tuple or frozenset with replacements, and one of the functions that it held, or None."""
        members, function = [], None
        for member in container:
            replaced, held = member, None
            if id(member) in self._wanted:
                replaced, held = self._exchanges.replacements[id(member)], member
            elif type(member) in _FIXED:
                replaced, held = self._copy_with_replacements(member)
            members.append(replaced)
            function = held or function
        return (container if function is None else type(container)(members)), function


def _contents_of(values: Iterable[Any], visited: Container[int]) -> list[Any]:
    """Return the objects that the values refer to, directly or through up to two containers. Runs no code of theirs."""
    layer = gc.get_referents(*values)
    contents = [value for value in layer if id(value) not in visited]
    for _ in range(2):  # as deep as the tables of torchao and functorch nest
        layer = gc.get_referents(*[value for value in layer if type(value) in _KEEPERS and id(value) not in visited])
        contents += layer
    return contents
